//! Workspaces as the REST API and the store see them.

use std::collections::BTreeMap;

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};

use crate::error::{ErrorCode, ErrorDetail};
use crate::git_url::check_repository;
use crate::id::{SessionId, SnapshotId, WorkspaceId};
use crate::mcp::McpConfig;
use crate::names::names;
use crate::object;
use crate::size::{ByteSize, CpuCount};
use crate::tools::check_environment;
use crate::unreadable::UnreadableRow;
use crate::validate::Validate;

/// The image a workspace has when the request names none.
pub const DEFAULT_IMAGE: &str = "emergent/workspace:latest";

names!(
    /// What kind of thing runs in the sandbox.
    ContainerType {
        /// An agent's workspace: ephemeral, driven by tools.
        AgentWorkspace = "agent_workspace",
        /// A hosted MCP server: persistent, supervised.
        McpServer = "mcp_server",
    }
);
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
    /// Which provider a request asks for.
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
    /// Who runs the machines.
    DeploymentMode {
        /// The installation's own hosts.
        SelfHosted = "self-hosted",
        /// A cloud.
        Managed = "managed",
    }
);
names!(
    /// How strong the isolation must be at least.
    SecurityLevel {
        /// Whatever the installation offers.
        Standard = "standard",
        /// A microVM.
        High = "high",
    }
);
names!(
    /// What a workspace can reach.
    NetworkMode {
        /// The internet, but neither the host, nor private networks, nor other workspaces.
        Nat = "nat",
        /// Nothing.
        Isolated = "isolated",
    }
);
names!(
    /// How long a workspace lives.
    Lifecycle {
        /// Until it expires.
        Ephemeral = "ephemeral",
        /// Until it is removed.
        Persistent = "persistent",
    }
);
names!(
    /// Where a workspace stands.
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
names!(
    /// How a sandbox is separated from the host.
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

/// What a sandbox may use at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ResourceLimits {
    /// CPUs.
    pub cpu: CpuCount,
    /// Memory.
    pub memory: ByteSize,
    /// Disk space under `/workspace`.
    pub disk: ByteSize,
}

impl Default for ResourceLimits {
    fn default() -> Self {
        Self { cpu: CpuCount::whole(2), memory: ByteSize::gib(4), disk: ByteSize::gib(10) }
    }
}

/// Limits as a request gives them: what is left out takes the installation's default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct RequestedLimits {
    /// CPUs, such as "2" or "0.5".
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu: Option<CpuCount>,
    /// Memory, such as "4G".
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<ByteSize>,
    /// Disk, such as "10G".
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk: Option<ByteSize>,
}

impl RequestedLimits {
    /// Fills in what was left out.
    pub fn or(self, defaults: ResourceLimits) -> ResourceLimits {
        ResourceLimits {
            cpu: self.cpu.unwrap_or(defaults.cpu),
            memory: self.memory.unwrap_or(defaults.memory),
            disk: self.disk.unwrap_or(defaults.disk),
        }
    }
}

/// The smallest memory a sandbox can start with.
pub const MIN_MEMORY: ByteSize = ByteSize::mib(128);
/// The smallest disk a sandbox can start with.
pub const MIN_DISK: ByteSize = ByteSize::mib(16);

impl Validate for ResourceLimits {
    fn validate(&self) -> Result<(), ErrorDetail> {
        let refuse = |message: String| Err(ErrorDetail::new(ErrorCode::Unacceptable, message));
        if self.cpu.millis() < 10 || self.cpu.millis() > 512_000 {
            return refuse(format!("resource_limits.cpu is {}: it must be from 0.01 to 512", self.cpu));
        }
        if self.memory < MIN_MEMORY || self.memory > ByteSize::gib(16 << 10) {
            return refuse(format!(
                "resource_limits.memory is {}: it must be from {MIN_MEMORY} to 16T",
                self.memory
            ));
        }
        if self.disk < MIN_DISK || self.disk > ByteSize::gib(16 << 10) {
            return refuse(format!(
                "resource_limits.disk is {}: it must be from {MIN_DISK} to 16T",
                self.disk
            ));
        }
        Ok(())
    }
}

/// Asks for a workspace. Everything has a default.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct CreateWorkspace {
    /// `agent_workspace` (the default).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub container_type: Option<ContainerType>,
    /// A repository to clone into `/workspace` before the workspace is ready: a git URL without credentials.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub repository_url: Option<String>,
    /// The branch, tag or commit to check out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub branch: Option<String>,
    /// Which provider; `auto` unless given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub provider: Option<ProviderChoice>,
    /// Who runs the machine; the installation's own mode unless given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deployment_mode: Option<DeploymentMode>,
    /// How strong the isolation must be; `standard` unless given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub security_level: Option<SecurityLevel>,
    /// What it may use at most.
    #[serde(default, deserialize_with = "object::one_or_null", skip_serializing_if = "Option::is_none")]
    pub resource_limits: Option<RequestedLimits>,
    /// The image; `emergent/workspace:latest` unless given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
    /// Variables that every command in the workspace sees. Sealed at rest, never shown again.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub environment: BTreeMap<String, String>,
    /// What it can reach; `nat` unless given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<NetworkMode>,
    /// Whether a pre-started spare may be used; yes unless given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub warm_start: Option<bool>,
    /// It expires this long after its last use; 30 days unless given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttl_seconds: Option<u64>,
}

/// The shortest life a workspace can be given.
pub const MIN_TTL_SECONDS: u64 = 60;
/// The longest life a workspace can be given.
pub const MAX_TTL_SECONDS: u64 = 365 * 24 * 3600;

impl Validate for CreateWorkspace {
    fn validate(&self) -> Result<(), ErrorDetail> {
        let bad = |message: String| Err(ErrorDetail::new(ErrorCode::BadRequest, message));
        if let Some(ttl) = self.ttl_seconds
            && !(MIN_TTL_SECONDS..=MAX_TTL_SECONDS).contains(&ttl)
        {
            return bad(format!(
                "ttl_seconds is {ttl}: it must be from {MIN_TTL_SECONDS} to {MAX_TTL_SECONDS}"
            ));
        }
        if let Some(url) = &self.repository_url {
            check_repository("repository_url", url)?;
        }
        for (field, value, longest) in [("branch", &self.branch, 256), ("image", &self.image, 256)] {
            if let Some(value) = value {
                let odd = value.chars().any(|c| c.is_control() || c.is_whitespace());
                if value.is_empty() || value.len() > longest || value.starts_with('-') || odd {
                    return bad(format!(
                        "{field} is empty, over {longest} bytes, starts with '-' or has a space in it"
                    ));
                }
            }
        }
        if self.branch.is_some() && self.repository_url.is_none() {
            return bad("branch needs repository_url".into());
        }
        check_environment(&self.environment)
    }
}

/// A provider that was not chosen, and why.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct RejectedCandidate {
    /// The provider.
    pub provider: ProviderName,
    /// Why not, in words.
    pub reason: String,
}

/// Why a workspace is where it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Placement {
    /// The provider that was chosen.
    pub provider: ProviderName,
    /// Why, in words.
    pub reason: String,
    /// The other candidates, and why each was refused or failed.
    pub rejected: Vec<RejectedCandidate>,
    /// Whether a pre-started spare was used.
    pub warm_hit: bool,
}

/// A workspace.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Workspace {
    /// Its id.
    pub id: WorkspaceId,
    /// The session it belongs to.
    pub agent_session_id: Option<SessionId>,
    /// What kind of thing runs in it.
    pub container_type: ContainerType,
    /// Its provider; null while none is chosen yet.
    pub provider: Option<ProviderName>,
    /// The provider's own name for it.
    pub provider_workspace_id: String,
    /// The repository that was cloned into it.
    pub repository_url: Option<String>,
    /// The branch, tag or commit that was checked out.
    pub branch: Option<String>,
    /// Who runs the machine.
    pub deployment_mode: DeploymentMode,
    /// How long it lives.
    pub lifecycle: Lifecycle,
    /// Where it stands.
    pub status: WorkspaceStatus,
    /// When it was asked for.
    pub created_at: DateTime<Utc>,
    /// When it was last used.
    pub last_used_at: DateTime<Utc>,
    /// When it expires unless used.
    pub expires_at: Option<DateTime<Utc>>,
    /// What it may use at most.
    pub resource_limits: ResourceLimits,
    /// The snapshot it was made from.
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>))]
    pub snapshot_id: Option<SnapshotId>,
    /// For MCP servers: their configuration.
    #[cfg_attr(feature = "openapi", schema(value_type = Option<Object>))]
    pub mcp_config: Option<McpConfig>,
    /// What else there is to know: image, network, warnings, the last error.
    #[cfg_attr(feature = "openapi", schema(value_type = Object))]
    pub metadata: serde_json::Value,
    /// Why it is where it is; null until a provider is chosen.
    pub placement: Option<Placement>,
    /// Who holds it for itself; null: nobody.
    pub attached_to: Option<String>,
    /// Since when.
    pub attached_at: Option<DateTime<Utc>>,
    /// What it uses now; only when one workspace is asked for, and it runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub usage: Option<Usage>,
}

/// What a workspace uses.
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
    /// When this was measured.
    pub measured_at: DateTime<Utc>,
}

/// Asks to hold a workspace for oneself.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct AttachRequest {
    /// Who holds it, such as an agent's or a session's name; the token's name unless given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub holder: Option<String>,
}

/// Lets a workspace go.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct DetachRequest {
    /// Who held it; the token's name unless given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub holder: Option<String>,
    /// Take it from whoever holds it.
    #[serde(default)]
    pub force: bool,
}

impl Validate for AttachRequest {
    fn validate(&self) -> Result<(), ErrorDetail> {
        self.holder.as_deref().map_or(Ok(()), check_holder)
    }
}

impl Validate for DetachRequest {
    fn validate(&self) -> Result<(), ErrorDetail> {
        self.holder.as_deref().map_or(Ok(()), check_holder)
    }
}

/// The longest name of a holder.
pub const MAX_HOLDER_BYTES: usize = 200;

/// Refuses a name of a holder that could not be shown.
pub fn check_holder(holder: &str) -> Result<(), ErrorDetail> {
    if holder.is_empty() || holder.len() > MAX_HOLDER_BYTES || holder.chars().any(char::is_control) {
        let message =
            format!("holder is empty, over {MAX_HOLDER_BYTES} bytes or has a control character in it");
        return Err(ErrorDetail::new(ErrorCode::BadRequest, message));
    }
    Ok(())
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

/// How a provider is doing.
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
    /// How it is doing.
    pub status: ProviderStatus,
    /// What is wrong, or worth knowing.
    pub message: Option<String>,
    /// When it was last checked.
    pub last_check: Option<DateTime<Utc>>,
    /// Workspaces it runs for this installation.
    pub active_workspaces: u64,
    /// What is free on its host.
    pub available_resources: Option<AvailableResources>,
    /// What it can do.
    pub capabilities: Capabilities,
}

/// What is free on a provider's host.
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

/// What a provider can do.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Capabilities {
    /// How its sandboxes are separated from the host.
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
    /// What it needs, such as `docker` or `kvm`.
    pub requires: Vec<String>,
    /// Whether the disk limit is enforced by the file system (ENOSPC) or watched.
    pub disk_quota: DiskQuota,
    /// Median time of the last cold starts; null before the first.
    pub startup_latency_ms: Option<u64>,
}

names!(
    /// How the disk limit is kept.
    DiskQuota {
        /// Writes over the limit fail with ENOSPC.
        Enforced = "enforced",
        /// The guest agent measures and refuses writes over the limit.
        Watched = "watched",
    }
);

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

    #[test]
    fn a_typo_in_a_create_request_is_refused() {
        assert!(serde_json::from_str::<CreateWorkspace>("{}").is_ok());
        for body in [
            r#"{"ttl":5}"#,
            r#"{"provider":"lxc"}"#,
            r#"{"resource_limits":{"ram":"4G"}}"#,
            r#"{"resource_limits":{"memory":"lots"}}"#,
            r#"{"ttl_seconds":-1}"#,
        ] {
            assert!(serde_json::from_str::<CreateWorkspace>(body).is_err(), "{body}");
        }
    }
    #[test]
    fn a_repository_url_with_a_credential_or_an_unknown_scheme_is_refused() {
        let validate = |url: &str| {
            CreateWorkspace { repository_url: Some(url.to_owned()), ..CreateWorkspace::default() }.validate()
        };
        validate("https://host.example/a/b.git").unwrap();
        validate("ssh://git@host.example/a/b.git").unwrap();
        let error = validate("https://x-access-token:hunter2@host.example/a/b").unwrap_err();
        assert_eq!(error.code, ErrorCode::Unacceptable);
        assert!(error.message.contains("Settings > Integrations"), "{error}");
        assert!(!error.message.contains("hunter2"), "{error}");
        for bad in ["ftp://host.example/a", "file:///a", "a/b", "", "-x", "https://a b"] {
            assert_eq!(validate(bad).unwrap_err().code, ErrorCode::BadRequest, "{bad}");
        }
    }
}
