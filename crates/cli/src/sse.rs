//! Server-sent events: an incremental parser, and the stream of events of a response.

use std::collections::VecDeque;

use anyhow::{Context as _, Result, bail};
use reqwest::Response;

/// The size limit of an event. The events of the server are far smaller.
const MAX_EVENT_BYTES: usize = 16 << 20;

/// One event.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Event {
    /// Its kind. `message` if the server gives none.
    pub(crate) event: String,
    /// Its content.
    pub(crate) data: String,
    /// The last id that the server sent, with this event or before it.
    pub(crate) id: Option<String>,
}

/// Parses bytes to events. The bytes may be split anywhere.
#[derive(Debug, Default)]
pub(crate) struct Parser {
    /// The bytes of an incomplete line.
    line: Vec<u8>,
    /// The last line ended with CR. An LF that follows belongs to the same line ending.
    after_cr: bool,
    past_start: bool,
    event: String,
    data: String,
    has_data: bool,
    id: Option<String>,
}

impl Parser {
    /// Takes the next bytes and returns the events that they complete.
    pub(crate) fn push(&mut self, mut bytes: &[u8]) -> Result<Vec<Event>> {
        let mut events = Vec::new();
        while let Some(first) = bytes.first() {
            if std::mem::take(&mut self.after_cr) && *first == b'\n' {
                bytes = &bytes[1..];
                continue;
            }
            let Some(end) = bytes.iter().position(|byte| matches!(byte, b'\n' | b'\r')) else {
                self.line.extend_from_slice(bytes);
                break;
            };
            self.line.extend_from_slice(&bytes[..end]);
            self.after_cr = bytes[end] == b'\r';
            bytes = &bytes[end + 1..];
            events.extend(self.end_line());
        }
        if self.line.len() + self.data.len() > MAX_EVENT_BYTES {
            bail!("the server sent an event of more than {MAX_EVENT_BYTES} bytes");
        }
        Ok(events)
    }

    fn end_line(&mut self) -> Option<Event> {
        let bytes = std::mem::take(&mut self.line);
        let text = String::from_utf8_lossy(&bytes);
        let mut line = text.as_ref();
        if !std::mem::replace(&mut self.past_start, true) {
            line = line.strip_prefix('\u{feff}').unwrap_or(line);
        }
        if line.is_empty() {
            return self.end_event();
        }
        let (field, value) = line.split_once(':').unwrap_or((line, ""));
        let value = value.strip_prefix(' ').unwrap_or(value);
        match field {
            "event" => value.clone_into(&mut self.event),
            "data" => {
                if std::mem::replace(&mut self.has_data, true) {
                    self.data.push('\n');
                }
                self.data.push_str(value);
            }
            "id" if !value.contains('\0') => self.id = Some(value.to_owned()),
            // A comment (no field name), `retry`, or a field that this program does not know.
            _ => {}
        }
        None
    }

    fn end_event(&mut self) -> Option<Event> {
        let event = std::mem::take(&mut self.event);
        let data = std::mem::take(&mut self.data);
        if !std::mem::take(&mut self.has_data) {
            return None;
        }
        let event = if event.is_empty() { "message".to_owned() } else { event };
        Some(Event { event, data, id: self.id.clone() })
    }
}

/// The events of a response.
#[derive(Debug)]
pub(crate) struct EventStream {
    response: Response,
    parser: Parser,
    ready: VecDeque<Event>,
}

impl EventStream {
    /// The events of this response.
    pub(crate) fn new(response: Response) -> Self {
        Self { response, parser: Parser::default(), ready: VecDeque::new() }
    }

    /// The next event. `None` when the server has ended the response.
    pub(crate) async fn next(&mut self) -> Result<Option<Event>> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                return Ok(Some(event));
            }
            let bytes = self.response.chunk().await.context("the connection to the server was lost")?;
            let Some(bytes) = bytes else { return Ok(None) };
            self.ready.extend(self.parser.push(&bytes)?);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn event(event: &str, data: &str, id: Option<&str>) -> Event {
        Event { event: event.into(), data: data.into(), id: id.map(str::to_owned) }
    }

    #[test]
    fn parser_handles_fields_comments_and_all_line_endings() {
        let text = "\u{feff}: hello\r\nevent: stdout\r\ndata: {\"text\":\"ä\"}\r\nid: 7\r\n\r\n\
                    data:first\rdata:  second\r\rretry: 5\nunknown\nevent: nothing\n\ndata\n\ndata: cut";
        let events = Parser::default().push(text.as_bytes()).unwrap();
        assert_eq!(
            events,
            [
                event("stdout", "{\"text\":\"ä\"}", Some("7")),
                event("message", "first\n second", Some("7")),
                event("message", "", Some("7")),
            ]
        );
    }

    #[test]
    fn line_over_the_size_limit_is_refused() {
        let mut parser = Parser::default();
        let chunk = vec![b'x'; 1 << 20];
        let failed = (0..20).any(|_| parser.push(&chunk).is_err());
        assert!(failed);
    }

    proptest! {
        #[test]
        fn events_do_not_depend_on_how_the_bytes_are_split(
            lines in prop::collection::vec("(event: |data: |id: |: |)[a-zäπ:]{0,5}(\r\n|\n|\r|\n\n|\r\r|\r\n\r\n)", 0..20),
            cuts in prop::collection::vec(0_usize..400, 0..20),
        ) {
            let bytes = lines.concat().into_bytes();
            let whole = Parser::default().push(&bytes).unwrap();
            let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(bytes.len())).collect();
            cuts.extend([0, bytes.len()]);
            cuts.sort_unstable();
            let mut parser = Parser::default();
            let mut split = Vec::new();
            for window in cuts.windows(2) {
                split.extend(parser.push(&bytes[window[0]..window[1]]).unwrap());
            }
            prop_assert_eq!(whole, split);
        }

        #[test]
        fn parser_accepts_any_bytes(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            prop_assert!(Parser::default().push(&bytes).is_ok());
        }
    }
}
