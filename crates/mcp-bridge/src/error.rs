//! Failures of the bridge.

use std::sync::Arc;

use emergent_mcp_protocol::codes;

use crate::limits::MAX_LINE_BYTES;

/// The reason that there is no process.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{why}")]
pub struct Down {
    /// The reason, for the client.
    pub why: Arc<str>,
    /// Whether the process ended by itself. If not, it was not started, it was stopped, or the connection to it was lost, which says
    /// nothing about the process.
    pub has_exited: bool,
}

impl From<&str> for Down {
    /// A process that did not end by itself.
    fn from(why: &str) -> Self {
        Self { why: why.into(), has_exited: false }
    }
}

/// A request that has no answer of the server.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BridgeError {
    /// There is no process, or it ended before it answered. With every other error the process is still there.
    #[error("{0}")]
    Down(Down),
    /// The limit on requests in progress is reached.
    #[error("too many requests wait for this server: try again later")]
    Busy,
    /// The client has another request with this id in progress.
    #[error("this client has a request with this id in progress: use another id")]
    DuplicateId,
    /// The process refused `initialize`, or its answer is not understood or too long.
    #[error("the server refused to initialize: {0}")]
    Refused(String),
    /// The process did not answer in time.
    #[error("the MCP server has not answered within {0} ms; the request was cancelled")]
    TimedOut(u128),
    /// The answer is longer than a line may be.
    #[error("the answer has {0} bytes, more than the limit of {MAX_LINE_BYTES}")]
    AnswerTooLong(u64),
}

impl BridgeError {
    /// The code of the JSON-RPC error.
    pub const fn code(&self) -> i64 {
        match self {
            Self::Down(_) | Self::Busy | Self::Refused(_) => codes::SERVER_GONE,
            Self::DuplicateId => codes::INVALID_REQUEST,
            Self::TimedOut(_) => codes::TIMED_OUT,
            Self::AnswerTooLong(_) => codes::INTERNAL_ERROR,
        }
    }
}
