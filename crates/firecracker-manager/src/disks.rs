//! Disks of microVMs: sparse files that share blocks with the image or snapshot that they were copied from, where the
//! host's file system supports that.
//!
//! Invariant: the host never mounts, checks or grows a file system that a microVM has written. The guest agent grows its
//! file system to the size of its disk.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use emergent_failpoint::failpoint;
use emergent_host::copy::{copy_sparse, growth, reserve_all, taken_bytes};
use emergent_host::room::Room;

use crate::admission::{RequestError, check_disk_size};

/// Why a disk was not made.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DiskError {
    #[error(transparent)]
    Request(#[from] RequestError),
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// Makes a disk of this size as a copy of an image or a snapshot, unless it exists. The disk gets its name when it is
/// complete. `others` is the growth of all other disks.
pub(crate) fn make_disk(
    room: &Room,
    disk: &Path,
    from: &Path,
    bytes: u64,
    others: impl FnOnce() -> u64,
) -> Result<(), DiskError> {
    if disk.exists() {
        return Ok(());
    }
    check_disk_size(bytes, fs::metadata(from)?.len())?;
    let written = taken_bytes(from)?;
    let _space = room.promise(written, bytes.saturating_sub(written), others())?;
    Ok(copy(from, disk, Some(NewSize { bytes, allocate: room.rules().reserves_all() }))?)
}

/// The sum of the bytes that these disks can still grow by.
pub(crate) fn growth_of(disks: impl Iterator<Item = PathBuf>) -> u64 {
    disks.filter_map(|disk| growth(&disk).ok()).sum()
}

/// Copies a disk that is not being written, into space that is reserved. Returns the bytes that the copy occupies.
pub(crate) fn copy_of(disk: &Path, to: &Path) -> io::Result<u64> {
    copy(disk, to, None)?;
    taken_bytes(to)
}

struct NewSize {
    bytes: u64,
    /// Whether all blocks are allocated now.
    allocate: bool,
}

fn copy(from: &Path, to: &Path, size: Option<NewSize>) -> io::Result<()> {
    let unfinished = to.with_extension("new");
    let made = copy_sparse(from, &unfinished)
        .and_then(|()| size.map_or(Ok(()), |size| resize(&unfinished, &size)))
        .and_then(|()| {
            failpoint!("manager.disk_copied");
            fs::rename(&unfinished, to)
        });
    if made.is_err() {
        let _ = fs::remove_file(&unfinished);
    }
    made
}

fn resize(disk: &Path, size: &NewSize) -> io::Result<()> {
    let file = fs::OpenOptions::new().write(true).open(disk)?;
    file.set_len(size.bytes)?;
    if size.allocate { reserve_all(&file, size.bytes) } else { Ok(()) }
}
