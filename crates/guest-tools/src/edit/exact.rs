//! Finds a text in a file byte by byte, with either kind of line ends.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::atomic::AtomicBool;

use emergent_wire::ErrorDetail;
use memchr::memmem::Finder;

use super::line_endings::{has_crlf, to_crlf, to_lf};
use crate::error::check_cancel;

/// The places of the text.
#[derive(Debug, Default)]
pub(super) struct Places {
    /// In order, not overlapping.
    pub(super) ranges: Vec<Range<usize>>,
    /// The conversion of the line ends of the new text.
    pub(super) line_ends: NewLineEnds,
}

/// A conversion of the new text's line ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum NewLineEnds {
    /// They become those of the place: the caller wrote no `\r`.
    #[default]
    Local,
    /// They stay: the caller wrote `\r` and the file has it.
    AsGiven,
    /// They become `\n`: the caller wrote `\r\n` but the file has `\n`.
    Lf,
}

/// The number of places to find.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wanted {
    /// Stop after this number.
    pub(super) most: usize,
    /// Count places that overlap as several: for a text that must be unique.
    pub(super) overlapping: bool,
}

/// Finds `old` as it is; its line ends match those of the file if the caller did not write `\r`.
pub(super) fn find(
    content: &[u8],
    old: &[u8],
    wanted: Wanted,
    cancel: &AtomicBool,
) -> Result<Places, ErrorDetail> {
    if old.contains(&b'\r') {
        let ranges = find_form(content, old, wanted, cancel)?;
        let lf = to_lf(old);
        if !ranges.is_empty() || matches!(lf, Cow::Borrowed(_)) {
            return Ok(Places { ranges, line_ends: NewLineEnds::AsGiven });
        }
        return Ok(Places { ranges: find_form(content, &lf, wanted, cancel)?, line_ends: NewLineEnds::Lf });
    }
    let mut ranges = find_form(content, old, wanted, cancel)?;
    if old.contains(&b'\n') && has_crlf(content) {
        // A place that begins in the middle of a `\r\n` includes the `\r`: it must not stay alone.
        if old.starts_with(b"\n") {
            for range in &mut ranges {
                range.start -= usize::from(range.start > 0 && content[range.start - 1] == b'\r');
            }
        }
        ranges.extend(find_form(content, &to_crlf(old), wanted, cancel)?);
        ranges.sort_by_key(|range| range.start);
        ranges.dedup_by_key(|range| range.start);
        if !wanted.overlapping {
            let mut end = 0;
            ranges.retain(|range| {
                let is_free = range.start >= end;
                if is_free {
                    end = range.end;
                }
                is_free
            });
        }
        ranges.truncate(wanted.most);
    }
    Ok(Places { ranges, line_ends: NewLineEnds::Local })
}

fn find_form(
    content: &[u8],
    old: &[u8],
    wanted: Wanted,
    cancel: &AtomicBool,
) -> Result<Vec<Range<usize>>, ErrorDetail> {
    let finder = Finder::new(old);
    let mut ranges = Vec::new();
    let mut from = 0;
    while ranges.len() < wanted.most {
        if ranges.len() % 1024 == 0 {
            check_cancel(cancel)?;
        }
        let Some(at) = finder.find(&content[from..]) else {
            break;
        };
        let start = from + at;
        ranges.push(start..start + old.len());
        from = if wanted.overlapping { start + 1 } else { start + old.len() };
    }
    Ok(ranges)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ranges(content: &[u8], old: &[u8], overlapping: bool) -> Vec<Range<usize>> {
        let wanted = Wanted { most: 10, overlapping };
        find(content, old, wanted, &AtomicBool::new(false)).unwrap().ranges
    }

    #[test]
    fn line_feeds_match_both_line_ends() {
        assert_eq!(ranges(b"a\r\nb\r\n", b"a\nb\n", true), vec![0..6]);
        assert_eq!(ranges(b"a\r\nb a\nb", b"a\nb", true), vec![0..4, 5..8]);
        assert_eq!(ranges(b"x\r\nfoo", b"\nfoo", true), vec![1..6]);
        assert_eq!(ranges(b"\n\na\r\n\na", b"\n\na", true), vec![0..3, 3..7]);
        assert_eq!(ranges(b"a\nb\n", b"a\r\nb", true), vec![0..3]);
    }

    #[test]
    fn overlapping_places_count_when_the_text_must_be_unique() {
        assert_eq!(ranges(b"aaa", b"aa", true), vec![0..2, 1..3]);
        assert_eq!(ranges(b"aaaa", b"aa", false), vec![0..2, 2..4]);
    }
}
