//! Guards the host's disk in the background: tells changes of its level, keeps the ballast file, ends workspaces that fill a full
//! disk, and repairs sandboxes that have outgrown their limit or whose disks have errors. The levels are in `disk_space`.

use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use chrono::Utc;
use emergent_providers::{DiskFault, DiskUse, Sandbox, SharedProvider};
use emergent_store::WorkspaceRecord;
use emergent_wire::WorkspaceId;
use emergent_wire::event::{Event, EventKind};
use emergent_wire::workspace::WorkspaceStatus;
use futures_util::future::join_all;
use serde_json::json;

use super::context::Context;
use super::disk_space::{DiskSpace, Level, Scarcest};
use super::error::Result;
use super::lifecycle::Lifecycle;
use super::live::{Live, SandboxConnection};

/// The pause between two passes: short where the disk could be full soon.
const PAUSE: RangeInclusive<Duration> = Duration::from_millis(250)..=Duration::from_secs(2);
/// The bytes that a fast host writes in a second.
const BYTES_A_SECOND: u64 = 2 << 30;
/// The time for which a repair waits for another change of the workspace.
const LOCK_TIME: Duration = Duration::from_secs(5);

/// Guards the host's disk.
pub(crate) struct DiskGuard {
    context: Arc<Context>,
    disk_space: Arc<DiskSpace>,
    lifecycle: Arc<Lifecycle>,
}

impl DiskGuard {
    pub(super) fn new(
        context: &Arc<Context>,
        disk_space: &Arc<DiskSpace>,
        lifecycle: &Arc<Lifecycle>,
    ) -> Arc<Self> {
        Arc::new(Self {
            context: Arc::clone(context),
            disk_space: Arc::clone(disk_space),
            lifecycle: Arc::clone(lifecycle),
        })
    }

    /// Runs passes for ever.
    pub(crate) async fn run(self: Arc<Self>) {
        loop {
            let free = self.pass().await;
            let spare = self.disk_space.gauge().spare_bytes(free);
            #[allow(clippy::cast_precision_loss, reason = "a pause does not need every bit")]
            let pause = Duration::from_secs_f64(spare as f64 / BYTES_A_SECOND as f64);
            tokio::time::sleep(pause.clamp(*PAUSE.start(), *PAUSE.end())).await;
        }
    }

    /// One pass. Returns the free bytes of the disk with the least room.
    async fn pass(&self) -> u64 {
        let Some(scarcest) = self.disk_space.scarcest_disk() else {
            return u64::MAX;
        };
        let gauge = self.disk_space.gauge();
        let level = gauge.level_of(scarcest.free);
        self.tell_level(level, &scarcest);
        if level == Level::Enough
            && let Err(error) = gauge.ensure_ballast()
        {
            tracing::debug!(%error, "the ballast file can't be made");
        }
        let reads = self.context.providers.iter().map(|provider| async move {
            let found = provider.disk_usage(level == Level::Full).await;
            found.into_iter().map(|one| (provider, one)).collect::<Vec<_>>()
        });
        let found = join_all(reads).await.concat();
        let uses: Vec<DiskUse> = found.iter().map(|(_, one)| one.clone()).collect();
        let mut writers = gauge.writers(&uses);
        if level != Level::Full {
            writers.clear();
        }
        let reason = format!(
            "the host's disk is full and the workspace went on writing: {}",
            gauge.shortage(&scarcest)
        );
        // All at once: while one is stopped or repaired the others would go on writing.
        let stops = join_all(writers.iter().map(|id| self.stop_writer(*id, &reason)));
        let others = found.iter().filter(|(_, one)| !writers.contains(&one.id));
        let repairs = join_all(others.filter_map(|(provider, one)| {
            let fault = one.fault.filter(|fault| is_repairable(*fault, level))?;
            Some(self.repair(provider, one.id, fault))
        }));
        tokio::join!(stops, repairs);
        scarcest.free
    }

    fn tell_level(&self, level: Level, scarcest: &Scarcest) {
        #[allow(clippy::cast_precision_loss, reason = "a gauge does not need every bit")]
        metrics::gauge!("emergent_host_disk_free_bytes").set(scarcest.free as f64);
        let gauge = self.disk_space.gauge();
        if gauge.set_level(level) == level {
            return;
        }
        let shortage = gauge.shortage(scarcest);
        let (kind, message) = match level {
            Level::Enough => {
                (EventKind::HostDiskNormal, format!("the host's disk has room again: {shortage}"))
            }
            Level::Low => (EventKind::HostDiskLow, format!("the host's disk is nearly full: {shortage}")),
            Level::Full => (EventKind::HostDiskFull, format!("the host's disk is full: {shortage}")),
        };
        if level == Level::Enough {
            tracing::info!(directory = %scarcest.directory.display(), "{message}");
        } else {
            tracing::warn!(directory = %scarcest.directory.display(), "{message}");
        }
        self.context.events.tell(Event { at: Utc::now(), kind, workspace_id: None, provider: None, message });
    }

    /// Stops a workspace that fills a full disk.
    async fn stop_writer(&self, id: WorkspaceId, reason: &str) {
        tracing::warn!(workspace = %id, "the host's disk is full: a workspace that writes is stopped");
        metrics::counter!("emergent_disk_full_stops_total").increment(1);
        self.context.live(id).note_end(reason);
        let Ok(record) = self.context.store.workspace_record(id).await else {
            return;
        };
        let Ok(provider) = self.context.provider_of(&record) else {
            return;
        };
        // Before the row is written: other workspaces lose the bytes that it writes meanwhile.
        if let Err(error) = provider.kill(id).await {
            tracing::warn!(workspace = %id, %error, "a workspace that fills the disk can't be killed");
        }
        self.disk_space.make_room_for_database();
        let note = json!({ "at": Utc::now(), "reason": reason });
        self.context.note_in_metadata(id, "last_stop", note).await;
        let stopped = async {
            let from = [WorkspaceStatus::Ready, WorkspaceStatus::Error];
            self.context.store.transition(id, &from, WorkspaceStatus::Stopping).await?;
            self.lifecycle.finish_stop(id).await.map(drop)
        };
        if let Err(error) = stopped.await {
            tracing::warn!(workspace = %id, %error, "a workspace that fills the disk was killed, but its row does not say so");
        }
    }

    /// Starts a sandbox again without its fault.
    async fn repair(&self, provider: &SharedProvider, id: WorkspaceId, fault: DiskFault) {
        let live = self.context.live(id);
        let Ok(_changing) = tokio::time::timeout(LOCK_TIME, live.changing.lock()).await else {
            return;
        };
        let Ok(record) = self.context.store.workspace_record(id).await else {
            return;
        };
        if !matches!(record.workspace.status, WorkspaceStatus::Ready | WorkspaceStatus::Error)
            || self.context.take_over(&record).await.is_err()
        {
            return;
        }
        let reason = reason_for_repair(fault);
        tracing::warn!(workspace = %id, reason, "a sandbox is started again");
        metrics::counter!("emergent_sandbox_restarts_total").increment(1);
        match self.start_without_fault(provider, &record, fault, &live, &reason).await {
            Ok(()) => self.context.note_restart(id, reason).await,
            Err(error) => {
                let message = format!("{reason}; it can't be started: {error}");
                let _ = self.context.store.set_error(id, &message).await;
                self.context.events.workspace(EventKind::WorkspaceError, id, message);
            }
        }
        let _ = self.context.store.release(id).await;
    }

    async fn start_without_fault(
        &self,
        provider: &SharedProvider,
        record: &WorkspaceRecord,
        fault: DiskFault,
        live: &Live,
        reason: &str,
    ) -> Result<()> {
        let id = record.workspace.id;
        live.note_end(reason);
        live.close_to_calls();
        let spec = self.context.spec_of(record).await?;
        provider.kill(id).await?;
        let sandbox = match fault {
            DiskFault::RootLayerTooLarge { .. } => provider.recreate(&spec).await?,
            DiskFault::FileSystemErrors => provider.resume(&spec).await?,
        };
        tell_if_mended(&self.context, id, &sandbox).await;
        live.set_connection(SandboxConnection { channel: sandbox.channel, provider: provider.name() });
        Ok(())
    }
}

/// A disk with errors can be read while the host's disk is full, and its repair needs room.
fn is_repairable(fault: DiskFault, level: Level) -> bool {
    !(fault == DiskFault::FileSystemErrors && level == Level::Full)
}

fn reason_for_repair(fault: DiskFault) -> String {
    match fault {
        DiskFault::RootLayerTooLarge { limit } => format!(
            "its files outside /workspace took more than {} MiB, as much as they may: the sandbox was started again without \
             them; what is in /workspace is kept",
            limit >> 20
        ),
        DiskFault::FileSystemErrors => {
            "its disk had errors: the sandbox was started again after they were mended".to_owned()
        }
    }
}

/// Tells that a disk was mended before its sandbox started.
pub(super) async fn tell_if_mended(context: &Context, id: WorkspaceId, sandbox: &Sandbox) {
    if !sandbox.disk_was_repaired {
        return;
    }
    let message =
        "its disk had errors, which were mended: look for damaged files and for a directory lost+found";
    tracing::warn!(workspace = %id, "{message}");
    context.note_in_metadata(id, "disk_mended", json!({ "at": Utc::now(), "result": message })).await;
    context.events.workspace(EventKind::DiskMended, id, message);
}
