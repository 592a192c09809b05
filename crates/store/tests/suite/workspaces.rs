//! Workspaces.

use std::collections::{BTreeMap, BTreeSet};

use chrono::{DateTime, TimeDelta, Utc};
use emergent_store::{NewWorkspace, RowKind, SealError, SealingKey, StoreError, WorkspaceFilter};
use emergent_wire::id::{SessionId, SnapshotId};
use emergent_wire::mcp::{McpConfig, RegisterMcpServer};
use emergent_wire::workspace::{
    ContainerType, DeploymentMode, Lifecycle, NetworkMode, Placement, ProviderName, RejectedCandidate,
    ResourceLimits, Workspace, WorkspaceStatus,
};
use emergent_wire::{ByteSize, CpuCount, WorkspaceId};
use serde_json::{Map, Value, json};

use crate::support::{TestDb, agent};

use WorkspaceStatus::{Creating, Destroying, Error, Ready, Stopped, Stopping};

pub(crate) fn start() -> DateTime<Utc> {
    DateTime::from_timestamp_micros(1_800_000_000_000_001).unwrap()
}

fn object(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(fields) => fields,
        other => panic!("not an object: {other}"),
    }
}

fn placement() -> Placement {
    Placement {
        provider: ProviderName::Gvisor,
        reason: "it is healthy".into(),
        rejected: vec![RejectedCandidate {
            provider: ProviderName::Firecracker,
            reason: "KVM not available".into(),
        }],
        warm_hit: false,
    }
}

pub(crate) fn mcp_config() -> McpConfig {
    let request = json!({"name": "server", "image": "image", "volumes": ["data:/data"]});
    McpConfig::from(&serde_json::from_value::<RegisterMcpServer>(request).unwrap())
}

pub(crate) fn mcp_server() -> NewWorkspace {
    NewWorkspace {
        container_type: ContainerType::McpServer,
        lifecycle: Lifecycle::Persistent,
        name: Some(format!("server-{}", WorkspaceId::generate())),
        mcp_config: Some(mcp_config()),
        ..agent()
    }
}

/// The status that a refusal names.
pub(crate) fn wrong_state<T: std::fmt::Debug>(result: Result<T, StoreError>) -> WorkspaceStatus {
    match result {
        Err(StoreError::WrongState { status, .. }) => status,
        other => panic!("not refused: {other:?}"),
    }
}

fn not_found<T: std::fmt::Debug>(result: Result<T, StoreError>) {
    match result {
        Err(StoreError::NotFound { .. }) => {}
        other => panic!("found: {other:?}"),
    }
}

pub(crate) async fn a_row_comes_back_as_it_was_written(db: TestDb) {
    let store = &db.store;
    let session = SessionId::generate();
    store.ensure_session(session, start()).await.unwrap();
    store.ensure_session(session, start()).await.unwrap();
    let new = NewWorkspace {
        agent_session_id: Some(session),
        repository_url: Some("https://example.com/ü.git".into()),
        branch: Some("main".into()),
        deployment_mode: DeploymentMode::Managed,
        created_at: start() + TimeDelta::nanoseconds(999),
        ttl_seconds: Some(3600),
        resource_limits: ResourceLimits {
            cpu: CpuCount::whole(1),
            memory: ByteSize::mib(512),
            disk: ByteSize::gib(3),
        },
        snapshot_id: Some(SnapshotId::generate()),
        metadata: object(json!({"n": 1.5, "deep": {"b": [null, true], "a": "x"}})),
        network: NetworkMode::Isolated,
        ..agent()
    };
    let written = store.insert_creating(new.clone(), Some(10)).await.unwrap();
    let expected = Workspace {
        id: new.id,
        agent_session_id: Some(session),
        container_type: ContainerType::AgentWorkspace,
        provider: None,
        provider_workspace_id: String::new(),
        repository_url: new.repository_url,
        branch: new.branch,
        deployment_mode: DeploymentMode::Managed,
        lifecycle: Lifecycle::Ephemeral,
        status: Creating,
        created_at: start(),
        last_used_at: start(),
        expires_at: Some(start() + TimeDelta::hours(1)),
        resource_limits: new.resource_limits,
        snapshot_id: new.snapshot_id,
        mcp_config: None,
        metadata: json!({"n": 1.5, "deep": {"b": [null, true], "a": "x"},
            "image": "emergent/workspace:latest", "network": "isolated"}),
        placement: None,
        attached_to: None,
        attached_at: None,
        usage: None,
    };
    assert_eq!(written, expected);
    assert_eq!(store.workspace(new.id).await.unwrap(), expected);
    let record = store.workspace_record(new.id).await.unwrap();
    assert_eq!((record.image.as_str(), record.network), ("emergent/workspace:latest", NetworkMode::Isolated));
    assert_eq!((record.ttl_seconds, record.error), (Some(3600), None));

    let placed = store.set_placed(new.id, ProviderName::Gvisor, "container-1", &placement()).await.unwrap();
    assert_eq!(placed.provider, Some(ProviderName::Gvisor));
    assert_eq!(placed.provider_workspace_id, "container-1");
    assert_eq!(placed.placement, Some(placement()));

    // The time to live begins when it is ready.
    let now = start() + TimeDelta::minutes(5);
    let ready = store.set_ready(new.id, now).await.unwrap();
    assert_eq!((ready.status, ready.last_used_at), (Ready, now));
    assert_eq!(ready.expires_at, Some(now + TimeDelta::hours(1)));
    assert_eq!(store.workspace(new.id).await.unwrap(), ready);

    let server = store.insert_creating(mcp_server(), Some(0)).await.unwrap();
    assert_eq!(server.mcp_config, Some(mcp_config()));
    assert_eq!(store.set_ready(server.id, now).await.unwrap().expires_at, None);

    not_found(store.workspace(WorkspaceId::generate()).await);
    not_found(store.set_ready(WorkspaceId::generate(), now).await);
    not_found(store.set_error(WorkspaceId::generate(), "x").await);
}

pub(crate) async fn of_200_inserts_at_once_the_limit_lets_10_in(db: TestDb) {
    let tries: Vec<_> = (0..200)
        .map(|_| {
            let store = db.store.clone();
            tokio::spawn(async move { store.insert_creating(agent(), Some(10)).await })
        })
        .collect();
    let mut made = 0;
    for attempt in tries {
        match attempt.await.unwrap() {
            Ok(_) => made += 1,
            Err(StoreError::LimitReached { limit, current }) => assert_eq!((limit, current), (10, 10)),
            Err(error) => panic!("{error}"),
        }
    }
    assert_eq!(made, 10);
    assert_eq!(db.store.workspaces_in(&[Creating]).await.unwrap().readable.len(), 10);
}

pub(crate) async fn the_limit_counts_live_agent_workspaces_only(db: TestDb) {
    let store = &db.store;
    let mut ids = Vec::new();
    for status in [Creating, Ready, Stopping, Stopped, Error] {
        let id = store.insert_creating(agent(), Some(5)).await.unwrap().id;
        store.transition(id, &[Creating], status).await.unwrap();
        ids.push(id);
        store.insert_creating(mcp_server(), Some(5)).await.unwrap();
    }
    let error = store.insert_creating(agent(), Some(5)).await.unwrap_err();
    assert!(matches!(error, StoreError::LimitReached { limit: 5, current: 5 }), "{error}");
    assert!(error.to_string().contains("limit of 5"), "{error}");
    store.transition(ids[1], &[Ready], Destroying).await.unwrap();
    store.insert_creating(agent(), Some(5)).await.unwrap();
    store.insert_creating(agent(), Some(5)).await.unwrap_err();
    store.insert_creating(agent(), None).await.unwrap();
}

pub(crate) async fn an_id_is_used_once_and_a_session_must_exist(db: TestDb) {
    let new = agent();
    db.store.insert_creating(new.clone(), Some(10)).await.unwrap();
    let error = db.store.insert_creating(new, Some(10)).await.unwrap_err();
    assert!(matches!(error, StoreError::Conflict { kind: "workspace", .. }), "{error}");
    let new = NewWorkspace { agent_session_id: Some(SessionId::generate()), ..agent() };
    let error = db.store.insert_creating(new, None).await.unwrap_err();
    assert!(matches!(error, StoreError::NotFound { kind: RowKind::Session, .. }), "{error}");
}

/// All pages, and how many rows each had.
async fn pages(db: &TestDb, filter: WorkspaceFilter, limit: u32) -> Vec<Workspace> {
    let (mut rows, mut cursor) = (Vec::new(), None);
    loop {
        let page = db.store.workspaces(filter, cursor.as_deref(), limit).await.unwrap();
        assert!(page.workspaces.len() <= limit as usize);
        rows.extend(page.workspaces);
        cursor = page.next_cursor;
        if cursor.is_none() {
            return rows;
        }
    }
}

pub(crate) async fn pages_neither_repeat_nor_skip_rows_of_one_time(db: TestDb) {
    let mut expected = Vec::new();
    for number in 0..25 {
        let new = NewWorkspace {
            // Times that differ by less than a microsecond, or by a whole second.
            created_at: start() + TimeDelta::seconds(number / 20) + TimeDelta::nanoseconds(number),
            ..agent()
        };
        expected.push(db.store.insert_creating(new, None).await.unwrap());
    }
    expected.sort_by_key(|row| (row.created_at, row.id));
    expected.reverse();
    for limit in [1, 4, 5, 24, 25, 26] {
        assert_eq!(pages(&db, WorkspaceFilter::default(), limit).await, expected, "pages of {limit}");
    }

    // A row that comes between two pages is newer than both; one that goes takes nothing with it.
    let first = db.store.workspaces(WorkspaceFilter::default(), None, 10).await.unwrap();
    let newest = NewWorkspace { created_at: start() + TimeDelta::hours(1), ..agent() };
    db.store.insert_creating(newest, None).await.unwrap();
    db.store.delete_workspace(expected[9].id).await.unwrap();
    let second =
        db.store.workspaces(WorkspaceFilter::default(), first.next_cursor.as_deref(), 500).await.unwrap();
    assert_eq!(second.workspaces, expected[10..]);
    assert_eq!(second.next_cursor, None);

    for cursor in ["", "nonsense", "czE"] {
        let bad = db.store.workspaces(WorkspaceFilter::default(), Some(cursor), 10).await;
        assert!(matches!(bad, Err(StoreError::BadCursor)), "{cursor}");
    }
}

pub(crate) async fn lists_are_filtered(db: TestDb) {
    let store = &db.store;
    let session = SessionId::generate();
    store.ensure_session(session, start()).await.unwrap();
    let plain = db.add().await.id;
    let placed = db.add().await.id;
    store.set_placed(placed, ProviderName::Gvisor, "c", &placement()).await.unwrap();
    let ready = db.add().await.id;
    store.set_ready(ready, start()).await.unwrap();
    let server = store.insert_creating(mcp_server(), None).await.unwrap().id;
    let new = NewWorkspace { agent_session_id: Some(session), ..agent() };
    let of_session = store.insert_creating(new, None).await.unwrap().id;

    let ids = |filter: WorkspaceFilter| {
        let db = &db;
        async move { pages(db, filter, 2).await.iter().map(|row| row.id).collect::<BTreeSet<_>>() }
    };
    let none = WorkspaceFilter::default();
    let filter = WorkspaceFilter { container_type: Some(ContainerType::McpServer), ..none };
    assert_eq!(ids(filter).await, [server].into());
    let filter = WorkspaceFilter { provider: Some(ProviderName::Gvisor), ..none };
    assert_eq!(ids(filter).await, [placed].into());
    let filter = WorkspaceFilter { status: Some(Ready), ..none };
    assert_eq!(ids(filter).await, [ready].into());
    let filter = WorkspaceFilter { agent_session_id: Some(session), ..none };
    assert_eq!(ids(filter).await, [of_session].into());
    let filter = WorkspaceFilter {
        container_type: Some(ContainerType::AgentWorkspace),
        status: Some(Creating),
        ..none
    };
    assert_eq!(ids(filter).await, [plain, placed, of_session].into());
}

pub(crate) async fn one_of_many_transitions_wins(db: TestDb) {
    let id = db.add().await.id;
    db.store.set_ready(id, start()).await.unwrap();
    let tries: Vec<_> = (0..20)
        .map(|number| {
            let store = db.store.clone();
            let to = if number % 2 == 0 { Stopping } else { Destroying };
            tokio::spawn(async move { (to, store.transition(id, &[Ready, Stopped], to).await) })
        })
        .collect();
    let (mut winners, mut losers) = (Vec::new(), Vec::new());
    for attempt in tries {
        match attempt.await.unwrap() {
            (to, Ok(workspace)) => {
                assert_eq!(workspace.status, to);
                winners.push(to);
            }
            (_, refused) => losers.push(wrong_state(refused)),
        }
    }
    assert_eq!(winners.len(), 1);
    assert!(losers.iter().all(|status| *status == winners[0]), "{winners:?} {losers:?}");
    assert_eq!(wrong_state(db.store.transition(id, &[], Ready).await), winners[0]);
    not_found(db.store.transition(WorkspaceId::generate(), &[Ready], Stopping).await);
}

pub(crate) async fn a_workspace_that_is_destroyed_never_comes_back(db: TestDb) {
    let store = &db.store;
    let id = db.add().await.id;
    store.transition(id, &[Creating], Destroying).await.unwrap();
    assert_eq!(wrong_state(store.set_ready(id, start()).await), Destroying);
    let placed = store.set_placed(id, ProviderName::Gvisor, "c", &placement()).await;
    assert_eq!(wrong_state(placed), Destroying);
    assert_eq!(wrong_state(store.touch(id, Utc::now()).await), Destroying);
    let failed = store.set_error(id, "the volume is busy").await.unwrap();
    assert_eq!((failed.status, &failed.metadata["error"]), (Destroying, &json!("the volume is busy")));
    assert!(store.delete_workspace(id).await.unwrap());
    not_found(store.touch(id, Utc::now()).await);
}

pub(crate) async fn an_error_is_kept_until_ready(db: TestDb) {
    let store = &db.store;
    let id = db.add().await.id;
    let failed = store.set_error(id, "no space").await.unwrap();
    assert_eq!((failed.status, &failed.metadata["error"]), (Error, &json!("no space")));
    let record = &store.workspaces_in(&[Error]).await.unwrap().readable[0];
    assert_eq!(record.error.as_deref(), Some("no space"));
    let stopped = store.transition(id, &[Error], Stopped).await.unwrap();
    assert_eq!(stopped.metadata["error"], "no space");
    let ready = store.transition(id, &[Stopped], Ready).await.unwrap();
    assert_eq!(ready.metadata.get("error"), None);
    store.set_error(id, "again").await.unwrap();
    let ready = store.set_ready(id, start()).await.unwrap();
    assert_eq!((ready.status, ready.metadata.get("error")), (Ready, None));
}

pub(crate) async fn metadata_is_merged_without_losing_fields(db: TestDb) {
    let store = &db.store;
    let new = NewWorkspace { metadata: object(json!({"kept": {"a": 1}, "gone": 1})), ..agent() };
    let id = store.insert_creating(new, None).await.unwrap().id;
    let merges: Vec<_> = (0..20)
        .map(|number| {
            let store = store.clone();
            let mut fields = Map::new();
            fields.insert(format!("field{number}"), number.into());
            tokio::spawn(async move { store.merge_metadata(id, fields).await.unwrap() })
        })
        .collect();
    for merge in merges {
        merge.await.unwrap();
    }
    let merged = store.merge_metadata(id, object(json!({"gone": null, "field0": "x"}))).await.unwrap();
    assert_eq!(merged.metadata["kept"], json!({"a": 1}));
    assert_eq!(merged.metadata.get("gone"), None);
    assert_eq!(merged.metadata["field0"], "x");
    for number in 1..20 {
        assert_eq!(merged.metadata[format!("field{number}")], number);
    }
    not_found(store.merge_metadata(WorkspaceId::generate(), Map::new()).await);
}

pub(crate) async fn recovery_sees_what_is_in_a_status(db: TestDb) {
    let store = &db.store;
    let mut by_status = BTreeMap::new();
    for status in WorkspaceStatus::ALL {
        let id = db.add().await.id;
        store.transition(id, &[Creating], *status).await.unwrap();
        by_status.insert(*status, id);
    }
    let found = store.workspaces_in(&[Creating, Destroying, Error]).await.unwrap().readable;
    let found: BTreeSet<_> = found.iter().map(|record| record.workspace.id).collect();
    assert_eq!(found, [by_status[&Creating], by_status[&Destroying], by_status[&Error]].into());
    assert!(store.workspaces_in(&[]).await.unwrap().is_empty());
    assert_eq!(store.workspaces_in(WorkspaceStatus::ALL).await.unwrap().readable.len(), 6);
}

pub(crate) async fn active_workspaces_are_counted_by_provider(db: TestDb) {
    let store = &db.store;
    assert!(store.active_counts().await.unwrap().is_empty());
    for provider in [ProviderName::Gvisor, ProviderName::Gvisor, ProviderName::E2b] {
        let id = db.add().await.id;
        store.set_placed(id, provider, "x", &placement()).await.unwrap();
    }
    let gone = db.add().await.id;
    store.set_placed(gone, ProviderName::Docker, "x", &placement()).await.unwrap();
    store.transition(gone, &[Creating], Destroying).await.unwrap();
    db.add().await;
    let expected = BTreeMap::from([(ProviderName::Gvisor, 2), (ProviderName::E2b, 1)]);
    assert_eq!(store.active_counts().await.unwrap(), expected);
}

pub(crate) async fn an_environment_opens_with_its_row_and_key_only(db: TestDb) {
    let store = &db.store;
    let key = SealingKey::from_hex(&"01".repeat(32)).unwrap();
    let other = SealingKey::from_hex(&"02".repeat(32)).unwrap();
    let environment = BTreeMap::from([("TOKEN".to_owned(), "hunter2-hunter2".to_owned())]);
    let mut new = agent();
    new.environment_sealed = key.seal_environment(new.id, &environment);
    let id = store.insert_creating(new, None).await.unwrap().id;
    let plain = db.add().await.id;
    assert_eq!(store.environment(id, &key).await.unwrap(), environment);
    assert_eq!(store.environment(plain, &key).await.unwrap(), BTreeMap::new());
    assert_eq!(key.seal_environment(plain, &BTreeMap::new()), None);

    let error = store.environment(id, &other).await.unwrap_err();
    assert!(matches!(error, StoreError::Seal(SealError::OtherKey)), "{error}");
    // Moved to another row, it does not open.
    let moved = format!(
        "UPDATE agent_workspaces SET environment_sealed =
             (SELECT environment_sealed FROM agent_workspaces WHERE id = '{id}') WHERE id = '{plain}'"
    );
    assert_eq!(db.sql(&moved).await, 1);
    let error = store.environment(plain, &key).await.unwrap_err();
    assert!(matches!(error, StoreError::Seal(SealError::Damaged)), "{error}");
    not_found(store.environment(WorkspaceId::generate(), &key).await);

    if db.is_sqlite() {
        store.close().await;
        for entry in std::fs::read_dir(db.directory.path()).unwrap() {
            let bytes = std::fs::read(entry.unwrap().path()).unwrap();
            assert!(!bytes.windows(7).any(|part| part == b"hunter2"));
        }
    }
}

/// PostgreSQL has no NUL in text; error messages and paths may.
pub(crate) async fn text_with_nul_is_stored(db: TestDb) {
    let store = &db.store;
    let id = db.add().await.id;
    let row = store.set_error(id, "a\0b").await.unwrap();
    assert_eq!(row.metadata["error"], "a\u{fffd}b");
    let row = store.merge_metadata(id, object(json!({"k\0": "v\0"}))).await.unwrap();
    assert_eq!(row.metadata["k\u{fffd}"], "v\u{fffd}");
}

pub(crate) async fn one_of_many_attaches_wins_and_names_itself(db: TestDb) {
    let store = &db.store;
    let id = store.insert_creating(agent(), None).await.unwrap().id;
    let attempts = (0..20).map(|n| {
        let store = store.clone();
        tokio::spawn(async move { store.attach(id, &format!("agent-{n}"), start()).await.unwrap() })
    });
    let mut winners = Vec::new();
    let mut named = BTreeSet::new();
    for attempt in attempts.collect::<Vec<_>>() {
        match attempt.await.unwrap() {
            Ok(workspace) => winners.push(workspace.attached_to.unwrap()),
            Err(holder) => drop(named.insert(holder)),
        }
    }
    assert_eq!(winners.len(), 1, "{winners:?}");
    assert_eq!(named, BTreeSet::from([winners[0].clone()]));

    let again = store.attach(id, &winners[0], start() + TimeDelta::hours(1)).await.unwrap().unwrap();
    assert_eq!(again.attached_at, Some(start()));
    assert_eq!(store.detach(id, Some("a stranger")).await.unwrap(), Err(winners[0].clone()));
    assert_eq!(store.detach(id, Some(&winners[0])).await.unwrap().unwrap().attached_to, None);
    assert_eq!(store.detach(id, Some("anybody")).await.unwrap().unwrap().attached_to, None);
    store.attach(id, "b", start()).await.unwrap().unwrap();
    assert_eq!(store.detach(id, None).await.unwrap().unwrap().attached_to, None);
    store.transition(id, &[Creating], Destroying).await.unwrap();
    assert_eq!(wrong_state(store.attach(id, "c", start()).await), Destroying);
    not_found(store.attach(WorkspaceId::generate(), "c", start()).await);
}
