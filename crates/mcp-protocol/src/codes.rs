//! Codes of JSON-RPC errors.

/// The message is not JSON.
pub const PARSE_ERROR: i64 = -32700;
/// The message is JSON, but not a JSON-RPC message.
pub const INVALID_REQUEST: i64 = -32600;
/// The method is unknown.
pub const METHOD_NOT_FOUND: i64 = -32601;
/// The parameters are unusable.
pub const INVALID_PARAMS: i64 = -32602;
/// A fault of the receiver.
pub const INTERNAL_ERROR: i64 = -32603;
/// The server's process ended, or is not there.
pub const SERVER_GONE: i64 = -32000;
/// The server did not answer in time.
pub const TIMED_OUT: i64 = -32001;
/// Headers and body of a request of the modern era (a version without sessions) disagree.
pub const HEADER_MISMATCH: i64 = -32020;
/// The client lacks a capability that the server needs.
pub const MISSING_CAPABILITY: i64 = -32021;
/// The version of the protocol is not supported.
pub const UNSUPPORTED_VERSION: i64 = -32022;
