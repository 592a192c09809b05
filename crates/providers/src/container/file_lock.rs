//! Locks between the servers of one host. Each wait for one has a limit, because the process that holds it can be stopped.

use std::fs::File;
use std::io;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

/// The interval at which a lock is tried.
pub(super) const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Locks a file until it is closed. False: it is locked by another process, or as another open file of this one.
pub(super) fn try_lock(file: &File) -> io::Result<bool> {
    match flock(file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(true),
        Err(Errno::WOULDBLOCK) => Ok(false),
        Err(errno) => Err(errno.into()),
    }
}

/// Locks a file until it is closed. Blocks up to the limit.
pub(super) fn lock_within(file: &File, limit: Duration) -> io::Result<()> {
    let deadline = Instant::now() + limit;
    while !try_lock(file)? {
        if Instant::now() >= deadline {
            let message = format!(
                "another process has held the lock for {} s: find it with `lslocks`",
                limit.as_secs()
            );
            return Err(io::Error::new(io::ErrorKind::TimedOut, message));
        }
        std::thread::sleep(POLL_INTERVAL);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use super::*;

    #[test]
    fn a_lock_is_waited_for_until_the_limit() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let (held, own) = (file.reopen().unwrap(), file.reopen().unwrap());
        assert!(try_lock(&held).unwrap() && !try_lock(&own).unwrap());
        let refused = lock_within(&own, Duration::ZERO).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::TimedOut);
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| lock_within(&own, Duration::from_secs(60)));
            drop(held);
            waiting.join().unwrap().unwrap();
        });
    }
}
