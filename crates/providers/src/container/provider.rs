//! The container provider: its state, and the trait's methods, each of which calls the file that does the work.

use std::collections::HashMap;
use std::ops::Deref;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use async_trait::async_trait;
use emergent_guest_client::GuestClient;
use emergent_host::cpu_group::CpuGroup;
use emergent_wire::workspace::{Capabilities, DiskQuota, NetworkMode, ProviderName};
use emergent_wire::{SnapshotId, WorkspaceId};
use parking_lot::Mutex;

use super::disk_watch::RootLayer;
use super::engine_error::EngineError;
use super::entries::{DOCKER, GVISOR};
use super::host::ContainerHost;
use super::name_of;
use super::oom::KillCounter;
use super::processes::ContainerProcesses;
use crate::error::ProviderError;
use crate::image::{ImageProgram, ImageSource as _};
use crate::provider::{Health, WorkspaceProvider, configure_agent};
use crate::sandbox::{DiskUse, Observed, Sandbox, SandboxExit, SandboxId, SandboxSpec, SnapshotInfo};
use crate::start_history::StartHistory;
use crate::table::ProviderFacts;

/// The message for an engine that can't run gVisor containers.
const GVISOR_MISSING: &str = "gVisor runtime not available";
/// The engine's name for gVisor's runtime.
pub(super) const RUNSC: &str = "runsc";

/// The OCI runtime of the containers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Runtime {
    /// gVisor's application kernel.
    Gvisor,
    /// The engine's default runtime, on the host's kernel.
    Plain,
}

/// Containers on a Docker engine.
pub(super) struct ContainerProvider {
    pub(super) runtime: Runtime,
    pub(super) host: Arc<ContainerHost>,
    pub(super) starts: StartHistory,
    /// Held during a probe, so that one probe runs at a time.
    pub(super) probing: tokio::sync::Mutex<()>,
    pub(super) running: RunningContainers,
}

/// Facts about the containers that this process has started or reached. A cache: missing facts are
/// asked of the engine.
#[derive(Default)]
pub(super) struct RunningContainers {
    pub(super) kill_counters: Mutex<HashMap<WorkspaceId, KillCounter>>,
    pub(super) processes: Mutex<HashMap<WorkspaceId, ContainerProcesses>>,
    pub(super) root_layers: Mutex<HashMap<WorkspaceId, RootLayer>>,
    /// The time of the last comparison with the engine's list.
    pub(super) compared: Mutex<Option<Instant>>,
}

impl Deref for ContainerProvider {
    type Target = ContainerHost;

    fn deref(&self) -> &ContainerHost {
        &self.host
    }
}

impl ContainerProvider {
    /// A provider of containers on one runtime. Does not connect to the engine yet.
    pub(super) fn new(runtime: Runtime, host: &Arc<ContainerHost>) -> Self {
        Self {
            runtime,
            host: Arc::clone(host),
            starts: StartHistory::default(),
            probing: tokio::sync::Mutex::default(),
            running: RunningContainers::default(),
        }
    }

    fn facts(&self) -> &'static ProviderFacts {
        match self.runtime {
            Runtime::Gvisor => &GVISOR,
            Runtime::Plain => &DOCKER,
        }
    }

    pub(super) fn disk_quota(&self) -> DiskQuota {
        if self.disks.is_ok() { DiskQuota::Enforced } else { DiskQuota::Watched }
    }

    /// Translates an engine's failure to create, start or reach a container.
    pub(super) async fn checked<T>(&self, result: Result<T, EngineError>) -> Result<T, ProviderError> {
        match result {
            Ok(value) => Ok(value),
            Err(error) => Err(self.provider_error(error).await),
        }
    }

    async fn provider_error(&self, error: EngineError) -> ProviderError {
        let text = error.to_string();
        let may_lack_runtime = self.runtime == Runtime::Gvisor
            && matches!(error, EngineError::Refused(_) | EngineError::Runtime { .. } | EngineError::Other(_));
        if may_lack_runtime && matches!(self.engine.has_runtime(RUNSC).await, Ok(false)) {
            return ProviderError::Unavailable(gvisor_missing("the engine has no runtime 'runsc'"));
        }
        match error {
            EngineError::Runtime { .. } if self.runtime == Runtime::Gvisor => {
                let reason = format!("it is installed but does not work: {text}");
                ProviderError::Unavailable(gvisor_missing(&reason))
            }
            EngineError::NoImage(image) => no_image(&image),
            EngineError::Unreachable(_) => ProviderError::Unavailable(text),
            EngineError::TimedOut(seconds) => {
                ProviderError::TimedOut { what: "a call to the Docker engine", seconds }
            }
            EngineError::NotFound(_) => ProviderError::Gone(text),
            EngineError::Refused(_) | EngineError::Runtime { is_refusal: true, .. } => {
                ProviderError::Unacceptable(text)
            }
            EngineError::Conflict(_)
            | EngineError::VolumeMounted(_)
            | EngineError::Runtime { is_refusal: false, .. }
            | EngineError::Other(_) => ProviderError::failed("the Docker engine", text),
        }
    }
}

pub(super) fn gvisor_missing(reason: &str) -> String {
    format!(
        "{GVISOR_MISSING}: {reason}. Run `emergent doctor` for how to fix it, or `make setup`, which installs it"
    )
}

/// The error for an image that the engine does not have.
pub(super) fn no_image(image: &str) -> ProviderError {
    ProviderError::Unacceptable(format!(
        "the image '{image}' is not on this host: build or load it (`make setup` makes the default one)"
    ))
}

#[async_trait]
impl WorkspaceProvider for ContainerProvider {
    fn name(&self) -> ProviderName {
        self.facts().name
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            isolation: self.facts().isolation,
            persistence: true,
            snapshots: self.disks.is_ok(),
            memory_snapshots: false,
            warm_pool: true,
            requires: self.facts().requires(),
            disk_quota: self.disk_quota(),
            startup_latency_ms: self.starts.median_ms(),
        }
    }

    async fn health(&self) -> Health {
        self.check_health().await
    }

    async fn verify_start(&self) -> Option<String> {
        self.probe_unless_recent().await
    }

    async fn create(&self, spec: &SandboxSpec) -> Result<Sandbox, ProviderError> {
        self.create_sandbox(spec).await
    }

    async fn sandbox_id(&self, id: WorkspaceId) -> Result<SandboxId, ProviderError> {
        Ok(SandboxId::new(name_of(id)))
    }

    async fn resume(&self, spec: &SandboxSpec) -> Result<Sandbox, ProviderError> {
        self.resume_sandbox(spec).await
    }

    async fn recreate(&self, spec: &SandboxSpec) -> Result<Sandbox, ProviderError> {
        self.remove_container(spec.id).await?;
        self.resume_sandbox(spec).await
    }

    async fn stop(&self, id: WorkspaceId) -> Result<(), ProviderError> {
        self.stop_container(id).await
    }

    async fn kill(&self, id: WorkspaceId) -> Result<(), ProviderError> {
        self.kill_container(id).await
    }

    async fn destroy(&self, id: WorkspaceId) -> Result<(), ProviderError> {
        self.destroy_sandbox(id).await
    }

    async fn list(&self) -> Result<Vec<Observed>, ProviderError> {
        self.list_sandboxes().await
    }

    async fn open_channel(&self, spec: &SandboxSpec) -> Result<GuestClient, ProviderError> {
        self.open_exec_channel(spec).await
    }

    async fn configure(&self, spec: &SandboxSpec, channel: &GuestClient) -> Result<(), ProviderError> {
        let Some(mut configuration) = spec.configuration.clone() else {
            return Ok(());
        };
        configuration.memory_bytes = Some(spec.limits.memory.bytes());
        if spec.network == NetworkMode::Nat {
            configuration.nameservers = self.network.nameservers();
        }
        if self.disk_quota() == DiskQuota::Watched {
            configuration.watched_disk_bytes = Some(spec.limits.disk.bytes());
        }
        configure_agent(channel, configuration).await
    }

    async fn warnings(&self, spec: &SandboxSpec) -> Vec<String> {
        self.warnings_for(spec).await
    }

    async fn exit_reason(&self, id: WorkspaceId) -> Option<SandboxExit> {
        self.container_exit(id).await
    }

    fn oom_kills(&self, id: WorkspaceId) -> u64 {
        let counter = self.running.kill_counters.lock().get(&id).cloned();
        counter.map_or(0, |counter| counter.read())
    }

    async fn image_digest(&self, image: &str) -> Result<String, ProviderError> {
        self.images.digest(image).await
    }

    async fn image_program(&self, image: &str) -> Result<ImageProgram, ProviderError> {
        Ok(self.images.config(image).await?.program)
    }

    async fn snapshot(
        &self,
        id: WorkspaceId,
        to: SnapshotId,
        with_memory: bool,
    ) -> Result<u64, ProviderError> {
        if with_memory {
            return Err(ProviderError::Unacceptable("the memory of containers can't be copied".to_owned()));
        }
        self.copy_files(id, to).await
    }

    async fn unpause(&self, id: WorkspaceId) -> Result<(), ProviderError> {
        self.unpause_container(id).await
    }

    async fn quarantine(&self, id: WorkspaceId, to: SnapshotId) -> Result<(), ProviderError> {
        self.quarantine_files(id, to).await
    }

    async fn inspect_snapshot(&self, id: SnapshotId) -> Result<Option<SnapshotInfo>, ProviderError> {
        self.snapshot_info(id).await
    }

    async fn remove_snapshot(&self, id: SnapshotId) -> Result<(), ProviderError> {
        self.remove_copy(id).await
    }

    async fn snapshots(&self) -> Result<Vec<SnapshotId>, ProviderError> {
        self.list_snapshots().await
    }

    fn storage_directories(&self) -> Vec<PathBuf> {
        let own = self.disks.as_ref().ok().map(|disks| disks.directory().to_owned());
        own.into_iter().chain(self.engine_directory.get().cloned()).collect()
    }

    async fn disk_usage(&self, thorough: bool) -> Vec<DiskUse> {
        self.measure_disks(thorough).await
    }

    fn cpu_groups(&self) -> Vec<(WorkspaceId, CpuGroup)> {
        self.running
            .processes
            .lock()
            .iter()
            .filter_map(|(id, known)| Some((*id, known.cpu.clone()?)))
            .collect()
    }

    async fn remove_unused_resources(&self) -> Result<(), ProviderError> {
        self.remove_probes(false).await.map_err(|error| ProviderError::failed("removing probes", error))?;
        self.host.remove_older_guest_images().await?;
        self.host.remove_unused_shared_directories().await
    }

    async fn remove_shared_resources(&self) -> Result<(), ProviderError> {
        self.remove_probes(true).await.map_err(|error| ProviderError::failed("removing probes", error))?;
        let failed = |error: EngineError| ProviderError::failed("listing sandboxes", error);
        if self.engine.containers(&self.label()).await.map_err(failed)?.is_empty() {
            self.host.remove_guest_volume().await?;
        }
        if self.list_sandboxes().await?.is_empty() {
            self.network.remove(&self.engine).await?;
        }
        Ok(())
    }
}
