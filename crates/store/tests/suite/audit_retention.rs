//! Export and removal of the oldest rows of the audit log.

use std::io::{BufRead, BufReader, Write};

use chrono::{DateTime, TimeDelta, Utc};
use emergent_store::{AuditFault, AuditFilter, AuditRange, ExportVerifier, Store, StoreError, verify_export};

use crate::audit::{entry, fault, start};
use crate::support::{Location, TestDb};

fn now() -> DateTime<Utc> {
    start() + TimeDelta::days(1)
}

/// The rows whose number is below `number`: row n is n seconds after the start.
fn rows_before(number: i64) -> AuditRange {
    AuditRange { before: start() + TimeDelta::seconds(number), through: None }
}

async fn append(store: &Store, numbers: std::ops::RangeInclusive<i64>) {
    store.append_audits(numbers.map(entry).collect()).await.unwrap();
}

async fn export(store: &Store, range: &AuditRange) -> Vec<String> {
    let (mut lines, mut after) = (Vec::new(), None);
    loop {
        let batch = store.export_audit(after, range, 300).await.unwrap();
        let Some(last) = batch.last() else { return lines };
        after = Some(last.seq);
        lines.extend(batch.iter().map(emergent_store::AuditRecord::to_line));
    }
}

pub(crate) async fn a_pruned_log_and_its_exports_form_one_chain(db: TestDb) {
    let store = &db.store;
    append(store, 1..=2000).await;
    assert_eq!(store.audit_anchor().await.unwrap(), None);
    assert_eq!(store.prune_audit(&rows_before(1), now()).await.unwrap(), None);

    // Several batches, and the last one in part.
    let range = rows_before(1201);
    let mut lines = export(store, &range).await;
    assert_eq!(lines.len(), 1200);
    let pruned = store.prune_audit(&range, now()).await.unwrap().unwrap();
    assert_eq!((pruned.removed, pruned.first_seq, pruned.complete), (1200, 1, true));
    assert_eq!((pruned.anchor.seq, pruned.anchor.at), (1200, now()));
    assert_eq!(pruned.summary()["last_hash"], pruned.anchor.hash.as_str());
    assert_eq!(store.audit_anchor().await.unwrap().as_ref(), Some(&pruned.anchor));
    assert_eq!(store.verify_audit().await.unwrap(), 2000);
    assert_eq!(verify_export(&lines, Some(&pruned.anchor)).unwrap().last_hash, pruned.anchor.hash);
    assert_eq!(store.prune_audit(&range, now()).await.unwrap(), None);
    let page = store.audit_page(&AuditFilter::default(), None, 500).await.unwrap();
    assert_eq!(page.records[0].seq, 2000);

    // The log continues after pruning, and can be pruned again.
    append(store, 2001..=2003).await;
    let range = rows_before(1301);
    lines.extend(export(store, &range).await);
    let pruned = store.prune_audit(&range, now()).await.unwrap().unwrap();
    assert_eq!((pruned.removed, pruned.first_seq, pruned.anchor.seq), (100, 1201, 1300));
    assert_eq!(verify_export(&lines, Some(&pruned.anchor)).unwrap().first_seq, 1);
    assert_eq!(store.verify_audit().await.unwrap(), 2003);
    // With the rows that are kept, the exports reach the head.
    lines.extend(export(store, &rows_before(10_000)).await);
    assert_eq!(verify_export(&lines, Some(&pruned.anchor)).unwrap().last_seq, 2003);
    lines.remove(1250);
    assert!(verify_export(&lines, Some(&pruned.anchor)).is_err());
}

pub(crate) async fn pruning_ends_at_the_first_row_that_is_kept(db: TestDb) {
    let store = &db.store;
    store.append_audits([1, 2, 3, 50, 4, 5].map(entry).to_vec()).await.unwrap();
    // Row 4 is newer than row 5: a gap would break the chain.
    assert_eq!(export(store, &rows_before(10)).await.len(), 3);
    let through = AuditRange { through: Some(2), ..rows_before(10) };
    assert_eq!(export(store, &through).await.len(), 2);
    assert_eq!(store.prune_audit(&through, now()).await.unwrap().unwrap().anchor.seq, 2);
    assert_eq!(store.prune_audit(&rows_before(10), now()).await.unwrap().unwrap().anchor.seq, 3);
    assert_eq!(store.prune_audit(&rows_before(10), now()).await.unwrap(), None);
    assert_eq!(store.verify_audit().await.unwrap(), 6);
    // An export fails if another server has pruned rows that it has not read.
    let error = store.export_audit(Some(1), &rows_before(10), 10).await.unwrap_err();
    assert!(matches!(error, StoreError::AuditBroken(_)), "{error}");
}

pub(crate) async fn appends_continue_after_all_rows_were_pruned(db: TestDb) {
    let store = &db.store;
    append(store, 1..=10).await;
    let pruned = store.prune_audit(&rows_before(100), now()).await.unwrap().unwrap();
    assert_eq!((pruned.removed, pruned.anchor.seq), (10, 10));
    assert_eq!(store.verify_audit().await.unwrap(), 10);
    let forged = format!("10:{}:0", "00".repeat(32));
    let anchor = store.setting("audit_anchor").await.unwrap().unwrap();
    store.put_setting("audit_anchor", &forged).await.unwrap();
    assert_eq!(fault(store).await, (10, AuditFault::WrongAnchor));
    store.put_setting("audit_anchor", &anchor).await.unwrap();
    append(store, 11..=12).await;
    assert_eq!(store.verify_audit().await.unwrap(), 12);
    db.sql("DELETE FROM tool_audit").await;
    assert_eq!(fault(store).await, (11, AuditFault::CutOff));
}

pub(crate) async fn tampering_with_a_pruned_log_is_found(db: TestDb) {
    let store = &db.store;
    append(store, 1..=20).await;
    let hashes: Vec<_> = store
        .export_audit(None, &rows_before(100), 100)
        .await
        .unwrap()
        .into_iter()
        .map(|record| record.hash)
        .collect();
    store.prune_audit(&rows_before(11), now()).await.unwrap().unwrap();
    let anchor = store.setting("audit_anchor").await.unwrap().unwrap();
    let set = |text: String| async move { store.put_setting("audit_anchor", &text).await.unwrap() };
    // The anchor was forged: another hash, another row's number, another row.
    for (forged, found) in [
        (format!("10:{}:0", hashes[8]), (11, AuditFault::WrongAnchor)),
        (format!("9:{}:0", hashes[8]), (10, AuditFault::Missing)),
        (format!("11:{}:0", hashes[10]), (12, AuditFault::WrongAnchor)),
        (format!("20:{}:0", hashes[19]), (21, AuditFault::WrongAnchor)),
        (format!("99:{}:0", hashes[19]), (100, AuditFault::WrongAnchor)),
    ] {
        set(forged.clone()).await;
        assert_eq!(fault(store).await, found, "{forged}");
    }
    for damaged in ["nonsense".to_owned(), format!("{}:{}:0", u64::MAX, hashes[9])] {
        set(damaged).await;
        assert!(matches!(store.verify_audit().await, Err(StoreError::Corrupt { .. })));
        assert!(matches!(store.prune_audit(&rows_before(16), now()).await, Err(StoreError::Corrupt { .. })));
    }
    db.sql("DELETE FROM settings WHERE key = 'audit_anchor'").await;
    assert_eq!(fault(store).await, (1, AuditFault::Missing));
    set(anchor).await;
    assert_eq!(store.verify_audit().await.unwrap(), 20);

    // A change of a kept row is found, and no pruning removes that row or a later one.
    db.sql("UPDATE tool_audit SET tool = 'read' WHERE seq = 13").await;
    assert_eq!(fault(store).await, (13, AuditFault::Changed));
    let error = store.prune_audit(&rows_before(16), now()).await.unwrap_err();
    assert!(matches!(error, StoreError::AuditBroken(_)), "{error}");
    assert_eq!(store.audit_anchor().await.unwrap().unwrap().seq, 10);
    db.sql("UPDATE tool_audit SET tool = 'bash' WHERE seq = 13").await;
    // Rows that were removed by hand.
    db.sql("DELETE FROM tool_audit WHERE seq = 11").await;
    assert_eq!(fault(store).await, (11, AuditFault::Missing));
    assert!(store.prune_audit(&rows_before(16), now()).await.is_err());
    db.sql("UPDATE tool_audit SET seq = 11 WHERE seq = 12").await;
    assert_eq!(fault(store).await, (11, AuditFault::WrongAnchor));
}

/// Pruning that meets a changed row after its first batch reports the rows that it removed, and the changed row.
pub(crate) async fn pruning_that_meets_a_changed_row_reports_the_rows_it_removed(db: TestDb) {
    append(&db.store, 1..=800).await;
    db.sql("UPDATE tool_audit SET tool = 'read' WHERE seq = 700").await;
    let pruned = db.store.prune_audit(&rows_before(801), now()).await.unwrap().unwrap();
    assert!(!pruned.complete);
    assert_eq!((pruned.removed, pruned.anchor.seq), (500, 500));
    assert_eq!(fault(&db.store).await, (700, AuditFault::Changed));
    assert!(db.store.prune_audit(&rows_before(801), now()).await.is_err());
}

pub(crate) async fn cuts_and_appends_at_once_keep_one_chain(db: TestDb) {
    append(&db.store, 1..=1500).await;
    // On PostgreSQL a second server has connections of its own.
    let other = if db.is_sqlite() { db.store.clone() } else { db.location.open().await.unwrap() };
    let appends: Vec<_> = (0..10)
        .map(|_| {
            let store = db.store.clone();
            tokio::spawn(async move { append(&store, 9001..=9005).await })
        })
        .collect();
    let prunes: Vec<_> = [db.store.clone(), other, db.store.clone()]
        .into_iter()
        .map(|store| {
            tokio::spawn(async move {
                let pruned = store.prune_audit(&rows_before(1501), now()).await.unwrap();
                store.verify_audit().await.unwrap();
                pruned.map_or(0, |pruned| pruned.removed)
            })
        })
        .collect();
    let mut removed = 0;
    for prune in prunes {
        removed += prune.await.unwrap();
    }
    for append in appends {
        append.await.unwrap();
    }
    assert_eq!(removed, 1500);
    assert_eq!(db.store.audit_anchor().await.unwrap().unwrap().seq, 1500);
    assert_eq!(db.store.verify_audit().await.unwrap(), 1550);
}

/// Run by the case below, in a process of its own.
#[tokio::test]
#[ignore = "prunes until it is killed"]
async fn prunes_until_killed() {
    let store = Location::from_parent().open().await.unwrap();
    let mut out = std::io::stdout();
    let removed = store.audit_anchor().await.unwrap().map_or(0, |anchor| anchor.seq);
    for last in removed + 1.. {
        let range = AuditRange { through: Some(last), ..rows_before(1_000_000) };
        store.append_audit(entry(1)).await.unwrap();
        store.prune_audit(&range, now()).await.unwrap().unwrap();
        writeln!(out, "\npruned {last}").unwrap();
        out.flush().unwrap();
    }
}

pub(crate) async fn a_kill_during_pruning_leaves_a_chain_that_verifies(db: TestDb) {
    append(&db.store, 1..=3000).await;
    let lines = export(&db.store, &rows_before(3001)).await;
    db.store.close().await;
    for _ in 0..3 {
        let mut child = db.child("audit_retention::prunes_until_killed").spawn().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        let prunes =
            output.lines().map_while(Result::ok).filter(|line| line.starts_with("pruned ")).take(20).count();
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(prunes, 20);
        let store = db.location.open().await.unwrap();
        let anchor = store.audit_anchor().await.unwrap().unwrap();
        assert!(anchor.seq >= 20);
        assert!(store.verify_audit().await.unwrap() >= 3000);
        let mut verifier = ExportVerifier::new(Some(&anchor)).unwrap();
        for line in &lines {
            verifier.line(line).unwrap();
        }
        verifier.finish().unwrap();
        store.close().await;
    }
}
