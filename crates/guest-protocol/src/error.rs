//! Violations of the protocol.

use crate::frame::Kind;

/// A violation of the protocol. It ends the connection.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProtocolError {
    /// The kind does not exist, or the peer may not send it now.
    #[error("unexpected frame kind {0}")]
    UnexpectedKind(u8),
    /// A length the kind does not allow.
    #[error("a {kind:?} frame of {length} bytes (allowed: {allowed})")]
    BadLength {
        /// The kind.
        kind: Kind,
        /// The length the header gave.
        length: usize,
        /// The lengths it may have.
        allowed: &'static str,
    },
    /// The kind needs a call id and has none, or has one and needs none.
    #[error("a {0:?} frame with call id {1}")]
    BadCallId(Kind, u32),
    /// The payload of a message is not the expected JSON.
    #[error("the JSON of a {kind:?} frame is invalid: {reason}")]
    BadMessage {
        /// The kind.
        kind: Kind,
        /// The JSON parser's message.
        reason: String,
    },
    /// A frame for a call that is not open.
    #[error("a {0:?} frame for call {1}, which is not open")]
    UnknownCall(Kind, u32),
    /// More data than the credit allows.
    #[error("call {0} sent more data than it was granted")]
    OverCredit(u32),
    /// A call id that was used before.
    #[error("call id {0} was used twice")]
    ReusedCallId(u32),
    /// The stream ended inside a frame.
    #[error("the connection ended in the middle of a frame")]
    Truncated,
}
