//! The state of the engine and its containers: health, warnings, list, ends.

use std::collections::HashMap;
use std::path::Path;
use std::str::FromStr;
use std::sync::atomic::Ordering;

use bollard::models::SystemInfo;
use emergent_host::memory::available_memory;
use emergent_wire::WorkspaceId;
use emergent_wire::workspace::AvailableResources;

use super::engine::has_runtime;
use super::engine_error::EngineError;
use super::host::cpus_of;
use super::provider::{ContainerProvider, RUNSC, Runtime, gvisor_missing};
use super::{LABEL_WORKSPACE, name_of};
use crate::error::ProviderError;
use crate::provider::Health;
use crate::sandbox::{Observed, ObservedState, SandboxExit, SandboxSpec};

impl ContainerProvider {
    pub(super) async fn check_health(&self) -> Health {
        let info = match self.engine.info().await {
            Ok(info) => info,
            Err(error) => return Health::unhealthy(error.to_string()),
        };
        self.host_cpus.store(cpus_of(&info), Ordering::Relaxed);
        if let Some(directory) = &info.docker_root_dir {
            let _ = self.engine_directory.set(directory.into());
        }
        let problem = (self.runtime == Runtime::Gvisor && !has_runtime(&info, RUNSC))
            .then(|| gvisor_missing("the engine has no runtime 'runsc'"));
        let no_disks = self
            .disks
            .as_ref()
            .err()
            .map(|reason| format!("disk limits are watched, not enforced: {reason}"));
        let notes: Vec<String> = self
            .shared_directories_note()
            .into_iter()
            .chain(no_disks)
            .chain(self.network.problem())
            .collect();
        let available = AvailableResources {
            cpus: cpus_of(&info),
            memory_bytes: free_memory(&info),
            disk_bytes: info.docker_root_dir.as_deref().map_or(0, free_bytes),
        };
        let note = (!notes.is_empty()).then(|| notes.join("; "));
        Health { problem, note, available: Some(available), spares: 0 }
    }

    pub(super) async fn warnings_for(&self, spec: &SandboxSpec) -> Vec<String> {
        let mut warnings = Vec::new();
        if self.runtime == Runtime::Plain {
            warnings.push(
                "reduced isolation: this workspace is a plain container that shares the host's kernel; use gVisor or \
                 Firecracker for code you do not trust"
                    .to_owned(),
            );
        }
        if let Err(reason) = &self.disks {
            warnings.push(format!("the disk limit is watched, not enforced: {reason}"));
        }
        let cpus = self.host_cpus().await.unwrap_or(u32::MAX);
        if u64::from(spec.limits.cpu.millis()) > u64::from(cpus) * 1000 {
            warnings
                .push(format!("the host has {cpus} CPUs: the limit of {} is not reached", spec.limits.cpu));
        }
        warnings
    }

    /// Lists containers, and volumes and disks without a container.
    pub(super) async fn list_sandboxes(&self) -> Result<Vec<Observed>, ProviderError> {
        let failed = |error: EngineError| ProviderError::failed("listing sandboxes", error);
        let mut found: HashMap<WorkspaceId, ObservedState> = HashMap::new();
        for volume in self.engine.volumes(&self.label()).await.map_err(failed)? {
            found.extend(workspace_of(&volume.labels).map(|id| (id, ObservedState::Leftover)));
        }
        if let Ok(disks) = &self.disks {
            let ids = disks.list().map_err(|error| ProviderError::failed("listing disks", error))?;
            found.extend(ids.into_iter().map(|id| (id, ObservedState::Leftover)));
        }
        for container in self.engine.containers(&self.label()).await.map_err(failed)? {
            let state = if container.is_running { ObservedState::Running } else { ObservedState::Stopped };
            found.extend(workspace_of(&container.labels).map(|id| (id, state)));
        }
        Ok(found.into_iter().map(|(id, state)| Observed { id, state }).collect())
    }

    /// Explains the end of a container. None: it runs, or the engine does not answer.
    pub(super) async fn container_exit(&self, id: WorkspaceId) -> Option<SandboxExit> {
        let state = match self.engine.inspect(&name_of(id)).await {
            Ok(found) => found.state?,
            Err(EngineError::NotFound(_)) => return Some(SandboxExit::new("its container was removed")),
            Err(_) => return None,
        };
        if state.running == Some(true) {
            return None;
        }
        if state.oom_killed == Some(true) {
            let reason = "the whole sandbox ran out of memory and was killed".to_owned();
            return Some(SandboxExit { reason, out_of_memory: true });
        }
        let code = state.exit_code.unwrap_or_default();
        let error = state.error.filter(|error| !error.is_empty()).map(|error| format!(": {error}"));
        let reason = format!("its container ended with code {code}{}", error.unwrap_or_default());
        Some(SandboxExit::new(reason))
    }
}

/// The workspace that a container or volume is labelled with.
pub(super) fn workspace_of(labels: &HashMap<String, String>) -> Option<WorkspaceId> {
    WorkspaceId::from_str(labels.get(LABEL_WORKSPACE)?).ok()
}

/// Free bytes on the disk of the engine's data. 0 where the engine is on another host.
fn free_bytes(path: &str) -> u64 {
    rustix::fs::statvfs(Path::new(path)).map_or(0, |stat| stat.f_bavail * stat.f_frsize)
}

/// Free memory of the engine's host. All of its memory where the engine is on another host.
fn free_memory(info: &SystemInfo) -> u64 {
    let total = info.mem_total.and_then(|bytes| u64::try_from(bytes).ok()).unwrap_or(0);
    available_memory().map_or(total, |free| free.min(total))
}
