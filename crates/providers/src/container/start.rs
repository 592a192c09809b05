//! Creating, starting and reaching a container.
//!
//! ```text
//! create ─▶ disk + container (in parallel) ─▶ attach ─▶ start ─▶ greet the agent ─▶ configure it
//! resume ─▶ running: open a channel
//!        ├▶ stopped: check the disk ─────────▶ attach ─▶ …
//!        └▶ gone, files there: as create
//! ```

use std::time::{Duration, Instant};

use bollard::models::{ContainerInspectResponse, ContainerStateStatusEnum};
use emergent_failpoint::failpoint;
use emergent_guest_client::GuestClient;
use emergent_guest_protocol::{AGENT_PATH, CONNECT_COMMAND};
use emergent_wire::WorkspaceId;
use emergent_wire::workspace::NetworkMode;

use super::disk::{DiskCheck, disk_of};
use super::engine_error::EngineError;
use super::guest_image::GuestVolume;
use super::host::run_blocking;
use super::name_of;
use super::provider::{ContainerProvider, RUNSC, Runtime};
use super::spec::{self, ContainerContext};
use super::stream::Attached;
use crate::error::ProviderError;
use crate::provider::WorkspaceProvider as _;
use crate::sandbox::{Sandbox, SandboxExit, SandboxId, SandboxSpec};

/// Time limit of a new channel to a running container.
const CHANNEL_TIME: Duration = Duration::from_secs(25);
/// Time limit of the channel on a container's own streams.
const ATTACHED_CHANNEL_TIME: Duration = Duration::from_secs(6);

impl ContainerProvider {
    pub(super) async fn create_sandbox(&self, spec: &SandboxSpec) -> Result<Sandbox, ProviderError> {
        let begun = Instant::now();
        let started = async {
            let disk = self.create_container(spec).await?;
            Ok((self.start_attached(spec).await?, disk))
        };
        let (channel, disk) = started.await.inspect_err(|error| self.record_failed_start(error))?;
        self.starts.record_cold_start(begun.elapsed());
        Ok(self.sandbox(spec, channel, disk).await)
    }

    pub(super) async fn resume_sandbox(&self, spec: &SandboxSpec) -> Result<Sandbox, ProviderError> {
        let disk = match self.inspect_unless_removing(spec.id).await {
            Ok(found) if is_running(&found) => {
                let channel = self.open_exec_channel(spec).await?;
                return Ok(self.sandbox(spec, channel, DiskCheck::Clean).await);
            }
            Ok(_) => {
                if spec.network == NetworkMode::Nat {
                    self.network.ensure(&self.engine).await?;
                }
                self.ensure_disks(spec).await?
            }
            // A new, empty disk must never take the place of a lost one.
            Err(EngineError::NotFound(_)) if self.has_files(spec.id).await? => {
                self.create_container(spec).await?
            }
            Err(EngineError::NotFound(_)) => {
                return Err(ProviderError::Gone("its container and its files were removed".to_owned()));
            }
            Err(error) => return self.checked(Err(error)).await,
        };
        let channel = self.start_attached(spec).await.inspect_err(|error| self.record_failed_start(error))?;
        self.starts.record_success();
        Ok(self.sandbox(spec, channel, disk).await)
    }

    /// Inspects a container. Waits for the end of a removal that an earlier call began and did not wait for: removing a root
    /// layer of many files takes the engine long.
    async fn inspect_unless_removing(
        &self,
        id: WorkspaceId,
    ) -> Result<ContainerInspectResponse, EngineError> {
        let name = name_of(id);
        let found = self.engine.inspect(&name).await?;
        if !is_being_removed(&found) {
            return Ok(found);
        }
        self.engine.remove(&name).await?;
        self.engine.inspect(&name).await
    }

    /// Creates the container and, at the same time, its disks.
    async fn create_container(&self, spec: &SandboxSpec) -> Result<DiskCheck, ProviderError> {
        self.checked(self.engine.check_answers().await).await?;
        if spec.network == NetworkMode::Nat {
            self.network.ensure(&self.engine).await?;
        }
        let guest = self.guest_volume().await?;
        let context = self.checked(self.context(guest.as_ref()).await).await?;
        let name = name_of(spec.id);
        let container = self.engine.create(&name, spec::container(spec, &context));
        let (container, disk) = tokio::join!(container, self.ensure_disks(spec));
        self.checked(container).await?;
        let disk = disk?;
        failpoint!("sandbox.made");
        if guest.is_none() {
            self.copy_guest_into(&name).await?;
        }
        Ok(disk)
    }

    pub(super) async fn context<'a>(
        &'a self,
        guest: Option<&'a GuestVolume>,
    ) -> Result<ContainerContext<'a>, EngineError> {
        Ok(ContainerContext {
            installation: self.installation,
            runtime: (self.runtime == Runtime::Gvisor).then_some(RUNSC),
            guest,
            disks: self.disks.as_ref().ok(),
            network: &self.network.name,
            host_cpus: self.host_cpus().await?,
        })
    }

    /// Whether a workspace's files exist.
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

    /// Creates the missing disks of a sandbox, and checks and attaches all of them.
    async fn ensure_disks(&self, spec: &SandboxSpec) -> Result<DiskCheck, ProviderError> {
        let Ok(disks) = self.disks.clone() else {
            return Ok(DiskCheck::Clean);
        };
        let (size, snapshot) = (spec.limits.disk, spec.snapshot);
        let own = disk_of(spec.id, None);
        let named: Vec<String> =
            spec.volumes.iter().map(|volume| disk_of(spec.id, Some(&volume.name))).collect();
        run_blocking("making the disk", move || {
            let mut check = disks.ensure(&own, size, snapshot)?;
            for disk in &named {
                if disks.ensure(disk, size, None)? == DiskCheck::Repaired {
                    check = DiskCheck::Repaired;
                }
            }
            Ok(check)
        })
        .await
    }

    /// Starts the container with a channel on its own streams.
    async fn start_attached(&self, spec: &SandboxSpec) -> Result<GuestClient, ProviderError> {
        let name = name_of(spec.id);
        let attached = self.checked(self.engine.attach(&name).await).await?;
        failpoint!("sandbox.attached");
        self.checked(self.engine.start(&name).await).await?;
        failpoint!("sandbox.started");
        // If a server attached before the start and was killed, the engine gives the container no input. Then, and when the
        // start is slow, a channel by exec works.
        match tokio::time::timeout(ATTACHED_CHANNEL_TIME, self.greet(spec, attached)).await {
            Ok(greeted) => greeted,
            Err(_) => self.open_exec_channel(spec).await,
        }
    }

    /// Opens a channel by an exec in a running container.
    pub(super) async fn open_exec_channel(&self, spec: &SandboxSpec) -> Result<GuestClient, ProviderError> {
        let name = name_of(spec.id);
        let found = match self.engine.inspect(&name).await {
            Ok(found) => found,
            Err(EngineError::NotFound(message)) => return Err(ProviderError::Gone(message)),
            Err(error) => return self.checked(Err(error)).await,
        };
        if !is_running(&found) {
            let exit = self.exit_reason(spec.id).await.unwrap_or_else(|| SandboxExit::new("it has ended"));
            return Err(ProviderError::NotRunning(exit.reason));
        }
        if found.state.unwrap_or_default().paused == Some(true) {
            self.checked(self.engine.unpause(&name).await).await?;
        }
        let program = vec![AGENT_PATH.to_owned(), CONNECT_COMMAND.to_owned()];
        let greeted = async {
            let attached = self.checked(self.engine.exec(&name, program).await).await?;
            self.greet(spec, attached).await
        };
        match tokio::time::timeout(CHANNEL_TIME, greeted).await {
            Ok(Ok(channel)) => Ok(channel),
            Ok(Err(error)) => Err(self.explain_no_channel(spec.id, error).await),
            Err(_) => {
                let error =
                    ProviderError::TimedOut { what: "opening a channel", seconds: CHANNEL_TIME.as_secs() };
                Err(self.explain_no_channel(spec.id, error).await)
            }
        }
    }

    /// Finds out whether the engine, the container or the agent is at fault. The channel goes through the engine, so a channel
    /// that hangs says nothing about the agent.
    async fn explain_no_channel(&self, id: WorkspaceId, error: ProviderError) -> ProviderError {
        if matches!(error, ProviderError::Unavailable(_) | ProviderError::Gone(_)) {
            return error;
        }
        if let Err(error) = self.checked(self.engine.check_answers().await).await {
            return error;
        }
        match self.exit_reason(id).await {
            Some(exit) => ProviderError::NotRunning(exit.reason),
            None => ProviderError::Unresponsive(error.to_string()),
        }
    }

    /// Receives the agent's greeting and configures the agent.
    async fn greet(&self, spec: &SandboxSpec, attached: Attached) -> Result<GuestClient, ProviderError> {
        let connected = GuestClient::connect(attached.reader, attached.writer);
        let (connected, pid) = tokio::join!(connected, self.record_processes(spec.id));
        let channel = match connected {
            Ok(channel) => channel,
            Err(error) => {
                let exit = self.exit_reason(spec.id).await;
                let exit = exit.map(|exit| format!("; {}", exit.reason)).unwrap_or_default();
                return Err(ProviderError::failed("starting the guest agent", format!("{error}{exit}")));
            }
        };
        failpoint!("sandbox.greeted");
        // The agent has started no other process yet: it starts the first one after its configuration.
        if let Some(pid) = pid {
            self.prioritize_agent(spec.id, pid);
        }
        self.configure(spec, &channel).await?;
        Ok(channel)
    }

    /// Records a failed start, unless the request was at fault.
    fn record_failed_start(&self, error: &ProviderError) {
        if !matches!(error, ProviderError::Unacceptable(_) | ProviderError::NoRoom(_)) {
            self.starts.record_failure();
        }
    }

    async fn sandbox(&self, spec: &SandboxSpec, channel: GuestClient, disk: DiskCheck) -> Sandbox {
        Sandbox {
            id: SandboxId::new(name_of(spec.id)),
            channel,
            disk_quota: self.disk_quota(),
            warnings: self.warnings_for(spec).await,
            disk_was_repaired: disk == DiskCheck::Repaired,
        }
    }
}

fn is_running(container: &ContainerInspectResponse) -> bool {
    container.state.as_ref().and_then(|state| state.running) == Some(true)
}

/// Whether the engine is removing a container, which can't be started any more.
fn is_being_removed(container: &ContainerInspectResponse) -> bool {
    use ContainerStateStatusEnum::{DEAD, REMOVING};
    let status = container.state.as_ref().and_then(|state| state.status);
    matches!(status, Some(REMOVING | DEAD))
}
