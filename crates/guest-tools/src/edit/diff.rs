//! The unified diff of an edit, made from the places that were replaced rather than by comparing two files.
//!
//! Replacements that touch the same lines are merged. Equal lines at both ends are removed, and a small rest is compared line by
//! line. So the diff costs one pass over the file.

use std::fmt::Write as _;
use std::ops::Range;
use std::path::Path;

use emergent_wire::tools::MAX_STREAM_BYTES;
use memchr::{memchr, memchr_iter, memrchr};

use crate::text::short_line;

/// Lines of context around a change.
const CONTEXT: usize = 3;
/// The most bytes a diff has.
const MAX_DIFF_BYTES: usize = MAX_STREAM_BYTES;
/// Changes with more bytes in their lines are counted but not shown.
const MAX_SHOWN_CHANGE_BYTES: usize = 1 << 20;
/// Changes with more pairs of lines are shown as all lines removed, all lines added.
const MAX_COMPARED_PAIRS: usize = 250_000;

/// A range of the old content, and its replacement.
#[derive(Debug)]
pub(super) struct Replacement<'a> {
    pub(super) range: Range<usize>,
    pub(super) text: &'a [u8],
}

/// A diff, and the lines added or removed, whichever is more in each place, summed.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Diff {
    pub(super) text: String,
    pub(super) lines_changed: u64,
}

/// Makes the diff. The replacements are in order and don't overlap.
pub(super) fn unified(path: &Path, content: &[u8], replacements: &[Replacement<'_>]) -> Diff {
    let mut writer = DiffWriter::new(path, content);
    let mut rest = replacements;
    while let Some(first) = rest.first() {
        let start = line_start(content, first.range.start);
        let mut end = line_end(content, first.range.end);
        let mut count = 1;
        while let Some(next) = rest.get(count).filter(|next| next.range.start < end) {
            if next.range.end > end {
                end = line_end(content, next.range.end);
            }
            count += 1;
        }
        change_lines(&mut writer, start..end, &rest[..count]);
        rest = &rest[count..];
    }
    writer.finish()
}

/// Handles the replacements inside the whole lines `lines`.
fn change_lines(writer: &mut DiffWriter<'_>, lines: Range<usize>, replacements: &[Replacement<'_>]) {
    let old = &writer.content[lines.clone()];
    let added: usize = replacements.iter().map(|r| r.text.len()).sum();
    if old.len() + added > MAX_SHOWN_CHANGE_BYTES {
        let feeds = |text: &[u8]| memchr_iter(b'\n', text).count();
        let old_count = count_lines(old);
        let new_feeds: usize = replacements.iter().map(|r| feeds(r.text)).sum();
        let old_feeds: usize = replacements.iter().map(|r| feeds(&writer.content[r.range.clone()])).sum();
        let new_count = (old_count + new_feeds).saturating_sub(old_feeds);
        writer.lines_changed += old_count.max(new_count) as u64;
        writer.has_omitted = true;
        return;
    }
    let mut new = Vec::with_capacity(old.len() + added);
    let mut from = lines.start;
    for replacement in replacements {
        new.extend_from_slice(&writer.content[from..replacement.range.start]);
        new.extend_from_slice(replacement.text);
        from = replacement.range.end;
    }
    new.extend_from_slice(&writer.content[from..lines.end]);
    compare(writer, lines.start, split(old), &split(&new));
}

/// Writes the differences of two blocks of lines; the old one begins at `start` in the file.
fn compare(writer: &mut DiffWriter<'_>, mut start: usize, mut old: Vec<&[u8]>, new: &[&[u8]]) {
    let prefix = old.iter().zip(new).take_while(|(a, b)| a == b).count();
    start += old[..prefix].iter().map(|line| line.len()).sum::<usize>();
    old.drain(..prefix);
    let new = &new[prefix..];
    let suffix = old.iter().rev().zip(new.iter().rev()).take_while(|(a, b)| a == b).count();
    let (old, new) = (&old[..old.len() - suffix], &new[..new.len() - suffix]);
    if old.len() * new.len() > MAX_COMPARED_PAIRS {
        return writer.change(start, old, new);
    }
    // The longest common subsequence of the lines, from each pair of positions to the ends.
    let width = new.len() + 1;
    let mut longest = vec![0_u32; (old.len() + 1) * width];
    for i in (0..old.len()).rev() {
        for j in (0..new.len()).rev() {
            longest[i * width + j] = if old[i] == new[j] {
                longest[(i + 1) * width + j + 1] + 1
            } else {
                longest[(i + 1) * width + j].max(longest[i * width + j + 1])
            };
        }
    }
    let (mut i, mut j) = (0, 0);
    while i < old.len() || j < new.len() {
        let (from_i, from_j) = (i, j);
        while (i < old.len() || j < new.len()) && !(i < old.len() && j < new.len() && old[i] == new[j]) {
            let remove = j == new.len()
                || (i < old.len() && longest[(i + 1) * width + j] >= longest[i * width + j + 1]);
            if remove {
                i += 1;
            } else {
                j += 1;
            }
        }
        writer.change(start, &old[from_i..i], &new[from_j..j]);
        start += old[from_i..i].iter().map(|line| line.len()).sum::<usize>();
        while i < old.len() && j < new.len() && old[i] == new[j] {
            start += old[i].len();
            i += 1;
            j += 1;
        }
    }
}

/// Collects changes into hunks. Changes come in order.
struct DiffWriter<'a> {
    content: &'a [u8],
    text: String,
    hunk: Option<Hunk>,
    /// The end of the part of the file that is in a hunk.
    written: usize,
    /// The number of the line that begins at this place of the file, from 1.
    cursor: (usize, usize),
    /// The number of lines that the new file has more so far.
    added: usize,
    removed: usize,
    lines_changed: u64,
    is_full: bool,
    has_omitted: bool,
}

struct Hunk {
    old: (usize, usize),
    new: (usize, usize),
    body: String,
}

impl<'a> DiffWriter<'a> {
    fn new(path: &Path, content: &'a [u8]) -> Self {
        Self {
            content,
            text: format!("--- {0}\n+++ {0}\n", path.display()),
            hunk: None,
            written: 0,
            cursor: (0, 1),
            added: 0,
            removed: 0,
            lines_changed: 0,
            is_full: false,
            has_omitted: false,
        }
    }

    /// Replaces the lines `old`, which begin at `start` in the file, by the lines `new`.
    fn change(&mut self, start: usize, old: &[&[u8]], new: &[&[u8]]) {
        if old.is_empty() && new.is_empty() {
            return;
        }
        self.lines_changed += old.len().max(new.len()) as u64;
        if !self.is_full {
            self.reach(start);
            for line in old {
                self.line('-', line);
            }
            for line in new {
                self.line('+', line);
            }
            self.written = start + old.iter().map(|line| line.len()).sum::<usize>();
        }
        self.added += new.len();
        self.removed += old.len();
    }

    /// Advances to `start`: with context lines inside the hunk, or with a new hunk.
    fn reach(&mut self, start: usize) {
        let content = self.content;
        let gap = &content[self.written..start];
        if self.hunk.is_some() && memchr_iter(b'\n', gap).take(2 * CONTEXT + 1).count() <= 2 * CONTEXT {
            for line in split(gap) {
                self.line(' ', line);
            }
            return;
        }
        self.end_hunk();
        let mut from = start;
        for _ in 0..CONTEXT {
            if from > self.written {
                from = line_start(content, from - 1);
            }
        }
        let line = self.line_number(from);
        self.hunk = Some(Hunk {
            old: (line, 0),
            new: ((line + self.added).saturating_sub(self.removed), 0),
            body: String::new(),
        });
        for line in split(&content[from..start]) {
            self.line(' ', line);
        }
    }

    fn line_number(&mut self, at: usize) -> usize {
        let (from, line) = self.cursor;
        let line = line + memchr_iter(b'\n', &self.content[from..at]).count();
        self.cursor = (at, line);
        line
    }

    fn line(&mut self, mark: char, line: &[u8]) {
        let Some(hunk) = self.hunk.as_mut().filter(|_| !self.is_full) else {
            return;
        };
        let without_feed = line.strip_suffix(b"\n").unwrap_or(line);
        let shown = short_line(without_feed);
        // Room is left for the hunk's head and the closing note.
        if self.text.len() + hunk.body.len() + shown.len() + 300 > MAX_DIFF_BYTES {
            self.is_full = true;
            return;
        }
        hunk.body.push(mark);
        hunk.body.push_str(&shown);
        hunk.body.push('\n');
        if without_feed.len() == line.len() {
            hunk.body.push_str("\\ No newline at end of file\n");
        }
        hunk.old.1 += usize::from(mark != '+');
        hunk.new.1 += usize::from(mark != '-');
    }

    fn end_hunk(&mut self) {
        if self.hunk.is_none() {
            return;
        }
        let content = self.content;
        for _ in 0..CONTEXT {
            if self.written < content.len() {
                let end = line_end(content, self.written);
                self.line(' ', &content[self.written..end]);
                self.written = end;
            }
        }
        if let Some(hunk) = self.hunk.take() {
            // An empty side is named by the line before it.
            let start =
                |(line, count): (usize, usize)| if count == 0 { line.saturating_sub(1) } else { line };
            let _ = writeln!(
                self.text,
                "@@ -{},{} +{},{} @@",
                start(hunk.old),
                hunk.old.1,
                start(hunk.new),
                hunk.new.1
            );
            self.text.push_str(&hunk.body);
        }
    }

    fn finish(mut self) -> Diff {
        self.end_hunk();
        if self.is_full {
            self.text.push_str("… (the diff is cut at 50 KiB)\n");
        } else if self.has_omitted {
            self.text.push_str("… (changes of very long lines are not shown)\n");
        }
        Diff {
            text: if self.lines_changed == 0 { String::new() } else { self.text },
            lines_changed: self.lines_changed,
        }
    }
}

fn split(text: &[u8]) -> Vec<&[u8]> {
    text.split_inclusive(|&byte| byte == b'\n').collect()
}

fn count_lines(text: &[u8]) -> usize {
    memchr_iter(b'\n', text).count() + usize::from(!text.is_empty() && !text.ends_with(b"\n"))
}

/// The start of the line at `at`.
fn line_start(content: &[u8], at: usize) -> usize {
    memrchr(b'\n', &content[..at]).map_or(0, |feed| feed + 1)
}

/// The end of the line at `at`, behind its line feed.
fn line_end(content: &[u8], at: usize) -> usize {
    memchr(b'\n', &content[at..]).map_or(content.len(), |feed| at + feed + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn diff(content: &str, changes: &[(Range<usize>, &str)]) -> Diff {
        let replacements: Vec<Replacement<'_>> = changes
            .iter()
            .map(|(range, text)| Replacement { range: range.clone(), text: text.as_bytes() })
            .collect();
        unified(Path::new("/f"), content.as_bytes(), &replacements)
    }

    #[test]
    fn near_changes_share_a_hunk_and_far_ones_do_not() {
        let content: String = (1..=30).map(|n| format!("{n:02}\n")).collect();
        let at = |line: usize| (line - 1) * 3..(line - 1) * 3 + 2;
        let found = diff(&content, &[(at(5), "five"), (at(9), "nine\nmore"), (at(25), "")]);
        assert_eq!(
            found.text,
            "--- /f\n+++ /f\n@@ -2,11 +2,12 @@\n 02\n 03\n 04\n-05\n+five\n 06\n 07\n 08\n-09\n+nine\n+more\n 10\n 11\n \
             12\n@@ -22,7 +23,7 @@\n 22\n 23\n 24\n-25\n+\n 26\n 27\n 28\n"
        );
        assert_eq!(found.lines_changed, 4);
    }

    #[test]
    fn lines_that_stay_are_not_shown_as_changed() {
        let found = diff("a\nb\nc\nd\n", &[(0..8, "a\nB\nc\nD\n")]);
        assert_eq!(found.lines_changed, 2);
        assert_eq!(found.text, "--- /f\n+++ /f\n@@ -1,4 +1,4 @@\n a\n-b\n+B\n c\n-d\n+D\n");
        assert_eq!(diff("a\n", &[(0..1, "a")]), Diff::default());
    }

    #[test]
    fn the_ends_of_files_are_right() {
        let made = diff("", &[(0..0, "x\ny")]);
        assert_eq!(made.text, "--- /f\n+++ /f\n@@ -0,0 +1,2 @@\n+x\n+y\n\\ No newline at end of file\n");
        assert_eq!(made.lines_changed, 2);
        let removed = diff("a\nb\n", &[(0..4, "")]);
        assert_eq!(removed.text, "--- /f\n+++ /f\n@@ -1,2 +0,0 @@\n-a\n-b\n");
        let joined = diff("a\nb\n", &[(1..2, " ")]);
        assert_eq!(joined.text, "--- /f\n+++ /f\n@@ -1,2 +1,1 @@\n-a\n-b\n+a b\n");
    }

    #[test]
    fn a_diff_is_cut_but_its_count_is_not() {
        let content = "x\n".repeat(100_000);
        let changes: Vec<_> = (0..100_000).map(|n| (n * 2..n * 2 + 1, "y")).collect();
        let found = diff(&content, &changes);
        assert!(found.text.len() <= MAX_DIFF_BYTES);
        assert!(found.text.ends_with("(the diff is cut at 50 KiB)\n"));
        assert_eq!(found.lines_changed, 100_000);
        let long = "a".repeat(2 << 20);
        let found = diff(&long, &[(0..1, "b"), (5..6, "c")]);
        assert_eq!(found.lines_changed, 1);
        assert!(found.text.contains("very long lines"));
    }
}
