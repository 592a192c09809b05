//! The journal of a server: its standard error and the supervisor's notes. Keeps the last lines, and reports new ones.

use std::collections::VecDeque;

use parking_lot::Mutex;
use tokio::sync::watch;

/// Lines that are kept.
const MAX_LINES: usize = 2000;
/// Bytes that are kept.
const MAX_BYTES: usize = 512 * 1024;
/// A longer line is cut.
const MAX_LINE_BYTES: usize = 4096;

/// A line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The number, from 1 on, without gaps.
    pub number: u64,
    /// Whether the supervisor wrote it, and not the server.
    pub is_note: bool,
    /// The line without its end.
    pub text: String,
}

#[derive(Default)]
struct State {
    entries: VecDeque<Entry>,
    bytes: usize,
    newest: u64,
    /// The beginning of a line.
    partial: Vec<u8>,
    is_cut: bool,
}

/// The journal of one server. New lines push out old ones.
pub struct Journal {
    state: Mutex<State>,
    newest: watch::Sender<u64>,
}

impl Default for Journal {
    fn default() -> Self {
        Self { state: Mutex::default(), newest: watch::Sender::new(0) }
    }
}

impl Journal {
    /// Adds output of the server.
    pub fn write(&self, bytes: &[u8]) {
        let mut state = self.state.lock();
        for piece in bytes.split_inclusive(|byte| *byte == b'\n') {
            let (text, ends) = match piece.strip_suffix(b"\n") {
                Some(text) => (text, true),
                None => (piece, false),
            };
            let room = MAX_LINE_BYTES - state.partial.len();
            state.is_cut |= text.len() > room;
            state.partial.extend_from_slice(&text[..text.len().min(room)]);
            if ends {
                state.end_line();
            }
        }
        let newest = state.newest;
        drop(state);
        self.newest.send_replace(newest);
    }

    /// Adds a note of the supervisor.
    pub fn note(&self, text: impl Into<String>) {
        let mut state = self.state.lock();
        if !state.partial.is_empty() {
            state.end_line();
        }
        state.push(true, text.into());
        let newest = state.newest;
        drop(state);
        self.newest.send_replace(newest);
    }

    /// The lines after this number; of more than `most` the last ones.
    pub fn after(&self, number: u64, most: usize) -> Vec<Entry> {
        let state = self.state.lock();
        let fresh = state.entries.iter().filter(|entry| entry.number > number);
        let count = fresh.clone().count();
        fresh.skip(count.saturating_sub(most)).cloned().collect()
    }

    /// The last lines that the server wrote, as one text.
    pub fn tail(&self, lines: usize) -> String {
        let state = self.state.lock();
        let own: Vec<&str> =
            state.entries.iter().filter(|entry| !entry.is_note).map(|entry| entry.text.as_str()).collect();
        let mut tail: Vec<&str> = own[own.len().saturating_sub(lines)..].to_vec();
        let partial = String::from_utf8_lossy(&state.partial);
        if !partial.is_empty() {
            tail.push(&partial);
        }
        tail.join("\n")
    }

    /// Changes to the number of the newest line.
    pub fn watch(&self) -> watch::Receiver<u64> {
        self.newest.subscribe()
    }
}

impl State {
    fn end_line(&mut self) {
        let mut line = std::mem::take(&mut self.partial);
        if line.last() == Some(&b'\r') {
            line.pop();
        }
        let mut text = String::from_utf8_lossy(&line).into_owned();
        if std::mem::take(&mut self.is_cut) {
            text.push_str(" …");
        }
        self.push(false, text);
    }

    fn push(&mut self, is_note: bool, text: String) {
        self.newest += 1;
        self.bytes += text.len();
        self.entries.push_back(Entry { number: self.newest, is_note, text });
        while self.entries.len() > MAX_LINES || self.bytes > MAX_BYTES {
            self.bytes -= self.entries.pop_front().map_or(0, |old| old.text.len());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_and_notes_are_numbered_and_bounded() {
        let journal = Journal::default();
        journal.write(b"one\r\ntw");
        journal.note("restarted");
        journal.write(b"three");
        let texts: Vec<_> =
            journal.after(0, 10).into_iter().map(|entry| (entry.number, entry.text)).collect();
        assert_eq!(texts, [(1, "one".to_owned()), (2, "tw".to_owned()), (3, "restarted".to_owned())]);
        assert_eq!(journal.tail(2), "one\ntw\nthree");
        assert_eq!(journal.after(1, 1).len(), 1);
        for _ in 0..5000 {
            journal.write(&[b'x'; 3000]);
            journal.write(b"\n");
        }
        let state = journal.state.lock();
        assert!(state.bytes <= MAX_BYTES && state.entries.len() <= MAX_LINES);
        assert!(state.entries.iter().all(|entry| entry.text.len() <= MAX_LINE_BYTES + 4));
    }
}
