//! One address, for clients of both eras.

use std::collections::HashSet;
use std::fmt::Display;
use std::time::Duration;

use bytes::Bytes;
use emergent_mcp_protocol::envelope::{Message, MessageKind};
use emergent_mcp_protocol::{codes, meta, methods};
use http::{HeaderMap, Method, Request, Response, StatusCode};
use http_body::Body;

use crate::peer::{Caller, Server};
use crate::refusal::Refusal;
use crate::reply::{self, ResponseBody};
use crate::sessions::Sessions;
use crate::{body, headers, modern};

/// The limits of an endpoint.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Sessions at once.
    pub sessions: usize,
    /// A session without a request and an open stream ends after this time.
    pub session_idle: Duration,
    /// At the limit a new session may replace one that was idle for this time. A session that listens is idle only where this time
    /// is zero.
    pub session_replaceable: Duration,
    /// A request of the legacy era that has no answer after this time is answered by a stream of events, which its client can
    /// continue after a lost connection. In the modern era, where an error has a status and nothing can be continued, the stream
    /// begins when the first sign of life is due.
    pub events_after: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            sessions: 64,
            session_idle: Duration::from_secs(3600),
            session_replaceable: Duration::ZERO,
            events_after: Duration::from_secs(1),
        }
    }
}

/// The HTTP side of one MCP server: its sessions and their streams. Dropping it ends them.
pub struct Endpoint<C: Caller> {
    pub(crate) sessions: Sessions<C>,
    pub(crate) events_after: Duration,
}

impl<C: Caller> Endpoint<C> {
    /// An endpoint without sessions.
    pub fn new(limits: Limits) -> Self {
        let sessions = Sessions::new(limits.sessions, limits.session_idle, limits.session_replaceable);
        Self { sessions, events_after: limits.events_after }
    }

    /// Answers a request. The caller was authenticated and authorised, and [`crate::OriginPolicy`] was applied.
    ///
    /// In the modern era, dropping the future or an incomplete body of an answer cancels the request. In the legacy era the
    /// request continues until the client cancels it or its session ends.
    pub async fn handle<B>(
        &self,
        server: &dyn Server<C>,
        caller: &C,
        request: Request<B>,
    ) -> Result<Response<ResponseBody>, Refusal>
    where
        B: Body + Send,
        B::Data: Send,
        B::Error: Into<Box<dyn std::error::Error + Send + Sync>> + Display,
    {
        let (parts, body) = request.into_parts();
        match parts.method {
            Method::POST => {
                headers::check_types(&parts.headers)?;
                let bytes = body::read(body).await?;
                self.post(server, caller, &parts.headers, &bytes).await
            }
            Method::GET => self.listen(caller, &parts.headers),
            Method::DELETE => self.end(caller, &parts.headers),
            _ => Err(Refusal::MethodNotAllowed),
        }
    }

    async fn post(
        &self,
        server: &dyn Server<C>,
        caller: &C,
        headers: &HeaderMap,
        body: &Bytes,
    ) -> Result<Response<ResponseBody>, Refusal> {
        let message = match parse(body) {
            Ok(message) => message,
            Err((code, text)) => return Ok(reply::error(StatusCode::BAD_REQUEST, None, code, &text)),
        };
        server.on_message(&message);
        if is_modern(headers, &message) {
            return modern::post(server, caller, headers, &message).await;
        }
        if message.kind == MessageKind::Request && message.method.as_deref() == Some(methods::INITIALIZE) {
            return self.initialize(server, caller, &message).await;
        }
        let session = self.session(caller, headers)?;
        Ok(self.in_session(&session, caller, &message).await)
    }

    /// Ends the sessions that were idle for too long.
    pub fn sweep(&self) {
        self.sessions.sweep();
    }

    /// Ends the sessions of an owner that may no longer have any, such as a revoked token. Their requests are cancelled, also those
    /// that continue without a connection. Requests of the modern era have none: they end with their connection.
    pub fn end_of_owner(&self, owner: &C::Owner) {
        self.sessions.remove_owner(owner);
    }

    /// The owners that have sessions.
    pub fn owners(&self) -> HashSet<C::Owner> {
        self.sessions.owners()
    }

    /// Ends all sessions.
    pub fn end_all(&self) {
        self.sessions.remove_all();
    }

    /// Sessions that are open.
    pub fn session_count(&self) -> usize {
        self.sessions.count()
    }

    /// Requests of sessions that are in progress.
    pub fn requests_in_progress(&self) -> usize {
        self.sessions.requests()
    }
}

/// Reads a message. The error is that of JSON-RPC: its code and text.
fn parse(body: &[u8]) -> Result<Message<'_>, (i64, String)> {
    let text =
        std::str::from_utf8(body).map_err(|_| (codes::PARSE_ERROR, "the message is not UTF-8".to_owned()))?;
    Message::parse(text).map_err(|error| (error.code(), error.to_string()))
}

/// Whether a message belongs to the modern era, by its header or by its `_meta`.
fn is_modern(headers: &HeaderMap, message: &Message<'_>) -> bool {
    headers::is_modern(headers) || message.meta().is_some_and(|own| own.get(meta::PROTOCOL_VERSION).is_some())
}
