//! The audit log's one writer: calls hand their entries over and are answered when they are written, so that a server
//! that is killed has no call answered that the log does not know. A task writes what has come meanwhile in one batch.
//!
//! A database that can't be written must not stop everything: then calls are answered after a while all the same, and
//! their entries wait in the queue. Only when that is full is an entry lost, which is logged and counted.

use std::time::Duration;

use emergent_store::{AuditEntry, Store};
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;

/// Entries that may wait.
const QUEUED: usize = 4096;
/// Entries in one transaction.
const BATCH: usize = 256;
/// After a failure to write.
const RETRY_AFTER: Duration = Duration::from_millis(500);
/// Failures in a row of which one is logged.
const SAY_EVERY: u32 = 120;
/// How long a call waits for its entry.
const PATIENCE: Duration = Duration::from_secs(1);

/// How long a reader of the log, or the end of the server, waits for what is under way.
const FLUSH_TIME: Duration = Duration::from_secs(10);

/// An entry, and whom to tell when it is written.
struct Item {
    entry: Option<Box<AuditEntry>>,
    written: oneshot::Sender<()>,
}

/// Where calls hand their entries over.
#[derive(Clone)]
pub(crate) struct Audit {
    queue: mpsc::Sender<Item>,
}

impl Audit {
    /// Starts the writer.
    pub(crate) fn start(store: Store) -> Self {
        let (queue, entries) = mpsc::channel(QUEUED);
        tokio::spawn(write(store, entries));
        Self { queue }
    }

    /// Hands an entry over and waits until it is written.
    pub(crate) async fn record(&self, entry: AuditEntry) {
        let (done, written) = oneshot::channel();
        let item = Item { entry: Some(Box::new(entry)), written: done };
        if self.queue.send_timeout(item, PATIENCE).await.is_err() {
            tracing::error!("an audit entry was lost: the audit log can't be written and too many wait");
            metrics::counter!("emergent_audit_lost_total").increment(1);
            return;
        }
        let _ = timeout(PATIENCE, written).await;
    }

    /// Waits until everything handed over so far is written, if it can be.
    pub(crate) async fn flush(&self) {
        let (done, written) = oneshot::channel();
        if self.queue.send_timeout(Item { entry: None, written: done }, FLUSH_TIME).await.is_ok() {
            let _ = timeout(FLUSH_TIME, written).await;
        }
    }
}

async fn write(store: Store, mut queue: mpsc::Receiver<Item>) {
    let mut items = Vec::with_capacity(BATCH);
    while queue.recv_many(&mut items, BATCH).await > 0 {
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
        for item in items.drain(..) {
            let _ = item.written.send(());
        }
    }
}
