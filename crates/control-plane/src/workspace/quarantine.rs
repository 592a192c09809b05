//! Quarantine: sandboxes and snapshots without a row are orphans. Their files are kept as snapshots in quarantine.
//!
//! ```text
//! orphan ──orphan_grace_seconds──▶ row `quarantined` ──▶ sandbox ended, its disk kept as a snapshot
//!                                     ├── restore ──▶ `ready`: an ordinary snapshot
//!                                     └── purge, or quarantine_days ──▶ removed
//! ```
//!
//! No crash leaves an orphan, because the row is written before the sandbox and deleted after it. So the database is not the one that
//! the orphan was made with: it was restored from an older backup, or adopted another installation's files.
//!
//! The row is written before the sandbox is ended, and has the id of the workspace. So after a crash the next pass finishes the step.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use chrono::TimeDelta;
use emergent_failpoint::failpoint;
use emergent_store::{NewSnapshot, SnapshotRecord};
use emergent_wire::snapshot::{Snapshot, SnapshotStatus};
use emergent_wire::workspace::{NetworkMode, ProviderName, ResourceLimits};
use emergent_wire::{SnapshotId, WorkspaceId};
use parking_lot::Mutex;
use uuid::Uuid;

use super::context::Context;
use super::disk_space::DiskSpace;
use super::error::{Result, SnapshotError, WorkspaceError};
use super::snapshots::Snapshots;
use crate::config::Existing;

/// Moves orphans into quarantine, restores them and removes them.
pub(crate) struct Quarantine {
    context: Arc<Context>,
    disk_space: Arc<DiskSpace>,
    snapshots: Arc<Snapshots>,
    grace: Duration,
    /// The times at which orphans were first seen.
    first_seen: Mutex<HashMap<(ProviderName, Uuid), Instant>>,
}

impl Quarantine {
    pub(super) fn new(
        context: &Arc<Context>,
        disk_space: &Arc<DiskSpace>,
        snapshots: &Arc<Snapshots>,
    ) -> Arc<Self> {
        let settings = &context.settings;
        // The operator has adopted these files, so they need no grace period.
        let is_adopted = settings.existing == Existing::Adopt;
        let grace = if is_adopted { 0 } else { settings.workspaces.orphan_grace_seconds };
        Arc::new(Self {
            context: Arc::clone(context),
            disk_space: Arc::clone(disk_space),
            snapshots: Arc::clone(snapshots),
            grace: Duration::from_secs(grace),
            first_seen: Mutex::default(),
        })
    }

    /// Whether the grace period of an orphan is over. It begins with the first call.
    pub(super) fn is_due(&self, provider: ProviderName, id: Uuid) -> bool {
        let mut first_seen = self.first_seen.lock();
        let since = first_seen.entry((provider, id)).or_insert_with(|| {
            tracing::warn!(
                %provider, %id, grace_s = self.grace.as_secs(),
                "a sandbox or snapshot of this installation has no row in the database: it is quarantined after the grace period \
                 (see `emergent quarantine --help`). If the database was restored by mistake, put the right one back now"
            );
            Instant::now()
        });
        since.elapsed() >= self.grace
    }

    fn forget(&self, provider: ProviderName, id: Uuid) {
        self.first_seen.lock().remove(&(provider, id));
    }

    /// Ends a sandbox without a row and keeps its disk.
    pub(super) async fn add_sandbox(&self, provider: ProviderName, id: WorkspaceId) -> Result<()> {
        let to = SnapshotId(id.0);
        self.context.store.insert_quarantined(&self.found(provider, id, to)).await?;
        failpoint!("quarantine.row_written");
        self.context.provider(provider)?.quarantine(id, to).await?;
        failpoint!("quarantine.sandbox_ended");
        self.store_properties(provider, to).await
    }

    /// Writes the row of a snapshot without one.
    pub(super) async fn add_copy(&self, provider: ProviderName, id: SnapshotId) -> Result<()> {
        if !self.is_due(provider, id.0) {
            return Ok(());
        }
        let found = self.found(provider, WorkspaceId(id.0), id);
        self.context.store.insert_quarantined(&found).await?;
        self.store_properties(provider, id).await
    }

    /// Stores the properties of the files in quarantine. Removes the row when there are no files.
    async fn store_properties(&self, provider: ProviderName, id: SnapshotId) -> Result<()> {
        match self.context.provider(provider)?.inspect_snapshot(id).await? {
            Some(info) => {
                let defaults = self.context.settings.workspaces.default_limits();
                let disk = info.disk.unwrap_or(defaults.disk);
                let limits = info.memory_limits.unwrap_or(ResourceLimits { disk, ..defaults });
                let noted = self.context.store.note_quarantined(
                    id,
                    info.bytes,
                    &limits,
                    info.memory_limits.is_some(),
                );
                noted.await?;
                tracing::warn!(snapshot = %id, bytes = info.bytes, "files without a row in the database are in quarantine");
                metrics::counter!("emergent_quarantined_total").increment(1);
            }
            // An incomplete snapshot, or a sandbox without a disk.
            None => {
                let record = self.context.store.snapshot(id).await?;
                self.snapshots.discard(&record).await?;
            }
        }
        self.forget(provider, id.0);
        Ok(())
    }

    fn found(&self, provider: ProviderName, workspace_id: WorkspaceId, id: SnapshotId) -> NewSnapshot {
        NewSnapshot {
            id,
            workspace_id,
            provider,
            description: Some("found without a row in the database".to_owned()),
            image: self.context.settings.workspaces.default_image.clone(),
            // The network mode that it had is unknown.
            network: NetworkMode::Isolated,
            limits: self.context.settings.workspaces.default_limits(),
            memory: false,
            created_at: self.context.clock.now(),
        }
    }

    /// Turns files in quarantine into an ordinary snapshot.
    pub(crate) async fn restore(&self, id: SnapshotId) -> Result<Snapshot> {
        self.quarantined(id).await?;
        self.context.store.restore_quarantined(id).await.map_err(WorkspaceError::from)
    }

    /// Removes files in quarantine.
    pub(crate) async fn purge(&self, id: SnapshotId) -> Result<()> {
        self.disk_space.make_room_for_database();
        let record = self.quarantined(id).await?;
        self.snapshots.discard(&record).await
    }

    async fn quarantined(&self, id: SnapshotId) -> Result<SnapshotRecord> {
        let record = self.context.store.snapshot(id).await?;
        if record.snapshot.status != SnapshotStatus::Quarantined {
            return Err(SnapshotError::NotQuarantined { id, status: record.snapshot.status }.into());
        }
        Ok(record)
    }

    /// Removes files whose time in quarantine is over.
    pub(crate) async fn prune(&self) {
        let days = self.context.settings.workspaces.quarantine_days;
        if days == 0 {
            return;
        }
        let oldest = self.context.clock.now() - TimeDelta::days(i64::from(days));
        let pruned = async {
            for record in self.context.store.all_snapshots().await?.readable {
                let snapshot = &record.snapshot;
                if snapshot.status == SnapshotStatus::Quarantined && snapshot.created_at < oldest {
                    tracing::warn!(snapshot = %snapshot.id, days, "files in quarantine are removed: they were not restored in time");
                    self.snapshots.discard(&record).await?;
                }
            }
            Ok::<(), WorkspaceError>(())
        };
        if let Err(error) = pruned.await {
            tracing::warn!(%error, "old files in quarantine could not be removed");
        }
    }
}
