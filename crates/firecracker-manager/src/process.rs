//! A microVM's process, which outlives the manager: known by its id and the time it was started, since ids are used again.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::process::{Pid, PidfdFlags, Signal};
use serde::{Deserialize, Serialize};
use tokio::io::unix::AsyncFd;

/// How long a process may take to stop that was told to.
const FREEZE_TIME: Duration = Duration::from_secs(10);

/// A process of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Process {
    pub(crate) pid: i32,
    /// In ticks since the host was started.
    pub(crate) start_time: u64,
}

impl Process {
    /// The process that has this id now.
    pub(crate) fn of(pid: i32) -> Option<Self> {
        Some(Self { pid, start_time: start_time(pid)? })
    }

    /// Whether it still runs: the same one, not another with its id.
    pub(crate) fn is_alive(self) -> bool {
        start_time(self.pid) == Some(self.start_time)
    }

    /// Something that can be waited on and signalled without ever meaning another process.
    fn handle(self) -> Option<OwnedFd> {
        let handle = rustix::process::pidfd_open(Pid::from_raw(self.pid)?, PidfdFlags::NONBLOCK).ok()?;
        // Only now is it certain whose it is.
        self.is_alive().then_some(handle)
    }

    pub(crate) fn signal(self, signal: Signal) {
        if let Some(handle) = self.handle() {
            let _ = rustix::process::pidfd_send_signal(&handle, signal);
        }
    }

    /// Stops it and what it has started, and waits until nothing of that runs. It leads a group of its own.
    pub(crate) fn freeze(self) -> io::Result<()> {
        self.signal_group(Signal::STOP)?;
        let begun = Instant::now();
        // Each thread stops when it leaves the kernel, and nobody is told but the parent, which another may have been.
        while !is_group_stopped(self.pid) {
            if begun.elapsed() > FREEZE_TIME {
                let message = format!("process {} does not stop", self.pid);
                return Err(io::Error::new(io::ErrorKind::TimedOut, message));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    /// Lets it go on.
    pub(crate) fn thaw(self) -> io::Result<()> {
        self.signal_group(Signal::CONT)
    }

    fn signal_group(self, signal: Signal) -> io::Result<()> {
        let gone = || io::Error::new(io::ErrorKind::NotFound, "the process has ended");
        let pid = Pid::from_raw(self.pid).ok_or_else(gone)?;
        // While this is held and it lives, its number is nobody else's.
        let _handle = self.handle().ok_or_else(gone)?;
        Ok(rustix::process::kill_process_group(pid, signal)?)
    }

    /// Waits until it has ended.
    pub(crate) async fn ended(self) {
        let Some(handle) = self.handle() else {
            return;
        };
        // SAFETY: the handle is owned by the registration and closed after it.
        if let Ok(handle) = unsafe { AsyncFd::register(handle) } {
            let _ = handle.readable().await;
        }
    }
}

/// When a process was started; none when it is not there, or only its remains are.
fn start_time(pid: i32) -> Option<u64> {
    let fields = Fields::of(&format!("/proc/{pid}"))?;
    (!fields.is_dead()).then(|| fields.number(19))?
}

/// What the kernel tells of a process or a thread, from its state on.
struct Fields(Vec<String>);

impl Fields {
    fn of(directory: &str) -> Option<Self> {
        let stat = fs::read_to_string(format!("{directory}/stat")).ok()?;
        Some(Self(stat.rsplit_once(')')?.1.split_ascii_whitespace().map(str::to_owned).collect()))
    }

    fn state(&self) -> &str {
        self.0.first().map_or("", String::as_str)
    }

    fn is_dead(&self) -> bool {
        matches!(self.state(), "Z" | "X")
    }

    fn number<T: std::str::FromStr>(&self, index: usize) -> Option<T> {
        self.0.get(index)?.parse().ok()
    }
}

/// Whether all threads of all processes of a group are stopped.
fn is_group_stopped(group: i32) -> bool {
    let is_its = |pid: &i32| {
        Fields::of(&format!("/proc/{pid}"))
            .is_some_and(|fields| fields.number(2) == Some(group) && !fields.is_dead())
    };
    let is_stopped = |thread: &i32| {
        Fields::of(&format!("/proc/{thread}")).is_none_or(|fields| fields.is_dead() || fields.state() == "T")
    };
    numbers("/proc").filter(is_its).all(|pid| numbers(&format!("/proc/{pid}/task")).all(|id| is_stopped(&id)))
}

/// The entries of a directory of `/proc` that are processes or threads.
fn numbers(directory: &str) -> impl Iterator<Item = i32> {
    let entries = fs::read_dir(directory).into_iter().flatten();
    entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
}

/// All processes that were started for this microVM, jailer or Firecracker: both carry its id as an argument.
pub(crate) fn of_machine(id: &str) -> Vec<Process> {
    let is_its = |pid: &i32| {
        let arguments = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let arguments: Vec<&[u8]> = arguments.split(|byte| *byte == 0).collect();
        let named = |pair: &[&[u8]]| pair[0] == b"--id" && pair[1] == id.as_bytes();
        let joined = format!("--id={id}");
        arguments.windows(2).any(named) || arguments.contains(&joined.as_bytes())
    };
    numbers("/proc").filter(is_its).filter_map(Process::of).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use super::*;

    #[tokio::test]
    async fn a_process_is_itself_and_no_other_with_its_id() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let process = Process::of(child.id().cast_signed()).unwrap();
        assert!(process.is_alive());
        let other = Process { start_time: process.start_time + 1, ..process };
        assert!(!other.is_alive());
        // A signal that is meant for another does nothing.
        other.signal(Signal::KILL);
        other.ended().await;
        assert!(child.try_wait().unwrap().is_none());
        process.signal(Signal::KILL);
        process.ended().await;
        child.wait().unwrap();
        assert!(!process.is_alive());
    }

    #[test]
    fn what_is_frozen_stands_still_with_all_it_has_started() {
        use std::os::unix::process::CommandExt;
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("grows");
        let write =
            format!("(while :; do echo >> {0}; done) & while :; do echo >> {0}; done", file.display());
        let mut command = std::process::Command::new("sh");
        let mut child = command.args(["-c", &write]).process_group(0).spawn().unwrap();
        let process = Process::of(child.id().cast_signed()).unwrap();
        let size = || fs::metadata(&file).map_or(0, |found| found.len());
        let grows = |from: u64| {
            let begun = Instant::now();
            while size() <= from && begun.elapsed() < FREEZE_TIME {
                std::thread::sleep(Duration::from_millis(1));
            }
            size() > from
        };
        assert!(grows(0));
        process.freeze().unwrap();
        let frozen = size();
        std::thread::sleep(Duration::from_millis(50));
        assert_eq!(size(), frozen);
        process.thaw().unwrap();
        assert!(grows(frozen));
        process.signal_group(Signal::KILL).unwrap();
        child.wait().unwrap();
        assert_eq!(process.freeze().unwrap_err().kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn processes_of_a_machine_are_found_by_its_id() {
        let id = "0190aaaa-0000-7000-8000-000000000001";
        let mut child = std::process::Command::new("sh")
            .args(["-c", "read x", "--id", id])
            .stdin(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        // Its arguments can be read a moment after it has begun.
        let begun = Instant::now();
        let mut found = of_machine(id);
        while found.is_empty() && begun.elapsed() < FREEZE_TIME {
            std::thread::sleep(Duration::from_millis(1));
            found = of_machine(id);
        }
        assert_eq!(found.iter().map(|process| process.pid).collect::<Vec<_>>(), [child.id().cast_signed()]);
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
