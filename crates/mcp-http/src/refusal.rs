//! Requests that are refused before they become messages.

use emergent_mcp_protocol::{headers, version};
use http::StatusCode;

use crate::peer::Cause;

/// A request that is refused with an HTTP status.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The client does not accept the types of the answer.
    #[error("a client must accept {0}: send them in the header Accept")]
    NotAcceptable(&'static str),
    /// The body is not JSON by its type.
    #[error("messages are JSON: send the header Content-Type: application/json")]
    UnsupportedMediaType,
    /// The body is over the limit.
    #[error("the message is larger than {0} bytes, the limit of this address")]
    BodyTooLarge(usize),
    /// The body did not arrive in time.
    #[error("the body did not arrive within {0} s")]
    BodyTooSlow(u64),
    /// The connection failed while the body was read.
    #[error("the body can't be read: {0}")]
    BodyUnreadable(String),
    /// The method is not one of the protocol's.
    #[error("MCP clients use GET, POST and DELETE")]
    MethodNotAllowed,
    /// A client of the modern era asked for something of the legacy era.
    #[error(
        "clients of {} only POST: this version has neither sessions nor a stream to listen to",
        version::MODERN
    )]
    NoSessions,
    /// The version of the protocol is unknown.
    #[error("this server does not know this version of the protocol: it supports {}", version::ALL.join(", "))]
    UnknownVersion,
    /// The request names no session.
    #[error("the header {} is missing: begin a session with initialize", headers::SESSION_ID)]
    SessionMissing,
    /// The session has ended, never existed, or belongs to another token.
    #[error("there is no such session: begin one with initialize")]
    SessionUnknown,
    /// `Last-Event-ID` is not an id of an event of this session.
    #[error("the header {} does not name an event of this session", headers::LAST_EVENT_ID)]
    EventForeign,
    /// The stream of the event has ended, and its events were dropped.
    #[error("the events after this one are no longer kept")]
    EventExpired,
    /// The limit on sessions is reached, and none is idle.
    #[error("the limit of {0} sessions is reached, and none is idle: end one, or retry later")]
    TooManySessions(usize),
    /// The server is away.
    #[error("{0}")]
    Unavailable(String),
    /// The server can't be used. The front decides about the status by the cause.
    #[error("{0}")]
    Failed(Cause),
}

impl Refusal {
    /// The status of the answer, unless the front knows a better one by the cause of [`Refusal::Failed`].
    pub fn status(&self) -> StatusCode {
        match self {
            Self::NotAcceptable(_) => StatusCode::NOT_ACCEPTABLE,
            Self::UnsupportedMediaType => StatusCode::UNSUPPORTED_MEDIA_TYPE,
            Self::BodyTooLarge(_) => StatusCode::PAYLOAD_TOO_LARGE,
            Self::MethodNotAllowed | Self::NoSessions => StatusCode::METHOD_NOT_ALLOWED,
            Self::SessionUnknown | Self::EventExpired => StatusCode::NOT_FOUND,
            Self::TooManySessions(_) => StatusCode::TOO_MANY_REQUESTS,
            Self::Unavailable(_) | Self::Failed(_) => StatusCode::SERVICE_UNAVAILABLE,
            Self::BodyTooSlow(_)
            | Self::BodyUnreadable(_)
            | Self::UnknownVersion
            | Self::SessionMissing
            | Self::EventForeign => StatusCode::BAD_REQUEST,
        }
    }

    /// The header `Allow` of the answer.
    pub fn allow(&self) -> Option<&'static str> {
        match self {
            Self::MethodNotAllowed => Some("GET, POST, DELETE"),
            Self::NoSessions => Some("POST"),
            _ => None,
        }
    }
}
