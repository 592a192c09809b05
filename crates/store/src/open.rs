//! Opens and closes the store.
//!
//! SQLite: write-ahead log with `synchronous=FULL` (each commit is on disk before it is answered, but for audit
//! rows, see there; last-used times are coalesced by their callers), foreign keys on, one writing and a few reading connections, the file readable by its owner only.
//! PostgreSQL: migrations on a connection with the default search path, then a pool whose search path is
//! `kb,core`, so that the queries name their tables without a schema.

use std::fmt;
use std::fs::{self, OpenOptions};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use emergent_host::process_lock::{NoLock, ProcessLock};
use emergent_wire::id::ServerId;
use parking_lot::Mutex;
use secrecy::{ExposeSecret, SecretString};
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions, SqliteSynchronous};
use sqlx::{Connection as _, PgConnection};
use tokio::time::timeout;

use crate::db::{Connection, Db};
use crate::error::{Result, StoreError};
use crate::known_tokens::{self, KnownTokens};
use crate::migrate;
use crate::query::query;

/// The time limit for getting a connection from the pool.
const ACQUIRE_TIMEOUT: Duration = Duration::from_secs(30);
/// The time limit for a new connection, and for the check that the database answers.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// The time limit of a statement on PostgreSQL, its waits for row locks included.
const STATEMENT_TIMEOUT: &str = "30s";
const SQLITE_READERS: u32 = 4;
const POSTGRES_CONNECTIONS: u32 = 16;

/// The location of the database.
#[derive(Clone)]
pub enum StoreConfig {
    /// A SQLite file; made when it is not there. Its directory must exist.
    Sqlite(PathBuf),
    /// A PostgreSQL database, as `postgres://user:password@host:port/database?…`.
    Postgres(SecretString),
}

impl StoreConfig {
    /// A PostgreSQL database at `url`.
    pub fn postgres(url: impl Into<String>) -> Self {
        Self::Postgres(SecretString::from(url.into()))
    }
}

impl fmt::Debug for StoreConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Sqlite(path) => f.debug_tuple("Sqlite").field(path).finish(),
            // The URL has a password in it.
            Self::Postgres(_) => f.write_str("Postgres(..)"),
        }
    }
}

/// The open database. Clones share it.
#[derive(Clone)]
pub struct Store {
    inner: Arc<Inner>,
}

struct Inner {
    db: Db,
    lock: Mutex<Option<ProcessLock>>,
    known_tokens: KnownTokens,
    server: ServerId,
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.db() {
            Db::Sqlite { .. } => "Store(SQLite)",
            Db::Postgres(_) => "Store(PostgreSQL)",
        })
    }
}

impl Store {
    /// Opens the database, and brings its schema up to date.
    pub async fn open(config: StoreConfig) -> Result<Self> {
        let (db, lock) = match config {
            StoreConfig::Sqlite(path) => {
                let (db, lock) = open_sqlite(&path).await?;
                (db, Some(lock))
            }
            StoreConfig::Postgres(url) => (open_postgres(&url).await?, None),
        };
        let kept_for = if lock.is_some() { known_tokens::ALONE } else { known_tokens::SHARED };
        let known_tokens = KnownTokens::new(kept_for);
        let server = ServerId::generate();
        Ok(Self { inner: Arc::new(Inner { db, lock: Mutex::new(lock), known_tokens, server }) })
    }

    /// Whether the database answers.
    pub async fn ping(&self) -> Result<()> {
        let answer = async {
            query("SELECT COUNT(*) FROM settings WHERE key = ''")
                .execute(&mut self.db().reader().await?)
                .await?;
            Ok(())
        };
        timeout(CONNECT_TIMEOUT, answer)
            .await
            .map_err(|_| StoreError::Unavailable(sqlx::Error::PoolTimedOut))?
    }

    /// Waits for the calls that are under way, then closes the database. Later calls fail.
    pub async fn close(&self) {
        match self.db() {
            Db::Sqlite { write, audit, read } => {
                read.close().await;
                audit.close().await;
                write.close().await;
            }
            Db::Postgres(pool) => pool.close().await,
        }
        let lock = self.inner.lock.lock().take();
        drop(lock);
    }

    pub(crate) fn db(&self) -> &Db {
        &self.inner.db
    }

    pub(crate) fn server_id(&self) -> ServerId {
        self.inner.server
    }

    pub(crate) fn known_tokens(&self) -> &KnownTokens {
        &self.inner.known_tokens
    }
}

/// Locks the SQLite file. Two servers on one file would both manage the same sandboxes.
async fn lock(database: &Path) -> Result<ProcessLock> {
    let mut file = database.as_os_str().to_owned();
    file.push(".lock");
    let (file, looked_at) = (PathBuf::from(&file), PathBuf::from(file));
    let locked = tokio::task::spawn_blocking(move || ProcessLock::wait(&looked_at)).await;
    let locked = locked.unwrap_or_else(|error| Err(NoLock::Io(std::io::Error::other(error))));
    locked.map_err(|refused| match refused {
        NoLock::Taken(pid) => StoreError::InUse { path: database.to_owned(), pid },
        NoLock::Io(error) => StoreError::file("lock", &file)(error),
    })
}

async fn open_sqlite(path: &Path) -> Result<(Db, ProcessLock)> {
    let path = real_path(path)?;
    let lock = lock(&path).await?;
    make_private(&path)?;
    let options = SqliteConnectOptions::new()
        .filename(&path)
        .journal_mode(SqliteJournalMode::Wal)
        .synchronous(SqliteSynchronous::Full)
        .foreign_keys(true)
        .busy_timeout(Duration::from_secs(10));
    let pool = || {
        SqlitePoolOptions::new()
            .acquire_timeout(ACQUIRE_TIMEOUT)
            .idle_timeout(None)
            .max_lifetime(None)
            .test_before_acquire(false)
    };
    let write = pool().max_connections(1).connect_with(options.clone()).await?;
    migrate::sqlite(Connection::Sqlite(write.acquire().await?)).await?;
    let unhurried = options.clone().synchronous(SqliteSynchronous::Normal);
    let audit = pool().max_connections(1).connect_with(unhurried).await?;
    let read =
        pool().max_connections(SQLITE_READERS).connect_with(options.pragma("query_only", "ON")).await?;
    Ok((Db::Sqlite { write, audit, read }, lock))
}

async fn open_postgres(url: &SecretString) -> Result<Db> {
    let options: PgConnectOptions = url.expose_secret().parse().map_err(StoreError::BadUrl)?;
    let options = options
        .application_name("emergent")
        .options([("statement_timeout", STATEMENT_TIMEOUT), ("idle_in_transaction_session_timeout", "60s")]);
    let connection = timeout(CONNECT_TIMEOUT, PgConnection::connect_with(&options))
        .await
        .map_err(|_| StoreError::Unavailable(sqlx::Error::PoolTimedOut))??;
    migrate::postgres(Connection::PostgresMigration(connection)).await?;
    let pool = PgPoolOptions::new()
        .max_connections(POSTGRES_CONNECTIONS)
        .acquire_timeout(ACQUIRE_TIMEOUT)
        .connect_with(options.options([("search_path", "kb,core")]))
        .await?;
    Ok(Db::Postgres(pool))
}

/// One name for one file, so that two paths to it meet in one lock.
fn real_path(path: &Path) -> Result<PathBuf> {
    if let Ok(real) = fs::canonicalize(path) {
        return Ok(real);
    }
    let directory = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let directory = fs::canonicalize(directory).map_err(StoreError::file("find the directory", directory))?;
    match path.file_name() {
        Some(name) => Ok(directory.join(name)),
        None => Err(StoreError::file("use", path)(std::io::ErrorKind::InvalidInput.into())),
    }
}

/// Creates the file, or removes the rights of others from it. SQLite gives its side files the same mode.
fn make_private(path: &Path) -> Result<()> {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(path)
        .map_err(StoreError::file("open", path))?;
    file.set_permissions(fs::Permissions::from_mode(0o600))
        .map_err(StoreError::file("change the mode of", path))
}
