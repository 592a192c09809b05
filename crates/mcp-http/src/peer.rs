//! The seam between the HTTP stack and the servers behind it.

use std::error::Error;
use std::fmt;
use std::hash::Hash;
use std::sync::Arc;

use async_trait::async_trait;
use emergent_mcp_protocol::codes;
use emergent_mcp_protocol::envelope::Message;
use http::StatusCode;
use tokio::sync::mpsc;

/// The sender of a request, as access control has identified it.
pub trait Caller: Clone + Send + Sync + 'static {
    /// The owner of a session.
    type Owner: Clone + Eq + Hash + Send + Sync + 'static;

    /// The owner of sessions that this caller begins. Only callers with an equal owner may use them.
    fn owner(&self) -> Self::Owner;
}

/// An MCP server behind the HTTP stack.
#[async_trait]
pub trait Server<C: Caller>: Send + Sync {
    /// Called for each message before it is processed, for records of calls.
    fn on_message(&self, _message: &Message<'_>) {}

    /// Answers `initialize` and opens the peer of a new session (legacy era).
    async fn initialize(&self, message: &Message<'_>, caller: &C) -> Result<Initialized<C>, PeerError>;

    /// The peer of requests without a session (modern era); none when the server supports only the legacy era.
    async fn stateless(&self) -> Result<Option<Arc<dyn Peer<C>>>, PeerError>;
}

/// The outcome of `initialize`.
pub enum Initialized<C> {
    /// A session begins.
    Session {
        /// The answer: a result.
        answer: String,
        /// The peer of the session.
        peer: Arc<dyn Peer<C>>,
        /// Messages of the server that belong to no request; none when it sends none.
        notifications: Option<mpsc::Receiver<String>>,
    },
    /// The server answered with this error, and there is no session.
    Refused(String),
}

/// A server as one client sees it.
#[async_trait]
pub trait Peer<C>: Send + Sync {
    /// Sends a request.
    async fn request(&self, message: &Message<'_>, caller: &C) -> Result<Box<dyn Exchange>, PeerError>;

    /// Sends a notification. It is lost when the server is away.
    async fn notify(&self, message: &Message<'_>);

    /// Sends the answer to a request of the server. It is lost when the server is away.
    async fn answer(&self, message: &Message<'_>);

    /// Whether the peer can never be used again.
    fn is_closed(&self) -> bool;

    /// Ends the peer: its requests are cancelled, its resources freed.
    fn close(&self);
}

/// A request in progress. Dropping it before its answer cancels the request.
#[async_trait]
pub trait Exchange: Send {
    /// The next item; none after the answer, or when the server ended without one. Cancel safe.
    async fn next(&mut self) -> Option<Item>;
}

/// An item of an exchange.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Item {
    /// A notification, or a request of the server, that belongs to the request.
    Message(String),
    /// The answer: the last item.
    Answer(String),
    /// The client cancelled the request, so there is no answer: the last item.
    Cancelled,
}

/// The cause of a failure behind the HTTP stack. The front that knows its type turns it into a status.
#[derive(Clone, Debug)]
pub struct Cause(Arc<dyn Error + Send + Sync>);

impl Cause {
    /// The cause, if it has this type.
    pub fn downcast_ref<E: Error + 'static>(&self) -> Option<&E> {
        self.0.downcast_ref()
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Copies of one cause are equal.
impl PartialEq for Cause {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Cause {}

/// A request that did not reach the server.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PeerError {
    /// The server is away.
    #[error("{0}")]
    Unavailable(String),
    /// The server can't be used. The front decides about the status by the cause.
    #[error("{0}")]
    Failed(Cause),
    /// Too many requests are in progress.
    #[error("{0}")]
    Busy(String),
    /// Another request of the session with the same id is in progress.
    #[error("this client has a request with this id in progress: use another id")]
    DuplicateId,
}

impl PeerError {
    /// A failure with its cause.
    pub fn failed(cause: impl Error + Send + Sync + 'static) -> Self {
        Self::Failed(Cause(Arc::new(cause)))
    }

    /// The status and the JSON-RPC code of the answer.
    pub(crate) fn status_and_code(&self) -> (StatusCode, i64) {
        match self {
            Self::Unavailable(_) | Self::Failed(_) => (StatusCode::OK, codes::SERVER_GONE),
            Self::Busy(_) => (StatusCode::TOO_MANY_REQUESTS, codes::SERVER_GONE),
            Self::DuplicateId => (StatusCode::BAD_REQUEST, codes::INVALID_REQUEST),
        }
    }
}
