//! What microVMs need of a host, each thing tried.

use std::fs;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use emergent_host::firewall::{FILTER, families};

use crate::options::ManagerOptions;
use crate::{kvm, tap};

/// How long a program may take to say its version.
const VERSION_TIME: Duration = Duration::from_secs(10);
/// How to get what is missing.
const INSTALL: &str = "`emergent firecracker install` gets it";

/// The names of what is needed.
pub(crate) const KVM: &str = "KVM";
pub(crate) const FIRECRACKER: &str = "Firecracker";
pub(crate) const JAILER: &str = "jailer";

/// Something that microVMs need.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Need {
    /// What it is.
    pub what: &'static str,
    /// What was found.
    pub found: Result<String, Lack>,
}

/// Why something can't be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lack {
    /// What is wrong.
    pub problem: String,
    /// What to do about it.
    pub fix: String,
}

impl std::fmt::Display for Lack {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}; {}", self.problem, self.fix)
    }
}

fn lack<T>(problem: impl Into<String>, fix: impl Into<String>) -> Result<T, Lack> {
    Err(Lack { problem: problem.into(), fix: fix.into() })
}

/// Tries everything that microVMs need. Nothing of it stays.
pub async fn examine(options: &ManagerOptions) -> Vec<Need> {
    let looked = options.clone();
    let on_host = tokio::task::spawn_blocking(move || {
        [
            Need { what: KVM, found: kvm::check(&looked.kvm_device) },
            Need { what: "kernel for microVMs", found: kernel(&looked.kernel) },
            Need { what: "TAP interfaces", found: interfaces() },
            Need { what: "firewall for microVMs", found: rules() },
        ]
    });
    let (firecracker, jailer, on_host) = tokio::join!(
        program(&options.firecracker, "FIRECRACKER_BIN"),
        program(&options.jailer, "JAILER_BIN"),
        on_host,
    );
    let jailer = match (&firecracker, jailer) {
        (Ok(own), Ok(other)) if *own != other => lack(
            format!("the jailer has version {other} and Firecracker {own}"),
            "install both from one release; `emergent firecracker install` does",
        ),
        (_, jailer) => jailer,
    };
    let programs = [Need { what: FIRECRACKER, found: firecracker }, Need { what: JAILER, found: jailer }];
    on_host.into_iter().flatten().chain(programs).collect()
}

/// What a program says its version is, such as `v1.16.1`.
async fn program(program: &Path, setting: &str) -> Result<String, Lack> {
    version_of(program).await.or_else(|error| {
        lack(
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
        Err(_) => return Err(format!("it does not say its version within {} s", VERSION_TIME.as_secs())),
    };
    let said = String::from_utf8_lossy(&output.stdout);
    let version = said.split_ascii_whitespace().find(|word| word.starts_with('v') && word.contains('.'));
    version.map(str::to_owned).ok_or_else(|| "it does not say its version".to_owned())
}

pub(crate) fn kernel(path: &Path) -> Result<String, Lack> {
    match fs::File::open(path).and_then(|file| file.metadata()) {
        Ok(found) if found.is_file() => Ok(path.display().to_string()),
        Ok(_) => lack(
            format!("the kernel {} is no file", path.display()),
            format!("{INSTALL}, or name another with FIRECRACKER_KERNEL"),
        ),
        Err(error) => lack(
            format!("the kernel {} can't be used: {error}", path.display()),
            format!("{INSTALL}, or name another with FIRECRACKER_KERNEL"),
        ),
    }
}

fn interfaces() -> Result<String, Lack> {
    tap::try_one().map(|()| "can be made".to_owned()).or_else(|error| {
        lack(format!("no interface can be made: {error}"), "load the module tun, and run as root")
    })
}

fn rules() -> Result<String, Lack> {
    if !rustix::process::geteuid().is_root() {
        return lack("rules and jails need root", "run the manager as root");
    }
    for family in families() {
        family.run(FILTER, &["-n", "-L", "FORWARD"]).or_else(|error| {
            lack(error, "install iptables, and load the kernel's modules (modprobe ip_tables ip6_tables)")
        })?;
    }
    Ok("rules can be set".to_owned())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use super::*;

    #[tokio::test]
    async fn each_thing_that_is_missing_is_named_with_what_to_do() {
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
        let lacks = |needs: Vec<Need>| -> Vec<(&'static str, String)> {
            needs.into_iter().filter_map(|need| Some((need.what, need.found.err()?.to_string()))).collect()
        };
        let found = lacks(examine(&options).await);
        let of = |what: &str| found.iter().find(|(name, _)| *name == what).map(|(_, text)| text.as_str());
        assert!(of(KVM).unwrap().starts_with("KVM not available"), "{found:?}");
        assert!(of("kernel for microVMs").unwrap().contains("emergent firecracker install"), "{found:?}");
        assert!(of(JAILER).unwrap().contains("v1.2.4 and Firecracker v1.2.3"), "{found:?}");
        assert_eq!(of(FIRECRACKER), None);
        options.firecracker = "/dev/null".into();
        let found = lacks(examine(&options).await);
        assert!(
            found.iter().any(|(what, text)| *what == FIRECRACKER && text.contains("FIRECRACKER_BIN")),
            "{found:?}"
        );
    }
}
