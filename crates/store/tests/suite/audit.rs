//! The audit log and its chain.

use chrono::{DateTime, TimeDelta, Utc};
use emergent_store::{AuditEntry, AuditFault, AuditFilter, AuditOutcome, BrokenAudit, Store, StoreError};
use emergent_wire::id::SessionId;
use emergent_wire::{TokenId, WorkspaceId};
use serde_json::json;

use crate::support::TestDb;

pub(crate) fn start() -> DateTime<Utc> {
    DateTime::from_timestamp_micros(1_800_000_000_000_000).unwrap()
}

pub(crate) fn entry(number: i64) -> AuditEntry {
    AuditEntry {
        at: start() + TimeDelta::seconds(number),
        actor_token_id: Some(TokenId::generate()),
        actor_name: Some("ci".into()),
        workspace_id: Some(WorkspaceId::generate()),
        session_id: None,
        tool: "bash".into(),
        outcome: AuditOutcome::Success,
        error_code: None,
        duration_ms: 12,
        request: json!({"command_bytes": number, "b": {"zz": [1, 2], "a": null}}),
        request_id: Some(format!("r{number}")),
    }
}

/// A log of ten rows.
async fn ten_rows(store: &Store) {
    assert_eq!(store.verify_audit().await.unwrap(), 0);
    assert_eq!(store.append_audits((1..=10).map(entry).collect()).await.unwrap(), 10);
    assert_eq!(store.verify_audit().await.unwrap(), 10);
}

pub(crate) async fn fault(store: &Store) -> (u64, AuditFault) {
    match store.verify_audit().await {
        Err(StoreError::AuditBroken(BrokenAudit { seq, fault })) => (seq, fault),
        other => panic!("nothing was found: {other:?}"),
    }
}

pub(crate) async fn rows_appended_at_once_form_one_chain(db: TestDb) {
    let writers: Vec<_> = (0..20)
        .map(|number| {
            let store = db.store.clone();
            tokio::spawn(async move {
                if number % 2 == 0 {
                    store.append_audit(entry(number)).await.unwrap();
                } else {
                    store.append_audits(vec![entry(number); 5]).await.unwrap();
                }
                store.verify_audit().await.unwrap();
            })
        })
        .collect();
    for writer in writers {
        writer.await.unwrap();
    }
    assert_eq!(db.store.verify_audit().await.unwrap(), 60);
    assert_eq!(db.store.append_audits(Vec::new()).await.unwrap(), 60);
    // More rows than one batch of the check.
    db.store.append_audits(vec![entry(1); 1000]).await.unwrap();
    assert_eq!(db.store.verify_audit().await.unwrap(), 1060);
}

/// Changes by an engine (order of fields, decimals, NUL, nanoseconds) must not break the chain.
pub(crate) async fn odd_values_keep_their_hash(db: TestDb) {
    let odd = AuditEntry {
        at: start() + TimeDelta::nanoseconds(1_999),
        actor_token_id: None,
        actor_name: Some("na\0me ü".into()),
        session_id: Some(SessionId::generate()),
        error_code: Some("not_found".into()),
        outcome: AuditOutcome::Failure,
        duration_ms: u64::MAX,
        request: json!({"f": 0.1, "e": 1e300, "z": -0.0, "big": u64::MAX, "low": i64::MIN, "nul": "a\0b", "long": 1,
            "aa": 2, "b": "ü\u{1f600}\"\\\n", "empty": {}, "list": []}),
        request_id: None,
        ..entry(1)
    };
    db.store.append_audit(odd).await.unwrap();
    db.store.append_audit(entry(2)).await.unwrap();
    assert_eq!(db.store.verify_audit().await.unwrap(), 2);
    let page = db.store.audit_page(&AuditFilter::default(), None, 10).await.unwrap();
    let odd = &page.records[1].entry;
    assert_eq!(odd.at, start() + TimeDelta::microseconds(1));
    assert_eq!(odd.actor_name.as_deref(), Some("na\u{fffd}me ü"));
    assert_eq!(odd.request["f"], "0.1");
    assert_eq!(odd.request["big"], u64::MAX);
}

pub(crate) async fn a_changed_row_is_found(db: TestDb) {
    ten_rows(&db.store).await;
    let null = "NULL";
    for (column, value) in [
        ("at", "'2020-01-01T00:00:00.000000Z'"),
        ("actor_token_id", null),
        ("actor_name", "'other'"),
        ("workspace_id", null),
        ("session_id", "'00000000-0000-0000-0000-000000000000'"),
        ("tool", "'read'"),
        ("outcome", "'denied'"),
        ("outcome", "'nonsense'"),
        ("error_code", "''"),
        ("duration_ms", "13"),
        ("duration_ms", "-1"),
        ("request", "'{}'"),
        ("request_id", null),
    ] {
        // A copy, to put the row back as it was.
        db.sql("CREATE TABLE kept AS SELECT * FROM tool_audit WHERE seq = 4").await;
        assert_eq!(db.sql(&format!("UPDATE tool_audit SET {column} = {value} WHERE seq = 4")).await, 1);
        assert_eq!(fault(&db.store).await, (4, AuditFault::Changed), "{column} = {value}");
        db.sql("DELETE FROM tool_audit WHERE seq = 4").await;
        db.sql("INSERT INTO tool_audit SELECT * FROM kept").await;
        db.sql("DROP TABLE kept").await;
        assert_eq!(db.store.verify_audit().await.unwrap(), 10, "{column} put back");
    }
    // With another hash the next row does not follow it.
    db.sql("UPDATE tool_audit SET hash = prev_hash WHERE seq = 4").await;
    assert_eq!(fault(&db.store).await, (4, AuditFault::Changed));
}

pub(crate) async fn a_removed_row_is_found(db: TestDb) {
    ten_rows(&db.store).await;
    db.sql("DELETE FROM tool_audit WHERE seq = 5").await;
    assert_eq!(fault(&db.store).await, (5, AuditFault::Missing));
    // Closing the gap does not help.
    db.sql("UPDATE tool_audit SET seq = 5 WHERE seq = 6").await;
    assert_eq!(fault(&db.store).await, (5, AuditFault::Unlinked));
    db.sql("DELETE FROM tool_audit WHERE seq < 9").await;
    assert_eq!(fault(&db.store).await, (1, AuditFault::Missing));
}

pub(crate) async fn swapped_rows_are_found(db: TestDb) {
    ten_rows(&db.store).await;
    for (from, to) in [(3, 100), (4, 3), (100, 4)] {
        assert_eq!(db.sql(&format!("UPDATE tool_audit SET seq = {to} WHERE seq = {from}")).await, 1);
    }
    assert_eq!(fault(&db.store).await, (3, AuditFault::Unlinked));
}

pub(crate) async fn a_cut_tail_is_found(db: TestDb) {
    ten_rows(&db.store).await;
    db.sql("DELETE FROM tool_audit WHERE seq > 8").await;
    assert_eq!(fault(&db.store).await, (9, AuditFault::CutOff));
    // Rows that come later don't hide it.
    assert_eq!(db.store.append_audit(entry(11)).await.unwrap(), 11);
    assert_eq!(fault(&db.store).await, (9, AuditFault::Missing));
    db.sql("DELETE FROM tool_audit").await;
    assert_eq!(fault(&db.store).await, (1, AuditFault::CutOff));
}

pub(crate) async fn a_lost_head_is_found(db: TestDb) {
    ten_rows(&db.store).await;
    db.sql("DELETE FROM settings WHERE key = 'audit_head'").await;
    assert_eq!(fault(&db.store).await, (10, AuditFault::WrongHead));
    let head = format!("10:{}", "00".repeat(32));
    db.store.put_setting("audit_head", &head).await.unwrap();
    assert_eq!(fault(&db.store).await, (10, AuditFault::WrongHead));
    db.store.put_setting("audit_head", "nonsense").await.unwrap();
    assert!(matches!(db.store.verify_audit().await, Err(StoreError::Corrupt { .. })));
    assert!(matches!(db.store.append_audit(entry(1)).await, Err(StoreError::Corrupt { .. })));
}

pub(crate) async fn an_extra_row_is_found(db: TestDb) {
    ten_rows(&db.store).await;
    let nine = db.store.setting("audit_head").await.unwrap().unwrap();
    db.store.append_audit(entry(11)).await.unwrap();
    db.store.put_setting("audit_head", &nine).await.unwrap();
    assert_eq!(fault(&db.store).await, (11, AuditFault::Beyond));
    db.sql("DELETE FROM tool_audit WHERE seq = 11").await;
    assert_eq!(db.store.verify_audit().await.unwrap(), 10);
    db.sql("CREATE TABLE kept AS SELECT * FROM tool_audit WHERE seq = 1").await;
    db.sql("UPDATE kept SET seq = 0").await;
    db.sql("INSERT INTO tool_audit SELECT * FROM kept").await;
    assert_eq!(fault(&db.store).await, (1, AuditFault::Unlinked));
}

pub(crate) async fn pages_are_filtered(db: TestDb) {
    let store = &db.store;
    let workspace_id = WorkspaceId::generate();
    let entries = (1..=30).map(|number| AuditEntry {
        workspace_id: (number % 2 == 0).then_some(workspace_id),
        tool: if number % 3 == 0 { "read" } else { "bash" }.into(),
        outcome: if number % 5 == 0 { AuditOutcome::Denied } else { AuditOutcome::Success },
        ..entry(number)
    });
    store.append_audits(entries.collect()).await.unwrap();

    let all = |filter: AuditFilter| async move {
        let (mut seqs, mut cursor) = (Vec::new(), None);
        loop {
            let page = store.audit_page(&filter, cursor.as_deref(), 4).await.unwrap();
            assert!(page.records.len() <= 4);
            seqs.extend(page.records.iter().map(|record| record.seq));
            cursor = page.next_cursor;
            if cursor.is_none() {
                return seqs;
            }
        }
    };
    let every = |keep: fn(&u64) -> bool| (1..=30).rev().filter(keep).collect::<Vec<u64>>();
    assert_eq!(all(AuditFilter::default()).await, every(|_| true));
    let filter = AuditFilter { workspace_id: Some(workspace_id), ..AuditFilter::default() };
    assert_eq!(all(filter).await, every(|n| n % 2 == 0));
    let filter = AuditFilter {
        tool: Some("read".into()),
        outcome: Some(AuditOutcome::Denied),
        ..AuditFilter::default()
    };
    assert_eq!(all(filter).await, every(|n| n % 15 == 0));
    let filter = AuditFilter {
        since: Some(start() + TimeDelta::seconds(10)),
        until: Some(start() + TimeDelta::seconds(20)),
        ..AuditFilter::default()
    };
    assert_eq!(all(filter).await, every(|n| (10..20).contains(n)));

    let record = &store.audit_page(&AuditFilter::default(), None, 1).await.unwrap().records[0];
    assert_eq!(record.entry.at, start() + TimeDelta::seconds(30));
    let before = &store.audit_page(&AuditFilter::default(), None, 2).await.unwrap().records[1];
    assert_eq!(record.prev_hash, before.hash);
    let bad = store.audit_page(&AuditFilter::default(), Some("nonsense"), 4).await;
    assert!(matches!(bad, Err(StoreError::BadCursor)));
}
