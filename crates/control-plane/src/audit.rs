//! The one writer of the audit log. Calls put their entries into a queue, and a task writes the queue in batches.
//!
//! A call is answered after its entry is written, so after a crash no answered call is missing in the log. A call whose output is sent
//! while it runs has an entry before its output, and another one at its end. The exception are messages to MCP servers, of which there
//! may be thousands a second: they do not wait, and a crash loses the entries of the last [`COLLECT_TIME`]. An orderly shutdown writes
//! them.
//!
//! A database that can't be written must not stop the server. Then calls are answered after [`WRITE_TIMEOUT`], and their entries stay
//! in the queue. An entry is lost only when the queue is full, which is logged and counted.

use std::sync::Arc;
use std::time::Duration;

use emergent_store::{AuditEntry, Store};
use tokio::sync::{Notify, mpsc, oneshot};
use tokio::time::timeout;
use tracing::Instrument as _;

/// The limit on queued entries.
const MAX_QUEUED: usize = 4096;
/// The entries of one transaction.
const BATCH: usize = 256;
/// The pause after a failure to write.
const RETRY_AFTER: Duration = Duration::from_millis(500);
/// One of this many failures in a row is logged.
const LOG_EVERY: u32 = 120;
/// The time for which entries are collected that no call waits for.
const COLLECT_TIME: Duration = Duration::from_millis(10);
/// The time for which a call waits for its entry.
const WRITE_TIMEOUT: Duration = Duration::from_secs(1);
/// The time for which a reader of the log, or the shutdown of the server, waits for the queued entries.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(10);

/// An entry, and the channel that reports that it is written, if a call waits for that.
struct Item {
    entry: Option<Box<AuditEntry>>,
    written: Option<oneshot::Sender<()>>,
}

/// The queue of the writer.
#[derive(Clone)]
pub(crate) struct Audit {
    queue: mpsc::Sender<Item>,
    /// Notified when a call waits for its entry.
    urgent: Arc<Notify>,
}

impl Audit {
    /// Starts the writer.
    pub(crate) fn start(store: Store) -> Self {
        let (queue, entries) = mpsc::channel(MAX_QUEUED);
        let urgent = Arc::new(Notify::new());
        let span = tracing::info_span!(parent: None, "background", task = "audit");
        tokio::spawn(write(store, entries, Arc::clone(&urgent)).instrument(span));
        Self { queue, urgent }
    }

    /// Queues an entry and waits until it is written.
    pub(crate) async fn record(&self, entry: AuditEntry) {
        let (done, written) = oneshot::channel();
        if self.put(Item { entry: Some(Box::new(entry)), written: Some(done) }).await {
            self.urgent.notify_one();
            let _ = timeout(WRITE_TIMEOUT, written).await;
        }
    }

    /// Queues an entry.
    pub(crate) async fn record_soon(&self, entry: AuditEntry) {
        self.put(Item { entry: Some(Box::new(entry)), written: None }).await;
    }

    async fn put(&self, item: Item) -> bool {
        let is_queued = self.queue.send_timeout(item, WRITE_TIMEOUT).await.is_ok();
        if !is_queued {
            tracing::error!("an audit entry was lost: the audit log can't be written, and the queue is full");
            metrics::counter!("emergent_audit_lost_total").increment(1);
        }
        is_queued
    }

    /// Waits until all queued entries are written, if they can be.
    pub(crate) async fn flush(&self) {
        let (done, written) = oneshot::channel();
        if self.queue.send_timeout(Item { entry: None, written: Some(done) }, FLUSH_TIMEOUT).await.is_ok() {
            self.urgent.notify_one();
            let _ = timeout(FLUSH_TIMEOUT, written).await;
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
                if failures.is_multiple_of(LOG_EVERY) {
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
    async fn entries_are_written_in_the_order_of_the_queue() {
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
        // An entry that no call waits for is written, too.
        audit.record_soon(entry("alone".to_owned())).await;
        while store.verify_audit().await.unwrap() < 102 {
            tokio::task::yield_now().await;
        }
    }
}
