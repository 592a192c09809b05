//! Events: what happens on a server, as it happens.

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};

use crate::id::WorkspaceId;
use crate::names::names;
use crate::workspace::ProviderName;

names!(
    /// The kind of an event.
    EventKind {
        /// A workspace is ready.
        WorkspaceReady = "workspace.ready",
        /// A workspace is stopped.
        WorkspaceStopped = "workspace.stopped",
        /// A workspace is gone.
        WorkspaceDestroyed = "workspace.destroyed",
        /// A workspace has expired and is being removed.
        WorkspaceExpired = "workspace.expired",
        /// A workspace was not used for a while; it is being stopped.
        WorkspaceIdle = "workspace.idle",
        /// A workspace can't be used.
        WorkspaceError = "workspace.error",
        /// A workspace's sandbox had ended and was started again.
        WorkspaceRestarted = "workspace.restarted",
        /// A command ran out of memory and was ended.
        OutOfMemory = "workspace.out_of_memory",
        /// A workspace uses more than 80 % of a limit.
        UsageHigh = "usage.high",
        /// A workspace no longer uses more than 80 % of a limit.
        UsageNormal = "usage.normal",
        /// A file system of a workspace had errors and was mended.
        DiskMended = "workspace.disk_mended",
        /// The host's disk is nearly full.
        HostDiskLow = "host.disk_low",
        /// The host's disk is full: nothing that needs room is begun, and workspaces that write much are stopped.
        HostDiskFull = "host.disk_full",
        /// The host's disk has room again.
        HostDiskNormal = "host.disk_normal",
        /// A provider works.
        ProviderHealthy = "provider.healthy",
        /// A provider does not work.
        ProviderUnhealthy = "provider.unhealthy",
        /// A provider failed to make a workspace, and the next one is tried.
        PlacementFallback = "placement.fallback",
        /// A hosted MCP server takes calls.
        McpReady = "mcp.ready",
        /// A hosted MCP server's process ended.
        McpCrashed = "mcp.crashed",
        /// A hosted MCP server's process ends again and again: it is held back.
        McpCrashLoop = "mcp.crash_loop",
        /// A hosted MCP server runs but does not answer.
        McpUnresponsive = "mcp.unresponsive",
        /// Spares can't be made.
        PoolProblem = "pool.problem",
        /// The listener read too slowly and missed events.
        Missed = "missed",
    }
);

/// Something that happened.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Event {
    /// The time of the event.
    pub at: DateTime<Utc>,
    /// Its kind.
    pub kind: EventKind,
    /// The workspace that it concerns.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workspace_id: Option<WorkspaceId>,
    /// The provider that it concerns.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub provider: Option<ProviderName>,
    /// The description for a person.
    pub message: String,
}
