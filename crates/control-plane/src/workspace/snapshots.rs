//! Snapshots: copies of workspaces' files, and of their memory where the provider supports it.
//!
//! ```text
//! row 'creating' ─▶ sandbox paused ─▶ disk copied ─▶ sandbox unpaused ─▶ 'ready'
//! row 'destroying' ─▶ copy removed ─▶ row deleted
//! ```

use std::sync::Arc;

use emergent_failpoint::failpoint;
use emergent_store::{NewSnapshot, SnapshotRecord, StoreError};
use emergent_wire::snapshot::{CreateSnapshot, Snapshot, SnapshotStatus};
use emergent_wire::workspace::WorkspaceStatus;
use emergent_wire::{SnapshotId, Valid, WorkspaceId};

use super::context::Context;
use super::disk_space::DiskSpace;
use super::error::{Result, SnapshotError, WorkspaceError};

/// Makes and removes snapshots.
pub(crate) struct Snapshots {
    context: Arc<Context>,
    disk_space: Arc<DiskSpace>,
}

impl Snapshots {
    pub(super) fn new(context: &Arc<Context>, disk_space: &Arc<DiskSpace>) -> Arc<Self> {
        Arc::new(Self { context: Arc::clone(context), disk_space: Arc::clone(disk_space) })
    }

    /// Makes a snapshot of a workspace.
    pub(crate) async fn create(&self, id: WorkspaceId, request: Valid<CreateSnapshot>) -> Result<Snapshot> {
        let request = request.into_inner();
        // The row is read first, because an id without a row must not get live state.
        self.context.store.workspace(id).await?;
        let live = self.context.live(id);
        let _changing = live.change_lock.lock().await;
        let record = self.context.store.workspace_record(id).await?;
        match record.workspace.status {
            WorkspaceStatus::Ready | WorkspaceStatus::Stopped | WorkspaceStatus::Error => {}
            status => return Err(WorkspaceError::WrongState { id, status }),
        }
        self.disk_space.refuse_if_full()?;
        let provider = self.context.provider_of(&record)?;
        if !provider.capabilities().snapshots {
            return Err(SnapshotError::NotSupported(provider.name()).into());
        }
        if request.memory && !provider.capabilities().memory_snapshots {
            return Err(SnapshotError::NoMemory(provider.name()).into());
        }
        let new = NewSnapshot {
            id: SnapshotId::generate(),
            workspace_id: id,
            provider: provider.name(),
            description: request.description,
            image: record.image.clone(),
            network: record.network,
            limits: record.workspace.resource_limits,
            memory: request.memory,
            created_at: self.context.clock.now(),
        };
        self.context.store.insert_snapshot(&new).await?;
        failpoint!("snapshot.row_written");
        if new.memory {
            // Its connections are reset. The next call waits for the lock and opens a new channel.
            live.close_to_calls();
        }
        match provider.snapshot(id, new.id, new.memory).await {
            Ok(size) => {
                let snapshot = self.context.store.snapshot_is_ready(new.id, size).await?;
                failpoint!("snapshot.ready");
                tracing::info!(workspace = %id, snapshot = %new.id, size, "a snapshot was made");
                Ok(snapshot)
            }
            Err(error) => {
                let discarded = match self.context.store.snapshot(new.id).await {
                    Ok(record) => self.discard(&record).await,
                    // Recovery has removed it.
                    Err(StoreError::NotFound { .. }) => Ok(()),
                    Err(problem) => Err(problem.into()),
                };
                if let Err(problem) = discarded {
                    tracing::warn!(snapshot = %new.id, %problem, "a failed snapshot can't be removed now; recovery removes it");
                }
                Err(error.into())
            }
        }
    }

    /// Removes a snapshot.
    pub(crate) async fn delete(&self, id: SnapshotId) -> Result<()> {
        self.disk_space.make_room_for_database();
        let record = self.context.store.snapshot(id).await?;
        match record.snapshot.status {
            SnapshotStatus::Ready | SnapshotStatus::Quarantined => self.discard(&record).await,
            SnapshotStatus::Creating => Err(SnapshotError::InProgress(id).into()),
            // Another request, or recovery, is removing it.
            SnapshotStatus::Destroying => Ok(()),
        }
    }

    /// Removes a snapshot, complete or not, unless another server owns it.
    pub(super) async fn discard(&self, record: &SnapshotRecord) -> Result<()> {
        let id = record.snapshot.id;
        if !self.context.store.withdraw_snapshot(id, record.owner).await? {
            return Ok(());
        }
        failpoint!("snapshot.withdrawn");
        let provider = self.context.provider(record.snapshot.provider)?;
        if record.snapshot.status == SnapshotStatus::Creating {
            provider.unpause(record.snapshot.workspace_id).await?;
        }
        provider.remove_snapshot(id).await?;
        failpoint!("snapshot.removed");
        self.context.store.delete_snapshot(id).await?;
        failpoint!("snapshot.row_deleted");
        Ok(())
    }
}
