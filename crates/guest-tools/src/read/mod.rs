//! Reads a file as numbered lines, or lists a directory.
//!
//! A file is read once, through a fixed buffer: the same pass numbers the page's lines, counts all lines and
//! computes the SHA-256. Over 256 MiB only as much is read as the page needs, and count and hash are null.
//!
//! A file is read to its end and not to the size that it reports: files of `/proc` report 0. A file that grows while it is read
//! is read up to 64 MiB, or up to the size it had when it was opened if that is more, so that reading always ends.
//!
//! Output: `\r\n` and `\n` both end a line and are not shown, a lone `\r` stays; a byte order mark is not
//! shown; bytes that are not UTF-8 become U+FFFD. A line over 2000 characters is cut and says so. Following
//! `next_offset` gives every line exactly once.

mod directory;
mod pager;
mod raw;
mod similar;

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::Path;
use std::sync::atomic::AtomicBool;

use emergent_wire::tools::{DEFAULT_READ_LINES, MAX_FILE_BYTES, ReadAnswer, ReadRequest};
use emergent_wire::{ErrorCode, ErrorDetail, Validate as _};
use rustix::fs::{FileType, Stat, fstat};
use rustix::io::Errno;
use sha2::{Digest, Sha256};

use crate::Context;
use crate::error::{check_cancel, io_error, os_error, wrong_type};
use crate::location::Location;
use crate::read::pager::Pager;
use crate::text::{BOM, HEAD_BYTES, hex_digest, is_binary, media_type};

pub use raw::{RawFile, RawReader, open_raw};
pub(crate) use similar::not_found;

/// Larger files are neither counted nor hashed.
const MAX_COUNTED_BYTES: u64 = 256 << 20;
const BUFFER_BYTES: usize = 128 * 1024;
const PAGE_BYTES: usize = 4096;

/// Reads a page of a file or directory. `raw` is not answered here but by [`open_raw`].
pub fn read(
    context: &Context,
    request: &ReadRequest,
    cancel: &AtomicBool,
) -> Result<ReadAnswer, ErrorDetail> {
    request.validate()?;
    if request.raw {
        return Err(ErrorDetail::new(
            ErrorCode::BadRequest,
            "raw bytes are not part of a page: leave raw out, or ask where raw is answered",
        ));
    }
    let offset = request.offset.unwrap_or(1);
    let limit = request.limit.unwrap_or(DEFAULT_READ_LINES);
    let (location, file, stat) = open(context, &request.file_path)?;
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::Directory => directory::list(context, &location, file.into(), offset, limit, cancel),
        FileType::RegularFile => read_file(file, &location.path, size_of(&stat), offset, limit, cancel),
        other => Err(special_file(&location.path, other)),
    }
}

fn open(context: &Context, path: &str) -> Result<(Location, File, Stat), ErrorDetail> {
    let path = context.request_path("file_path", path)?;
    let location = context.locate(&path)?;
    let file = location.open().map_err(|errno| open_failure("read", &location, errno))?;
    let stat = fstat(&file).map_err(|errno| os_error("read", &location.path, errno))?;
    Ok((location, file, stat))
}

/// The error of a failed open. A device may fail with any error, so its file type is reported instead.
pub(crate) fn open_failure(doing: &str, location: &Location, errno: Errno) -> ErrorDetail {
    if errno == Errno::NOENT {
        return not_found(location);
    }
    match location.stat().map(|stat| FileType::from_raw_mode(stat.st_mode)) {
        Ok(FileType::RegularFile | FileType::Directory | FileType::Symlink) | Err(_) => {
            os_error(doing, &location.path, errno)
        }
        Ok(special) => special_file(&location.path, special),
    }
}

pub(crate) fn size_of(stat: &Stat) -> u64 {
    u64::try_from(stat.st_size).unwrap_or(0)
}

pub(crate) fn special_file(path: &Path, file_type: FileType) -> ErrorDetail {
    let what = match file_type {
        FileType::Fifo => "a FIFO",
        FileType::Socket => "a socket",
        FileType::CharacterDevice | FileType::BlockDevice => "a device",
        _ => "not a regular file",
    };
    wrong_type(path, what, "file tools work on regular files; use bash for it")
}

fn read_file(
    mut file: File,
    path: &Path,
    size: u64,
    offset: u64,
    limit: u64,
    cancel: &AtomicBool,
) -> Result<ReadAnswer, ErrorDetail> {
    let fail = |error: std::io::Error| io_error("read", path, &error);
    // Whole pages, since some files of `/proc` only give whole records.
    let wanted = usize::try_from(size).unwrap_or(BUFFER_BYTES).clamp(HEAD_BYTES, BUFFER_BYTES - 1) + 1;
    let mut buffer = vec![0; wanted.next_multiple_of(PAGE_BYTES)];
    let most = size.max(MAX_FILE_BYTES);
    let mut counts = size <= MAX_COUNTED_BYTES;
    let mut hasher = Sha256::new();
    let mut pager = Pager::new(offset, limit);
    let mut is_at_end = false;
    let mut total = 0_u64;

    let mut filled = fill(&mut file, &mut buffer, HEAD_BYTES, &mut is_at_end).map_err(fail)?;
    let head = &buffer[..filled.min(HEAD_BYTES)];
    let binary_type = is_binary(head).then(|| media_type(head));
    let bom = if head.starts_with(BOM) { BOM.len() } else { 0 };
    loop {
        let chunk = &buffer[..filled];
        total += filled as u64;
        counts = counts && total <= MAX_COUNTED_BYTES;
        if counts {
            hasher.update(chunk);
        }
        if binary_type.is_none() {
            let skip = if total == filled as u64 { bom } else { 0 };
            pager.push(&chunk[skip..]);
        }
        if is_at_end || (!counts && (binary_type.is_some() || pager.knows_next_page())) {
            break;
        }
        let room = usize::try_from(most.saturating_sub(total)).unwrap_or(usize::MAX).min(buffer.len());
        if room == 0 {
            // These bytes were added since the file was opened, or its size was unknown.
            is_at_end = total == size;
            counts = counts && is_at_end;
            break;
        }
        check_cancel(cancel)?;
        filled = fill(&mut file, &mut buffer[..room], 1, &mut is_at_end).map_err(fail)?;
    }

    let mut answer = ReadAnswer {
        file_size: if is_at_end { total } else { size.max(total) },
        sha256: counts.then(|| hex_digest(hasher)),
        ..ReadAnswer::default()
    };
    if let Some(media_type) = binary_type {
        answer.is_binary = true;
        answer.media_type = Some(media_type.to_owned());
        answer.note = Some(format!(
            "A binary file ({media_type}), its content is not shown; use bash to look into it, or raw for its bytes."
        ));
        return Ok(answer);
    }
    let page = pager.finish(is_at_end, path)?;
    answer.total_lines = page.total_lines.filter(|_| counts);
    answer.truncated = page.next_offset.is_some();
    answer.next_offset = page.next_offset;
    answer.content = page.content;
    answer.note = page.note;
    if !is_at_end && !answer.truncated {
        answer.truncated = true;
        answer.note = Some(format!("Only the first {total} bytes were read; use bash for the rest."));
    }
    Ok(answer)
}

/// Reads until at least `least` bytes are there, or the end.
fn fill(file: &mut File, buffer: &mut [u8], least: usize, is_at_end: &mut bool) -> std::io::Result<usize> {
    let mut filled = 0;
    while filled < least {
        match read_some(file, &mut buffer[filled..])? {
            0 => {
                *is_at_end = true;
                break;
            }
            read => filled += read,
        }
    }
    Ok(filled)
}

/// Reads once, again after a signal. A file that would block ends here.
fn read_some(file: &mut File, buffer: &mut [u8]) -> std::io::Result<usize> {
    loop {
        match file.read(buffer) {
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(0),
            result => return result,
        }
    }
}
