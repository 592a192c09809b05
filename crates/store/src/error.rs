//! The errors of the store.
//!
//! `Display` names the problem and, where the operator can act, the next step. The cause is the `source`.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use emergent_wire::WorkspaceId;
use emergent_wire::workspace::WorkspaceStatus;

use crate::audit_chain::BrokenAudit;
use crate::seal::SealError;
use crate::tokens::TokenRefusal;

/// The result of a store call.
pub type Result<T> = std::result::Result<T, StoreError>;

/// A kind of row that a caller names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowKind {
    /// A workspace.
    Workspace,
    /// A hosted MCP server.
    McpServer,
    /// A snapshot.
    Snapshot,
    /// An access token.
    Token,
    /// A project.
    Project,
    /// A session.
    Session,
    /// A setting.
    Setting,
    /// The key of an idempotent request in progress.
    IdempotencyKey,
}

impl fmt::Display for RowKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Workspace => "workspace",
            Self::McpServer => "MCP server",
            Self::Snapshot => "snapshot",
            Self::Token => "token",
            Self::Project => "project",
            Self::Session => "session",
            Self::Setting => "setting",
            Self::IdempotencyKey => "idempotency key in progress",
        })
    }
}

/// Why a store call failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The row does not exist.
    #[error("there is no {kind} {id}")]
    NotFound {
        /// The kind of row.
        kind: RowKind,
        /// Its id.
        id: String,
    },
    /// A row with this id or name exists already.
    #[error("there is already a {kind} {name}")]
    Conflict {
        /// The kind of row.
        kind: &'static str,
        /// Its id or name.
        name: String,
    },
    /// The limit of live workspaces is reached.
    #[error("the limit of {limit} live workspaces is reached ({current} exist)")]
    LimitReached {
        /// The limit.
        limit: u32,
        /// The number of live workspaces.
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
    /// Revoking this token would leave no admin token.
    #[error(
        "token {name} is the last usable admin token: create another admin token first, then revoke this one"
    )]
    LastAdminToken {
        /// Its name.
        name: String,
    },
    /// An idempotency key that no client may send.
    #[error("the idempotency key is empty or over 255 bytes")]
    BadIdempotencyKey,
    /// An idempotency key was sent before with another request.
    #[error(
        "the idempotency key was used for another request: send the request with another key, or repeat the first \
         request exactly"
    )]
    IdempotencyKeyReused,
    /// A token has too many idempotency keys.
    #[error(
        "the token has used {limit} idempotency keys in 24 hours: send the request without a key, or wait"
    )]
    TooManyIdempotencyKeys {
        /// The limit.
        limit: u32,
    },
    /// The audit log was changed.
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
        /// The migration.
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
        /// The process that has it, if it is known.
        pid: Option<u32>,
    },
    /// The database URL can't be used.
    #[error("the PostgreSQL URL can't be used")]
    BadUrl(#[source] sqlx::Error),
    /// A value in the database is not one that this program writes.
    #[error(
        "{table} {row}: column {column} is damaged: {reason}; correct the value, or restore the row from a backup (see \
         \"A damaged row\" in docs/runbook.md)"
    )]
    Corrupt {
        /// The table.
        table: &'static str,
        /// The key of the row.
        row: String,
        /// The column.
        column: &'static str,
        /// Why the value can't be read.
        reason: String,
    },
    /// The database can't be reached or is overloaded; the same call may succeed later.
    #[error("the database does not answer")]
    Unavailable(#[source] sqlx::Error),
    /// The database can be read, if at all, but not written.
    #[error("the database can't be written: it is read-only, or its disk is full")]
    Unwritable(#[source] sqlx::Error),
    /// The SQLite file is damaged.
    #[error(
        "the database file is damaged: restore emergent.db from a backup. Without one, move emergent.db and the files beside it \
         whose names begin with it away, then start once with --adopt, which keeps the disks of all workspaces"
    )]
    DamagedFile(#[source] sqlx::Error),
    /// The database refused or failed.
    #[error("the database failed")]
    Database(#[source] sqlx::Error),
    /// A file can't be used.
    #[error("can't {doing} {}", path.display())]
    File {
        /// The operation.
        doing: &'static str,
        /// The file.
        path: PathBuf,
        /// The operating system's error.
        source: io::Error,
    },
}

impl StoreError {
    pub(crate) fn file(doing: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::File { doing, path, source }
    }

    /// Whether the database failed, and not the request.
    pub(crate) fn is_of_database(&self) -> bool {
        matches!(self, Self::Unavailable(_) | Self::Unwritable(_) | Self::DamagedFile(_) | Self::Database(_))
    }

    pub(crate) fn no_workspace(id: WorkspaceId) -> Self {
        Self::NotFound { kind: RowKind::Workspace, id: id.to_string() }
    }
}

impl From<sqlx::Error> for StoreError {
    fn from(error: sqlx::Error) -> Self {
        use sqlx::Error as E;
        match &error {
            E::Io(_) | E::Tls(_) | E::PoolTimedOut | E::PoolClosed | E::WorkerCrashed => {
                Self::Unavailable(error)
            }
            E::Database(detail) => {
                let code = detail.code();
                match ErrorClass::of(code.as_deref().unwrap_or_default()) {
                    ErrorClass::Transient => Self::Unavailable(error),
                    ErrorClass::Unwritable => Self::Unwritable(error),
                    ErrorClass::DamagedFile => Self::DamagedFile(error),
                    ErrorClass::Other => Self::Database(error),
                }
            }
            _ => Self::Database(error),
        }
    }
}

/// The class of a database's error code.
enum ErrorClass {
    /// The same call may succeed later.
    Transient,
    /// The disk is full, or the file is read-only.
    Unwritable,
    /// The file is damaged, or no database.
    DamagedFile,
    Other,
}

impl ErrorClass {
    fn of(code: &str) -> Self {
        // PostgreSQL's codes have five characters; SQLite's are decimal, with the kind in the lowest byte.
        match code.parse::<u32>().ok().filter(|_| code.len() < 5).map(|code| code & 0xff) {
            // Busy, locked.
            Some(5 | 6) => return ErrorClass::Transient,
            // Read-only, input or output failed, full, can't be opened.
            Some(8 | 10 | 13 | 14) => return ErrorClass::Unwritable,
            // Malformed, not a database.
            Some(11 | 26) => return ErrorClass::DamagedFile,
            Some(_) => return ErrorClass::Other,
            None => {}
        }
        match code {
            // Read-only transaction, disk full.
            "25006" | "53100" => ErrorClass::Unwritable,
            // A lock can't be had.
            "55P03" => ErrorClass::Transient,
            // Connection, resources, operator intervention and time-outs, rolled back transactions.
            _ if ["08", "53", "57", "40"].iter().any(|class| code.starts_with(class)) => {
                ErrorClass::Transient
            }
            _ => ErrorClass::Other,
        }
    }
}
