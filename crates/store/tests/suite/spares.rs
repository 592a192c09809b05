//! Warm spares, and the ownership of their rows by servers.

use emergent_store::{Claim, NewWorkspace, Shape, Spare, Store, StoreError};
use emergent_wire::WorkspaceId;
use emergent_wire::id::ServerId;
use emergent_wire::pool::SpareStatus;
use emergent_wire::workspace::{NetworkMode, Placement, ProviderName, ResourceLimits, WorkspaceStatus};

use crate::support::{TestDb, agent};

fn shape(image: &str) -> Shape {
    Shape {
        provider: ProviderName::Gvisor,
        image: image.to_owned(),
        network: NetworkMode::Nat,
        limits: ResourceLimits::default(),
    }
}

fn claim(spare: WorkspaceId) -> Claim {
    let placement = Placement {
        provider: ProviderName::Gvisor,
        reason: "first".to_owned(),
        rejected: Vec::new(),
        warm_hit: true,
    };
    Claim { spare, provider_workspace_id: format!("agent-workspace-{spare}"), placement }
}

async fn ready(store: &Store, image: &str) -> WorkspaceId {
    let id = WorkspaceId::generate();
    assert!(store.insert_spare(id, &shape(image), "digest", 100).await.unwrap());
    assert!(store.spare_is_ready(id).await.unwrap());
    id
}

async fn the_one(store: &Store, id: WorkspaceId) -> Option<Spare> {
    store.spares().await.unwrap().readable.into_iter().find(|spare| spare.id == id)
}

pub(crate) async fn spares_are_never_over_created(db: TestDb) {
    let attempts = (0..40).map(|_| {
        let store = db.store.clone();
        tokio::spawn(async move {
            store.insert_spare(WorkspaceId::generate(), &shape("a"), "1", 3).await.unwrap()
        })
    });
    let mut made = 0;
    for attempt in attempts.collect::<Vec<_>>() {
        made += u32::from(attempt.await.unwrap());
    }
    assert_eq!(made, 3);
    // Other shapes and digests have their own count.
    let new = WorkspaceId::generate;
    assert!(!db.store.insert_spare(new(), &shape("a"), "1", 3).await.unwrap());
    assert!(db.store.insert_spare(new(), &shape("b"), "1", 1).await.unwrap());
    assert!(db.store.insert_spare(new(), &shape("a"), "2", 1).await.unwrap());
    let mut small = shape("a");
    small.limits.cpu = "1".parse().unwrap();
    assert!(db.store.insert_spare(new(), &small, "1", 1).await.unwrap());
    assert!(!db.store.insert_spare(new(), &small, "1", 1).await.unwrap());
}

pub(crate) async fn two_requests_never_get_one_spare(db: TestDb) {
    let id = ready(&db.store, "a").await;
    let attempts = (0..20).map(|_| {
        let store = db.store.clone();
        tokio::spawn(async move { store.claim_spare(agent(), &claim(id), Some(100)).await.unwrap() })
    });
    let mut winners = Vec::new();
    for attempt in attempts.collect::<Vec<_>>() {
        winners.extend(attempt.await.unwrap());
    }
    assert_eq!(winners.len(), 1);
    assert_eq!(winners[0].id, id);
    assert_eq!(winners[0].status, WorkspaceStatus::Creating);
    assert_eq!(winners[0].provider, Some(ProviderName::Gvisor));
    assert!(winners[0].placement.as_ref().unwrap().warm_hit);
    assert_eq!(db.store.spares().await.unwrap().readable, []);
    let record = db.store.workspace_record(id).await.unwrap();
    assert_eq!(record.owner, Some(db.store.server()));
}

pub(crate) async fn a_claim_over_the_limit_leaves_the_spare(db: TestDb) {
    db.store.insert_creating(agent(), None).await.unwrap();
    let id = ready(&db.store, "a").await;
    let refused = db.store.claim_spare(agent(), &claim(id), Some(1)).await;
    assert!(matches!(refused, Err(StoreError::LimitReached { .. })), "{refused:?}");
    assert_eq!(the_one(&db.store, id).await.unwrap().status, SpareStatus::Ready);
}

pub(crate) async fn a_spare_that_leaves_can_not_be_claimed(db: TestDb) {
    let store = &db.store;
    let filling = WorkspaceId::generate();
    store.insert_spare(filling, &shape("a"), "1", 9).await.unwrap();
    assert_eq!(store.claim_spare(agent(), &claim(filling), None).await.unwrap(), None);
    let id = ready(store, "a").await;
    // It has no owner, so a withdrawal as its owner is refused.
    assert!(!store.withdraw_spare(id, Some(ServerId::generate())).await.unwrap());
    assert!(store.withdraw_spare(id, None).await.unwrap());
    assert!(!store.withdraw_spare(id, None).await.unwrap());
    assert_eq!(store.claim_spare(agent(), &claim(id), None).await.unwrap(), None);
    assert!(!store.spare_is_ready(id).await.unwrap());
    store.delete_spare(id).await.unwrap();
    assert_eq!(the_one(store, id).await, None);
    // A ready spare is never deleted.
    let kept = ready(store, "a").await;
    store.delete_spare(kept).await.unwrap();
    assert!(the_one(store, kept).await.is_some());
}

pub(crate) async fn one_server_at_a_time_changes_a_workspace(db: TestDb) {
    let store = &db.store;
    let id = store.insert_creating(NewWorkspace { ..agent() }, None).await.unwrap().id;
    let owner = async || store.workspace_record(id).await.unwrap().owner;
    assert_eq!(owner().await, Some(store.server()));
    store.set_ready(id, chrono::Utc::now()).await.unwrap();
    assert_eq!(owner().await, None);
    assert!(!store.take_over(id, Some(ServerId::generate())).await.unwrap());
    assert!(store.take_over(id, None).await.unwrap());
    assert!(!store.take_over(id, None).await.unwrap());
    store.release(id).await.unwrap();
    assert_eq!(owner().await, None);
    use WorkspaceStatus::{Ready, Stopped, Stopping};
    store.transition(id, &[Ready], Stopping).await.unwrap();
    assert_eq!(owner().await, Some(store.server()));
    store.transition(id, &[Stopping], Stopped).await.unwrap();
    assert_eq!(owner().await, None);
}

pub(crate) async fn servers_count_until_they_are_forgotten(db: TestDb) {
    let store = &db.store;
    assert_eq!(store.servers().await.unwrap(), []);
    for expected in 1..4 {
        store.beat().await.unwrap();
        assert_eq!(store.servers().await.unwrap(), [(store.server(), expected)]);
    }
    store.forget_server(store.server()).await.unwrap();
    assert_eq!(store.servers().await.unwrap(), []);
}
