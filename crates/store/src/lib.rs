//! The server's database.
//!
//! The only crate that knows sqlx. It keeps workspaces, access tokens, the audit log and settings in SQLite
//! (the default) or in PostgreSQL, with one SQL text for both: queries are written with `$1` parameters,
//! `RETURNING` and `ON CONFLICT`, and the few types on which the engines differ have wrappers.
//!
//! Invariants:
//! - A change is on disk before its call returns: it survives `kill -9` and a power cut.
//! - A change that depends on the state before it (the concurrency limit, a change of status, the audit chain) is one
//!   transaction, so it is correct with any number of concurrent callers.
//! - No secret is stored in the clear: tokens are hashed, environments are sealed ([`seal`]), git URLs carry none.
//! - Every statement is bounded in time.

mod audit;
mod audit_chain;
mod audit_export;
mod audit_retention;
mod db;
mod error;
mod expiry;
mod idempotency;
mod known_tokens;
mod migrate;
mod open;
mod page;
mod postgres_time;
mod query;
mod row;
mod rows;
pub mod seal;
mod servers;
mod settings;
mod snapshots;
mod spares;
mod stored_credentials;
mod tokens;
mod types;
mod workspace_insert;
mod workspace_lists;
mod workspace_rows;
mod workspaces;

pub use audit::{AuditEntry, AuditFilter, AuditOutcome, AuditPage, AuditRecord};
pub use audit_chain::{AuditAnchor, AuditFault, BrokenAudit};
pub use audit_export::{BrokenExport, ExportFault, ExportSummary, ExportVerifier, verify_export};
pub use audit_retention::{AuditRange, PrunedRange};
pub use error::{Result, RowKind, StoreError};
pub use idempotency::{
    Begun, EarlierRequest, IDEMPOTENCY_KEY_LIFETIME, IdempotencyStatus, IdempotentRequest,
    MAX_IDEMPOTENCY_KEY_BYTES, MAX_IDEMPOTENCY_KEYS,
};
pub use migrate::SCHEMA_VERSION;
pub use open::{Store, StoreConfig};
pub use rows::{Rows, Unreadable};
pub use seal::{SealError, SealingKey};
pub use snapshots::{NewSnapshot, SnapshotRecord};
pub use spares::{Claim, Shape, Spare};
pub use stored_credentials::CREDENTIAL_IN_CLONE;
pub use tokens::{NewToken, TOKEN_PREFIX, TokenRefusal};
pub use workspace_rows::{NewWorkspace, WorkspaceFilter, WorkspaceRecord};
