//! Answers of MCP's Streamable HTTP: one message as JSON, or several as server-sent events.

use std::convert::Infallible;
use std::sync::Arc;

use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use emergent_mcp_bridge::envelope::error_line;
use emergent_mcp_bridge::{Exchange, Item};
use futures_util::stream;

use super::stream::KEEP_ALIVE;
use crate::mcp::events::{EventLog, Read};
use crate::mcp::session::Session;

/// Where a session's id travels.
pub(super) const SESSION_HEADER: &str = "mcp-session-id";
/// When a client that was cut off should come back, in milliseconds.
const RETRY_MS: u32 = 1000;

/// One message.
pub(super) fn json(status: StatusCode, message: String) -> Response {
    (status, [(header::CONTENT_TYPE, "application/json")], message).into_response()
}

/// An error; without an id where the request's is not known.
pub(super) fn error(status: StatusCode, id: Option<&str>, code: i64, message: &str) -> Response {
    let line = match id {
        Some(id) => error_line(id, code, message),
        None => error_line("0", code, message).replacen("\"id\":0,", "", 1),
    };
    json(status, line)
}

/// Nothing to say.
pub(super) fn accepted() -> Response {
    StatusCode::ACCEPTED.into_response()
}

fn sse(body: Body) -> Response {
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream")),
        (header::CACHE_CONTROL, HeaderValue::from_static("no-cache")),
        (header::HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no")),
    ];
    (headers, body).into_response()
}

/// The messages of one of a session's streams, from where its reader is. `primed`: begins with an event without a message,
/// so that a client has something to come back with from the first moment.
pub(super) fn session_events(
    session: Arc<Session>,
    number: u64,
    log: Arc<EventLog>,
    after: Option<u64>,
    primed: bool,
) -> Response {
    let cursor = log.open(after);
    let prime = primed.then(|| format!("id: {number}-{}\nretry: {RETRY_MS}\ndata: \n\n", after.unwrap_or(0)));
    let state = (session, log, cursor, prime);
    let events = stream::unfold(state, move |(session, log, mut cursor, prime)| async move {
        if let Some(prime) = prime {
            return Some((Ok::<_, Infallible>(Bytes::from(prime)), (session, log, cursor, None)));
        }
        let text = match tokio::time::timeout(KEEP_ALIVE, log.next(&mut cursor)).await {
            Ok(Read::Event(event, message)) => format!("id: {number}-{event}\ndata: {message}\n\n"),
            Ok(Read::Ended | Read::Replaced) => return None,
            Err(_) => ": keep-alive\n\n".to_owned(),
        };
        session.touch();
        Some((Ok(Bytes::from(text)), (session, log, cursor, None)))
    });
    sse(Body::from_stream(events))
}

/// What comes back for a request that ends with its connection, beginning with this item.
pub(super) fn exchange_events(first: Item, exchange: Exchange) -> Response {
    let events = stream::unfold((Some(first), Some(exchange)), |(first, exchange)| async move {
        let mut exchange = exchange?;
        let item = match first {
            Some(item) => item,
            None => match tokio::time::timeout(KEEP_ALIVE, exchange.next()).await {
                Ok(item) => item?,
                Err(_) => return Some((Ok(Bytes::from(": keep-alive\n\n")), (None, Some(exchange)))),
            },
        };
        match item {
            Item::Message(line) | Item::Progress(line) => {
                Some((Ok::<_, Infallible>(event(&line)), (None, Some(exchange))))
            }
            Item::Answer(line) => Some((Ok(event(&line)), (None, None))),
            Item::Cancelled => None,
        }
    });
    sse(Body::from_stream(events))
}

fn event(message: &str) -> Bytes {
    Bytes::from(format!("data: {message}\n\n"))
}
