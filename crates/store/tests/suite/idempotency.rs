//! Idempotency keys.

use chrono::{DateTime, TimeDelta, Utc};
use emergent_store::{
    Begun, EarlierRequest, IDEMPOTENCY_KEY_LIFETIME, IdempotencyStatus, IdempotentRequest,
    MAX_IDEMPOTENCY_KEY_BYTES, MAX_IDEMPOTENCY_KEYS, StoreError,
};
use emergent_wire::TokenId;
use uuid::Uuid;

use crate::support::TestDb;

const CREATE: &str = "workspace.create";

fn now() -> DateTime<Utc> {
    DateTime::from_timestamp_micros(1_800_000_000_123_456).unwrap()
}

fn request(token: TokenId, key: &str, operation: &str, body: &str) -> IdempotentRequest {
    IdempotentRequest::new(token, key, operation, body.as_bytes()).unwrap()
}

pub(crate) async fn a_repeated_request_finds_the_first_one(db: TestDb) {
    let (store, token, resource) = (&db.store, TokenId::generate(), Uuid::now_v7());
    let first = request(token, "k", CREATE, "{}");
    assert_eq!(store.begin_idempotent(&first, None, now()).await.unwrap(), Begun::New);
    let later = now() + TimeDelta::hours(1);
    let found = EarlierRequest {
        resource_id: None,
        status: IdempotencyStatus::InProgress,
        owner: Some(store.server()),
        created_at: now(),
    };
    assert_eq!(store.begin_idempotent(&first, None, later).await.unwrap(), Begun::Earlier(found.clone()));
    store.finish_idempotent(&first, resource).await.unwrap();
    let status = IdempotencyStatus::Done;
    let done = EarlierRequest { resource_id: Some(resource), status, owner: None, ..found };
    assert_eq!(store.begin_idempotent(&first, None, later).await.unwrap(), Begun::Earlier(done.clone()));
    // A finished request stays finished.
    store.forget_idempotent(&first).await.unwrap();
    assert!(!store.take_over_idempotent(&first, None).await.unwrap());
    let again = store.finish_idempotent(&first, Uuid::now_v7()).await;
    assert!(matches!(again, Err(StoreError::NotFound { .. })), "{again:?}");
    assert_eq!(store.begin_idempotent(&first, None, later).await.unwrap(), Begun::Earlier(done));

    // A key that is known from its begin, and one whose request failed.
    let second = request(token, "k2", CREATE, "{}");
    assert_eq!(store.begin_idempotent(&second, Some(resource), now()).await.unwrap(), Begun::New);
    match store.begin_idempotent(&second, None, now()).await.unwrap() {
        Begun::Earlier(earlier) => assert_eq!(earlier.resource_id, Some(resource)),
        Begun::New => panic!("it was begun before"),
    }
    for _ in 0..2 {
        store.forget_idempotent(&second).await.unwrap();
    }
    assert_eq!(store.begin_idempotent(&second, None, now()).await.unwrap(), Begun::New);
}

pub(crate) async fn a_key_names_one_request_of_one_token(db: TestDb) {
    let (store, token) = (&db.store, TokenId::generate());
    assert_eq!(
        store.begin_idempotent(&request(token, "k", CREATE, "{}"), None, now()).await.unwrap(),
        Begun::New
    );
    for other in [request(token, "k", CREATE, "{ }"), request(token, "k", "snapshot.create", "{}")] {
        let error = store.begin_idempotent(&other, None, now()).await.unwrap_err();
        assert!(matches!(error, StoreError::IdempotencyKeyReused), "{error}");
        assert!(error.to_string().contains("another key"), "{error}");
    }
    for other in [request(TokenId::generate(), "k", CREATE, "[]"), request(token, "K", CREATE, "[]")] {
        assert_eq!(store.begin_idempotent(&other, None, now()).await.unwrap(), Begun::New);
    }
    let longest = "k".repeat(MAX_IDEMPOTENCY_KEY_BYTES);
    IdempotentRequest::new(token, &longest, CREATE, b"").unwrap();
    for bad in ["", &format!("{longest}k")] {
        let error = IdempotentRequest::new(token, bad, CREATE, b"").unwrap_err();
        assert!(matches!(error, StoreError::BadIdempotencyKey), "{error}");
    }
}

pub(crate) async fn of_begins_at_once_one_is_new(db: TestDb) {
    // On PostgreSQL a second server has connections of its own.
    let other = if db.is_sqlite() { db.store.clone() } else { db.location.open().await.unwrap() };
    let token = TokenId::generate();
    for round in 0..10 {
        let request = request(token, &format!("k{round}"), CREATE, "{}");
        let begins: Vec<_> = (0..8)
            .map(|number| {
                let store = if number % 2 == 0 { db.store.clone() } else { other.clone() };
                let request = request.clone();
                tokio::spawn(async move { store.begin_idempotent(&request, None, now()).await.unwrap() })
            })
            .collect();
        let mut new = 0;
        for begin in begins {
            new += usize::from(begin.await.unwrap() == Begun::New);
        }
        assert_eq!(new, 1);
    }
}

pub(crate) async fn one_server_takes_over_an_interrupted_request(db: TestDb) {
    let request = request(TokenId::generate(), "k", CREATE, "{}");
    let dead = db.store.server();
    db.store.begin_idempotent(&request, Some(Uuid::now_v7()), now()).await.unwrap();
    db.store.close().await;
    let store = db.location.open().await.unwrap();
    // Another server neither finishes nor removes this server's request.
    assert!(store.finish_idempotent(&request, Uuid::now_v7()).await.is_err());
    store.forget_idempotent(&request).await.unwrap();
    let tries: Vec<_> = (0..4)
        .map(|_| {
            let (store, request) = (store.clone(), request.clone());
            tokio::spawn(async move { store.take_over_idempotent(&request, Some(dead)).await.unwrap() })
        })
        .collect();
    let mut taken = 0;
    for attempt in tries {
        taken += usize::from(attempt.await.unwrap());
    }
    assert_eq!(taken, 1);
    store.finish_idempotent(&request, Uuid::now_v7()).await.unwrap();
}

pub(crate) async fn keys_end_after_a_day(db: TestDb) {
    let (store, token) = (&db.store, TokenId::generate());
    let resource = Uuid::now_v7();
    let old = request(token, "old", CREATE, "{}");
    store.begin_idempotent(&old, None, now()).await.unwrap();
    store.finish_idempotent(&old, resource).await.unwrap();
    let end = now() + IDEMPOTENCY_KEY_LIFETIME;
    let almost = end - TimeDelta::microseconds(1);
    assert!(matches!(store.begin_idempotent(&old, None, almost).await.unwrap(), Begun::Earlier(_)));
    assert_eq!(store.prune_idempotency_keys(almost).await.unwrap(), 0);
    // Also before the next pruning, and with another request.
    let other = request(token, "old", CREATE, "[]");
    assert_eq!(store.begin_idempotent(&other, None, end).await.unwrap(), Begun::New);
    assert_eq!(store.prune_idempotency_keys(end).await.unwrap(), 0);
    assert_eq!(store.prune_idempotency_keys(end + IDEMPOTENCY_KEY_LIFETIME).await.unwrap(), 1);
    assert_eq!(store.prune_idempotency_keys(end + IDEMPOTENCY_KEY_LIFETIME).await.unwrap(), 0);
}

pub(crate) async fn a_token_has_a_limited_number_of_keys(db: TestDb) {
    let token = TokenId::generate();
    let id = token.to_string();
    let bytes = if db.is_sqlite() { "CAST(n AS BLOB)" } else { "convert_to(n::text, 'UTF8')" };
    let made = db
        .sql(&format!(
            "WITH RECURSIVE numbers(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < {MAX_IDEMPOTENCY_KEYS})
             INSERT INTO idempotency_keys (token_id, key_hash, operation, request_hash, status, created_at)
             SELECT '{id}', {bytes}, 'x', {bytes}, 'done', '2027-01-15T08:00:00.123456Z' FROM numbers"
        ))
        .await;
    assert_eq!(made, u64::from(MAX_IDEMPOTENCY_KEYS));
    let more = request(token, "more", CREATE, "{}");
    let error = db.store.begin_idempotent(&more, None, now()).await.unwrap_err();
    assert!(matches!(error, StoreError::TooManyIdempotencyKeys { .. }), "{error}");
    let other = request(TokenId::generate(), "more", CREATE, "{}");
    assert_eq!(db.store.begin_idempotent(&other, None, now()).await.unwrap(), Begun::New);
    let end = now() + IDEMPOTENCY_KEY_LIFETIME;
    assert_eq!(db.store.prune_idempotency_keys(end).await.unwrap(), u64::from(MAX_IDEMPOTENCY_KEYS) + 1);
    assert_eq!(db.store.begin_idempotent(&more, None, end).await.unwrap(), Begun::New);
}
