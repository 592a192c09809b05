//! One process per SQLite file.
//!
//! Two servers on one file would each believe that the sandboxes are theirs. The lock is an `flock` on
//! `<file>.lock`, held for as long as the store is open; the kernel lets go of it however the process ends. The
//! lock file itself stays: removing it would let a third process lock a file that is no longer there.

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use crate::error::{Result, StoreError};

/// The lock, held until it is dropped.
#[derive(Debug)]
pub(crate) struct ProcessLock {
    _file: File,
}

impl ProcessLock {
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
