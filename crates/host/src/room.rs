//! Admission control for the host's disk: space is reserved before it is written, because a full disk stops the server's
//! own database and all sandboxes.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;

/// A disk with fewer free inodes counts as full.
const MIN_FREE_INODES: u64 = 2000;

/// The share of the host's disk that sandboxes can use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RoomRules {
    /// The bytes that are kept free for the server's own writes.
    pub min_free_bytes: u64,
    /// The multiple of the free bytes that can be promised to disks, which are seldom full. At 1 all bytes of a disk are allocated
    /// when it is created.
    pub overcommit: u32,
}

impl Default for RoomRules {
    fn default() -> Self {
        Self { min_free_bytes: 512 << 20, overcommit: 10 }
    }
}

impl RoomRules {
    /// Whether all bytes of a disk are allocated when it is created.
    pub fn reserves_all(&self) -> bool {
        self.overcommit <= 1
    }
}

/// The space on the disk of a directory. Every writer reserves a part of it first.
#[derive(Clone, Debug)]
pub struct Room {
    directory: PathBuf,
    rules: RoomRules,
    taken: Arc<Mutex<Taken>>,
}

/// Reservations that the file system's free space does not show yet.
#[derive(Clone, Copy, Debug, Default)]
struct Taken {
    /// Bytes that will be written.
    written: u64,
    /// Bytes that disks can grow by.
    promised: u64,
}

/// A reservation. It ends when it is dropped: by then the file system's free space shows the bytes that were written.
#[derive(Debug)]
pub struct Part {
    own: Taken,
    taken: Arc<Mutex<Taken>>,
}

impl Room {
    /// The space on the disk of this directory.
    pub fn new(directory: &Path, rules: RoomRules) -> Self {
        Self { directory: directory.to_owned(), rules, taken: Arc::default() }
    }

    /// The rules that reservations follow.
    pub fn rules(&self) -> RoomRules {
        self.rules
    }

    /// Reserves space for bytes that will be written.
    pub fn take(&self, bytes: u64) -> io::Result<Part> {
        self.give(Taken { written: bytes, promised: 0 }, 0)
    }

    /// Reserves space for a disk: `written` bytes are written now, `growth` bytes can be written later. `others` is the growth
    /// of all existing disks.
    pub fn promise(&self, written: u64, growth: u64, others: u64) -> io::Result<Part> {
        self.give(Taken { written, promised: growth }, others)
    }

    fn give(&self, wanted: Taken, others: u64) -> io::Result<Part> {
        let mut taken = self.taken.lock();
        let free = free_bytes(&self.directory)?.saturating_sub(taken.written);
        let least = self.rules.min_free_bytes;
        if free < least.saturating_add(wanted.written) {
            return Err(no_room(format!(
                "the host's disk has no room: {} are free and {} are needed, of which {} are kept free \
                 (workspaces.min_free_disk); destroy workspaces or snapshots that are not needed",
                mebibytes(free),
                mebibytes(least.saturating_add(wanted.written)),
                mebibytes(least),
            )));
        }
        let promised = others.saturating_add(taken.promised);
        let most = (free - least).saturating_mul(self.rules.overcommit.max(1).into());
        if wanted.promised > 0 && most < promised.saturating_add(wanted.promised) {
            return Err(no_room(format!(
                "the host's disk has no room for a disk of this size: {} are free, and disks that are there may grow by {}; ask \
                 for less (resource_limits.disk), destroy workspaces that are not needed, or let more be promised \
                 (workspaces.disk_overcommit, now {})",
                mebibytes(free),
                mebibytes(promised),
                self.rules.overcommit,
            )));
        }
        taken.written += wanted.written;
        taken.promised += wanted.promised;
        Ok(Part { own: wanted, taken: Arc::clone(&self.taken) })
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        let mut taken = self.taken.lock();
        taken.written -= self.own.written;
        taken.promised -= self.own.promised;
    }
}

/// Free bytes on the disk of a directory. A disk with hardly any free inodes counts as full.
pub fn free_bytes(directory: &Path) -> io::Result<u64> {
    let stat = rustix::fs::statvfs(directory)?;
    // Some file systems do not count inodes.
    let has_inodes = stat.f_files == 0 || stat.f_favail >= MIN_FREE_INODES;
    Ok(if has_inodes { stat.f_bavail * stat.f_frsize } else { 0 })
}

fn no_room(message: String) -> io::Error {
    io::Error::new(io::ErrorKind::StorageFull, message)
}

fn mebibytes(bytes: u64) -> String {
    format!("{} MiB", bytes >> 20)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use super::*;

    #[test]
    fn concurrent_writers_can_not_reserve_the_same_space() {
        let directory = tempfile::tempdir().unwrap();
        let room = Room::new(directory.path(), RoomRules::default());
        let most = (free_bytes(directory.path()).unwrap() - room.rules.min_free_bytes) / 3 * 2;
        let first = room.take(most).unwrap();
        let refused = room.take(most).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::StorageFull);
        assert!(refused.to_string().contains("are kept free"), "{refused}");
        drop(first);
        drop(room.take(most).unwrap());
        assert!(room.take(u64::MAX).is_err());
    }

    #[test]
    fn promises_beyond_the_overcommit_are_refused() {
        let directory = tempfile::tempdir().unwrap();
        let free = free_bytes(directory.path()).unwrap();
        let promised_by = |overcommit: u32, growth: u64, others: u64| {
            let rules = RoomRules { overcommit, ..RoomRules::default() };
            Room::new(directory.path(), rules).promise(0, growth, others).map(drop)
        };
        promised_by(1, free / 2, 0).unwrap();
        let refused = promised_by(1, free / 2, free / 2).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::StorageFull);
        assert!(refused.to_string().contains("workspaces.disk_overcommit, now 1"), "{refused}");
        promised_by(4, free / 2, free / 2).unwrap();
        let room = Room::new(directory.path(), RoomRules { overcommit: 1, ..RoomRules::default() });
        let _first = room.promise(0, free / 2, 0).unwrap();
        assert!(room.promise(0, free / 2, 0).is_err(), "two at once");
    }
}
