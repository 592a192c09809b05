//! Messages between a server and a Firecracker manager.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;

use serde::{Deserialize, Serialize};

use crate::id::{InstallationId, SnapshotId, WorkspaceId};
use crate::names::names;
use crate::size::ByteSize;
use crate::workspace::{AvailableResources, NetworkMode, ResourceLimits};

/// The protocol that a request for a channel to a guest agent is upgraded to (`Upgrade`).
pub const CHANNEL_PROTOCOL: &str = "emergent-channel";

names!(
    /// The phase of a microVM.
    MachinePhase {
        /// It has a slot, and its disk is being made.
        Reserved = "reserved",
        /// Its disk exists, and it is being started.
        Configured = "configured",
        /// Its agent answers.
        Running = "running",
        /// Its virtual CPUs are paused.
        Paused = "paused",
        /// It is being stopped, or ended by itself. The manager removes its process, interface and jail.
        Ending = "ending",
        /// Only its disk exists.
        Stopped = "stopped",
        /// It is being removed.
        Removing = "removing",
    }
);

/// The request for a microVM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct MachineRequest {
    /// The installation that it belongs to.
    pub installation: InstallationId,
    /// The id of the image that its disk is made from.
    pub image: String,
    /// Its resource limits. Its CPUs are those it may use, rounded up.
    pub limits: ResourceLimits,
    /// Its network mode.
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
    /// The installation that it belongs to.
    pub installation: InstallationId,
    /// Its status.
    pub phase: MachinePhase,
    /// The image that its disk was made from.
    pub image: String,
    /// Its resource limits.
    pub limits: ResourceLimits,
    /// The number of CPUs it sees.
    pub vcpus: u32,
    /// Its network mode.
    pub network: NetworkMode,
    /// Its interface on the host, if it has one.
    pub interface: Option<String>,
    /// Its own address, if it has one.
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>))]
    pub address: Option<Ipv4Addr>,
    /// The process on the host that runs it, or that ran it last.
    pub pid: Option<i32>,
    /// Why it ended, if nobody stopped it.
    pub ended: Option<String>,
}

/// A list of microVMs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct MachineList {
    /// In the order of their ids.
    pub machines: Vec<Machine>,
}

/// The default program of an image, and the variables that it sets.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields, default)]
pub struct ImageSettings {
    /// The program and its fixed arguments.
    pub entrypoint: Vec<String>,
    /// The default arguments.
    pub arguments: Vec<String>,
    /// Its working directory.
    pub directory: Option<String>,
    /// Its user.
    pub user: Option<String>,
    /// Variables that every process sees.
    pub environment: BTreeMap<String, String>,
}

/// An image that microVMs are made from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct MachineImage {
    /// The id that requests name.
    pub id: String,
    /// The smallest disk that it fits on, in bytes.
    pub disk_bytes: u64,
    /// Its default program.
    pub settings: ImageSettings,
}

/// The request for a copy of a microVM's disk, and of its memory if `memory` is set.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct MachineSnapshotRequest {
    /// The microVM to copy.
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
    /// The installation that it belongs to.
    pub installation: InstallationId,
    /// The image that the copied disk was made from.
    pub image: String,
    /// Its size in bytes.
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

/// The health of a manager.
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
    /// The most microVMs that may run at once.
    pub max_vms: u32,
    /// The target count of spare microVMs.
    pub warm_pool_size: u32,
    /// The manager still ends or removes what an earlier manager left.
    #[serde(default)]
    pub recovering: bool,
    /// The free resources of the host.
    pub available: AvailableResources,
    /// The problems.
    pub errors: Vec<String>,
    /// Notes that are no problems.
    pub notes: Vec<String>,
}
