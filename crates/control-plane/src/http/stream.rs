//! Output as server-sent events.

use std::convert::Infallible;
use std::time::Duration;

use axum::response::sse::{Event as SseEvent, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use emergent_wire::ErrorDetail;
use emergent_wire::error::ErrorBody;
use futures_util::{Stream, StreamExt as _};

/// The interval of keep-alive comments, without which proxies close the connection of a silent command.
pub(super) const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// Output of a command.
pub(super) enum OutputEvent {
    Stdout(Bytes),
    Stderr(Bytes),
    /// The last event: the answer as JSON.
    Answer(Vec<u8>),
}

/// The events of a command. With an offset, the id of each event is the offset after it.
pub(super) fn events(
    output: impl Stream<Item = Result<OutputEvent, ErrorDetail>> + Send + 'static,
    offset: Option<u64>,
) -> Response {
    let encoder = Encoder { offset, stdout: Text::default(), stderr: Text::default() };
    let events = output.scan(encoder, |encoder, event| std::future::ready(Some(encoder.encode(event))));
    let events = events.filter_map(std::future::ready).map(Ok::<_, Infallible>);
    Sse::new(events).keep_alive(KeepAlive::new().interval(KEEP_ALIVE)).into_response()
}

struct Encoder {
    offset: Option<u64>,
    stdout: Text,
    stderr: Text,
}

impl Encoder {
    /// The server-sent event. None while a character is incomplete.
    fn encode(&mut self, event: Result<OutputEvent, ErrorDetail>) -> Option<SseEvent> {
        let (name, text, length) = match event {
            Ok(OutputEvent::Stdout(bytes)) => ("stdout", self.stdout.push(&bytes), bytes.len()),
            Ok(OutputEvent::Stderr(bytes)) => ("stderr", self.stderr.push(&bytes), bytes.len()),
            Ok(OutputEvent::Answer(answer)) => {
                let json = String::from_utf8(answer).unwrap_or_else(|_| "{}".to_owned());
                return Some(SseEvent::default().event("result").data(json));
            }
            Err(error) => {
                let json = serde_json::to_string(&ErrorBody { error }).unwrap_or_default();
                return Some(SseEvent::default().event("error").data(json));
            }
        };
        if let Some(offset) = &mut self.offset {
            *offset += length as u64;
        }
        if text.is_empty() {
            return None;
        }
        let data = serde_json::json!({ "text": text }).to_string();
        let event = SseEvent::default().event(name).data(data);
        // A client that resumes after this event would lose an incomplete character.
        let is_whole = self.stdout.is_whole() && self.stderr.is_whole();
        Some(match self.offset.filter(|_| is_whole) {
            Some(offset) => event.id(offset.to_string()),
            None => event,
        })
    }
}

/// Decodes pieces of bytes as text. A character may be split between pieces.
#[derive(Default)]
struct Text {
    rest: Vec<u8>,
}

impl Text {
    fn push(&mut self, bytes: &[u8]) -> String {
        self.rest.extend_from_slice(bytes);
        let keep = incomplete(&self.rest);
        let rest = self.rest.split_off(self.rest.len() - keep);
        let whole = std::mem::replace(&mut self.rest, rest);
        String::from_utf8_lossy(&whole).into_owned()
    }

    fn is_whole(&self) -> bool {
        self.rest.is_empty()
    }
}

/// The number of bytes at the end that are the beginning of a character.
fn incomplete(bytes: &[u8]) -> usize {
    let tail = &bytes[bytes.len().saturating_sub(4)..];
    match std::str::from_utf8(tail) {
        Err(error) if error.error_len().is_none() => tail.len() - error.valid_up_to(),
        Err(_) => {
            // The tail may begin inside a character, so each possible beginning is tried.
            (1..tail.len().min(4))
                .find(|length| {
                    let end = &tail[tail.len() - length..];
                    end[0] >= 0xC0 && std::str::from_utf8(end).is_err_and(|error| error.error_len().is_none())
                })
                .unwrap_or(0)
        }
        Ok(_) => 0,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn text_survives_any_split(text in "\\PC{0,60}", cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..6)) {
            let bytes = text.as_bytes();
            let mut at: Vec<usize> = cuts.iter().map(|cut| cut.index(bytes.len() + 1)).collect();
            at.extend([0, bytes.len()]);
            at.sort_unstable();
            let mut decoder = Text::default();
            let joined: String = at.windows(2).map(|pair| decoder.push(&bytes[pair[0]..pair[1]])).collect();
            prop_assert_eq!(joined, text.clone());
            prop_assert!(decoder.is_whole());
        }

        #[test]
        fn any_bytes_give_text(pieces in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..20), 0..6)) {
            let mut decoder = Text::default();
            for piece in &pieces {
                decoder.push(piece);
                prop_assert!(decoder.rest.len() < 4);
            }
        }
    }
}
