//! Snapshots.

use chrono::TimeDelta;
use emergent_store::{NewSnapshot, RowKind, StoreError};
use emergent_wire::id::ServerId;
use emergent_wire::snapshot::SnapshotStatus;
use emergent_wire::workspace::{NetworkMode, ProviderName, ResourceLimits};
use emergent_wire::{SnapshotId, WorkspaceId};

use crate::support::TestDb;
use crate::workspaces::start;

fn new(workspace_id: WorkspaceId, minutes: i64) -> NewSnapshot {
    NewSnapshot {
        id: SnapshotId::generate(),
        workspace_id,
        provider: ProviderName::Gvisor,
        description: Some("before the change".to_owned()),
        image: "image".to_owned(),
        network: NetworkMode::Isolated,
        limits: ResourceLimits::default(),
        memory: true,
        created_at: start() + TimeDelta::minutes(minutes),
    }
}

pub(crate) async fn a_snapshot_is_made_used_and_removed(db: TestDb) {
    let store = &db.store;
    let wanted = new(WorkspaceId::generate(), 0);
    let made = store.insert_snapshot(&wanted).await.unwrap();
    assert_eq!((made.status, made.size_bytes), (SnapshotStatus::Creating, None));
    assert_eq!(store.snapshot(made.id).await.unwrap().owner, Some(store.server()));
    let ready = store.snapshot_is_ready(made.id, 4096).await.unwrap();
    assert_eq!((ready.status, ready.size_bytes), (SnapshotStatus::Ready, Some(4096)));
    assert_eq!(ready.description.as_deref(), Some("before the change"));
    assert_eq!((ready.network, ready.memory, ready.created_at), (NetworkMode::Isolated, true, start()));
    assert_eq!(store.snapshot(made.id).await.unwrap().owner, None);

    store.delete_snapshot(made.id).await.unwrap();
    assert_eq!(store.snapshot(made.id).await.unwrap().snapshot, ready, "a ready one was deleted");
    assert!(!store.withdraw_snapshot(made.id, Some(ServerId::generate())).await.unwrap());
    assert!(store.withdraw_snapshot(made.id, None).await.unwrap());
    assert!(!store.withdraw_snapshot(made.id, None).await.unwrap());
    store.delete_snapshot(made.id).await.unwrap();
    let gone = store.snapshot(made.id).await;
    assert!(matches!(gone, Err(StoreError::NotFound { kind: RowKind::Snapshot, .. })), "{gone:?}");
}

pub(crate) async fn snapshots_come_in_pages_and_by_workspace(db: TestDb) {
    let store = &db.store;
    let (one, other) = (WorkspaceId::generate(), WorkspaceId::generate());
    for minute in 0..5 {
        store.insert_snapshot(&new(one, minute)).await.unwrap();
    }
    store.insert_snapshot(&new(other, 9)).await.unwrap();
    assert_eq!(store.all_snapshots().await.unwrap().readable.len(), 6);
    let mut minutes = Vec::new();
    let mut cursor = None;
    loop {
        let page = store.snapshots(Some(one), cursor.as_deref(), 2).await.unwrap();
        minutes.extend(page.snapshots.iter().map(|snapshot| (snapshot.created_at - start()).num_minutes()));
        cursor = page.next_cursor;
        if cursor.is_none() {
            break;
        }
    }
    assert_eq!(minutes, [4, 3, 2, 1, 0]);
    assert_eq!(store.snapshots(None, None, 100).await.unwrap().snapshots.len(), 6);
}

pub(crate) async fn files_without_a_row_are_quarantined_restored_or_removed(db: TestDb) {
    let store = &db.store;
    let found = new(WorkspaceId::generate(), 0);
    assert!(store.insert_quarantined(&found).await.unwrap());
    assert!(!store.insert_quarantined(&found).await.unwrap(), "once");
    let record = store.snapshot(found.id).await.unwrap();
    assert_eq!((record.snapshot.status, record.owner), (SnapshotStatus::Quarantined, None));
    assert!(store.snapshots(None, None, 10).await.unwrap().snapshots.is_empty());
    // Not before its files are there.
    assert!(store.restore_quarantined(found.id).await.is_err());
    store.note_quarantined(found.id, 4096, &ResourceLimits::default(), false).await.unwrap();
    let listed = store.quarantined_snapshots(None, 10).await.unwrap().snapshots;
    assert_eq!((listed.len(), listed[0].size_bytes, listed[0].memory), (1, Some(4096), false));
    let restored = store.restore_quarantined(found.id).await.unwrap();
    assert_eq!(restored.status, SnapshotStatus::Ready);
    assert!(store.quarantined_snapshots(None, 10).await.unwrap().snapshots.is_empty());
    assert_eq!(store.snapshots(None, None, 10).await.unwrap().snapshots, [restored]);
    assert!(store.restore_quarantined(found.id).await.is_err(), "once");

    let other = new(WorkspaceId::generate(), 1);
    store.insert_quarantined(&other).await.unwrap();
    assert!(store.withdraw_snapshot(other.id, None).await.unwrap());
    store.delete_snapshot(other.id).await.unwrap();
    assert!(store.snapshot(other.id).await.is_err());
}
