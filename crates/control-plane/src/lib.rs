//! The server: it owns the workspaces' lifecycle, and serves the REST API.
//!
//! ```text
//! http/       parses, checks access, calls, converts; the only module that knows axum
//! tools/      the table of the tools, and the one path of their calls
//! workspace/  placement, lifecycle, calls to the guest agent, recovery
//! background  what runs without being asked: takes no input, looks, converges
//! audit       one writer for the hash chain; retention exports and removes old rows
//! server      starting and stopping
//! ```
//! Invariant: intent is written to the store before any effect outside it, so that after a crash at any point the
//! rows say what to finish or undo.

mod audit;
mod audit_retention;
mod background;
mod caller;
pub mod config;
mod connections;
mod docs_page;
mod encryption_key;
mod errors;
mod events;
mod existing;
mod firecracker;
mod http;
mod listener;
mod malformed;
mod mcp;
mod server;
mod stall;
mod storage;
mod summary;
mod tls;
mod tools;
mod workspace;

pub use config::{ConfigError, Existing, Overrides, Settings};
pub use emergent_firecracker_manager::{
    Requirement, UnmetRequirement, check_requirements as check_microvm_requirements,
};
pub use emergent_store::{AuditAnchor, ExportVerifier};
pub use firecracker::{ManagerAddress, manager_health, serve_manager};
pub use http::{Access, DeclaredRoute};
pub use server::{Running, ServeError, serve};

/// Every route of the server, with what it declares: for tests that walk them all.
pub fn declared_routes() -> Vec<DeclaredRoute> {
    http::declared_routes()
}

/// The OpenAPI descriptions of the REST APIs, of the server and of the Firecracker manager, as JSON text under the names of
/// their files.
pub fn openapi_documents() -> [(&'static str, String); 2] {
    let server = ("emergent.json", http::openapi());
    let manager = ("firecracker-manager.json", emergent_firecracker_manager::openapi());
    [server, manager].map(|(name, document)| (name, document.to_pretty_json().unwrap_or_default() + "\n"))
}
