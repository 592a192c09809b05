//! Decides the places of the new text: the exact matcher is tried first, then the tolerant ones.

use std::borrow::Cow;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use emergent_wire::tools::EditRequest;
use emergent_wire::{ErrorCode, ErrorDetail};

use super::diff::Replacement;
use super::exact::{self, NewLineEnds, Wanted};
use super::line_endings::{LocalLineEnds, to_crlf, to_lf};
use super::matchers::{Found, Match, Search};
use crate::text::BOM;

/// Larger files are only searched for the exact text.
const MAX_TOLERANT_BYTES: usize = 4 << 20;
/// The most replacements of one edit.
const MAX_REPLACEMENTS: usize = 1_000_000;
/// The most places that an error names.
const MAX_NAMED_PLACES: usize = 10;

/// The places of an edit, and their new text.
#[derive(Debug)]
pub(super) struct Plan<'a> {
    pub(super) matched_by: &'static str,
    matches: Vec<Match>,
    /// The new text with the line ends that were asked for, and with `\r\n`.
    new: Cow<'a, [u8]>,
    new_crlf: Vec<u8>,
    line_ends: NewLineEnds,
}

impl<'a> Plan<'a> {
    /// Finds the text and decides whether it may be replaced.
    pub(super) fn make(
        request: &'a EditRequest,
        content: &[u8],
        path: &Path,
        cancel: &AtomicBool,
    ) -> Result<Self, ErrorDetail> {
        let old = request.old_string.as_bytes();
        let new = request.new_string.as_bytes();
        let wanted = Wanted {
            most: if request.replace_all { MAX_REPLACEMENTS + 1 } else { MAX_NAMED_PLACES + 1 },
            overlapping: !request.replace_all,
        };
        let places = exact::find(content, old, wanted, cancel)?;
        let line_ends = places.line_ends;
        let new_lf = if line_ends == NewLineEnds::Lf { to_lf(new) } else { Cow::Borrowed(new) };
        let matches: Vec<Match> =
            places.ranges.into_iter().map(|range| Match { range, new: 0..new_lf.len() }).collect();
        if !matches.is_empty() {
            let found = Found { matched_by: "exact", is_fuzzy: false, new: new_lf, matches };
            return Self::decide(found, line_ends, request, content, path);
        }
        if has_line_numbers(old) {
            return Err(ErrorDetail::new(
                ErrorCode::OldStringNotFound,
                "oldString not found in content: old_string begins its lines with the line numbers that read shows \
                 (`12: `). They are not part of the file: give old_string and new_string without them",
            ));
        }
        let is_searchable = content.len() <= MAX_TOLERANT_BYTES && memchr::memchr(0, content).is_none();
        if is_searchable && let Some(found) = find_tolerantly(request, content, wanted, cancel)? {
            return Self::decide(found, NewLineEnds::Local, request, content, path);
        }
        let why = if is_searchable {
            "read the file again and give the text exactly as it is there, with its white space"
        } else {
            "files with NUL bytes or over 4 MiB are only searched for exactly this text; look with grep how it reads"
        };
        Err(ErrorDetail::new(
            ErrorCode::OldStringNotFound,
            format!("oldString not found in content of {}: {why}", path.display()),
        ))
    }

    fn decide(
        found: Found<'a>,
        line_ends: NewLineEnds,
        request: &EditRequest,
        content: &[u8],
        path: &Path,
    ) -> Result<Self, ErrorDetail> {
        if !found.is_decided(request.replace_all) {
            return Err(multiple_matches(&found, content, path));
        }
        if found.matches.len() > MAX_REPLACEMENTS {
            return Err(ErrorDetail::new(
                ErrorCode::Unacceptable,
                format!(
                    "old_string occurs over {MAX_REPLACEMENTS} times in {}: use sed with bash for this",
                    path.display()
                ),
            ));
        }
        let new_crlf = to_crlf(&found.new).into_owned();
        Ok(Self { matched_by: found.matched_by, matches: found.matches, new: found.new, new_crlf, line_ends })
    }

    /// The replacements with the line ends of their places.
    pub(super) fn replacements(&self, content: &[u8]) -> Vec<Replacement<'_>> {
        let mut local = LocalLineEnds::new(content);
        let extra = |part: &[u8]| to_crlf(part).len() - part.len();
        // The parts that a match cuts off the new text are longer with `\r\n`.
        self.matches
            .iter()
            .map(|found| {
                let is_crlf = self.line_ends == NewLineEnds::Local && local.is_crlf(&found.range);
                let text = if is_crlf {
                    let start = found.new.start + extra(&self.new[..found.new.start]);
                    let end = self.new_crlf.len()
                        - (self.new.len() - found.new.end)
                        - extra(&self.new[found.new.end..]);
                    &self.new_crlf[start..end]
                } else {
                    &self.new[found.new.clone()]
                };
                Replacement { range: found.range.clone(), text }
            })
            .collect()
    }
}

/// Runs the tolerant matchers on the content without its byte order mark.
fn find_tolerantly<'a>(
    request: &'a EditRequest,
    content: &[u8],
    wanted: Wanted,
    cancel: &AtomicBool,
) -> Result<Option<Found<'a>>, ErrorDetail> {
    let old = request.old_string.as_bytes();
    let new = request.new_string.as_bytes();
    let bom = if content.starts_with(BOM) { BOM.len() } else { 0 };
    let strip = |text: &'a [u8]| {
        if old.starts_with(BOM) { text.strip_prefix(BOM).unwrap_or(text) } else { text }
    };
    let old_lf = to_lf(strip(old));
    let new_lf = if old.contains(&b'\r') { to_lf(strip(new)) } else { Cow::Borrowed(strip(new)) };
    let search = Search::new(&content[bom..], &old_lf, &new_lf, wanted, cancel);
    let found = search.run(request.replace_all)?;
    Ok(found.map(|found| Found {
        matched_by: found.matched_by,
        is_fuzzy: found.is_fuzzy,
        new: Cow::Owned(found.new.into_owned()),
        matches: found
            .matches
            .into_iter()
            .map(|m| Match { range: m.range.start + bom..m.range.end + bom, new: m.new })
            .collect(),
    }))
}

fn multiple_matches(found: &Found<'_>, content: &[u8], path: &Path) -> ErrorDetail {
    let lines: Vec<usize> = found
        .matches
        .iter()
        .take(MAX_NAMED_PLACES)
        .map(|m| memchr::memchr_iter(b'\n', &content[..m.range.start]).count() + 1)
        .collect();
    let named: Vec<String> = lines.iter().map(usize::to_string).collect();
    let more = if found.matches.len() > MAX_NAMED_PLACES { " and more" } else { "" };
    ErrorDetail::new(
        ErrorCode::MultipleMatches,
        format!(
            "Found multiple matches for oldString in {} (at lines {}{more}): provide more surrounding lines so that \
             it is unique, or set replace_all to change every one",
            path.display(),
            named.join(", ")
        ),
    )
    .with_details(serde_json::json!({ "lines": lines }))
}

/// Whether each line begins with a number and `: `, and the numbers go up by one: text copied out of read.
fn has_line_numbers(text: &[u8]) -> bool {
    let mut previous: Option<u64> = None;
    for line in text.trim_ascii().split(|&byte| byte == b'\n') {
        let line = line.trim_ascii_start();
        let digits = line.iter().take_while(|byte| byte.is_ascii_digit()).count();
        let Some(number) = std::str::from_utf8(&line[..digits]).ok().and_then(|n| n.parse::<u64>().ok())
        else {
            return false;
        };
        let rest = &line[digits..];
        let is_prefix = rest.starts_with(b": ") || rest.trim_ascii_end() == b":";
        if !is_prefix || previous.is_some_and(|previous| previous.checked_add(1) != Some(number)) {
            return false;
        }
        previous = Some(number);
    }
    previous.is_some()
}
