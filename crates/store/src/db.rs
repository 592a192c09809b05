//! The two engines behind one type.
//!
//! [`Db`] holds the pools. It gives out a [`Connection`] for one statement or several, and runs a body in one
//! transaction. Statements are [`Query`](crate::query::Query)s, so each is written, compiled and tested once for both
//! engines.
//!
//! On SQLite all writes except those of the audit log go through one connection. They queue in the pool, and meet a
//! busy database only while an audit transaction commits. Reads have connections of their own and see the last commit
//! (WAL). On PostgreSQL a [`Lock`] serialises the few operations that must not run side by side.

use sqlx::pool::PoolConnection;
use sqlx::{PgConnection, PgPool, Postgres, SqlSafeStr, Sqlite, SqliteConnection, SqlitePool};

use crate::error::{Result, StoreError};
use crate::query::query;

/// The pools of the engine in use.
pub(crate) enum Db {
    Sqlite {
        /// One connection.
        write: SqlitePool,
        /// One connection that appends to the audit log and does not wait for the disk.
        audit: SqlitePool,
        /// Several connections that refuse to write.
        read: SqlitePool,
    },
    Postgres(PgPool),
}

/// An operation that only one transaction may do at a time, over all servers on one PostgreSQL database. On SQLite every
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
    /// The row locks of the transaction's own statements suffice.
    None,
}

impl Lock {
    /// The key of PostgreSQL's advisory lock: "emergent" in ASCII, with the last byte replaced by a number.
    const fn advisory_key(self) -> Option<i64> {
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

/// A connection to the engine in use.
pub(crate) enum Connection {
    Sqlite(PoolConnection<Sqlite>),
    Postgres(PoolConnection<Postgres>),
    /// A connection outside of the pool, with the default search path. Migrations run on it.
    PostgresMigration(PgConnection),
}

/// The connection as its engine's own type.
pub(crate) enum Engine<'c> {
    Sqlite(&'c mut SqliteConnection),
    Postgres(&'c mut PgConnection),
}

impl Connection {
    pub(crate) fn engine(&mut self) -> Engine<'_> {
        match self {
            Self::Sqlite(connection) => Engine::Sqlite(connection),
            Self::Postgres(connection) => Engine::Postgres(connection),
            Self::PostgresMigration(connection) => Engine::Postgres(connection),
        }
    }

    pub(crate) fn is_sqlite(&self) -> bool {
        matches!(self, Self::Sqlite(_))
    }

    /// Runs statements that have no parameters and give no rows.
    pub(crate) async fn run(&mut self, sql: impl SqlSafeStr) -> Result<()> {
        let sql = sqlx::raw_sql(sql);
        let result = match self.engine() {
            Engine::Sqlite(connection) => sql.execute(connection).await.map(drop),
            Engine::Postgres(connection) => sql.execute(connection).await.map(drop),
        };
        self.checked(result)
    }

    /// The result of a statement. A SQLite connection whose statement failed is closed instead of used again: SQLite
    /// opens a file that it can't write for reading only, and such a connection stays read-only when the file can be
    /// written again.
    pub(crate) fn checked<T>(&mut self, result: std::result::Result<T, sqlx::Error>) -> Result<T> {
        result.map_err(|error| {
            let error = StoreError::from(error);
            if let Self::Sqlite(connection) = self
                && error.is_of_database()
            {
                connection.close_on_drop();
            }
            error
        })
    }

    fn close_on_drop(&mut self) {
        match self {
            Self::Sqlite(connection) => connection.close_on_drop(),
            Self::Postgres(connection) => connection.close_on_drop(),
            // It has no pool to return to.
            Self::PostgresMigration(_) => {}
        }
    }
}

impl Db {
    /// A connection for reading.
    pub(crate) async fn reader(&self) -> Result<Connection> {
        Ok(match self {
            Self::Sqlite { read, .. } => Connection::Sqlite(read.acquire().await?),
            Self::Postgres(pool) => Connection::Postgres(pool.acquire().await?),
        })
    }

    /// A connection for one writing statement.
    pub(crate) async fn writer(&self) -> Result<Connection> {
        Ok(match self {
            Self::Sqlite { write, .. } => Connection::Sqlite(write.acquire().await?),
            Self::Postgres(pool) => Connection::Postgres(pool.acquire().await?),
        })
    }

    /// Runs `body` in one transaction: commits it if `body` succeeds, otherwise rolls it back.
    pub(crate) async fn transaction<T>(
        &self,
        lock: Lock,
        body: impl AsyncFnOnce(&mut Connection) -> Result<T>,
    ) -> Result<T> {
        let connection = match (self, lock) {
            (Self::Sqlite { audit, .. }, Lock::Audit) => Connection::Sqlite(audit.acquire().await?),
            _ => self.writer().await?,
        };
        transaction(connection, lock, body).await
    }

    /// Runs `body` on one state of the database: it sees no commit that comes after its first statement.
    pub(crate) async fn read_transaction<T>(
        &self,
        body: impl AsyncFnOnce(&mut Connection) -> Result<T>,
    ) -> Result<T> {
        let connection = self.reader().await?;
        let begin = match connection {
            Connection::Sqlite(_) => "BEGIN",
            _ => "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY",
        };
        let mut transaction = Transaction { connection, is_open: true };
        transaction.connection.run(begin).await?;
        let result = body(&mut transaction.connection).await;
        transaction.end(result).await
    }
}

/// Runs `body` in one transaction on this connection.
pub(crate) async fn transaction<T>(
    connection: Connection,
    lock: Lock,
    body: impl AsyncFnOnce(&mut Connection) -> Result<T>,
) -> Result<T> {
    let mut transaction = Transaction { connection, is_open: true };
    let connection = &mut transaction.connection;
    if connection.is_sqlite() {
        // IMMEDIATE takes the write lock at once, so a transaction that reads first can't fail later for want of it.
        connection.run("BEGIN IMMEDIATE").await?;
    } else {
        connection.run("BEGIN").await?;
        if let Some(key) = lock.advisory_key() {
            query("SELECT pg_advisory_xact_lock($1)").bind(key).execute(connection).await?;
        }
    }
    let result = body(connection).await;
    transaction.end(result).await
}

/// A transaction that was begun. Dropped before its end (its caller went away), it closes the connection, and the
/// engine rolls it back.
struct Transaction {
    connection: Connection,
    is_open: bool,
}

impl Transaction {
    async fn end<T>(mut self, result: Result<T>) -> Result<T> {
        match result {
            Ok(value) => {
                self.connection.run("COMMIT").await?;
                self.is_open = false;
                Ok(value)
            }
            Err(error) => {
                // The caller needs the first error. A failed rollback leaves the transaction open, and the connection
                // is closed.
                self.is_open = self.connection.run("ROLLBACK").await.is_err();
                Err(error)
            }
        }
    }
}

impl Drop for Transaction {
    fn drop(&mut self) {
        if self.is_open {
            self.connection.close_on_drop();
        }
    }
}
