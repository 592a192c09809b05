//! When a gVisor sandbox runs out of memory: the host's kernel shall end one process of it, and not all of it.
//!
//! The agent in the sandbox watches memory and acts first, but on a busy host it may come too late. gVisor runs each
//! process of the sandbox as one of the host's, cloned from the first that it made, and clones inherit how readily the
//! kernel ends them. So it is enough to change that for the first one, once the agent's own is made. All of this is a
//! second line: where it can't be done (no root, another host, a gVisor that works otherwise) the first one is alone.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// The kernel ends these before all others of the same memory limit.
const FIRST: &str = "1000";

/// Makes the kernel choose the sandbox's commands before its agent and gVisor itself. `sandbox` is the process of gVisor.
pub(crate) fn prefer_commands(sandbox: i64) -> io::Result<()> {
    match children(sandbox)?.into_iter().min_by_key(|pid| (started(*pid), *pid)) {
        Some(first) => fs::write(format!("/proc/{first}/oom_score_adj"), FIRST),
        None => Ok(()),
    }
}

fn children(of: i64) -> io::Result<Vec<i64>> {
    let mut all = Vec::new();
    for thread in fs::read_dir(format!("/proc/{of}/task"))? {
        let text = fs::read_to_string(thread?.path().join("children")).unwrap_or_default();
        all.extend(text.split_ascii_whitespace().filter_map(|pid| pid.parse::<i64>().ok()));
    }
    Ok(all)
}

/// When a process was started, in ticks since the host's start.
fn started(pid: i64) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(')')?.1.split_ascii_whitespace().nth(19)?.parse().ok()
}

/// Where the kernel counts what it ended for want of memory.
#[derive(Clone, Debug)]
pub(crate) struct KillCounter(PathBuf);

impl KillCounter {
    /// The counter of the memory limit that a process is under.
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

/// `/proc/PID/cgroup`, of either version, to the file that counts.
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
    fn the_counter_is_found_in_both_versions_of_control_groups() {
        let file = |groups: &str| counter_file(groups).unwrap().display().to_string();
        let first = "12:cpu,cpuacct:/docker/a\n4:memory:/docker/abc\n0::/docker/u\n";
        assert_eq!(file(first), "/sys/fs/cgroup/memory/docker/abc/memory.oom_control");
        let second = "0::/system.slice/docker-abc.scope\n";
        assert_eq!(file(second), "/sys/fs/cgroup/system.slice/docker-abc.scope/memory.events");
        assert_eq!(counter_file(""), None);
    }
}
