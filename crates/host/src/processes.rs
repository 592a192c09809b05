//! The processes of the host, as the crate `procfs` reads them.
//!
//! A process can end at any moment, also between the opening and the reading of its files. So a reading gives `None` for a
//! process that is gone, and an error only when the process could not be read.

use std::io;

use procfs::process::{Process, Stat, all_processes};
use procfs::{ProcError, ProcResult, ProcessCGroup};
use rustix::io::Errno;

/// All processes of the host.
pub fn all() -> io::Result<impl Iterator<Item = io::Result<Process>>> {
    let all = all_processes().map_err(io::Error::other)?;
    Ok(all.filter_map(|process| unless_gone(process).transpose()))
}

/// The state of a process. `None` if it is gone.
pub fn stat(pid: i32) -> io::Result<Option<Stat>> {
    unless_gone(Process::new(pid).and_then(|process| process.stat()))
}

/// Whether a process or a thread has ended and waits to be reaped.
pub fn is_dead(stat: &Stat) -> bool {
    matches!(stat.state, 'Z' | 'X')
}

/// The control groups of a process, one for each hierarchy. `None` if it is gone.
pub fn control_groups(pid: i32) -> io::Result<Option<Vec<ProcessCGroup>>> {
    let groups = unless_gone(Process::new(pid).and_then(|process| process.cgroups()))?;
    Ok(groups.map(|groups| groups.0))
}

/// Turns a reading of a process that is gone into `None`. The kernel reports `ESRCH` when the process ends between `open` and
/// `read`.
pub fn unless_gone<T>(read: ProcResult<T>) -> io::Result<Option<T>> {
    match read {
        Ok(read) => Ok(Some(read)),
        Err(ProcError::NotFound(_)) => Ok(None),
        Err(ProcError::Io(error, _)) if error.raw_os_error() == Some(Errno::SRCH.raw_os_error()) => Ok(None),
        Err(error) => Err(io::Error::other(error)),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use procfs::FromRead as _;

    use super::*;

    #[test]
    fn a_program_name_with_brackets_does_not_shift_the_fields_of_stat() {
        let numbers: Vec<String> = (4..52).map(|number| number.to_string()).collect();
        let stat = Stat::from_read(format!("7 (a) Z (b)) T {}", numbers.join(" ")).as_bytes()).unwrap();
        assert!(stat.state == 'T' && !is_dead(&stat));
        assert_eq!((stat.ppid, stat.pgrp, stat.starttime), (4, 5, 22));
    }

    #[test]
    fn this_process_is_found_and_a_process_that_is_gone_is_none() {
        let own = std::process::id().cast_signed();
        let found = stat(own).unwrap().unwrap();
        assert_eq!(found.ppid, std::os::unix::process::parent_id().cast_signed());
        assert!(all().unwrap().any(|process| process.unwrap().pid == own));
        assert!(control_groups(own).unwrap().is_some());
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let pid = child.id().cast_signed();
        let kept = Process::new(pid).unwrap();
        child.wait().unwrap();
        assert!(stat(pid).unwrap().is_none() && control_groups(pid).unwrap().is_none());
        // The directory was opened before the process ended.
        assert!(unless_gone(kept.stat()).unwrap().is_none() && unless_gone(kept.tasks()).unwrap().is_none());
        assert!(unless_gone(kept.cmdline()).unwrap().is_none());
    }
}
