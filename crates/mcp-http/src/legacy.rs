//! The legacy era of the protocol: sessions, and streams that a client can continue.

use std::sync::Arc;

use emergent_mcp_protocol::envelope::{Members, Message, MessageKind};
use emergent_mcp_protocol::{codes, headers as names, version};
use http::{HeaderMap, HeaderValue, Response, StatusCode};

use crate::Endpoint;
use crate::headers::{EVENTS, accepts, is_modern, text};
use crate::peer::{Caller, Initialized, Item, Server};
use crate::refusal::Refusal;
use crate::reply::{self, ResponseBody, SessionStream};
use crate::session::{LOST, RunningRequest, STANDALONE, Session, Use};

impl<C: Caller> Endpoint<C> {
    /// Begins a session.
    pub(crate) async fn initialize(
        &self,
        server: &dyn Server<C>,
        caller: &C,
        message: &Message<'_>,
    ) -> Result<Response<ResponseBody>, Refusal> {
        let place = self.sessions.reserve(caller.owner())?;
        let (answer, peer, notifications) = match server.initialize(message, caller).await {
            Ok(Initialized::Session { answer, peer, notifications }) => (answer, peer, notifications),
            Ok(Initialized::Refused(answer)) => return Ok(reply::json(StatusCode::OK, answer)),
            Err(error) => {
                let (status, code) = error.status_and_code();
                return Ok(reply::error(status, message.raw_id(), code, &error.to_string()));
            }
        };
        let accepts_empty_events = version_of(&answer).is_some_and(|own| version::accepts_empty_events(&own));
        let Some(session) = place.begin(peer, notifications, accepts_empty_events) else {
            return Ok(reply::error(StatusCode::OK, message.raw_id(), codes::SERVER_GONE, LOST));
        };
        let mut response = reply::json(StatusCode::OK, answer);
        if let Ok(id) = HeaderValue::from_str(&session.id) {
            response.headers_mut().insert(names::SESSION_ID, id);
        }
        Ok(response)
    }

    /// The session that a request names.
    pub(crate) fn session(&self, caller: &C, headers: &HeaderMap) -> Result<Arc<Session<C>>, Refusal> {
        let version = headers.get(names::PROTOCOL_VERSION).map(|value| value.to_str().unwrap_or_default());
        if version.is_some_and(|version| !version::LEGACY.contains(&version)) {
            return Err(Refusal::UnknownVersion);
        }
        let id = text(headers, names::SESSION_ID).ok_or(Refusal::SessionMissing)?;
        self.sessions.get(id, &caller.owner()).ok_or(Refusal::SessionUnknown)
    }

    /// Passes a message of a session on.
    pub(crate) async fn in_session(
        &self,
        session: &Arc<Session<C>>,
        caller: &C,
        message: &Message<'_>,
    ) -> Response<ResponseBody> {
        let in_use = session.begin_use(Use::Request);
        match message.kind {
            MessageKind::Notification => session.peer.notify(message).await,
            MessageKind::Response => session.peer.answer(message).await,
            MessageKind::Request => {
                let raw_id = message.raw_id().unwrap_or("null");
                let exchange = match session.peer.request(message, caller).await {
                    Ok(exchange) => exchange,
                    Err(error) => {
                        let (status, code) = error.status_and_code();
                        return reply::error(status, Some(raw_id), code, &error.to_string());
                    }
                };
                return self.answer(RunningRequest::new(exchange, in_use, raw_id), session, raw_id).await;
            }
        }
        reply::empty(StatusCode::ACCEPTED)
    }

    /// An answer that comes first and soon is sent as JSON. Everything else begins a stream of events.
    async fn answer(
        &self,
        mut request: RunningRequest<C>,
        session: &Arc<Session<C>>,
        raw_id: &str,
    ) -> Response<ResponseBody> {
        let first = match tokio::time::timeout(self.events_after, request.next()).await {
            Ok(Some(Item::Answer(line))) => return reply::json(StatusCode::OK, line),
            Ok(Some(Item::Cancelled)) => return reply::empty(StatusCode::ACCEPTED),
            Ok(None) => return reply::error(StatusCode::OK, Some(raw_id), codes::SERVER_GONE, LOST),
            Ok(Some(first)) => Some(first),
            Err(_) => None,
        };
        let Some((number, log)) = request.continue_in_background(first) else {
            return reply::error(StatusCode::OK, Some(raw_id), codes::SERVER_GONE, LOST);
        };
        let begins_empty = session.accepts_empty_events;
        let session = Arc::clone(session);
        SessionStream { session, in_use: None, number, log, after: Some(0), begins_empty }.send()
    }

    /// Opens the stream that belongs to no request, or continues a stream after an event.
    pub(crate) fn listen(&self, caller: &C, headers: &HeaderMap) -> Result<Response<ResponseBody>, Refusal> {
        if is_modern(headers) {
            return Err(Refusal::NoSessions);
        }
        if !accepts(headers, EVENTS) {
            return Err(Refusal::NotAcceptable(EVENTS));
        }
        let session = self.session(caller, headers)?;
        let (number, after) = match headers.get(names::LAST_EVENT_ID) {
            None => (STANDALONE, None),
            Some(id) => {
                let id = id.to_str().ok().and_then(|id| session.parse_event_id(id.trim()));
                let (number, event) = id.ok_or(Refusal::EventForeign)?;
                (number, Some(event))
            }
        };
        let log = session.stream(number).ok_or(Refusal::EventExpired)?;
        let begins_empty = after.is_none() && session.accepts_empty_events;
        let in_use = (number == STANDALONE).then(|| session.begin_use(Use::Stream));
        Ok(SessionStream { session, in_use, number, log, after, begins_empty }.send())
    }

    /// Ends a session.
    pub(crate) fn end(&self, caller: &C, headers: &HeaderMap) -> Result<Response<ResponseBody>, Refusal> {
        if is_modern(headers) {
            return Err(Refusal::NoSessions);
        }
        let session = self.session(caller, headers)?;
        if self.sessions.remove(&session.id) {
            return Ok(reply::empty(StatusCode::NO_CONTENT));
        }
        Err(Refusal::SessionUnknown)
    }
}

/// The version that an answer to `initialize` agrees to.
fn version_of(answer: &str) -> Option<String> {
    Members::of(Members::of(answer)?.get("result")?)?.string("protocolVersion")
}
