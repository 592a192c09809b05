//! The audit log's one writer: calls hand their entries over and are answered when they are written, so that a server
//! that is killed has no call answered that the log does not know. A task writes what has come meanwhile in one batch.
//! Only messages to MCP servers, of which there may be thousands a second, don't wait: what was handed over in the last
//! moment ([`COLLECT_TIME`]) is lost with a server that is killed, and written by one that ends.
//!
//! A database that can't be written must not stop everything: then calls are answered after a while all the same, and
//! their entries wait in the queue. Only when that is full is an entry lost, which is logged and counted.

use std::sync::Arc;
use std::time::Duration;

use emergent_store::{AuditEntry, Store};
use tokio::sync::{Notify, mpsc, oneshot};
use tokio::time::timeout;

/// Entries that may wait.
const QUEUED: usize = 4096;
/// Entries in one transaction.
const BATCH: usize = 256;
/// After a failure to write.
const RETRY_AFTER: Duration = Duration::from_millis(500);
/// Failures in a row of which one is logged.
const SAY_EVERY: u32 = 120;
/// How long entries are collected that nobody waits for.
const COLLECT_TIME: Duration = Duration::from_millis(10);
/// How long a call waits for its entry.
const PATIENCE: Duration = Duration::from_secs(1);

/// How long a reader of the log, or the end of the server, waits for what is under way.
const FLUSH_TIME: Duration = Duration::from_secs(10);

/// An entry, and whom to tell when it is written, if anybody waits.
struct Item {
    entry: Option<Box<AuditEntry>>,
    written: Option<oneshot::Sender<()>>,
}

/// Where calls hand their entries over.
#[derive(Clone)]
pub(crate) struct Audit {
    queue: mpsc::Sender<Item>,
    /// Somebody waits.
    urgent: Arc<Notify>,
}

impl Audit {
    /// Starts the writer.
    pub(crate) fn start(store: Store) -> Self {
        let (queue, entries) = mpsc::channel(QUEUED);
        let urgent = Arc::new(Notify::new());
        tokio::spawn(write(store, entries, Arc::clone(&urgent)));
        Self { queue, urgent }
    }

    /// Hands an entry over and waits until it is written.
    pub(crate) async fn record(&self, entry: AuditEntry) {
        let (done, written) = oneshot::channel();
        if self.put(Item { entry: Some(Box::new(entry)), written: Some(done) }).await {
            self.urgent.notify_one();
            let _ = timeout(PATIENCE, written).await;
        }
    }

    /// Hands an entry over that is written in a moment.
    pub(crate) async fn record_soon(&self, entry: AuditEntry) {
        self.put(Item { entry: Some(Box::new(entry)), written: None }).await;
    }

    async fn put(&self, item: Item) -> bool {
        let is_taken = self.queue.send_timeout(item, PATIENCE).await.is_ok();
        if !is_taken {
            tracing::error!("an audit entry was lost: the audit log can't be written and too many wait");
            metrics::counter!("emergent_audit_lost_total").increment(1);
        }
        is_taken
    }

    /// Waits until everything handed over so far is written, if it can be.
    pub(crate) async fn flush(&self) {
        let (done, written) = oneshot::channel();
        if self.queue.send_timeout(Item { entry: None, written: Some(done) }, FLUSH_TIME).await.is_ok() {
            self.urgent.notify_one();
            let _ = timeout(FLUSH_TIME, written).await;
        }
    }
}

async fn write(store: Store, mut queue: mpsc::Receiver<Item>, urgent: Arc<Notify>) {
    let mut items = Vec::with_capacity(BATCH);
    while queue.recv_many(&mut items, BATCH).await > 0 {
        if items.iter().all(|item| item.written.is_none()) {
            let _ = timeout(COLLECT_TIME, urgent.notified()).await;
            while items.len() < BATCH
                && let Ok(item) = queue.try_recv()
            {
                items.push(item);
            }
        }
        let entries: Vec<AuditEntry> =
            items.iter_mut().filter_map(|item| item.entry.take()).map(|entry| *entry).collect();
        if !entries.is_empty() {
            let mut failures = 0_u32;
            while let Err(error) = store.append_audits(entries.clone()).await {
                if failures.is_multiple_of(SAY_EVERY) {
                    tracing::error!(%error, entries = entries.len(), "the audit log can't be written; retrying");
                }
                failures += 1;
                metrics::counter!("emergent_audit_failures_total").increment(1);
                tokio::time::sleep(RETRY_AFTER).await;
            }
            if failures > 0 {
                tracing::info!(failures, "the audit log is written again");
            }
        }
        for written in items.drain(..).filter_map(|item| item.written) {
            let _ = written.send(());
        }
    }
}

#[cfg(test)]
mod tests {
    use chrono::Utc;
    use emergent_store::{AuditFilter, AuditOutcome, StoreConfig};
    use serde_json::Value;

    use super::*;

    fn entry(tool: String) -> AuditEntry {
        AuditEntry {
            at: Utc::now(),
            actor_token_id: None,
            actor_name: None,
            workspace_id: None,
            session_id: None,
            tool,
            outcome: AuditOutcome::Success,
            error_code: None,
            duration_ms: 0,
            request: Value::Null,
            request_id: None,
        }
    }

    #[tokio::test]
    async fn what_nobody_waits_for_is_written_before_what_somebody_does() {
        let directory = tempfile::tempdir().unwrap();
        let store = Store::open(StoreConfig::Sqlite(directory.path().join("emergent.db"))).await.unwrap();
        let audit = Audit::start(store.clone());
        for number in 0..100 {
            audit.record_soon(entry(format!("soon {number}"))).await;
        }
        audit.record(entry("now".to_owned())).await;
        let written = store.audit_page(&AuditFilter::default(), None, 500).await.unwrap().records;
        let tools: Vec<String> = written.into_iter().rev().map(|record| record.entry.tool).collect();
        let wanted = (0..100).map(|number| format!("soon {number}")).chain(["now".to_owned()]);
        assert_eq!(tools, wanted.collect::<Vec<_>>());
        // Alone they come without anybody's asking.
        audit.record_soon(entry("alone".to_owned())).await;
        while store.verify_audit().await.unwrap() < 102 {
            tokio::task::yield_now().await;
        }
    }
}
