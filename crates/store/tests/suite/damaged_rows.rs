//! Rows with values that this program does not write. Each is an error that names the row and the column, and none
//! hides another row.

use chrono::Utc;
use emergent_store::{
    IdempotentRequest, NewSnapshot, NewToken, Shape, StoreError, Unreadable, WorkspaceFilter,
};
use emergent_wire::access::TokenScope;
use emergent_wire::workspace::{NetworkMode, ProviderName, ResourceLimits, WorkspaceStatus};
use emergent_wire::{SnapshotId, TokenId, WorkspaceId};

use crate::support::TestDb;
use crate::workspaces::{mcp_server, start};

/// The column that an error names, for the row `id` of `table`.
fn column(error: &StoreError, table: &str, id: &impl ToString) -> &'static str {
    match error {
        StoreError::Corrupt { table: named, row, column, .. } => {
            assert_eq!((*named, row.as_str()), (table, id.to_string().as_str()), "{error}");
            column
        }
        other => panic!("not a damaged row: {other}"),
    }
}

fn only(unreadable: &[Unreadable]) -> &Unreadable {
    assert_eq!(unreadable.len(), 1, "{unreadable:?}");
    &unreadable[0]
}

/// Damage that both engines store.
const DAMAGE: &[(&str, &str)] = &[
    ("container_type", "'vm'"),
    ("provider", "'lxc'"),
    ("deployment_mode", "'elsewhere'"),
    ("lifecycle", "''"),
    ("status", "'lost'"),
    ("resource_limits", "NULL"),
    ("resource_limits", "'{}'"),
    ("resource_limits", r#"'{"cpu":"many","memory":"4G","disk":"10G"}'"#),
    ("snapshot_id", "'snap'"),
    ("snapshot_id", "'0190C5F6-0000-7000-8000-00000000000A'"),
    ("mcp_config", "'{}'"),
    ("mcp_config", "'[1]'"),
    ("metadata", "'[]'"),
    ("network", "''"),
    ("ttl_seconds", "-1"),
    ("placement", r#"'{"provider":"gvisor"}'"#),
];

/// Damage that PostgreSQL's types refuse.
const SQLITE_DAMAGE: &[(&str, &str)] = &[
    ("agent_session_id", "'x'"),
    ("agent_session_id", "'0190C5F6-0000-7000-8000-00000000000A'"),
    ("created_at", "'monday'"),
    // The same time in other words: SQLite compares the texts.
    ("created_at", "'2026-01-31T14:00:00.000000+02:00'"),
    ("last_used_at", "'2026-01-31T12:00:00Z'"),
    ("expires_at", "'2026-01-31t12:00:00.000000z'"),
    ("attached_at", "'2026-01-31 12:00:00.000000Z'"),
    ("owner", "'0190c5f6000070008000000000000001'"),
    ("last_used_at", "''"),
    ("expires_at", "'2026-13-01T00:00:00Z'"),
    ("resource_limits", "'{'"),
    ("mcp_config", "'x'"),
    ("metadata", "'x'"),
    ("placement", "'x'"),
    ("owner", "'nobody'"),
    ("attached_at", "'now'"),
    ("image", "x'ff'"),
];

/// Damage that SQLite's column types do not know, and PostgreSQL's allow.
const POSTGRES_DAMAGE: &[(&str, &str)] =
    &[("created_at", "'infinity'"), ("last_used_at", "'-infinity'"), ("expires_at", "'infinity'")];

pub(crate) async fn each_damaged_column_of_a_workspace_is_named(db: TestDb) {
    let others = if db.is_sqlite() { SQLITE_DAMAGE } else { POSTGRES_DAMAGE };
    for (damaged, value) in DAMAGE.iter().chain(others) {
        let id = db.add().await.id;
        if *damaged == "agent_session_id" {
            db.sql(&format!("INSERT INTO agent_sessions (id) VALUES ({value})")).await;
        }
        let sql = format!("UPDATE agent_workspaces SET {damaged} = {value} WHERE id = '{id}'");
        assert_eq!(db.sql(&sql).await, 1, "{damaged} = {value}");
        let error = db.store.workspace(id).await.unwrap_err();
        assert_eq!(column(&error, "agent_workspaces", &id), *damaged, "{error}");
        let message = error.to_string();
        assert!(
            message.starts_with(&format!("agent_workspaces {id}: column {damaged} is damaged: ")),
            "{message}"
        );
        assert!(message.contains("docs/runbook.md"), "{message}");
    }
}

pub(crate) async fn a_list_has_the_other_rows_and_names_the_damaged_one(db: TestDb) {
    let good = db.add().await;
    let good_id = good.id;
    let damaged = db.add().await.id;
    db.sql(&format!("UPDATE agent_workspaces SET placement = '[]' WHERE id = '{damaged}'")).await;
    let page = db.store.workspaces(WorkspaceFilter::default(), None, 10).await.unwrap();
    assert_eq!(page.workspaces, [good]);
    assert_eq!((page.unreadable.len(), page.unreadable[0].id), (1, damaged.0));
    assert!(page.unreadable[0].error.contains("column placement is damaged"), "{:?}", page.unreadable);
    let rows = db.store.workspaces_in(&[WorkspaceStatus::Creating]).await.unwrap();
    assert_eq!(rows.readable.iter().map(|row| row.workspace.id).collect::<Vec<_>>(), [good_id]);
    let unreadable = only(&rows.unreadable);
    assert_eq!(unreadable.id, damaged.0);
    assert_eq!(column(&unreadable.error, "agent_workspaces", &damaged), "placement");

    // Without its id a row can't be told from a sandbox that has no row.
    if db.is_sqlite() {
        db.sql(&format!("UPDATE agent_workspaces SET id = 'x' WHERE id = '{damaged}'")).await;
        let error = db.store.workspaces_in(WorkspaceStatus::ALL).await.unwrap_err();
        assert_eq!(column(&error, "agent_workspaces", &"(unreadable id)"), "id");
    }
}

/// A statement with the id finds no such row, so lists must not show it as a good one. Its sandbox is still known.
pub(crate) async fn a_row_whose_id_is_written_differently_is_damaged_and_named(db: TestDb) {
    if !db.is_sqlite() {
        return;
    }
    let good = db.add().await.id;
    for form in ["upper(id)", "replace(id, '-', '')", "'{' || id || '}'"] {
        let id = db.add().await.id;
        assert_eq!(db.sql(&format!("UPDATE agent_workspaces SET id = {form} WHERE id = '{id}'")).await, 1);
        let rows = db.store.workspaces_in(&[WorkspaceStatus::Creating]).await.unwrap();
        assert_eq!(rows.readable.iter().map(|row| row.workspace.id).collect::<Vec<_>>(), [good], "{form}");
        let unreadable = only(&rows.unreadable);
        assert_eq!(unreadable.id, id.0);
        assert_eq!(column(&unreadable.error, "agent_workspaces", &id), "id");
        let page = db.store.workspaces(WorkspaceFilter::default(), None, 10).await.unwrap();
        assert_eq!((page.workspaces.len(), page.unreadable[0].id), (1, id.0));
        db.sql(&format!("DELETE FROM agent_workspaces WHERE id <> '{good}'")).await;
    }
}

pub(crate) async fn a_page_that_ends_with_a_damaged_row_has_a_next_page(db: TestDb) {
    let oldest = db.add().await.id;
    let damaged = db.add().await.id;
    db.sql(&format!("UPDATE agent_workspaces SET network = 'x' WHERE id = '{damaged}'")).await;
    let first = db.store.workspaces(WorkspaceFilter::default(), None, 1).await.unwrap();
    assert_eq!((first.workspaces.len(), first.unreadable.len()), (0, 1));
    let second =
        db.store.workspaces(WorkspaceFilter::default(), first.next_cursor.as_deref(), 1).await.unwrap();
    assert_eq!(second.workspaces[0].id, oldest);
    assert_eq!((second.unreadable.len(), second.next_cursor), (0, None));
}

/// The damaged column is one of those that order the list, so the next page begins after a damaged value.
pub(crate) async fn every_page_is_reached_past_rows_with_a_damaged_time_or_id(db: TestDb) {
    let damage: &[(&str, &str)] = if db.is_sqlite() {
        &[
            ("created_at", "'monday'"),
            ("created_at", "''"),
            ("created_at", "substr(created_at, 1, 5) || '13' || substr(created_at, 8)"),
            ("created_at", "'/\"[]' || char(10) || 'é'"),
            ("id", "upper(id)"),
        ]
    } else {
        &[("created_at", "'infinity'"), ("created_at", "'-infinity'")]
    };
    for (damaged, value) in damage {
        let mut expected = Vec::new();
        for _ in 0..5 {
            expected.push(db.add().await.id.0);
        }
        for id in &expected[1..3] {
            let sql = format!("UPDATE agent_workspaces SET {damaged} = {value} WHERE id = '{id}'");
            assert_eq!(db.sql(&sql).await, 1);
        }
        for limit in 1..6 {
            let (mut found, mut cursor) = (Vec::new(), None);
            loop {
                let page = db.store.workspaces(WorkspaceFilter::default(), cursor.as_deref(), limit);
                let page = page.await.unwrap();
                found.extend(page.workspaces.iter().map(|workspace| workspace.id.0));
                found.extend(page.unreadable.iter().map(|row| row.id));
                cursor = page.next_cursor;
                if cursor.is_none() {
                    break;
                }
            }
            found.sort();
            assert_eq!(found, expected, "{damaged} = {value}, pages of {limit}");
        }
        db.sql("DELETE FROM agent_workspaces").await;
    }
}

/// A filter on the status would hide the row, and recovery would take its sandbox for one without a row.
pub(crate) async fn recovery_sees_a_workspace_with_an_unknown_status(db: TestDb) {
    let id = db.add().await.id;
    db.sql("UPDATE agent_workspaces SET status = 'lost'").await;
    let rows = db.store.workspaces_in(WorkspaceStatus::ALL).await.unwrap();
    assert!(rows.readable.is_empty() && !rows.is_empty());
    assert_eq!(only(&rows.unreadable).id, id.0);
}

pub(crate) async fn an_mcp_server_without_a_configuration_or_name_is_damaged(db: TestDb) {
    for (damaged, value) in [
        ("mcp_config", "NULL"),
        ("mcp_config", r#"'{"stdio_bridge":true}'"#),
        (
            "mcp_config",
            r#"'{"stdio_bridge":true,"mode":"shared","restart_policy":"always","timeout_ms":1,"volumes":[{"name":"a"}]}'"#,
        ),
        ("name", "NULL"),
        ("lifecycle", "'for ever'"),
        ("container_type", "'mcp'"),
    ] {
        let good = db.store.insert_creating(mcp_server(), None).await.unwrap().id;
        let id = db.store.insert_creating(mcp_server(), None).await.unwrap().id;
        db.sql(&format!("UPDATE agent_workspaces SET {damaged} = {value} WHERE id = '{id}'")).await;
        let error = db.store.workspace_record(id).await.unwrap_err();
        assert_eq!(column(&error, "agent_workspaces", &id), damaged, "{error}");
        let servers = db.store.mcp_servers().await.unwrap();
        assert_eq!(servers.readable.iter().map(|row| row.workspace.id).collect::<Vec<_>>(), [good]);
        assert_eq!(only(&servers.unreadable).id, id.0);
        db.sql("DELETE FROM agent_workspaces").await;
    }
}

pub(crate) async fn a_damaged_row_is_not_changed(db: TestDb) {
    let id = db.add().await.id;
    db.sql("UPDATE agent_workspaces SET metadata = '[1]'").await;
    let fields = serde_json::Map::from_iter([("a".to_owned(), 1.into())]);
    let error = db.store.merge_metadata(id, fields).await.unwrap_err();
    assert_eq!(column(&error, "agent_workspaces", &id), "metadata");
    let ready = [WorkspaceStatus::Creating];
    let error = db.store.transition(id, &ready, WorkspaceStatus::Ready).await.unwrap_err();
    assert_eq!(column(&error, "agent_workspaces", &id), "metadata");
    db.sql("UPDATE agent_workspaces SET metadata = '{}'").await;
    assert_eq!(db.store.workspace(id).await.unwrap().status, WorkspaceStatus::Creating);
}

pub(crate) async fn damaged_spares_snapshots_and_tokens_are_named(db: TestDb) {
    let store = &db.store;
    let shape = Shape {
        provider: ProviderName::Gvisor,
        image: "image".to_owned(),
        network: NetworkMode::Nat,
        limits: ResourceLimits::default(),
    };
    let spare = WorkspaceId::generate();
    assert!(store.insert_spare(spare, &shape, "digest", 1).await.unwrap());
    for (damaged, value) in [("resource_limits", "'{}'"), ("status", "'lost'"), ("provider", "''")] {
        db.sql(&format!("UPDATE warm_spares SET {damaged} = {value}")).await;
        let spares = store.spares().await.unwrap();
        assert_eq!(column(&only(&spares.unreadable).error, "warm_spares", &spare), damaged);
        assert!(spares.readable.is_empty());
        if damaged == "resource_limits" {
            // It may be of this shape, so it counts: a spare too few is better than one too many.
            assert!(!store.insert_spare(WorkspaceId::generate(), &shape, "digest", 1).await.unwrap());
            db.sql(r#"UPDATE warm_spares SET resource_limits = '{"cpu":"2","memory":"4G","disk":"10G"}'"#)
                .await;
        } else {
            db.sql("UPDATE warm_spares SET status = 'filling'").await;
        }
    }

    let new = NewSnapshot {
        id: SnapshotId::generate(),
        workspace_id: WorkspaceId::generate(),
        provider: ProviderName::Gvisor,
        description: None,
        image: "image".to_owned(),
        network: NetworkMode::Nat,
        limits: ResourceLimits::default(),
        memory: false,
        created_at: start(),
    };
    store.insert_snapshot(&new).await.unwrap();
    db.sql("UPDATE workspace_snapshots SET status = 'lost'").await;
    let error = store.snapshot(new.id).await.unwrap_err();
    assert_eq!(column(&error, "workspace_snapshots", &new.id), "status");
    let page = store.snapshots(None, None, 10).await.unwrap();
    assert_eq!((page.snapshots.len(), page.unreadable[0].id), (0, new.id.0));
    assert_eq!(only(&store.all_snapshots().await.unwrap().unreadable).id, new.id.0);

    let request = NewToken { name: "ci".into(), scope: TokenScope::Admin, ttl_seconds: None };
    let good = store.create_token(&request, Utc::now()).await.unwrap();
    let bad = store.create_token(&NewToken { name: "bad".into(), ..request }, Utc::now()).await.unwrap();
    db.sql(&format!("UPDATE access_tokens SET scope = 'root' WHERE id = '{}'", bad.token.id)).await;
    let tokens = store.tokens().await.unwrap();
    assert_eq!(tokens.readable.iter().map(|token| token.id).collect::<Vec<_>>(), [good.token.id]);
    assert_eq!(column(&only(&tokens.unreadable).error, "access_tokens", &bad.token.id), "scope");
    let error = store.verify_token(&bad.secret, Utc::now()).await.unwrap_err();
    assert_eq!(column(&error, "access_tokens", &bad.token.id), "scope");
}

pub(crate) async fn a_damaged_idempotency_key_setting_or_server_is_named(db: TestDb) {
    let store = &db.store;
    let request = IdempotentRequest::new(TokenId::generate(), "k", "workspace.create", b"{}").unwrap();
    store.begin_idempotent(&request, None, start()).await.unwrap();
    db.sql("UPDATE idempotency_keys SET status = 'lost'").await;
    let error = store.begin_idempotent(&request, None, start()).await.unwrap_err();
    assert!(matches!(error, StoreError::Corrupt { column: "status", .. }), "{error}");

    store.installation_id().await.unwrap();
    store.put_setting("installation_id", "x").await.unwrap();
    let error = store.installation_id().await.unwrap_err();
    assert_eq!(column(&error, "settings", &"installation_id"), "value");

    store.beat().await.unwrap();
    db.sql("UPDATE servers SET beat = -1").await;
    let error = store.servers().await.unwrap_err();
    assert_eq!(column(&error, "servers", &store.server()), "beat");
}

pub(crate) async fn a_damaged_row_does_not_stop_others_from_being_counted_or_made(db: TestDb) {
    let store = &db.store;
    for provider in ["gvisor", "lxc", "LXC"] {
        let id = db.add().await.id;
        db.sql(&format!("UPDATE agent_workspaces SET provider = '{provider}' WHERE id = '{id}'")).await;
    }
    assert_eq!(store.active_counts().await.unwrap(), [(ProviderName::Gvisor, 1)].into());

    let limits = ResourceLimits::default();
    let (image, network) = ("image".to_owned(), NetworkMode::Nat);
    let shape = Shape { provider: ProviderName::Gvisor, image, network, limits };
    let damaged = WorkspaceId::generate();
    assert!(store.insert_spare(damaged, &shape, "digest", 1).await.unwrap());
    db.sql("UPDATE warm_spares SET resource_limits = '[]'").await;
    assert!(store.insert_spare(WorkspaceId::generate(), &shape, "digest", 2).await.unwrap());
    assert!(!store.insert_spare(WorkspaceId::generate(), &shape, "digest", 2).await.unwrap());
}
