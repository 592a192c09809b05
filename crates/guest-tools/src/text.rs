//! The kind of a file's content, and the text of its lines in answers.

use emergent_wire::tools::MAX_LINE_CHARS;
use sha2::{Digest, Sha256};

/// The part of a file's beginning that decides whether it is binary.
pub(crate) const HEAD_BYTES: usize = 8 * 1024;
/// The most bytes of the first `MAX_LINE_CHARS` characters of a line, and one more.
pub(crate) const LINE_HEAD_BYTES: usize = (MAX_LINE_CHARS + 1) * 4;
/// The byte order mark of UTF-8.
pub(crate) const BOM: &[u8] = b"\xEF\xBB\xBF";

/// Whether a file that begins with `head` (at most [`HEAD_BYTES`]) is binary: it has a NUL byte, or over 30 % of
/// control characters (other than tab, line ends, form feed, backspace and escape), or is a PDF.
pub(crate) fn is_binary(head: &[u8]) -> bool {
    if head.starts_with(b"%PDF-") || memchr::memchr(0, head).is_some() {
        return true;
    }
    let controls = head
        .iter()
        .filter(|&&byte| (byte < 0x20 && !matches!(byte, b'\t'..=b'\r' | 0x08 | 0x1B)) || byte == 0x7F)
        .count();
    controls * 10 > head.len() * 3
}

/// The media type of a file that begins with `head`.
pub(crate) fn media_type(head: &[u8]) -> &'static str {
    const AT_START: &[(&[u8], &str)] = &[
        (b"\x89PNG\r\n\x1A\n", "image/png"),
        (b"\xFF\xD8\xFF", "image/jpeg"),
        (b"GIF87a", "image/gif"),
        (b"GIF89a", "image/gif"),
        (b"%PDF-", "application/pdf"),
        (b"PK\x03\x04", "application/zip"),
        (b"PK\x05\x06", "application/zip"),
        (b"\x1F\x8B", "application/gzip"),
        (b"BZh", "application/x-bzip2"),
        (b"\xFD7zXZ\0", "application/x-xz"),
        (b"\x28\xB5\x2F\xFD", "application/zstd"),
        (b"7z\xBC\xAF\x27\x1C", "application/x-7z-compressed"),
        (b"\x7FELF", "application/x-elf"),
        (b"SQLite format 3\0", "application/vnd.sqlite3"),
        (b"\0asm", "application/wasm"),
        (b"\xCA\xFE\xBA\xBE", "application/java-vm"),
        (b"!<arch>\n", "application/x-archive"),
        (b"OggS", "application/ogg"),
        (b"fLaC", "audio/flac"),
        (b"ID3", "audio/mpeg"),
        (b"\0\0\x01\0", "image/x-icon"),
        (b"II*\0", "image/tiff"),
        (b"MM\0*", "image/tiff"),
        (b"wOFF", "font/woff"),
        (b"wOF2", "font/woff2"),
        (b"\0\x01\0\0\0", "font/ttf"),
        (b"\xFF\xFE", "text/plain; charset=utf-16le"),
        (b"\xFE\xFF", "text/plain; charset=utf-16be"),
    ];
    let at = |offset: usize, magic: &[u8]| head.get(offset..).is_some_and(|rest| rest.starts_with(magic));
    if !is_binary(head) {
        // The head may end in the middle of a character.
        let is_utf8 = std::str::from_utf8(head).map_or_else(|error| error.error_len().is_none(), |_| true);
        return if is_utf8 { "text/plain; charset=utf-8" } else { "text/plain" };
    }
    if let Some((_, media_type)) = AT_START.iter().find(|(magic, _)| head.starts_with(magic)) {
        return media_type;
    }
    match head {
        _ if at(0, b"RIFF") && at(8, b"WEBP") => "image/webp",
        _ if at(0, b"RIFF") && at(8, b"WAVE") => "audio/wav",
        _ if at(4, b"ftyp") => "video/mp4",
        _ if at(257, b"ustar") => "application/x-tar",
        _ => "application/octet-stream",
    }
}

/// The first characters of a line, at most `MAX_LINE_CHARS`, and whether there are more. Bytes that are not UTF-8
/// become U+FFFD.
pub(crate) fn line_head(line: &[u8]) -> (String, bool) {
    let head = String::from_utf8_lossy(&line[..line.len().min(LINE_HEAD_BYTES)]);
    match head.char_indices().nth(MAX_LINE_CHARS) {
        Some((end, _)) => (head[..end].to_owned(), true),
        None => (head.into_owned(), false),
    }
}

/// A line as grep and the diff of edit show it: a line that is too long ends in `…` as its last character.
pub(crate) fn short_line(line: &[u8]) -> String {
    let (mut text, cut) = line_head(line);
    if cut {
        text.pop();
        text.push('…');
    }
    text
}

/// A line without its `\n` or `\r\n`. A `\r` alone is no line end.
pub(crate) fn without_line_end(line: &[u8]) -> &[u8] {
    match line.strip_suffix(b"\n") {
        Some(line) => line.strip_suffix(b"\r").unwrap_or(line),
        None => line,
    }
}

/// SHA-256 in hexadecimal digits.
pub(crate) fn hex_digest(hasher: Sha256) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let digest = hasher.finalize();
    let mut text = String::with_capacity(64);
    for byte in digest {
        text.push(char::from(DIGITS[usize::from(byte >> 4)]));
        text.push(char::from(DIGITS[usize::from(byte & 15)]));
    }
    text
}

/// Insertions, removals and changes that make one text out of the other.
pub(crate) fn edit_distance(a: &[u8], b: &[u8]) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.iter().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let changed = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = changed.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_bytes_decide_the_media_type() {
        assert!(!is_binary(b""));
        assert!(!is_binary("Zürich\r\n\t\x1B[1mbold\x0C".as_bytes()));
        assert!(!is_binary(b"caf\xE9 latin-1"));
        assert!(is_binary(b"a\0b"));
        assert!(is_binary(b"\x01\x02\x03abc"));
        assert_eq!(media_type(b"\x89PNG\r\n\x1A\n\0\0"), "image/png");
        assert_eq!(media_type(b"RIFF\0\0\0\0WEBPVP8 "), "image/webp");
        assert_eq!(media_type(b"%PDF-1.7\n"), "application/pdf");
        assert_eq!(media_type(b"\x7FELF\x02\x01\x01\0"), "application/x-elf");
        assert_eq!(media_type(b"\xFF\xFEa\0b\0"), "text/plain; charset=utf-16le");
        assert_eq!(media_type(b"\0\0\0\0"), "application/octet-stream");
        assert_eq!(media_type(b"hello \xC3"), "text/plain; charset=utf-8");
        assert_eq!(media_type(b"caf\xE9 x"), "text/plain");
        let mut tar = vec![b'a'; 257];
        tar.extend_from_slice(b"ustar\0");
        assert_eq!(media_type(&tar), "application/x-tar");
    }

    #[test]
    fn long_lines_are_cut_at_a_character() {
        let line = "ü".repeat(MAX_LINE_CHARS + 5);
        let short = short_line(line.as_bytes());
        assert_eq!(short.chars().count(), MAX_LINE_CHARS);
        assert!(short.ends_with("ü…"));
        assert_eq!(short_line(b"ab\xFF"), "ab\u{FFFD}");
        assert_eq!(edit_distance(b"kitten", b"sitting"), 3);
        assert_eq!(without_line_end(b"a\r\n"), b"a");
        assert_eq!(without_line_end(b"a\r"), b"a\r");
    }
}
