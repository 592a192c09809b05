//! The CPU settings of a sandbox's control group: how much CPU time it used, and whether it runs in the background.
//!
//! A *background* group gets CPU time only when no other group wants it (`cpu.idle`). It can also be kept off one CPU, because
//! the kernel does not preempt a system call: a fork bomb holds a CPU for milliseconds whatever its priority is.
//!
//! The settings are files of the kernel, so they outlive the server: [`CpuGroup::is_background`] reads them. The kernel forgets a
//! group's weight while the group is in the background, so the weight is written again afterwards.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use procfs::ProcessCGroup;

use crate::control_group::{ROOT, own_path};
use crate::processes;

/// The kernel's default weight of a group, in version 1 (`cpu.shares`) and in version 2 (`cpu.weight`).
const DEFAULT_SHARES: u64 = 1024;
const DEFAULT_WEIGHT: u64 = 100;

/// The CPU settings of one sandbox, in either version of control groups.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CpuGroup {
    usage: Usage,
    idle: PathBuf,
    /// Its share of the CPU time while it is not in the background.
    weight: Weight,
    cpuset: Option<CpuSet>,
}

/// The kernel's count of CPU time.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Usage {
    /// `cpuacct.usage`: nanoseconds.
    V1(PathBuf),
    /// `cpu.stat`, the line `usage_usec`.
    V2(PathBuf),
}

/// A weight, and the file it belongs in.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Weight {
    file: PathBuf,
    value: u64,
}

/// The setting of the CPUs that the group's processes may run on.
#[derive(Clone, Debug, PartialEq, Eq)]
struct CpuSet {
    own: PathBuf,
    /// The CPUs that the parent group may use.
    parent: PathBuf,
    is_v1: bool,
}

impl CpuGroup {
    /// The group of a process, if the group is the sandbox's own: the group's name contains `name`. Outside the background it has the
    /// weight `shares`; ordinary programs have 1024.
    pub fn of(pid: i32, name: &str, shares: u32) -> Option<Self> {
        Self::find(Path::new(ROOT), &processes::control_groups(pid).ok()??, name, shares)
    }

    fn find(root: &Path, groups: &[ProcessCGroup], name: &str, shares: u32) -> Option<Self> {
        let own = |controller: &str| own_path(groups, name, controller);
        let v1 = |controller: &str| own(controller).map(|path| root.join(controller).join(path));
        let found = if let (Some(cpu), Some(usage)) = (v1("cpu"), v1("cpuacct")) {
            let cpuset = v1("cpuset").map(|directory| CpuSet {
                own: directory.join("cpuset.cpus"),
                parent: directory.join("../cpuset.effective_cpus"),
                is_v1: true,
            });
            let usage = Usage::V1(usage.join("cpuacct.usage"));
            let weight = Weight { file: cpu.join("cpu.shares"), value: shares.into() };
            Self { usage, idle: cpu.join("cpu.idle"), weight, cpuset }
        } else {
            let directory = root.join(own("")?);
            let cpuset = CpuSet {
                own: directory.join("cpuset.cpus"),
                parent: directory.join("../cpuset.cpus.effective"),
                is_v1: false,
            };
            let usage = Usage::V2(directory.join("cpu.stat"));
            let value = (u64::from(shares) * DEFAULT_WEIGHT / DEFAULT_SHARES).max(1);
            let weight = Weight { file: directory.join("cpu.weight"), value };
            Self { usage, idle: directory.join("cpu.idle"), weight, cpuset: Some(cpuset) }
        };
        let cpuset = found.cpuset.filter(|set| set.own.exists() && set.parent.exists());
        // Kernels before 5.15 have no `cpu.idle`.
        found.idle.exists().then_some(Self { cpuset, ..found })
    }

    /// CPU time that the group's processes have used. `None` once the group is gone.
    pub fn used(&self) -> Option<Duration> {
        match &self.usage {
            Usage::V1(path) => read_number(path).map(Duration::from_nanos),
            Usage::V2(path) => {
                let text = fs::read_to_string(path).ok()?;
                let line = text.lines().find_map(|line| line.strip_prefix("usage_usec "))?;
                line.trim().parse().ok().map(Duration::from_micros)
            }
        }
    }

    /// Whether the group runs in the background.
    pub fn is_background(&self) -> bool {
        read_number(&self.idle) == Some(1)
    }

    /// Puts the group into the background, or takes it back. With `leave_one_cpu` its processes stay off one CPU, the same for
    /// all groups. Settings that are in place are not written again.
    pub fn set_background(&self, background: bool, leave_one_cpu: bool) -> io::Result<()> {
        if self.is_background() != background {
            fs::write(&self.idle, if background { "1" } else { "0" })?;
        }
        if !background && read_number(&self.weight.file) != Some(self.weight.value) {
            fs::write(&self.weight.file, self.weight.value.to_string())?;
        }
        self.cpuset.as_ref().map_or(Ok(()), |set| set.confine(background && leave_one_cpu))
    }
}

impl CpuSet {
    fn confine(&self, leave_one_cpu: bool) -> io::Result<()> {
        let all = fs::read_to_string(&self.parent)?;
        let wanted = match without_last_cpu(all.trim()) {
            Some(rest) if leave_one_cpu => rest,
            // Version 1 needs a list. In version 2 an empty list means the parent's CPUs.
            _ if self.is_v1 => all.trim().to_owned(),
            _ => String::new(),
        };
        if fs::read_to_string(&self.own)?.trim() == wanted {
            return Ok(());
        }
        fs::write(&self.own, wanted + "\n")
    }
}

/// Removes the last CPU from a list as the kernel writes it (`0-3,8`). `None` if the list has only one.
fn without_last_cpu(list: &str) -> Option<String> {
    let (before, last) = list.rsplit_once(',').map_or((None, list), |(before, last)| (Some(before), last));
    let shortened = last.split_once('-').and_then(|(first, end)| {
        let (first, end): (u32, u32) = (first.parse().ok()?, end.parse().ok()?);
        let end = end.checked_sub(1)?;
        Some(if end > first { format!("{first}-{end}") } else { first.to_string() })
    });
    match (before, shortened) {
        (Some(before), Some(shortened)) => Some(format!("{before},{shortened}")),
        (Some(before), None) => Some(before.to_owned()),
        (None, shortened) => shortened,
    }
}

fn read_number(path: &Path) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use super::*;
    use crate::control_group::tests::parse;

    fn find(root: &Path, groups: &str, name: &str, shares: u32) -> Option<CpuGroup> {
        CpuGroup::find(root, &parse(groups), name, shares)
    }

    fn write(root: &Path, files: &[(&str, &str)]) {
        for (path, text) in files {
            let path = root.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
    }

    fn read(root: &Path, path: &str) -> String {
        fs::read_to_string(root.join(path)).unwrap().trim().to_owned()
    }

    #[test]
    fn a_version_1_group_goes_to_the_background_and_back() {
        let root = tempfile::tempdir().unwrap();
        let files = [
            ("cpu/docker/abc/cpu.idle", "0\n"),
            ("cpu/docker/abc/cpu.shares", "1024\n"),
            ("cpuacct/docker/abc/cpuacct.usage", "1500000000\n"),
            ("cpuset/docker/abc/cpuset.cpus", "0-1\n"),
            ("cpuset/docker/cpuset.effective_cpus", "0-1\n"),
        ];
        write(root.path(), &files);
        let groups = "3:cpuset:/docker/abc\n2:cpuacct:/docker/abc\n1:cpu:/docker/abc\n0::/\n";
        let group = find(root.path(), groups, "abc", 256).unwrap();
        assert_eq!(group.used(), Some(Duration::from_millis(1500)));
        group.set_background(true, true).unwrap();
        assert!(group.is_background());
        assert_eq!(read(root.path(), "cpuset/docker/abc/cpuset.cpus"), "0");
        group.set_background(true, false).unwrap();
        assert_eq!(read(root.path(), "cpuset/docker/abc/cpuset.cpus"), "0-1");
        group.set_background(false, false).unwrap();
        assert!(!group.is_background());
        assert_eq!(read(root.path(), "cpu/docker/abc/cpu.shares"), "256");
        assert_eq!(find(root.path(), groups, "other", 256), None);
    }

    #[test]
    fn a_version_2_group_goes_to_the_background_and_back() {
        let root = tempfile::tempdir().unwrap();
        let files = [
            ("system.slice/docker-abc.scope/cpu.idle", "0\n"),
            ("system.slice/docker-abc.scope/cpu.weight", "10\n"),
            ("system.slice/docker-abc.scope/cpu.stat", "usage_usec 2500000\nuser_usec 1\n"),
            ("system.slice/docker-abc.scope/cpuset.cpus", "\n"),
            ("system.slice/cpuset.cpus.effective", "0-3,8\n"),
        ];
        write(root.path(), &files);
        let group = find(root.path(), "0::/system.slice/docker-abc.scope\n", "abc", 256).unwrap();
        assert_eq!(group.used(), Some(Duration::from_millis(2500)));
        group.set_background(true, true).unwrap();
        assert_eq!(read(root.path(), "system.slice/docker-abc.scope/cpuset.cpus"), "0-3");
        group.set_background(false, false).unwrap();
        assert_eq!(read(root.path(), "system.slice/docker-abc.scope/cpuset.cpus"), "");
        assert_eq!(read(root.path(), "system.slice/docker-abc.scope/cpu.weight"), "25");
    }

    #[test]
    fn the_last_cpu_is_removed_from_every_form_of_list() {
        for (list, rest) in [
            ("0-1", "0"),
            ("0-3", "0-2"),
            ("0,2", "0"),
            ("0-3,8", "0-3"),
            ("0,4-7", "0,4-6"),
            ("0,4-5", "0,4"),
        ] {
            assert_eq!(without_last_cpu(list).as_deref(), Some(rest), "{list}");
        }
        assert_eq!(without_last_cpu("0"), None);
        assert_eq!(without_last_cpu(""), None);
    }
}
