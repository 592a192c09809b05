//! [`WorkspaceProvider`]: the seam between the control plane and the sandboxes.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use emergent_guest_client::GuestClient;
use emergent_guest_protocol::{Configuration, GuestCall};
use emergent_host::cpu_group::CpuGroup;
use emergent_wire::workspace::{AvailableResources, Capabilities, ProviderName};
use emergent_wire::{SnapshotId, WorkspaceId};

use crate::error::ProviderError;
use crate::image::ImageProgram;
use crate::sandbox::{DiskUse, Observed, Sandbox, SandboxExit, SandboxId, SandboxSpec, SnapshotInfo};

/// The time limit for the guest agent to apply its configuration.
const CONFIGURE_TIME: Duration = Duration::from_secs(20);

/// The health of a provider.
#[derive(Clone, Debug)]
pub struct Health {
    /// The reason why the provider can't be used. None: it is healthy.
    pub problem: Option<String>,
    /// A restriction of a healthy provider.
    pub note: Option<String>,
    /// Free resources of its host.
    pub available: Option<AvailableResources>,
    /// The number of warm spares that its host is configured for.
    pub spares: u32,
}

impl Health {
    /// The health of a provider that can't be used.
    pub fn unhealthy(problem: impl Into<String>) -> Self {
        Self { problem: Some(problem.into()), note: None, available: None, spares: 0 }
    }
}

/// A provider of sandboxes.
///
/// # Contract
///
/// **Address.** A sandbox is addressed by the id of its workspace. The provider labels everything that it makes with this id
/// and with the installation's id, and finds it by these labels. So every call works after a restart, and also for a sandbox
/// whose own id ([`Sandbox::id`]) was never stored because the server was killed during [`create`](Self::create).
///
/// **Idempotence.** Every call may be repeated. Creating what exists and removing what is gone succeed.
///
/// **Failure.** A failed call removes nothing that it made. The caller calls [`destroy`](Self::destroy), which removes
/// everything, also the leftovers of a call that was interrupted.
///
/// **Time.** Every call returns within a bounded time, also when the engine or the manager behind it hangs.
///
/// **Memory.** A provider may cache, but keeps nothing in memory that it needs to find, stop or remove a sandbox.
///
/// **Files.** Only [`destroy`](Self::destroy) removes a workspace's files. A sandbox never starts on an empty disk in place of
/// one that is lost.
///
/// **Others.** Objects without this installation's label are never changed.
#[async_trait]
pub trait WorkspaceProvider: Send + Sync {
    /// The name of the provider, as in its entry of the [table](crate::ProviderTable).
    fn name(&self) -> ProviderName;

    /// The properties of its sandboxes.
    fn capabilities(&self) -> Capabilities;

    /// Reports whether sandboxes can be created now. Starts none.
    async fn health(&self) -> Health;

    /// Starts and removes a test sandbox, unless a recent start has already succeeded. Returns the reason of a failure.
    async fn verify_start(&self) -> Option<String> {
        None
    }

    /// Creates a sandbox, starts it and configures its agent.
    async fn create(&self, spec: &SandboxSpec) -> Result<Sandbox, ProviderError>;

    /// Finds the provider's own id of a workspace's sandbox.
    async fn sandbox_id(&self, id: WorkspaceId) -> Result<SandboxId, ProviderError>;

    /// Starts a stopped sandbox. One that is gone is created again, if its files are there.
    async fn resume(&self, spec: &SandboxSpec) -> Result<Sandbox, ProviderError>;

    /// Creates a sandbox again on its files, whether it runs or not. Files outside its volumes are lost.
    async fn recreate(&self, spec: &SandboxSpec) -> Result<Sandbox, ProviderError>;

    /// Stops a sandbox. Its processes get time to end; its files are kept.
    async fn stop(&self, id: WorkspaceId) -> Result<(), ProviderError>;

    /// Kills all processes of a sandbox, also of one that does not answer. Its files are kept.
    async fn kill(&self, id: WorkspaceId) -> Result<(), ProviderError> {
        self.stop(id).await
    }

    /// Removes a sandbox with all its files.
    async fn destroy(&self, id: WorkspaceId) -> Result<(), ProviderError>;

    /// Lists all sandboxes and leftovers of sandboxes with this installation's label.
    async fn list(&self) -> Result<Vec<Observed>, ProviderError>;

    /// Opens a new channel to the agent of a running sandbox, and configures the agent.
    async fn open_channel(&self, spec: &SandboxSpec) -> Result<GuestClient, ProviderError>;

    /// Configures the agent of a running sandbox: variables, directories of the file tools, limits.
    async fn configure(&self, spec: &SandboxSpec, channel: &GuestClient) -> Result<(), ProviderError>;

    /// Returns warnings for the user of a sandbox: reduced isolation, lowered limits.
    async fn warnings(&self, spec: &SandboxSpec) -> Vec<String>;

    /// Explains why a sandbox ended. None: it runs, or the reason is unknown.
    async fn exit_reason(&self, id: WorkspaceId) -> Option<SandboxExit>;

    /// Counts the processes of a sandbox that the host's kernel killed for lack of memory. The agent can't see these kills.
    fn oom_kills(&self, _id: WorkspaceId) -> u64 {
        0
    }

    /// Resolves the name of an image to its digest.
    async fn image_digest(&self, image: &str) -> Result<String, ProviderError>;

    /// Reads the default program of an image.
    async fn image_program(&self, image: &str) -> Result<ImageProgram, ProviderError>;

    /// Copies a sandbox's files, and its memory if `with_memory` is set and the provider can (`memory_snapshots`). The sandbox
    /// is paused meanwhile. Returns the bytes that the copy takes.
    async fn snapshot(
        &self,
        id: WorkspaceId,
        to: SnapshotId,
        with_memory: bool,
    ) -> Result<u64, ProviderError>;

    /// Unpauses a sandbox that a server paused for a snapshot before it was killed.
    async fn unpause(&self, id: WorkspaceId) -> Result<(), ProviderError>;

    /// Removes a sandbox and keeps its files as a snapshot. Succeeds also where there are no files; then there is no snapshot.
    async fn quarantine(&self, id: WorkspaceId, to: SnapshotId) -> Result<(), ProviderError>;

    /// Describes a complete snapshot. None: there is no such snapshot, or it is incomplete.
    async fn inspect_snapshot(&self, id: SnapshotId) -> Result<Option<SnapshotInfo>, ProviderError>;

    /// Removes a snapshot, complete or not.
    async fn remove_snapshot(&self, id: SnapshotId) -> Result<(), ProviderError>;

    /// Lists all snapshots of this installation, complete or not.
    async fn snapshots(&self) -> Result<Vec<SnapshotId>, ProviderError>;

    /// Directories of this host on whose disks sandboxes write.
    fn storage_directories(&self) -> Vec<PathBuf> {
        Vec::new()
    }

    /// Measures the disk usage of every running sandbox that writes to this host's disks. `thorough` measures also where no
    /// limit can have been reached, which takes longer.
    async fn disk_usage(&self, _thorough: bool) -> Vec<DiskUse> {
        Vec::new()
    }

    /// The CPU control groups of the sandboxes that run on this host, where they can be changed.
    fn cpu_groups(&self) -> Vec<(WorkspaceId, CpuGroup)> {
        Vec::new()
    }

    /// Removes objects that earlier versions or crashed servers left and that no sandbox uses.
    async fn remove_unused_resources(&self) -> Result<(), ProviderError> {
        Ok(())
    }

    /// Removes the objects that all sandboxes of the installation share (networks, firewall rules), if no sandbox is left.
    async fn remove_shared_resources(&self) -> Result<(), ProviderError>;
}

/// Providers are shared between requests.
pub type SharedProvider = Arc<dyn WorkspaceProvider>;

/// Sends the agent its configuration, within a bounded time.
pub(crate) async fn configure_agent(
    channel: &GuestClient,
    configuration: Configuration,
) -> Result<(), ProviderError> {
    let configured = async {
        let call = channel.start(&GuestCall::Configure(configuration)).await?;
        call.answer::<serde_json::Value>().await.map(drop)
    };
    match tokio::time::timeout(CONFIGURE_TIME, configured).await {
        Ok(Ok(())) => Ok(()),
        Ok(Err(error)) => Err(ProviderError::failed("configuring the guest agent", error)),
        Err(_) => Err(ProviderError::TimedOut {
            what: "configuring the guest agent",
            seconds: CONFIGURE_TIME.as_secs(),
        }),
    }
}
