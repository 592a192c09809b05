//! The host's end of the channel to a guest agent.
//!
//! [`GuestClient::connect`] takes any byte stream, exchanges HELLO with the agent and then carries many calls at once. Two
//! tasks serve a channel: one writes queued frames, one reads frames and delivers them to their calls.
//! [`GuestClient::listen`] opens a port in the sandbox, whose connections are byte streams on the host.
//!
//! The guest is not trusted. A call costs the host at most the credit that it granted plus one bounded answer. A frame that
//! breaks the protocol ends the channel. A ping detects a guest that stops answering, and a time limit for writes one that
//! stops reading. The reader never waits for a call: its queue is bounded by credit.

mod call;
mod channel;
mod input;
mod listener;
mod silence;
mod table;
mod tunnel;

pub use call::{Call, CallError, Event};
pub use channel::{Closed, ConnectError, GuestClient};
pub use input::CallInput;
pub use listener::GuestListener;
pub use tunnel::TunnelConnection;
