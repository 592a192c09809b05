//! Room on the host's disk: told early, kept for the server's own writes, and defended against workspaces that fill it.
//!
//! ```text
//! free ≥ 2 × min_free_disk   enough
//! free < 2 × min_free_disk   low: said in log, events, health
//! free <     min_free_disk   full: nothing that needs room is begun (create, snapshot, write, edit), and workspaces that go on
//!                            writing are stopped
//! free <     a few MiB       whoever stops or removes something may have the ballast file's room for the database
//! ```
//!
//! Besides, sandboxes are looked after whose files outside `/workspace` have outgrown their limit, and whose disks have errors.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::{fs, io};

use emergent_host::copy::reserve_all;
use emergent_host::files::{create_private, remove_if_there};
use emergent_host::room::free_bytes;
use emergent_providers::DiskUse;
use emergent_wire::WorkspaceId;

use super::context::Context;
use super::error::{DiskShortage, Result, WorkspaceError};

/// A workspace that writes more than this between two looks fills a disk that is full.
const MUCH: u64 = 4 << 20;
/// The file that is removed so that the database has room.
const BALLAST: &str = "ballast";
/// Its size.
const BALLAST_BYTES: u64 = 32 << 20;
/// With less than this the database may fail to write.
const DATABASE_NEEDS: u64 = 16 << 20;
/// How full the host's disk is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Level {
    /// There is room.
    Enough,
    /// It is nearly full.
    Low,
    /// It is as full as it may be.
    Full,
}

/// Measures the host's disk, and refuses work that has no room.
pub(crate) struct DiskSpace {
    context: Arc<Context>,
    gauge: Gauge,
}

/// The thresholds, and the last measurements.
pub(super) struct Gauge {
    data_dir: PathBuf,
    min_free: u64,
    level: AtomicU8,
    /// What each workspace had written at the last look.
    written: Mutex<HashMap<WorkspaceId, u64>>,
}

/// The disk with the least room.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Scarcest {
    pub(super) directory: PathBuf,
    pub(super) free: u64,
}

impl Gauge {
    fn new(data_dir: &Path, min_free: u64) -> Self {
        let level = AtomicU8::new(Level::Enough as u8);
        Self { data_dir: data_dir.to_owned(), min_free, level, written: Mutex::default() }
    }

    /// The state of the disk for callers of any kind: a token of a workspace must not see a path of the host.
    pub(super) fn shortage(&self, scarcest: &Scarcest) -> DiskShortage {
        DiskShortage { free_bytes: scarcest.free, min_free_bytes: self.min_free }
    }

    /// The free bytes above those that are kept free.
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

    /// How full it was at the last look.
    fn last_level(&self) -> Level {
        match self.level.load(Ordering::Relaxed) {
            0 => Level::Enough,
            1 => Level::Low,
            _ => Level::Full,
        }
    }

    /// Takes a look in; gives the level before.
    pub(super) fn set_level(&self, level: Level) -> Level {
        let before = self.last_level();
        self.level.store(level as u8, Ordering::Relaxed);
        before
    }

    /// Puts the ballast back.
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

    /// The workspaces that have written much since the last look.
    pub(super) fn writers(&self, uses: &[DiskUse]) -> Vec<WorkspaceId> {
        let mut written = self.written.lock().unwrap_or_else(PoisonError::into_inner);
        let before =
            std::mem::replace(&mut *written, uses.iter().map(|one| (one.id, one.written_bytes)).collect());
        let grew = |one: &&DiskUse| {
            before.get(&one.id).is_some_and(|before| one.written_bytes.saturating_sub(*before) > MUCH)
        };
        uses.iter().filter(grew).map(|one| one.id).collect()
    }
}

fn has_no_room_for_database(data_dir: &Path) -> bool {
    free_bytes(data_dir).is_ok_and(|free| free < DATABASE_NEEDS)
}

/// Removes the ballast where the database, or a server that starts, could find the disk full.
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
        let gauge = Gauge::new(&settings.data_dir, settings.workspaces.min_free_disk.bytes());
        Arc::new(Self { context: Arc::clone(context), gauge })
    }

    pub(super) fn gauge(&self) -> &Gauge {
        &self.gauge
    }

    /// Removes the ballast where the database could find the disk full.
    pub(super) fn make_room_for_database(&self) {
        make_room_for_database(&self.gauge.data_dir);
    }

    /// Whether the database can't write for want of room.
    pub(super) fn has_no_room_for_database(&self) -> bool {
        has_no_room_for_database(&self.gauge.data_dir)
    }

    /// The disk with the least room of all that workspaces, snapshots and the database are on.
    pub(super) fn scarcest_disk(&self) -> Option<Scarcest> {
        let own = std::iter::once(self.gauge.data_dir.clone());
        let directories =
            own.chain(self.context.providers.iter().flat_map(|provider| provider.storage_directories()));
        let each = directories.filter_map(|directory| {
            let free = free_bytes(&directory).ok()?;
            Some(Scarcest { directory, free })
        });
        each.min_by_key(|one| one.free)
    }

    /// Refuses work that needs room on a host that has none.
    pub(crate) fn refuse_if_full(&self) -> Result<()> {
        self.refuse_without_room_for(0)
    }

    /// Refuses to write so many bytes, if the disk would be full then. A sandbox is not always told that the host had no room
    /// for a write: gVisor reports success for an fsync that failed.
    pub(crate) fn refuse_without_room_for(&self, bytes: u64) -> Result<()> {
        match self.scarcest_disk() {
            Some(scarcest) if self.gauge.level_of(scarcest.free.saturating_sub(bytes)) == Level::Full => {
                Err(WorkspaceError::HostDiskFull(self.gauge.shortage(&scarcest)))
            }
            _ => Ok(()),
        }
    }

    /// How full the host's disk is.
    pub(crate) fn level(&self) -> Level {
        self.scarcest_disk().map_or(Level::Enough, |scarcest| self.gauge.level_of(scarcest.free))
    }

    /// What the caller of a command should know when the disk is full.
    pub(super) fn note_for_commands(&self) -> Option<String> {
        (self.gauge.last_level() == Level::Full)
            .then(|| "the host's disk is full: what the command wrote may be lost".to_owned())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use super::*;

    #[test]
    fn levels_follow_what_is_kept_free() {
        let space = Gauge::new(Path::new("/"), 100);
        let levels = [0, 99, 100, 199, 200].map(|free| space.level_of(free));
        assert_eq!(levels, [Level::Full, Level::Full, Level::Low, Level::Low, Level::Enough]);
        assert_eq!(space.set_level(Level::Full), Level::Enough);
        assert_eq!(space.set_level(Level::Low), Level::Full);
        assert_eq!(space.last_level(), Level::Low);
    }

    #[test]
    fn only_those_that_go_on_writing_are_writers() {
        let space = Gauge::new(Path::new("/"), 100);
        let ids = [WorkspaceId::generate(), WorkspaceId::generate()];
        let uses = |first: u64, second: u64| {
            [(ids[0], first), (ids[1], second)].map(|(id, written_bytes)| DiskUse {
                id,
                written_bytes,
                fault: None,
            })
        };
        assert!(space.writers(&uses(1 << 30, 1 << 30)).is_empty(), "what they wrote before is not known");
        assert_eq!(space.writers(&uses(2 << 30, (1 << 30) + 100)), [ids[0]]);
        assert!(space.writers(&uses(2 << 30, 0)).is_empty(), "one was started again");
    }

    #[test]
    fn the_ballast_takes_its_bytes_and_is_private() {
        use std::os::unix::fs::MetadataExt;
        let directory = tempfile::tempdir().unwrap();
        let space = Gauge::new(directory.path(), 100);
        for _ in 0..2 {
            space.ensure_ballast().unwrap();
        }
        let file = fs::metadata(directory.path().join(BALLAST)).unwrap();
        assert!(file.blocks() * 512 >= BALLAST_BYTES);
        assert_eq!(file.mode() & 0o777, 0o600);
        make_room_for_database(directory.path());
        assert!(directory.path().join(BALLAST).exists(), "there is room");
    }
}
