//! Sends a command's output to a client that has asked for progress.
//!
//! ```text
//!  command ─▶ OutputSink::write ─▶ the newest 4 KiB ─▶ notifications/progress, at most ten a second
//! ```
//!
//! Writing never waits. Output that comes faster than it can be sent is skipped, oldest first, and the next message says so. A
//! message is left out when the client's queue is full. Nothing is lost, because the answer holds the output. `progress` is the
//! number of bytes so far.

use std::sync::Arc;
use std::time::Duration;

use emergent_mcp_http::Item;
use emergent_mcp_protocol::envelope::notification_line;
use emergent_mcp_protocol::methods;
use parking_lot::Mutex;
use serde_json::Value;
use tokio::sync::{Notify, mpsc};

/// The most output that one message holds.
const MESSAGE_BYTES: usize = 4 * 1024;
/// The time between two messages.
const PAUSE: Duration = Duration::from_millis(100);

/// Takes a command's output as it comes. Clones write to the same place.
#[derive(Clone, Debug, Default)]
pub struct OutputSink(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Notify,
}

#[derive(Debug, Default)]
struct State {
    /// Output so far, in bytes.
    total: u64,
    /// The newest output that was not sent yet.
    newest: Vec<u8>,
    /// The number of bytes before `newest` that are skipped.
    skipped: u64,
    /// Whether output came since the last message. If none came, `newest` can still hold an incomplete character.
    has_new_output: bool,
    closed: bool,
}

/// The content of one message.
#[derive(Debug, PartialEq)]
struct Piece {
    total: u64,
    text: String,
}

impl OutputSink {
    /// Takes output, of either stream, in the order it came. Never waits.
    pub fn write(&self, bytes: &[u8]) {
        if bytes.is_empty() {
            return;
        }
        self.0.state.lock().push(bytes);
        self.0.changed.notify_one();
    }

    /// Stops sending, because the answer is there.
    pub(crate) fn close(&self) {
        self.0.state.lock().closed = true;
        self.0.changed.notify_one();
    }

    /// Sends output as progress until the sink is closed. `token` is the client's progress token as it is written in JSON.
    pub(crate) async fn send_to(&self, token: &str, client: &mpsc::Sender<Item>) {
        while let Some(Piece { total, text }) = self.next().await {
            let text = Value::from(text);
            let params = format!("{{\"progressToken\":{token},\"progress\":{total},\"message\":{text}}}");
            let line = notification_line(methods::PROGRESS, Some(&params));
            let _ = client.try_send(Item::Message(line));
            self.pause().await;
        }
    }

    /// Waits for the next piece. None when the sink is closed.
    async fn next(&self) -> Option<Piece> {
        loop {
            let changed = self.0.changed.notified();
            {
                let mut state = self.0.state.lock();
                if state.closed {
                    return None;
                }
                if let Some(piece) = state.take() {
                    return Some(piece);
                }
            }
            changed.await;
        }
    }

    /// Waits for the time between two messages, or until the sink is closed.
    async fn pause(&self) {
        let closed = async {
            while !self.0.state.lock().closed {
                self.0.changed.notified().await;
            }
        };
        let _ = tokio::time::timeout(PAUSE, closed).await;
    }
}

impl State {
    fn push(&mut self, bytes: &[u8]) {
        self.total += bytes.len() as u64;
        self.has_new_output = true;
        let bytes = match bytes.len().checked_sub(MESSAGE_BYTES) {
            Some(over) => {
                self.skipped += (self.newest.len() + over) as u64;
                self.newest.clear();
                &bytes[over..]
            }
            None => bytes,
        };
        let over = (self.newest.len() + bytes.len()).saturating_sub(MESSAGE_BYTES);
        self.newest.drain(..over);
        self.skipped += over as u64;
        self.newest.extend_from_slice(bytes);
    }

    fn take(&mut self) -> Option<Piece> {
        if !std::mem::take(&mut self.has_new_output) {
            return None;
        }
        let mut bytes = std::mem::take(&mut self.newest);
        let skipped = std::mem::take(&mut self.skipped);
        // A character whose beginning was skipped is left out. One whose end has not come yet is kept for the next message.
        let begin =
            if skipped == 0 { 0 } else { bytes.iter().take_while(|byte| **byte & 0xC0 == 0x80).count() };
        self.newest = bytes.split_off(bytes.len() - incomplete_char_len(&bytes[begin..]));
        let text = String::from_utf8_lossy(&bytes[begin..]);
        let text = match skipped {
            0 => text.into_owned(),
            skipped => format!("[{} bytes skipped]\n{text}", skipped + begin as u64),
        };
        (!text.is_empty()).then_some(Piece { total: self.total, text })
    }
}

/// The number of bytes at the end that are the beginning of an incomplete character.
fn incomplete_char_len(bytes: &[u8]) -> usize {
    (1..=bytes.len().min(3))
        .find(|length| {
            let end = &bytes[bytes.len() - length..];
            end[0] >= 0xC0 && std::str::from_utf8(end).is_err_and(|error| error.error_len().is_none())
        })
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn take(sink: &OutputSink) -> Option<(u64, String)> {
        sink.0.state.lock().take().map(|piece| (piece.total, piece.text))
    }

    #[test]
    fn output_comes_once_and_counts_up() {
        let sink = OutputSink::default();
        assert_eq!(take(&sink), None);
        sink.write(b"one\n");
        sink.write(b"two\n");
        assert_eq!(take(&sink), Some((8, "one\ntwo\n".to_owned())));
        assert_eq!(take(&sink), None);
        sink.write(b"");
        assert_eq!(take(&sink), None);
        sink.write(b"three\n");
        assert_eq!(take(&sink), Some((14, "three\n".to_owned())));
    }

    #[test]
    fn too_much_output_is_skipped_and_says_so() {
        let sink = OutputSink::default();
        sink.write(b"first");
        sink.write(&[b'x'; MESSAGE_BYTES]);
        let (total, text) = take(&sink).unwrap();
        assert_eq!(total, 5 + MESSAGE_BYTES as u64);
        assert_eq!(text, format!("[5 bytes skipped]\n{}", "x".repeat(MESSAGE_BYTES)));
        for _ in 0..100 {
            sink.write(&[b'y'; 1000]);
        }
        assert!(sink.0.state.lock().newest.len() <= MESSAGE_BYTES);
        let (total, text) = take(&sink).unwrap();
        assert_eq!(total, 5 + MESSAGE_BYTES as u64 + 100_000);
        assert!(text.starts_with("[95904 bytes skipped]\ny"), "{}", &text[..40]);
    }

    #[test]
    fn characters_stay_whole() {
        let sink = OutputSink::default();
        sink.write(b"a\xE2\x82");
        assert_eq!(take(&sink), Some((3, "a".to_owned())));
        assert_eq!(take(&sink), None);
        sink.write(b"\xACb");
        assert_eq!(take(&sink), Some((5, "€b".to_owned())));
        // Half a character at the beginning, after the other half was skipped.
        sink.write("€".repeat(MESSAGE_BYTES / 3 + 1).as_bytes());
        let (_, text) = take(&sink).unwrap();
        assert!(!text.contains('\u{FFFD}'), "{text}");
        sink.write(b"\xFF\xFE");
        assert_eq!(take(&sink).unwrap().1, "\u{FFFD}\u{FFFD}");
    }

    #[tokio::test]
    async fn a_closed_sink_gives_nothing_more() {
        let sink = OutputSink::default();
        sink.write(b"late");
        sink.close();
        assert_eq!(sink.next().await, None);
        sink.pause().await;
    }
}
