//! Output as server-sent events.

use std::convert::Infallible;
use std::time::Duration;

use axum::response::sse::{Event as SseEvent, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use emergent_guest_client::Event;
use emergent_wire::error::ErrorBody;
use serde_json::value::RawValue;

use crate::workspace::OutputStream;

/// Proxies must not take a quiet command for a dead connection.
pub(super) const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// Output until the answer. With an offset every event has the offset after it as its id.
pub(super) fn events(output: OutputStream, offset: Option<u64>) -> Response {
    let state = Some(State { output, offset, stdout: Text::default(), stderr: Text::default() });
    let events = futures_util::stream::unfold(state, |state| async move {
        let mut state = state?;
        let (event, ended) = state.next().await;
        Some((Ok::<_, Infallible>(event), (!ended).then_some(state)))
    });
    Sse::new(events).keep_alive(KeepAlive::new().interval(KEEP_ALIVE)).into_response()
}

struct State {
    output: OutputStream,
    offset: Option<u64>,
    stdout: Text,
    stderr: Text,
}

impl State {
    /// The next event, and whether it is the last.
    async fn next(&mut self) -> (SseEvent, bool) {
        loop {
            let (name, text, length) = match self.output.next().await {
                Ok(Event::Stdout(bytes)) => ("stdout", self.stdout.push(&bytes), bytes.len()),
                Ok(Event::Stderr(bytes)) => ("stderr", self.stderr.push(&bytes), bytes.len()),
                Ok(Event::Answer(answer)) => {
                    let json = serde_json::from_slice::<Box<RawValue>>(&answer);
                    let json = json.map_or_else(|_| "{}".to_owned(), |json| json.get().to_owned());
                    return (SseEvent::default().event("result").data(json), true);
                }
                Err(error) => {
                    let json = serde_json::to_string(&ErrorBody { error }).unwrap_or_default();
                    return (SseEvent::default().event("error").data(json), true);
                }
            };
            if let Some(offset) = &mut self.offset {
                *offset += length as u64;
            }
            if text.is_empty() {
                continue;
            }
            let data = serde_json::json!({ "text": text }).to_string();
            let event = SseEvent::default().event(name).data(data);
            // A character that is not whole yet would be lost by resuming after this event.
            let whole = self.stdout.is_whole() && self.stderr.is_whole();
            let id = self.offset.filter(|_| whole);
            return (
                match id {
                    Some(id) => event.id(id.to_string()),
                    None => event,
                },
                false,
            );
        }
    }
}

/// Bytes as text, across the borders of pieces.
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

/// How many bytes at the end are the beginning of a character.
fn incomplete(bytes: &[u8]) -> usize {
    let tail = &bytes[bytes.len().saturating_sub(4)..];
    match std::str::from_utf8(tail) {
        Err(error) if error.error_len().is_none() => tail.len() - error.valid_up_to(),
        Err(_) => {
            // The tail may begin inside a character: look for one that begins and does not end.
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
