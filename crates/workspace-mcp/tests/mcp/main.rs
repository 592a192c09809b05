//! The server through its real HTTP service, with a workspace in memory behind it.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod both_eras;
mod front;
mod peer;
mod sessions;
mod support;
