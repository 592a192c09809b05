//! The process of a microVM, which outlives the manager.
//!
//! A process is identified by its id and its start time, because the kernel reuses ids.

use std::io;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use emergent_host::processes::{self, is_dead, unless_gone};
use procfs::ProcError;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal};
use serde::{Deserialize, Serialize};
use tokio::io::unix::AsyncFd;

/// The time limit for a process to stop after SIGSTOP.
const FREEZE_TIME: Duration = Duration::from_secs(10);
/// The interval at which the states of its threads are read meanwhile.
const FREEZE_POLL_INTERVAL: Duration = Duration::from_millis(1);
/// The state of a thread that a signal has stopped.
const STOPPED: char = 'T';
/// The pause before waiting for a process again, after there was no free descriptor for it.
const RETRY_WAIT_AFTER: Duration = Duration::from_secs(1);

/// A process of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Process {
    pub(crate) pid: i32,
    /// In ticks since the host's start.
    pub(crate) start_time: u64,
}

impl Process {
    /// The process that has this id now. `None` if there is none.
    pub(crate) fn of(pid: i32) -> io::Result<Option<Self>> {
        Ok(start_time(pid)?.map(|start_time| Self { pid, start_time }))
    }

    /// Whether this process has ended. An error means that it could not be read, and says nothing about its end.
    pub(crate) fn has_ended(self) -> io::Result<bool> {
        Ok(start_time(self.pid)? != Some(self.start_time))
    }

    /// Whether this process is alive. One that can't be read counts as alive.
    pub(crate) fn is_alive(self) -> bool {
        !self.has_ended().unwrap_or_else(|error| {
            tracing::warn!(pid = self.pid, %error, "a process can't be read and counts as alive");
            false
        })
    }

    /// A descriptor of this process. It never refers to another process. `None` if this process has ended.
    fn handle(self) -> io::Result<Option<OwnedFd>> {
        let Some(pid) = Pid::from_raw(self.pid) else {
            return Ok(None);
        };
        let handle = match rustix::process::pidfd_open(pid, PidfdFlags::NONBLOCK) {
            Ok(handle) => handle,
            // The id can belong to a thread now.
            Err(_) if self.has_ended()? => return Ok(None),
            Err(errno) => return Err(errno.into()),
        };
        // The descriptor holds the id. If the start time still matches, it is this process's.
        Ok((!self.has_ended()?).then_some(handle))
    }

    /// Sends a signal, unless the process has ended.
    pub(crate) fn signal(self, signal: Signal) -> io::Result<()> {
        match self.handle()?.map(|handle| rustix::process::pidfd_send_signal(handle, signal)) {
            None | Some(Ok(()) | Err(Errno::SRCH)) => Ok(()),
            Some(Err(errno)) => Err(errno.into()),
        }
    }

    /// Stops the process and its process group, and waits until all their threads have stopped.
    pub(crate) fn freeze(self) -> io::Result<()> {
        self.signal_group(Signal::STOP)?;
        let deadline = Instant::now() + FREEZE_TIME;
        // A thread stops when it leaves the kernel. The kernel reports that to the parent only, which may be another manager.
        while !is_group_stopped(self.pid)? {
            if Instant::now() > deadline {
                let message = format!("process {} does not stop", self.pid);
                return Err(io::Error::new(io::ErrorKind::TimedOut, message));
            }
            std::thread::sleep(FREEZE_POLL_INTERVAL);
        }
        Ok(())
    }

    /// Continues the process and its process group.
    pub(crate) fn thaw(self) -> io::Result<()> {
        self.signal_group(Signal::CONT)
    }

    fn signal_group(self, signal: Signal) -> io::Result<()> {
        let gone = || io::Error::new(io::ErrorKind::NotFound, "the process has ended");
        let pid = Pid::from_raw(self.pid).ok_or_else(gone)?;
        // The id is not reused while the process is alive or this descriptor is open.
        let _handle = self.handle()?.ok_or_else(gone)?;
        Ok(rustix::process::kill_process_group(pid, signal)?)
    }

    /// Waits until the process has ended.
    pub(crate) async fn ended(self) {
        while let Err(error) = self.wait().await {
            tracing::warn!(pid = self.pid, %error, "the end of a process can't be waited for; it is tried again");
            tokio::time::sleep(RETRY_WAIT_AFTER).await;
        }
    }

    async fn wait(self) -> io::Result<()> {
        let Some(handle) = self.handle()? else {
            return Ok(());
        };
        // SAFETY: the handle is owned by the registration and closed after it.
        let handle = unsafe { AsyncFd::register(handle) }?;
        handle.readable().await.map(drop)
    }
}

/// Makes the kernel kill this process before the host's other processes when memory runs out. Only system calls, whose
/// failure is ignored, since it runs between fork and exec.
pub(crate) fn raise_oom_score() {
    if let Ok(file) = rustix::fs::open(c"/proc/self/oom_score_adj", OFlags::WRONLY, Mode::empty()) {
        let _ = rustix::io::write(file, b"500");
    }
}

/// The start time of a process. `None` if it has ended, reaped or not.
fn start_time(pid: i32) -> io::Result<Option<u64>> {
    let stat = processes::stat(pid)?;
    Ok(stat.filter(|stat| !is_dead(stat)).map(|stat| stat.starttime))
}

/// Whether all threads of all processes of a group are stopped.
fn is_group_stopped(group: i32) -> io::Result<bool> {
    for process in processes::all()? {
        let process = process?;
        let stat = unless_gone(process.stat())?;
        if !stat.is_some_and(|stat| stat.pgrp == group && !is_dead(&stat)) {
            continue;
        }
        for thread in unless_gone(process.tasks())?.into_iter().flatten() {
            let stat = unless_gone(thread.and_then(|thread| thread.stat()))?;
            if stat.is_some_and(|stat| !is_dead(&stat) && stat.state != STOPPED) {
                return Ok(false);
            }
        }
    }
    Ok(true)
}

/// The processes of a microVM. The jailer and Firecracker both have its id as an argument.
pub(crate) fn of_machine(id: &str) -> io::Result<Vec<Process>> {
    let joined = format!("--id={id}");
    let mut found = Vec::new();
    for process in processes::all()? {
        let process = process?;
        let arguments = match process.cmdline() {
            // Another program's arguments, which need not be text.
            Err(ProcError::Io(error, _)) if error.kind() == io::ErrorKind::InvalidData => continue,
            read => unless_gone(read)?.unwrap_or_default(),
        };
        let is_pair = |pair: &[String]| pair[0] == "--id" && pair[1] == id;
        if arguments.windows(2).any(is_pair) || arguments.contains(&joined) {
            found.extend(Process::of(process.pid)?);
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use std::io::Read;
    use std::process::{Child, Command, Stdio};

    use futures_util::FutureExt;

    use super::*;

    /// A shell with pipes for its input and output.
    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]).stdin(Stdio::piped()).stdout(Stdio::piped());
        command
    }

    fn process_of(child: &Child) -> Process {
        Process::of(child.id().cast_signed()).unwrap().unwrap()
    }

    #[tokio::test]
    async fn a_reused_id_is_another_process() {
        let mut child = shell("read x").spawn().unwrap();
        let process = process_of(&child);
        assert!(process.is_alive());
        let other = Process { start_time: process.start_time + 1, ..process };
        assert!(!other.is_alive());
        other.signal(Signal::KILL).unwrap();
        other.ended().await;
        assert!(child.try_wait().unwrap().is_none());
        process.signal(Signal::KILL).unwrap();
        process.ended().await;
        child.wait().unwrap();
        assert!(!process.is_alive());
    }

    #[test]
    fn a_process_with_a_hostile_name_is_read() {
        let script = r"printf 'a)\377 Z 1' > /proc/$$/comm; echo; read x";
        let mut child = shell(script).spawn().unwrap();
        child.stdout.take().unwrap().read_exact(&mut [0]).unwrap();
        let process = process_of(&child);
        assert!(process.is_alive());
        process.signal(Signal::KILL).unwrap();
        child.wait().unwrap();
        assert!(!process.is_alive());
    }

    /// Runs in a process of its own, because descriptors belong to the whole process.
    #[tokio::test]
    async fn a_process_that_can_not_be_read_has_not_ended() {
        use rustix::process::{Resource, Rlimit, getpid, getrlimit, setrlimit};
        const ALONE: &str = "EMERGENT_TEST_ALONE";
        if std::env::var_os(ALONE).is_none() {
            let name = "process::tests::a_process_that_can_not_be_read_has_not_ended";
            let mut alone = Command::new(std::env::current_exe().unwrap());
            assert!(alone.args(["--exact", name]).env(ALONE, "1").status().unwrap().success());
            return;
        }
        let itself = Process::of(getpid().as_raw_pid()).unwrap().unwrap();
        let limit = getrlimit(Resource::Nofile);
        setrlimit(Resource::Nofile, Rlimit { current: Some(0), ..limit }).unwrap();
        assert!(Process::of(itself.pid).is_err() && of_machine("any").is_err());
        assert!(itself.is_alive() && itself.signal(Signal::KILL).is_err());
        let ended = itself.ended().now_or_never();
        setrlimit(Resource::Nofile, limit).unwrap();
        assert!(ended.is_none());
    }

    #[test]
    fn a_frozen_process_group_does_not_run_until_it_is_thawed() {
        use std::os::unix::process::CommandExt;
        let script = "(while :; do echo child; done) & while :; do echo parent; done";
        let mut child = shell(script).process_group(0).spawn().unwrap();
        let mut output = child.stdout.take().unwrap();
        let process = process_of(&child);
        let mut read_words = |bytes: usize| {
            let mut words = vec![0; bytes];
            output.read_exact(&mut words).unwrap();
        };
        read_words(1000);
        process.freeze().unwrap();
        assert!(is_group_stopped(process.pid).unwrap());
        process.thaw().unwrap();
        // More than the pipe held when they stopped: both ran again.
        read_words(1 << 20);
        process.signal_group(Signal::KILL).unwrap();
        child.wait().unwrap();
        assert_eq!(process.freeze().unwrap_err().kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn the_processes_of_a_machine_are_found_by_its_id() {
        let id = "0190aaaa-0000-7000-8000-000000000001";
        let mut child = shell("echo; read x").args(["--id", id]).spawn().unwrap();
        // After exec, so that the arguments can be read.
        child.stdout.take().unwrap().read_exact(&mut [0]).unwrap();
        let found = of_machine(id).unwrap();
        assert_eq!(found.iter().map(|process| process.pid).collect::<Vec<_>>(), [child.id().cast_signed()]);
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
