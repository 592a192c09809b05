//! Control groups: what a microVM's process may take of the host. The jailer makes them and enters them; it does not remove
//! them.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use emergent_wire::workspace::ResourceLimits;
use rustix::process::{Pid, Signal};

/// What Firecracker itself may use beside the microVM's memory: a part of it for tables, and this.
const OVERHEAD_BYTES: u64 = 128 << 20;
const OVERHEAD_PART: u64 = 16;
/// The time within which a share of the CPUs is measured.
const PERIOD_US: u64 = 100_000;

/// How long processes that were killed may take to leave a group.
const EMPTY_WITHIN: Duration = Duration::from_secs(10);

/// Where the host's groups are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Groups {
    /// One tree for all controllers.
    V2(PathBuf),
    /// A tree for memory, and one for CPUs.
    V1 { memory: PathBuf, cpu: PathBuf },
    /// There are none that we could use.
    None,
}

impl Groups {
    /// Finds them. What can be written to is known only when it is tried.
    pub(crate) fn find() -> Self {
        Self::find_in(&fs::read_to_string("/proc/mounts").unwrap_or_default(), |path| {
            rustix::fs::access(path, rustix::fs::Access::WRITE_OK).is_ok()
        })
    }

    fn find_in(mounts: &str, is_writable: impl Fn(&Path) -> bool) -> Self {
        let mounted = |kind: &str, controller: &str| {
            mounts.lines().find_map(|line| {
                let fields: Vec<&str> = line.split(' ').collect();
                let (path, found, flags) = (Path::new(fields.get(1)?), fields.get(2)?, fields.get(3)?);
                let fits = *found == kind
                    && match kind {
                        "cgroup2" => true,
                        _ => flags.split(',').any(|flag| flag == controller),
                    };
                (fits && is_writable(path)).then(|| path.to_owned())
            })
        };
        if let Some(tree) = mounted("cgroup2", "") {
            let controllers = fs::read_to_string(tree.join("cgroup.controllers")).unwrap_or_default();
            let has = |name: &str| controllers.split_ascii_whitespace().any(|each| each == name);
            if has("memory") && has("cpu") {
                return Self::V2(tree);
            }
        }
        match (mounted("cgroup", "memory"), mounted("cgroup", "cpu")) {
            (Some(memory), Some(cpu)) => Self::V1 { memory, cpu },
            _ => Self::None,
        }
    }

    /// The jailer's arguments.
    pub(crate) fn arguments(&self, limits: &ResourceLimits) -> Vec<String> {
        let memory = limits.memory.bytes();
        let memory = memory + memory / OVERHEAD_PART + OVERHEAD_BYTES;
        let quota = u64::from(limits.cpu.millis()) * PERIOD_US / 1000;
        let settings = match self {
            Self::V2(_) => vec![
                ("2", format!("memory.max={memory}")),
                ("2", "memory.swap.max=0".to_owned()),
                ("2", format!("cpu.max={quota} {PERIOD_US}")),
            ],
            Self::V1 { .. } => vec![
                ("1", format!("memory.limit_in_bytes={memory}")),
                ("1", format!("cpu.cfs_quota_us={quota}")),
            ],
            Self::None => Vec::new(),
        };
        let version = settings.first().map(|(version, _)| (*version).to_owned());
        let version = version.into_iter().flat_map(|version| ["--cgroup-version".to_owned(), version]);
        version
            .chain(settings.into_iter().flat_map(|(_, setting)| ["--cgroup".to_owned(), setting]))
            .collect()
    }

    fn trees(&self) -> Vec<&Path> {
        match self {
            Self::V2(tree) => vec![tree],
            Self::V1 { memory, cpu } => vec![memory, cpu],
            Self::None => Vec::new(),
        }
    }

    /// Removes a microVM's groups, or with no microVM given those that held them all.
    pub(crate) fn remove(&self, parent: &str, id: Option<&str>) -> io::Result<()> {
        for tree in self.trees() {
            remove_group(&tree.join(parent).join(id.unwrap_or_default()))?;
        }
        Ok(())
    }

    /// The microVMs that have groups.
    pub(crate) fn list(&self, parent: &str) -> Vec<String> {
        let groups =
            self.trees().into_iter().flat_map(|tree| fs::read_dir(tree.join(parent)).into_iter().flatten());
        let directories = groups.flatten().filter(|entry| entry.path().is_dir());
        directories.filter_map(|entry| entry.file_name().into_string().ok()).collect()
    }
}

/// The files by which a process leaves every group that it is in, if it writes [`SELF`] to them. Whoever ends the container
/// or the service that a manager is in ends all that share a group with it, in any tree; microVMs outlive their manager.
pub(crate) fn ways_out() -> Vec<fs::File> {
    let mounts = fs::read_to_string("/proc/mounts").unwrap_or_default();
    let trees = mounts.lines().filter_map(|line| {
        let fields: Vec<&str> = line.split(' ').collect();
        matches!(*fields.get(2)?, "cgroup" | "cgroup2").then(|| Path::new(fields[1]).join("cgroup.procs"))
    });
    trees.filter_map(|file| fs::OpenOptions::new().write(true).open(file).ok()).collect()
}

/// The process that writes it.
pub(crate) const SELF: &[u8] = b"0";

/// Removes a group. What is still in it is killed; the kernel takes a moment to let go of it.
fn remove_group(group: &Path) -> io::Result<()> {
    let deadline = Instant::now() + EMPTY_WITHIN;
    loop {
        match fs::remove_dir(group) {
            Ok(()) => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy && Instant::now() < deadline => {
                let members = fs::read_to_string(group.join("cgroup.procs")).unwrap_or_default();
                for pid in members.lines().filter_map(|line| Pid::from_raw(line.parse().ok()?)) {
                    let _ = rustix::process::kill_process(pid, Signal::KILL);
                }
                std::thread::sleep(Duration::from_millis(5));
            }
            Err(error) => return Err(io::Error::new(error.kind(), format!("{}: {error}", group.display()))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn either_version_is_found_and_used() {
        let tree = tempfile::tempdir().unwrap();
        std::fs::write(tree.path().join("cgroup.controllers"), "cpuset cpu io memory pids\n").unwrap();
        let mounts = format!("cgroup2 {} cgroup2 rw,nosuid 0 0\n", tree.path().display());
        let groups = Groups::find_in(&mounts, |_| true);
        assert_eq!(groups, Groups::V2(tree.path().to_owned()));
        let arguments = groups.arguments(&ResourceLimits::default());
        assert_eq!(arguments[..2], ["--cgroup-version", "2"]);
        assert!(arguments.contains(&"cpu.max=200000 100000".to_owned()), "{arguments:?}");
        // Both versions, and the controllers are in the first: as on hosts that are being moved to the second.
        std::fs::write(tree.path().join("cgroup.controllers"), "\n").unwrap();
        let both = format!(
            "{mounts}cgroup /sys/fs/cgroup/cpu,cpuacct cgroup rw,cpu,cpuacct 0 0\ncgroup /sys/fs/cgroup/memory cgroup rw,memory 0 0\n"
        );
        let groups = Groups::find_in(&both, |_| true);
        let memory = PathBuf::from("/sys/fs/cgroup/memory");
        assert_eq!(groups, Groups::V1 { memory, cpu: "/sys/fs/cgroup/cpu,cpuacct".into() });
        assert!(groups.arguments(&ResourceLimits::default()).contains(&"cpu.cfs_quota_us=200000".to_owned()));
        assert_eq!(Groups::find_in(&both, |_| false), Groups::None);
    }
}
