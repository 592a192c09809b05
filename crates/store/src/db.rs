//! The two engines behind one face.
//!
//! [`Db`] holds the pools; the macros run one body on a connection of whichever engine there is. On SQLite all
//! writes but those of the audit log go through one connection, so they queue in the pool and meet a busy database
//! for the moment of an audit commit at most; reads have connections of their own and see the last commit (WAL). On PostgreSQL a [`Lock`] gives the few operations
//! that must not run side by side the same order.

use sqlx::pool::PoolConnection;
use sqlx::{PgPool, Sqlite, SqlitePool};

use crate::error::{Result, StoreError};

/// The pools of the engine in use.
pub(crate) enum Db {
    Sqlite {
        /// One connection.
        write: SqlitePool,
        /// One connection that appends to the audit log and does not wait for the disk.
        audit: SqlitePool,
        /// Several, which refuse to write.
        read: SqlitePool,
    },
    Postgres(PgPool),
}

/// What only one transaction may do at a time, over all servers on one PostgreSQL database. On SQLite every
/// write transaction excludes every other.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Lock {
    /// Bring the schema up to date.
    Migrate,
    /// Count the live workspaces and add one.
    WorkspaceLimit,
    /// Append to the audit chain.
    Audit,
    /// Count the spares and add one.
    Pool,
    /// Count the usable admin tokens and revoke one.
    Tokens,
    /// The rows that the transaction touches are protection enough.
    None,
}

impl Lock {
    /// The key of PostgreSQL's advisory lock: "emergent" in ASCII, with the last byte telling them apart.
    pub(crate) const fn advisory_key(self) -> Option<i64> {
        const BASE: i64 = 0x656d_6572_6765_6e00;
        match self {
            Lock::Migrate => Some(BASE + 1),
            Lock::WorkspaceLimit => Some(BASE + 2),
            Lock::Audit => Some(BASE + 3),
            Lock::Pool => Some(BASE + 4),
            Lock::Tokens => Some(BASE + 5),
            Lock::None => None,
        }
    }
}

/// Lets a connection go on which the database failed: its transaction may be in any state, and SQLite goes on reading
/// through one that it could only open for that. The next call gets a new one.
pub(crate) fn keep_if_sound<T>(connection: &mut PoolConnection<Sqlite>, result: Result<T>) -> Result<T> {
    if result.as_ref().is_err_and(StoreError::is_of_database) {
        connection.close_on_drop();
    }
    result
}

/// Runs `$body` on a connection for reading.
macro_rules! reading {
    ($db:expr, |$connection:ident| $body:expr) => {
        match $db {
            $crate::db::Db::Sqlite { read, .. } => {
                let mut guard = read.acquire().await?;
                let $connection = &mut *guard;
                $body
            }
            $crate::db::Db::Postgres(pool) => {
                let mut guard = pool.acquire().await?;
                let $connection = &mut *guard;
                $body
            }
        }
    };
}

/// Runs `$body`, one statement, on a connection for writing.
macro_rules! writing {
    ($db:expr, |$connection:ident| $body:expr) => {
        match $db {
            $crate::db::Db::Sqlite { write, .. } => {
                let mut guard = write.acquire().await?;
                let result = {
                    let $connection = &mut *guard;
                    async { $crate::error::Result::Ok($body) }.await
                };
                $crate::db::keep_if_sound(&mut guard, result)?
            }
            $crate::db::Db::Postgres(pool) => {
                let mut guard = pool.acquire().await?;
                let $connection = &mut *guard;
                $body
            }
        }
    };
}

/// Runs `$body`, a `Result<_, StoreError>`, in one transaction: committed when it is `Ok`, else rolled back.
macro_rules! in_transaction {
    ($db:expr, $lock:expr, |$connection:ident| $body:expr) => {{
        let lock: $crate::db::Lock = $lock;
        match $db {
            $crate::db::Db::Sqlite { write, audit, .. } => {
                let pool = if matches!(lock, $crate::db::Lock::Audit) { audit } else { write };
                let mut guard = pool.acquire().await?;
                let result = async {
                    // IMMEDIATE: a transaction that reads first can't fail later for want of the write lock.
                    let transaction = sqlx::Connection::begin_with(&mut *guard, "BEGIN IMMEDIATE").await?;
                    $crate::db::finish!(transaction, |$connection| $body)
                }
                .await;
                $crate::db::keep_if_sound(&mut guard, result)
            }
            $crate::db::Db::Postgres(pool) => {
                let mut transaction = pool.begin().await?;
                if let Some(key) = lock.advisory_key() {
                    sqlx::query("SELECT pg_advisory_xact_lock($1)")
                        .bind(key)
                        .execute(&mut *transaction)
                        .await?;
                }
                $crate::db::finish!(transaction, |$connection| $body)
            }
        }
    }};
}

/// Runs `$body` in a transaction that was begun, and ends it.
macro_rules! finish {
    ($transaction:ident, |$connection:ident| $body:expr) => {{
        let mut transaction = $transaction;
        let result = {
            let $connection = &mut *transaction;
            async { $body }.await
        };
        match result {
            Ok(value) => {
                transaction.commit().await?;
                $crate::error::Result::Ok(value)
            }
            Err(error) => {
                // The first error is the one worth telling; a failed rollback closes the connection anyway.
                let _ = transaction.rollback().await;
                Err(error)
            }
        }
    }};
}

pub(crate) use {finish, in_transaction, reading, writing};
