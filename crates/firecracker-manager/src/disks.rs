//! Disks of microVMs and copies of them: sparse files that share their blocks with what they are copies of, where the
//! host's file system can.
//!
//! A file system that a microVM has written to is only ever read by microVMs: the host neither mounts it nor checks it nor
//! grows it. A disk that is larger than the file system on it is filled by the guest agent when it starts.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use emergent_failpoint::failpoint;
use emergent_host::copy::{copy_sparse, taken_bytes};

/// Room that must be left on the host after a disk was made.
const HOST_RESERVE_BYTES: u64 = 512 << 20;

/// The room on the disk of a directory, of which everybody who copies takes a part before.
#[derive(Clone, Debug)]
pub(crate) struct Room {
    directory: PathBuf,
    /// What copies that are being made will take, in bytes.
    spoken_for: Arc<Mutex<u64>>,
}

/// A part of the room, until it is dropped: then what was made of it is seen in what is free.
#[derive(Debug)]
pub(crate) struct Part {
    bytes: u64,
    spoken_for: Arc<Mutex<u64>>,
}

impl Room {
    pub(crate) fn of(directory: &Path) -> Self {
        Self { directory: directory.to_owned(), spoken_for: Arc::default() }
    }

    /// Takes so much of the room, or refuses it: it is asked before, since a host whose disk is full helps nobody.
    pub(crate) fn take(&self, bytes: u64) -> io::Result<Part> {
        let free = rustix::fs::statvfs(&self.directory).map(|stat| stat.f_bavail * stat.f_frsize)?;
        let mut spoken_for = self.spoken_for.lock().unwrap_or_else(PoisonError::into_inner);
        let needed = HOST_RESERVE_BYTES.saturating_add(bytes);
        let left = free.saturating_sub(*spoken_for);
        if left < needed {
            let (left, needed) = (left >> 20, needed >> 20);
            let message = format!("only {left} MiB are left on the host's disk, {needed} MiB are needed");
            return Err(io::Error::new(io::ErrorKind::StorageFull, message));
        }
        *spoken_for += bytes;
        Ok(Part { bytes, spoken_for: Arc::clone(&self.spoken_for) })
    }

    /// Makes a disk of this size out of an image or a copy, unless it is there. It appears under its name only when it is
    /// whole.
    pub(crate) fn make_disk(&self, disk: &Path, from: &Path, bytes: u64) -> io::Result<()> {
        if disk.exists() {
            return Ok(());
        }
        let smallest = fs::metadata(from)?.len();
        if bytes < smallest {
            let message =
                format!("the disk must have at least {} MiB for this image", smallest.div_ceil(1 << 20));
            return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
        }
        let _part = self.take(taken_bytes(from)?)?;
        copy(from, disk, Some(bytes))
    }
}

/// Copies a disk that nobody is writing to, and that there is room for. Gives the bytes that the copy takes.
pub(crate) fn copy_of(disk: &Path, to: &Path) -> io::Result<u64> {
    copy(disk, to, None)?;
    taken_bytes(to)
}

fn copy(from: &Path, to: &Path, bytes: Option<u64>) -> io::Result<()> {
    let unfinished = to.with_extension("new");
    let made = copy_sparse(from, &unfinished)
        .and_then(|()| match bytes {
            Some(bytes) => fs::OpenOptions::new().write(true).open(&unfinished)?.set_len(bytes),
            None => Ok(()),
        })
        .and_then(|()| {
            failpoint!("manager.disk_copied");
            fs::rename(&unfinished, to)
        });
    if made.is_err() {
        let _ = fs::remove_file(&unfinished);
    }
    made
}

impl Drop for Part {
    fn drop(&mut self) {
        *self.spoken_for.lock().unwrap_or_else(PoisonError::into_inner) -= self.bytes;
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use super::*;

    #[test]
    fn room_is_given_to_one_only_of_those_that_copy_at_once() {
        let directory = tempfile::tempdir().unwrap();
        let room = Room::of(directory.path());
        let free = rustix::fs::statvfs(directory.path()).map(|stat| stat.f_bavail * stat.f_frsize).unwrap();
        let most = (free - HOST_RESERVE_BYTES) / 3 * 2;
        let first = room.take(most).unwrap();
        let refused = room.take(most).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::StorageFull);
        assert!(refused.to_string().contains("MiB are needed"), "{refused}");
        drop(first);
        drop(room.take(most).unwrap());
        assert!(room.take(u64::MAX).is_err());
    }
}
