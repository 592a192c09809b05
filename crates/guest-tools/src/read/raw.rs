//! Opens a file whose exact bytes are sent to the host.
//!
//! The size that the file system reports is only a hint: files of `/proc` report 0, files of `/sys` a page, and a file
//! may grow or shrink while it is read. So the head is read first. A file that ends within its head has the size of
//! its head. A file that has more than its reported size is read to its end, and is refused when that is beyond the
//! largest file. Any other file is read up to the size it had when it was opened, or to its end if that comes first.

use std::fs::File;
use std::io::{self, Read};

use emergent_wire::tools::MAX_FILE_BYTES;
use emergent_wire::{ErrorCode, ErrorDetail};
use rustix::fs::FileType;
use rustix::io::Errno;

use super::{PAGE_BYTES, fill, open, read_some, size_of, special_file};
use crate::Context;
use crate::error::{io_error, wrong_type};
use crate::text::{HEAD_BYTES, media_type};

/// An open file whose bytes are sent without changes.
#[derive(Debug)]
pub struct RawFile {
    /// The open file, at its beginning.
    pub file: RawReader,
    /// The most bytes that reading gives. Fewer come if the file shrinks, or if its size was not known when it was
    /// opened; then this is one more than the largest file has.
    pub size: u64,
    /// The media type.
    pub media_type: String,
}

/// Reads an opened file from its beginning to its bound.
#[derive(Debug)]
pub struct RawReader {
    /// The first bytes, which were read to tell the kind of file, and how many of them were given.
    head: Vec<u8>,
    given: usize,
    file: File,
    /// The most bytes that are still read after the head.
    left: u64,
    /// Whether the file must end where `left` does.
    must_end: bool,
}

/// Opens a file whose exact bytes are sent to the host. Refuses files over 64 MiB.
pub fn open_raw(context: &Context, path: &str) -> Result<RawFile, ErrorDetail> {
    let (location, mut file, stat) = open(context, path)?;
    let reported = size_of(&stat);
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => {}
        FileType::Directory => {
            return Err(wrong_type(
                &location.path,
                "a directory",
                "raw gives the bytes of files; leave raw out to list it",
            ));
        }
        other => return Err(special_file(&location.path, other)),
    }
    if reported > MAX_FILE_BYTES {
        return Err(ErrorDetail::new(
            ErrorCode::TooLarge,
            format!(
                "{} has {reported} bytes: raw gives at most {MAX_FILE_BYTES}; read pages of it, or split it with bash",
                location.path.display()
            ),
        ));
    }
    let mut head = vec![0; HEAD_BYTES];
    let mut is_at_end = false;
    let filled = fill(&mut file, &mut head, HEAD_BYTES, &mut is_at_end)
        .map_err(|error| io_error("read", &location.path, &error))?;
    head.truncate(filled);
    let read = filled as u64;
    let is_size_known = is_at_end || reported > read;
    let (size, left) = match (is_at_end, is_size_known) {
        (true, _) => (read, 0),
        (false, true) => (reported, reported - read),
        // One more, so that a caller that reads `size` bytes reads once more at the bound and gets the failure.
        (false, false) => (MAX_FILE_BYTES + 1, MAX_FILE_BYTES - read),
    };
    let media_type = media_type(&head).to_owned();
    let file = RawReader { head, given: 0, file, left, must_end: !is_size_known };
    Ok(RawFile { file, size, media_type })
}

impl Read for RawReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let head = &self.head[self.given..];
        if !head.is_empty() {
            let length = head.len().min(buffer.len());
            buffer[..length].copy_from_slice(&head[..length]);
            self.given += length;
            return Ok(length);
        }
        if self.left > 0 {
            let length = buffer.len().min(usize::try_from(self.left).unwrap_or(usize::MAX));
            let read = read_some(&mut self.file, &mut buffer[..length])?;
            self.left -= read as u64;
            return Ok(read);
        }
        if self.must_end && read_some(&mut self.file, &mut [0; PAGE_BYTES])? > 0 {
            return Err(Errno::FBIG.into());
        }
        Ok(0)
    }
}
