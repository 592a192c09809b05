//! Many MCP clients on one stdio process.
//!
//! An MCP server on stdio has one client. [`Bridge`] is that client, and lets any number of others use the process. It forwards
//! their messages as raw text with ids of its own (`routes.rs`), and sends each answer to the client that asked. It knows
//! neither HTTP nor sandboxes: bytes come in by [`Bridge::receive`], lines go out by [`Outgoing::next`].
//!
//! Invariants: the output of the process never blocks the bridge and never makes it grow, because every queue is bounded. A client
//! that does not read misses notifications, never an answer. A request always ends: with its answer, an error when the process
//! ends or its time is over, or its cancellation.

mod bridge;
pub mod crash_loop;
mod error;
mod exchange;
mod incoming;
mod initialize;
pub mod journal;
mod limits;
mod lines;
mod outgoing;
mod routes;

pub use bridge::{Bridge, Phase};
pub use error::{BridgeError, Down};
pub use exchange::Exchange;
pub use initialize::Initialized;
pub use limits::MAX_LINE_BYTES;
pub use outgoing::Outgoing;
pub use routes::{ClientId, Item, Role};
