//! Cuts a stream of bytes into the numbered lines of one page, and counts the rest.

use std::fmt::Write as _;
use std::path::Path;

use emergent_wire::tools::{MAX_LINE_CHARS, MAX_READ_BYTES};
use emergent_wire::{ErrorCode, ErrorDetail};
use memchr::{memchr, memchr_iter};

use crate::text::{LINE_HEAD_BYTES, line_head, without_line_end};

/// The page so far. Bytes are pushed in order; the state is the line that the next byte belongs to.
pub(super) struct Pager {
    offset: u64,
    limit: u64,
    /// The number of the line that the next byte belongs to.
    line: u64,
    /// The beginning of that line, when it is on the page.
    head: Vec<u8>,
    /// All bytes, and all characters (about), of that line.
    line_bytes: u64,
    line_chars: u64,
    /// Whether the last byte was `\r`: it belongs to the line's end if `\n` follows.
    ends_in_return: bool,
    content: String,
    shown: u64,
    /// The first line behind the page, once the page is full.
    next: Option<u64>,
    /// The page is full because of its size, not its number of lines.
    is_cut_by_size: bool,
}

/// A finished page.
pub(super) struct Page {
    pub(super) content: String,
    /// All lines, when the end was seen.
    pub(super) total_lines: Option<u64>,
    pub(super) next_offset: Option<u64>,
    pub(super) note: Option<String>,
}

impl Pager {
    pub(super) fn new(offset: u64, limit: u64) -> Self {
        Self {
            offset,
            limit,
            line: 1,
            head: Vec::new(),
            line_bytes: 0,
            line_chars: 0,
            ends_in_return: false,
            content: String::new(),
            shown: 0,
            next: None,
            is_cut_by_size: false,
        }
    }

    /// Takes the next bytes of the file.
    pub(super) fn push(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            if self.next.is_some() {
                return self.count(bytes);
            }
            let end = memchr(b'\n', bytes).map(|at| at + 1);
            let (piece, rest) = bytes.split_at(end.unwrap_or(bytes.len()));
            self.take(piece);
            if end.is_some() {
                self.end_line();
            }
            bytes = rest;
        }
    }

    /// Whether the page is full and a line behind it has begun: nothing more needs to be read for the page.
    pub(super) fn knows_next_page(&self) -> bool {
        self.next.is_some_and(|next| self.line > next || self.line_bytes > 0)
    }

    /// After the page only lines are counted.
    fn count(&mut self, bytes: &[u8]) {
        self.line += memchr_iter(b'\n', bytes).count() as u64;
        self.line_bytes = if bytes.ends_with(b"\n") { 0 } else { 1 };
    }

    /// Takes a piece of the current line, with its end if the piece has it.
    fn take(&mut self, piece: &[u8]) {
        self.line_bytes += piece.len() as u64;
        if self.line < self.offset {
            return;
        }
        // One byte more than shown, so that a `\r` at the very end is seen.
        let room = (LINE_HEAD_BYTES + 2).saturating_sub(self.head.len());
        self.head.extend_from_slice(&piece[..piece.len().min(room)]);
        let text = piece.strip_suffix(b"\n").unwrap_or(piece);
        self.line_chars += text.iter().filter(|&&byte| byte & 0xC0 != 0x80).count() as u64;
        self.ends_in_return = text.last().map_or(self.ends_in_return, |&byte| byte == b'\r');
        if text.len() < piece.len() && self.ends_in_return {
            self.line_chars -= 1;
        }
    }

    fn end_line(&mut self) {
        if self.line >= self.offset && self.next.is_none() {
            self.show_line();
        }
        self.line += 1;
        self.line_bytes = 0;
        self.head.clear();
        self.line_chars = 0;
        self.ends_in_return = false;
        if self.shown == self.limit && self.next.is_none() {
            self.next = Some(self.line);
        }
    }

    fn show_line(&mut self) {
        let (mut text, cut) = line_head(without_line_end(&self.head));
        if cut {
            let _ = write!(text, " … (line cut at {MAX_LINE_CHARS} of {} characters)", self.line_chars);
        }
        let number = self.line.to_string();
        if self.content.len() + number.len() + 2 + text.len() + 1 > MAX_READ_BYTES {
            self.next = Some(self.line);
            self.is_cut_by_size = true;
            return;
        }
        if self.shown > 0 {
            self.content.push('\n');
        }
        self.content.push_str(&number);
        self.content.push_str(": ");
        self.content.push_str(&text);
        self.shown += 1;
    }

    /// Ends the page. An offset behind the end of the file is a failure, except the first line of an empty file.
    pub(super) fn finish(mut self, is_at_end: bool, path: &Path) -> Result<Page, ErrorDetail> {
        if self.line_bytes > 0 {
            self.end_line();
        }
        let lines = self.line - 1;
        let total_lines = is_at_end.then_some(lines);
        if self.shown == 0 && self.offset > 1 {
            return Err(ErrorDetail::new(
                ErrorCode::Unacceptable,
                format!(
                    "offset {} is behind the end of {}: the file has {lines} lines; give an offset from 1 to {}",
                    self.offset,
                    path.display(),
                    lines.max(1)
                ),
            )
            .with_details(serde_json::json!({ "total_lines": lines })));
        }
        let next_offset = self.next.filter(|&next| !is_at_end || next <= lines);
        let note = match next_offset {
            Some(next) => {
                let of = total_lines.map_or(String::new(), |total| format!(" of {total}"));
                let why = if self.is_cut_by_size { " (an answer holds 50 KiB)" } else { "" };
                Some(format!(
                    "Lines {} to {}{of} are shown{why}. Read on with offset {next}.",
                    self.offset,
                    next - 1
                ))
            }
            None if lines == 0 => Some("The file is empty.".to_owned()),
            None => None,
        };
        Ok(Page { content: self.content, total_lines, next_offset, note })
    }
}
