//! Checks of this machine: disk space, permissions, devices, programs, the firewall and DNS.

use std::fs::{self, OpenOptions};
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::report::Check;

/// The server makes no disks below this.
const LEAST_FREE_BYTES: u64 = 1 << 30;
/// Below this, one workspace of the default size can fill the disk.
const ENOUGH_FREE_BYTES: u64 = 10 << 30;
/// The directories of system programs. The caller's PATH may lack some.
const SYSTEM_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// The checks of files and devices.
pub(super) fn checks(data_dir: &Path) -> Vec<Check> {
    vec![data_directory(data_dir), disk_space("disk space", data_dir), disk_quotas()]
}

pub(super) fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// The path, or its nearest ancestor that exists.
fn nearest(path: &Path) -> &Path {
    path.ancestors().find(|path| path.exists()).unwrap_or(Path::new("/"))
}

fn data_directory(path: &Path) -> Check {
    const WHAT: &str = "data directory";
    let shown = path.display();
    let probe = nearest(path).join(format!(".emergent-doctor-{}", std::process::id()));
    let written = OpenOptions::new().write(true).create_new(true).open(&probe).map(drop);
    let _ = fs::remove_file(&probe);
    match written {
        Ok(()) if path.is_dir() => Check::ok(WHAT, format!("{shown} can be written")),
        Ok(()) => Check::ok(WHAT, format!("{shown} does not exist yet; the first start creates it")),
        Err(error) => Check::fail(
            WHAT,
            format!("{} can't be written: {error}", nearest(path).display()),
            "run as its owner, or choose another: emergent serve --data-dir DIR",
        ),
    }
}

/// Checks the free space of the file system that has this path.
pub(super) fn disk_space(what: &str, path: &Path) -> Check {
    let place = nearest(path);
    let free = match rustix::fs::statvfs(place) {
        Ok(stat) => stat.f_bavail.saturating_mul(stat.f_frsize),
        Err(error) => {
            return Check::warn(
                what,
                format!("{}: {error}", path.display()),
                "check that the file system is mounted",
            );
        }
    };
    let detail = format!("{:.1} GiB free at {}", free as f64 / f64::from(1 << 30), path.display());
    let fix =
        "free some space (`docker system df` shows Docker's share), or choose another disk with --data-dir";
    match free {
        0..LEAST_FREE_BYTES => Check::fail(what, detail, fix),
        LEAST_FREE_BYTES..ENOUGH_FREE_BYTES => {
            Check::warn(what, format!("{detail}; a workspace may use 10 GiB"), fix)
        }
        _ => Check::ok(what, detail),
    }
}

fn disk_quotas() -> Check {
    const WHAT: &str = "disk quotas";
    let watched = "the server watches the disk use of workspaces, but the kernel does not limit it";
    if !is_root() {
        return Check::warn(WHAT, format!("loop devices need root: {watched}"), "run the server as root");
    }
    if !Path::new("/dev/loop-control").exists() {
        return Check::warn(
            WHAT,
            format!("no loop devices: {watched}"),
            "modprobe loop (in a container: run it with --privileged or --device /dev/loop-control)",
        );
    }
    for (program, package) in [("mke2fs", "e2fsprogs"), ("losetup", "mount")] {
        if find_program(program).is_none() {
            return Check::warn(
                WHAT,
                format!("{program} is missing: {watched}"),
                format!("apt-get install {package}   (or: make setup)"),
            );
        }
    }
    Check::ok(WHAT, "each workspace gets a disk of its own (loop device, ext4)")
}

/// Checks that egress rules can be set. They block this host and private networks for workspaces.
pub(super) fn firewall() -> Check {
    const WHAT: &str = "firewall";
    let without = "without egress rules the server creates no workspaces with a network";
    if !is_root() {
        return Check::fail(
            WHAT,
            format!("setting rules needs root: {without}"),
            "run the server as root, or create workspaces with --network isolated",
        );
    }
    let families: &[&str] =
        if Path::new("/proc/net/if_inet6").exists() { &["iptables", "ip6tables"] } else { &["iptables"] };
    for family in families {
        for program in [(*family).to_owned(), format!("{family}-restore")] {
            if find_program(&program).is_none() {
                return Check::fail(
                    WHAT,
                    format!("{program} is missing: {without}"),
                    "apt-get install iptables",
                );
            }
        }
        if let Err(problem) = run(family, &["-w", "5", "-n", "-L", "INPUT"]) {
            return Check::fail(
                WHAT,
                format!("{family} does not work: {problem}"),
                "load the kernel's modules (modprobe ip_tables ip6_tables), or choose the other back end: \
                 update-alternatives --config iptables",
            );
        }
    }
    Check::ok(WHAT, format!("{} can be used", families.join(" and ")))
}

/// Checks that workspaces can reach a name server.
pub(super) fn name_servers(configured: &[IpAddr]) -> Check {
    const WHAT: &str = "DNS";
    let list = |servers: &[IpAddr]| servers.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    if !configured.is_empty() {
        return Check::ok(WHAT, format!("workspaces use {} (configured)", list(configured)));
    }
    let text = fs::read_to_string("/etc/resolv.conf").unwrap_or_default();
    let (reachable, others) = sort_name_servers(&text);
    if reachable.is_empty() {
        let found = if others.is_empty() { "none".to_owned() } else { format!("only {}", list(&others)) };
        return Check::warn(
            WHAT,
            format!(
                "/etc/resolv.conf has no name server that a workspace can reach ({found}); workspaces use 1.1.1.1 and 8.8.8.8"
            ),
            "if this network blocks them, set yours in emergent.toml: [providers] nameservers = [\"ADDRESS\"]",
        );
    }
    Check::ok(WHAT, format!("workspaces use {}", list(&reachable)))
}

/// The name servers of a resolv.conf: first those that a sandbox can reach (IPv4, not on this host's loopback), then the others.
fn sort_name_servers(text: &str) -> (Vec<IpAddr>, Vec<IpAddr>) {
    let servers = text.lines().filter_map(|line| {
        let mut words = line.split_whitespace();
        (words.next() == Some("nameserver")).then(|| words.next()?.parse::<IpAddr>().ok()).flatten()
    });
    servers.partition(|server| server.is_ipv4() && !server.is_loopback() && !server.is_unspecified())
}

/// The path of a system program.
pub(super) fn find_program(name: &str) -> Option<PathBuf> {
    SYSTEM_PATH.split(':').map(|directory| Path::new(directory).join(name)).find(|path| path.is_file())
}

/// Runs a system program. The error is its standard error.
pub(super) fn run(program: &str, arguments: &[&str]) -> Result<(), String> {
    let output = Command::new(program)
        .args(arguments)
        .env("PATH", SYSTEM_PATH)
        .env("LC_ALL", "C")
        .stdin(Stdio::null())
        .output()
        .map_err(|error| error.to_string())?;
    if output.status.success() {
        return Ok(());
    }
    let stderr = String::from_utf8_lossy(&output.stderr);
    let problem = stderr.trim();
    Err(if problem.is_empty() { output.status.to_string() } else { problem.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_and_ipv6_name_servers_are_not_reachable() {
        let text = "# x\nnameserver 127.0.0.53\nnameserver 10.0.0.1 # y\nnameserver ::1\noptions edns0\nnameserver\n";
        let (reachable, others) = sort_name_servers(text);
        assert_eq!(reachable, ["10.0.0.1".parse::<IpAddr>().unwrap()]);
        assert_eq!(others.len(), 2);
    }

    #[test]
    fn missing_data_directory_passes_if_its_ancestor_can_be_written() {
        let directory = tempfile::tempdir().unwrap();
        assert!(data_directory(directory.path()).is_ok());
        assert!(data_directory(&directory.path().join("a/b")).is_ok());
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0, "nothing is left");
        assert!(!data_directory(Path::new("/proc/no/such")).is_ok());
    }

    #[test]
    fn failed_program_returns_its_standard_error() {
        assert!(find_program("sh").is_some());
        assert!(find_program("no-such-program").is_none());
        assert_eq!(run("sh", &["-c", "echo no >&2; exit 3"]), Err("no".to_owned()));
        assert_eq!(run("sh", &["-c", "exit 0"]), Ok(()));
    }
}
