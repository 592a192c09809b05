//! White space and escapes, which the tolerant matchers ignore.

use std::borrow::Cow;

/// The text with one space in place of every run of white space.
pub(super) fn normalize(text: &[u8]) -> Vec<u8> {
    let mut normalized = Vec::with_capacity(text.len());
    let mut in_blank = false;
    for &byte in text {
        let is_blank = byte.is_ascii_whitespace();
        if !is_blank {
            normalized.push(byte);
        } else if !in_blank {
            normalized.push(b' ');
        }
        in_blank = is_blank;
    }
    normalized
}

/// Walks along a text and its normalised form together.
#[derive(Clone)]
pub(super) struct OriginalOffsets<'a> {
    text: &'a [u8],
    original: usize,
    normalized: usize,
}

impl<'a> OriginalOffsets<'a> {
    pub(super) fn new(text: &'a [u8]) -> Self {
        Self { text, original: 0, normalized: 0 }
    }

    /// The place in the text of byte `normalized` of the normalised form. Calls must be in ascending order.
    pub(super) fn original(&mut self, normalized: usize) -> usize {
        while self.normalized < normalized {
            let was_blank = self.text[self.original].is_ascii_whitespace();
            self.original += 1;
            while was_blank && self.text.get(self.original).is_some_and(u8::is_ascii_whitespace) {
                self.original += 1;
            }
            self.normalized += 1;
        }
        self.original
    }
}

/// Moves left over white space, across at most `line_feeds` line ends.
pub(super) fn extend_left(text: &[u8], mut start: usize, mut line_feeds: usize) -> usize {
    while start > 0 && text[start - 1].is_ascii_whitespace() {
        if text[start - 1] == b'\n' {
            if line_feeds == 0 {
                break;
            }
            line_feeds -= 1;
        }
        start -= 1;
    }
    start
}

/// Moves right over white space, across at most `line_feeds` line ends; never into the middle of a `\r\n`.
pub(super) fn extend_right(text: &[u8], mut end: usize, mut line_feeds: usize) -> usize {
    while end < text.len() && text[end].is_ascii_whitespace() {
        let is_line_end = text[end] == b'\n' || text[end..].starts_with(b"\r\n");
        if is_line_end {
            if line_feeds == 0 {
                break;
            }
            line_feeds -= 1;
            end += usize::from(text[end] == b'\r');
        }
        end += 1;
    }
    end
}

/// The text with the characters that its escapes stand for; borrowed when there are none.
pub(super) fn unescape(text: &[u8]) -> Cow<'_, [u8]> {
    let mut plain = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = memchr::memchr(b'\\', rest) {
        let character = match rest.get(at + 1) {
            Some(b'n') => b'\n',
            Some(b't') => b'\t',
            Some(b'r') => b'\r',
            Some(&byte @ (b'\'' | b'"' | b'`' | b'\\' | b'$' | b'\n')) => byte,
            _ => {
                plain.extend_from_slice(&rest[..=at]);
                rest = &rest[at + 1..];
                continue;
            }
        };
        plain.extend_from_slice(&rest[..at]);
        plain.push(character);
        rest = &rest[at + 2..];
    }
    plain.extend_from_slice(rest);
    if plain == text { Cow::Borrowed(text) } else { Cow::Owned(plain) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn normalised_text_leads_back_to_the_file() {
        let text = b"  a\t\n b c";
        assert_eq!(normalize(text), b" a b c");
        let mut offsets = OriginalOffsets::new(text);
        let all: Vec<usize> = (0..6).map(|at| offsets.original(at)).collect();
        assert_eq!(all, [0, 2, 3, 6, 7, 8]);
    }

    #[test]
    fn white_space_is_taken_up_to_the_line_end() {
        let text = b"a \r\n\t b \r\n c";
        assert_eq!(extend_left(text, 6, 0), 4);
        assert_eq!(extend_left(text, 6, 1), 1);
        assert_eq!(extend_right(text, 7, 0), 8);
        assert_eq!(extend_right(text, 7, 1), 11);
    }

    #[test]
    fn escapes_become_characters() {
        assert_eq!(unescape(br#"a\n\"b\\c\d"#).as_ref(), b"a\n\"b\\c\\d");
        assert!(matches!(unescape(br"a\d"), Cow::Borrowed(_)));
    }
}
