//! Copies of workspaces' files, and of the memory of some.
//!
//! ```text
//! row 'creating' ─▶ the sandbox pauses ─▶ disk copied ─▶ it goes on ─▶ 'ready'
//! row 'destroying' ─▶ copy removed ─▶ row gone
//! ```

use std::sync::Arc;

use emergent_failpoint::failpoint;
use emergent_store::{NewSnapshot, SnapshotRecord, StoreError};
use emergent_wire::snapshot::{CreateSnapshot, Snapshot, SnapshotStatus};
use emergent_wire::workspace::WorkspaceStatus;
use emergent_wire::{ErrorCode, ErrorDetail, SnapshotId, Valid, WorkspaceId};

use super::{Workspaces, error_of, wrong_state};

impl Workspaces {
    /// Copies a workspace's files.
    pub(crate) async fn snapshot(
        self: &Arc<Self>,
        id: WorkspaceId,
        request: Valid<CreateSnapshot>,
    ) -> Result<Snapshot, ErrorDetail> {
        let request = request.into_inner();
        // Before anything is remembered of an id that may be nobody's.
        self.store.workspace(id).await.map_err(error_of)?;
        let live = self.live(id);
        let _changing = live.changing.lock().await;
        let record = self.store.workspace_record(id).await.map_err(error_of)?;
        match record.workspace.status {
            WorkspaceStatus::Ready | WorkspaceStatus::Stopped | WorkspaceStatus::Error => {}
            status => return Err(wrong_state(id, status)),
        }
        self.refuse_if_disk_is_full()?;
        let provider = self.provider_of(&record)?;
        if !provider.capabilities().snapshots {
            let message = format!(
                "{} can't copy workspaces here: its disks are ordinary volumes (see GET …/providers)",
                provider.name()
            );
            return Err(ErrorDetail::new(ErrorCode::Unacceptable, message));
        }
        if request.memory && !provider.capabilities().memory_snapshots {
            let message = format!(
                "{} can't copy the memory of workspaces (see GET …/providers): leave `memory` out to copy the files",
                provider.name()
            );
            return Err(ErrorDetail::new(ErrorCode::Unacceptable, message));
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
            created_at: self.clock.now(),
        };
        self.store.insert_snapshot(&new).await.map_err(error_of)?;
        failpoint!("snapshot.row_written");
        if new.memory {
            // Its connections are reset: the next call waits for the copy, and opens a new one.
            live.close_to_calls();
        }
        match provider.snapshot(id, new.id, new.memory).await {
            Ok(size) => {
                let snapshot = self.store.snapshot_is_ready(new.id, size).await.map_err(error_of)?;
                failpoint!("snapshot.ready");
                tracing::info!(workspace = %id, snapshot = %new.id, size, "copied");
                Ok(snapshot)
            }
            Err(error) => {
                let discarded = match self.store.snapshot(new.id).await {
                    Ok(record) => self.discard_snapshot(&record).await,
                    // Recovery was faster.
                    Err(StoreError::NotFound { .. }) => Ok(()),
                    Err(problem) => Err(error_of(problem)),
                };
                if let Err(problem) = discarded {
                    tracing::warn!(snapshot = %new.id, %problem, "a failed copy is left to recovery");
                }
                Err(error.into())
            }
        }
    }

    /// Removes a snapshot.
    pub(crate) async fn delete_snapshot(self: &Arc<Self>, id: SnapshotId) -> Result<(), ErrorDetail> {
        self.disk_space.make_room_for_database();
        let record = self.store.snapshot(id).await.map_err(error_of)?;
        match record.snapshot.status {
            SnapshotStatus::Ready | SnapshotStatus::Quarantined => self.discard_snapshot(&record).await,
            SnapshotStatus::Creating => {
                let message = format!("snapshot {id} is being made: wait until it is ready");
                Err(ErrorDetail::new(ErrorCode::WrongState, message))
            }
            // Another request, or recovery, is at it.
            SnapshotStatus::Destroying => Ok(()),
        }
    }

    /// Removes a snapshot, whole or not, that nobody else is working on.
    pub(super) async fn discard_snapshot(&self, record: &SnapshotRecord) -> Result<(), ErrorDetail> {
        let id = record.snapshot.id;
        if !self.store.withdraw_snapshot(id, record.owner).await.map_err(error_of)? {
            return Ok(());
        }
        failpoint!("snapshot.withdrawn");
        let provider = self.provider(record.snapshot.provider)?;
        if record.snapshot.status == SnapshotStatus::Creating {
            provider.go_on(record.snapshot.workspace_id).await?;
        }
        provider.remove_snapshot(id).await?;
        failpoint!("snapshot.removed");
        self.store.delete_snapshot(id).await.map_err(error_of)?;
        failpoint!("snapshot.row_deleted");
        Ok(())
    }
}
