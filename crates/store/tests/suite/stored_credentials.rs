//! The migration that removes credentials from git URLs that earlier versions stored.

use std::fs;

use emergent_store::{CREDENTIAL_IN_CLONE, NewWorkspace};
use emergent_wire::workspace::{Placement, ProviderName, RejectedCandidate};
use serde_json::{Map, json};

use crate::support::{Location, TestDb, agent};

fn with_url(url: &str) -> NewWorkspace {
    NewWorkspace { repository_url: Some(url.to_owned()), ..agent() }
}

/// Opens the database as one that migration 5 was not applied to.
async fn migrate_again(db: &TestDb) -> emergent_store::Store {
    db.store.close().await;
    assert_eq!(db.sql("DELETE FROM schema_migrations WHERE version = 5").await, 1);
    db.location.open().await.unwrap()
}

pub(crate) async fn the_migration_removes_credentials_from_stored_urls(db: TestDb) {
    let store = &db.store;
    let quoted = "git: unable to access 'https://u:hunter2@host.example/r/': 403";
    let mut ids = Vec::new();
    // More than one batch.
    for number in 0..205 {
        let new = with_url(&format!("https://x-access-token:hunter2@host.example/r{number}"));
        ids.push(store.insert_creating(new, None).await.unwrap().id);
    }
    let query =
        store.insert_creating(with_url("https://host.example/r?token=hunter2"), None).await.unwrap().id;
    let failed = store.insert_creating(with_url("git@host.example:r"), None).await.unwrap().id;
    let placement = Placement {
        provider: ProviderName::Docker,
        reason: "it is the only one".into(),
        rejected: vec![RejectedCandidate { provider: ProviderName::Gvisor, reason: quoted.into() }],
        warm_hit: false,
    };
    store.set_placed(failed, ProviderName::Docker, "name", &placement).await.unwrap();
    let warnings = Map::from_iter([("warnings".to_owned(), json!([quoted]))]);
    store.merge_metadata(failed, warnings).await.unwrap();
    store.set_error(failed, quoted).await.unwrap();

    let store = migrate_again(&db).await;
    for (number, id) in ids.iter().enumerate() {
        let workspace = store.workspace(*id).await.unwrap();
        let url = workspace.repository_url;
        assert_eq!(url.as_deref(), Some(format!("https://host.example/r{number}").as_str()));
        assert_eq!(workspace.metadata[CREDENTIAL_IN_CLONE], json!(true));
    }
    let url = store.workspace(query).await.unwrap().repository_url;
    assert_eq!(url.as_deref(), Some("https://host.example/r"));
    let workspace = store.workspace(failed).await.unwrap();
    assert_eq!(workspace.repository_url.as_deref(), Some("git@host.example:r"));
    let clean = "git: unable to access 'https://host.example/r/': 403";
    assert_eq!(workspace.metadata["error"], clean);
    assert_eq!(workspace.metadata["warnings"], json!([clean]));
    assert_eq!(workspace.placement.unwrap().rejected[0].reason, clean);
    assert_eq!(workspace.metadata.get(CREDENTIAL_IN_CLONE), None, "its clone never had one");
    store.close().await;
    if let Location::Sqlite(path) = &db.location {
        let bytes = fs::read(path).unwrap();
        assert!(!bytes.windows(7).any(|window| window == b"hunter2"), "it is still in the file");
    }
}

pub(crate) async fn rows_without_credentials_are_left_alone(db: TestDb) {
    let mut kept = vec![db.add().await];
    for url in
        ["https://host.example/@scope/r", "ssh://git@host.example/r", "git@host.example:r", "/opt/a@b:c"]
    {
        kept.push(db.store.insert_creating(with_url(url), None).await.unwrap());
    }
    let damaged = db.store.insert_creating(with_url("https://t@host.example/r"), None).await.unwrap().id;
    if db.is_sqlite() {
        // PostgreSQL refuses text that is not JSON.
        db.sql(&format!(
            "UPDATE agent_workspaces SET metadata = 'x', placement = '{{' WHERE id = '{damaged}'"
        ))
        .await;
    }
    let store = migrate_again(&db).await;
    for workspace in kept {
        assert_eq!(store.workspace(workspace.id).await.unwrap(), workspace);
    }
    let clean = format!(
        "UPDATE agent_workspaces SET branch = branch WHERE id = '{damaged}' AND repository_url = 'https://host.example/r'"
    );
    assert_eq!(db.sql(&clean).await, 1);
}
