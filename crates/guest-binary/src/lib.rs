//! The static binaries that go into every sandbox, as bytes inside the server.
//!
//! The build script builds them, so that one `cargo build` gives one self-contained `emergent`.

/// The guest agent.
pub static GUEST: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/guest"));
/// The search engine that the agent starts for glob and grep.
pub static SEARCH: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/search"));
/// SHA-256 over both, in hexadecimal.
pub const GUEST_SHA256: &str = env!("GUEST_SHA256");

/// Both, with the names they have in the sandbox's `/.emergent`.
pub const FILES: [(&str, &[u8]); 2] = [("guest", GUEST), ("search", SEARCH)];
