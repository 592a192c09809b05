//! The rows of workspaces: the values of a new row, and the record that a row is read into.
//!
//! The columns `provider` and `provider_workspace_id` are NOT NULL. While no provider is chosen, they hold the empty
//! text; callers see `None` and `""`. Image, network and the last error have columns of their own and are shown in the
//! workspace's `metadata` under those names.

use chrono::{DateTime, TimeDelta, Utc};
use emergent_wire::WorkspaceId;
use emergent_wire::id::{ServerId, SessionId, SnapshotId};
use emergent_wire::mcp::McpConfig;
use emergent_wire::workspace::{
    ContainerType, DeploymentMode, Lifecycle, NetworkMode, ProviderName, ResourceLimits, Workspace,
    WorkspaceStatus,
};
use serde_json::{Map, Value};

use crate::error::Result;
use crate::query::Table;
use crate::row::{Reader, Row};

/// The columns of a [`WorkspaceRecord`].
pub(crate) const WORKSPACES: Table = Table {
    name: "agent_workspaces",
    columns: "id, agent_session_id, container_type, provider, provider_workspace_id, repository_url, branch, \
              deployment_mode, lifecycle, status, created_at, last_used_at, expires_at, resource_limits, \
              snapshot_id, mcp_config, metadata, image, network, ttl_seconds, placement, error, owner, \
              attached_to, attached_at, name",
};

/// The values of the row of a new workspace.
#[derive(Clone, Debug)]
pub struct NewWorkspace {
    /// Its id. The sealed environment is bound to it.
    pub id: WorkspaceId,
    /// The session it belongs to, which must exist.
    pub agent_session_id: Option<SessionId>,
    /// The kind of sandbox: an agent's workspace or a hosted MCP server.
    pub container_type: ContainerType,
    /// The repository to clone into it.
    pub repository_url: Option<String>,
    /// The branch, tag or commit to check out.
    pub branch: Option<String>,
    /// The operator of the hosts: the installation itself, or a cloud.
    pub deployment_mode: DeploymentMode,
    /// Whether it expires.
    pub lifecycle: Lifecycle,
    /// The time of the request.
    pub created_at: DateTime<Utc>,
    /// The time from its last use to its expiry. None: it never expires.
    pub ttl_seconds: Option<u64>,
    /// Its resource limits.
    pub resource_limits: ResourceLimits,
    /// The snapshot it is made from.
    pub snapshot_id: Option<SnapshotId>,
    /// For MCP servers: the name, which is unique.
    pub name: Option<String>,
    /// For MCP servers: their configuration.
    pub mcp_config: Option<McpConfig>,
    /// Other properties.
    pub metadata: Map<String, Value>,
    /// The image.
    pub image: String,
    /// Its network mode.
    pub network: NetworkMode,
    /// From [`SealingKey::seal_environment`](crate::SealingKey::seal_environment).
    pub environment_sealed: Option<Vec<u8>>,
}

impl NewWorkspace {
    /// An agent workspace of `image` with defaults: ephemeral, self-hosted, NAT, no expiry, made now.
    pub fn agent(id: WorkspaceId, image: impl Into<String>) -> Self {
        Self {
            id,
            agent_session_id: None,
            container_type: ContainerType::AgentWorkspace,
            repository_url: None,
            branch: None,
            deployment_mode: DeploymentMode::SelfHosted,
            lifecycle: Lifecycle::Ephemeral,
            created_at: Utc::now(),
            ttl_seconds: None,
            resource_limits: ResourceLimits::default(),
            snapshot_id: None,
            name: None,
            mcp_config: None,
            metadata: Map::new(),
            image: image.into(),
            network: NetworkMode::Nat,
            environment_sealed: None,
        }
    }
}

/// A workspace with the columns that only the server uses.
#[derive(Clone, Debug, PartialEq)]
pub struct WorkspaceRecord {
    /// The part that callers see.
    pub workspace: Workspace,
    /// The image.
    pub image: String,
    /// Its network mode.
    pub network: NetworkMode,
    /// The time from its last use to its expiry. None: it never expires.
    pub ttl_seconds: Option<u64>,
    /// The last error; none once it is ready again.
    pub error: Option<String>,
    /// The server that is changing it. For an MCP server that is ready: the server that supervises it.
    pub owner: Option<ServerId>,
    /// For MCP servers: the name.
    pub name: Option<String>,
}

/// The workspaces to list. The default is all workspaces.
#[derive(Clone, Copy, Debug, Default)]
pub struct WorkspaceFilter {
    /// Of this kind.
    pub container_type: Option<ContainerType>,
    /// On this provider.
    pub provider: Option<ProviderName>,
    /// In this status.
    pub status: Option<WorkspaceStatus>,
    /// Of this session.
    pub agent_session_id: Option<SessionId>,
}

impl WorkspaceRecord {
    pub(crate) fn from_row(row: &Row) -> Result<Self> {
        let row = Reader::by_id(row, WORKSPACES.name);
        let image = row.text("image")?;
        let network: NetworkMode = row.name("network")?;
        let error = row.text_or_null("error")?;
        let mut metadata: Map<String, Value> = row.json_or_null("metadata")?.unwrap_or_default();
        metadata.insert("image".into(), image.as_str().into());
        metadata.insert("network".into(), network.as_str().into());
        if let Some(error) = &error {
            metadata.insert("error".into(), error.as_str().into());
        }
        let workspace = Workspace {
            id: WorkspaceId(row.uuid("id")?),
            agent_session_id: row.uuid_or_null("agent_session_id")?.map(SessionId),
            container_type: row.name("container_type")?,
            provider: row.name_or_empty("provider")?,
            provider_workspace_id: row.text("provider_workspace_id")?,
            repository_url: row.text_or_null("repository_url")?,
            branch: row.text_or_null("branch")?,
            deployment_mode: row.name("deployment_mode")?,
            lifecycle: row.name("lifecycle")?,
            status: row.name("status")?,
            created_at: row.time("created_at")?,
            last_used_at: row.time("last_used_at")?,
            expires_at: row.time_or_null("expires_at")?,
            resource_limits: row.json("resource_limits")?,
            snapshot_id: row.id_in_text("snapshot_id")?,
            mcp_config: row.json_or_null("mcp_config")?,
            metadata: Value::Object(metadata),
            placement: row.json_or_null("placement")?,
            attached_to: row.text_or_null("attached_to")?,
            attached_at: row.time_or_null("attached_at")?,
            usage: None,
        };
        let owner = row.uuid_or_null("owner")?.map(ServerId);
        let ttl_seconds = row.unsigned_or_null("ttl_seconds")?;
        let name = row.text_or_null("name")?;
        if workspace.container_type == ContainerType::McpServer {
            row.not_null("mcp_config", workspace.mcp_config.as_ref())?;
            row.not_null("name", name.as_ref())?;
        }
        Ok(Self { workspace, image, network, ttl_seconds, error, owner, name })
    }
}

/// The expiry time of a workspace that is used `now`.
pub(crate) fn expiry(now: DateTime<Utc>, ttl_seconds: Option<u64>) -> Option<DateTime<Utc>> {
    let seconds = i64::try_from(ttl_seconds?).ok()?;
    now.checked_add_signed(TimeDelta::try_seconds(seconds)?)
}
