//! The host's end of the channel to a guest agent.
//!
//! [`GuestClient::connect`] takes any byte stream, greets the agent and then carries many calls at once. Two tasks
//! serve a channel: one writes what is queued, one reads frames and hands them to the calls they belong to.
//!
//! The guest is not trusted. Whatever it sends, a call costs the host at most the credit it granted plus one
//! bounded answer; a frame that breaks the protocol ends the channel; a guest that stops answering is noticed by
//! a ping. The reader never waits for a call: what may queue up is bounded by credit.

mod call;
mod channel;
mod table;

pub use call::{Call, CallError, CallInput, Event};
pub use channel::{Closed, ConnectError, GuestClient};
