//! Numbers that host and guest must agree on, besides those of frames and credit.

/// The calls that may run at once on one connection, besides ACCEPT calls.
pub const MAX_CALLS: usize = 64;
/// The LISTEN calls that may be open at once on one connection.
pub const MAX_LISTENERS: usize = 8;
/// The ACCEPT calls that may be open at once on one connection, with and without a TCP connection.
pub const MAX_ACCEPTS: usize = 64;

/// The vsock port on which the agent of a virtual machine takes channels.
pub const CHANNEL_PORT: u32 = 1024;
/// The vsock port of the host. The agent connects to it once when it is ready to take channels.
pub const READY_PORT: u32 = 1025;
