//! Control groups: the limits of microVMs' processes on the host. The jailer makes a group for each process; the manager
//! removes it.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use emergent_wire::workspace::ResourceLimits;
use procfs::MountEntry;
use rustix::process::{Pid, Signal};

/// The memory of Firecracker itself, beside the guest's: a constant, and a part of the guest's memory for tables.
const OVERHEAD_BYTES: u64 = 128 << 20;
const OVERHEAD_DIVISOR: u64 = 16;
/// The period of the CPU quota.
const PERIOD_US: u64 = 100_000;

/// The time limit for killed processes to leave a group.
const EMPTY_TIME: Duration = Duration::from_secs(10);

/// The file system types of the two versions.
const V1: &str = "cgroup";
const V2: &str = "cgroup2";

/// The host's hierarchies of control groups.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Groups {
    /// Version 2: one hierarchy for all controllers.
    V2(PathBuf),
    /// Version 1: a hierarchy for memory, and one for CPUs.
    V1 { memory: PathBuf, cpu: PathBuf },
    /// There is none that this process can use.
    None,
}

impl Groups {
    /// Finds the hierarchies that this process can write to.
    pub(crate) fn find() -> Self {
        Self::find_in(&procfs::mounts().unwrap_or_default(), |path| {
            rustix::fs::access(path, rustix::fs::Access::WRITE_OK).is_ok()
        })
    }

    fn find_in(mounts: &[MountEntry], is_writable: impl Fn(&Path) -> bool) -> Self {
        let mounted = |matches: &dyn Fn(&MountEntry) -> bool| {
            let matching = mounts.iter().filter(|mount| matches(mount));
            matching.map(|mount| PathBuf::from(&mount.fs_file)).find(|path| is_writable(path))
        };
        let v1 = |controller: &str| {
            mounted(&|mount| mount.fs_vfstype == V1 && mount.fs_mntops.contains_key(controller))
        };
        if let Some(tree) = mounted(&|mount| mount.fs_vfstype == V2) {
            let controllers = fs::read_to_string(tree.join("cgroup.controllers")).unwrap_or_default();
            let has = |name: &str| controllers.split_ascii_whitespace().any(|each| each == name);
            if has("memory") && has("cpu") {
                return Self::V2(tree);
            }
        }
        match (v1("memory"), v1("cpu")) {
            (Some(memory), Some(cpu)) => Self::V1 { memory, cpu },
            _ => Self::None,
        }
    }

    /// The jailer's arguments.
    pub(crate) fn arguments(&self, limits: &ResourceLimits) -> Vec<String> {
        let memory = limits.memory.bytes();
        let memory = memory + memory / OVERHEAD_DIVISOR + OVERHEAD_BYTES;
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

    /// Removes a microVM's groups, or without an id their parent.
    pub(crate) fn remove(&self, parent: &str, id: Option<&str>) -> io::Result<()> {
        for tree in self.trees() {
            remove_group(&tree.join(parent).join(id.unwrap_or_default()))?;
        }
        Ok(())
    }

    /// The names of all groups below the parent.
    pub(crate) fn list(&self, parent: &str) -> Vec<String> {
        let groups =
            self.trees().into_iter().flat_map(|tree| fs::read_dir(tree.join(parent)).into_iter().flatten());
        let directories = groups.flatten().filter(|entry| entry.path().is_dir());
        directories.filter_map(|entry| entry.file_name().into_string().ok()).collect()
    }
}

/// The files that move a process to the root group of each hierarchy, if it writes [`WRITING_PROCESS`] to them. When the
/// manager's service or container is stopped, every process that shares a group with the manager is killed. MicroVMs outlive
/// their manager, so they must not share any.
pub(crate) fn root_group_files() -> Vec<fs::File> {
    let mounts = procfs::mounts().unwrap_or_default();
    let roots = mounts.iter().filter(|mount| mount.fs_vfstype == V1 || mount.fs_vfstype == V2);
    let files = roots.map(|mount| Path::new(&mount.fs_file).join("cgroup.procs"));
    files.filter_map(|file| fs::OpenOptions::new().write(true).open(file).ok()).collect()
}

/// Stands for the writing process in `cgroup.procs`.
pub(crate) const WRITING_PROCESS: &[u8] = b"0";

/// Removes a group. Processes in it are killed first, and the kernel takes a moment to remove them from the group.
fn remove_group(group: &Path) -> io::Result<()> {
    let deadline = Instant::now() + EMPTY_TIME;
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
    use procfs::FromRead as _;

    use super::*;

    fn find_in(mounts: &str, is_writable: impl Fn(&Path) -> bool) -> Groups {
        Groups::find_in(&Vec::<MountEntry>::from_read(mounts.as_bytes()).unwrap(), is_writable)
    }

    #[test]
    fn both_versions_are_found_and_limited() {
        let tree = tempfile::tempdir().unwrap();
        std::fs::write(tree.path().join("cgroup.controllers"), "cpuset cpu io memory pids\n").unwrap();
        let mounts = format!("cgroup2 {} cgroup2 rw,nosuid 0 0\n", tree.path().display());
        let groups = find_in(&mounts, |_| true);
        assert_eq!(groups, Groups::V2(tree.path().to_owned()));
        let arguments = groups.arguments(&ResourceLimits::default());
        assert_eq!(arguments[..2], ["--cgroup-version", "2"]);
        assert!(arguments.contains(&"cpu.max=200000 100000".to_owned()), "{arguments:?}");
        // Hybrid hosts have both versions, and the controllers are in version 1.
        std::fs::write(tree.path().join("cgroup.controllers"), "\n").unwrap();
        let both = format!(
            "{mounts}cgroup /sys/fs/cgroup/cpu,cpuacct cgroup rw,cpu,cpuacct 0 0\ncgroup /sys/fs/cgroup/memory cgroup rw,memory 0 0\n"
        );
        let groups = find_in(&both, |_| true);
        let memory = PathBuf::from("/sys/fs/cgroup/memory");
        assert_eq!(groups, Groups::V1 { memory, cpu: "/sys/fs/cgroup/cpu,cpuacct".into() });
        assert!(groups.arguments(&ResourceLimits::default()).contains(&"cpu.cfs_quota_us=200000".to_owned()));
        assert_eq!(find_in(&both, |_| false), Groups::None);
    }
}
