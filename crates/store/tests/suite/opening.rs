//! Opening, migrating, settings, closing.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use emergent_store::{SCHEMA_VERSION, SealError, SealingKey, Store, StoreConfig, StoreError};

use crate::support::{Location, TestDb};

pub(crate) async fn opening_again_changes_nothing(db: TestDb) {
    let workspace = db.add().await;
    db.store.close().await;
    for _ in 0..2 {
        let store = db.location.open().await.unwrap();
        assert_eq!(store.workspace(workspace.id).await.unwrap(), workspace);
        store.close().await;
    }
}

pub(crate) async fn a_newer_database_is_refused(db: TestDb) {
    db.store.close().await;
    let newer = SCHEMA_VERSION + 5;
    let zero = if db.is_sqlite() { "x'00'" } else { "'\\x00'" };
    db.sql(&format!("INSERT INTO schema_migrations (version, checksum) VALUES ({newer}, {zero})")).await;
    let error = db.location.open().await.unwrap_err();
    assert!(
        matches!(error, StoreError::TooNew { found, known } if found == newer && known == SCHEMA_VERSION)
    );
    assert!(error.to_string().contains("start the newer program"), "{error}");
}

pub(crate) async fn another_builds_database_is_refused(db: TestDb) {
    db.store.close().await;
    let zero = if db.is_sqlite() { "x'00'" } else { "'\\x00'" };
    db.sql(&format!("UPDATE schema_migrations SET checksum = {zero} WHERE version = 1")).await;
    let error = db.location.open().await.unwrap_err();
    assert!(matches!(error, StoreError::MigrationChanged { version: 1 }), "{error}");
}

/// Starts from an empty database: two servers make the schema and the installation id at the same time.
pub(crate) async fn servers_that_start_at_once_take_turns(db: TestDb) {
    db.store.close().await;
    if db.is_sqlite() {
        // One server per file. The error of others says so.
        let path = db.directory.path().join("new.db");
        let opens: Vec<_> =
            (0..8).map(|_| tokio::spawn(Store::open(StoreConfig::Sqlite(path.clone())))).collect();
        let mut stores = Vec::new();
        for open in opens {
            match open.await.unwrap() {
                Ok(store) => stores.push(store),
                Err(error) => assert!(matches!(error, StoreError::InUse { .. }), "{error}"),
            }
        }
        assert_eq!(stores.len(), 1);
        return;
    }
    db.sql("DROP SCHEMA kb CASCADE").await;
    db.sql("DROP SCHEMA core CASCADE").await;
    let opens: Vec<_> = (0..4)
        .map(|_| {
            let location = db.location.clone();
            tokio::spawn(async move { location.open().await?.installation_id().await })
        })
        .collect();
    let mut ids = Vec::new();
    for open in opens {
        ids.push(open.await.unwrap().unwrap());
    }
    assert!(ids.iter().all(|id| *id == ids[0]), "{ids:?}");
}

pub(crate) async fn the_installation_id_is_made_once(db: TestDb) {
    let calls: Vec<_> = (0..8)
        .map(|_| {
            let store = db.store.clone();
            tokio::spawn(async move { store.installation_id().await.unwrap() })
        })
        .collect();
    let id = db.store.installation_id().await.unwrap();
    for call in calls {
        assert_eq!(call.await.unwrap(), id);
    }
    db.store.close().await;
    assert_eq!(db.location.open().await.unwrap().installation_id().await.unwrap(), id);
}

pub(crate) async fn the_sealing_key_is_checked(db: TestDb) {
    let key = SealingKey::load_or_create(&db.directory.path().join("key")).unwrap();
    let other = SealingKey::from_hex(&"ab".repeat(32)).unwrap();
    db.store.check_key(&key).await.unwrap();
    db.store.check_key(&key).await.unwrap();
    let error = db.store.check_key(&other).await.unwrap_err();
    assert!(matches!(error, StoreError::Seal(SealError::OtherKey)), "{error}");
}

pub(crate) async fn settings_come_back(db: TestDb) {
    assert_eq!(db.store.setting("a").await.unwrap(), None);
    assert_eq!(db.store.setting_or_insert("a", "1").await.unwrap(), "1");
    assert_eq!(db.store.setting_or_insert("a", "2").await.unwrap(), "1");
    db.store.put_setting("a", "3").await.unwrap();
    assert_eq!(db.store.setting("a").await.unwrap().as_deref(), Some("3"));
}

pub(crate) async fn a_closed_store_refuses_calls(db: TestDb) {
    db.store.ping().await.unwrap();
    db.store.close().await;
    assert!(matches!(db.store.ping().await, Err(StoreError::Unavailable(_))));
}

#[tokio::test]
async fn the_sqlite_files_are_private() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("emergent.db");
    // A file that others could read is made private.
    fs::write(&path, "").unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o666)).unwrap();
    let store = Store::open(StoreConfig::Sqlite(path)).await.unwrap();
    store.put_setting("a", "1").await.unwrap();
    let mut names = Vec::new();
    for entry in fs::read_dir(directory.path()).unwrap() {
        let entry = entry.unwrap();
        assert_eq!(entry.metadata().unwrap().permissions().mode() & 0o777, 0o600, "{:?}", entry.path());
        names.push(entry.file_name().into_string().unwrap());
    }
    assert!(names.iter().any(|name| name.ends_with("-wal")), "{names:?}");
}

/// Run by the test below, in a process of its own.
#[tokio::test]
#[ignore = "needs a database that is in use"]
async fn opens_a_database_in_use() {
    println!("\nrefused: {}", Location::from_parent().open().await.unwrap_err());
}

#[tokio::test]
async fn a_second_process_on_a_sqlite_file_is_refused() {
    let db = TestDb::sqlite().await;
    let Location::Sqlite(path) = &db.location else { unreachable!("it is SQLite") };
    let child = db.child("opening::opens_a_database_in_use").output().unwrap();
    let text = String::from_utf8_lossy(&child.stdout).into_owned();
    let expected = format!(
        "refused: {} is in use by process {}: stop it",
        path.canonicalize().unwrap().display(),
        std::process::id()
    );
    assert!(text.contains(&expected), "{text}");
    // Another name for the file does not help, and a failed try has not broken the lock.
    let link = db.directory.path().join("link.db");
    std::os::unix::fs::symlink(path, &link).unwrap();
    let error = Store::open(StoreConfig::Sqlite(link)).await.unwrap_err();
    assert!(matches!(error, StoreError::InUse { .. }), "{error}");
    db.store.close().await;
    db.location.open().await.unwrap();
}

#[tokio::test]
async fn errors_of_open_name_the_database_without_the_password() {
    let missing = StoreConfig::Sqlite("/nonexistent/emergent.db".into());
    let error = Store::open(missing).await.unwrap_err().to_string();
    assert!(error.contains("/nonexistent"), "{error}");

    let config = StoreConfig::postgres("postgres://user:hunter2@127.0.0.1:1/db");
    assert!(!format!("{config:?}").contains("hunter2"));
    let error = Store::open(config).await.unwrap_err();
    assert!(matches!(error, StoreError::Unavailable(_)), "{error}");
    assert!(!format!("{error:?}").contains("hunter2"), "{error:?}");

    let error = Store::open(StoreConfig::postgres("postgres://:::hunter2")).await.unwrap_err();
    assert!(matches!(error, StoreError::BadUrl(_)), "{error}");
    assert!(!format!("{error:?}").contains("hunter2"), "{error:?}");
}
