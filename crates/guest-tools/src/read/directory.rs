//! Lists a directory, sorted, one entry a line with `/` after directories (and links to directories).
//!
//! Only the entries up to the end of the page are kept, so that a directory of a million files costs no more
//! memory than the page that is asked for needs.

use std::collections::BinaryHeap;
use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::sync::atomic::AtomicBool;

use emergent_wire::tools::{MAX_READ_BYTES, ReadAnswer};
use emergent_wire::{ErrorCode, ErrorDetail};
use rustix::fs::{Dir, FileType};

use crate::Context;
use crate::error::{check_cancel, os_error};
use crate::location::Location;

/// The most entries of an answer: an entry takes at least two bytes.
const MAX_PAGE_ENTRIES: u64 = (MAX_READ_BYTES / 2) as u64;

/// The kind of an entry.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Directory,
    File,
    Undecided,
}

impl Kind {
    fn of(file_type: FileType) -> Self {
        match file_type {
            FileType::Directory => Kind::Directory,
            FileType::Symlink | FileType::Unknown => Kind::Undecided,
            _ => Kind::File,
        }
    }
}

pub(super) fn list(
    context: &Context,
    location: &Location,
    directory: OwnedFd,
    offset: u64,
    limit: u64,
    cancel: &AtomicBool,
) -> Result<ReadAnswer, ErrorDetail> {
    let fail = |errno| os_error("list", &location.path, errno);
    let skipped = offset - 1;
    let kept = usize::try_from(skipped.saturating_add(limit.min(MAX_PAGE_ENTRIES))).unwrap_or(usize::MAX);
    let mut smallest: BinaryHeap<(Vec<u8>, Kind)> = BinaryHeap::new();
    let mut total = 0_u64;
    for entry in Dir::new(directory).map_err(fail)? {
        let entry = entry.map_err(fail)?;
        let name = entry.file_name().to_bytes();
        if name == b"." || name == b".." {
            continue;
        }
        total += 1;
        if total.is_multiple_of(1024) {
            check_cancel(cancel)?;
        }
        if smallest.len() < kept {
            smallest.push((name.to_vec(), Kind::of(entry.file_type())));
        } else if let Some(mut largest) = smallest.peek_mut()
            && name < largest.0.as_slice()
        {
            *largest = (name.to_vec(), Kind::of(entry.file_type()));
        }
    }
    if skipped >= total && skipped > 0 {
        return Err(ErrorDetail::new(
            ErrorCode::Unacceptable,
            format!(
                "offset {offset} is behind the last entry of {}: the directory has {total} entries",
                location.path.display()
            ),
        )
        .with_details(serde_json::json!({ "total_lines": total })));
    }
    let mut content = String::new();
    let mut next = offset;
    let sorted = smallest.into_sorted_vec();
    for (name, kind) in sorted.into_iter().skip(usize::try_from(skipped).unwrap_or(usize::MAX)) {
        check_cancel(cancel)?;
        let mut entry = String::from_utf8_lossy(&name).into_owned();
        if is_directory(context, location, &name, kind) {
            entry.push('/');
        }
        if content.len() + entry.len() + 1 > MAX_READ_BYTES {
            break;
        }
        if next > offset {
            content.push('\n');
        }
        content.push_str(&entry);
        next += 1;
    }
    let next_offset = (next <= total).then_some(next);
    let note = match next_offset {
        Some(next) => Some(format!(
            "Entries {offset} to {} of {total} are shown. Read on with offset {next}.",
            next - 1
        )),
        None if total == 0 => Some("The directory is empty.".to_owned()),
        None => None,
    };
    Ok(ReadAnswer {
        content,
        total_lines: Some(total),
        is_dir: true,
        truncated: next_offset.is_some(),
        next_offset,
        note,
        ..ReadAnswer::default()
    })
}

/// Whether an entry is a directory or leads to one. Only links cost a system call, and entries whose type the file system does not
/// list.
fn is_directory(context: &Context, location: &Location, name: &[u8], kind: Kind) -> bool {
    match kind {
        Kind::Directory => true,
        Kind::Undecided => context
            .locate(&context.absolute(&location.path.join(OsStr::from_bytes(name))))
            .ok()
            .and_then(|target| target.stat().ok())
            .is_some_and(|stat| FileType::from_raw_mode(stat.st_mode).is_dir()),
        Kind::File => false,
    }
}
