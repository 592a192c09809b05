//! One process for what must not have two: a database file, a directory of microVMs.
//!
//! The lock is an `flock`, held for as long as the value lives; the kernel lets go of it however the process ends. The
//! lock file itself stays: removing it would let a third process lock a file that is no longer there.
//!
//! A process that is killed while it starts another (losetup, iptables) leaves a child that holds the lock until it
//! has become that program, a moment later: who comes then waits.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

/// How long a child may take to become another program.
const CHILD_TIME: Duration = Duration::from_secs(3);

/// The lock, held until it is dropped.
#[derive(Debug)]
pub struct ProcessLock {
    _file: File,
}

/// Why there is no lock.
#[derive(Debug)]
pub enum NoLock {
    /// Another process has it: this one, if it has written down who it is.
    Taken(Option<u32>),
    /// The file can't be used.
    Io(io::Error),
}

impl ProcessLock {
    /// Takes the lock that a file stands for; waits a moment where a process that has ended seems to have it.
    pub fn wait(path: &Path) -> Result<Self, NoLock> {
        let deadline = Instant::now() + CHILD_TIME;
        loop {
            match Self::take(path) {
                Err(NoLock::Taken(Some(pid))) if !is_running(pid) && Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(20));
                }
                taken => return taken,
            }
        }
    }

    fn take(path: &Path) -> Result<Self, NoLock> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false).mode(0o600);
        let mut file = options.open(path).map_err(NoLock::Io)?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => {
                let mut text = String::new();
                // Without it the answer is still true.
                let _ = file.take(32).read_to_string(&mut text);
                return Err(NoLock::Taken(text.trim().parse().ok()));
            }
            Err(error) => return Err(NoLock::Io(error.into())),
        }
        // Over what was there, which also works on a full disk; and without it the lock is still taken.
        let _ = file.rewind().and_then(|()| writeln!(file, "{:<10}", std::process::id()));
        Ok(Self { _file: file })
    }
}

/// Whether a process runs; one that has ended and was not waited for does not.
fn is_running(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, state)| !state.starts_with('Z'))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use std::process::Command;

    use super::*;

    #[test]
    fn a_child_of_a_process_that_is_gone_is_waited_for() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("lock");
        let mut gone = Command::new("true").spawn().unwrap();
        gone.wait().unwrap();
        let mut child = Command::new("flock")
            .arg(&path)
            .args(["sh", "-c", "echo; sleep 0.3"])
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        child.stdout.take().unwrap().read_exact(&mut [0]).unwrap();
        std::fs::write(&path, gone.id().to_string()).unwrap();
        assert!(matches!(ProcessLock::take(&path), Err(NoLock::Taken(_))));
        let lock = ProcessLock::wait(&path).unwrap();
        child.wait().unwrap();
        // A process that runs is not waited for.
        let refused = ProcessLock::wait(&path);
        assert!(matches!(refused, Err(NoLock::Taken(Some(pid))) if pid == std::process::id()));
        drop(lock);
    }
}
