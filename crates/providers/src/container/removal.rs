//! Stopping, killing and removing a container, its volumes and its disks.

use std::time::Duration;

use emergent_failpoint::failpoint;
use emergent_wire::WorkspaceId;

use super::engine_error::EngineError;
use super::host::run_blocking;
use super::provider::ContainerProvider;
use super::{LABEL_WORKSPACE, name_of};
use crate::error::ProviderError;

/// Seconds between SIGTERM and SIGKILL. The agent gives its processes 8 s.
const STOP_GRACE_S: i32 = 12;
/// Time limit of the engine for a stop, beyond the grace. After it the processes are killed without the engine.
const STOP_MARGIN: Duration = Duration::from_secs(6);
/// Time limit of the engine for removing a container without processes.
const REMOVE_TIME: Duration = Duration::from_secs(10);

impl ContainerProvider {
    pub(super) async fn stop_container(&self, id: WorkspaceId) -> Result<(), ProviderError> {
        let limit = Duration::from_secs(STOP_GRACE_S.unsigned_abs().into()) + STOP_MARGIN;
        match tokio::time::timeout(limit, self.engine.stop(&name_of(id), STOP_GRACE_S)).await {
            // A container that others removed has its files on its volume, and resume creates it again.
            Ok(Ok(()) | Err(EngineError::NotFound(_))) => Ok(()),
            Ok(Err(error)) => Err(ProviderError::failed("stopping the container", error)),
            Err(_) => {
                tracing::warn!(workspace = %id, "the engine does not stop the container; killing its processes");
                self.kill_container(id).await
            }
        }
    }

    pub(super) async fn kill_container(&self, id: WorkspaceId) -> Result<(), ProviderError> {
        self.kill_processes(id).await?;
        // For a container without a control group of its own, and to wait until the engine has noticed.
        match tokio::time::timeout(REMOVE_TIME, self.engine.stop(&name_of(id), 0)).await {
            Ok(Ok(()) | Err(EngineError::NotFound(_))) => Ok(()),
            Ok(Err(error)) => Err(ProviderError::failed("ending the container", error)),
            Err(_) => {
                Err(ProviderError::TimedOut { what: "ending the container", seconds: REMOVE_TIME.as_secs() })
            }
        }
    }

    pub(super) async fn destroy_sandbox(&self, id: WorkspaceId) -> Result<(), ProviderError> {
        self.running.kill_counters.lock().remove(&id);
        self.remove_container(id).await?;
        failpoint!("sandbox.container_removed");
        self.remove_volumes(id).await?;
        failpoint!("sandbox.volume_removed");
        if let Ok(disks) = self.disks.clone() {
            run_blocking("removing the disk", move || disks.remove(id)).await?;
        }
        Ok(())
    }

    /// Removes a container, also one that the engine can't end.
    pub(super) async fn remove_container(&self, id: WorkspaceId) -> Result<(), ProviderError> {
        let name = name_of(id);
        if let Err(error) = self.kill_processes(id).await {
            tracing::warn!(workspace = %id, %error, "the processes of a sandbox do not end");
        }
        match tokio::time::timeout(REMOVE_TIME, self.engine.remove(&name)).await {
            Ok(removed) => removed.map_err(|error| ProviderError::failed("removing the container", error)),
            Err(_) => Err(ProviderError::TimedOut {
                what: "removing the container",
                seconds: REMOVE_TIME.as_secs(),
            }),
        }
    }

    /// Removes the engine's entries of a sandbox's volumes.
    pub(super) async fn remove_volumes(&self, id: WorkspaceId) -> Result<(), ProviderError> {
        self.remove_volume(&name_of(id)).await?;
        let label = format!("{LABEL_WORKSPACE}={id}");
        let named = self.engine.volumes(&label).await;
        for volume in named.map_err(|error| ProviderError::failed("listing volumes", error))? {
            self.remove_volume(&volume.name).await?;
        }
        Ok(())
    }

    async fn remove_volume(&self, name: &str) -> Result<(), ProviderError> {
        match self.engine.remove_volume(name).await {
            Ok(()) => Ok(()),
            // An engine that was restarted while containers ran (live-restore) may miscount mounts and keep the volume's entry
            // until its next start. The disk behind the volume is removed anyway, and recovery removes the entry.
            Err(EngineError::VolumeMounted(_)) if self.disks.is_ok() => {
                tracing::warn!(volume = name, "the engine keeps the entry of a volume whose disk is removed");
                Ok(())
            }
            Err(error) => Err(ProviderError::failed("removing the volume", error)),
        }
    }
}
