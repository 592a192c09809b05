//! Quarantine: files that this database knows nothing of are set aside, not removed.
//!
//! ```text
//! orphan ──orphan_grace_seconds──▶ row `quarantined` ──▶ sandbox ended, its disk kept as a snapshot
//!                                     ├── restore ──▶ `ready`: an ordinary snapshot
//!                                     └── purge, or quarantine_days ──▶ removed
//! ```
//!
//! No crash leaves a sandbox or a copy without a row, because the row is written first and removed last. So an orphan means that
//! the database is not the one that made it: it was restored from an older backup, or adopted another installation's files.
//!
//! The row is written before the sandbox is touched, and its id is the workspace's. So a server that is killed in between is
//! followed by one that does the same again.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use chrono::TimeDelta;
use emergent_failpoint::failpoint;
use emergent_store::{NewSnapshot, SnapshotRecord};
use emergent_wire::snapshot::{Snapshot, SnapshotStatus};
use emergent_wire::workspace::{NetworkMode, ProviderName, ResourceLimits};
use emergent_wire::{ErrorCode, ErrorDetail, SnapshotId, WorkspaceId};
use uuid::Uuid;

use super::{Workspaces, error_of};

/// When orphans were first seen.
pub(crate) struct Quarantine {
    grace: Duration,
    first_seen: Mutex<HashMap<(ProviderName, Uuid), Instant>>,
}

impl Quarantine {
    pub(super) fn new(grace: Duration) -> Self {
        Self { grace, first_seen: Mutex::default() }
    }

    /// Whether an orphan, which is seen now, has been one for long enough.
    pub(super) fn is_due(&self, provider: ProviderName, id: Uuid) -> bool {
        let mut first_seen = self.first_seen.lock().unwrap_or_else(PoisonError::into_inner);
        let since = first_seen.entry((provider, id)).or_insert_with(|| {
            tracing::warn!(
                %provider, %id, grace_s = self.grace.as_secs(),
                "a sandbox or snapshot of this installation has no record in the database; it goes to quarantine after the grace \
                 period (see `emergent quarantine --help`). If the database was restored by mistake, put the right one back now"
            );
            Instant::now()
        });
        since.elapsed() >= self.grace
    }

    fn forget(&self, provider: ProviderName, id: Uuid) {
        self.first_seen.lock().unwrap_or_else(PoisonError::into_inner).remove(&(provider, id));
    }
}

impl Workspaces {
    /// Ends a sandbox without a row and keeps its disk.
    pub(super) async fn quarantine_sandbox(
        &self,
        provider: ProviderName,
        id: WorkspaceId,
    ) -> Result<(), ErrorDetail> {
        let to = SnapshotId(id.0);
        self.store.insert_quarantined(&self.found(provider, id, to)).await.map_err(error_of)?;
        failpoint!("quarantine.row_written");
        self.provider(provider)?.quarantine(id, to).await?;
        failpoint!("quarantine.sandbox_ended");
        self.finish_quarantine(provider, to).await
    }

    /// Writes down a copy without a row.
    pub(super) async fn quarantine_copy(
        &self,
        provider: ProviderName,
        id: SnapshotId,
    ) -> Result<(), ErrorDetail> {
        if !self.quarantine.is_due(provider, id.0) {
            return Ok(());
        }
        let found = self.found(provider, WorkspaceId(id.0), id);
        self.store.insert_quarantined(&found).await.map_err(error_of)?;
        self.finish_quarantine(provider, id).await
    }

    /// Writes down what is in quarantine, or that there were no files.
    async fn finish_quarantine(&self, provider: ProviderName, id: SnapshotId) -> Result<(), ErrorDetail> {
        match self.provider(provider)?.inspect_snapshot(id).await? {
            Some(info) => {
                let defaults = self.settings.workspaces.default_limits();
                let disk = info.disk.unwrap_or(defaults.disk);
                let limits = info.memory_limits.unwrap_or(ResourceLimits { disk, ..defaults });
                let noted =
                    self.store.note_quarantined(id, info.bytes, &limits, info.memory_limits.is_some());
                noted.await.map_err(error_of)?;
                tracing::warn!(snapshot = %id, bytes = info.bytes, "files without a record in the database are in quarantine");
                metrics::counter!("emergent_quarantined_total").increment(1);
            }
            // A part of a copy, or a sandbox without a disk.
            None => {
                let record = self.store.snapshot(id).await.map_err(error_of)?;
                self.discard_snapshot(&record).await?;
            }
        }
        self.quarantine.forget(provider, id.0);
        Ok(())
    }

    fn found(&self, provider: ProviderName, workspace_id: WorkspaceId, id: SnapshotId) -> NewSnapshot {
        NewSnapshot {
            id,
            workspace_id,
            provider,
            description: Some("found without a record in the database".to_owned()),
            image: self.settings.workspaces.default_image.clone(),
            // Nobody knows what it was allowed to reach.
            network: NetworkMode::Isolated,
            limits: self.settings.workspaces.default_limits(),
            memory: false,
            created_at: self.clock.now(),
        }
    }

    /// Makes an ordinary snapshot of what is in quarantine.
    pub(crate) async fn restore_quarantined(&self, id: SnapshotId) -> Result<Snapshot, ErrorDetail> {
        self.quarantined(id).await?;
        self.store.restore_quarantined(id).await.map_err(error_of)
    }

    /// Removes what is in quarantine.
    pub(crate) async fn purge_quarantined(&self, id: SnapshotId) -> Result<(), ErrorDetail> {
        self.disk_space.make_room_for_database();
        let record = self.quarantined(id).await?;
        self.discard_snapshot(&record).await
    }

    async fn quarantined(&self, id: SnapshotId) -> Result<SnapshotRecord, ErrorDetail> {
        let record = self.store.snapshot(id).await.map_err(error_of)?;
        if record.snapshot.status != SnapshotStatus::Quarantined {
            let message = format!("snapshot {id} is {}, not in quarantine", record.snapshot.status);
            return Err(ErrorDetail::new(ErrorCode::WrongState, message));
        }
        Ok(record)
    }

    /// Removes what has been in quarantine for too long.
    pub(crate) async fn prune_quarantine(self: Arc<Self>) {
        let days = self.settings.workspaces.quarantine_days;
        if days == 0 {
            return;
        }
        let oldest = self.clock.now() - TimeDelta::days(i64::from(days));
        let pruned = async {
            for record in self.store.all_snapshots().await.map_err(error_of)? {
                let snapshot = &record.snapshot;
                if snapshot.status == SnapshotStatus::Quarantined && snapshot.created_at < oldest {
                    tracing::warn!(snapshot = %snapshot.id, days, "nobody has restored files in quarantine; they are removed");
                    self.discard_snapshot(&record).await?;
                }
            }
            Ok::<(), ErrorDetail>(())
        };
        if let Err(error) = pruned.await {
            tracing::warn!(%error, "old files in quarantine could not be removed");
        }
    }
}
