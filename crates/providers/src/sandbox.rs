//! Sandboxes as the control plane sees them: specification, identity, state, disk usage.

use emergent_guest_client::GuestClient;
use emergent_guest_protocol::Configuration;
use emergent_wire::workspace::{ContainerType, DiskQuota, NetworkMode, ResourceLimits};
use emergent_wire::{ByteSize, SnapshotId, WorkspaceId};

/// The specification of a sandbox.
#[derive(Clone, Debug)]
pub struct SandboxSpec {
    /// The workspace that the sandbox belongs to. The provider labels everything it makes with this id.
    pub id: WorkspaceId,
    /// The kind of program that runs in it.
    pub container_type: ContainerType,
    /// The name of its image.
    pub image: String,
    /// Its limits of CPU, memory and disk.
    pub limits: ResourceLimits,
    /// The largest number of tasks (processes and threads) that its commands may have.
    pub max_tasks: u32,
    /// Its access to the network.
    pub network: NetworkMode,
    /// The snapshot that its disk begins with. Without one the disk is empty.
    pub snapshot: Option<SnapshotId>,
    /// Directories that are kept beside the workspace's own.
    pub volumes: Vec<Volume>,
    /// The configuration of its guest agent. The provider adds memory, name servers and the disk limit. None: the agent is
    /// already configured and stays as it is.
    pub configuration: Option<Configuration>,
}

/// A directory that outlives the sandbox.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Volume {
    /// Its name, unique in the workspace: lower-case letters, digits, `-` and `_`.
    pub name: String,
    /// Its path in the sandbox.
    pub path: String,
}

/// A provider's own id of a sandbox: the name of a container, the id that a cloud service gave.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct SandboxId(String);

impl SandboxId {
    /// The id as the provider writes it.
    pub fn new(id: impl Into<String>) -> Self {
        Self(id.into())
    }

    /// The id as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl std::fmt::Display for SandboxId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(&self.0)
    }
}

/// A running sandbox.
pub struct Sandbox {
    /// The provider's own id of it. It stays the same until the sandbox is destroyed.
    pub id: SandboxId,
    /// An open channel to its agent, which is configured.
    pub channel: GuestClient,
    /// The kind of its disk limit.
    pub disk_quota: DiskQuota,
    /// Facts that its user should know: reduced isolation, lowered limits.
    pub warnings: Vec<String>,
    /// Its disk had file system errors, which were repaired before the start.
    pub disk_was_repaired: bool,
}

/// A snapshot: a copy of a sandbox's files, and of its memory where that was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SnapshotInfo {
    /// Bytes that it takes on the host's disk.
    pub bytes: u64,
    /// The size of the copied disk, if known.
    pub disk: Option<ByteSize>,
    /// The limits that a sandbox of it must have. None: it holds no memory.
    pub memory_limits: Option<ResourceLimits>,
}

/// The load of a running sandbox on the host's disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskUse {
    /// The workspace that the sandbox belongs to.
    pub id: WorkspaceId,
    /// Bytes that it has written and that take room from others. The number only grows.
    pub written_bytes: u64,
    /// A fault that needs a restart of the sandbox.
    pub fault: Option<DiskFault>,
}

/// A fault of a sandbox's disk that needs a restart of the sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskFault {
    /// The files outside its volumes are over their limit. [`recreate`](crate::WorkspaceProvider::recreate) removes them.
    RootLayerTooLarge {
        /// The limit in bytes.
        limit: u64,
    },
    /// The kernel reported errors of the file system. [`resume`](crate::WorkspaceProvider::resume) repairs a disk that is not
    /// mounted.
    FileSystemErrors,
}

/// The reason why a sandbox ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SandboxExit {
    /// The reason as a clause: "its container ended with code 1".
    pub reason: String,
    /// The host's kernel killed the whole sandbox because it ran out of memory.
    pub out_of_memory: bool,
}

impl SandboxExit {
    /// An end that has nothing to do with memory.
    pub fn new(reason: impl Into<String>) -> Self {
        Self { reason: reason.into(), out_of_memory: false }
    }
}

/// The state of a sandbox in a provider's list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ObservedState {
    /// It runs.
    Running,
    /// It is stopped. Its files are kept.
    Stopped,
    /// Only a part of it is there: a disk without a container, a slot without a machine.
    Leftover,
}

/// A sandbox, or a part of one, with this installation's label.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Observed {
    /// The workspace that it belongs to.
    pub id: WorkspaceId,
    /// Its state.
    pub state: ObservedState,
}
