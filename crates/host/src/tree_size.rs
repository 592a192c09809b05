//! The bytes that a directory tree occupies on the disk.
//!
//! The tree's content is hostile: it may hide its size behind long paths or links. So it is walked by descriptors, which
//! neither of them affects.

use std::collections::HashSet;
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, openat, statat};

/// The deepest nesting that is walked. A deeper tree counts as too large.
const MAX_DEPTH: usize = 256;
/// The size of a block in `st_blocks`.
const BLOCK_BYTES: u64 = 512;
/// The minimum that a file counts. Empty files count too, because the number of inodes is limited.
const FILE_BYTES: u64 = 4096;

/// The bytes that a directory tree occupies. Stops counting above `enough`.
pub fn tree_bytes(directory: &Path, enough: u64) -> io::Result<u64> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut walk = Walk { taken: 0, linked: HashSet::new() };
    let mut stack = vec![Dir::new(openat(CWD, directory, flags, Mode::empty())?)?];
    loop {
        let depth = stack.len();
        let Some(current) = stack.last_mut() else { break };
        let Some(entry) = current.read() else {
            stack.pop();
            continue;
        };
        // An entry that is removed meanwhile occupies nothing.
        let Ok(entry) = entry else { continue };
        if matches!(entry.file_name().to_bytes(), b"." | b"..") {
            continue;
        }
        let parent = current.fd()?;
        let Ok(stat) = statat(parent, entry.file_name(), AtFlags::SYMLINK_NOFOLLOW) else {
            continue;
        };
        walk.count(&stat);
        if walk.taken > enough {
            break;
        }
        if FileType::from_raw_mode(stat.st_mode) == FileType::Directory {
            if depth >= MAX_DEPTH {
                return Ok(u64::MAX);
            }
            let opened: Result<OwnedFd, _> = openat(parent, entry.file_name(), flags, Mode::empty());
            if let Ok(opened) = opened {
                stack.push(Dir::new(opened)?);
            }
        }
    }
    Ok(walk.taken)
}

struct Walk {
    taken: u64,
    /// Inodes of files with several names. They are counted once.
    linked: HashSet<u64>,
}

impl Walk {
    #[allow(clippy::unnecessary_cast, clippy::cast_sign_loss, reason = "the types differ between targets")]
    fn count(&mut self, stat: &rustix::fs::Stat) {
        let is_directory = FileType::from_raw_mode(stat.st_mode) == FileType::Directory;
        if is_directory || stat.st_nlink as u64 == 1 || self.linked.insert(stat.st_ino as u64) {
            self.taken = self.taken.saturating_add((stat.st_blocks as u64 * BLOCK_BYTES).max(FILE_BYTES));
        }
    }
}

/// The bytes of removed files that these processes still have open, on the file system of a directory.
pub fn removed_bytes(processes: &[i32], directory: &Path) -> io::Result<u64> {
    let device = fs::metadata(directory)?.dev();
    let mut seen = HashSet::new();
    let mut taken: u64 = 0;
    for pid in processes {
        for entry in fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten() {
            let Ok(file) = fs::metadata(entry.path()) else { continue };
            if !file.is_file() || file.nlink() > 0 || !seen.insert((file.dev(), file.ino())) {
                continue;
            }
            if file.dev() == device || is_in_overlay(&entry.path()) {
                taken = taken.saturating_add(file.blocks() * BLOCK_BYTES);
            }
        }
    }
    Ok(taken)
}

/// Whether a file is in a container's root (overlayfs). Such a file has the device of the overlay, not of the disk.
fn is_in_overlay(path: &Path) -> bool {
    const OVERLAY: u64 = 0x794c_7630;
    rustix::fs::statfs(path).is_ok_and(|stat| u64::try_from(stat.f_type).is_ok_and(|kind| kind == OVERLAY))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use std::io::Write;

    use super::*;

    #[test]
    fn each_file_is_counted_once_and_links_are_not_followed() {
        let (directory, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        fs::write(other.path().join("large"), vec![1; 4 << 20]).unwrap();
        let below = directory.path().join("a/b");
        fs::create_dir_all(&below).unwrap();
        fs::write(below.join("file"), vec![1; 1 << 20]).unwrap();
        fs::hard_link(below.join("file"), below.join("same")).unwrap();
        std::os::unix::fs::symlink(other.path(), below.join("link")).unwrap();
        let taken = tree_bytes(directory.path(), u64::MAX).unwrap();
        assert!((1 << 20..2 << 20).contains(&taken), "{taken}");
        assert!(tree_bytes(directory.path(), 1000).unwrap() > 1000);
        (0..512).for_each(|number| fs::write(below.join(number.to_string()), "").unwrap());
        let with_empty = tree_bytes(directory.path(), u64::MAX).unwrap();
        assert!(with_empty >= taken + (2 << 20), "empty files count too: {with_empty}");
        assert!(tree_bytes(&directory.path().join("gone"), 1).is_err());
    }

    #[test]
    fn long_paths_and_deep_trees_are_counted() {
        let directory = tempfile::tempdir().unwrap();
        let name = "n".repeat(200);
        let mut at = rustix::fs::open(directory.path(), OFlags::DIRECTORY, Mode::empty()).unwrap();
        // Longer than the longest path.
        for _ in 0..40 {
            rustix::fs::mkdirat(&at, &name, Mode::RWXU).unwrap();
            at = openat(&at, &name, OFlags::DIRECTORY, Mode::empty()).unwrap();
        }
        let file = openat(&at, "file", OFlags::CREATE | OFlags::WRONLY, Mode::RWXU).unwrap();
        fs::File::from(file).write_all(&vec![1; 1 << 20]).unwrap();
        assert!(tree_bytes(directory.path(), u64::MAX).unwrap() >= 1 << 20);
        for _ in 0..MAX_DEPTH {
            rustix::fs::mkdirat(&at, "n", Mode::RWXU).unwrap();
            at = openat(&at, "n", OFlags::DIRECTORY, Mode::empty()).unwrap();
        }
        assert_eq!(tree_bytes(directory.path(), u64::MAX - 1).unwrap(), u64::MAX);
    }

    #[test]
    fn a_removed_file_that_is_still_open_is_counted() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        let mut file = fs::File::create(&path).unwrap();
        file.write_all(&vec![1; 1 << 20]).unwrap();
        file.sync_all().unwrap();
        fs::remove_file(&path).unwrap();
        let own = [std::process::id().cast_signed()];
        assert!(removed_bytes(&own, directory.path()).unwrap() >= 1 << 20);
    }
}
