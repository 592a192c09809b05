//! Free space on the host's disk. A reserve is kept for the server's own writes.
//!
//! ```text
//! free ≥ 2 × min_free_disk   enough
//! free < 2 × min_free_disk   low: reported in log, events, health
//! free <     min_free_disk   full: work that needs space is refused (create, snapshot, write, edit), and workspaces that go on
//!                            writing are stopped
//! free <     a few MiB       a stop or a removal deletes the ballast file, so that the database can write
//! ```

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::{fs, io};

use emergent_host::copy::reserve_all;
use emergent_host::files::{create_private, remove_if_there};
use emergent_host::room::free_bytes;
use emergent_providers::DiskUse;
use emergent_wire::WorkspaceId;
use parking_lot::Mutex;

use super::context::Context;
use super::error::{DiskShortage, Result, WorkspaceError};

/// A workspace that writes more than this between two passes is stopped when the disk is full.
const MAX_WRITTEN_BYTES: u64 = 4 << 20;
/// The file that is deleted to give the database space.
const BALLAST: &str = "ballast";
/// Its size.
const BALLAST_BYTES: u64 = 32 << 20;
/// With less free space than this the database may fail to write.
const DATABASE_BYTES: u64 = 16 << 20;

/// The fill level of the host's disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Level {
    Enough,
    /// Nearly full.
    Low,
    /// Less than the reserve is free.
    Full,
}

/// Measures the host's disk, and refuses work that has no space.
pub(crate) struct DiskSpace {
    context: Arc<Context>,
    gauge: DiskGauge,
}

/// The thresholds, and the last measurements.
pub(super) struct DiskGauge {
    data_dir: PathBuf,
    min_free: u64,
    level: AtomicU8,
    /// The bytes that each workspace had written at the last pass.
    written: Mutex<HashMap<WorkspaceId, u64>>,
}

/// The free bytes of the disk that has this directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FreeSpace {
    pub(super) directory: PathBuf,
    pub(super) bytes: u64,
}

impl DiskGauge {
    fn new(data_dir: &Path, min_free: u64) -> Self {
        let level = AtomicU8::new(Level::Enough as u8);
        Self { data_dir: data_dir.to_owned(), min_free, level, written: Mutex::default() }
    }

    /// The shortage for callers of any kind. It has no path of the host, which a token of a workspace must not see.
    pub(super) fn shortage(&self, free: &FreeSpace) -> DiskShortage {
        DiskShortage { free_bytes: free.bytes, min_free_bytes: self.min_free }
    }

    /// The free bytes above the reserve.
    pub(super) fn spare_bytes(&self, free: u64) -> u64 {
        free.saturating_sub(self.min_free)
    }

    pub(super) fn level_of(&self, free: u64) -> Level {
        if free < self.min_free {
            Level::Full
        } else if free < self.min_free.saturating_mul(2) {
            Level::Low
        } else {
            Level::Enough
        }
    }

    /// The level at the last pass.
    fn last_level(&self) -> Level {
        match self.level.load(Ordering::Relaxed) {
            0 => Level::Enough,
            1 => Level::Low,
            _ => Level::Full,
        }
    }

    /// Sets the level. Returns the one before.
    pub(super) fn set_level(&self, level: Level) -> Level {
        let before = self.last_level();
        self.level.store(level as u8, Ordering::Relaxed);
        before
    }

    /// Creates the ballast file, if it does not exist.
    pub(super) fn ensure_ballast(&self) -> io::Result<()> {
        let path = self.data_dir.join(BALLAST);
        if path.exists() {
            return Ok(());
        }
        let made = create_private(&path).and_then(|file| reserve_all(&file, BALLAST_BYTES));
        if made.is_err() {
            let _ = fs::remove_file(&path);
        }
        made
    }

    /// The workspaces that have written more than [`MAX_WRITTEN_BYTES`] since the last pass.
    pub(super) fn writers(&self, uses: &[DiskUse]) -> Vec<WorkspaceId> {
        let mut written = self.written.lock();
        let before =
            std::mem::replace(&mut *written, uses.iter().map(|one| (one.id, one.written_bytes)).collect());
        let grew = |one: &&DiskUse| {
            before
                .get(&one.id)
                .is_some_and(|before| one.written_bytes.saturating_sub(*before) > MAX_WRITTEN_BYTES)
        };
        uses.iter().filter(grew).map(|one| one.id).collect()
    }
}

fn has_no_room_for_database(data_dir: &Path) -> bool {
    free_bytes(data_dir).is_ok_and(|free| free < DATABASE_BYTES)
}

/// Deletes the ballast file when the database may have no space to write.
pub(crate) fn make_room_for_database(data_dir: &Path) {
    let ballast = data_dir.join(BALLAST);
    if !has_no_room_for_database(data_dir) || !ballast.exists() {
        return;
    }
    match remove_if_there(&ballast) {
        Ok(()) => {
            tracing::warn!("the disk is full: the ballast file was removed, so that the database can write");
        }
        Err(error) => tracing::error!(%error, "the disk is full, and the ballast file can't be removed"),
    }
}

impl DiskSpace {
    pub(super) fn new(context: &Arc<Context>) -> Arc<Self> {
        let settings = &context.settings;
        let gauge = DiskGauge::new(&settings.data_dir, settings.workspaces.min_free_disk.bytes());
        Arc::new(Self { context: Arc::clone(context), gauge })
    }

    pub(super) fn gauge(&self) -> &DiskGauge {
        &self.gauge
    }

    /// Deletes the ballast file when the database may have no space to write.
    pub(super) fn make_room_for_database(&self) {
        make_room_for_database(&self.gauge.data_dir);
    }

    /// Whether the database may have no space to write.
    pub(super) fn has_no_room_for_database(&self) -> bool {
        has_no_room_for_database(&self.gauge.data_dir)
    }

    /// The free space of the fullest disk among those of workspaces, snapshots and the database.
    pub(super) fn least_free_space(&self) -> Option<FreeSpace> {
        let own = std::iter::once(self.gauge.data_dir.clone());
        let directories =
            own.chain(self.context.providers.iter().flat_map(|provider| provider.storage_directories()));
        let each = directories.filter_map(|directory| {
            let bytes = free_bytes(&directory).ok()?;
            Some(FreeSpace { directory, bytes })
        });
        each.min_by_key(|free| free.bytes)
    }

    /// Fails if the host's disk is full.
    pub(crate) fn refuse_if_full(&self) -> Result<()> {
        self.refuse_without_room_for(0)
    }

    /// Fails if the disk would be full after so many more bytes. The server checks this, because a sandbox does not always notice a
    /// write that failed on the host: gVisor reports success for an fsync that failed.
    pub(crate) fn refuse_without_room_for(&self, bytes: u64) -> Result<()> {
        match self.least_free_space() {
            Some(least) if self.gauge.level_of(least.bytes.saturating_sub(bytes)) == Level::Full => {
                Err(WorkspaceError::HostDiskFull(self.gauge.shortage(&least)))
            }
            _ => Ok(()),
        }
    }

    /// The present level.
    pub(crate) fn level(&self) -> Level {
        self.least_free_space().map_or(Level::Enough, |least| self.gauge.level_of(least.bytes))
    }

    /// The note for answers of commands while the disk is full.
    pub(super) fn note_for_commands(&self) -> Option<String> {
        (self.gauge.last_level() == Level::Full)
            .then(|| "the host's disk is full: the command's writes may be lost".to_owned())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use super::*;

    #[test]
    fn levels_depend_on_the_reserve() {
        let space = DiskGauge::new(Path::new("/"), 100);
        let levels = [0, 99, 100, 199, 200].map(|free| space.level_of(free));
        assert_eq!(levels, [Level::Full, Level::Full, Level::Low, Level::Low, Level::Enough]);
        assert_eq!(space.set_level(Level::Full), Level::Enough);
        assert_eq!(space.set_level(Level::Low), Level::Full);
        assert_eq!(space.last_level(), Level::Low);
    }

    #[test]
    fn writers_are_workspaces_that_wrote_since_the_last_pass() {
        let space = DiskGauge::new(Path::new("/"), 100);
        let ids = [WorkspaceId::generate(), WorkspaceId::generate()];
        let uses = |first: u64, second: u64| {
            [(ids[0], first), (ids[1], second)].map(|(id, written_bytes)| DiskUse {
                id,
                written_bytes,
                fault: None,
            })
        };
        assert!(space.writers(&uses(1 << 30, 1 << 30)).is_empty(), "earlier writes are not known");
        assert_eq!(space.writers(&uses(2 << 30, (1 << 30) + 100)), [ids[0]]);
        assert!(space.writers(&uses(2 << 30, 0)).is_empty(), "the count of a restarted one begins at 0");
    }

    #[test]
    fn the_ballast_file_has_its_size_and_is_private() {
        use std::os::unix::fs::MetadataExt;
        let directory = tempfile::tempdir().unwrap();
        let space = DiskGauge::new(directory.path(), 100);
        for _ in 0..2 {
            space.ensure_ballast().unwrap();
        }
        let file = fs::metadata(directory.path().join(BALLAST)).unwrap();
        assert!(file.blocks() * 512 >= BALLAST_BYTES);
        assert_eq!(file.mode() & 0o777, 0o600);
        make_room_for_database(directory.path());
        assert!(directory.path().join(BALLAST).exists(), "the disk has free space");
    }
}
