//! Hosted MCP servers as the REST API and the store see them.

mod config;
mod logs;
mod register;

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};

pub use config::{McpConfig, McpVolume};
pub use logs::{McpLogLine, McpLogSource, McpLogs};
pub use register::RegisterMcpServer;

use crate::id::WorkspaceId;
use crate::names::names;
use crate::size::{ByteSize, CpuCount};
use crate::unreadable::UnreadableRow;
use crate::workspace::{
    ContainerType, Lifecycle, NetworkMode, Placement, ProviderName, ResourceLimits, Usage,
};

names!(
    /// The condition for a restart of a server whose process ended.
    RestartPolicy {
        /// Whenever it ends.
        Always = "always",
        /// When it ends with an error.
        OnFailure = "on-failure",
        /// Never.
        Never = "never",
    }
);
names!(
    /// The sharing of processes by clients.
    McpMode {
        /// All of them: cheap, but the server can't ask a client for anything (sampling, elicitation, roots).
        Shared = "shared",
        /// One: each session has a process of its own.
        PerSession = "per_session",
    }
);
names!(
    /// The status of a hosted server.
    McpStatus {
        /// It is being started.
        Starting = "starting",
        /// It takes calls.
        Ready = "ready",
        /// It ended and will be started again.
        Restarting = "restarting",
        /// It runs, but does not answer.
        Unresponsive = "unresponsive",
        /// It ended, and its restart policy leaves it so.
        Stopped = "stopped",
        /// Its sandbox can't be started. The server tries again.
        Error = "error",
        /// Another server of this installation runs it.
        Elsewhere = "elsewhere",
        /// It is being removed.
        Removing = "removing",
    }
);

/// The default resource limits of a hosted server.
pub const DEFAULT_LIMITS: ResourceLimits =
    ResourceLimits { cpu: CpuCount::from_millis(500), memory: ByteSize::mib(512), disk: ByteSize::gib(1) };
/// The time limit of a call unless the server or the call has one.
pub const DEFAULT_TIMEOUT_MS: u64 = 30_000;
/// The longest time a call may be given.
pub const MAX_TIMEOUT_MS: u64 = 24 * 3600 * 1000;
/// The usual path of servers that speak HTTP themselves.
pub const DEFAULT_PATH: &str = "/mcp";
/// The end of a server's process.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct McpExit {
    /// The time it ended.
    pub at: DateTime<Utc>,
    /// Its exit code; null when a signal ended it, or it was never started.
    pub exit_code: Option<i32>,
    /// The signal that ended it.
    pub signal: Option<String>,
    /// Whether it was killed because memory ran out.
    pub oom_killed: bool,
    /// The description for a person.
    pub reason: String,
    /// The end of its standard error.
    pub stderr_tail: String,
}

/// A hosted MCP server.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct McpServer {
    /// Its id.
    pub id: WorkspaceId,
    /// Its name.
    pub name: String,
    /// Its status.
    pub status: McpStatus,
    /// Always `mcp_server`.
    pub container_type: ContainerType,
    /// Always `persistent`.
    pub lifecycle: Lifecycle,
    /// The time of its registration.
    pub created_at: DateTime<Utc>,
    /// Always null: it lives until it is removed.
    pub expires_at: Option<DateTime<Utc>>,
    /// The image.
    pub image: String,
    /// The program and its arguments, when not the image's own.
    pub command: Vec<String>,
    /// Arguments for the image's own program, when not its own.
    pub args: Vec<String>,
    /// Whether it speaks over standard input and output.
    pub stdio_bridge: bool,
    /// The port that it listens on, if it speaks HTTP.
    pub port: Option<u16>,
    /// The path of its HTTP endpoint.
    pub path: Option<String>,
    /// The sharing of processes by clients.
    pub mode: McpMode,
    /// The condition for a restart.
    pub restart_policy: RestartPolicy,
    /// The names of its variables; the values are never shown.
    pub environment: Vec<String>,
    /// Directories that outlive its containers.
    pub volumes: Vec<McpVolume>,
    /// Its resource limits.
    pub resource_limits: ResourceLimits,
    /// Its network mode.
    pub network: NetworkMode,
    /// The time limit of a call.
    pub timeout_ms: u64,
    /// Its provider.
    pub provider: Option<ProviderName>,
    /// The provider's own name for its sandbox.
    pub provider_workspace_id: String,
    /// Why its provider was chosen.
    pub placement: Option<Placement>,
    /// Warnings for its owner.
    pub warnings: Vec<String>,
    /// The address of its Streamable HTTP endpoint on this server.
    pub endpoint: String,
    /// The start time of its process.
    pub started_at: Option<DateTime<Utc>>,
    /// The number of restarts since this server began, or since a restart by hand.
    pub restarts: u64,
    /// The number of times that its process ended in the last minute.
    pub recent_crashes: u64,
    /// The time of the next restart, while it is held back.
    pub next_restart_at: Option<DateTime<Utc>>,
    /// The last end of its process.
    pub last_exit: Option<McpExit>,
    /// The problems.
    pub error: Option<String>,
    /// Calls in progress.
    pub pending_calls: u64,
    /// Sessions of clients.
    pub sessions: u64,
    /// Its answer to `initialize`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<Object>))]
    pub initialize_result: Option<serde_json::Value>,
    /// Its current usage; only when one server is asked for, and it runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub usage: Option<Usage>,
}

/// All hosted servers.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct McpServerList {
    /// Oldest first.
    pub servers: Vec<McpServer>,
    /// Servers that can't be read.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unreadable: Vec<UnreadableRow>,
}
