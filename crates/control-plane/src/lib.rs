//! The server: it owns the lifecycle of workspaces and hosted MCP servers, and serves the REST API.
//!
//! ```text
//! listener/   connections: limits, TLS, timeouts; with http/ the only module that knows axum
//! http/       the fronts: parse, authorise, call the domain, turn its errors into codes, texts and statuses
//! tools/      the table of the tools, and the one path of their calls
//! workspace/  placement, lifecycle, calls to the guest agent, recovery
//! mcp/        hosted MCP servers
//! codes       the stable code of each domain error, for the fronts and the audit log
//! background  periodic tasks
//! audit       the one writer of the audit log; audit_retention exports and removes old rows
//! server      start and shutdown
//! ```
//! Invariant: intent is written to the store before any effect outside it, so that after a crash at any point the
//! rows say what to finish or undo.

mod audit;
mod audit_retention;
mod background;
mod caller;
mod codes;
pub mod config;
mod encryption_key;
mod events;
mod existing;
mod firecracker;
mod http;
mod listener;
mod mcp;
mod server;
mod storage;
mod summary;
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

/// All routes of the server with their declared access, for tests that walk them.
pub fn declared_routes() -> Vec<DeclaredRoute> {
    http::declared_routes()
}

/// The OpenAPI descriptions of the server and of the Firecracker manager: file names and JSON texts.
pub fn openapi_documents() -> [(&'static str, String); 2] {
    let server = ("emergent.json", http::openapi());
    let manager = ("firecracker-manager.json", emergent_firecracker_manager::openapi());
    [server, manager].map(|(name, document)| (name, document.to_pretty_json().unwrap_or_default() + "\n"))
}
