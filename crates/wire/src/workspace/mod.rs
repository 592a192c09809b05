//! Workspaces as the REST API and the store see them.

mod create;
mod hold;
mod limits;
mod provider;

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};

pub use create::{CreateWorkspace, MAX_TTL_SECONDS, MIN_TTL_SECONDS};
pub use hold::{AttachRequest, DetachRequest, MAX_HOLDER_BYTES, check_holder};
pub use limits::{MIN_DISK, MIN_MEMORY, RequestedLimits, ResourceLimits};
pub use provider::{
    AvailableResources, Capabilities, DiskQuota, IsolationLevel, Placement, ProviderChoice, ProviderInfo,
    ProviderName, ProviderStatus, RejectedCandidate, SecurityLevel,
};

use crate::id::{SessionId, SnapshotId, WorkspaceId};
use crate::mcp::McpConfig;
use crate::names::names;
use crate::unreadable::UnreadableRow;

/// The image a workspace has when the request names none.
pub const DEFAULT_IMAGE: &str = "emergent/workspace:latest";

names!(
    /// The kind of sandbox.
    ContainerType {
        /// An agent's workspace: ephemeral, driven by tools.
        AgentWorkspace = "agent_workspace",
        /// A hosted MCP server: persistent, supervised.
        McpServer = "mcp_server",
    }
);
names!(
    /// The operator of the hosts.
    DeploymentMode {
        /// The installation's own hosts.
        SelfHosted = "self-hosted",
        /// A cloud.
        Managed = "managed",
    }
);
names!(
    /// The network mode of a workspace: which addresses it reaches.
    NetworkMode {
        /// The internet, but neither the host, nor private networks, nor other workspaces.
        Nat = "nat",
        /// Nothing.
        Isolated = "isolated",
    }
);
names!(
    /// The lifetime of a workspace.
    Lifecycle {
        /// Until it expires.
        Ephemeral = "ephemeral",
        /// Until it is removed.
        Persistent = "persistent",
    }
);
names!(
    /// The status of a workspace.
    ///
    /// ```text
    /// creating ──▶ ready ◀──▶ stopping/stopped
    ///     │          │             │
    ///     └──────────┴─▶ destroying ┴─▶ (row gone)          error: re-examined, never final
    /// ```
    WorkspaceStatus {
        /// It is being made.
        Creating = "creating",
        /// It takes tool calls.
        Ready = "ready",
        /// It is being stopped.
        Stopping = "stopping",
        /// Its files are kept; it uses no memory or CPU.
        Stopped = "stopped",
        /// It is being removed.
        Destroying = "destroying",
        /// Something failed; `metadata.error` says what.
        Error = "error",
    }
);
/// A workspace.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Workspace {
    /// Its id.
    pub id: WorkspaceId,
    /// The session it belongs to.
    pub agent_session_id: Option<SessionId>,
    /// Its kind.
    pub container_type: ContainerType,
    /// Its provider; null while none is chosen yet.
    pub provider: Option<ProviderName>,
    /// The provider's own name for it.
    pub provider_workspace_id: String,
    /// The repository that was cloned into it.
    pub repository_url: Option<String>,
    /// The branch, tag or commit that was checked out.
    pub branch: Option<String>,
    /// The operator of the host.
    pub deployment_mode: DeploymentMode,
    /// Its lifetime.
    pub lifecycle: Lifecycle,
    /// Its status.
    pub status: WorkspaceStatus,
    /// The time of its request.
    pub created_at: DateTime<Utc>,
    /// The time of its last use.
    pub last_used_at: DateTime<Utc>,
    /// The time it expires unless used.
    pub expires_at: Option<DateTime<Utc>>,
    /// Its resource limits.
    pub resource_limits: ResourceLimits,
    /// The snapshot that it was created from.
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>))]
    pub snapshot_id: Option<SnapshotId>,
    /// For MCP servers: their configuration.
    #[cfg_attr(feature = "openapi", schema(value_type = Option<Object>))]
    pub mcp_config: Option<McpConfig>,
    /// Other properties: image, network, warnings, the last error.
    #[cfg_attr(feature = "openapi", schema(value_type = Object))]
    pub metadata: serde_json::Value,
    /// Why its provider was chosen; null until one is.
    pub placement: Option<Placement>,
    /// Its holder; null while it is not attached.
    pub attached_to: Option<String>,
    /// The time it was attached; null while it is not.
    pub attached_at: Option<DateTime<Utc>>,
    /// Its current usage; only when one workspace is asked for, and it runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub usage: Option<Usage>,
}

/// The resource usage of a workspace.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Usage {
    /// CPUs in use, averaged since the last look; null at the first.
    pub cpu: Option<f64>,
    /// Memory in use, in bytes.
    pub memory_bytes: u64,
    /// The memory limit.
    pub memory_limit_bytes: u64,
    /// Disk in use under `/workspace`, in bytes.
    pub disk_bytes: u64,
    /// The disk limit.
    pub disk_limit_bytes: u64,
    /// Processes.
    pub processes: u64,
    /// Commands that run in the background.
    pub running_operations: u64,
    /// The time of the measurement.
    pub measured_at: DateTime<Utc>,
}

/// A page of workspaces.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct WorkspaceList {
    /// The workspaces, newest first.
    pub workspaces: Vec<Workspace>,
    /// Rows of this page that can't be read.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unreadable: Vec<UnreadableRow>,
    /// Pass this as `cursor` for the next page; null on the last.
    pub next_cursor: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_written_the_same_in_json_and_in_text() {
        for status in WorkspaceStatus::ALL {
            assert_eq!(serde_json::to_value(status).unwrap(), status.as_str());
            assert_eq!(status.as_str().parse::<WorkspaceStatus>().unwrap(), *status);
        }
        assert!("redy".parse::<WorkspaceStatus>().unwrap_err().to_string().contains("'ready'"));
    }
}
