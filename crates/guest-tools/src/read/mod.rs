//! Reads a file as numbered lines, or lists a directory.
//!
//! A file is read once, through a fixed buffer: the same pass numbers the page's lines, counts all lines and
//! computes the SHA-256. Over 256 MiB only as much is read as the page needs, and count and hash are null.
//!
//! What is shown: `\r\n` and `\n` both end a line and are not shown, a lone `\r` stays; a byte order mark is not
//! shown; bytes that are not UTF-8 become U+FFFD. A line over 2000 characters is cut and says so. Following
//! `next_offset` gives every line exactly once.

mod directory;
mod pager;
mod similar;

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use emergent_wire::tools::{DEFAULT_READ_LINES, MAX_FILE_BYTES, ReadAnswer, ReadRequest};
use emergent_wire::{ErrorCode, ErrorDetail};
use rustix::fs::{FileType, Stat, fstat};
use rustix::io::Errno;
use sha2::{Digest, Sha256};

use crate::Context;
use crate::error::{check_cancel, io_error, os_error, wrong_type};
use crate::location::Location;
use crate::read::pager::Pager;
use crate::text::{BOM, HEAD_BYTES, hex_digest, is_binary, media_type};

pub(crate) use similar::not_found;

/// Larger files are neither counted nor hashed.
const MAX_COUNTED_BYTES: u64 = 256 << 20;
const BUFFER_BYTES: usize = 128 * 1024;

/// A file that was opened to be handed out as it is.
#[derive(Debug)]
pub struct RawFile {
    /// The open file, at its beginning.
    pub file: File,
    /// Its size when it was opened. Files of `/proc` say 0 and have more.
    pub size: u64,
    /// What kind of file it is.
    pub media_type: String,
}

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

/// Opens a file whose exact bytes the caller hands on. Refuses files over 64 MiB.
pub fn open_raw(context: &Context, path: &str) -> Result<RawFile, ErrorDetail> {
    let (location, file, stat) = open(context, path)?;
    let size = size_of(&stat);
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
    if size > MAX_FILE_BYTES {
        return Err(ErrorDetail::new(
            ErrorCode::TooLarge,
            format!(
                "{} has {size} bytes: raw gives at most {MAX_FILE_BYTES}; read pages of it, or split it with bash",
                location.path.display()
            ),
        ));
    }
    let mut head = vec![0; HEAD_BYTES];
    let read = file.read_at(&mut head, 0).map_err(|error| io_error("read", &location.path, &error))?;
    Ok(RawFile { file, size, media_type: media_type(&head[..read]).to_owned() })
}

fn open(context: &Context, path: &str) -> Result<(Location, File, Stat), ErrorDetail> {
    let path = context.request_path("file_path", path)?;
    let location = context.locate(&path)?;
    let file = location.open().map_err(|errno| match errno {
        Errno::NOENT => not_found(&location),
        other => os_error("read", &location.path, other),
    })?;
    let stat = fstat(&file).map_err(|errno| os_error("read", &location.path, errno))?;
    Ok((location, file, stat))
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
    let mut buffer =
        vec![0; BUFFER_BYTES.min(usize::try_from(size).unwrap_or(BUFFER_BYTES).max(HEAD_BYTES) + 1)];
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
        check_cancel(cancel)?;
        filled = fill(&mut file, &mut buffer, 1, &mut is_at_end).map_err(fail)?;
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
    Ok(answer)
}

/// Reads until at least `least` bytes are there, or the end. A file that has nothing to say yet ends here.
fn fill(file: &mut File, buffer: &mut [u8], least: usize, is_at_end: &mut bool) -> std::io::Result<usize> {
    let mut filled = 0;
    while filled < least {
        match file.read(&mut buffer[filled..]) {
            Ok(0) => {
                *is_at_end = true;
                break;
            }
            Ok(read) => filled += read,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                *is_at_end = true;
                break;
            }
            Err(error) => return Err(error),
        }
    }
    Ok(filled)
}
