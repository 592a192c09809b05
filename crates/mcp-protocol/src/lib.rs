//! The Model Context Protocol as all crates here use it: its constants, and JSON-RPC messages as raw text. No I/O.
//!
//! The protocol has two eras. In the *legacy* era (up to [`version::NEWEST_LEGACY`]) a client begins a session with
//! `initialize`. In the *modern* era ([`version::MODERN`]) there are no sessions: each request describes itself in its `_meta`.

pub mod codes;
pub mod envelope;
pub mod headers;
pub mod meta;
pub mod methods;
pub mod version;
