//! Loads the settings: flags over environment over `emergent.toml` over defaults. Unknown keys are refused.

use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use emergent_wire::workspace::{MAX_TTL_SECONDS, MIN_TTL_SECONDS};
use emergent_wire::{ByteSize, ErrorDetail, Validate as _};
use figment::Figment;
use figment::providers::{Env, Format, Serialized, Toml};
use serde::Serialize;

use super::{Existing, Settings};

/// The least free space that the server can keep: for the journals of file systems and for the database.
const MIN_FREE_DISK: ByteSize = ByteSize::mib(32);
/// The shortest time after which an unused workspace can be stopped.
const MIN_IDLE_SECONDS: u64 = 10;
/// The range of the task limit. Fewer tasks are not enough for a shell and its commands. More exceed the capacity of a host.
const MAX_TASKS: RangeInclusive<u32> = 32..=16_384;

/// The settings of the command line. None leaves a setting to the environment and the file.
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

/// The settings can't be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file that the command line names does not exist.
    #[error("the configuration file {} does not exist", .0.display())]
    NoFile(PathBuf),
    /// A key is unknown, or a value is not valid.
    #[error("the configuration is not valid: {0}")]
    Invalid(Box<figment::Error>),
    /// A value is out of range, or values contradict each other.
    #[error("the configuration is not valid: {0}")]
    Contradiction(String),
}

/// The environment variables and the keys that they set.
const VARIABLES: [(&str, &str); 39] = [
    ("EMERGENT_LISTEN", "listen"),
    ("EMERGENT_DATA_DIR", "data_dir"),
    ("DATABASE_URL", "database_url"),
    ("EMERGENT_ENCRYPTION_KEY", "encryption_key"),
    ("EMERGENT_LOG", "log.filter"),
    ("EMERGENT_LOG_FORMAT", "log.format"),
    ("EMERGENT_LOG_OTLP_ENDPOINT", "log.otlp_endpoint"),
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
    /// Reads `file` (or `emergent.toml` in the working directory, if it exists), the environment and the flags.
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
        let invalid = |section: &str, error: ErrorDetail| {
            ConfigError::Contradiction(format!("{section}: {}", error.message))
        };
        self.pool.target().validate().map_err(|error| invalid("pool", error))?;
        let limits = self.workspaces.default_limits();
        limits.validate().map_err(|error| invalid("workspaces", error))
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
    fn the_example_file_is_valid_and_has_the_default_values() {
        let example = load(include_str!("../../../../emergent.example.toml")).unwrap();
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
            "[log]\notlp_endpoint = \"collector\"",
        ] {
            assert!(load(text).is_err(), "{text}");
        }
        assert!(Settings::load(Some(Path::new("/nowhere.toml")), &Overrides::default()).is_err());
    }

    #[test]
    fn traces_are_exported_only_to_an_address_that_is_given() {
        assert_eq!(Settings::default().log.otlp_endpoint, None);
        assert_eq!(load("[log]\notlp_endpoint = \"\"").unwrap().log.otlp_endpoint, None);
        let given = load("[log]\notlp_endpoint = \"http://127.0.0.1:4318\"").unwrap();
        assert_eq!(given.log.otlp_endpoint.unwrap().to_string(), "http://127.0.0.1:4318/");
        let refused = load("[log]\notlp_endpoint = \"http://user:a-password@host\"").unwrap_err().to_string();
        assert!(refused.contains("log.otlp_endpoint") && !refused.contains("a-password"), "{refused}");
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
