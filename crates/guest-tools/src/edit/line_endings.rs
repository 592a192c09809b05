//! Line ends: texts of requests have `\n`, a file may have `\r\n`, and an edit keeps those of the file.

use std::borrow::Cow;
use std::ops::Range;

use memchr::{memchr, memmem, memrchr};

/// The text with `\r\n` in place of every `\n` that has no `\r` before it.
pub(super) fn to_crlf(text: &[u8]) -> Cow<'_, [u8]> {
    if memchr(b'\n', text).is_none() {
        return Cow::Borrowed(text);
    }
    let mut converted = Vec::with_capacity(text.len() + text.len() / 16 + 1);
    for line in text.split_inclusive(|&byte| byte == b'\n') {
        match line.strip_suffix(b"\n") {
            Some(start) if !start.ends_with(b"\r") => {
                converted.extend_from_slice(start);
                converted.extend_from_slice(b"\r\n");
            }
            _ => converted.extend_from_slice(line),
        }
    }
    Cow::Owned(converted)
}

/// The text with `\n` in place of every `\r\n`.
pub(super) fn to_lf(text: &[u8]) -> Cow<'_, [u8]> {
    if !has_crlf(text) {
        return Cow::Borrowed(text);
    }
    let mut converted = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = memmem::find(rest, b"\r\n") {
        converted.extend_from_slice(&rest[..at]);
        converted.push(b'\n');
        rest = &rest[at + 2..];
    }
    converted.extend_from_slice(rest);
    Cow::Owned(converted)
}

pub(super) fn has_crlf(text: &[u8]) -> bool {
    memmem::find(text, b"\r\n").is_some()
}

/// Finds the line end that is used at a match: the first one in it, else the next one behind it, else the last one before it.
/// Matches must be given in order, so that all of them together cost one pass.
pub(super) struct LocalLineEnds<'a> {
    content: &'a [u8],
    /// The first line feed at or behind the last match; the length when there is none.
    next: Option<usize>,
}

impl<'a> LocalLineEnds<'a> {
    pub(super) fn new(content: &'a [u8]) -> Self {
        Self { content, next: None }
    }

    pub(super) fn is_crlf(&mut self, range: &Range<usize>) -> bool {
        let next = match self.next {
            Some(next) if next >= range.start => next,
            _ => {
                memchr(b'\n', &self.content[range.start..]).map_or(self.content.len(), |at| range.start + at)
            }
        };
        self.next = Some(next);
        let line_feed =
            if next < self.content.len() { Some(next) } else { memrchr(b'\n', &self.content[..range.start]) };
        line_feed.is_some_and(|at| at > 0 && self.content[at - 1] == b'\r')
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_ends_are_converted_and_lone_ones_stay() {
        assert_eq!(to_crlf(b"a\nb\r\nc\r").as_ref(), b"a\r\nb\r\nc\r");
        assert_eq!(to_lf(b"a\r\n\r\r\nb\n").as_ref(), b"a\n\r\nb\n");
        assert_eq!(to_crlf(b"").as_ref(), b"");
    }

    #[test]
    fn the_nearest_line_end_decides() {
        let content = b"a\r\nb\nc";
        let mut ends = LocalLineEnds::new(content);
        assert!(ends.is_crlf(&(0..1)));
        assert!(!ends.is_crlf(&(3..4)));
        assert!(!ends.is_crlf(&(5..6)));
        assert!(!LocalLineEnds::new(b"abc").is_crlf(&(0..1)));
    }
}
