//! Counts the processes of a sandbox that the host's kernel killed because the sandbox ran out of memory.

use std::fs;
use std::path::{Path, PathBuf};

use emergent_host::control_group::{ROOT, group_path};
use emergent_host::processes;
use procfs::ProcessCGroup;

/// The file in which the kernel counts the processes that it killed for lack of memory.
#[derive(Clone, Debug)]
pub(crate) struct KillCounter(PathBuf);

impl KillCounter {
    /// The counter of the control group that limits a process's memory.
    pub(crate) fn of(pid: i32) -> Option<Self> {
        let groups = processes::control_groups(pid).ok()??;
        counter_file(&groups).filter(|path| path.exists()).map(Self)
    }

    pub(crate) fn read(&self) -> u64 {
        let text = fs::read_to_string(&self.0).unwrap_or_default();
        let count = text.lines().find_map(|line| line.strip_prefix("oom_kill "));
        count.and_then(|count| count.trim().parse().ok()).unwrap_or(0)
    }
}

/// The counter's file, in either version of control groups.
fn counter_file(groups: &[ProcessCGroup]) -> Option<PathBuf> {
    let root = Path::new(ROOT);
    if let Some(path) = group_path(groups, "memory") {
        return Some(root.join("memory").join(path).join("memory.oom_control"));
    }
    Some(root.join(group_path(groups, "")?).join("memory.events"))
}

#[cfg(test)]
mod tests {
    use procfs::{FromRead as _, ProcessCGroups};

    use super::*;

    #[test]
    fn the_kill_counter_is_found_in_both_versions_of_control_groups() {
        let parse = |groups: &str| ProcessCGroups::from_read(groups.as_bytes()).unwrap().0;
        let file = |groups: &str| counter_file(&parse(groups)).unwrap().display().to_string();
        let first = "12:cpu,cpuacct:/docker/a\n4:memory:/docker/abc\n0::/docker/u\n";
        assert_eq!(file(first), "/sys/fs/cgroup/memory/docker/abc/memory.oom_control");
        let second = "0::/system.slice/docker-abc.scope\n";
        assert_eq!(file(second), "/sys/fs/cgroup/system.slice/docker-abc.scope/memory.events");
        assert_eq!(counter_file(&[]), None);
    }
}
