//! The settings of the server and their defaults. `Settings::load` reads them.

mod load;

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use emergent_firecracker_manager::ManagerOptions;
use emergent_host::room::RoomRules;
use emergent_mcp_http::Origin;
use emergent_otlp::Endpoint;
use emergent_wire::pool::{PoolShape, PoolTarget};
use emergent_wire::workspace::{DEFAULT_IMAGE, DeploymentMode, ResourceLimits};
use emergent_wire::{ByteSize, CpuCount};
use secrecy::{ExposeSecret as _, SecretString};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};

pub use load::{ConfigError, Overrides, default_data_dir};

/// All settings.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Settings {
    /// The address of the server. Port 0 takes a free port.
    pub listen: SocketAddr,
    /// The directory of the server's files.
    pub data_dir: PathBuf,
    /// `postgres://…` to use PostgreSQL instead of SQLite in the data directory.
    #[serde(skip_serializing)]
    pub database_url: Option<SecretString>,
    /// The key that secrets are sealed with: 64 hexadecimal digits. Unless given, it is in a file in the data directory.
    #[serde(skip_serializing)]
    pub encryption_key: Option<SecretString>,
    /// Certificate and key for TLS.
    pub tls: TlsSettings,
    /// The log.
    pub log: LogSettings,
    /// Workspaces.
    pub workspaces: WorkspaceSettings,
    /// Providers.
    pub providers: ProviderSettings,
    /// Firecracker microVMs.
    pub firecracker: FirecrackerSettings,
    /// The warm pool.
    pub pool: PoolSettings,
    /// The endpoints for MCP clients.
    pub mcp: McpSettings,
    /// The audit log.
    pub audit: AuditSettings,
    /// The treatment of files of another installation in the data directory (`--adopt`, `--discard-existing`).
    #[serde(skip)]
    pub existing: Existing,
    /// Whether a lost encryption key is replaced by a new one (`--new-key`).
    #[serde(skip)]
    pub new_key: bool,
}

/// The treatment of files of another installation in the data directory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Existing {
    /// The server does not start.
    #[default]
    Refuse,
    /// A new database adopts the installation: its files go to quarantine, from which they can be restored.
    Adopt,
    /// The files are moved aside, and the installation starts empty.
    Discard,
}

/// The endpoints for MCP clients.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct McpSettings {
    /// Web pages with these origins may use the endpoints, such as `https://app.example`. Pages of this machine are always allowed
    /// (`EMERGENT_MCP_ALLOWED_ORIGINS='["https://app.example"]'`).
    pub allowed_origins: Vec<Origin>,
}

/// The audit log.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AuditSettings {
    /// Rows are kept for this many days, then exported to `audit/` in the data directory and removed. 0 keeps all rows
    /// (`EMERGENT_AUDIT_RETENTION_DAYS`).
    pub retention_days: u32,
}

impl Default for AuditSettings {
    fn default() -> Self {
        Self { retention_days: 365 }
    }
}

/// TLS by certificate files. Both are set or none.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TlsSettings {
    /// PEM file with the certificate chain.
    pub certificate: Option<PathBuf>,
    /// PEM file with the private key.
    pub key: Option<PathBuf>,
}

/// The log.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LogSettings {
    /// The levels of modules, such as `info` or `info,emergent_providers=debug`.
    pub filter: String,
    /// `text` or `json`.
    pub format: LogFormat,
    /// The OpenTelemetry collector that gets the spans, such as `http://127.0.0.1:4318`. Unless given, no spans are exported
    /// (`EMERGENT_LOG_OTLP_ENDPOINT`).
    #[serde(deserialize_with = "none_if_empty")]
    pub otlp_endpoint: Option<Endpoint>,
}

/// An empty variable counts as none.
fn none_if_empty<'de, D: Deserializer<'de>>(value: D) -> Result<Option<Endpoint>, D::Error> {
    let text = Option::<String>::deserialize(value)?.filter(|text| !text.is_empty());
    text.map(|text| text.parse().map_err(D::Error::custom)).transpose()
}

/// The format of a log line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LogFormat {
    /// For people.
    #[default]
    Text,
    /// For machines.
    Json,
}

/// Defaults and limits of workspaces.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct WorkspaceSettings {
    /// Whether the workspace endpoints exist (`ENABLE_AGENT_WORKSPACES`).
    pub enabled: bool,
    /// The default CPU limit of a workspace (`WORKSPACE_DEFAULT_CPU`).
    pub default_cpu: CpuCount,
    /// The default memory limit of a workspace (`WORKSPACE_DEFAULT_MEMORY`).
    pub default_memory: ByteSize,
    /// The default disk size of a workspace (`WORKSPACE_DEFAULT_DISK`).
    pub default_disk: ByteSize,
    /// The default image of a workspace.
    pub default_image: String,
    /// The default time from a workspace's last use to its expiry.
    pub default_ttl_seconds: u64,
    /// The interval of the sweep, which removes expired workspaces.
    pub sweep_every_seconds: u64,
    /// A workspace that is not used for this time is stopped. Its files are kept. None: idle workspaces are not stopped.
    pub idle_stop_seconds: Option<u64>,
    /// The limit on live agent workspaces.
    pub max_concurrent: u32,
    /// The limit on tasks (processes and threads) of the commands of one workspace (`WORKSPACE_MAX_TASKS`).
    pub max_tasks: u32,
    /// The free space on the host's disk that is reserved for the server's own writes. With less, work that needs space is refused,
    /// and workspaces that go on writing are stopped (`WORKSPACE_MIN_FREE_DISK`).
    pub min_free_disk: ByteSize,
    /// The free disk space times this number can be promised to workspaces, which seldom fill their disks. 1 reserves the whole disk
    /// of each workspace at its creation (`WORKSPACE_DISK_OVERCOMMIT`).
    pub disk_overcommit: u32,
    /// Sandboxes and snapshots without a row in the database are quarantined after this time
    /// (`WORKSPACE_ORPHAN_GRACE_SECONDS`).
    pub orphan_grace_seconds: u64,
    /// Files in quarantine are removed after this many days, unless they are restored. 0 keeps them
    /// (`WORKSPACE_QUARANTINE_DAYS`).
    pub quarantine_days: u32,
    /// Whether file tools are confined to `/workspace` and `/tmp`.
    pub confine_file_tools: bool,
    /// The operator of the hosts, for requests that do not name one.
    pub deployment_mode: DeploymentMode,
}

/// The target of the warm pool, until it is set at run time.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PoolSettings {
    /// Spares with the default image and limits (`WORKSPACE_WARM_POOL_SIZE`).
    pub size: u32,
    /// Spares of other shapes.
    pub shapes: Vec<PoolShape>,
}

impl PoolSettings {
    /// The target of the pool.
    pub fn target(&self) -> PoolTarget {
        let plain =
            PoolShape { size: self.size, provider: None, image: None, resource_limits: None, network: None };
        let plain = (self.size > 0).then_some(plain);
        PoolTarget { shapes: plain.into_iter().chain(self.shapes.iter().cloned()).collect() }
    }
}

/// The enabled providers.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ProviderSettings {
    /// gVisor containers.
    pub gvisor: bool,
    /// Plain containers: weaker isolation, off unless allowed.
    pub allow_docker: bool,
    /// The address of the Docker engine. Unless given, `DOCKER_HOST` or the default socket.
    pub docker_host: Option<String>,
    /// The name servers of workspaces. Unless given, those of the host.
    pub nameservers: Vec<IpAddr>,
}

/// Firecracker microVMs: a manager that is a service of its own, or one embedded in the server.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct FirecrackerSettings {
    /// Whether microVMs are used. Unless given, they are if a manager is configured or Firecracker is installed on this host
    /// (`EMERGENT_FIRECRACKER`).
    pub enabled: Option<bool>,
    /// The address of the manager: `unix:/path` or `https://host:port`. Unless given, the server embeds a manager.
    pub manager_url: Option<String>,
    /// The manager's token, for both sides. Unless given, a manager generates one and keeps it in its directory.
    #[serde(skip_serializing)]
    pub manager_token: Option<SecretString>,
    /// The CA certificate that the manager's certificate is checked with, instead of those that the host trusts.
    pub manager_ca: Option<PathBuf>,
    /// The options of a manager on this host.
    pub manager: ManagerOptions,
}

impl FirecrackerSettings {
    /// The manager's token. An empty variable counts as none.
    pub fn manager_token(&self) -> Option<&SecretString> {
        self.manager_token.as_ref().filter(|token| !token.expose_secret().trim().is_empty())
    }

    /// The address of a manager that is not embedded. An empty variable counts as none.
    pub fn manager_url(&self) -> Option<&str> {
        self.manager_url.as_deref().filter(|url| !url.is_empty())
    }
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            listen: SocketAddr::from(([127, 0, 0, 1], 7171)),
            data_dir: default_data_dir(),
            database_url: None,
            encryption_key: None,
            tls: TlsSettings::default(),
            log: LogSettings::default(),
            workspaces: WorkspaceSettings::default(),
            providers: ProviderSettings::default(),
            firecracker: FirecrackerSettings::default(),
            pool: PoolSettings::default(),
            mcp: McpSettings::default(),
            audit: AuditSettings::default(),
            existing: Existing::Refuse,
            new_key: false,
        }
    }
}

impl Default for LogSettings {
    fn default() -> Self {
        Self { filter: "info".to_owned(), format: LogFormat::Text, otlp_endpoint: None }
    }
}

impl Default for WorkspaceSettings {
    fn default() -> Self {
        let limits = ResourceLimits::default();
        Self {
            enabled: true,
            default_cpu: limits.cpu,
            default_memory: limits.memory,
            default_disk: limits.disk,
            default_image: DEFAULT_IMAGE.to_owned(),
            default_ttl_seconds: 30 * 24 * 3600,
            sweep_every_seconds: 3600,
            idle_stop_seconds: None,
            max_concurrent: 10,
            max_tasks: 512,
            min_free_disk: ByteSize::from_bytes(RoomRules::default().min_free_bytes),
            disk_overcommit: RoomRules::default().overcommit,
            orphan_grace_seconds: 600,
            quarantine_days: 14,
            confine_file_tools: false,
            deployment_mode: DeploymentMode::SelfHosted,
        }
    }
}

impl Default for ProviderSettings {
    fn default() -> Self {
        Self { gvisor: true, allow_docker: false, docker_host: None, nameservers: Vec::new() }
    }
}

impl WorkspaceSettings {
    /// The rules for disk space of workspaces.
    pub fn room_rules(&self) -> RoomRules {
        RoomRules { min_free_bytes: self.min_free_disk.bytes(), overcommit: self.disk_overcommit }
    }

    /// The default limits of a workspace.
    pub fn default_limits(&self) -> ResourceLimits {
        ResourceLimits { cpu: self.default_cpu, memory: self.default_memory, disk: self.default_disk }
    }
}
