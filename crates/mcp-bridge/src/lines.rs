//! Lines out of a stream of bytes, with a limit.
//!
//! Of a line over the limit only both ends are kept. They are enough to find the request that it answers.

/// The bytes that are kept of each end of a long line.
const END_BYTES: usize = 512;

/// A line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Line {
    /// A whole line, without its end.
    Whole(Vec<u8>),
    /// A line over the limit.
    TooLong {
        /// The beginning of the line.
        head: Vec<u8>,
        /// The end of the line.
        tail: Vec<u8>,
        /// The length of the line.
        bytes: u64,
    },
}

/// Cuts a stream of bytes into lines.
#[derive(Debug)]
pub(crate) struct Lines {
    limit: usize,
    buffer: Vec<u8>,
    /// The length of the current line, once it is over the limit.
    long: Option<u64>,
}

impl Lines {
    /// Lines of at most this many bytes.
    pub(crate) fn new(limit: usize) -> Self {
        Self { limit: limit.max(2 * END_BYTES), buffer: Vec::new(), long: None }
    }

    /// Takes bytes; gives each line that ends in them. Empty lines are left out.
    pub(crate) fn take(&mut self, mut bytes: &[u8], mut each: impl FnMut(Line)) {
        while let Some(end) = bytes.iter().position(|byte| *byte == b'\n') {
            self.push(&bytes[..end]);
            bytes = &bytes[end + 1..];
            each_line(self.finish(), &mut each);
        }
        self.push(bytes);
    }

    fn push(&mut self, bytes: &[u8]) {
        if self.long.is_none() && self.buffer.len() + bytes.len() <= self.limit {
            self.buffer.extend_from_slice(bytes);
            return;
        }
        let before = self.long.unwrap_or(self.buffer.len() as u64);
        self.long = Some(before + bytes.len() as u64);
        // The head stays, the tail moves on.
        self.buffer.extend_from_slice(&bytes[..bytes.len().min(END_BYTES.saturating_sub(self.buffer.len()))]);
        let tail_from = bytes.len().saturating_sub(END_BYTES);
        self.buffer.extend_from_slice(&bytes[tail_from..]);
        let cut = self.buffer.len().saturating_sub(END_BYTES).max(END_BYTES);
        self.buffer.drain(END_BYTES.min(self.buffer.len())..cut.min(self.buffer.len()));
    }

    fn finish(&mut self) -> Line {
        let mut buffer = std::mem::take(&mut self.buffer);
        match self.long.take() {
            Some(bytes) => {
                let tail = buffer.split_off(END_BYTES.min(buffer.len()));
                Line::TooLong { head: buffer, tail, bytes }
            }
            None => {
                if buffer.last() == Some(&b'\r') {
                    buffer.pop();
                }
                Line::Whole(buffer)
            }
        }
    }
}

fn each_line(line: Line, each: &mut impl FnMut(Line)) {
    if line != Line::Whole(Vec::new()) {
        each(line);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn lines(limit: usize, pieces: &[&[u8]]) -> Vec<Line> {
        let mut lines = Lines::new(limit);
        let mut found = Vec::new();
        pieces.iter().for_each(|piece| lines.take(piece, |line| found.push(line)));
        found
    }

    #[test]
    fn lines_end_with_lf_or_crlf_and_empty_lines_are_left_out() {
        let found = lines(9000, &[b"one\r\n", b"tw", b"o\n\n\r\nthree"]);
        assert_eq!(found, [Line::Whole(b"one".to_vec()), Line::Whole(b"two".to_vec())]);
    }

    #[test]
    fn a_long_line_keeps_both_ends_and_the_next_is_whole() {
        let long: Vec<u8> = (0..100_000_u32).flat_map(u32::to_be_bytes).map(|byte| byte | 0x80).collect();
        for step in [7, 1000, 64 * 1024, long.len()] {
            let mut lines = Lines::new(4096);
            let mut found = Vec::new();
            for piece in long.chunks(step) {
                lines.take(piece, |line| found.push(line));
                assert!(lines.buffer.capacity() <= 4 * 4096 + 2 * END_BYTES, "{}", lines.buffer.capacity());
            }
            lines.take(b"\nnext\n", |line| found.push(line));
            let [Line::TooLong { head, tail, bytes }, Line::Whole(next)] = &found[..] else {
                panic!("{found:?}");
            };
            assert_eq!((*bytes, next.as_slice()), (400_000, b"next".as_slice()));
            assert_eq!(head, &long[..END_BYTES]);
            assert!(long.ends_with(tail) && tail.len() == END_BYTES, "{step}: {}", tail.len());
        }
    }

    proptest! {
        #[test]
        fn lines_survive_any_split(
            texts in prop::collection::vec("[a-z]{1,20}", 0..6),
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..6),
        ) {
            let all: Vec<u8> = texts.iter().flat_map(|text| format!("{text}\n").into_bytes()).collect();
            let mut at: Vec<usize> = cuts.iter().map(|cut| cut.index(all.len() + 1)).collect();
            at.extend([0, all.len()]);
            at.sort_unstable();
            let pieces: Vec<&[u8]> = at.windows(2).map(|pair| &all[pair[0]..pair[1]]).collect();
            let whole: Vec<Line> = texts.iter().map(|text| Line::Whole(text.clone().into_bytes())).collect();
            prop_assert_eq!(lines(4096, &pieces), whole);
        }
    }
}
