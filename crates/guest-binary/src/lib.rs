//! The guest agent's static binary, as bytes inside the server.
//!
//! The build script builds it (or takes the file that `EMERGENT_GUEST_BINARY` names), so that one
//! `cargo build` gives one self-contained `emergent`.

/// The binary: static, for the architecture of the host.
pub static GUEST_BINARY: &[u8] = include_bytes!(env!("GUEST_BINARY_PATH"));
/// SHA-256 of the binary, in hexadecimal.
pub const GUEST_BINARY_SHA256: &str = env!("GUEST_BINARY_SHA256");
