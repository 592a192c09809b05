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
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use chrono::Utc;
use emergent_host::copy::reserve_all;
use emergent_host::files::{create_private, remove_if_there};
use emergent_host::room::free_bytes;
use emergent_providers::{DiskFault, DiskUse, Sandbox, SharedProvider};
use emergent_wire::event::{Event, EventKind};
use emergent_wire::workspace::WorkspaceStatus;
use emergent_wire::{ErrorCode, ErrorDetail, WorkspaceId};
use futures_util::future::join_all;
use serde_json::{Map, json};

use super::live::SandboxConnection;
use super::{Workspaces, error_of};

/// The pause between two looks: short where the disk could be full soon.
const PAUSE: std::ops::RangeInclusive<Duration> = Duration::from_millis(250)..=Duration::from_secs(2);
/// As much as a host writes in a second.
const BYTES_A_SECOND: u64 = 2 << 30;
/// A workspace that writes more than this between two looks fills a disk that is full.
const MUCH: u64 = 4 << 20;
/// The file that is removed so that the database has room.
const BALLAST: &str = "ballast";
/// Its size.
const BALLAST_BYTES: u64 = 32 << 20;
/// With less than this the database may fail to write.
const DATABASE_NEEDS: u64 = 16 << 20;
/// How long somebody else may be changing a workspace that is to be stopped.
const LOCK_TIME: Duration = Duration::from_secs(5);

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

/// What is known of the host's disk.
pub(crate) struct DiskSpace {
    data_dir: PathBuf,
    min_free: u64,
    level: AtomicU8,
    /// What each workspace had written at the last look.
    written: Mutex<HashMap<WorkspaceId, u64>>,
}

/// The disk with the least room.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Scarcest {
    directory: PathBuf,
    free: u64,
}

impl Scarcest {
    /// For callers of any kind: a path of the host is nothing that a workspace's token should show.
    fn says(&self, min_free: u64) -> String {
        format!(
            "{} MiB are free, and {} MiB are kept free (workspaces.min_free_disk)",
            self.free >> 20,
            min_free >> 20
        )
    }
}

impl DiskSpace {
    pub(super) fn new(data_dir: &Path, min_free: u64) -> Self {
        let level = AtomicU8::new(Level::Enough as u8);
        Self { data_dir: data_dir.to_owned(), min_free, level, written: Mutex::default() }
    }

    fn level_of(&self, free: u64) -> Level {
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
    fn note(&self, level: Level) -> Level {
        let before = self.last_level();
        self.level.store(level as u8, Ordering::Relaxed);
        before
    }

    /// Removes the ballast where the database could find the disk full.
    pub(super) fn make_room_for_database(&self) {
        make_room_for_database(&self.data_dir);
    }

    /// Whether the database can't write for want of room.
    pub(super) fn has_no_room_for_database(&self) -> bool {
        has_no_room_for_database(&self.data_dir)
    }

    /// Puts the ballast back.
    fn ensure_ballast(&self) -> io::Result<()> {
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
    fn writers(&self, uses: &[DiskUse]) -> Vec<WorkspaceId> {
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

impl Workspaces {
    /// The disk with the least room of all that workspaces, snapshots and the database are on.
    fn scarcest_disk(&self) -> Option<Scarcest> {
        let own = std::iter::once(self.disk_space.data_dir.clone());
        let directories = own.chain(self.providers().iter().flat_map(|provider| provider.storage()));
        let each = directories.filter_map(|directory| {
            let free = free_bytes(&directory).ok()?;
            Some(Scarcest { directory, free })
        });
        each.min_by_key(|one| one.free)
    }

    /// Refuses what needs room on a host that has none.
    pub(crate) fn refuse_if_disk_is_full(&self) -> Result<(), ErrorDetail> {
        self.refuse_without_room_for(0)
    }

    /// Refuses what takes so many bytes, if the disk would be full then. A sandbox does not always hear that the host had no room
    /// for what it has written: gVisor reports success for an fsync that failed.
    pub(crate) fn refuse_without_room_for(&self, bytes: u64) -> Result<(), ErrorDetail> {
        match self.scarcest_disk() {
            Some(scarcest)
                if self.disk_space.level_of(scarcest.free.saturating_sub(bytes)) == Level::Full =>
            {
                let message = format!(
                    "the host's disk is full: {}. Nothing was changed; destroy workspaces or snapshots that are not needed, then \
                     retry",
                    scarcest.says(self.disk_space.min_free)
                );
                Err(ErrorDetail::new(ErrorCode::HostDiskFull, message))
            }
            _ => Ok(()),
        }
    }

    /// How full the host's disk is.
    pub(crate) fn disk_level(&self) -> Level {
        self.scarcest_disk().map_or(Level::Enough, |scarcest| self.disk_space.level_of(scarcest.free))
    }

    /// What the caller of a command should know when the disk is full.
    pub(super) fn disk_note(&self) -> Option<String> {
        (self.disk_space.last_level() == Level::Full)
            .then(|| "the host's disk is full: what the command wrote may be lost".to_owned())
    }

    /// Looks after the host's disk for ever.
    pub(crate) async fn guard_disk_space(self: Arc<Self>) {
        loop {
            let free = self.look_at_disk_space().await;
            let spare = free.saturating_sub(self.disk_space.min_free);
            #[allow(clippy::cast_precision_loss, reason = "a pause does not need every bit")]
            let pause = Duration::from_secs_f64(spare as f64 / BYTES_A_SECOND as f64);
            tokio::time::sleep(pause.clamp(*PAUSE.start(), *PAUSE.end())).await;
        }
    }

    async fn look_at_disk_space(self: &Arc<Self>) -> u64 {
        let Some(scarcest) = self.scarcest_disk() else {
            return u64::MAX;
        };
        let level = self.disk_space.level_of(scarcest.free);
        self.tell_level(level, &scarcest);
        if level == Level::Enough
            && let Err(error) = self.disk_space.ensure_ballast()
        {
            tracing::debug!(%error, "the ballast file can't be made");
        }
        let looks = self.providers().iter().map(|provider| async move {
            let found = provider.look_at_disks(level == Level::Full).await;
            found.into_iter().map(|one| (provider, one)).collect::<Vec<_>>()
        });
        let found = join_all(looks).await.concat();
        let uses: Vec<DiskUse> = found.iter().map(|(_, one)| one.clone()).collect();
        let mut writers = self.disk_space.writers(&uses);
        if level != Level::Full {
            writers.clear();
        }
        let why = format!(
            "the host's disk is full and the workspace went on writing: {}",
            scarcest.says(self.disk_space.min_free)
        );
        // All at once: while one is stopped or started again the others would go on writing.
        let stops = join_all(writers.iter().map(|id| self.stop_writer(*id, &why)));
        let others = found.iter().filter(|(_, one)| !writers.contains(&one.id));
        let mends = join_all(others.map(|(provider, one)| self.mend(provider, one, level)));
        tokio::join!(stops, mends);
        scarcest.free
    }

    fn tell_level(&self, level: Level, scarcest: &Scarcest) {
        #[allow(clippy::cast_precision_loss, reason = "a gauge does not need every bit")]
        metrics::gauge!("emergent_host_disk_free_bytes").set(scarcest.free as f64);
        let before = self.disk_space.note(level);
        if level == before {
            return;
        }
        let text = scarcest.says(self.disk_space.min_free);
        let (kind, message) = match level {
            Level::Enough => (EventKind::HostDiskNormal, format!("the host's disk has room again: {text}")),
            Level::Low => (EventKind::HostDiskLow, format!("the host's disk is nearly full: {text}")),
            Level::Full => (EventKind::HostDiskFull, format!("the host's disk is full: {text}")),
        };
        if level == Level::Enough {
            tracing::info!(directory = %scarcest.directory.display(), "{message}");
        } else {
            tracing::warn!(directory = %scarcest.directory.display(), "{message}");
        }
        self.events.tell(Event { at: Utc::now(), kind, workspace_id: None, provider: None, message });
    }

    /// Stops a workspace that fills a full disk.
    async fn stop_writer(self: &Arc<Self>, id: WorkspaceId, why: &str) {
        tracing::warn!(workspace = %id, "the host's disk is full: a workspace that writes is stopped");
        metrics::counter!("emergent_disk_full_stops_total").increment(1);
        let live = self.live(id);
        live.note_end(why);
        let Ok(record) = self.store.workspace_record(id).await else {
            return;
        };
        let Ok(provider) = self.provider_of(&record) else {
            return;
        };
        // At once: what it writes meanwhile is lost to everybody.
        if let Err(error) = provider.kill(id).await {
            tracing::warn!(workspace = %id, %error, "a workspace that fills the disk can't be ended");
        }
        self.disk_space.make_room_for_database();
        let note = json!({ "at": Utc::now(), "reason": why });
        let _ = self.store.merge_metadata(id, Map::from_iter([("last_stop".to_owned(), note)])).await;
        let stopped = async {
            let all = [WorkspaceStatus::Ready, WorkspaceStatus::Error];
            self.store.transition(id, &all, WorkspaceStatus::Stopping).await.map_err(error_of)?;
            self.finish_stop(id).await.map(drop)
        };
        if let Err(error) = stopped.await {
            tracing::warn!(workspace = %id, %error, "a workspace that fills the disk was ended, but is not stopped");
        }
    }

    /// Starts a sandbox again that can't go on as it is.
    async fn mend(self: &Arc<Self>, provider: &SharedProvider, found: &DiskUse, level: Level) {
        let (id, fault) = match found.fault {
            None => return,
            // Mended once there is room: until then it can be read.
            Some(DiskFault::Errors) if level == Level::Full => return,
            Some(fault) => (found.id, fault),
        };
        let why = match fault {
            DiskFault::TooMuchOutside { limit } => format!(
                "its files outside /workspace took more than {} MiB, as much as they may: the sandbox was started again without \
                 them; what is in /workspace is kept",
                limit >> 20
            ),
            DiskFault::Errors => {
                "its disk had errors: the sandbox was started again after they were mended".to_owned()
            }
        };
        let live = self.live(id);
        let Ok(_changing) = tokio::time::timeout(LOCK_TIME, live.changing.lock()).await else {
            return;
        };
        let Ok(record) = self.store.workspace_record(id).await else {
            return;
        };
        if !matches!(record.workspace.status, WorkspaceStatus::Ready | WorkspaceStatus::Error)
            || self.take_over(&record).await.is_err()
        {
            return;
        }
        tracing::warn!(workspace = %id, why, "a sandbox is started again");
        metrics::counter!("emergent_sandbox_restarts_total").increment(1);
        live.note_end(&why);
        live.close_to_calls();
        let renewed = async {
            let spec = self.spec_of(&record).await?;
            provider.kill(id).await?;
            let sandbox = match fault {
                DiskFault::TooMuchOutside { .. } => provider.renew(&spec).await?,
                DiskFault::Errors => provider.resume(&spec).await?,
            };
            Ok::<Sandbox, ErrorDetail>(sandbox)
        };
        match renewed.await {
            Ok(sandbox) => {
                self.tell_if_mended(id, &sandbox).await;
                live.set_connection(SandboxConnection {
                    channel: sandbox.channel,
                    provider: provider.name(),
                });
                let note = json!({ "at": Utc::now(), "reason": why });
                let fields = Map::from_iter([("last_restart".to_owned(), note)]);
                let _ = self.store.merge_metadata(id, fields).await;
                self.events.workspace(EventKind::WorkspaceRestarted, id, why);
            }
            Err(error) => {
                let message = format!("{why}; it can't be started: {}", error.message);
                let _ = self.store.set_error(id, &message).await;
                self.events.workspace(EventKind::WorkspaceError, id, message);
            }
        }
        let _ = self.store.release(id).await;
    }

    /// Tells that a disk was mended before its sandbox started.
    pub(super) async fn tell_if_mended(&self, id: WorkspaceId, sandbox: &Sandbox) {
        if !sandbox.disk_was_mended {
            return;
        }
        let message =
            "its disk had errors, which were mended: look for damaged files and for a directory lost+found";
        tracing::warn!(workspace = %id, "{message}");
        let note = json!({ "at": Utc::now(), "result": message });
        let _ = self.store.merge_metadata(id, Map::from_iter([("disk_mended".to_owned(), note)])).await;
        self.events.workspace(EventKind::DiskMended, id, message);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use super::*;

    #[test]
    fn levels_follow_what_is_kept_free() {
        let space = DiskSpace::new(Path::new("/"), 100);
        let levels = [0, 99, 100, 199, 200].map(|free| space.level_of(free));
        assert_eq!(levels, [Level::Full, Level::Full, Level::Low, Level::Low, Level::Enough]);
        assert_eq!(space.note(Level::Full), Level::Enough);
        assert_eq!(space.note(Level::Low), Level::Full);
        assert_eq!(space.last_level(), Level::Low);
    }

    #[test]
    fn only_those_that_go_on_writing_are_writers() {
        let space = DiskSpace::new(Path::new("/"), 100);
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
        let space = DiskSpace::new(directory.path(), 100);
        for _ in 0..2 {
            space.ensure_ballast().unwrap();
        }
        let file = fs::metadata(directory.path().join(BALLAST)).unwrap();
        assert!(file.blocks() * 512 >= BALLAST_BYTES);
        assert_eq!(file.mode() & 0o777, 0o600);
        space.make_room_for_database();
        assert!(directory.path().join(BALLAST).exists(), "there is room");
    }
}
