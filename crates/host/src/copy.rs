//! Copies of large files that are mostly holes.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::files::{create_private, remove_if_there};
use rustix::fs::{SeekFrom, copy_file_range, ioctl_ficlone, seek};
use rustix::io::Errno;

/// Copies a file to one that only its owner can use. The copy shares the file's blocks where the file system supports that;
/// elsewhere the data is copied and the holes stay holes. The copy is on disk when this returns.
pub fn copy_sparse(from: &Path, to: &Path) -> io::Result<()> {
    let source = File::open(from)?;
    remove_if_there(to)?;
    let target = create_private(to)?;
    if ioctl_ficlone(&target, &source).is_err() {
        copy_data(&source, &target)?;
    }
    target.sync_all()
}

/// The bytes that a file occupies on the disk, without its holes.
pub fn taken_bytes(path: &Path) -> io::Result<u64> {
    Ok(std::fs::metadata(path)?.blocks() * 512)
}

/// The bytes that a file can still grow by: its holes.
pub fn growth(path: &Path) -> io::Result<u64> {
    let file = std::fs::metadata(path)?;
    Ok(file.len().saturating_sub(file.blocks() * 512))
}

/// Allocates all blocks of a file, so that a write to it never fails because the disk is full.
pub fn reserve_all(file: &File, bytes: u64) -> io::Result<()> {
    Ok(rustix::fs::fallocate(file, rustix::fs::FallocateFlags::KEEP_SIZE, 0, bytes)?)
}

fn copy_data(source: &File, target: &File) -> io::Result<()> {
    let size = source.metadata()?.len();
    target.set_len(size)?;
    let mut at = 0;
    while at < size {
        let begin = match seek(source, SeekFrom::Data(at)) {
            Ok(begin) => begin,
            // The rest of the file is a hole.
            Err(Errno::NXIO) => break,
            Err(errno) => return Err(errno.into()),
        };
        let end = seek(source, SeekFrom::Hole(begin))?;
        let (mut read_at, mut write_at) = (begin, begin);
        while read_at < end {
            let left = usize::try_from(end - read_at).unwrap_or(usize::MAX);
            let copied = copy_file_range(source, Some(&mut read_at), target, Some(&mut write_at), left)?;
            if copied == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
        at = end;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use std::io::{Seek, Write};

    use super::*;

    #[test]
    fn a_copy_has_the_same_bytes_and_the_same_holes() {
        let directory = tempfile::tempdir().unwrap();
        let (from, to) = (directory.path().join("from"), directory.path().join("to"));
        let mut file = File::create(&from).unwrap();
        file.set_len(64 << 20).unwrap();
        for at in [0, 5 << 20, (64 << 20) - 100] {
            file.seek(io::SeekFrom::Start(at)).unwrap();
            file.write_all(&[7; 100]).unwrap();
        }
        drop(file);
        copy_sparse(&from, &to).unwrap();
        assert_eq!(std::fs::read(&from).unwrap(), std::fs::read(&to).unwrap());
        let taken = taken_bytes(&to).unwrap();
        assert!(taken < 1 << 20, "{taken} bytes are taken");
    }
}
