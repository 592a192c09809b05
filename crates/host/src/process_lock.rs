//! A lock that one process holds at a time: for a database file, or a directory of microVMs.
//!
//! The lock is an `flock`, held for as long as the value lives. The kernel releases it however the process ends. The lock
//! file stays: if it were removed, a third process could lock the removed file while another locks a new one.
//!
//! A process that is killed between `fork` and `exec` of a program (losetup, iptables) leaves a child that holds the lock
//! until its `exec`, a moment later. [`ProcessLock::wait`] waits for that.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use crate::processes;

/// The time limit for a child to get from `fork` to `exec`.
const EXEC_TIME: Duration = Duration::from_secs(3);
/// The interval at which the lock is tried meanwhile.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// The lock, held until it is dropped.
#[derive(Debug)]
pub struct ProcessLock {
    _file: File,
}

/// Why the lock was not taken.
#[derive(Debug)]
pub enum NoLock {
    /// Another process holds it. Its id, if that is readable in the lock file.
    Taken(Option<u32>),
    /// The lock file can't be used.
    Io(io::Error),
}

impl ProcessLock {
    /// Takes the lock of a file. Waits a moment if the process that is named in the file has ended.
    pub fn wait(path: &Path) -> Result<Self, NoLock> {
        Self::wait_with(path, || std::thread::sleep(POLL_INTERVAL))
    }

    fn wait_with(path: &Path, mut pause: impl FnMut()) -> Result<Self, NoLock> {
        let deadline = Instant::now() + EXEC_TIME;
        loop {
            match Self::take(path) {
                Err(NoLock::Taken(Some(pid))) if !is_running(pid) && Instant::now() < deadline => {
                    pause();
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
                // The id is only for the message and for the wait above.
                let _ = file.take(32).read_to_string(&mut text);
                return Err(NoLock::Taken(text.trim().parse().ok()));
            }
            Err(error) => return Err(NoLock::Io(error.into())),
        }
        // The text has a fixed length and replaces the one before, which also works on a full disk. The lock does not depend
        // on it.
        let _ = file.rewind().and_then(|()| writeln!(file, "{:<10}", std::process::id()));
        Ok(Self { _file: file })
    }
}

/// Whether a process runs. One that has ended and was not reaped does not.
fn is_running(pid: u32) -> bool {
    let stat = processes::stat(pid.cast_signed());
    stat.is_ok_and(|stat| stat.is_some_and(|stat| !processes::is_dead(&stat)))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use std::process::Command;

    use super::*;

    #[test]
    fn a_lock_held_by_the_child_of_an_ended_process_is_waited_for() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("lock");
        let mut gone = Command::new("true").spawn().unwrap();
        gone.wait().unwrap();
        let mut child = Command::new("flock")
            .arg(&path)
            .args(["sh", "-c", "echo; read x"])
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        child.stdout.take().unwrap().read_exact(&mut [0]).unwrap();
        std::fs::write(&path, gone.id().to_string()).unwrap();
        assert!(matches!(ProcessLock::take(&path), Err(NoLock::Taken(_))));
        // The child ends during the first pause of the wait.
        let mut stdin = child.stdin.take();
        let mut pauses = 0;
        let lock = ProcessLock::wait_with(&path, || {
            pauses += 1;
            drop(stdin.take());
            child.wait().unwrap();
        });
        let lock = lock.unwrap();
        assert_eq!(pauses, 1);
        // A process that runs is not waited for.
        let refused = ProcessLock::wait(&path);
        assert!(matches!(refused, Err(NoLock::Taken(Some(pid))) if pid == std::process::id()));
        drop(lock);
    }
}
