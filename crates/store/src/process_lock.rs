//! One process per SQLite file.
//!
//! Two servers on one file would each believe that the sandboxes are theirs. The lock is an `flock` on
//! `<file>.lock`, held for as long as the store is open; the kernel lets go of it however the process ends. The
//! lock file itself stays: removing it would let a third process lock a file that is no longer there.
//!
//! A process that is killed while it starts another (losetup, iptables) leaves a child that holds the lock until it
//! has become that program, a moment later: who comes then waits.

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use crate::error::{Result, StoreError};

/// How long a child may take to become another program.
const CHILD_TIME: Duration = Duration::from_secs(3);

/// The lock, held until it is dropped.
#[derive(Debug)]
pub(crate) struct ProcessLock {
    _file: File,
}

impl ProcessLock {
    /// Takes the lock for `database`; waits a moment where a process that has ended seems to have it.
    pub(crate) async fn wait(database: &Path) -> Result<Self> {
        let deadline = Instant::now() + CHILD_TIME;
        loop {
            match Self::take(database) {
                Err(StoreError::InUse { pid: Some(pid), .. })
                    if !is_running(pid) && Instant::now() < deadline =>
                {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
                taken => return taken,
            }
        }
    }

    /// Takes the lock for `database`, or says who has it.
    pub(crate) fn take(database: &Path) -> Result<Self> {
        let mut name = database.as_os_str().to_owned();
        name.push(".lock");
        let path = Path::new(&name);
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(path)
            .map_err(StoreError::file("open", path))?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => {
                let mut text = String::new();
                // The pid is only for the message; without it the message is still true.
                let _ = file.take(32).read_to_string(&mut text);
                return Err(StoreError::InUse { path: database.to_owned(), pid: text.trim().parse().ok() });
            }
            Err(error) => return Err(StoreError::file("lock", path)(error.into())),
        }
        file.set_len(0)
            .and_then(|()| file.rewind())
            .and_then(|()| writeln!(file, "{}", std::process::id()))
            .map_err(StoreError::file("write", path))?;
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
    use std::process::Command;

    use super::*;

    #[tokio::test]
    async fn a_child_of_a_process_that_is_gone_is_waited_for() {
        let directory = tempfile::tempdir().unwrap();
        let database = directory.path().join("emergent.db");
        let path = directory.path().join("emergent.db.lock");
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
        assert!(matches!(ProcessLock::take(&database), Err(StoreError::InUse { .. })));
        let lock = ProcessLock::wait(&database).await.unwrap();
        child.wait().unwrap();
        // A process that runs is not waited for.
        let refused = ProcessLock::wait(&database).await;
        assert!(
            matches!(refused, Err(StoreError::InUse { pid: Some(pid), .. }) if pid == std::process::id())
        );
        drop(lock);
    }
}
