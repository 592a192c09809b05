//! Control groups of sandboxes: the last word over processes that their engine can't end.
//!
//! An engine that kills a sandbox asks the sandbox's own runtime, which needs CPU time that a fork bomb leaves nobody. The
//! kernel knows all processes of a group, and no process leaves the group it was put in.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

pub(crate) const ROOT: &str = "/sys/fs/cgroup";
/// How long killed processes may take to be gone.
const END_TIME: Duration = Duration::from_secs(8);
/// How often they are looked for meanwhile: their end is told to their parents alone.
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// The group of one sandbox.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ControlGroup {
    directory: PathBuf,
    /// Where all of the group's processes can be made to stand still, in version 1.
    freezer: Option<PathBuf>,
}

impl ControlGroup {
    /// The group of a process, if it is one of the sandbox's own: its name holds `name`. Never one that others are in.
    pub fn of(pid: i64, name: &str) -> Option<Self> {
        let groups = fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?;
        Self::find(Path::new(ROOT), &groups, name)
    }

    /// `groups` is what `/proc/PID/cgroup` says, of either version.
    fn find(root: &Path, groups: &str, name: &str) -> Option<Self> {
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

    /// Kills every process of the group and waits until they are gone. A group that is gone has none.
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
                    format!("{left} processes of {} do not end", self.directory.display()),
                ));
            }
            self.kill_once(&processes);
            std::thread::sleep(LOOK_EVERY);
        }
    }

    fn kill_once(&self, processes: &[i32]) {
        // Version 2 does it at once, whatever they fork.
        if fs::write(self.directory.join("cgroup.kill"), "1").is_ok() {
            return;
        }
        self.freeze(true);
        for pid in processes.iter().filter_map(|pid| Pid::from_raw(*pid)) {
            let _ = kill_process(pid, Signal::KILL);
        }
        self.freeze(false);
    }

    /// Without a freezer, processes that fork are killed in the next round.
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

/// The path of the group that a process is in, from `/proc/PID/cgroup` and for one controller (version 2: the empty name). None
/// unless the group's name holds `name`.
pub(crate) fn own_path(groups: &str, name: &str, controller: &str) -> Option<String> {
    groups.lines().find_map(|line| {
        let mut fields = line.splitn(3, ':');
        let (_, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
        let is_named = Path::new(path).file_name()?.to_str()?.contains(name);
        let is_it = controllers.split(',').any(|one| one == controller);
        (is_it && is_named && !name.is_empty()).then(|| path.trim_start_matches('/').to_owned())
    })
}

/// The processes of a group and of those below it.
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
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use super::*;

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
    fn a_group_is_found_in_both_versions_and_only_if_it_is_the_sandboxes_own() {
        let root = root_with(&[
            "pids/docker/abc",
            "freezer/docker/abc",
            "system.slice/docker-abc.scope",
            "pids/docker",
        ]);
        let first = "9:freezer:/docker/abc\n8:pids:/docker/abc\n0::/\n";
        let found = ControlGroup::find(root.path(), first, "abc").unwrap();
        assert_eq!(found.directory, root.path().join("pids/docker/abc"));
        assert_eq!(found.freezer, Some(root.path().join("freezer/docker/abc")));
        let second = "0::/system.slice/docker-abc.scope\n";
        let found = ControlGroup::find(root.path(), second, "abc").unwrap();
        assert_eq!(found.directory, root.path().join("system.slice/docker-abc.scope"));
        // The engine's own group, the root, a process that is gone.
        assert_eq!(ControlGroup::find(root.path(), "8:pids:/docker\n0::/\n", "abc"), None);
        assert_eq!(ControlGroup::find(root.path(), "0::/\n", "abc"), None);
        assert_eq!(ControlGroup::find(root.path(), "0::/\n", ""), None);
        assert_eq!(ControlGroup::find(root.path(), "", "abc"), None);
    }
}
