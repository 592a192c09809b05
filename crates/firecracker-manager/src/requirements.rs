//! The requirements of microVMs on their host. Each one is checked by a trial.

use std::fs;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use emergent_host::firewall::{FILTER, families};

use crate::options::ManagerOptions;
use crate::{kvm, tap};

/// The time limit for a program to print its version.
const VERSION_TIME: Duration = Duration::from_secs(10);
/// The command that installs Firecracker, its jailer and a kernel.
const INSTALL: &str = "`emergent firecracker install` gets it";

/// The names of requirements.
pub(crate) const KVM: &str = "KVM";
pub(crate) const FIRECRACKER: &str = "Firecracker";
pub(crate) const JAILER: &str = "jailer";

/// A requirement of microVMs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Requirement {
    /// Its name.
    pub name: &'static str,
    /// A description of the part that was found, or why it can't be used.
    pub status: Result<String, UnmetRequirement>,
}

/// Why a requirement is not met.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{problem}; {fix}")]
pub struct UnmetRequirement {
    /// The cause.
    pub problem: String,
    /// The next step.
    pub fix: String,
}

fn unmet<T>(problem: impl Into<String>, fix: impl Into<String>) -> Result<T, UnmetRequirement> {
    Err(UnmetRequirement { problem: problem.into(), fix: fix.into() })
}

/// Checks all requirements. Nothing that a check makes is left.
pub async fn check(options: &ManagerOptions) -> Vec<Requirement> {
    let checked = options.clone();
    let on_host = tokio::task::spawn_blocking(move || {
        [
            Requirement { name: KVM, status: kvm::check(&checked.kvm_device) },
            Requirement { name: "kernel for microVMs", status: kernel(&checked.kernel) },
            Requirement { name: "TAP interfaces", status: interfaces() },
            Requirement { name: "firewall for microVMs", status: rules() },
        ]
    });
    let (firecracker, jailer, on_host) = tokio::join!(
        program(&options.firecracker, "FIRECRACKER_BIN"),
        program(&options.jailer, "JAILER_BIN"),
        on_host,
    );
    let jailer = match (&firecracker, jailer) {
        (Ok(own), Ok(other)) if *own != other => unmet(
            format!("the jailer has version {other} and Firecracker {own}"),
            "install both from one release; `emergent firecracker install` does",
        ),
        (_, jailer) => jailer,
    };
    let programs = [
        Requirement { name: FIRECRACKER, status: firecracker },
        Requirement { name: JAILER, status: jailer },
    ];
    on_host.into_iter().flatten().chain(programs).collect()
}

/// The version of a program, such as `v1.16.1`.
async fn program(program: &Path, setting: &str) -> Result<String, UnmetRequirement> {
    version_of(program).await.or_else(|error| {
        unmet(
            format!("{} can't be used: {error}", program.display()),
            format!("{INSTALL}, or name another with {setting}"),
        )
    })
}

async fn version_of(program: &Path) -> Result<String, String> {
    let mut command = tokio::process::Command::new(program);
    command.arg("--version").env_clear().stdin(Stdio::null()).kill_on_drop(true);
    let output = match tokio::time::timeout(VERSION_TIME, command.output()).await {
        Ok(output) => output.map_err(|error| error.to_string())?,
        Err(_) => return Err(format!("it does not print its version within {} s", VERSION_TIME.as_secs())),
    };
    let said = String::from_utf8_lossy(&output.stdout);
    let version = said.split_ascii_whitespace().find(|word| word.starts_with('v') && word.contains('.'));
    version.map(str::to_owned).ok_or_else(|| "it does not print its version".to_owned())
}

pub(crate) fn kernel(path: &Path) -> Result<String, UnmetRequirement> {
    match fs::File::open(path).and_then(|file| file.metadata()) {
        Ok(found) if found.is_file() => Ok(path.display().to_string()),
        Ok(_) => unmet(
            format!("the kernel {} is no file", path.display()),
            format!("{INSTALL}, or name another with FIRECRACKER_KERNEL"),
        ),
        Err(error) => unmet(
            format!("the kernel {} can't be used: {error}", path.display()),
            format!("{INSTALL}, or name another with FIRECRACKER_KERNEL"),
        ),
    }
}

fn interfaces() -> Result<String, UnmetRequirement> {
    tap::check_making().map(|()| "can be made".to_owned()).or_else(|error| {
        unmet(format!("no interface can be made: {error}"), "load the module tun, and run as root")
    })
}

fn rules() -> Result<String, UnmetRequirement> {
    if !rustix::process::geteuid().is_root() {
        return unmet("rules and jails need root", "run the manager as root");
    }
    for family in families() {
        family.run(FILTER, &["-n", "-L", "FORWARD"]).or_else(|error| {
            unmet(
                error.to_string(),
                "install iptables, and load the kernel's modules (modprobe ip_tables ip6_tables)",
            )
        })?;
    }
    Ok("rules can be set".to_owned())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use super::*;

    #[tokio::test]
    async fn each_unmet_requirement_is_named_with_its_fix() {
        let directory = tempfile::tempdir().unwrap();
        let script = |name: &str, text: &str| {
            use std::os::unix::fs::PermissionsExt;
            let path = directory.path().join(name);
            fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
            path
        };
        let mut options = ManagerOptions {
            firecracker: script("firecracker", "echo Firecracker v1.2.3"),
            jailer: script("jailer", "echo Jailer v1.2.4"),
            kernel: directory.path().join("none"),
            kvm_device: "/dev/null".into(),
            ..ManagerOptions::default()
        };
        let unmet = |requirements: Vec<Requirement>| -> Vec<(&'static str, String)> {
            requirements
                .into_iter()
                .filter_map(|each| Some((each.name, each.status.err()?.to_string())))
                .collect()
        };
        let found = unmet(check(&options).await);
        let of = |wanted: &str| found.iter().find(|(name, _)| *name == wanted).map(|(_, text)| text.as_str());
        assert!(of(KVM).unwrap().starts_with("KVM not available"), "{found:?}");
        assert!(of("kernel for microVMs").unwrap().contains("emergent firecracker install"), "{found:?}");
        assert!(of(JAILER).unwrap().contains("v1.2.4 and Firecracker v1.2.3"), "{found:?}");
        assert_eq!(of(FIRECRACKER), None);
        options.firecracker = "/dev/null".into();
        let found = unmet(check(&options).await);
        assert!(
            found.iter().any(|(name, text)| *name == FIRECRACKER && text.contains("FIRECRACKER_BIN")),
            "{found:?}"
        );
    }
}
