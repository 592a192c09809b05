//! Replaces a piece of text in a file and nothing else.
//!
//! ```text
//! read the file ─► find old_string ─► write a new file ─► is the old one unchanged? ─► rename
//!       ▲                                                        │ no
//!       └────────────────────────────────────────────────────────┘
//! ```
//!
//! Edits work on bytes: a byte outside a match is never changed, also when the file is not UTF-8. Line ends of the new text
//! become those of the replaced place, unless the caller wrote `\r`. A file with NUL bytes or over 4 MiB is searched for the
//! exact text only. An edit never overwrites a concurrent change: it starts again with the new content.

mod diff;
mod exact;
mod line_endings;
mod lines;
mod matchers;
mod plan;
mod similarity;
mod white_space;

use std::io::Read;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use emergent_wire::tools::{EditAnswer, EditRequest, MAX_FILE_BYTES};
use emergent_wire::{ErrorCode, ErrorDetail, Validate as _};
use rustix::fs::{FileType, Stat};
use rustix::io::Errno;
use sha2::{Digest, Sha256};

use crate::Context;
use crate::context::RequestPath;
use crate::error::{check_cancel, io_error, wrong_type};
use crate::location::Location;
use crate::read::{not_found, open_failure, size_of, special_file};
use crate::text::hex_digest;
use crate::write::{FileWriter, Version};

use diff::Replacement;
use plan::Plan;

/// The number of attempts when the file changes during the edit.
const MAX_ATTEMPTS: u32 = 100;

/// Edits a file.
pub fn edit(
    context: &Context,
    request: &EditRequest,
    cancel: &AtomicBool,
) -> Result<EditAnswer, ErrorDetail> {
    request.validate()?;
    if request.old_string == request.new_string {
        return Err(ErrorDetail::new(
            ErrorCode::BadRequest,
            "old_string and new_string are identical: there is nothing to change",
        ));
    }
    let path = context.request_path("file_path", &request.file_path)?;
    for _ in 0..MAX_ATTEMPTS {
        check_cancel(cancel)?;
        let answer = if request.old_string.is_empty() {
            create(context, request, &path)?
        } else {
            replace(context, request, &path, cancel)?
        };
        if let Some(answer) = answer {
            return Ok(answer);
        }
    }
    Err(ErrorDetail::new(
        ErrorCode::Conflict,
        format!(
            "{} is being changed by someone else all the time: nothing was edited; retry when it is quiet",
            path.shown.display()
        ),
    ))
}

/// Creates a file with `new_string`. `None`: another process has just created it.
fn create(
    context: &Context,
    request: &EditRequest,
    path: &RequestPath,
) -> Result<Option<EditAnswer>, ErrorDetail> {
    let (location, stat) = context.locate_for_write(path, true)?;
    if let Some(stat) = &stat {
        check_file(&location.path, stat)?;
        if stat.st_size > 0 {
            return Err(ErrorDetail::new(
                ErrorCode::Conflict,
                format!(
                    "{} exists: an empty old_string only makes new files; give the text to replace, or use write",
                    location.path.display()
                ),
            ));
        }
    }
    if request.expected_sha256.is_some() {
        check_expected(request, stat.as_ref().map(|_| [].as_slice()), &location.path)?;
    }
    let new = request.new_string.as_bytes();
    let made = Replacement { range: 0..0, text: new };
    let diff = diff::unified(&location.path, b"", &[made]);
    let version = stat.as_ref().map(Version::of);
    let mut writer = FileWriter::begin(location, stat)?;
    writer.push(new)?;
    Ok(writer.commit_over(version)?.map(|written| EditAnswer {
        success: true,
        lines_changed: diff.lines_changed,
        replacements: 1,
        diff: diff.text,
        matched_by: "new_file".to_owned(),
        sha256: written.sha256,
    }))
}

/// Replaces text in an existing file. `None`: another process has changed the file meanwhile.
fn replace(
    context: &Context,
    request: &EditRequest,
    path: &RequestPath,
    cancel: &AtomicBool,
) -> Result<Option<EditAnswer>, ErrorDetail> {
    let missing = || match context.locate(path) {
        Ok(location) => not_found(&location),
        Err(error) => error,
    };
    let (location, stat) = match context.locate_for_write(path, false) {
        Ok((location, Some(stat))) => (location, stat),
        Ok((_, None)) => return Err(missing()),
        Err(error) if error.code == ErrorCode::FileNotFound => return Err(missing()),
        Err(error) => return Err(error),
    };
    // Taken before the file is opened and compared at the end, so that every change in between is found.
    check_file(&location.path, &stat)?;
    let file = location.open().map_err(|errno| open_failure("edit", &location, errno))?;
    let content = read_whole(file, &stat, &location.path)?;
    if request.expected_sha256.is_some() {
        check_expected(request, Some(&content), &location.path)?;
    }
    let plan = Plan::make(request, &content, &location.path, cancel)?;
    let replacements = plan.replacements(&content);
    let diff = diff::unified(&location.path, &content, &replacements);
    let answer = |sha256| EditAnswer {
        success: true,
        lines_changed: diff.lines_changed,
        replacements: replacements.len() as u64,
        diff: diff.text,
        matched_by: plan.matched_by.to_owned(),
        sha256,
    };
    if replacements.iter().all(|r| &content[r.range.clone()] == r.text) {
        let mut hasher = Sha256::new();
        hasher.update(&content);
        return Ok(Some(answer(hex_digest(hasher))));
    }
    let written = write_replaced(location, stat, &content, &replacements, cancel)?;
    Ok(written.map(answer))
}

/// Writes the content with the replacements made. Gives the new SHA-256, or nothing if the file changed meanwhile.
fn write_replaced(
    location: Location,
    stat: Stat,
    content: &[u8],
    replacements: &[Replacement<'_>],
    cancel: &AtomicBool,
) -> Result<Option<String>, ErrorDetail> {
    let removed: usize = replacements.iter().map(|r| r.range.len()).sum();
    let added: usize = replacements.iter().map(|r| r.text.len()).sum();
    let size = (content.len() - removed + added) as u64;
    if size > MAX_FILE_BYTES {
        return Err(too_large(&location.path, size, "would then have"));
    }
    let version = Version::of(&stat);
    let mut writer = FileWriter::begin(location, Some(stat))?;
    let mut from = 0;
    for (index, replacement) in replacements.iter().enumerate() {
        if index % 1024 == 0 {
            check_cancel(cancel)?;
        }
        writer.push(&content[from..replacement.range.start])?;
        writer.push(replacement.text)?;
        from = replacement.range.end;
    }
    writer.push(&content[from..])?;
    Ok(writer.commit_over(Some(version))?.map(|written| written.sha256))
}

fn check_file(path: &Path, stat: &Stat) -> Result<(), ErrorDetail> {
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => Ok(()),
        FileType::Directory => Err(wrong_type(path, "a directory", "give the path of a file")),
        other => Err(special_file(path, other)),
    }
}

/// Refuses a file that has another version than the caller's. Without content there is no file.
fn check_expected(request: &EditRequest, content: Option<&[u8]>, path: &Path) -> Result<(), ErrorDetail> {
    let current = content.map(|content| {
        let mut hasher = Sha256::new();
        hasher.update(content);
        hex_digest(hasher)
    });
    let expected = request.expected_sha256.as_deref().unwrap_or_default();
    if current.as_deref().is_some_and(|current| current.eq_ignore_ascii_case(expected)) {
        return Ok(());
    }
    Err(ErrorDetail::new(
        ErrorCode::StaleFile,
        format!(
            "{} is not the version with SHA-256 {expected}: it was changed since; read it again and redo the edit",
            path.display()
        ),
    )
    .with_details(serde_json::json!({ "sha256": current })))
}

fn read_whole(file: std::fs::File, stat: &Stat, path: &Path) -> Result<Vec<u8>, ErrorDetail> {
    let size = size_of(stat);
    if size > MAX_FILE_BYTES {
        return Err(too_large(path, size, "has"));
    }
    let mut content = Vec::with_capacity(usize::try_from(size).unwrap_or(0) + 1);
    match file.take(MAX_FILE_BYTES + 1).read_to_end(&mut content) {
        Ok(_) if content.len() as u64 > MAX_FILE_BYTES => Err(too_large(path, content.len() as u64, "has")),
        Ok(_) => Ok(content),
        Err(error) if Errno::from_io_error(&error) == Some(Errno::AGAIN) => Ok(content),
        Err(error) => Err(io_error("edit", path, &error)),
    }
}

fn too_large(path: &Path, size: u64, verb: &str) -> ErrorDetail {
    ErrorDetail::new(
        ErrorCode::TooLarge,
        format!(
            "{} {verb} {size} bytes: edit works on files up to {MAX_FILE_BYTES} bytes; use sed or a program with bash",
            path.display()
        ),
    )
}
