//! The server: it owns the workspaces' lifecycle, and serves the REST API.
//!
//! ```text
//! http/       parses, checks access, calls, converts; the only module that knows axum
//! workspace/  placement, lifecycle, tool calls, recovery
//! background  what runs without being asked: takes no input, looks, converges
//! audit       one writer for the hash chain
//! server      starting and stopping
//! ```
//! Invariant: intent is written to the store before any effect outside it, so that after a crash at any point the
//! rows say what to finish or undo.

mod audit;
mod background;
pub mod config;
mod docs_page;
mod events;
mod http;
mod mcp;
mod server;
mod storage;
mod tls;
mod workspace;

pub use config::{ConfigError, Overrides, Settings};
pub use server::{Running, ServeError, serve};

/// The OpenAPI description of the REST API, as JSON text.
pub fn openapi_json() -> String {
    let mut text = http::openapi().to_pretty_json().unwrap_or_default();
    text.push('\n');
    text
}
