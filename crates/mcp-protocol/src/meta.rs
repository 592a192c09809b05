//! Names of members of `_meta`.

/// The version of the protocol that a request is written in (modern era).
pub const PROTOCOL_VERSION: &str = "io.modelcontextprotocol/protocolVersion";
/// The capabilities of the client that sends a request (modern era).
pub const CLIENT_CAPABILITIES: &str = "io.modelcontextprotocol/clientCapabilities";
/// The name and version of the client that sends a request (modern era).
pub const CLIENT_INFO: &str = "io.modelcontextprotocol/clientInfo";
/// The name and version of the server that answers (modern era).
pub const SERVER_INFO: &str = "io.modelcontextprotocol/serverInfo";
/// The subscription that a notification belongs to (modern era).
pub const SUBSCRIPTION_ID: &str = "io.modelcontextprotocol/subscriptionId";
/// The level from which a request wants the server's log messages (modern era).
pub const LOG_LEVEL: &str = "io.modelcontextprotocol/logLevel";
