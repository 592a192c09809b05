//! Kills the processes of a sandbox through its control group, when its engine can't.
//!
//! An engine that kills a sandbox asks the sandbox's runtime, and that needs CPU time, which a fork bomb takes. The kernel
//! kills without it: it knows all processes of a group, and a process of a sandbox can't leave its group.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use procfs::ProcessCGroup;
use rustix::process::{Pid, Signal, kill_process};

use crate::processes;

/// The mount point of version 2, and the directory of the mount points of version 1.
pub const ROOT: &str = "/sys/fs/cgroup";
/// The time limit for killed processes to end.
const END_TIME: Duration = Duration::from_secs(8);
/// The interval at which the group is read meanwhile. The kernel reports the end of a process to its parent only.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// The group of one sandbox.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ControlGroup {
    directory: PathBuf,
    /// The group of the freezer controller, which version 1 has. Frozen processes do not run, so they can't fork.
    freezer: Option<PathBuf>,
}

impl ControlGroup {
    /// The control group of a process, if the group is the sandbox's own: the group's name contains `name`. A group that other
    /// processes share is never returned.
    pub fn of(pid: i32, name: &str) -> Option<Self> {
        Self::find(Path::new(ROOT), &processes::control_groups(pid).ok()??, name)
    }

    fn find(root: &Path, groups: &[ProcessCGroup], name: &str) -> Option<Self> {
        let own = |controller: &str| own_path(groups, name, controller);
        let first = ["pids", "memory"].into_iter().find_map(|controller| {
            let directory = root.join(controller).join(own(controller)?);
            directory.join("cgroup.procs").exists().then_some(directory)
        });
        if let Some(directory) = first {
            let freezer = own("freezer").map(|path| root.join("freezer").join(path));
            return Some(Self { directory, freezer: freezer.filter(|path| path.exists()) });
        }
        let directory = root.join(own("")?);
        directory.join("cgroup.procs").exists().then_some(Self { directory, freezer: None })
    }

    /// Kills every process of the group and waits until they have ended. A group that is gone has no processes.
    pub fn kill(&self) -> io::Result<()> {
        let deadline = Instant::now() + END_TIME;
        loop {
            let processes = self.processes();
            if processes.is_empty() {
                return Ok(());
            }
            if Instant::now() >= deadline {
                let left = processes.len();
                return Err(io::Error::new(
                    io::ErrorKind::TimedOut,
                    format!("{left} killed processes of {} have not ended", self.directory.display()),
                ));
            }
            self.kill_once(&processes);
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    fn kill_once(&self, processes: &[i32]) {
        // Version 2 kills the whole group in one step, so forks do not escape.
        if fs::write(self.directory.join("cgroup.kill"), "1").is_ok() {
            return;
        }
        self.freeze(true);
        for pid in processes.iter().filter_map(|pid| Pid::from_raw(*pid)) {
            let _ = kill_process(pid, Signal::KILL);
        }
        self.freeze(false);
    }

    /// Without a freezer, processes that fork meanwhile are killed in the next round.
    fn freeze(&self, frozen: bool) {
        if let Some(freezer) = &self.freezer {
            let _ = fs::write(freezer.join("freezer.state"), if frozen { "FROZEN" } else { "THAWED" });
        }
    }

    /// The processes of the group.
    pub fn processes(&self) -> Vec<i32> {
        let mut found = Vec::new();
        collect(&self.directory, &mut found);
        found
    }
}

/// The path of a process's group for one controller, below the mount point of the hierarchy. The empty name stands for
/// version 2.
pub fn group_path<'a>(groups: &'a [ProcessCGroup], controller: &str) -> Option<&'a Path> {
    let has_controller = |group: &&ProcessCGroup| {
        if controller.is_empty() {
            group.controllers.is_empty()
        } else {
            group.controllers.iter().any(|one| one == controller)
        }
    };
    let group = groups.iter().find(has_controller)?;
    Some(Path::new(group.pathname.trim_start_matches('/')))
}

/// The path of a process's group for one controller. `None` unless the group's name contains `name`.
pub(crate) fn own_path<'a>(groups: &'a [ProcessCGroup], name: &str, controller: &str) -> Option<&'a Path> {
    let path = group_path(groups, controller)?;
    let group_name = path.file_name()?.to_str()?;
    (!name.is_empty() && group_name.contains(name)).then_some(path)
}

/// Collects the processes of a group and of the groups below it.
fn collect(directory: &Path, found: &mut Vec<i32>) {
    let text = fs::read_to_string(directory.join("cgroup.procs")).unwrap_or_default();
    found.extend(text.lines().filter_map(|line| line.parse::<i32>().ok()));
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            collect(&entry.path(), found);
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use procfs::{FromRead as _, ProcessCGroups};

    use super::*;

    pub(crate) fn parse(groups: &str) -> Vec<ProcessCGroup> {
        ProcessCGroups::from_read(groups.as_bytes()).unwrap().0
    }

    fn find(root: &Path, groups: &str, name: &str) -> Option<ControlGroup> {
        ControlGroup::find(root, &parse(groups), name)
    }

    #[test]
    fn the_path_of_a_group_is_found_by_its_controller() {
        let groups = parse("4:cpu,cpuacct:/docker/a:b\n1:name=systemd:/c\n0::/user.slice\n");
        assert_eq!(group_path(&groups, "cpuacct"), Some(Path::new("docker/a:b")));
        assert_eq!(group_path(&groups, ""), Some(Path::new("user.slice")));
        assert_eq!(group_path(&groups, "memory"), None);
    }

    fn root_with(directories: &[&str]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for directory in directories {
            let path = root.path().join(directory);
            fs::create_dir_all(&path).unwrap();
            fs::write(path.join("cgroup.procs"), "").unwrap();
        }
        root
    }

    #[test]
    fn only_the_sandboxes_own_group_is_found_in_both_versions() {
        let root = root_with(&[
            "pids/docker/abc",
            "freezer/docker/abc",
            "system.slice/docker-abc.scope",
            "pids/docker",
        ]);
        let first = "9:freezer:/docker/abc\n8:pids:/docker/abc\n0::/\n";
        let found = find(root.path(), first, "abc").unwrap();
        assert_eq!(found.directory, root.path().join("pids/docker/abc"));
        assert_eq!(found.freezer, Some(root.path().join("freezer/docker/abc")));
        let second = "0::/system.slice/docker-abc.scope\n";
        let found = find(root.path(), second, "abc").unwrap();
        assert_eq!(found.directory, root.path().join("system.slice/docker-abc.scope"));
        // The engine's own group, the root, a process that is gone.
        assert_eq!(find(root.path(), "8:pids:/docker\n0::/\n", "abc"), None);
        assert_eq!(find(root.path(), "0::/\n", "abc"), None);
        assert_eq!(find(root.path(), "0::/\n", ""), None);
        assert_eq!(find(root.path(), "", "abc"), None);
    }
}
