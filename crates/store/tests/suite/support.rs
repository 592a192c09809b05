//! A fresh database on either engine, with a way to reach behind the store's back.

use std::env;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use emergent_store::{NewWorkspace, Store, StoreConfig};
use emergent_test_support::postgres::TestPostgres;
use emergent_wire::WorkspaceId;
use emergent_wire::workspace::Workspace;
use sqlx::postgres::PgConnectOptions;
use sqlx::sqlite::SqliteConnectOptions;
use sqlx::{AssertSqlSafe, ConnectOptions, Connection};
use tempfile::TempDir;

/// Tells a child process of a test which database to open.
const CHILD_DATABASE: &str = "EMERGENT_TEST_DATABASE";

pub(crate) struct TestDb {
    pub(crate) store: Store,
    pub(crate) location: Location,
    /// For files that go with the test.
    pub(crate) directory: TempDir,
}

#[derive(Clone, Debug)]
pub(crate) enum Location {
    Sqlite(PathBuf),
    Postgres(String),
}

impl Location {
    pub(crate) async fn open(&self) -> emergent_store::Result<Store> {
        Store::open(match self {
            Self::Sqlite(path) => StoreConfig::Sqlite(path.clone()),
            Self::Postgres(url) => StoreConfig::postgres(url),
        })
        .await
    }

    /// In a child process: the database that its parent named.
    pub(crate) fn from_parent() -> Self {
        let text = env::var(CHILD_DATABASE).expect("this test is run by another one");
        if text.starts_with("postgres:") { Self::Postgres(text) } else { Self::Sqlite(text.into()) }
    }
}

impl TestDb {
    pub(crate) async fn sqlite() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let location = Location::Sqlite(directory.path().join("emergent.db"));
        Self::open(location, directory).await
    }

    pub(crate) async fn postgres(cluster: &TestPostgres) -> Self {
        let location = Location::Postgres(cluster.fresh_database());
        Self::open(location, tempfile::tempdir().unwrap()).await
    }

    async fn open(location: Location, directory: TempDir) -> Self {
        let store = location.open().await.unwrap();
        Self { store, location, directory }
    }

    pub(crate) fn is_sqlite(&self) -> bool {
        matches!(self.location, Location::Sqlite(_))
    }

    /// Runs SQL behind the store's back and says how many rows it changed.
    pub(crate) async fn sql(&self, text: &str) -> u64 {
        let text = AssertSqlSafe(text.to_owned());
        match &self.location {
            Location::Sqlite(path) => {
                let mut connection = SqliteConnectOptions::new().filename(path).connect().await.unwrap();
                let done = sqlx::query(text).execute(&mut connection).await.unwrap();
                connection.close().await.unwrap();
                done.rows_affected()
            }
            Location::Postgres(url) => {
                let options: PgConnectOptions = url.parse().unwrap();
                let options = options.options([("search_path", "kb,core")]);
                let mut connection = options.connect().await.unwrap();
                let done = sqlx::query(text).execute(&mut connection).await.unwrap();
                connection.close().await.unwrap();
                done.rows_affected()
            }
        }
    }

    /// Adds a workspace in status `creating`.
    pub(crate) async fn add(&self) -> Workspace {
        self.store.insert_creating(agent(), None).await.unwrap()
    }

    /// A command that runs an ignored test of this binary in another process, on this database.
    pub(crate) fn child(&self, test: &str) -> Command {
        let mut command = Command::new(env::current_exe().unwrap());
        let database = match &self.location {
            Location::Sqlite(path) => path.to_str().unwrap(),
            Location::Postgres(url) => url,
        };
        command
            .args(["--exact", test, "--ignored", "--nocapture"])
            .env(CHILD_DATABASE, database)
            .stdin(Stdio::null())
            .stdout(Stdio::piped());
        command
    }
}

/// An agent workspace that is about to be made.
pub(crate) fn agent() -> NewWorkspace {
    NewWorkspace::agent(WorkspaceId::generate(), "emergent/workspace:latest")
}
