//! What this machine has: room, rights, devices, programs.

use std::fs::{self, OpenOptions};
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::report::Check;

/// Below this the server refuses to make disks.
const LEAST_FREE_BYTES: u64 = 1 << 30;
/// Below this one workspace of the usual size may fill the disk.
const ENOUGH_FREE_BYTES: u64 = 10 << 30;
/// Where system programs are, whatever the caller's PATH.
const SYSTEM_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// All checks that look at files and devices.
pub(super) fn checks(data_dir: &Path) -> Vec<Check> {
    vec![data_directory(data_dir), disk_space("disk space", data_dir), disk_quotas()]
}

pub(super) fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// The path itself or, as long as it is not there, what is above it.
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
        Ok(()) => Check::ok(WHAT, format!("{shown} does not exist yet; the first start makes it")),
        Err(error) => Check::fail(
            WHAT,
            format!("{} can't be written: {error}", nearest(path).display()),
            "run as the user who owns it, or choose another: emergent serve --data-dir DIR",
        ),
    }
}

/// How much room there is where this path is.
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
    let fix = "free some room (docker system df shows what Docker uses), or move it with --data-dir";
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
    let watched = "workspaces' disk use is watched, but not limited by the kernel";
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
    Check::ok(WHAT, "each workspace gets a disk of its own size (loop device, ext4)")
}

/// Whether the rules that keep workspaces off this host and its networks can be set.
pub(super) fn firewall() -> Check {
    const WHAT: &str = "firewall";
    let without = "workspaces with a network can't be made without it";
    if !is_root() {
        return Check::fail(
            WHAT,
            format!("setting rules needs root: {without}"),
            "run the server as root, or make workspaces with --network isolated",
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
        if let Err(said) = run(family, &["-w", "5", "-n", "-L", "INPUT"]) {
            return Check::fail(
                WHAT,
                format!("{family} does not work: {said}"),
                "load the kernel's modules (modprobe ip_tables ip6_tables), or choose the other back end: \
                 update-alternatives --config iptables",
            );
        }
    }
    Check::ok(WHAT, format!("{} can be used", families.join(" and ")))
}

/// Whether workspaces can be given a name server that they reach.
pub(super) fn name_servers(configured: &[IpAddr]) -> Check {
    const WHAT: &str = "DNS";
    let list = |servers: &[IpAddr]| servers.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    if !configured.is_empty() {
        return Check::ok(WHAT, format!("workspaces ask {} (configured)", list(configured)));
    }
    let text = fs::read_to_string("/etc/resolv.conf").unwrap_or_default();
    let (reachable, others) = sort_name_servers(&text);
    if reachable.is_empty() {
        let found = if others.is_empty() { "none".to_owned() } else { format!("only {}", list(&others)) };
        return Check::warn(
            WHAT,
            format!(
                "/etc/resolv.conf has no name server that a workspace can reach ({found}); they ask 1.1.1.1 and 8.8.8.8"
            ),
            "if this network blocks those, name one of yours in emergent.toml: [providers] nameservers = [\"ADDRESS\"]",
        );
    }
    Check::ok(WHAT, format!("workspaces ask {}", list(&reachable)))
}

/// Name servers in a resolv.conf: those that a sandbox can reach (IPv4, not on this host's loopback), and others.
fn sort_name_servers(text: &str) -> (Vec<IpAddr>, Vec<IpAddr>) {
    let servers = text.lines().filter_map(|line| {
        let mut words = line.split_whitespace();
        (words.next() == Some("nameserver")).then(|| words.next()?.parse::<IpAddr>().ok()).flatten()
    });
    servers.partition(|server| server.is_ipv4() && !server.is_loopback() && !server.is_unspecified())
}

/// Where a system program is.
pub(super) fn find_program(name: &str) -> Option<PathBuf> {
    SYSTEM_PATH.split(':').map(|directory| Path::new(directory).join(name)).find(|path| path.is_file())
}

/// Runs a system program; what it said when it failed.
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
    let said = String::from_utf8_lossy(&output.stderr);
    let said = said.trim();
    Err(if said.is_empty() { output.status.to_string() } else { said.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_servers_of_this_host_alone_are_told_apart() {
        let text = "# x\nnameserver 127.0.0.53\nnameserver 10.0.0.1 # y\nnameserver ::1\noptions edns0\nnameserver\n";
        let (reachable, others) = sort_name_servers(text);
        assert_eq!(reachable, ["10.0.0.1".parse::<IpAddr>().unwrap()]);
        assert_eq!(others.len(), 2);
    }

    #[test]
    fn a_directory_that_is_not_there_yet_is_fine() {
        let directory = tempfile::tempdir().unwrap();
        assert!(data_directory(directory.path()).is_ok());
        assert!(data_directory(&directory.path().join("a/b")).is_ok());
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0, "nothing is left");
        assert!(!data_directory(Path::new("/proc/no/such")).is_ok());
    }

    #[test]
    fn programs_are_found_and_their_words_kept() {
        assert!(find_program("sh").is_some());
        assert!(find_program("no-such-program").is_none());
        assert_eq!(run("sh", &["-c", "echo no >&2; exit 3"]), Err("no".to_owned()));
        assert_eq!(run("sh", &["-c", "exit 0"]), Ok(()));
    }
}
