//! Sandbox providers: their names, what they can do, and why a workspace is on one of them.

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};

use crate::names::names;

names!(
    /// A sandbox provider.
    ProviderName {
        /// Firecracker microVMs on KVM.
        Firecracker = "firecracker",
        /// Containers on gVisor's application kernel.
        Gvisor = "gvisor",
        /// E2B cloud sandboxes.
        E2b = "e2b",
        /// Plain containers: the last resort, off unless allowed.
        Docker = "docker",
    }
);
names!(
    /// The provider that a request asks for.
    ProviderChoice {
        /// The best one that is healthy.
        Auto = "auto",
        /// This one or an error.
        Firecracker = "firecracker",
        /// This one or an error.
        Gvisor = "gvisor",
        /// This one or an error.
        E2b = "e2b",
        /// This one or an error.
        Docker = "docker",
    }
);
names!(
    /// The least isolation that a request accepts.
    SecurityLevel {
        /// Whatever the installation offers.
        Standard = "standard",
        /// A microVM.
        High = "high",
    }
);
names!(
    /// The isolation of a sandbox from the host.
    IsolationLevel {
        /// Its own kernel on hardware virtualisation.
        Microvm = "microvm",
        /// An application kernel between it and the host's.
        ApplicationKernel = "application_kernel",
        /// The host's kernel, with namespaces.
        Container = "container",
    }
);

impl From<ProviderName> for ProviderChoice {
    fn from(name: ProviderName) -> Self {
        match name {
            ProviderName::Firecracker => Self::Firecracker,
            ProviderName::Gvisor => Self::Gvisor,
            ProviderName::E2b => Self::E2b,
            ProviderName::Docker => Self::Docker,
        }
    }
}

impl ProviderChoice {
    /// The provider that was asked for, unless any will do.
    pub const fn explicit(self) -> Option<ProviderName> {
        match self {
            ProviderChoice::Auto => None,
            ProviderChoice::Firecracker => Some(ProviderName::Firecracker),
            ProviderChoice::Gvisor => Some(ProviderName::Gvisor),
            ProviderChoice::E2b => Some(ProviderName::E2b),
            ProviderChoice::Docker => Some(ProviderName::Docker),
        }
    }
}

/// A provider that was not chosen, and why.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct RejectedCandidate {
    /// The provider.
    pub provider: ProviderName,
    /// Why it was not chosen, for a person.
    pub reason: String,
}

/// Why a provider was chosen for a workspace.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Placement {
    /// The provider that was chosen.
    pub provider: ProviderName,
    /// Why it was chosen, for a person.
    pub reason: String,
    /// The other candidates, and why each was refused or failed.
    pub rejected: Vec<RejectedCandidate>,
    /// Whether a pre-started spare was used.
    pub warm_hit: bool,
}

/// The health of a provider.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum ProviderStatus {
    /// It works.
    Healthy,
    /// It does not; `message` says why and what to do.
    Unhealthy,
    /// The configuration turns it off.
    Disabled,
}

/// A provider, its health and what it can do.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ProviderInfo {
    /// Its name.
    pub name: ProviderName,
    /// Its status.
    pub status: ProviderStatus,
    /// The problem, or a note.
    pub message: Option<String>,
    /// The time of the last check.
    pub last_check: Option<DateTime<Utc>>,
    /// Workspaces it runs for this installation.
    pub active_workspaces: u64,
    /// The free resources of its host.
    pub available_resources: Option<AvailableResources>,
    /// Its capabilities.
    pub capabilities: Capabilities,
}

/// The free resources of a provider's host.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct AvailableResources {
    /// CPUs of the host.
    pub cpus: u32,
    /// Free memory in bytes.
    pub memory_bytes: u64,
    /// Free disk in bytes.
    pub disk_bytes: u64,
}

/// The capabilities of a provider.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Capabilities {
    /// The isolation of its sandboxes from the host.
    pub isolation: IsolationLevel,
    /// Files survive stop and resume.
    pub persistence: bool,
    /// It can copy a workspace's disk.
    pub snapshots: bool,
    /// It can copy a workspace's memory too.
    #[serde(default)]
    pub memory_snapshots: bool,
    /// It can keep spares.
    pub warm_pool: bool,
    /// Its requirements, such as `docker` or `kvm`.
    pub requires: Vec<String>,
    /// Whether the disk limit is enforced by the file system (ENOSPC) or watched.
    pub disk_quota: DiskQuota,
    /// Median time of the last cold starts; null before the first.
    pub startup_latency_ms: Option<u64>,
}

names!(
    /// The kind of a disk limit.
    DiskQuota {
        /// Writes over the limit fail with ENOSPC.
        Enforced = "enforced",
        /// The guest agent measures and refuses writes over the limit.
        Watched = "watched",
    }
);
