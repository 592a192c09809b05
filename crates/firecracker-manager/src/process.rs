//! A microVM's process, which outlives the manager: known by its id and the time it was started, since ids are used again.

use std::fs;
use std::os::fd::OwnedFd;

use rustix::process::{Pid, PidfdFlags, Signal};
use serde::{Deserialize, Serialize};
use tokio::io::unix::AsyncFd;

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
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_ascii_whitespace().collect();
    if matches!(*fields.first()?, "Z" | "X") {
        return None;
    }
    fields.get(19)?.parse().ok()
}

/// All processes that were started for this microVM, jailer or Firecracker: both carry its id as an argument.
pub(crate) fn of_machine(id: &str) -> Vec<Process> {
    let pids = fs::read_dir("/proc").into_iter().flatten();
    let pids = pids.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<i32>().ok());
    let is_its = |pid: &i32| {
        let arguments = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let arguments: Vec<&[u8]> = arguments.split(|byte| *byte == 0).collect();
        let named = |pair: &[&[u8]]| pair[0] == b"--id" && pair[1] == id.as_bytes();
        let joined = format!("--id={id}");
        arguments.windows(2).any(named) || arguments.contains(&joined.as_bytes())
    };
    pids.filter(is_its).filter_map(Process::of).collect()
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
    fn processes_of_a_machine_are_found_by_its_id() {
        let id = "0190aaaa-0000-7000-8000-000000000001";
        let mut child = std::process::Command::new("sh")
            .args(["-c", "read x", "--id", id])
            .stdin(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let found = of_machine(id);
        assert_eq!(found.iter().map(|process| process.pid).collect::<Vec<_>>(), [child.id().cast_signed()]);
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
