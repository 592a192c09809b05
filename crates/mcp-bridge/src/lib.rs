//! Many MCP clients on one stdio process.
//!
//! An MCP server on stdio has one client and no idea of others. [`Bridge`] is that client, and lets any number of others
//! use the process: it forwards their messages as raw text with ids of its own (`routes.rs`), and what comes back goes to
//! who asked. It knows neither HTTP nor sandboxes: bytes come in by [`Bridge::receive`], lines go out by
//! [`Outgoing::next`].
//!
//! Invariants: the process's output never makes the bridge wait or grow: every queue is bounded, and who does not read
//! misses notifications, never an answer. A request always ends: with its answer, an error when the process ends or its
//! time is over, or its cancellation.

mod bridge;
pub mod crash_loop;
pub mod envelope;
pub mod journal;
mod lines;
mod routes;

pub use bridge::{
    Bridge, BridgeError, Exchange, Initialized, MAX_LINE_BYTES, NEWEST_LEGACY, Outgoing, Phase,
};
pub use routes::{ClientId, Item, Role};
