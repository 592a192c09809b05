//! Types that cross a process boundary.
//!
//! Everything that travels between client, server and guest agent is declared here once: ids, sizes, the
//! error vocabulary, and the requests and answers of the REST API and of the seven tools. This crate does
//! no I/O and knows no framework; with the feature `openapi` the types also derive their OpenAPI schemas.
//!
//! Invariant: a value that was parsed here is valid. Range checks happen while parsing, not at use.

pub mod access;
pub mod error;
pub mod event;
pub mod git;
pub mod git_url;
pub mod id;
pub mod manager;
pub mod mcp;
pub mod names;
mod object;
pub mod pool;
pub mod size;
pub mod snapshot;
pub mod tools;
pub mod unreadable;
pub mod validate;
pub mod workspace;

pub use error::{ErrorCode, ErrorDetail};
pub use id::{OperationId, SnapshotId, TokenId, WorkspaceId};
pub use size::{ByteSize, CpuCount};
pub use validate::{Valid, Validate};
