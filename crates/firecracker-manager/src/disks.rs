//! Disks of microVMs and copies of them: sparse files that share their blocks with what they are copies of, where the
//! host's file system can.
//!
//! A file system that a microVM has written to is only ever read by microVMs: the host neither mounts it nor checks it nor
//! grows it. A disk that is larger than the file system on it is filled by the guest agent when it starts.

use std::fs;
use std::io;
use std::path::Path;

use emergent_failpoint::failpoint;
use emergent_host::copy::{copy_sparse, taken_bytes};

/// Room that must be left on the host after a disk was made.
const HOST_RESERVE_BYTES: u64 = 512 << 20;

/// Makes a disk of this size out of an image or a copy, unless it is there. It appears under its name only when it is whole.
pub(crate) fn ensure(disk: &Path, from: &Path, bytes: u64) -> io::Result<()> {
    if disk.exists() {
        return Ok(());
    }
    let smallest = fs::metadata(from)?.len();
    if bytes < smallest {
        let message =
            format!("the disk must have at least {} MiB for this image", smallest.div_ceil(1 << 20));
        return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
    }
    copy(from, disk, Some(bytes))
}

/// Copies a disk that nobody is writing to. Gives the bytes that the copy takes.
pub(crate) fn copy_of(disk: &Path, to: &Path) -> io::Result<u64> {
    copy(disk, to, None)?;
    taken_bytes(to)
}

fn copy(from: &Path, to: &Path, bytes: Option<u64>) -> io::Result<()> {
    let directory = to.parent().unwrap_or(Path::new("/"));
    check_room(directory, taken_bytes(from)?)?;
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

/// Refuses a copy that the host has no room for. It is asked before, since a host whose disk is full helps nobody.
pub(crate) fn check_room(directory: &Path, needed: u64) -> io::Result<()> {
    let free = rustix::fs::statvfs(directory).map(|stat| stat.f_bavail * stat.f_frsize)?;
    if free < HOST_RESERVE_BYTES + needed {
        let (left, wanted) = (free >> 20, (HOST_RESERVE_BYTES + needed) >> 20);
        let message = format!("only {left} MiB are left on the host's disk, {wanted} MiB are needed");
        return Err(io::Error::new(io::ErrorKind::StorageFull, message));
    }
    Ok(())
}
