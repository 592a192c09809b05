//! Counts the processes of a sandbox that the host's kernel killed because the sandbox ran out of memory.

use std::fs;
use std::path::{Path, PathBuf};

/// The file in which the kernel counts the processes that it killed for lack of memory.
#[derive(Clone, Debug)]
pub(crate) struct KillCounter(PathBuf);

impl KillCounter {
    /// The counter of the control group that limits a process's memory.
    pub(crate) fn of(pid: i64) -> Option<Self> {
        let groups = fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?;
        counter_file(&groups).filter(|path| path.exists()).map(Self)
    }

    pub(crate) fn read(&self) -> u64 {
        let text = fs::read_to_string(&self.0).unwrap_or_default();
        let count = text.lines().find_map(|line| line.strip_prefix("oom_kill "));
        count.and_then(|count| count.trim().parse().ok()).unwrap_or(0)
    }
}

/// Finds the counter's file from the text of `/proc/PID/cgroup`, of either version of control groups.
fn counter_file(groups: &str) -> Option<PathBuf> {
    let root = Path::new("/sys/fs/cgroup");
    let mut unified = None;
    for line in groups.lines() {
        let mut fields = line.splitn(3, ':');
        let (_, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
        let path = path.trim_start_matches('/');
        if controllers.split(',').any(|controller| controller == "memory") {
            return Some(root.join("memory").join(path).join("memory.oom_control"));
        }
        if controllers.is_empty() {
            unified = Some(root.join(path).join("memory.events"));
        }
    }
    unified
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kill_counter_is_found_in_both_versions_of_control_groups() {
        let file = |groups: &str| counter_file(groups).unwrap().display().to_string();
        let first = "12:cpu,cpuacct:/docker/a\n4:memory:/docker/abc\n0::/docker/u\n";
        assert_eq!(file(first), "/sys/fs/cgroup/memory/docker/abc/memory.oom_control");
        let second = "0::/system.slice/docker-abc.scope\n";
        assert_eq!(file(second), "/sys/fs/cgroup/system.slice/docker-abc.scope/memory.events");
        assert_eq!(counter_file(""), None);
    }
}
