//! What can go wrong in the store, in the terms of its callers.
//!
//! `Display` says what happened and, where the operator can act, what to do; the cause is the `source`.

use std::io;
use std::path::{Path, PathBuf};

use emergent_wire::WorkspaceId;
use emergent_wire::workspace::WorkspaceStatus;

use crate::audit_chain::BrokenAudit;
use crate::seal::SealError;
use crate::tokens::TokenRefusal;

/// The result of a store call.
pub type Result<T> = std::result::Result<T, StoreError>;

/// Why a store call failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// There is no such row.
    #[error("there is no {kind} {id}")]
    NotFound {
        /// What was looked for: `workspace`, `token`, …
        kind: &'static str,
        /// Its id.
        id: String,
    },
    /// Something with this id or name is there already.
    #[error("there is already a {kind} {name}")]
    Conflict {
        /// What it is.
        kind: &'static str,
        /// Its id or name.
        name: String,
    },
    /// No more live workspaces may be made.
    #[error("the limit of {limit} live workspaces is reached ({current} exist)")]
    LimitReached {
        /// The limit.
        limit: u32,
        /// How many there are.
        current: u64,
    },
    /// The workspace is not in a status that allows the change.
    #[error("workspace {id} is {status}")]
    WrongState {
        /// The workspace.
        id: WorkspaceId,
        /// The status it has.
        status: WorkspaceStatus,
    },
    /// A cursor that no page of this list gave out.
    #[error("the cursor is not one that an earlier page returned")]
    BadCursor,
    /// The token is not accepted.
    #[error("the access token is {0}")]
    TokenRefused(TokenRefusal),
    /// The audit log is not what was written.
    #[error("the audit log is broken")]
    AuditBroken(#[source] BrokenAudit),
    /// A sealed value can't be read.
    #[error("a sealed value can't be read")]
    Seal(#[from] SealError),
    /// The database was made by a newer version of this program.
    #[error(
        "the database has schema version {found}, this program knows {known}: start the newer program that \
         wrote it, or restore a backup from before the upgrade"
    )]
    TooNew {
        /// The version in the database.
        found: i64,
        /// The newest version this program knows.
        known: i64,
    },
    /// A migration that was applied is not the one this program has.
    #[error(
        "migration {version} of the database is not this program's: the database belongs to another build"
    )]
    MigrationChanged {
        /// Which one.
        version: i64,
    },
    /// Another process has the SQLite file open.
    #[error(
        "{} is in use by {}: stop it, or give this server another data directory",
        path.display(),
        pid.map_or_else(|| "another process".to_owned(), |pid| format!("process {pid}"))
    )]
    InUse {
        /// The database file.
        path: PathBuf,
        /// The process that has it, if it said so.
        pid: Option<u32>,
    },
    /// The database URL can't be used.
    #[error("the PostgreSQL URL can't be used")]
    BadUrl(#[source] sqlx::Error),
    /// A value in the database is not one that this program writes.
    #[error("{table} {row}: column {column} is damaged: {reason}")]
    Corrupt {
        /// The table.
        table: &'static str,
        /// The key of the row.
        row: String,
        /// The column.
        column: &'static str,
        /// What is wrong with it.
        reason: String,
    },
    /// The database can't be reached or is overloaded; the same call may succeed later.
    #[error("the database does not answer")]
    Unavailable(#[source] sqlx::Error),
    /// The database refused or failed.
    #[error("the database failed")]
    Database(#[source] sqlx::Error),
    /// A file can't be used.
    #[error("can't {doing} {}", path.display())]
    File {
        /// What was to be done.
        doing: &'static str,
        /// The file.
        path: PathBuf,
        /// What the operating system said.
        source: io::Error,
    },
}

impl StoreError {
    pub(crate) fn file(doing: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::File { doing, path, source }
    }

    pub(crate) fn no_workspace(id: WorkspaceId) -> Self {
        Self::NotFound { kind: "workspace", id: id.to_string() }
    }
}

impl From<sqlx::Error> for StoreError {
    fn from(error: sqlx::Error) -> Self {
        if is_transient(&error) { Self::Unavailable(error) } else { Self::Database(error) }
    }
}

/// Whether the same call may succeed later without anybody changing it.
fn is_transient(error: &sqlx::Error) -> bool {
    use sqlx::Error as E;
    match error {
        E::Io(_) | E::Tls(_) | E::PoolTimedOut | E::PoolClosed | E::WorkerCrashed => true,
        E::Database(error) => {
            let code = error.code();
            let code = code.as_deref().unwrap_or_default();
            // PostgreSQL: connection, resources, operator intervention and time-outs, rolled back
            // transactions, locks. (SQLite's codes are decimal: 5 busy, 6 locked.)
            let class =
                ["08", "53", "57", "40"].iter().any(|class| code.len() == 5 && code.starts_with(class));
            class || matches!(code, "55P03" | "5" | "6")
        }
        _ => false,
    }
}
