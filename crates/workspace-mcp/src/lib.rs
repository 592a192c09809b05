//! One workspace's tools as an MCP server.
//!
//! ```text
//!  request ─▶ service ──▶ origin (who may ask) ──▶ rmcp's Streamable HTTP ──▶ server ──▶ Tools ─▶ control plane
//!               │                                   │ legacy: sessions          │
//!               └─ body within size and time        └ modern: each request      ├─ progress output while a tool runs
//!                                                     by itself                 └─ result   data for programs, text for the model
//! ```
//!
//! The tools are those of the REST API: the same requests, answers and errors, under the same names. This is the only crate that
//! knows the MCP library. It does not know which tools there are or how they run: both is behind [`Tools`].
//!
//! Both eras of the protocol are served at one address: up to 2025-11-25 with sessions, from 2026-07-28 on without.
//!
//! Invariants: nothing here grows without bound (sessions, calls, bodies, output on its way); a call that nobody
//! waits for any more is dropped, which ends it; a slow client never slows a command down, nor its session.

mod forward;
mod origin;
mod progress;
mod result;
mod server;
mod service;
mod sessions;
mod tools;

pub use origin::{InvalidOrigin, Origin};
pub use progress::OutputSink;
pub use service::{Config, ResponseBody, WorkspaceMcp};
pub use tools::{Call, Hints, ToolContent, ToolDescription, ToolResult, Tools};
