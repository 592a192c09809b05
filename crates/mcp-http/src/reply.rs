//! Answers: one message as JSON, or several as server-sent events.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use emergent_mcp_protocol::envelope::{error_line, error_without_id};
use futures_util::{Stream, StreamExt as _, stream};
use http::{HeaderName, HeaderValue, Response, StatusCode, header};
use http_body::Frame;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt as _, Empty, Full, StreamBody};

use crate::event_log::{EventLog, Read};
use crate::headers::{EVENTS, JSON};
use crate::peer::{Caller, Exchange, Item};
use crate::session::{InUse, Session};

/// The body of an answer: all at once, or events as they come.
pub type ResponseBody = UnsyncBoxBody<Bytes, Infallible>;

/// The time between two signs of life on a silent connection, so that proxies do not close it. Most wait for 60 s, some for 30 s.
pub(crate) const KEEP_ALIVE: Duration = Duration::from_secs(15);
/// The pause before a client that lost its connection reconnects, in milliseconds.
const RETRY_MS: u32 = 1000;

/// An answer without a body.
pub(crate) fn empty(status: StatusCode) -> Response<ResponseBody> {
    with_status(status, Empty::new().boxed_unsync())
}

/// One message.
pub(crate) fn json(status: StatusCode, message: String) -> Response<ResponseBody> {
    let mut response = with_status(status, Full::new(Bytes::from(message)).boxed_unsync());
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(JSON));
    response
}

/// A JSON-RPC error. The id is left out when that of the request is unknown.
pub(crate) fn error(
    status: StatusCode,
    id: Option<&str>,
    code: i64,
    message: &str,
) -> Response<ResponseBody> {
    let line = match id {
        Some(id) => error_line(id, code, message),
        None => error_without_id(code, message),
    };
    json(status, line)
}

fn with_status(status: StatusCode, body: ResponseBody) -> Response<ResponseBody> {
    let mut response = Response::new(body);
    *response.status_mut() = status;
    response
}

fn events(events: impl Stream<Item = Bytes> + Send + 'static) -> Response<ResponseBody> {
    let frames = events.map(|bytes| Ok(Frame::data(bytes)));
    let mut response = Response::new(StreamBody::new(frames).boxed_unsync());
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(EVENTS));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    headers.insert(HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no"));
    response
}

/// A stream of a session, ready to be sent.
pub(crate) struct SessionStream<C: Caller> {
    pub(crate) session: Arc<Session<C>>,
    /// Held while the stream is open. A request's stream needs none: the request is a use itself.
    pub(crate) in_use: Option<InUse<C>>,
    /// The number of the stream within its session.
    pub(crate) number: u64,
    pub(crate) log: Arc<EventLog>,
    /// The last event that the client has; none to continue after the last event that was sent.
    pub(crate) after: Option<u64>,
    /// Whether the stream begins with an event without a message. Its id lets the client reconnect before the first message.
    pub(crate) begins_empty: bool,
}

impl<C: Caller> SessionStream<C> {
    /// Sends the messages of the stream until it ends or another reader takes over.
    pub(crate) fn send(self) -> Response<ResponseBody> {
        let Self { session, in_use, number, log, after, begins_empty } = self;
        let cursor = log.open(after);
        let first = begins_empty.then(|| {
            let id = session.event_id(number, cursor.at());
            Bytes::from(format!("id: {id}\nretry: {RETRY_MS}\ndata: \n\n"))
        });
        let state = (session, log, cursor, in_use);
        let rest = stream::unfold(state, move |(session, log, mut cursor, in_use)| async move {
            let text = match tokio::time::timeout(KEEP_ALIVE, log.next(&mut cursor)).await {
                Ok(Read::Event(event, message)) => {
                    format!("id: {}\ndata: {message}\n\n", session.event_id(number, event))
                }
                Ok(Read::Ended | Read::Replaced) => return None,
                Err(_) => ": keep-alive\n\n".to_owned(),
            };
            Some((Bytes::from(text), (session, log, cursor, in_use)))
        });
        events(stream::iter(first).chain(rest))
    }
}

/// Sends an exchange as it comes. The exchange ends with the connection.
pub(crate) fn exchange_events(
    first: Option<Item>,
    exchange: Box<dyn Exchange>,
    lost: String,
) -> Response<ResponseBody> {
    let state = (first, Some(exchange), lost);
    let stream = stream::unfold(state, |(first, exchange, lost)| async move {
        let mut exchange = exchange?;
        let item = match first {
            Some(item) => Some(item),
            None => match tokio::time::timeout(KEEP_ALIVE, exchange.next()).await {
                Ok(item) => item,
                Err(_) => {
                    return Some((Bytes::from_static(b": keep-alive\n\n"), (None, Some(exchange), lost)));
                }
            },
        };
        match item {
            Some(Item::Message(line)) => Some((event(&line), (None, Some(exchange), lost))),
            Some(Item::Answer(line)) => Some((event(&line), (None, None, lost))),
            Some(Item::Cancelled) => None,
            None => Some((event(&lost), (None, None, String::new()))),
        }
    });
    events(stream)
}

fn event(message: &str) -> Bytes {
    Bytes::from(format!("data: {message}\n\n"))
}
