//! Keeps the first matches in the order of paths while files are searched in any order.
//!
//! Invariant: the kept matches are a prefix of all matches found so far, sorted by path and line. They exceed the answer's limit
//! by one file at most. Once the limit is reached, files that sort behind the last kept one are not searched. So the answer does
//! not depend on the order of the search.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use emergent_wire::tools::{GrepAnswer, GrepMatch};

/// The most text in an answer.
pub(super) const MAX_ANSWER_BYTES: usize = 512 << 10;
/// The most files that an answer names as skipped.
const MAX_SKIPPED: usize = 20;

/// Shared by all threads of a search.
pub(super) struct Collector {
    limit: usize,
    is_full: AtomicBool,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    files: BTreeMap<OsString, Vec<GrepMatch>>,
    matches: usize,
    bytes: usize,
    skipped: BTreeSet<String>,
}

impl Collector {
    pub(super) fn new(limit: usize) -> Self {
        Self { limit, is_full: AtomicBool::new(false), state: Mutex::default() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a file may still have matches for the answer.
    pub(super) fn needs_file(&self, path: &Path) -> bool {
        !self.is_full.load(Ordering::Relaxed)
            || self.state().files.last_key_value().is_none_or(|(last, _)| path.as_os_str() < last.as_os_str())
    }

    /// Whether a directory may still have files for the answer.
    pub(super) fn needs_directory(&self, path: &Path) -> bool {
        if !self.is_full.load(Ordering::Relaxed) {
            return true;
        }
        let mut first = path.as_os_str().to_owned();
        first.push("/");
        self.state().files.last_key_value().is_none_or(|(last, _)| first <= *last)
    }

    /// Adds the matches of a file, in the order of lines.
    pub(super) fn add(&self, path: &Path, matches: Vec<GrepMatch>) {
        let mut state = self.state();
        state.matches += matches.len();
        state.bytes += matches.iter().map(size).sum::<usize>();
        state.files.insert(path.as_os_str().to_owned(), matches);
        while let Some((_, last)) = state.files.last_key_value() {
            let (matches, bytes) = (last.len(), last.iter().map(size).sum::<usize>());
            if !self.is_enough(state.matches - matches, state.bytes - bytes) {
                break;
            }
            state.matches -= matches;
            state.bytes -= bytes;
            state.files.pop_last();
        }
        if self.is_enough(state.matches, state.bytes) {
            self.is_full.store(true, Ordering::Relaxed);
        }
    }

    /// One match more than the limit is kept, to know that there are more.
    fn is_enough(&self, matches: usize, bytes: usize) -> bool {
        matches > self.limit || bytes > MAX_ANSWER_BYTES
    }

    /// Notes a file that could not be searched.
    pub(super) fn skip(&self, path: &Path, reason: &str) {
        self.skip_message(format!("{}: {reason}", path.display()));
    }

    pub(super) fn skip_message(&self, message: String) {
        let mut state = self.state();
        state.skipped.insert(message);
        if state.skipped.len() > MAX_SKIPPED {
            state.skipped.pop_last();
        }
    }

    pub(super) fn answer(self) -> GrepAnswer {
        let state = self.state.into_inner().unwrap_or_else(PoisonError::into_inner);
        let mut answer = GrepAnswer { skipped: state.skipped.into_iter().collect(), ..GrepAnswer::default() };
        let mut bytes = 0;
        for found in state.files.into_values().flatten() {
            bytes += size(&found);
            let is_first = answer.matches.is_empty();
            if answer.matches.len() == self.limit || (bytes > MAX_ANSWER_BYTES && !is_first) {
                answer.truncated = true;
                break;
            }
            answer.matches.push(found);
        }
        answer
    }
}

/// About the memory of a match.
pub(super) fn size(found: &GrepMatch) -> usize {
    let lines = found.before.iter().chain(&found.after).chain([&found.line, &found.file_path]);
    lines.map(|line| line.len() + 24).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matches(path: &str, lines: std::ops::Range<u64>) -> Vec<GrepMatch> {
        lines
            .map(|line_number| GrepMatch { file_path: path.into(), line_number, ..GrepMatch::default() })
            .collect()
    }

    #[test]
    fn the_first_matches_win_in_any_order() {
        for order in [["a", "b", "c"], ["c", "b", "a"], ["b", "c", "a"]] {
            let collector = Collector::new(5);
            for path in order {
                collector.add(Path::new(path), matches(path, 1..4));
            }
            assert!(!collector.needs_file(Path::new("c")));
            assert!(!collector.needs_directory(Path::new("c")));
            assert!(collector.needs_directory(Path::new("a")));
            let answer = collector.answer();
            assert!(answer.truncated);
            let found: Vec<_> =
                answer.matches.iter().map(|m| (m.file_path.as_str(), m.line_number)).collect();
            assert_eq!(found, [("a", 1), ("a", 2), ("a", 3), ("b", 1), ("b", 2)]);
        }
    }

    #[test]
    fn as_many_as_the_limit_is_not_truncated() {
        let collector = Collector::new(3);
        collector.add(Path::new("a"), matches("a", 1..4));
        assert!(collector.needs_file(Path::new("z")));
        assert!(!collector.answer().truncated);
    }
}
