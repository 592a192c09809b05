//! Names of HTTP headers.

/// The id of a session (legacy era).
pub const SESSION_ID: &str = "mcp-session-id";
/// The version of the protocol that a request is written in.
pub const PROTOCOL_VERSION: &str = "mcp-protocol-version";
/// The method of a request (modern era).
pub const METHOD: &str = "mcp-method";
/// The tool, prompt, resource or task of a request (modern era).
pub const NAME: &str = "mcp-name";
/// The last event that a client received of a stream (legacy era).
pub const LAST_EVENT_ID: &str = "last-event-id";
