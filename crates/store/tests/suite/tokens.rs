//! Access tokens.

use chrono::{DateTime, TimeDelta, Utc};
use emergent_store::{NewToken, Result, RowKind, StoreError, TOKEN_PREFIX, TokenRefusal};
use emergent_wire::access::{Token, TokenScope};
use emergent_wire::id::{ProjectId, SessionId};
use emergent_wire::{TokenId, WorkspaceId};

use crate::support::TestDb;

fn admin(name: &str) -> NewToken {
    NewToken { name: name.into(), scope: TokenScope::Admin, ttl_seconds: None }
}

fn bound_to(workspace_id: WorkspaceId, name: &str) -> NewToken {
    NewToken { scope: TokenScope::Workspace { workspace_id }, ..admin(name) }
}

fn now() -> DateTime<Utc> {
    DateTime::from_timestamp_micros(1_800_000_000_123_456).unwrap()
}

fn refusal(result: Result<Token>) -> TokenRefusal {
    match result {
        Err(StoreError::TokenRefused(refusal)) => refusal,
        other => panic!("not refused: {other:?}"),
    }
}

pub(crate) async fn a_token_is_shown_once_and_verified(db: TestDb) {
    let store = &db.store;
    let created = store.create_token(&admin("ci"), now()).await.unwrap();
    assert_eq!(created.token.scope, TokenScope::Admin);
    assert_eq!(created.token.created_at, now());
    let digits = created.secret.strip_prefix(TOKEN_PREFIX).unwrap();
    assert_eq!(digits.len(), 64);
    assert_eq!(store.verify_token(&created.secret, now()).await.unwrap(), created.token);

    let mut other = created.secret.clone();
    other.replace_range(10..11, if &other[10..11] == "0" { "1" } else { "0" });
    for wrong in [&other, digits, "", TOKEN_PREFIX, "emt_\0"] {
        assert_eq!(refusal(store.verify_token(wrong, now()).await), TokenRefusal::Unknown, "{wrong}");
    }

    let workspace_id = db.add().await.id;
    let request = bound_to(workspace_id, "session");
    let bound = store.create_token(&request, now()).await.unwrap();
    assert_eq!(bound.token.scope, TokenScope::Workspace { workspace_id });
    let names: Vec<_> = store.tokens().await.unwrap().readable.into_iter().map(|token| token.name).collect();
    assert_eq!(names, ["ci", "session"]);
    let request = bound_to(WorkspaceId::generate(), "nowhere");
    let error = store.create_token(&request, now()).await.unwrap_err();
    assert!(matches!(error, StoreError::NotFound { kind: RowKind::Workspace, .. }), "{error}");
}

pub(crate) async fn expired_and_revoked_tokens_are_refused(db: TestDb) {
    let store = &db.store;
    let request = NewToken { ttl_seconds: Some(60), ..admin("short") };
    let short = store.create_token(&request, now()).await.unwrap();
    let end = now() + TimeDelta::seconds(60);
    assert_eq!(short.token.expires_at, Some(end));
    store.verify_token(&short.secret, end - TimeDelta::microseconds(1)).await.unwrap();
    for (time, is_usable) in [(end - TimeDelta::microseconds(1), true), (end, false)] {
        assert_eq!(store.is_token_usable(short.token.id, time).await.unwrap(), is_usable);
    }
    assert_eq!(refusal(store.verify_token(&short.secret, end).await), TokenRefusal::Expired);

    let long = store.create_token(&admin("long"), now()).await.unwrap();
    store.verify_token(&long.secret, now()).await.unwrap();
    store.revoke_token(long.token.id, now()).await.unwrap();
    assert_eq!(refusal(store.verify_token(&long.secret, now()).await), TokenRefusal::Revoked);
    for id in [long.token.id, TokenId::generate()] {
        assert!(!store.is_token_usable(id, now()).await.unwrap());
        let error = store.revoke_token(id, now()).await.unwrap_err();
        assert!(matches!(error, StoreError::NotFound { kind: RowKind::Token, .. }), "{error}");
    }
    let left: Vec<_> = store.tokens().await.unwrap().readable.into_iter().map(|token| token.name).collect();
    assert_eq!(left, ["short"]);
}

pub(crate) async fn a_name_is_used_once_at_a_time(db: TestDb) {
    let store = &db.store;
    let tries: Vec<_> = (0..10)
        .map(|_| {
            let store = store.clone();
            tokio::spawn(async move { store.create_token(&admin("ci"), now()).await })
        })
        .collect();
    let mut made = Vec::new();
    for attempt in tries {
        match attempt.await.unwrap() {
            Ok(created) => made.push(created),
            Err(error) => {
                assert!(matches!(error, StoreError::Conflict { .. }), "{error}");
                assert_eq!(error.to_string(), "there is already a token named ci");
            }
        }
    }
    assert_eq!(made.len(), 1);
    store.create_token(&admin("other"), now()).await.unwrap();
    store.revoke_token(made[0].token.id, now()).await.unwrap();
    let request = NewToken { ttl_seconds: Some(1), ..admin("ci") };
    store.create_token(&request, now()).await.unwrap();
    // That one has expired by then.
    store.create_token(&admin("ci"), now() + TimeDelta::seconds(1)).await.unwrap();
    assert_eq!(store.tokens().await.unwrap().readable.len(), 2);
}

pub(crate) async fn a_workspaces_tokens_go_with_it(db: TestDb) {
    let workspace_id = db.add().await.id;
    let request = bound_to(workspace_id, "session");
    let bound = db.store.create_token(&request, now()).await.unwrap();
    let free = db.store.create_token(&admin("admin"), now()).await.unwrap();
    assert!(db.store.delete_workspace(workspace_id).await.unwrap());
    assert!(!db.store.delete_workspace(workspace_id).await.unwrap());
    assert_eq!(refusal(db.store.verify_token(&bound.secret, now()).await), TokenRefusal::Unknown);
    db.store.verify_token(&free.secret, now()).await.unwrap();
}

pub(crate) async fn tokens_of_projects_and_sessions_go_with_them(db: TestDb) {
    let (project_id, session_id) = (ProjectId::generate(), SessionId::generate());
    db.sql(&format!("INSERT INTO projects (id, name) VALUES ('{project_id}', 'team')")).await;
    db.sql(&format!("INSERT INTO agent_sessions (id) VALUES ('{session_id}')")).await;
    let workspace_id = Some(db.add().await.id);
    for (name, scope) in [
        ("project", TokenScope::Project { project_id }),
        ("session", TokenScope::Session { session_id, workspace_id: None }),
        ("session with a workspace", TokenScope::Session { session_id, workspace_id }),
    ] {
        let made = db.store.create_token(&NewToken { scope, ..admin(name) }, now()).await.unwrap();
        assert_eq!(made.token.scope, scope);
        assert_eq!(db.store.verify_token(&made.secret, now()).await.unwrap().scope, scope);
        let missing = match scope {
            TokenScope::Project { .. } => TokenScope::Project { project_id: ProjectId::generate() },
            _ => TokenScope::Session { session_id: SessionId::generate(), workspace_id: None },
        };
        let error =
            db.store.create_token(&NewToken { scope: missing, ..admin("none") }, now()).await.unwrap_err();
        assert!(
            matches!(error, StoreError::NotFound { kind: RowKind::Project | RowKind::Session, .. }),
            "{error}"
        );
    }
    assert_eq!(db.store.tokens().await.unwrap().readable.len(), 3);
    db.sql("DELETE FROM projects").await;
    assert_eq!(db.store.tokens().await.unwrap().readable.len(), 2);
    db.sql("DELETE FROM agent_sessions").await;
    assert_eq!(db.store.tokens().await.unwrap().readable, []);
}

pub(crate) async fn last_use_is_written_once_a_minute(db: TestDb) {
    let store = &db.store;
    let created = store.create_token(&admin("ci"), now()).await.unwrap();
    let mut seen = Vec::new();
    for seconds in [0, 59, 60, 61, 121] {
        let at = now() + TimeDelta::seconds(seconds);
        store.verify_token(&created.secret, at).await.unwrap();
        let used = store.tokens().await.unwrap().readable[0].last_used_at.unwrap();
        seen.push((used - now()).num_seconds());
    }
    assert_eq!(seen, [0, 0, 60, 60, 121]);
}

pub(crate) async fn the_last_usable_admin_token_is_not_revoked(db: TestDb) {
    let store = &db.store;
    let last = store.create_token(&admin("last"), now()).await.unwrap();
    // None of these can take its place.
    let request = NewToken { ttl_seconds: Some(1), ..admin("expired") };
    let expired = store.create_token(&request, now() - TimeDelta::seconds(1)).await.unwrap();
    let bound = bound_to(db.add().await.id, "bound");
    let bound = store.create_token(&bound, now()).await.unwrap();

    let error = store.revoke_token(last.token.id, now()).await.unwrap_err();
    assert!(matches!(&error, StoreError::LastAdminToken { name } if name == "last"), "{error}");
    assert!(error.to_string().contains("create another admin token first"), "{error}");
    store.verify_token(&last.secret, now()).await.unwrap();
    assert_eq!(store.tokens().await.unwrap().readable.len(), 3);

    // Other tokens can always be revoked.
    store.revoke_token(expired.token.id, now()).await.unwrap();
    store.revoke_token(bound.token.id, now()).await.unwrap();
    store.create_token(&admin("next"), now()).await.unwrap();
    store.revoke_token(last.token.id, now()).await.unwrap();
    assert_eq!(refusal(store.verify_token(&last.secret, now()).await), TokenRefusal::Revoked);
}

pub(crate) async fn a_damaged_admin_token_is_not_a_usable_one(db: TestDb) {
    let store = &db.store;
    let last = store.create_token(&admin("last"), now()).await.unwrap();
    let damaged = store.create_token(&admin("damaged"), now()).await.unwrap();
    let session_id = SessionId::generate();
    db.sql(&format!("INSERT INTO agent_sessions (id) VALUES ('{session_id}')")).await;
    let damage: &[&str] = if db.is_sqlite() {
        &["session_id = NULL, created_at = 'monday'", "expires_at = 'never'"]
    } else {
        &["session_id = NULL, expires_at = 'infinity'"]
    };
    let ids = format!("session_id = '{session_id}'");
    for damage in [ids.as_str()].iter().chain(damage) {
        db.sql(&format!("UPDATE access_tokens SET {damage} WHERE id = '{}'", damaged.token.id)).await;
        let verified = store.verify_token(&damaged.secret, now()).await;
        assert!(matches!(verified, Err(StoreError::Corrupt { .. })), "{damage}: {verified:?}");
        let error = store.revoke_token(last.token.id, now()).await.unwrap_err();
        assert!(matches!(&error, StoreError::LastAdminToken { .. }), "{damage}: {error}");
    }
    store.verify_token(&last.secret, now()).await.unwrap();
    store.create_token(&admin("next"), now()).await.unwrap();
    store.revoke_token(last.token.id, now()).await.unwrap();
}

pub(crate) async fn revoking_all_admin_tokens_at_once_leaves_one(db: TestDb) {
    // On PostgreSQL a second server has connections of its own.
    let other = if db.is_sqlite() { db.store.clone() } else { db.location.open().await.unwrap() };
    for round in 0..10 {
        let mut ids: Vec<_> =
            db.store.tokens().await.unwrap().readable.into_iter().map(|token| token.id).collect();
        for number in ids.len()..2 {
            let request = admin(&format!("{round}-{number}"));
            ids.push(db.store.create_token(&request, now()).await.unwrap().token.id);
        }
        let revokes: Vec<_> = [(db.store.clone(), ids[0]), (other.clone(), ids[1])]
            .into_iter()
            .map(|(store, id)| tokio::spawn(async move { store.revoke_token(id, now()).await }))
            .collect();
        let mut refused = 0;
        for revoke in revokes {
            if let Err(error) = revoke.await.unwrap() {
                assert!(matches!(error, StoreError::LastAdminToken { .. }), "{error}");
                refused += 1;
            }
        }
        assert_eq!(refused, 1);
        assert_eq!(db.store.tokens().await.unwrap().readable.len(), 1);
    }
}

pub(crate) async fn a_token_is_replaced_by_one_with_its_name(db: TestDb) {
    let store = &db.store;
    let first = store.replace_token(&admin("first-start"), now()).await.unwrap();
    store.verify_token(&first.secret, now()).await.unwrap();
    // Also when it is the only one.
    let second = store.replace_token(&admin("first-start"), now()).await.unwrap();
    assert_eq!(refusal(store.verify_token(&first.secret, now()).await), TokenRefusal::Revoked);
    store.verify_token(&second.secret, now()).await.unwrap();
    let left: Vec<_> = store.tokens().await.unwrap().readable.into_iter().map(|token| token.id).collect();
    assert_eq!(left, [second.token.id]);

    let request = bound_to(db.add().await.id, "first-start");
    let error = store.replace_token(&request, now()).await.unwrap_err();
    assert!(matches!(error, StoreError::Conflict { .. }), "{error}");
    let request = bound_to(WorkspaceId::generate(), "nowhere");
    let error = store.replace_token(&request, now()).await.unwrap_err();
    assert!(matches!(error, StoreError::NotFound { kind: RowKind::Workspace, .. }), "{error}");
    store.verify_token(&second.secret, now()).await.unwrap();

    // Servers that renew at once take turns; the last one's token stays.
    let renewals: Vec<_> = (0..8)
        .map(|_| {
            let store = store.clone();
            tokio::spawn(async move { store.replace_token(&admin("first-start"), now()).await.unwrap() })
        })
        .collect();
    let mut accepted = 0;
    let mut secrets = Vec::new();
    for renewal in renewals {
        secrets.push(renewal.await.unwrap().secret);
    }
    for secret in &secrets {
        accepted += usize::from(store.verify_token(secret, now()).await.is_ok());
    }
    assert_eq!((accepted, store.tokens().await.unwrap().readable.len()), (1, 1));
}
