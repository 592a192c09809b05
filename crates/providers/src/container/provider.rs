//! The provider itself: create, stop, resume, destroy, and how it is doing.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use bollard::models::{ImageConfig, SystemInfo};
use emergent_failpoint::failpoint;
use emergent_guest_client::GuestClient;
use emergent_host::network::host_nameservers;
use emergent_wire::id::InstallationId;
use emergent_wire::workspace::{
    AvailableResources, Capabilities, DiskQuota, IsolationLevel, NetworkMode, ProviderName,
};
use emergent_wire::{SnapshotId, WorkspaceId};

use super::disk::{Disks, disk_of};
use super::engine::{Engine, EngineError};
use super::network::Network;
use super::oom::{self, KillCounter};
use super::spec::{self, GUEST_DIR, GUEST_PATH, Surroundings};
use super::stream::Attached;
use super::{LABEL_INSTALLATION, LABEL_WORKSPACE, name_of};
use crate::error::ProviderError;
use crate::guest_binary::InstalledGuest;
use crate::sandbox::{
    Health, ImageProgram, Observed, ObservedState, Sandbox, SandboxSpec, WorkspaceProvider, configure,
};
use crate::starts::Starts;

/// What is said when the engine can't run gVisor containers.
pub const GVISOR_MISSING: &str = "gVisor runtime not available";
/// The engine's name for gVisor's runtime.
const RUNSC: &str = "runsc";
/// How long the agent's own grace for processes (8 s) may take, and then some.
const STOP_GRACE_S: i32 = 12;
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

/// How to reach the engine and where to keep things.
#[derive(Clone, Debug)]
pub struct ContainerOptions {
    /// Who owns what is made.
    pub installation: InstallationId,
    /// Where disks and the guest agent's binary are kept.
    pub data_dir: PathBuf,
    /// The engine's address; `DOCKER_HOST` or the usual socket unless given.
    pub docker_host: Option<String>,
    /// The name servers that sandboxes use; the host's unless given.
    pub nameservers: Vec<std::net::IpAddr>,
}

/// Containers on a Docker engine.
pub struct ContainerProvider {
    runtime: Runtime,
    installation: InstallationId,
    engine: Engine,
    guest: InstalledGuest,
    /// The agent's file can't be seen by the engine (it runs elsewhere): it is copied into each container.
    copy_guest: AtomicBool,
    disks: Result<Disks, String>,
    network: Network,
    host_cpus: AtomicU32,
    starts: Starts,
    kill_counters: Mutex<HashMap<WorkspaceId, KillCounter>>,
}

impl ContainerProvider {
    /// A provider on the engine that the options name. Nothing is asked of the engine yet.
    pub fn new(runtime: Runtime, options: &ContainerOptions) -> Result<Self, ProviderError> {
        let engine = Engine::open(options.docker_host.as_deref())
            .map_err(|error| ProviderError::Unavailable(error.to_string()))?;
        let guest = InstalledGuest::install(&options.data_dir.join("guest"))
            .map_err(|error| ProviderError::failed("writing the guest agent", error))?;
        let nameservers =
            if options.nameservers.is_empty() { host_nameservers() } else { options.nameservers.clone() };
        Ok(Self {
            runtime,
            installation: options.installation,
            engine,
            guest,
            copy_guest: AtomicBool::new(false),
            disks: Disks::open(&options.data_dir),
            network: Network::new(options.installation, nameservers),
            host_cpus: AtomicU32::new(0),
            starts: Starts::default(),
            kill_counters: Mutex::default(),
        })
    }

    fn disk_quota(&self) -> DiskQuota {
        if self.disks.is_ok() { DiskQuota::Enforced } else { DiskQuota::Watched }
    }

    fn label(&self) -> String {
        format!("{LABEL_INSTALLATION}={}", self.installation)
    }

    /// CPUs of the engine's host.
    async fn host_cpus(&self) -> Result<u32, EngineError> {
        match self.host_cpus.load(Ordering::Relaxed) {
            0 => {
                let cpus = cpus_of(&self.engine.info().await?);
                self.host_cpus.store(cpus, Ordering::Relaxed);
                Ok(cpus)
            }
            known => Ok(known),
        }
    }

    /// Makes the container, and its disk beside it.
    async fn make(&self, spec: &SandboxSpec) -> Result<(), ProviderError> {
        if spec.network == NetworkMode::Nat {
            self.network.ensure(&self.engine).await?;
        }
        let host_cpus = self.host_cpus().await.map_err(|error| self.sort(&error, spec))?;
        let copied = self.copy_guest.load(Ordering::Relaxed);
        let around = Surroundings {
            installation: self.installation,
            runtime: (self.runtime == Runtime::Gvisor).then_some(RUNSC),
            guest: (!copied).then(|| self.guest.directory()),
            disks: self.disks.as_ref().ok(),
            network: &self.network.name,
            host_cpus,
        };
        let name = name_of(spec.id);
        let container = async {
            let created = self.engine.create(&name, spec::container(spec, &around)).await;
            match created {
                Err(error) if !copied && self.cannot_bind(&error) => {
                    let around = Surroundings { guest: None, ..around };
                    self.copy_guest.store(true, Ordering::Relaxed);
                    self.engine.create(&name, spec::container(spec, &around)).await
                }
                // Made by a call that was interrupted.
                Err(EngineError::Conflict(message)) if message.contains("already in use") => Ok(()),
                created => created,
            }
        };
        let disk = self.ensure_disk(spec);
        let (container, disk) = tokio::join!(container, disk);
        container.map_err(|error| self.sort(&error, spec))?;
        disk?;
        failpoint!("sandbox.made");
        if self.copy_guest.load(Ordering::Relaxed) {
            self.copy_guest_into(&name).await?;
        }
        Ok(())
    }

    /// Whether the engine does not see our files: it runs on another host or in another container.
    fn cannot_bind(&self, error: &EngineError) -> bool {
        let path = self.guest.directory().to_string_lossy();
        matches!(error, EngineError::Refused(message) | EngineError::Other(message)
            if message.contains("bind source path does not exist") && message.contains(&*path))
    }

    async fn copy_guest_into(&self, name: &str) -> Result<(), ProviderError> {
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

    async fn ensure_disk(&self, spec: &SandboxSpec) -> Result<(), ProviderError> {
        let Ok(disks) = self.disks.clone() else {
            return Ok(());
        };
        let (size, snapshot) = (spec.limits.disk, spec.snapshot);
        let own = disk_of(spec.id, None);
        let named: Vec<String> =
            spec.volumes.iter().map(|volume| disk_of(spec.id, Some(&volume.name))).collect();
        on_disk("making the disk", move || {
            disks.ensure(&own, size, snapshot)?;
            named.iter().try_for_each(|disk| disks.ensure(disk, size, None))
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

    /// Starts the container with its channel attached.
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
        let (connected, pid) = tokio::join!(connected, self.pid_of(spec.id));
        let channel = match connected {
            Ok(channel) => channel,
            Err(error) => {
                let why = self.explain_end(spec.id).await.map(|end| format!("; {end}")).unwrap_or_default();
                return Err(ProviderError::Failed {
                    what: "starting the guest agent",
                    reason: format!("{error}{why}"),
                });
            }
        };
        failpoint!("sandbox.greeted");
        // Before the agent is told anything, so that no process but its own is made yet.
        if let Some(pid) = pid {
            self.prepare_for_oom(spec.id, pid);
        }
        self.configure(spec, &channel).await?;
        Ok(channel)
    }

    /// gVisor's process of a sandbox.
    async fn pid_of(&self, id: WorkspaceId) -> Option<i64> {
        if self.runtime != Runtime::Gvisor {
            return None;
        }
        self.engine.inspect(&name_of(id)).await.ok()?.state?.pid.filter(|pid| *pid > 0)
    }

    fn prepare_for_oom(&self, id: WorkspaceId, pid: i64) {
        if let Err(error) = oom::prefer_commands(pid) {
            tracing::debug!(workspace = %id, %error, "out of memory, the kernel may end the whole sandbox");
        }
        if let Some(counter) = KillCounter::of(pid) {
            self.kill_counters().insert(id, counter);
        }
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

    async fn sandbox(&self, spec: &SandboxSpec, channel: GuestClient) -> Sandbox {
        let warnings = self.warnings(spec).await;
        Sandbox { channel, disk_quota: self.disk_quota(), warnings }
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
                ProviderError::TimedOut { what: "the Docker engine", seconds: *seconds }
            }
            EngineError::NotFound(_) => ProviderError::Gone(text),
            EngineError::Refused(_) => ProviderError::Unacceptable(text),
            EngineError::Conflict(_) | EngineError::Other(_) => {
                ProviderError::failed("the Docker engine", text)
            }
        }
    }
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

/// Does something with files that may take a while.
async fn on_disk<T: Send + 'static>(
    what: &'static str,
    work: impl FnOnce() -> std::io::Result<T> + Send + 'static,
) -> Result<T, ProviderError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(std::io::Error::other).flatten().map_err(|error| ProviderError::failed(what, error))
}

fn cpus_of(info: &SystemInfo) -> u32 {
    info.ncpu.and_then(|cpus| u32::try_from(cpus).ok()).filter(|cpus| *cpus > 0).unwrap_or(1)
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
            startup_latency_ms: self.starts.typical_ms(),
        }
    }

    fn sandbox_name(&self, id: WorkspaceId) -> String {
        name_of(id)
    }

    async fn health(&self) -> Health {
        let info = match self.engine.info().await {
            Ok(info) => info,
            Err(error) => {
                return Health::unhealthy(error.to_string());
            }
        };
        self.host_cpus.store(cpus_of(&info), Ordering::Relaxed);
        let has_runsc = info.runtimes.as_ref().is_some_and(|runtimes| runtimes.contains_key(RUNSC));
        let problem = (self.runtime == Runtime::Gvisor && !has_runsc)
            .then(|| missing_runtime("the engine has no runtime 'runsc'"));
        let notes: Vec<String> = self
            .disks
            .as_ref()
            .err()
            .map(|reason| format!("disk limits are watched, not enforced: {reason}"))
            .into_iter()
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
        self.make(spec).await?;
        let channel = self.launch(spec).await?;
        self.starts.remember(begun.elapsed());
        Ok(self.sandbox(spec, channel).await)
    }

    async fn destroy(&self, id: WorkspaceId) -> Result<(), ProviderError> {
        self.kill_counters().remove(&id);
        let name = name_of(id);
        self.engine
            .remove(&name)
            .await
            .map_err(|error| ProviderError::failed("removing the container", error))?;
        failpoint!("sandbox.container_removed");
        self.remove_volume(&name).await?;
        let label = format!("{LABEL_WORKSPACE}={id}");
        let named = self.engine.volume_names(&label).await;
        for volume in named.map_err(|error| ProviderError::failed("listing volumes", error))? {
            self.remove_volume(&volume).await?;
        }
        failpoint!("sandbox.volume_removed");
        if let Ok(disks) = self.disks.clone() {
            on_disk("removing the disk", move || disks.remove(id)).await?;
        }
        Ok(())
    }

    async fn stop(&self, id: WorkspaceId) -> Result<(), ProviderError> {
        match self.engine.stop(&name_of(id), STOP_GRACE_S).await {
            Ok(()) => Ok(()),
            // Removed behind our back: its files are on its volume, and resume makes the container again.
            Err(EngineError::NotFound(_)) => Ok(()),
            Err(error) => Err(ProviderError::failed("stopping the container", error)),
        }
    }

    async fn resume(&self, spec: &SandboxSpec) -> Result<Sandbox, ProviderError> {
        let name = name_of(spec.id);
        match self.engine.inspect(&name).await {
            Ok(found) if found.state.as_ref().and_then(|state| state.running) == Some(true) => {
                let channel = self.open_channel(spec).await?;
                return Ok(self.sandbox(spec, channel).await);
            }
            Ok(_) => {
                if spec.network == NetworkMode::Nat {
                    self.network.ensure(&self.engine).await?;
                }
                self.ensure_disk(spec).await?;
            }
            // A new, empty disk must never be taken for the old one.
            Err(EngineError::NotFound(_)) if self.has_files(spec.id).await? => self.make(spec).await?,
            Err(EngineError::NotFound(_)) => {
                return Err(ProviderError::Gone("its container and its files were removed".to_owned()));
            }
            Err(error) => return Err(self.sort(&error, spec)),
        }
        let channel = self.launch(spec).await?;
        Ok(self.sandbox(spec, channel).await)
    }

    async fn renew(&self, spec: &SandboxSpec) -> Result<Sandbox, ProviderError> {
        let removed = self.engine.remove(&name_of(spec.id)).await;
        removed.map_err(|error| ProviderError::failed("removing the container", error))?;
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
            let end = self.explain_end(spec.id).await.unwrap_or_else(|| "it has ended".to_owned());
            return Err(ProviderError::NotRunning(end));
        }
        if state.paused == Some(true) {
            self.engine.unpause(&name).await.map_err(|error| self.sort(&error, spec))?;
        }
        let program = vec![GUEST_PATH.to_owned(), "connect".to_owned()];
        let attached = self.engine.exec(&name, program).await.map_err(|error| self.sort(&error, spec))?;
        self.greet(spec, attached).await
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
        configure(channel, configuration).await
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

    async fn go_on(&self, id: WorkspaceId) -> Result<(), ProviderError> {
        let unpaused = self.engine.unpause(&name_of(id)).await;
        unpaused.map_err(|error| ProviderError::failed("letting the container go on", error))
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

    async fn explain_end(&self, id: WorkspaceId) -> Option<String> {
        let state = match self.engine.inspect(&name_of(id)).await {
            Ok(found) => found.state?,
            Err(EngineError::NotFound(_)) => return Some("its container was removed".to_owned()),
            Err(_) => return None,
        };
        if state.running == Some(true) {
            return None;
        }
        let code = state.exit_code.unwrap_or_default();
        if state.oom_killed == Some(true) {
            return Some("the whole sandbox ran out of memory and was killed".to_owned());
        }
        let error = state.error.filter(|error| !error.is_empty()).map(|error| format!(": {error}"));
        Some(format!("its container ended with code {code}{}", error.unwrap_or_default()))
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

    async fn retire(&self) -> Result<(), ProviderError> {
        if self.list().await?.is_empty() {
            self.network.remove(&self.engine).await?;
        }
        Ok(())
    }
}

impl ContainerProvider {
    /// Puts the network and its rules back, whoever took them away.
    pub async fn repair_network(&self) -> Result<(), ProviderError> {
        self.network.repair(&self.engine).await
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
