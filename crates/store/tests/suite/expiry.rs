//! How long workspaces live.

use chrono::{TimeDelta, Utc};
use emergent_store::NewWorkspace;
use emergent_wire::workspace::WorkspaceStatus::{Creating, Destroying, Error, Ready, Stopped, Stopping};

use crate::support::{TestDb, agent};
use crate::workspaces::{mcp_server, start, wrong_state};

pub(crate) async fn use_extends_the_life_and_never_moves_back(db: TestDb) {
    let store = &db.store;
    let new = NewWorkspace { ttl_seconds: Some(100), created_at: start(), ..agent() };
    let id = store.insert_creating(new, None).await.unwrap().id;
    store.set_ready(id, start()).await.unwrap();
    for (seconds, expected) in [(10, 10), (30, 30), (20, 30), (30, 30), (31, 31)] {
        store.touch(id, start() + TimeDelta::seconds(seconds)).await.unwrap();
        let row = store.workspace(id).await.unwrap();
        assert_eq!(row.last_used_at, start() + TimeDelta::seconds(expected));
        assert_eq!(row.expires_at, Some(row.last_used_at + TimeDelta::seconds(100)));
    }
    let forever = db.add().await.id;
    let later = Utc::now() + TimeDelta::days(1);
    store.touch(forever, later).await.unwrap();
    assert_eq!(store.workspace(forever).await.unwrap().expires_at, None);
}

pub(crate) async fn a_use_beats_the_sweep(db: TestDb) {
    let store = &db.store;
    let new = NewWorkspace { ttl_seconds: Some(60), created_at: start(), ..agent() };
    let id = store.insert_creating(new, None).await.unwrap().id;
    store.set_ready(id, start()).await.unwrap();
    let end = start() + TimeDelta::seconds(60);
    assert_eq!(store.expired(end - TimeDelta::microseconds(1), 10).await.unwrap(), []);
    assert_eq!(store.expired(end, 10).await.unwrap(), [id]);
    // Used after the sweep saw it and before the sweep acts.
    store.touch(id, end).await.unwrap();
    assert!(!store.expire(id, end).await.unwrap());
    assert_eq!(store.workspace(id).await.unwrap().status, Ready);
    let end = end + TimeDelta::seconds(60);
    assert!(store.expire(id, end).await.unwrap());
    assert!(!store.expire(id, end).await.unwrap());
    assert_eq!(wrong_state(store.touch(id, end).await), Destroying);
}

pub(crate) async fn only_overdue_workspaces_without_a_change_in_progress_expire(db: TestDb) {
    let store = &db.store;
    let later = start() + TimeDelta::days(1);
    let mut expected = Vec::new();
    for (number, status) in [Creating, Ready, Stopping, Stopped, Destroying, Error].into_iter().enumerate() {
        let new = NewWorkspace { ttl_seconds: Some(60 + number as u64), created_at: start(), ..agent() };
        let id = store.insert_creating(new, None).await.unwrap().id;
        store.transition(id, &[Creating], status).await.unwrap();
        if matches!(status, Ready | Stopped | Error) {
            expected.push(id);
        } else {
            assert!(!store.expire(id, later).await.unwrap(), "{status}");
        }
    }
    assert_eq!(store.expired(later, 10).await.unwrap(), expected);
    assert_eq!(store.expired(later, 2).await.unwrap(), expected[..2]);
}

pub(crate) async fn mcp_servers_are_exempt_from_ttl(db: TestDb) {
    let store = &db.store;
    let later = start() + TimeDelta::days(400);
    for ttl_seconds in [None, Some(1)] {
        // An MCP server never expires, even with a time to live, and is not stopped when it is not used.
        let server = NewWorkspace { ttl_seconds, created_at: start(), ..mcp_server() };
        let server = store.insert_creating(server, None).await.unwrap();
        assert_eq!(server.expires_at.is_some(), ttl_seconds.is_some());
        store.transition(server.id, &[Creating], Ready).await.unwrap();
        assert!(!store.expire(server.id, later).await.unwrap());
        assert!(!store.stop_if_unused(server.id, later).await.unwrap());
    }
    assert_eq!(store.expired(later, 10).await.unwrap(), []);
    assert_eq!(store.unused_since(later, 10).await.unwrap(), []);
}

pub(crate) async fn a_use_beats_the_idle_stop(db: TestDb) {
    let store = &db.store;
    let new = NewWorkspace { created_at: start(), ..agent() };
    let id = store.insert_creating(new, None).await.unwrap().id;
    store.set_ready(id, start()).await.unwrap();
    assert_eq!(store.unused_since(start(), 10).await.unwrap(), []);
    let later = start() + TimeDelta::seconds(10);
    assert_eq!(store.unused_since(later, 10).await.unwrap(), [id]);
    store.touch(id, later).await.unwrap();
    assert!(!store.stop_if_unused(id, later).await.unwrap());
    assert!(store.stop_if_unused(id, later + TimeDelta::seconds(1)).await.unwrap());
    assert_eq!(store.workspace(id).await.unwrap().status, Stopping);
}
