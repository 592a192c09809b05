//! A microVM's process, which outlives the manager: known by its id and the time it was started, since ids are used again.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal};
use serde::{Deserialize, Serialize};
use tokio::io::unix::AsyncFd;

/// How long a process may take to stop that was told to.
const FREEZE_TIME: Duration = Duration::from_secs(10);
/// How soon a process is waited on again that could not be, for want of a descriptor.
const WAIT_AGAIN: Duration = Duration::from_secs(1);

/// A process of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Process {
    pub(crate) pid: i32,
    /// In ticks since the host was started.
    pub(crate) start_time: u64,
}

impl Process {
    /// The process that has this id now; none when there is none.
    pub(crate) fn of(pid: i32) -> io::Result<Option<Self>> {
        Ok(start_time(pid)?.map(|start_time| Self { pid, start_time }))
    }

    /// Whether it has ended: it and not another with its id. What can't be looked at has not.
    pub(crate) fn has_ended(self) -> io::Result<bool> {
        Ok(start_time(self.pid)? != Some(self.start_time))
    }

    /// Whether it runs, as far as can be told.
    pub(crate) fn is_alive(self) -> bool {
        !self.has_ended().unwrap_or_else(|error| {
            tracing::warn!(pid = self.pid, %error, "a process can't be looked at and is taken for alive");
            false
        })
    }

    /// Something that can be waited on and signalled without ever meaning another process; none when it has ended.
    fn handle(self) -> io::Result<Option<OwnedFd>> {
        let Some(pid) = Pid::from_raw(self.pid) else {
            return Ok(None);
        };
        let handle = match rustix::process::pidfd_open(pid, PidfdFlags::NONBLOCK) {
            Ok(handle) => handle,
            // The number may be a thread's now.
            Err(_) if self.has_ended()? => return Ok(None),
            Err(errno) => return Err(errno.into()),
        };
        // Only now is it certain whose it is.
        Ok((!self.has_ended()?).then_some(handle))
    }

    /// Signals it, unless it has ended.
    pub(crate) fn signal(self, signal: Signal) -> io::Result<()> {
        match self.handle()?.map(|handle| rustix::process::pidfd_send_signal(handle, signal)) {
            None | Some(Ok(()) | Err(Errno::SRCH)) => Ok(()),
            Some(Err(errno)) => Err(errno.into()),
        }
    }

    /// Stops it and what it has started, and waits until nothing of that runs. It leads a group of its own.
    pub(crate) fn freeze(self) -> io::Result<()> {
        self.signal_group(Signal::STOP)?;
        let begun = Instant::now();
        // Each thread stops when it leaves the kernel, and nobody is told but the parent, which another may have been.
        while !is_group_stopped(self.pid)? {
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
        let _handle = self.handle()?.ok_or_else(gone)?;
        Ok(rustix::process::kill_process_group(pid, signal)?)
    }

    /// Waits until it has ended.
    pub(crate) async fn ended(self) {
        while let Err(error) = self.wait().await {
            tracing::warn!(pid = self.pid, %error, "a process can't be waited on; it is tried again");
            tokio::time::sleep(WAIT_AGAIN).await;
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

/// Tells the kernel that this process is ended before those of the host when memory runs out. Only system calls, and none
/// that must succeed.
pub(crate) fn offer_to_end() {
    if let Ok(file) = rustix::fs::open(c"/proc/self/oom_score_adj", OFlags::WRONLY, Mode::empty()) {
        let _ = rustix::io::write(file, b"500");
    }
}

/// Which run of the host this is.
pub(crate) fn boot() -> io::Result<String> {
    Ok(fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned())
}

/// When a process was started; none when it is not there, or only its remains are.
fn start_time(pid: i32) -> io::Result<Option<u64>> {
    let fields = Fields::of(&format!("/proc/{pid}"))?;
    Ok(fields.filter(|fields| !fields.is_dead()).and_then(|fields| fields.number(19)))
}

/// What is read of a process or a thread; none when it is not there any more.
fn unless_gone<T>(read: io::Result<T>) -> io::Result<Option<T>> {
    match read {
        Ok(read) => Ok(Some(read)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        // It ended between being opened and being read.
        Err(error) if error.raw_os_error() == Some(Errno::SRCH.raw_os_error()) => Ok(None),
        Err(error) => Err(error),
    }
}

/// What the kernel tells of a process or a thread, from its state on.
struct Fields(Vec<String>);

impl Fields {
    fn of(directory: &str) -> io::Result<Option<Self>> {
        let stat = unless_gone(fs::read(format!("{directory}/stat")))?;
        let fields = |stat: Vec<u8>| {
            // Its name, which may be anything, ends at the last bracket.
            let stat = String::from_utf8_lossy(&stat);
            Some(Self(stat.rsplit_once(')')?.1.split_ascii_whitespace().map(str::to_owned).collect()))
        };
        Ok(stat.and_then(fields))
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
fn is_group_stopped(group: i32) -> io::Result<bool> {
    for pid in numbers("/proc")? {
        let fields = Fields::of(&format!("/proc/{pid}"))?;
        if !fields.is_some_and(|fields| fields.number(2) == Some(group) && !fields.is_dead()) {
            continue;
        }
        for thread in numbers(&format!("/proc/{pid}/task"))? {
            let fields = Fields::of(&format!("/proc/{thread}"))?;
            if fields.is_some_and(|fields| !fields.is_dead() && fields.state() != "T") {
                return Ok(false);
            }
        }
    }
    Ok(true)
}

/// The entries of a directory of `/proc` that are processes or threads.
fn numbers(directory: &str) -> io::Result<Vec<i32>> {
    let Some(entries) = unless_gone(fs::read_dir(directory))? else {
        return Ok(Vec::new());
    };
    let mut numbers = Vec::new();
    for entry in entries {
        if let Some(entry) = unless_gone(entry)? {
            numbers.extend(entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok()));
        }
    }
    Ok(numbers)
}

/// All processes that were started for this microVM, jailer or Firecracker: both carry its id as an argument.
pub(crate) fn of_machine(id: &str) -> io::Result<Vec<Process>> {
    let joined = format!("--id={id}");
    let mut found = Vec::new();
    for pid in numbers("/proc")? {
        let Some(arguments) = unless_gone(fs::read(format!("/proc/{pid}/cmdline")))? else {
            continue;
        };
        let arguments: Vec<&[u8]> = arguments.split(|byte| *byte == 0).collect();
        let named = |pair: &[&[u8]]| pair[0] == b"--id" && pair[1] == id.as_bytes();
        if arguments.windows(2).any(named) || arguments.contains(&joined.as_bytes()) {
            found.extend(Process::of(pid)?);
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use super::*;

    #[tokio::test]
    async fn a_process_is_itself_and_no_other_with_its_id() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let process = Process::of(child.id().cast_signed()).unwrap().unwrap();
        assert!(process.is_alive());
        let other = Process { start_time: process.start_time + 1, ..process };
        assert!(!other.is_alive());
        // A signal that is meant for another does nothing.
        other.signal(Signal::KILL).unwrap();
        other.ended().await;
        assert!(child.try_wait().unwrap().is_none());
        process.signal(Signal::KILL).unwrap();
        process.ended().await;
        child.wait().unwrap();
        assert!(!process.is_alive());
    }

    #[test]
    fn a_process_may_have_any_name() {
        let mut child = std::process::Command::new("sh")
            .args(["-c", r"printf 'a)\377 Z 1' > /proc/$$/comm; echo; read x"])
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        io::Read::read_exact(&mut child.stdout.take().unwrap(), &mut [0]).unwrap();
        let process = Process::of(child.id().cast_signed()).unwrap().unwrap();
        assert!(process.is_alive());
        process.signal(Signal::KILL).unwrap();
        child.wait().unwrap();
        assert!(!process.is_alive());
    }

    /// In a process of its own, since descriptors are everybody's.
    #[tokio::test]
    async fn a_process_that_cannot_be_looked_at_has_not_ended() {
        use rustix::process::{Resource, Rlimit, getpid, getrlimit, setrlimit};
        const ALONE: &str = "EMERGENT_TEST_ALONE";
        if std::env::var_os(ALONE).is_none() {
            let name = "process::tests::a_process_that_cannot_be_looked_at_has_not_ended";
            let mut alone = std::process::Command::new(std::env::current_exe().unwrap());
            assert!(alone.args(["--exact", name]).env(ALONE, "1").status().unwrap().success());
            return;
        }
        let itself = Process::of(getpid().as_raw_pid()).unwrap().unwrap();
        let limit = getrlimit(Resource::Nofile);
        setrlimit(Resource::Nofile, Rlimit { current: Some(0), ..limit }).unwrap();
        assert!(Process::of(itself.pid).is_err() && of_machine("any").is_err());
        assert!(itself.is_alive() && itself.signal(Signal::KILL).is_err());
        let waited = tokio::time::timeout(Duration::from_millis(10), itself.ended()).await;
        setrlimit(Resource::Nofile, limit).unwrap();
        assert!(waited.is_err());
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
        let process = Process::of(child.id().cast_signed()).unwrap().unwrap();
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
        let mut found = of_machine(id).unwrap();
        while found.is_empty() && begun.elapsed() < FREEZE_TIME {
            std::thread::sleep(Duration::from_millis(1));
            found = of_machine(id).unwrap();
        }
        assert_eq!(found.iter().map(|process| process.pid).collect::<Vec<_>>(), [child.id().cast_signed()]);
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
