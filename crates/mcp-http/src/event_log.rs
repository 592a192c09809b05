//! Messages on their way to a client, numbered so that a client that lost its connection can continue.
//!
//! Writing never waits. A full log drops its oldest messages; the newest, which may be the answer, is always kept.

use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::Notify;

/// The messages of a stream that are kept for a client that may come back.
pub(crate) const MAX_EVENTS: usize = 256;
const MAX_BYTES: usize = 4 << 20;

#[derive(Default)]
struct State {
    /// The messages that are kept; the first has the number after `dropped`.
    events: VecDeque<Arc<str>>,
    dropped: u64,
    bytes: usize,
    /// The number of the last message that was sent to a client.
    delivered: u64,
    is_ended: bool,
    /// The current reader; a later reader replaces it.
    reader: u64,
}

/// One stream of messages.
#[derive(Default)]
pub(crate) struct EventLog {
    state: Mutex<State>,
    changed: Notify,
}

/// The next item for a reader.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Read {
    /// A message and its number.
    Event(u64, Arc<str>),
    /// The stream has ended.
    Ended,
    /// Another reader has taken over.
    Replaced,
}

impl EventLog {
    /// Adds a message.
    pub(crate) fn push(&self, message: &str) {
        let mut state = self.state.lock();
        state.bytes += message.len();
        state.events.push_back(message.into());
        while state.events.len() > MAX_EVENTS || (state.bytes > MAX_BYTES && state.events.len() > 1) {
            state.bytes -= state.events.pop_front().map_or(0, |old| old.len());
            state.dropped += 1;
        }
        drop(state);
        self.changed.notify_waiters();
    }

    /// Ends the stream. Readers still get the messages that are kept.
    pub(crate) fn end(&self) {
        self.state.lock().is_ended = true;
        self.changed.notify_waiters();
    }

    /// Whether the stream has ended.
    pub(crate) fn is_ended(&self) -> bool {
        self.state.lock().is_ended
    }

    /// Begins to read after this number, or after the last message that was sent. Replaces the current reader.
    pub(crate) fn open(&self, after: Option<u64>) -> Cursor {
        let mut state = self.state.lock();
        state.reader += 1;
        let cursor = Cursor { reader: state.reader, at: after.unwrap_or(state.delivered) };
        drop(state);
        self.changed.notify_waiters();
        cursor
    }

    /// The next message for this reader.
    pub(crate) async fn next(&self, cursor: &mut Cursor) -> Read {
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            // From here on no change is missed.
            changed.as_mut().enable();
            if let Some(read) = self.try_next(cursor) {
                return read;
            }
            changed.await;
        }
    }

    fn try_next(&self, cursor: &mut Cursor) -> Option<Read> {
        let mut state = self.state.lock();
        if state.reader != cursor.reader {
            return Some(Read::Replaced);
        }
        let index = cursor.at.max(state.dropped) - state.dropped;
        let found = usize::try_from(index).ok().and_then(|index| state.events.get(index).cloned());
        match found {
            Some(event) => {
                cursor.at = state.dropped + index + 1;
                state.delivered = state.delivered.max(cursor.at);
                Some(Read::Event(cursor.at, event))
            }
            None => state.is_ended.then_some(Read::Ended),
        }
    }
}

/// A reader and its position.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cursor {
    reader: u64,
    /// The number of the last message that was read.
    at: u64,
}

impl Cursor {
    pub(crate) fn at(&self) -> u64 {
        self.at
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn texts(log: &EventLog, cursor: &mut Cursor, count: usize) -> Vec<(u64, String)> {
        let mut found = Vec::new();
        for _ in 0..count {
            match log.next(cursor).await {
                Read::Event(number, text) => found.push((number, text.to_string())),
                other => panic!("{other:?}"),
            }
        }
        found
    }

    #[tokio::test]
    async fn a_second_reader_replaces_the_first_and_continues_after_its_event() {
        let log = EventLog::default();
        (1..=3).for_each(|n| log.push(&n.to_string()));
        let mut first = log.open(None);
        assert_eq!(texts(&log, &mut first, 2).await, [(1, "1".to_owned()), (2, "2".to_owned())]);
        let mut second = log.open(Some(1));
        assert_eq!(log.next(&mut first).await, Read::Replaced);
        assert_eq!(texts(&log, &mut second, 2).await, [(2, "2".to_owned()), (3, "3".to_owned())]);
        log.end();
        assert_eq!(log.next(&mut second).await, Read::Ended);
    }

    #[tokio::test]
    async fn a_log_that_is_not_read_stays_within_its_bounds() {
        let log = EventLog::default();
        (0..10_000).for_each(|n| log.push(&n.to_string()));
        let mut cursor = log.open(None);
        let first = texts(&log, &mut cursor, 1).await;
        assert_eq!(first, [(10_000 - MAX_EVENTS as u64 + 1, (10_000 - MAX_EVENTS).to_string())]);
        (0..10).for_each(|_| log.push(&"x".repeat(1 << 20)));
        assert!(log.state.lock().bytes <= MAX_BYTES);
    }
}
