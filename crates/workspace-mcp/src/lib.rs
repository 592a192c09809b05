//! One workspace's tools as an MCP server.
//!
//! ```text
//!  request ─▶ mcp-http (eras, sessions, streams) ─▶ WorkspacePeer ─▶ Tools ─▶ control plane
//!                                                    │
//!                                                    ├─ progress  output while a tool runs
//!                                                    └─ result    data for programs, text for the model
//! ```
//!
//! The tools are those of the REST API: the same requests, answers and errors, with the same names. This crate knows neither the
//! tools nor the way they run: both are behind [`Tools`].
//!
//! Invariants: the number of calls and the queued output are bounded. A call is dropped, and so cancelled, when its client cancels it or
//! when its session or the server ends. A slow client slows neither a command nor other calls of its session.

mod peer;
mod progress;
mod result;
mod server;
mod tools;

pub use progress::OutputSink;
pub use server::{Config, WorkspaceMcp};
pub use tools::{Call, Hints, ToolContent, ToolDescription, ToolResult, Tools};
