//! Watches the host's disk in the background: reports changes of its level, keeps the ballast file, stops workspaces that write to a
//! full disk, and restarts sandboxes whose files exceed their limit or whose disks have errors. `disk_space` defines the levels.

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
use super::disk_space::{DiskSpace, FreeSpace, Level};
use super::error::{Result, WorkspaceError};
use super::lifecycle::Lifecycle;
use super::live::{LiveWorkspace, SandboxConnection};

/// The range of pauses between two passes. They are short when the disk could be full soon.
const PAUSE: RangeInclusive<Duration> = Duration::from_millis(250)..=Duration::from_secs(2);
/// The bytes that a fast host can write in a second.
const BYTES_PER_SECOND: u64 = 2 << 30;
/// The time for which a repair waits for another change of the workspace.
const LOCK_TIMEOUT: Duration = Duration::from_secs(5);

/// Watches the host's disk.
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

    /// Runs one pass. Returns the pause before the next one.
    pub(crate) async fn run(&self) -> Duration {
        let free = self.pass().await;
        let spare = self.disk_space.gauge().spare_bytes(free);
        #[allow(clippy::cast_precision_loss, reason = "a pause does not need every bit")]
        let pause = Duration::from_secs_f64(spare as f64 / BYTES_PER_SECOND as f64);
        pause.clamp(*PAUSE.start(), *PAUSE.end())
    }

    /// Returns the free bytes of the disk with the least free space.
    async fn pass(&self) -> u64 {
        let Some(least) = self.disk_space.least_free_space() else {
            return u64::MAX;
        };
        let gauge = self.disk_space.gauge();
        let level = gauge.level_of(least.bytes);
        self.report_level(level, &least);
        if level == Level::Enough
            && let Err(error) = gauge.ensure_ballast()
        {
            tracing::debug!(%error, "the ballast file can't be created");
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
        let reason =
            format!("the host's disk is full and the workspace went on writing: {}", gauge.shortage(&least));
        // All at the same time: while one is stopped, the others would go on writing.
        let stops = join_all(writers.iter().map(|id| self.stop_writer(*id, &reason)));
        let others = found.iter().filter(|(_, one)| !writers.contains(&one.id));
        let repairs = join_all(others.filter_map(|(provider, one)| {
            let fault = one.fault.filter(|fault| is_repairable(*fault, level))?;
            Some(self.repair(provider, one.id, fault))
        }));
        tokio::join!(stops, repairs);
        least.bytes
    }

    fn report_level(&self, level: Level, least: &FreeSpace) {
        #[allow(clippy::cast_precision_loss, reason = "a gauge does not need every bit")]
        metrics::gauge!("emergent_host_disk_free_bytes").set(least.bytes as f64);
        let gauge = self.disk_space.gauge();
        if gauge.set_level(level) == level {
            return;
        }
        let shortage = gauge.shortage(least);
        let (kind, message) = match level {
            Level::Enough => {
                (EventKind::HostDiskNormal, format!("the host's disk has room again: {shortage}"))
            }
            Level::Low => (EventKind::HostDiskLow, format!("the host's disk is nearly full: {shortage}")),
            Level::Full => (EventKind::HostDiskFull, format!("the host's disk is full: {shortage}")),
        };
        if level == Level::Enough {
            tracing::info!(directory = %least.directory.display(), "{message}");
        } else {
            tracing::warn!(directory = %least.directory.display(), "{message}");
        }
        self.context.events.publish(Event {
            at: Utc::now(),
            kind,
            workspace_id: None,
            provider: None,
            message,
        });
    }

    /// Stops a workspace that writes to a full disk.
    async fn stop_writer(&self, id: WorkspaceId, reason: &str) {
        tracing::warn!(workspace = %id, "the host's disk is full: a workspace that writes is stopped");
        metrics::counter!("emergent_disk_full_stops_total").increment(1);
        self.context.live(id).note_end(reason);
        if let Err(error) = self.kill_and_stop(id, reason).await {
            tracing::warn!(workspace = %id, %error, "a workspace that writes to a full disk could not be stopped");
        }
    }

    async fn kill_and_stop(&self, id: WorkspaceId, reason: &str) -> Result<()> {
        let record = self.context.store.workspace_record(id).await?;
        // The sandbox is killed before the row is changed, because meanwhile its writes take the space of other workspaces.
        if let Err(error) = self.context.provider_of(&record)?.kill(id).await {
            tracing::warn!(workspace = %id, %error, "a workspace that writes to a full disk can't be killed");
        }
        self.disk_space.make_room_for_database();
        let note = json!({ "at": Utc::now(), "reason": reason });
        self.context.note_in_metadata(id, "last_stop", note).await;
        let from = [WorkspaceStatus::Ready, WorkspaceStatus::Error];
        self.context.store.transition(id, &from, WorkspaceStatus::Stopping).await?;
        self.lifecycle.finish_stop(id).await.map(drop)
    }

    /// Repairs the disk of a sandbox, if this server may change the workspace now. Failures are logged, and the next pass tries again.
    async fn repair(&self, provider: &SharedProvider, id: WorkspaceId, fault: DiskFault) {
        let live = self.context.live(id);
        let Ok(_changing) = tokio::time::timeout(LOCK_TIMEOUT, live.change_lock.lock()).await else {
            return;
        };
        match self.take_over_running(id).await {
            Ok(Some(record)) => self.restart_without_fault(provider, &record, fault, &live).await,
            Ok(None) | Err(WorkspaceError::ChangedElsewhere(_)) => {}
            Err(error) => {
                tracing::warn!(workspace = %id, %error, "a disk can't be repaired now; it will be tried again")
            }
        }
    }

    /// Takes a workspace over whose sandbox may run. None if it is stopped or being changed.
    async fn take_over_running(&self, id: WorkspaceId) -> Result<Option<WorkspaceRecord>> {
        let record = self.context.store.workspace_record(id).await?;
        if !matches!(record.workspace.status, WorkspaceStatus::Ready | WorkspaceStatus::Error) {
            return Ok(None);
        }
        self.context.take_over(&record).await?;
        Ok(Some(record))
    }

    async fn restart_without_fault(
        &self,
        provider: &SharedProvider,
        record: &WorkspaceRecord,
        fault: DiskFault,
        live: &LiveWorkspace,
    ) {
        let (id, reason) = (record.workspace.id, reason_for_repair(fault));
        tracing::warn!(workspace = %id, reason, "a sandbox is restarted");
        metrics::counter!("emergent_sandbox_restarts_total").increment(1);
        match self.restart(provider, record, fault, live, &reason).await {
            Ok(()) => self.context.note_restart(id, reason).await,
            Err(error) => {
                self.context.report_error(id, format!("{reason}; it can't be started: {error}")).await;
            }
        }
        self.context.release(id).await;
    }

    async fn restart(
        &self,
        provider: &SharedProvider,
        record: &WorkspaceRecord,
        fault: DiskFault,
        live: &LiveWorkspace,
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
        report_disk_repair(&self.context, id, &sandbox).await;
        live.set_connection(SandboxConnection { channel: sandbox.channel, provider: provider.name() });
        Ok(())
    }
}

/// Whether a fault can be repaired now. The repair of a file system needs free space, and until then its files can be read.
fn is_repairable(fault: DiskFault, level: Level) -> bool {
    !(fault == DiskFault::FileSystemErrors && level == Level::Full)
}

fn reason_for_repair(fault: DiskFault) -> String {
    match fault {
        DiskFault::RootLayerTooLarge { limit } => format!(
            "its files outside /workspace took more than {} MiB, their limit: the sandbox was started again without them; the \
             files in /workspace are kept",
            limit >> 20
        ),
        DiskFault::FileSystemErrors => {
            "its disk had errors: they were repaired, and the sandbox was started again".to_owned()
        }
    }
}

/// Reports that the disk of a sandbox was repaired before its start.
pub(super) async fn report_disk_repair(context: &Context, id: WorkspaceId, sandbox: &Sandbox) {
    if !sandbox.disk_was_repaired {
        return;
    }
    let message =
        "its disk had errors, which were mended: look for damaged files and for a directory lost+found";
    tracing::warn!(workspace = %id, "{message}");
    context.note_in_metadata(id, "disk_mended", json!({ "at": Utc::now(), "result": message })).await;
    context.events.workspace(EventKind::DiskMended, id, message);
}
