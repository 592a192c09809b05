//! Snapshots of a container's files: copies of its disk while the container is paused.

use emergent_failpoint::failpoint;
use emergent_wire::{SnapshotId, WorkspaceId};

use super::disk::Disks;
use super::engine_error::EngineError;
use super::host::run_blocking;
use super::name_of;
use super::provider::ContainerProvider;
use crate::error::ProviderError;
use crate::sandbox::SnapshotInfo;

impl ContainerProvider {
    /// Copies the disk. A running container is paused and its file system flushed before.
    pub(super) async fn copy_files(&self, id: WorkspaceId, to: SnapshotId) -> Result<u64, ProviderError> {
        let disks = self.copyable_disks()?;
        let name = name_of(id);
        let failed = |error: EngineError| ProviderError::failed("pausing the container", error);
        let is_running = match self.engine.inspect(&name).await {
            Ok(found) => found.state.and_then(|state| state.running) == Some(true),
            Err(EngineError::NotFound(_)) => false,
            Err(error) => return Err(failed(error)),
        };
        if is_running {
            self.engine.pause(&name).await.map_err(failed)?;
            failpoint!("snapshot.paused");
            self.flush(&name).await;
        }
        let copied = run_blocking("copying the disk", move || disks.snapshot(id, to)).await;
        failpoint!("snapshot.copied");
        if is_running {
            self.engine.unpause(&name).await.map_err(failed)?;
            failpoint!("snapshot.unpaused");
        }
        copied
    }

    pub(super) async fn unpause_container(&self, id: WorkspaceId) -> Result<(), ProviderError> {
        let unpaused = async {
            self.engine.check_answers().await?;
            self.engine.unpause(&name_of(id)).await
        };
        unpaused.await.map_err(|error| ProviderError::failed("unpausing the container", error))
    }

    /// Removes the container and moves its disks to the snapshots.
    pub(super) async fn quarantine_files(
        &self,
        id: WorkspaceId,
        to: SnapshotId,
    ) -> Result<(), ProviderError> {
        let disks = self.disks.clone().map_err(|reason| {
            let message = format!(
                "its files are on a volume of the engine that can't be set aside ({reason}): remove container and volume {} by \
                 hand",
                name_of(id)
            );
            ProviderError::Unacceptable(message)
        })?;
        self.running.kill_counters.lock().remove(&id);
        self.remove_container(id).await?;
        failpoint!("quarantine.container_removed");
        self.remove_volumes(id).await?;
        run_blocking("setting the disk aside", move || disks.quarantine(id, to)).await
    }

    pub(super) async fn snapshot_info(&self, id: SnapshotId) -> Result<Option<SnapshotInfo>, ProviderError> {
        let disks = self.copyable_disks()?;
        run_blocking("inspecting the snapshot", move || disks.inspect_snapshot(id)).await
    }

    pub(super) async fn remove_copy(&self, id: SnapshotId) -> Result<(), ProviderError> {
        let disks = self.copyable_disks()?;
        run_blocking("removing the snapshot", move || disks.remove_snapshot(id)).await
    }

    pub(super) async fn list_snapshots(&self) -> Result<Vec<SnapshotId>, ProviderError> {
        match self.disks.clone() {
            Ok(disks) => run_blocking("listing snapshots", move || disks.snapshots()).await,
            Err(_) => Ok(Vec::new()),
        }
    }

    /// The disks. Volumes of the engine can't be copied.
    fn copyable_disks(&self) -> Result<Disks, ProviderError> {
        self.disks.clone().map_err(|reason| {
            ProviderError::Unacceptable(format!("snapshots need disks of their own: {reason}"))
        })
    }

    /// Flushes the file system of a paused container to its disk.
    async fn flush(&self, name: &str) {
        let path = self.engine.volume_path(name).await.unwrap_or_default();
        let flushed = tokio::task::spawn_blocking(move || match std::fs::File::open(path) {
            Ok(directory) => rustix::fs::syncfs(directory),
            // The engine's mounts are not visible to this process: flush all file systems.
            Err(_) => {
                rustix::fs::sync();
                Ok(())
            }
        });
        if !matches!(flushed.await, Ok(Ok(()))) {
            tracing::warn!(volume = name, "the disk could not be flushed before its copy");
        }
    }
}
