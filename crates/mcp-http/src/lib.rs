//! MCP's Streamable HTTP, for any server behind it.
//!
//! ```text
//!  request ─▶ OriginPolicy ─▶ Endpoint ─┬─ legacy: Session ─┐
//!                             (body,    │  (EventLog per    ├─▶ Peer (a bridge to a process, or a server in this process)
//!                              headers) └─ modern ──────────┘
//! ```
//!
//! [`Endpoint`] serves both eras of the protocol at one address. The server behind it implements [`Server`] and [`Peer`]. The
//! [`Caller`] of a request is an argument beside the message and never a part of it.
//!
//! Invariants: sessions, event logs, bodies and waiting times are bounded. A session accepts only requests of the owner that
//! began it. A client that does not read its stream blocks neither its session nor the server.

mod body;
mod endpoint;
mod event_log;
mod headers;
mod legacy;
mod modern;
mod origin;
mod peer;
mod refusal;
mod reply;
mod session;
mod sessions;

pub use endpoint::{Endpoint, Limits};
pub use origin::{InvalidOrigin, Origin, OriginPolicy, OriginRefusal};
pub use peer::{Caller, Cause, Exchange, Initialized, Item, Peer, PeerError, Server};
pub use refusal::Refusal;
pub use reply::ResponseBody;
