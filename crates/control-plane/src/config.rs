//! Settings: flags over environment over `emergent.toml` over defaults. Unknown keys are refused.

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};

use emergent_firecracker_manager::ManagerOptions;
use emergent_host::room::RoomRules;
use emergent_mcp_http::Origin;
use emergent_wire::pool::{PoolShape, PoolTarget};
use emergent_wire::workspace::{
    DEFAULT_IMAGE, DeploymentMode, MAX_TTL_SECONDS, MIN_TTL_SECONDS, ResourceLimits,
};
use emergent_wire::{ByteSize, CpuCount, ErrorDetail, Validate as _};
use figment::Figment;
use figment::providers::{Env, Format, Serialized, Toml};
use secrecy::{ExposeSecret as _, SecretString};
use serde::{Deserialize, Serialize};

/// The least that can be kept free on the host's disk: room for the journals of file systems and for the database.
const MIN_FREE_DISK: ByteSize = ByteSize::mib(32);
/// The shortest time after which an unused workspace can be stopped.
const MIN_IDLE_SECONDS: u64 = 10;

/// Fewer tasks are not enough for a shell and what it starts; more are what one host can hold.
const MAX_TASKS: std::ops::RangeInclusive<u32> = 32..=16_384;

/// Everything that can be set.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Settings {
    /// Where the server listens. Port 0 takes a free one.
    pub listen: SocketAddr,
    /// Where the server keeps its files.
    pub data_dir: PathBuf,
    /// `postgres://…` to use PostgreSQL instead of SQLite in the data directory.
    #[serde(skip_serializing)]
    pub database_url: Option<SecretString>,
    /// 64 hexadecimal digits that secrets are sealed with; a file in the data directory unless given.
    #[serde(skip_serializing)]
    pub encryption_key: Option<SecretString>,
    /// Certificate and key for TLS.
    pub tls: TlsSettings,
    /// How logs are written.
    pub log: LogSettings,
    /// Workspaces.
    pub workspaces: WorkspaceSettings,
    /// Providers.
    pub providers: ProviderSettings,
    /// Firecracker microVMs.
    pub firecracker: FirecrackerSettings,
    /// Spares that are started before anybody asks for them.
    pub pool: PoolSettings,
    /// The endpoints for MCP clients.
    pub mcp: McpSettings,
    /// The audit log.
    pub audit: AuditSettings,
    /// How files of another installation in the data directory are treated (`--adopt`, `--discard-existing`).
    #[serde(skip)]
    pub existing: Existing,
    /// Whether a lost encryption key is replaced by a new one (`--new-key`).
    #[serde(skip)]
    pub new_key: bool,
}

/// How files in the data directory are treated that the database has no record of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Existing {
    /// The server does not start.
    #[default]
    Refuse,
    /// A new database takes the installation over: its files go to quarantine, from which they can be restored.
    Adopt,
    /// The files are moved aside and the installation begins anew.
    Discard,
}

/// The endpoints for MCP clients.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct McpSettings {
    /// Pages of these origins may use them, such as `https://app.example`; those of this machine always may
    /// (`EMERGENT_MCP_ALLOWED_ORIGINS='["https://app.example"]'`).
    pub allowed_origins: Vec<Origin>,
}

/// The audit log.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AuditSettings {
    /// Rows are kept for this many days, then exported to `audit/` in the data directory and removed; 0 keeps them for ever
    /// (`EMERGENT_AUDIT_RETENTION_DAYS`).
    pub retention_days: u32,
}

impl Default for AuditSettings {
    fn default() -> Self {
        Self { retention_days: 365 }
    }
}

/// TLS by certificate files; both or neither.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TlsSettings {
    /// PEM file with the certificate chain.
    pub certificate: Option<PathBuf>,
    /// PEM file with the private key.
    pub key: Option<PathBuf>,
}

/// How logs are written.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LogSettings {
    /// What is logged, such as `info` or `info,emergent_providers=debug`.
    pub filter: String,
    /// `text` or `json`.
    pub format: LogFormat,
}

/// How a log line looks.
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
    /// Whether there are workspace endpoints at all (`ENABLE_AGENT_WORKSPACES`).
    pub enabled: bool,
    /// CPUs of a workspace that asks for none (`WORKSPACE_DEFAULT_CPU`).
    pub default_cpu: CpuCount,
    /// Memory of a workspace that asks for none (`WORKSPACE_DEFAULT_MEMORY`).
    pub default_memory: ByteSize,
    /// Disk of a workspace that asks for none (`WORKSPACE_DEFAULT_DISK`).
    pub default_disk: ByteSize,
    /// The image of a workspace that asks for none.
    pub default_image: String,
    /// How long a workspace lives after its last use.
    pub default_ttl_seconds: u64,
    /// How often workspaces are looked for whose time is over.
    pub sweep_every_seconds: u64,
    /// A workspace that nobody uses for this long is stopped; its files are kept. Off unless given.
    pub idle_stop_seconds: Option<u64>,
    /// Live agent workspaces at most.
    pub max_concurrent: u32,
    /// Tasks (processes and threads) that the commands of one workspace may have at once (`WORKSPACE_MAX_TASKS`).
    pub max_tasks: u32,
    /// Free space on the host's disk that is kept for the server's own writes. With less, nothing that needs room is begun, and
    /// workspaces that go on writing are stopped (`WORKSPACE_MIN_FREE_DISK`).
    pub min_free_disk: ByteSize,
    /// How many times over the free disk may be promised to workspaces, which seldom fill theirs. At 1 each has its disk from
    /// the first, and nobody can take it (`WORKSPACE_DISK_OVERCOMMIT`).
    pub disk_overcommit: u32,
    /// Sandboxes and snapshots without a record in the database are left alone for this time, then put in quarantine
    /// (`WORKSPACE_ORPHAN_GRACE_SECONDS`).
    pub orphan_grace_seconds: u64,
    /// Files in quarantine are removed after this many days, unless they are restored; 0 keeps them
    /// (`WORKSPACE_QUARANTINE_DAYS`).
    pub quarantine_days: u32,
    /// File tools stay inside `/workspace` and `/tmp`.
    pub confine_file_tools: bool,
    /// Who runs the machines when a request does not say.
    pub deployment_mode: DeploymentMode,
}

/// What waits in the warm pool, until it is set at run time.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PoolSettings {
    /// Spares with the default image and limits (`WORKSPACE_WARM_POOL_SIZE`).
    pub size: u32,
    /// Spares of other kinds.
    pub shapes: Vec<PoolShape>,
}

impl PoolSettings {
    /// What the pool shall hold.
    pub fn target(&self) -> PoolTarget {
        let plain =
            PoolShape { size: self.size, provider: None, image: None, resource_limits: None, network: None };
        let plain = (self.size > 0).then_some(plain);
        PoolTarget { shapes: plain.into_iter().chain(self.shapes.iter().cloned()).collect() }
    }
}

/// Which providers may be used.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ProviderSettings {
    /// gVisor containers.
    pub gvisor: bool,
    /// Plain containers: weaker isolation, off unless allowed.
    pub allow_docker: bool,
    /// Where the Docker engine listens; `DOCKER_HOST` or the usual socket unless given.
    pub docker_host: Option<String>,
    /// Name servers for workspaces; the host's unless given.
    pub nameservers: Vec<IpAddr>,
}

/// Firecracker microVMs: a manager that runs elsewhere, or one within the server.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct FirecrackerSettings {
    /// Whether microVMs are used; unless given, when a manager is named or Firecracker is installed on this host
    /// (`EMERGENT_FIRECRACKER`).
    pub enabled: Option<bool>,
    /// Where a manager listens: `unix:/path` or `https://host:port`. The server is its own manager unless given.
    pub manager_url: Option<String>,
    /// The manager's token. Both sides read it; unless given, a manager makes one and keeps it in its directory.
    #[serde(skip_serializing)]
    pub manager_token: Option<SecretString>,
    /// A certificate that the manager's is checked against, instead of those that the host trusts.
    pub manager_ca: Option<PathBuf>,
    /// What a manager on this host uses.
    pub manager: ManagerOptions,
}

impl FirecrackerSettings {
    /// The manager's token, if one is given. An empty variable gives none.
    pub fn manager_token(&self) -> Option<&SecretString> {
        self.manager_token.as_ref().filter(|token| !token.expose_secret().trim().is_empty())
    }

    /// Where a manager listens that is not within the server. An empty variable names none.
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
        Self { filter: "info".to_owned(), format: LogFormat::Text }
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
    /// How much of the host's disk workspaces may have.
    pub fn room_rules(&self) -> RoomRules {
        RoomRules { min_free_bytes: self.min_free_disk.bytes(), overcommit: self.disk_overcommit }
    }

    /// The limits of a workspace that asks for none.
    pub fn default_limits(&self) -> ResourceLimits {
        ResourceLimits { cpu: self.default_cpu, memory: self.default_memory, disk: self.default_disk }
    }
}

/// What the command line sets; what is none is left to the environment and the file.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Overrides {
    /// `--listen`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub listen: Option<SocketAddr>,
    /// `--data-dir`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub data_dir: Option<PathBuf>,
    /// `--allow-docker`.
    #[serde(skip)]
    pub allow_docker: bool,
    /// `--adopt` or `--discard-existing`.
    #[serde(skip)]
    pub existing: Existing,
    /// `--new-key`.
    #[serde(skip)]
    pub new_key: bool,
}

/// Settings that can't be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// A file that was named is not there.
    #[error("the configuration file {} does not exist", .0.display())]
    NoFile(PathBuf),
    /// A key or value that is not known or not valid.
    #[error("the configuration is not valid: {0}")]
    Invalid(Box<figment::Error>),
    /// Values that do not go together.
    #[error("the configuration is not valid: {0}")]
    Contradiction(String),
}

/// Names of environment variables, and the keys they set.
const VARIABLES: [(&str, &str); 38] = [
    ("EMERGENT_LISTEN", "listen"),
    ("EMERGENT_DATA_DIR", "data_dir"),
    ("DATABASE_URL", "database_url"),
    ("EMERGENT_ENCRYPTION_KEY", "encryption_key"),
    ("EMERGENT_LOG", "log.filter"),
    ("EMERGENT_LOG_FORMAT", "log.format"),
    ("ENABLE_AGENT_WORKSPACES", "workspaces.enabled"),
    ("WORKSPACE_DEFAULT_CPU", "workspaces.default_cpu"),
    ("WORKSPACE_DEFAULT_MEMORY", "workspaces.default_memory"),
    ("WORKSPACE_DEFAULT_DISK", "workspaces.default_disk"),
    ("WORKSPACE_MAX_CONCURRENT", "workspaces.max_concurrent"),
    ("WORKSPACE_MAX_TASKS", "workspaces.max_tasks"),
    ("WORKSPACE_MIN_FREE_DISK", "workspaces.min_free_disk"),
    ("WORKSPACE_DISK_OVERCOMMIT", "workspaces.disk_overcommit"),
    ("WORKSPACE_ORPHAN_GRACE_SECONDS", "workspaces.orphan_grace_seconds"),
    ("WORKSPACE_QUARANTINE_DAYS", "workspaces.quarantine_days"),
    ("EMERGENT_AUDIT_RETENTION_DAYS", "audit.retention_days"),
    ("WORKSPACE_SWEEP_EVERY_SECONDS", "workspaces.sweep_every_seconds"),
    ("WORKSPACE_IDLE_STOP_SECONDS", "workspaces.idle_stop_seconds"),
    ("WORKSPACE_WARM_POOL_SIZE", "pool.size"),
    ("EMERGENT_MCP_ALLOWED_ORIGINS", "mcp.allowed_origins"),
    ("EMERGENT_GVISOR", "providers.gvisor"),
    ("EMERGENT_ALLOW_DOCKER", "providers.allow_docker"),
    ("EMERGENT_FIRECRACKER", "firecracker.enabled"),
    ("FIRECRACKER_MANAGER_URL", "firecracker.manager_url"),
    ("FIRECRACKER_MANAGER_TOKEN", "firecracker.manager_token"),
    ("FIRECRACKER_MANAGER_CA", "firecracker.manager_ca"),
    ("FIRECRACKER_BIN", "firecracker.manager.firecracker"),
    ("JAILER_BIN", "firecracker.manager.jailer"),
    ("FIRECRACKER_KERNEL", "firecracker.manager.kernel"),
    ("FIRECRACKER_KERNEL_ARGUMENTS", "firecracker.manager.kernel_arguments"),
    ("FIRECRACKER_BOOT_TIMEOUT_SECONDS", "firecracker.manager.boot_timeout_seconds"),
    ("FIRECRACKER_KVM_DEVICE", "firecracker.manager.kvm_device"),
    ("FIRECRACKER_REQUIRE_KVM", "firecracker.manager.require_kvm"),
    ("FIRECRACKER_MAX_VMS", "firecracker.manager.max_vms"),
    ("FIRECRACKER_WARM_POOL_SIZE", "firecracker.manager.warm_pool_size"),
    ("EMERGENT_TLS_CERTIFICATE", "tls.certificate"),
    ("EMERGENT_TLS_KEY", "tls.key"),
];

impl Settings {
    /// Reads `file` (or `emergent.toml` in the working directory, when there is one), the environment and the flags.
    pub fn load(file: Option<&Path>, overrides: &Overrides) -> Result<Self, ConfigError> {
        let mut figment = Figment::from(Serialized::defaults(Settings::default()));
        let beside = Path::new("emergent.toml");
        match file {
            Some(path) if !path.exists() => return Err(ConfigError::NoFile(path.to_owned())),
            Some(path) => figment = figment.merge(Toml::file_exact(path)),
            None if beside.exists() => figment = figment.merge(Toml::file_exact(beside)),
            None => {}
        }
        for (variable, key) in VARIABLES {
            figment = figment.merge(Env::raw().only(&[variable]).map(move |_| key.into()).split("."));
        }
        figment = figment.merge(Serialized::defaults(overrides));
        let mut settings: Settings =
            figment.extract().map_err(|error| ConfigError::Invalid(Box::new(error)))?;
        settings.providers.allow_docker |= overrides.allow_docker;
        settings.existing = overrides.existing;
        settings.new_key = overrides.new_key;
        settings.firecracker.manager.min_free_disk = settings.workspaces.min_free_disk;
        settings.firecracker.manager.disk_overcommit = settings.workspaces.disk_overcommit;
        settings.check()?;
        Ok(settings)
    }

    fn check(&self) -> Result<(), ConfigError> {
        let refuse = |message: &str| Err(ConfigError::Contradiction(message.to_owned()));
        if self.tls.certificate.is_some() != self.tls.key.is_some() {
            return refuse("TLS needs both tls.certificate and tls.key");
        }
        if self.workspaces.max_concurrent == 0 {
            return refuse("workspaces.max_concurrent must be at least 1");
        }
        if !MAX_TASKS.contains(&self.workspaces.max_tasks) {
            let (least, most) = (MAX_TASKS.start(), MAX_TASKS.end());
            return refuse(&format!("workspaces.max_tasks must be from {least} to {most}"));
        }
        if self.workspaces.min_free_disk < MIN_FREE_DISK {
            return refuse(&format!("workspaces.min_free_disk must be at least {MIN_FREE_DISK}"));
        }
        if self.workspaces.disk_overcommit == 0 {
            return refuse("workspaces.disk_overcommit must be at least 1");
        }
        if self.workspaces.sweep_every_seconds == 0 {
            return refuse("workspaces.sweep_every_seconds must be at least 1");
        }
        if self.workspaces.idle_stop_seconds.is_some_and(|seconds| seconds < MIN_IDLE_SECONDS) {
            return refuse(&format!("workspaces.idle_stop_seconds must be at least {MIN_IDLE_SECONDS}"));
        }
        if !(MIN_TTL_SECONDS..=MAX_TTL_SECONDS).contains(&self.workspaces.default_ttl_seconds) {
            return refuse(&format!(
                "workspaces.default_ttl_seconds must be from {MIN_TTL_SECONDS} to {MAX_TTL_SECONDS}"
            ));
        }
        let unacceptable =
            |what: &str, error: ErrorDetail| ConfigError::Contradiction(format!("{what}: {}", error.message));
        self.pool.target().validate().map_err(|error| unacceptable("pool", error))?;
        let limits = self.workspaces.default_limits();
        limits.validate().map_err(|error| unacceptable("workspaces", error))
    }

    /// Whether only this host can reach the server.
    pub fn is_local(&self) -> bool {
        self.listen.ip().is_loopback()
    }
}

/// `$XDG_DATA_HOME/emergent`, `~/.local/share/emergent`, or `/var/lib/emergent` for root.
pub fn default_data_dir() -> PathBuf {
    let absolute = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    if let Some(data) = absolute("XDG_DATA_HOME") {
        return data.join("emergent");
    }
    match absolute("HOME") {
        Some(home) if home != Path::new("/root") => home.join(".local/share/emergent"),
        _ => PathBuf::from("/var/lib/emergent"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(text: &str) -> Result<Settings, ConfigError> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("emergent.toml");
        std::fs::write(&path, text).unwrap();
        Settings::load(Some(&path), &Overrides::default())
    }

    #[test]
    fn the_example_is_valid_and_holds_the_defaults() {
        let example = load(include_str!("../../../emergent.example.toml")).unwrap();
        assert_eq!(format!("{example:?}"), format!("{:?}", Settings::default()));
    }

    #[test]
    fn unknown_keys_and_contradictions_are_refused() {
        for text in [
            "lissten = \"127.0.0.1:1\"",
            "[workspaces]\nmax = 3",
            "[workspaces]\nmax_concurrent = 0",
            "[workspaces]\ndefault_memory = \"1K\"",
            "[tls]\ncertificate = \"/x\"",
            "listen = \"nowhere\"",
        ] {
            assert!(load(text).is_err(), "{text}");
        }
        assert!(Settings::load(Some(Path::new("/nowhere.toml")), &Overrides::default()).is_err());
    }

    #[test]
    fn flags_override_the_file() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("emergent.toml");
        std::fs::write(&path, "listen = \"127.0.0.1:1\"\n[providers]\nallow_docker = true").unwrap();
        let overrides = Overrides { listen: Some("127.0.0.1:2".parse().unwrap()), ..Overrides::default() };
        let settings = Settings::load(Some(&path), &overrides).unwrap();
        assert_eq!(settings.listen.port(), 2);
        assert!(settings.providers.allow_docker);
    }
}
