//! The lines of a text, with a hash of each, so that blocks of lines are found in one pass.

use std::hash::{DefaultHasher, Hasher};
use std::sync::atomic::{AtomicBool, Ordering};

use memchr::memchr_iter;

/// The reason for which a matcher stopped early.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stop {
    /// The caller cancelled the call.
    Cancelled,
    /// The matcher would take too long: it counts as a matcher without a match.
    Exhausted,
}

/// A budget of work for a matcher, in about the number of bytes it reads.
pub(super) struct Budget<'a> {
    left: u64,
    cancel: &'a AtomicBool,
}

impl<'a> Budget<'a> {
    pub(super) fn new(work: u64, cancel: &'a AtomicBool) -> Self {
        Self { left: work, cancel }
    }

    pub(super) fn spend(&mut self, work: usize) -> Result<(), Stop> {
        if self.cancel.load(Ordering::Relaxed) {
            return Err(Stop::Cancelled);
        }
        self.left = self.left.checked_sub(work as u64).ok_or(Stop::Exhausted)?;
        Ok(())
    }
}

/// A line: where it starts, where its text ends (without line end), and a hash of its trimmed text.
#[derive(Clone, Copy, Debug)]
struct Line {
    start: u32,
    end: u32,
    hash: u32,
}

/// A text as lines. The text has at most 4 GiB.
pub(super) struct Lines<'a> {
    text: &'a [u8],
    lines: Vec<Line>,
}

impl<'a> Lines<'a> {
    #[allow(clippy::cast_possible_truncation, reason = "texts here have a few MiB; half of a hash is a hash")]
    pub(super) fn new(text: &'a [u8]) -> Self {
        let mut lines = Vec::new();
        let mut start = 0;
        let ends = memchr_iter(b'\n', text).map(|at| at + 1);
        let last = (!text.is_empty() && !text.ends_with(b"\n")).then_some(text.len());
        for next in ends.chain(last) {
            let line = crate::text::without_line_end(&text[start..next]);
            let mut hasher = DefaultHasher::new();
            hasher.write(line.trim_ascii());
            lines.push(Line {
                start: start as u32,
                end: (start + line.len()) as u32,
                hash: hasher.finish() as u32,
            });
            start = next;
        }
        Self { text, lines }
    }

    pub(super) fn len(&self) -> usize {
        self.lines.len()
    }

    /// A line's text without its end.
    pub(super) fn text(&self, index: usize) -> &'a [u8] {
        let line = self.lines[index];
        &self.text[line.start as usize..line.end as usize]
    }

    pub(super) fn trimmed(&self, index: usize) -> &'a [u8] {
        self.text(index).trim_ascii()
    }

    pub(super) fn is_blank(&self, index: usize) -> bool {
        self.trimmed(index).is_empty()
    }

    pub(super) fn start(&self, index: usize) -> usize {
        self.lines[index].start as usize
    }

    /// The offset of the end of the line's text.
    pub(super) fn end(&self, index: usize) -> usize {
        self.lines[index].end as usize
    }

    /// The offset of the next line.
    pub(super) fn next(&self, index: usize) -> usize {
        self.lines.get(index + 1).map_or(self.text.len(), |line| line.start as usize)
    }

    /// Whether two lines are the same but for white space around them.
    pub(super) fn same(&self, index: usize, other: &Lines<'_>, other_index: usize) -> bool {
        self.lines[index].hash == other.lines[other_index].hash
            && self.trimmed(index) == other.trimmed(other_index)
    }

    /// The first lines of the blocks in which each line is the same as in `block` but for white space around it.
    /// Blocks may overlap. (Knuth, Morris and Pratt over the hashes; each find is then compared.)
    pub(super) fn find_blocks(
        &self,
        block: &Lines<'_>,
        most: usize,
        budget: &mut Budget<'_>,
    ) -> Result<Vec<usize>, Stop> {
        let length = block.len();
        let mut found = Vec::new();
        if length == 0 || length > self.len() {
            return Ok(found);
        }
        let hash = |index: usize| block.lines[index].hash;
        let mut fallback = vec![0; length];
        let mut matched = 0;
        for index in 1..length {
            while matched > 0 && hash(index) != hash(matched) {
                matched = fallback[matched - 1];
            }
            if hash(index) == hash(matched) {
                matched += 1;
            }
            fallback[index] = matched;
        }
        matched = 0;
        for (index, line) in self.lines.iter().enumerate() {
            while matched > 0 && line.hash != hash(matched) {
                matched = fallback[matched - 1];
            }
            if line.hash == hash(matched) {
                matched += 1;
            }
            if matched == length {
                matched = fallback[matched - 1];
                let first = index + 1 - length;
                budget.spend(self.end(index) - self.start(first))?;
                if (0..length).all(|i| self.same(first + i, block, i)) {
                    found.push(first);
                    if found.len() >= most {
                        break;
                    }
                }
            }
        }
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_found_whatever_is_around_the_lines() {
        let file = Lines::new(b"a\n  b\r\n\tc \na\nb\nc");
        let block = Lines::new(b"a\nb\n c\n");
        let cancel = AtomicBool::new(false);
        let mut budget = Budget::new(1000, &cancel);
        assert_eq!(file.find_blocks(&block, 10, &mut budget), Ok(vec![0, 3]));
        assert_eq!(file.text(1), b"  b");
        assert_eq!(file.next(1), 7);
        assert_eq!(file.len(), 6);
        let overlapping = Lines::new(b"x\nx\nx\n").find_blocks(&Lines::new(b"x\nx"), 10, &mut budget);
        assert_eq!(overlapping, Ok(vec![0, 1]));
    }
}
