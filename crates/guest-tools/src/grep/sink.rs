//! Takes the matching lines of one file, with the lines around them.

use std::collections::VecDeque;
use std::io;
use std::path::Path;

use emergent_wire::tools::GrepMatch;
use grep_searcher::{Searcher, Sink, SinkContext, SinkFinish, SinkMatch};

use super::collector::{MAX_ANSWER_BYTES, size};
use crate::text::{short_line, without_line_end};

/// The limits of a search.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// Matching lines in the whole answer.
    pub(super) matches: usize,
    /// Lines before and after each.
    pub(super) context: usize,
}

/// The matches of one file: as many as the answer may hold, and one more to tell that there are more.
pub(super) struct MatchSink<'a> {
    limits: Limits,
    path: &'a Path,
    matches: Vec<GrepMatch>,
    bytes: usize,
    /// The last lines seen, when context is wanted.
    recent: VecDeque<(u64, String)>,
    /// The first match that still needs lines behind it.
    open: usize,
    is_binary: bool,
}

impl<'a> MatchSink<'a> {
    pub(super) fn new(limits: Limits, path: &'a Path) -> Self {
        Self {
            limits,
            path,
            matches: Vec::new(),
            bytes: 0,
            recent: VecDeque::new(),
            open: 0,
            is_binary: false,
        }
    }

    pub(super) fn into_matches(self) -> Vec<GrepMatch> {
        self.matches
    }

    pub(super) fn is_binary(&self) -> bool {
        self.is_binary
    }

    fn is_full(&self) -> bool {
        self.matches.len() > self.limits.matches || self.bytes > MAX_ANSWER_BYTES
    }

    /// Takes a line of either kind. Says whether more lines are wanted.
    fn line(&mut self, number: u64, bytes: &[u8], is_match: bool) -> bool {
        let is_new = is_match && !self.is_full();
        let context = self.limits.context as u64;
        while self.matches.get(self.open).is_some_and(|found| found.line_number + context < number) {
            self.open += 1;
        }
        if !is_new && self.open == self.matches.len() && self.is_full() {
            return false;
        }
        let text = short_line(without_line_end(bytes));
        for found in &mut self.matches[self.open..] {
            found.after.push(text.clone());
        }
        if is_new {
            let first = number.saturating_sub(context);
            let found = GrepMatch {
                file_path: self.path.display().to_string(),
                line_number: number,
                line: text.clone(),
                before: self
                    .recent
                    .iter()
                    .filter(|(line, _)| *line >= first)
                    .map(|(_, text)| text.clone())
                    .collect(),
                after: Vec::new(),
            };
            self.bytes += size(&found);
            self.matches.push(found);
        }
        if context > 0 {
            if self.recent.len() == self.limits.context {
                self.recent.pop_front();
            }
            self.recent.push_back((number, text));
        }
        !self.is_full() || context > 0
    }
}

impl Sink for MatchSink<'_> {
    type Error = io::Error;

    fn matched(&mut self, _: &Searcher, found: &SinkMatch<'_>) -> io::Result<bool> {
        Ok(self.line(found.line_number().unwrap_or(0), found.bytes(), true))
    }

    fn context(&mut self, _: &Searcher, context: &SinkContext<'_>) -> io::Result<bool> {
        Ok(self.line(context.line_number().unwrap_or(0), context.bytes(), false))
    }

    fn finish(&mut self, _: &Searcher, finish: &SinkFinish) -> io::Result<()> {
        self.is_binary = finish.binary_byte_offset().is_some();
        Ok(())
    }
}
