//! The provider itself: create, stop, resume, destroy, and how it is doing.

use std::collections::HashMap;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use bollard::models::{ContainerInspectResponse, ContainerStateStatusEnum, ImageConfig, SystemInfo};
use emergent_failpoint::failpoint;
use emergent_guest_client::GuestClient;
use emergent_host::cpu_group::CpuGroup;
use emergent_wire::workspace::{
    AvailableResources, Capabilities, DiskQuota, IsolationLevel, NetworkMode, ProviderName,
};
use emergent_wire::{SnapshotId, WorkspaceId};

use super::agent_priority::prefer_agent_over_commands;
use super::disk::{Disks, Ensured, disk_of};
use super::disk_watch::RootLayer;
use super::engine::EngineError;
use super::guest_image::{GuestImage, GuestVolume};
use super::host::{ContainerHost, cpus_of, on_disk};
use super::oom::KillCounter;
use super::processes::ContainerProcesses;
use super::spec::{self, GUEST_DIR, GUEST_PATH, Surroundings};
use super::stream::Attached;
use super::{LABEL_WORKSPACE, name_of};
use crate::error::ProviderError;
use crate::image::ImageProgram;
use crate::provider::{Health, WorkspaceProvider, configure_agent};
use crate::sandbox::{
    DiskUse, Observed, ObservedState, Sandbox, SandboxExit, SandboxId, SandboxSpec, SnapshotInfo,
};
use crate::start_history::StartHistory;

/// What is said when the engine can't run gVisor containers.
pub const GVISOR_MISSING: &str = "gVisor runtime not available";
/// The engine's name for gVisor's runtime.
pub(super) const RUNSC: &str = "runsc";
/// How long the agent's own grace for processes (8 s) may take, and then some.
const STOP_GRACE_S: i32 = 12;
/// How long the engine may take to stop a container beyond its grace before the container's processes are killed.
const STOP_MARGIN: Duration = Duration::from_secs(6);
/// How long the engine may take to remove a container whose processes are gone.
const REMOVE_TIME: Duration = Duration::from_secs(10);
/// How long the engine may take to name a container's processes, or to notice that they are gone.
const NOTICE_TIME: Duration = Duration::from_secs(5);
/// How long a new channel to a container that runs may take.
const CHANNEL_TIME: Duration = Duration::from_secs(25);
/// How long the channel on a container's own streams may take.
const ATTACHED_WITHIN: Duration = Duration::from_secs(6);

/// What runs the containers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Runtime {
    /// gVisor's application kernel.
    Gvisor,
    /// The engine's default, which shares the host's kernel.
    Plain,
}

/// Containers on a Docker engine.
pub struct ContainerProvider {
    pub(super) runtime: Runtime,
    host: Arc<ContainerHost>,
    starts: StartHistory,
    /// Held by whoever starts a probe.
    probing: tokio::sync::Mutex<()>,
    kill_counters: Mutex<HashMap<WorkspaceId, KillCounter>>,
    /// Of the containers that this process has started or reached: known before the engine has to be asked.
    processes: Mutex<HashMap<WorkspaceId, ContainerProcesses>>,
    pub(super) root_layers: Mutex<HashMap<WorkspaceId, RootLayer>>,
    /// When the engine was asked last which containers run.
    pub(super) listed: Mutex<Option<Instant>>,
}

impl Deref for ContainerProvider {
    type Target = ContainerHost;

    fn deref(&self) -> &ContainerHost {
        &self.host
    }
}

impl ContainerProvider {
    /// A provider of containers of one kind. Nothing is asked of the engine yet.
    pub fn new(runtime: Runtime, host: &Arc<ContainerHost>) -> Self {
        Self {
            runtime,
            host: Arc::clone(host),
            starts: StartHistory::default(),
            probing: tokio::sync::Mutex::default(),
            kill_counters: Mutex::default(),
            processes: Mutex::default(),
            root_layers: Mutex::default(),
            listed: Mutex::default(),
        }
    }

    fn disk_quota(&self) -> DiskQuota {
        if self.disks.is_ok() { DiskQuota::Enforced } else { DiskQuota::Watched }
    }

    /// Makes the container, and its disk beside it.
    async fn make(&self, spec: &SandboxSpec) -> Result<Ensured, ProviderError> {
        self.engine.check_answers().await.map_err(|error| self.sort(&error, spec))?;
        if spec.network == NetworkMode::Nat {
            self.network.ensure(&self.engine).await?;
        }
        let guest = self.guest_volume().await?;
        let around = self.surroundings(guest.as_ref()).await.map_err(|error| self.sort(&error, spec))?;
        let name = name_of(spec.id);
        let container = async {
            let created = self.engine.create(&name, spec::container(spec, &around)).await;
            match created {
                // Made by a call that was interrupted.
                Err(EngineError::Conflict(message)) if message.contains("already in use") => Ok(()),
                created => created,
            }
        };
        let disk = self.ensure_disk(spec);
        let (container, disk) = tokio::join!(container, disk);
        container.map_err(|error| self.sort(&error, spec))?;
        let ensured = disk?;
        failpoint!("sandbox.made");
        if guest.is_none() {
            self.copy_guest_into(&name).await?;
        }
        Ok(ensured)
    }

    pub(super) async fn surroundings<'a>(
        &'a self,
        guest: Option<&'a GuestVolume>,
    ) -> Result<Surroundings<'a>, EngineError> {
        Ok(Surroundings {
            installation: self.installation,
            runtime: (self.runtime == Runtime::Gvisor).then_some(RUNSC),
            guest,
            disks: self.disks.as_ref().ok(),
            network: &self.network.name,
            host_cpus: self.host_cpus().await?,
        })
    }

    /// The volume with the guest agent; none where each container gets a copy.
    pub(super) async fn guest_volume(&self) -> Result<Option<GuestVolume>, ProviderError> {
        if self.guest.is_none() {
            return Ok(None);
        }
        let host = Arc::clone(&self.host);
        on_disk("attaching the guest agent's image", move || {
            host.guest.as_ref().map(GuestImage::volume).transpose()
        })
        .await
    }

    pub(super) async fn copy_guest_into(&self, name: &str) -> Result<(), ProviderError> {
        let failed = |error: &dyn std::fmt::Display| ProviderError::failed("copying the guest agent", error);
        let archive = tar_of(GUEST_DIR.trim_start_matches('/'), &emergent_guest_binary::FILES);
        let options = bollard::query_parameters::UploadToContainerOptionsBuilder::new().path("/").build();
        let docker = self.engine.docker().await.map_err(|error| failed(&error))?;
        let upload = docker.upload_to_container(name, Some(options), bollard::body_full(archive.into()));
        super::engine::within(super::engine::ACT, upload).await.map_err(|error| failed(&error))
    }

    /// Whether a workspace's files are still there.
    async fn has_files(&self, id: WorkspaceId) -> Result<bool, ProviderError> {
        match &self.disks {
            Ok(disks) => Ok(disks.exists(id)),
            Err(_) => self
                .engine
                .has_volume(&name_of(id))
                .await
                .map_err(|error| ProviderError::failed("looking for the volume", error)),
        }
    }

    async fn ensure_disk(&self, spec: &SandboxSpec) -> Result<Ensured, ProviderError> {
        let Ok(disks) = self.disks.clone() else {
            return Ok(Ensured::Whole);
        };
        let (size, snapshot) = (spec.limits.disk, spec.snapshot);
        let own = disk_of(spec.id, None);
        let named: Vec<String> =
            spec.volumes.iter().map(|volume| disk_of(spec.id, Some(&volume.name))).collect();
        on_disk("making the disk", move || {
            let mut ensured = disks.ensure(&own, size, snapshot)?;
            for disk in &named {
                if disks.ensure(disk, size, None)? == Ensured::Mended {
                    ensured = Ensured::Mended;
                }
            }
            Ok(ensured)
        })
        .await
    }

    /// The disks, which only they can be copied.
    fn copyable_disks(&self) -> Result<Disks, ProviderError> {
        self.disks.clone().map_err(|reason| {
            ProviderError::Unacceptable(format!("snapshots need disks of their own: {reason}"))
        })
    }

    /// Writes what a sandbox that is paused wrote to its files through to its disk.
    async fn flush(&self, name: &str) {
        let path = self.engine.volume_path(name).await.unwrap_or_default();
        let flushed = tokio::task::spawn_blocking(move || match std::fs::File::open(path) {
            Ok(directory) => rustix::fs::syncfs(directory),
            // The engine's mounts are not visible here: everything is flushed.
            Err(_) => {
                rustix::fs::sync();
                Ok(())
            }
        });
        if !matches!(flushed.await, Ok(Ok(()))) {
            tracing::warn!(volume = name, "a disk could not be flushed before it is copied");
        }
    }

    /// StartHistory the container with its channel attached.
    async fn launch(&self, spec: &SandboxSpec) -> Result<GuestClient, ProviderError> {
        let name = name_of(spec.id);
        let attached = self.engine.attach(&name).await.map_err(|error| self.sort(&error, spec))?;
        failpoint!("sandbox.attached");
        self.engine.start(&name).await.map_err(|error| self.sort(&error, spec))?;
        failpoint!("sandbox.started");
        // An engine that had somebody attached before the start, who has gone since (a server that was killed), gives the
        // container no input. Then a channel of the other kind is opened; so it is when a start takes its time.
        match tokio::time::timeout(ATTACHED_WITHIN, self.greet(spec, attached)).await {
            Ok(greeted) => greeted,
            Err(_) => self.open_channel(spec).await,
        }
    }

    async fn greet(&self, spec: &SandboxSpec, attached: Attached) -> Result<GuestClient, ProviderError> {
        let connected = GuestClient::connect(attached.reader, attached.writer);
        let (connected, pid) = tokio::join!(connected, self.note_process(spec.id));
        let channel = match connected {
            Ok(channel) => channel,
            Err(error) => {
                let why = self
                    .exit_reason(spec.id)
                    .await
                    .map(|exit| format!("; {}", exit.reason))
                    .unwrap_or_default();
                return Err(ProviderError::Failed {
                    what: "starting the guest agent",
                    reason: format!("{error}{why}"),
                });
            }
        };
        failpoint!("sandbox.greeted");
        // Before the agent is told anything, so that no process but its own is made yet.
        if let Some(pid) = pid {
            self.note_sandbox_process(spec.id, pid);
        }
        self.configure(spec, &channel).await?;
        Ok(channel)
    }

    /// Finds the first process of a container, and remembers its control group.
    pub(super) async fn note_process(&self, id: WorkspaceId) -> Option<i64> {
        let found = self.engine.inspect(&name_of(id)).await.ok()?;
        if let Some(layer) = RootLayer::of(&found) {
            self.root_layers().insert(id, layer);
        }
        let pid = found.state?.pid.filter(|pid| *pid > 0)?;
        if let Some(known) = ContainerProcesses::of(pid, &found.id?) {
            self.processes().insert(id, known);
        }
        Some(pid).filter(|_| self.runtime == Runtime::Gvisor)
    }

    fn root_layers(&self) -> MutexGuard<'_, HashMap<WorkspaceId, RootLayer>> {
        self.root_layers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn processes(&self) -> MutexGuard<'_, HashMap<WorkspaceId, ContainerProcesses>> {
        self.processes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Kills all processes of a container by its control group, and waits until the engine has noticed: asked to kill what has
    /// just ended, its helper process for the container (the shim) may wait for ever. A container without a group is left to
    /// the engine.
    async fn kill_processes(&self, id: WorkspaceId) -> Result<(), ProviderError> {
        if !self.processes().contains_key(&id) {
            let _ = tokio::time::timeout(NOTICE_TIME, self.note_process(id)).await;
        }
        self.root_layers().remove(&id);
        let Some(known) = self.processes().remove(&id) else {
            return Ok(());
        };
        let shim = known.shim.clone();
        on_disk("killing the sandbox's processes", move || known.kill()).await?;
        let name = name_of(id);
        if self.engine.wait_until_ended(&name, NOTICE_TIME).await {
            return Ok(());
        }
        tracing::warn!(workspace = %id, "the engine does not notice that a container has ended: its shim is killed");
        if let Some(shim) = shim {
            on_disk("killing the container's shim", move || shim.kill()).await?;
        }
        Ok(())
    }

    /// Removes a container, also one that its engine can't end.
    async fn remove_container(&self, id: WorkspaceId) -> Result<(), ProviderError> {
        let name = name_of(id);
        if let Err(error) = self.kill_processes(id).await {
            tracing::warn!(workspace = %id, %error, "a sandbox's processes do not end");
        }
        match tokio::time::timeout(REMOVE_TIME, self.engine.remove(&name)).await {
            Ok(removed) => removed.map_err(|error| ProviderError::failed("removing the container", error)),
            Err(_) => Err(ProviderError::TimedOut {
                what: "removing the container",
                seconds: REMOVE_TIME.as_secs(),
            }),
        }
    }

    fn note_sandbox_process(&self, id: WorkspaceId, pid: i64) {
        if let Err(error) = prefer_agent_over_commands(pid) {
            tracing::debug!(workspace = %id, %error, "the sandbox's commands compete with its agent for CPU and memory");
        }
        if let Some(counter) = KillCounter::of(pid) {
            self.kill_counters().insert(id, counter);
        }
    }

    /// Removes the engine's entries of a sandbox's volumes.
    async fn remove_volumes(&self, id: WorkspaceId) -> Result<(), ProviderError> {
        self.remove_volume(&name_of(id)).await?;
        let label = format!("{LABEL_WORKSPACE}={id}");
        let named = self.engine.volume_names(&label).await;
        for volume in named.map_err(|error| ProviderError::failed("listing volumes", error))? {
            self.remove_volume(&volume).await?;
        }
        Ok(())
    }

    async fn remove_volume(&self, name: &str) -> Result<(), ProviderError> {
        match self.engine.remove_volume(name).await {
            Ok(()) => Ok(()),
            // Engines that were restarted under running containers (live-restore) may count mounts wrongly and keep the
            // volume's entry until their next start. What was on it goes all the same, and recovery removes the entry.
            Err(error) if self.disks.is_ok() && error.to_string().contains("volume has active mounts") => {
                tracing::warn!(volume = name, "the engine keeps the entry of a volume whose disk is removed");
                Ok(())
            }
            Err(error) => Err(ProviderError::failed("removing the volume", error)),
        }
    }

    fn kill_counters(&self) -> MutexGuard<'_, HashMap<WorkspaceId, KillCounter>> {
        self.kill_counters.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Remembers that a start failed, unless what was asked for was at fault.
    fn note_failed_start(&self, error: &ProviderError) {
        if !matches!(error, ProviderError::Unacceptable(_) | ProviderError::NoRoom(_)) {
            self.starts.record_failure();
        }
    }

    async fn sandbox(&self, spec: &SandboxSpec, channel: GuestClient, disk: Ensured) -> Sandbox {
        let warnings = self.warnings(spec).await;
        let disk_was_repaired = disk == Ensured::Mended;
        Sandbox {
            id: SandboxId::new(name_of(spec.id)),
            channel,
            disk_quota: self.disk_quota(),
            warnings,
            disk_was_repaired,
        }
    }

    /// What an error of the engine means for the caller.
    fn sort(&self, error: &EngineError, spec: &SandboxSpec) -> ProviderError {
        let text = error.to_string();
        let lower = text.to_ascii_lowercase();
        if self.runtime == Runtime::Gvisor
            && (lower.contains("unknown runtime") || lower.contains("unknown or invalid runtime"))
        {
            return ProviderError::Unavailable(missing_runtime("the engine has no runtime 'runsc'"));
        }
        if self.runtime == Runtime::Gvisor && lower.contains("oci runtime") {
            return ProviderError::Unavailable(missing_runtime(&format!(
                "it is installed but does not work: {text}"
            )));
        }
        if lower.contains("no such image") {
            return no_image(&spec.image);
        }
        match error {
            EngineError::Unreachable(_) => ProviderError::Unavailable(text),
            EngineError::TimedOut(seconds) => {
                ProviderError::TimedOut { what: "a call to the Docker engine", seconds: *seconds }
            }
            EngineError::NotFound(_) => ProviderError::Gone(text),
            EngineError::Refused(_) => ProviderError::Unacceptable(text),
            EngineError::Conflict(_) | EngineError::Other(_) => {
                ProviderError::failed("the Docker engine", text)
            }
        }
    }
}

/// Whether the engine is removing a container, which can't be started any more.
fn is_being_removed(container: &ContainerInspectResponse) -> bool {
    use ContainerStateStatusEnum::{DEAD, REMOVING};
    let status = container.state.as_ref().and_then(|state| state.status);
    matches!(status, Some(REMOVING | DEAD))
}

fn missing_runtime(reason: &str) -> String {
    format!(
        "{GVISOR_MISSING}: {reason}. Run `emergent doctor` for how to fix it, or `make setup`, which installs it"
    )
}

pub(crate) fn no_image(image: &str) -> ProviderError {
    ProviderError::Unacceptable(format!(
        "the image '{image}' is not on this host: build or load it (`make setup` makes the default one)"
    ))
}

/// What an image's configuration says that it runs.
pub(crate) fn program_of(config: ImageConfig) -> ImageProgram {
    let given = |text: Option<String>| text.filter(|text| !text.is_empty());
    ImageProgram {
        entrypoint: config.entrypoint.unwrap_or_default(),
        arguments: config.cmd.unwrap_or_default(),
        directory: given(config.working_dir),
        user: given(config.user),
    }
}

#[async_trait]
impl WorkspaceProvider for ContainerProvider {
    fn name(&self) -> ProviderName {
        match self.runtime {
            Runtime::Gvisor => ProviderName::Gvisor,
            Runtime::Plain => ProviderName::Docker,
        }
    }

    fn capabilities(&self) -> Capabilities {
        let (isolation, requires) = match self.runtime {
            Runtime::Gvisor => (IsolationLevel::ApplicationKernel, vec!["docker", "runsc"]),
            Runtime::Plain => (IsolationLevel::Container, vec!["docker"]),
        };
        Capabilities {
            isolation,
            persistence: true,
            snapshots: self.disks.is_ok(),
            memory_snapshots: false,
            warm_pool: true,
            requires: requires.into_iter().map(str::to_owned).collect(),
            disk_quota: self.disk_quota(),
            startup_latency_ms: self.starts.median_ms(),
        }
    }

    async fn sandbox_id(&self, id: WorkspaceId) -> Result<SandboxId, ProviderError> {
        Ok(SandboxId::new(name_of(id)))
    }

    async fn health(&self) -> Health {
        let info = match self.engine.info().await {
            Ok(info) => info,
            Err(error) => {
                return Health::unhealthy(error.to_string());
            }
        };
        self.host_cpus.store(cpus_of(&info), Ordering::Relaxed);
        if let Some(directory) = &info.docker_root_dir {
            let _ = self.engine_directory.set(directory.into());
        }
        let has_runsc = info.runtimes.as_ref().is_some_and(|runtimes| runtimes.contains_key(RUNSC));
        let problem = (self.runtime == Runtime::Gvisor && !has_runsc)
            .then(|| missing_runtime("the engine has no runtime 'runsc'"));
        let notes: Vec<String> = self
            .shared_directories_note()
            .into_iter()
            .chain(
                self.disks
                    .as_ref()
                    .err()
                    .map(|reason| format!("disk limits are watched, not enforced: {reason}")),
            )
            .chain(self.network.problem())
            .collect();
        let disk = info.docker_root_dir.as_deref().map_or(0, free_bytes);
        let available =
            AvailableResources { cpus: cpus_of(&info), memory_bytes: free_memory(&info), disk_bytes: disk };
        let note = (!notes.is_empty()).then(|| notes.join("; "));
        Health { problem, note, available: Some(available), spares: 0 }
    }

    async fn create(&self, spec: &SandboxSpec) -> Result<Sandbox, ProviderError> {
        let begun = Instant::now();
        let started = async {
            let disk = self.make(spec).await?;
            Ok((self.launch(spec).await?, disk))
        };
        let (channel, disk) = started.await.inspect_err(|error| self.note_failed_start(error))?;
        self.starts.record_cold_start(begun.elapsed());
        Ok(self.sandbox(spec, channel, disk).await)
    }

    async fn destroy(&self, id: WorkspaceId) -> Result<(), ProviderError> {
        self.kill_counters().remove(&id);
        self.remove_container(id).await?;
        failpoint!("sandbox.container_removed");
        self.remove_volumes(id).await?;
        failpoint!("sandbox.volume_removed");
        if let Ok(disks) = self.disks.clone() {
            on_disk("removing the disk", move || disks.remove(id)).await?;
        }
        Ok(())
    }

    fn storage_directories(&self) -> Vec<PathBuf> {
        let own = self.disks.as_ref().ok().map(|disks| disks.directory().to_owned());
        own.into_iter().chain(self.engine_directory.get().cloned()).collect()
    }

    async fn disk_usage(&self, closely: bool) -> Vec<DiskUse> {
        ContainerProvider::disk_usage(self, closely).await
    }

    async fn stop(&self, id: WorkspaceId) -> Result<(), ProviderError> {
        let most = Duration::from_secs(STOP_GRACE_S.unsigned_abs().into()) + STOP_MARGIN;
        match tokio::time::timeout(most, self.engine.stop(&name_of(id), STOP_GRACE_S)).await {
            Ok(Ok(())) => Ok(()),
            // Removed behind our back: its files are on its volume, and resume makes the container again.
            Ok(Err(EngineError::NotFound(_))) => Ok(()),
            Ok(Err(error)) => Err(ProviderError::failed("stopping the container", error)),
            Err(_) => {
                tracing::warn!(workspace = %id, "the engine does not stop the container: its processes are killed");
                self.kill(id).await
            }
        }
    }

    async fn kill(&self, id: WorkspaceId) -> Result<(), ProviderError> {
        self.kill_processes(id).await?;
        // Without a control group that we know, and to hear that the engine has noticed.
        match tokio::time::timeout(REMOVE_TIME, self.engine.stop(&name_of(id), 0)).await {
            Ok(Ok(()) | Err(EngineError::NotFound(_))) => Ok(()),
            Ok(Err(error)) => Err(ProviderError::failed("ending the container", error)),
            Err(_) => {
                Err(ProviderError::TimedOut { what: "ending the container", seconds: REMOVE_TIME.as_secs() })
            }
        }
    }

    async fn verify_start(&self) -> Option<String> {
        let _one_probe = self.probing.lock().await;
        if self.starts.succeeded_recently() {
            return None;
        }
        if let Err(EngineError::NotFound(_)) = self.engine.image_id(&self.probe_image).await {
            // Nothing to start; workspaces with other images may work.
            return None;
        }
        match self.probe().await {
            Ok(()) => {
                self.starts.record_success();
                None
            }
            Err(reason) => Some(format!("the engine answers but containers do not start: {reason}")),
        }
    }

    async fn remove_unused_resources(&self) -> Result<(), ProviderError> {
        self.remove_probes(false).await.map_err(|error| ProviderError::failed("removing probes", error))?;
        self.host.remove_older_guest_images().await?;
        self.host.remove_unused_shared_directories().await
    }

    async fn resume(&self, spec: &SandboxSpec) -> Result<Sandbox, ProviderError> {
        let name = name_of(spec.id);
        let mut found = self.engine.inspect(&name).await;
        if found.as_ref().is_ok_and(is_being_removed) {
            // Begun by a call that did not wait for its end: a layer of many files takes the engine long to remove.
            self.engine.remove(&name).await.map_err(|error| self.sort(&error, spec))?;
            found = self.engine.inspect(&name).await;
        }
        let disk = match found {
            Ok(found) if found.state.as_ref().and_then(|state| state.running) == Some(true) => {
                let channel = self.open_channel(spec).await?;
                return Ok(self.sandbox(spec, channel, Ensured::Whole).await);
            }
            Ok(_) => {
                if spec.network == NetworkMode::Nat {
                    self.network.ensure(&self.engine).await?;
                }
                self.ensure_disk(spec).await?
            }
            // A new, empty disk must never be taken for the old one.
            Err(EngineError::NotFound(_)) if self.has_files(spec.id).await? => self.make(spec).await?,
            Err(EngineError::NotFound(_)) => {
                return Err(ProviderError::Gone("its container and its files were removed".to_owned()));
            }
            Err(error) => return Err(self.sort(&error, spec)),
        };
        let channel = self.launch(spec).await.inspect_err(|error| self.note_failed_start(error))?;
        self.starts.record_success();
        Ok(self.sandbox(spec, channel, disk).await)
    }

    async fn recreate(&self, spec: &SandboxSpec) -> Result<Sandbox, ProviderError> {
        self.remove_container(spec.id).await?;
        self.resume(spec).await
    }

    async fn open_channel(&self, spec: &SandboxSpec) -> Result<GuestClient, ProviderError> {
        let name = name_of(spec.id);
        let found = match self.engine.inspect(&name).await {
            Ok(found) => found,
            Err(EngineError::NotFound(message)) => return Err(ProviderError::Gone(message)),
            Err(error) => return Err(self.sort(&error, spec)),
        };
        let state = found.state.unwrap_or_default();
        if state.running != Some(true) {
            let exit = self.exit_reason(spec.id).await.unwrap_or_else(|| SandboxExit::new("it has ended"));
            return Err(ProviderError::NotRunning(exit.reason));
        }
        if state.paused == Some(true) {
            self.engine.unpause(&name).await.map_err(|error| self.sort(&error, spec))?;
        }
        let program = vec![GUEST_PATH.to_owned(), "connect".to_owned()];
        let greeted = async {
            let attached = self.engine.exec(&name, program).await.map_err(|error| self.sort(&error, spec))?;
            self.greet(spec, attached).await
        };
        let error = match tokio::time::timeout(CHANNEL_TIME, greeted).await {
            Ok(Ok(channel)) => return Ok(channel),
            Ok(Err(error)) => error,
            Err(_) => ProviderError::TimedOut { what: "opening a channel", seconds: CHANNEL_TIME.as_secs() },
        };
        if matches!(error, ProviderError::Unavailable(_) | ProviderError::Gone(_)) {
            return Err(error);
        }
        // The channel goes through the engine: one that hangs says nothing of the agent.
        self.engine.check_answers().await.map_err(|error| self.sort(&error, spec))?;
        match self.exit_reason(spec.id).await {
            Some(exit) => Err(ProviderError::NotRunning(exit.reason)),
            None => Err(ProviderError::Unresponsive(error.to_string())),
        }
    }

    async fn warnings(&self, spec: &SandboxSpec) -> Vec<String> {
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

    async fn image_digest(&self, image: &str) -> Result<String, ProviderError> {
        match self.engine.image_id(image).await {
            Ok(digest) => Ok(digest),
            Err(EngineError::NotFound(_)) => Err(no_image(image)),
            Err(error) => Err(ProviderError::Unavailable(error.to_string())),
        }
    }

    async fn image_program(&self, image: &str) -> Result<ImageProgram, ProviderError> {
        let config = match self.engine.image_config(image).await {
            Ok(config) => config,
            Err(EngineError::NotFound(_)) => return Err(no_image(image)),
            Err(error) => return Err(ProviderError::Unavailable(error.to_string())),
        };
        Ok(program_of(config))
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
        let disks = self.copyable_disks()?;
        let name = name_of(id);
        let failed = |error: EngineError| ProviderError::failed("pausing the container", error);
        let runs = match self.engine.inspect(&name).await {
            Ok(found) => found.state.and_then(|state| state.running) == Some(true),
            Err(EngineError::NotFound(_)) => false,
            Err(error) => return Err(failed(error)),
        };
        if runs {
            self.engine.pause(&name).await.map_err(failed)?;
            failpoint!("snapshot.paused");
            self.flush(&name).await;
        }
        let copied = on_disk("copying the disk", move || disks.snapshot(id, to)).await;
        failpoint!("snapshot.copied");
        if runs {
            self.engine.unpause(&name).await.map_err(failed)?;
            failpoint!("snapshot.unpaused");
        }
        copied
    }

    async fn unpause(&self, id: WorkspaceId) -> Result<(), ProviderError> {
        let unpaused = async {
            self.engine.check_answers().await?;
            self.engine.unpause(&name_of(id)).await
        };
        unpaused.await.map_err(|error| ProviderError::failed("letting the container go on", error))
    }

    async fn quarantine(&self, id: WorkspaceId, to: SnapshotId) -> Result<(), ProviderError> {
        let disks = self.disks.clone().map_err(|reason| {
            let message = format!(
                "its files are on a volume of the engine that can't be set aside ({reason}): remove container and volume {} by \
                 hand",
                name_of(id)
            );
            ProviderError::Unacceptable(message)
        })?;
        self.kill_counters().remove(&id);
        self.remove_container(id).await?;
        failpoint!("quarantine.container_removed");
        self.remove_volumes(id).await?;
        on_disk("setting the disk aside", move || disks.quarantine(id, to)).await
    }

    async fn inspect_snapshot(&self, id: SnapshotId) -> Result<Option<SnapshotInfo>, ProviderError> {
        let disks = self.copyable_disks()?;
        on_disk("looking at the copy", move || disks.inspect_snapshot(id)).await
    }

    async fn remove_snapshot(&self, id: SnapshotId) -> Result<(), ProviderError> {
        let disks = self.copyable_disks()?;
        on_disk("removing the copy", move || disks.remove_snapshot(id)).await
    }

    async fn snapshots(&self) -> Result<Vec<SnapshotId>, ProviderError> {
        match self.disks.clone() {
            Ok(disks) => on_disk("listing copies", move || disks.snapshots()).await,
            Err(_) => Ok(Vec::new()),
        }
    }

    async fn exit_reason(&self, id: WorkspaceId) -> Option<SandboxExit> {
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

    fn cpu_groups(&self) -> Vec<(WorkspaceId, CpuGroup)> {
        self.processes().iter().filter_map(|(id, known)| Some((*id, known.cpu.clone()?))).collect()
    }

    fn oom_kills(&self, id: WorkspaceId) -> u64 {
        let counter = self.kill_counters().get(&id).cloned();
        counter.map_or(0, |counter| counter.read())
    }

    async fn list(&self) -> Result<Vec<Observed>, ProviderError> {
        let failed = |error: EngineError| ProviderError::failed("listing sandboxes", error);
        let id_of =
            |labels: &HashMap<String, String>| WorkspaceId::from_str(labels.get(LABEL_WORKSPACE)?).ok();
        let mut found: HashMap<WorkspaceId, ObservedState> = HashMap::new();
        for labels in self.engine.volumes(&self.label()).await.map_err(failed)? {
            found.extend(id_of(&labels).map(|id| (id, ObservedState::Remains)));
        }
        if let Ok(disks) = &self.disks {
            let ids = disks.list().map_err(|error| ProviderError::failed("listing disks", error))?;
            found.extend(ids.into_iter().map(|id| (id, ObservedState::Remains)));
        }
        for (labels, running) in self.engine.containers(&self.label()).await.map_err(failed)? {
            let state = if running { ObservedState::Running } else { ObservedState::Stopped };
            found.extend(id_of(&labels).map(|id| (id, state)));
        }
        Ok(found.into_iter().map(|(id, state)| Observed { id, state }).collect())
    }

    async fn remove_shared_resources(&self) -> Result<(), ProviderError> {
        self.remove_probes(true).await.map_err(|error| ProviderError::failed("removing probes", error))?;
        let failed = |error: EngineError| ProviderError::failed("listing sandboxes", error);
        if self.engine.containers(&self.label()).await.map_err(failed)?.is_empty() {
            self.host.remove_guest_volume().await?;
        }
        if self.list().await?.is_empty() {
            self.network.remove(&self.engine).await?;
        }
        Ok(())
    }
}

/// Free bytes where the engine keeps its data, when we are on the same host.
fn free_bytes(path: &str) -> u64 {
    rustix::fs::statvfs(Path::new(path)).map_or(0, |stat| stat.f_bavail * stat.f_frsize)
}

/// Free memory of the host, or all of it when we are not on it.
fn free_memory(info: &SystemInfo) -> u64 {
    let total = info.mem_total.and_then(|bytes| u64::try_from(bytes).ok()).unwrap_or(0);
    let free = std::fs::read_to_string("/proc/meminfo").ok().and_then(|text| {
        let line = text.lines().find(|line| line.starts_with("MemAvailable:"))?;
        line.split_ascii_whitespace().nth(1)?.parse::<u64>().ok().map(|kib| kib * 1024)
    });
    free.map_or(total, |free| free.min(total))
}

/// An archive of executable files in one directory.
fn tar_of(directory: &str, files: &[(&str, &[u8])]) -> Vec<u8> {
    let mut archive = Vec::new();
    for (name, bytes) in files {
        let mut header = [0_u8; 512];
        let mut field = |at: usize, text: &str| header[at..at + text.len()].copy_from_slice(text.as_bytes());
        field(0, &format!("{directory}/{name}"));
        field(100, "0000755\0");
        field(108, "0000000\0");
        field(116, "0000000\0");
        field(124, &format!("{:011o}\0", bytes.len()));
        field(136, "00000000000\0");
        field(148, "        ");
        field(156, "0");
        field(257, "ustar\x0000");
        let checksum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
        header[148..156].copy_from_slice(format!("{checksum:06o}\0 ").as_bytes());
        archive.extend_from_slice(&header);
        archive.extend_from_slice(bytes);
        archive.resize(archive.len().next_multiple_of(512), 0);
    }
    archive.resize(archive.len() + 1024, 0);
    archive
}
