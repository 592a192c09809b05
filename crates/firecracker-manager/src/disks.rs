//! Disks of microVMs and copies of them: sparse files that share their blocks with what they are copies of, where the
//! host's file system can.
//!
//! A file system that a microVM has written to is only ever read by microVMs: the host neither mounts it nor checks it nor
//! grows it. A disk that is larger than the file system on it is filled by the guest agent when it starts.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use emergent_failpoint::failpoint;
use emergent_host::copy::{copy_sparse, growth, reserve_all, taken_bytes};
use emergent_host::room::Room;

/// Makes a disk of this size out of an image or a copy, unless it is there. It appears under its name only when it is whole.
/// `others` is what the other microVMs' disks may still grow by.
pub(crate) fn make_disk(
    room: &Room,
    disk: &Path,
    from: &Path,
    bytes: u64,
    others: impl FnOnce() -> u64,
) -> io::Result<()> {
    if disk.exists() {
        return Ok(());
    }
    let smallest = fs::metadata(from)?.len();
    if bytes < smallest {
        let message =
            format!("the disk must have at least {} MiB for this image", smallest.div_ceil(1 << 20));
        return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
    }
    let written = taken_bytes(from)?;
    let _part = room.promise(written, bytes.saturating_sub(written), others())?;
    copy(from, disk, Some((bytes, room.rules().reserves_all())))
}

/// What these disks may still grow by.
pub(crate) fn growth_of(disks: impl Iterator<Item = PathBuf>) -> u64 {
    disks.filter_map(|disk| growth(&disk).ok()).sum()
}

/// Copies a disk that nobody is writing to, and that there is room for. Gives the bytes that the copy takes.
pub(crate) fn copy_of(disk: &Path, to: &Path) -> io::Result<u64> {
    copy(disk, to, None)?;
    taken_bytes(to)
}

/// With a size, and whether all its bytes are set aside.
fn copy(from: &Path, to: &Path, size: Option<(u64, bool)>) -> io::Result<()> {
    let unfinished = to.with_extension("new");
    let made = copy_sparse(from, &unfinished)
        .and_then(|()| match size {
            Some((bytes, reserve)) => {
                let file = fs::OpenOptions::new().write(true).open(&unfinished)?;
                file.set_len(bytes)?;
                if reserve { reserve_all(&file, bytes) } else { Ok(()) }
            }
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
