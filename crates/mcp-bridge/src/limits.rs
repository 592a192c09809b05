//! The limits of a bridge.

/// The longest line of a process.
pub const MAX_LINE_BYTES: usize = 8 << 20;
/// The bytes that wait to be written to a process.
pub(crate) const MAX_QUEUED_BYTES: usize = 16 << 20;
/// The messages that wait to be written to a process.
pub(crate) const MAX_QUEUED: usize = 256;
/// The messages that wait for a client. Further notifications are dropped; the answer always has a place.
pub(crate) const CLIENT_QUEUE: usize = 64;
/// The requests that wait for answers.
pub(crate) const MAX_PENDING: usize = 4096;
/// The requests of the process that wait for the client's answer.
pub(crate) const MAX_ASKED: usize = 256;
/// The subscriptions of a client.
pub(crate) const MAX_SUBSCRIPTIONS: usize = 256;
/// The bytes in the URIs of a client's subscriptions.
pub(crate) const MAX_SUBSCRIPTION_BYTES: usize = 64 << 10;
