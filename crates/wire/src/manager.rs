//! What a server and a Firecracker manager say to each other.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;

use serde::{Deserialize, Serialize};

use crate::id::{InstallationId, SnapshotId, WorkspaceId};
use crate::names::names;
use crate::size::ByteSize;
use crate::workspace::{AvailableResources, NetworkMode, ResourceLimits};

names!(
    /// Where a microVM stands.
    MachinePhase {
        /// It has a place, and its disk is being made.
        Reserved = "reserved",
        /// Its disk is there, and it is being started.
        Configured = "configured",
        /// Its agent answers.
        Running = "running",
        /// Nothing in it runs for a moment.
        Paused = "paused",
        /// It is being stopped, or has ended by itself, and what its run has made is being removed.
        Ending = "ending",
        /// Only its disk is there.
        Stopped = "stopped",
        /// It is being removed.
        Removing = "removing",
    }
);

/// Asks for a microVM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct MachineRequest {
    /// Whose it is.
    pub installation: InstallationId,
    /// The image it begins with: the id that it was put under.
    pub image: String,
    /// What it may use at most. Its CPUs are those it may use, rounded up.
    pub limits: ResourceLimits,
    /// What it can reach.
    pub network: NetworkMode,
    /// A copy of another microVM's disk to begin with, instead of the image's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<SnapshotId>,
}

/// A microVM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Machine {
    /// Its id: that of its workspace.
    pub id: WorkspaceId,
    /// Whose it is.
    pub installation: InstallationId,
    /// Where it stands.
    pub phase: MachinePhase,
    /// The image it began with.
    pub image: String,
    /// What it may use at most.
    pub limits: ResourceLimits,
    /// How many CPUs it sees.
    pub vcpus: u32,
    /// What it can reach.
    pub network: NetworkMode,
    /// Its interface on the host, as long as it has one.
    pub interface: Option<String>,
    /// Its own address, as long as it has one.
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>))]
    pub address: Option<Ipv4Addr>,
    /// The host's process that runs it, or did until a moment ago.
    pub pid: Option<i32>,
    /// Why it ended, when it was not told to.
    pub ended: Option<String>,
}

/// A list of microVMs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct MachineList {
    /// In the order of their ids.
    pub machines: Vec<Machine>,
}

/// What an image runs by itself, and the variables that it sets.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields, default)]
pub struct ImageSettings {
    /// The program, and what always comes first.
    pub entrypoint: Vec<String>,
    /// The arguments, unless others are given.
    pub arguments: Vec<String>,
    /// Where it runs.
    pub directory: Option<String>,
    /// Who it runs as.
    pub user: Option<String>,
    /// Variables that every process sees.
    pub environment: BTreeMap<String, String>,
}

/// An image that microVMs can be made of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct MachineImage {
    /// What it is asked for by.
    pub id: String,
    /// The smallest disk that it fits on, in bytes.
    pub disk_bytes: u64,
    /// What it runs by itself.
    pub settings: ImageSettings,
}

/// Asks for a copy of a microVM's disk, and of its memory if that is said.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct MachineSnapshotRequest {
    /// Of which one.
    pub machine: WorkspaceId,
    /// Whether its memory is copied too: then what runs in it goes on in what is made of the copy.
    #[serde(default)]
    pub memory: bool,
}

/// A copy of a microVM's disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct MachineSnapshot {
    /// Its id.
    pub id: SnapshotId,
    /// Whose it is.
    pub installation: InstallationId,
    /// The image that it goes back to.
    pub image: String,
    /// The bytes it takes.
    pub bytes: u64,
    /// The size of the disk that was copied; none of copies that older managers made.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk: Option<ByteSize>,
    /// The limits that go with a copy of memory; what is made of it can have no others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_limits: Option<ResourceLimits>,
}

/// A list of copies.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct MachineSnapshotList {
    /// In the order of their ids.
    pub snapshots: Vec<MachineSnapshot>,
}

/// How a manager is doing.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ManagerHealth {
    /// Whether microVMs can be made.
    pub healthy: bool,
    /// Whether this host's KVM works: a machine and a CPU were really made.
    pub kvm_available: bool,
    /// Firecracker's version.
    pub firecracker: Option<String>,
    /// The jailer's version.
    pub jailer: Option<String>,
    /// The kernel that microVMs run.
    pub kernel: Option<String>,
    /// MicroVMs that run.
    pub active_vms: u32,
    /// As many may run at once.
    pub max_vms: u32,
    /// MicroVMs that shall wait for work.
    pub warm_pool_size: u32,
    /// What an earlier manager left is still being ended or removed.
    #[serde(default)]
    pub recovering: bool,
    /// What is free on the host.
    pub available: AvailableResources,
    /// What is wrong.
    pub errors: Vec<String>,
    /// What is worth knowing though it works.
    pub notes: Vec<String>,
}
