//! The seam between control plane and providers.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use emergent_guest_client::GuestClient;
use emergent_guest_protocol::{BashCall, Configuration, GuestCall, WriteCall};
use emergent_host::cpu_group::CpuGroup;
use emergent_wire::tools::{BashAnswer, BashRequest, MAX_FILE_BYTES, ReadAnswer, ReadRequest, WriteAnswer};
use emergent_wire::workspace::{
    AvailableResources, Capabilities, ContainerType, DiskQuota, NetworkMode, ProviderName, ResourceLimits,
};
use emergent_wire::{ByteSize, ErrorDetail, OperationId, SnapshotId, WorkspaceId};

use crate::error::ProviderError;

/// What a sandbox shall be.
#[derive(Clone, Debug)]
pub struct SandboxSpec {
    /// The workspace it belongs to; everything the provider makes is named after it.
    pub id: WorkspaceId,
    /// What runs in it.
    pub container_type: ContainerType,
    /// The image.
    pub image: String,
    /// What it may use at most.
    pub limits: ResourceLimits,
    /// How many tasks (processes and threads) its commands may have at most.
    pub max_tasks: u32,
    /// What it can reach.
    pub network: NetworkMode,
    /// A copy of another workspace's files to begin with; an empty disk unless given.
    pub snapshot: Option<SnapshotId>,
    /// Further directories that are kept like the workspace's own.
    pub volumes: Vec<Volume>,
    /// What the guest agent is told: variables and where file tools must stay. The provider adds its own. None: it
    /// was told before, and nothing changes.
    pub configuration: Option<Configuration>,
}

/// A directory that outlives the container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Volume {
    /// Its name among those of the workspace: lower-case letters, digits, `-` and `_`.
    pub name: String,
    /// Where it is in the sandbox.
    pub path: String,
}

/// What an image runs by itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ImageProgram {
    /// The program, and what always comes first.
    pub entrypoint: Vec<String>,
    /// The arguments, unless others are given.
    pub arguments: Vec<String>,
    /// Where it runs.
    pub directory: Option<String>,
    /// Who it runs as.
    pub user: Option<String>,
}

/// A sandbox that runs.
pub struct Sandbox {
    /// The channel to its agent, configured.
    pub channel: GuestClient,
    /// How its disk limit is kept.
    pub disk_quota: DiskQuota,
    /// What its user should know: reduced isolation, limits that were lowered.
    pub warnings: Vec<String>,
    /// Its disk had errors, which were mended before it started.
    pub disk_was_mended: bool,
}

/// A copy of a sandbox's files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SnapshotInfo {
    /// What it takes on the host's disk.
    pub bytes: u64,
    /// The size of the disk that was copied, if that is known.
    pub disk: Option<ByteSize>,
    /// The limits that go with a copy of memory; none if it holds no memory.
    pub memory_limits: Option<ResourceLimits>,
}

/// What a sandbox that runs does to the host's disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskUse {
    /// The workspace it belongs to.
    pub id: WorkspaceId,
    /// What it has written that takes room from others. It grows as long as that goes on.
    pub written_bytes: u64,
    /// Why the sandbox can't go on as it is.
    pub fault: Option<DiskFault>,
}

/// Why a sandbox can't go on as it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskFault {
    /// It has written more outside its volumes than it may. [`WorkspaceProvider::renew`] removes that.
    TooMuchOutside {
        /// What it may write, in bytes.
        limit: u64,
    },
    /// The kernel met errors on its disk. [`WorkspaceProvider::resume`] mends what is not in use.
    Errors,
}

/// How a sandbox was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ObservedState {
    /// It runs.
    Running,
    /// It is stopped; its files are there.
    Stopped,
    /// Only remains of it are there.
    Remains,
}

/// A sandbox, or what is left of one, that carries this installation's id.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Observed {
    /// The workspace it belongs to.
    pub id: WorkspaceId,
    /// How it was found.
    pub state: ObservedState,
}

/// How a provider is doing.
#[derive(Clone, Debug)]
pub struct Health {
    /// What is wrong, when something is.
    pub problem: Option<String>,
    /// What is worth knowing though it works.
    pub note: Option<String>,
    /// What is free on its host.
    pub available: Option<AvailableResources>,
    /// How many spares its host shall have waiting.
    pub spares: u32,
}

impl Health {
    /// It can't be used.
    pub fn unhealthy(problem: impl Into<String>) -> Self {
        Self { problem: Some(problem.into()), note: None, available: None, spares: 0 }
    }
}

/// A sandbox provider.
///
/// Contract, checked by one suite for every provider:
/// - all calls are bounded in time and may be repeated: making what is there or removing what is not is success;
/// - a call that fails leaves what it made to [`destroy`](Self::destroy), which removes everything there is;
/// - nothing is kept in memory that is needed to find, stop or remove a sandbox after a restart.
#[async_trait]
pub trait WorkspaceProvider: Send + Sync {
    /// Its name.
    fn name(&self) -> ProviderName;

    /// What it can do.
    fn capabilities(&self) -> Capabilities;

    /// Its own name for the sandbox of a workspace, known before there is one.
    fn sandbox_name(&self, id: WorkspaceId) -> String;

    /// Whether it works now.
    async fn health(&self) -> Health;

    /// Shows that sandboxes start, by starting one where no start has shown it of late. What is wrong, when they do not.
    async fn prove(&self) -> Option<String> {
        None
    }

    /// Removes what earlier versions shared between sandboxes and no sandbox uses any more.
    async fn tidy(&self) -> Result<(), ProviderError> {
        Ok(())
    }

    /// Makes a sandbox and starts it.
    async fn create(&self, spec: &SandboxSpec) -> Result<Sandbox, ProviderError>;

    /// Removes a sandbox and everything that belongs to it.
    async fn destroy(&self, id: WorkspaceId) -> Result<(), ProviderError>;

    /// Stops a sandbox; all its files are kept.
    async fn stop(&self, id: WorkspaceId) -> Result<(), ProviderError>;

    /// Ends a sandbox at once, whatever runs in it and whether or not it answers; all its files are kept.
    async fn kill(&self, id: WorkspaceId) -> Result<(), ProviderError> {
        self.stop(id).await
    }

    /// Directories of this host whose disks hold what sandboxes write.
    fn storage(&self) -> Vec<PathBuf> {
        Vec::new()
    }

    /// What each sandbox that runs does to the host's disk, where this host's disk is what it writes to. `closely`: whatever
    /// it takes to know.
    async fn look_at_disks(&self, _closely: bool) -> Vec<DiskUse> {
        Vec::new()
    }

    /// Starts a stopped sandbox, or makes it again on its files when it was removed behind our back.
    async fn resume(&self, spec: &SandboxSpec) -> Result<Sandbox, ProviderError>;

    /// Makes a sandbox again on its files, whatever state it is in.
    async fn renew(&self, spec: &SandboxSpec) -> Result<Sandbox, ProviderError>;

    /// Opens a new channel to the agent of a running sandbox.
    async fn open_channel(&self, spec: &SandboxSpec) -> Result<GuestClient, ProviderError>;

    /// What the user of a sandbox should know: reduced isolation, limits that were lowered.
    async fn warnings(&self, spec: &SandboxSpec) -> Vec<String>;

    /// Binds a sandbox that runs to its workspace: variables, where file tools must stay.
    async fn configure(&self, spec: &SandboxSpec, channel: &GuestClient) -> Result<(), ProviderError>;

    /// What an image is now; another answer means another image under the same name.
    async fn image_digest(&self, image: &str) -> Result<String, ProviderError>;

    /// What an image runs by itself.
    async fn image_program(&self, image: &str) -> Result<ImageProgram, ProviderError>;

    /// Copies a sandbox's files, and its memory where that is asked for and can be (`memory_snapshots`). Nothing in the
    /// sandbox runs meanwhile. Gives the bytes that the copy takes.
    async fn snapshot(
        &self,
        id: WorkspaceId,
        to: SnapshotId,
        with_memory: bool,
    ) -> Result<u64, ProviderError>;

    /// Ends a sandbox that nobody knows, and keeps its files as a copy. Does nothing to a sandbox that is gone. The copy is
    /// found by [`inspect_snapshot`](Self::inspect_snapshot), if there were any files.
    async fn quarantine(&self, id: WorkspaceId, to: SnapshotId) -> Result<(), ProviderError>;

    /// What a whole copy holds; none if there is no such copy, or only a part of it.
    async fn inspect_snapshot(&self, id: SnapshotId) -> Result<Option<SnapshotInfo>, ProviderError>;

    /// Removes a copy, whole or not.
    async fn remove_snapshot(&self, id: SnapshotId) -> Result<(), ProviderError>;

    /// Lets a sandbox go on that was being copied when the server ended.
    async fn go_on(&self, id: WorkspaceId) -> Result<(), ProviderError>;

    /// All copies there are, whole or not.
    async fn snapshots(&self) -> Result<Vec<SnapshotId>, ProviderError>;

    /// Why a sandbox ended, as far as the provider knows (`out of memory`, an exit code).
    async fn explain_end(&self, id: WorkspaceId) -> Option<String>;

    /// How many processes of a sandbox something outside has ended for want of memory: what its agent can't know.
    fn oom_kills(&self, _id: WorkspaceId) -> u64 {
        0
    }

    /// The CPU settings of sandboxes that run on this host, where they can be changed.
    fn cpu_groups(&self) -> Vec<(WorkspaceId, CpuGroup)> {
        Vec::new()
    }

    /// Everything there is that carries this installation's id.
    async fn list(&self) -> Result<Vec<Observed>, ProviderError>;

    /// Removes what the installation itself needed (networks, rules), when no sandbox is left.
    async fn retire(&self) -> Result<(), ProviderError>;

    /// Runs a command in a sandbox.
    async fn exec(&self, channel: &GuestClient, request: BashRequest) -> Result<BashAnswer, ErrorDetail> {
        let message =
            BashCall { operation_id: OperationId::generate(), request, stream: false, collect: false };
        let call = channel.start(&GuestCall::Bash(message)).await?;
        let (mut answer, stdout, stderr) = call.answer_with_output::<BashAnswer>(1 << 20).await?;
        answer.stdout = String::from_utf8_lossy(&stdout).into_owned();
        answer.stderr = String::from_utf8_lossy(&stderr).into_owned();
        Ok(answer)
    }

    /// A file's bytes.
    async fn read_file(&self, channel: &GuestClient, path: &str) -> Result<Vec<u8>, ErrorDetail> {
        let request = ReadRequest { file_path: path.to_owned(), raw: true, ..ReadRequest::default() };
        let call = channel.start(&GuestCall::Read(request)).await?;
        let most = usize::try_from(MAX_FILE_BYTES).unwrap_or(usize::MAX);
        let (_, bytes, _) = call.answer_with_output::<ReadAnswer>(most).await?;
        Ok(bytes)
    }

    /// Writes a file.
    async fn write_file(
        &self,
        channel: &GuestClient,
        path: &str,
        bytes: &[u8],
    ) -> Result<WriteAnswer, ErrorDetail> {
        let call = channel.start(&GuestCall::Write(WriteCall { file_path: path.to_owned() })).await?;
        call.send_input(bytes).await?;
        call.end_input().await?;
        Ok(call.answer().await?)
    }
}

/// Tells the agent at the other end what it belongs to.
pub(crate) async fn configure(
    channel: &GuestClient,
    configuration: Configuration,
) -> Result<(), ProviderError> {
    const WITHIN: Duration = Duration::from_secs(20);
    let configured = async {
        let call = channel.start(&GuestCall::Configure(configuration)).await?;
        call.answer::<serde_json::Value>().await.map(drop)
    };
    match tokio::time::timeout(WITHIN, configured).await {
        Ok(Ok(())) => Ok(()),
        Ok(Err(error)) => Err(ProviderError::failed("configuring the guest agent", error)),
        Err(_) => {
            Err(ProviderError::TimedOut { what: "configuring the guest agent", seconds: WITHIN.as_secs() })
        }
    }
}

/// Providers are shared between requests.
pub type SharedProvider = Arc<dyn WorkspaceProvider>;
