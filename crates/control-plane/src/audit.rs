//! The audit log's one writer: calls hand their entries over and go on; a task writes them in batches, in order.

use std::time::Duration;

use emergent_store::{AuditEntry, Store};
use tokio::sync::{mpsc, oneshot};

/// Entries that may wait; a full queue holds calls back rather than losing their entries.
const QUEUED: usize = 4096;
/// Entries in one transaction.
const BATCH: usize = 256;
/// After a failure to write.
const RETRY_AFTER: Duration = Duration::from_millis(500);

enum Item {
    Entry(Box<AuditEntry>),
    Flush(oneshot::Sender<()>),
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

    /// Hands an entry over.
    pub(crate) async fn record(&self, entry: AuditEntry) {
        let _ = self.queue.send(Item::Entry(Box::new(entry))).await;
    }

    /// Waits until everything handed over so far is written.
    pub(crate) async fn flush(&self) {
        let (done, written) = oneshot::channel();
        if self.queue.send(Item::Flush(done)).await.is_ok() {
            let _ = written.await;
        }
    }
}

async fn write(store: Store, mut queue: mpsc::Receiver<Item>) {
    let mut items = Vec::with_capacity(BATCH);
    while queue.recv_many(&mut items, BATCH).await > 0 {
        let mut entries = Vec::with_capacity(items.len());
        let mut flushes = Vec::new();
        for item in items.drain(..) {
            match item {
                Item::Entry(entry) => entries.push(*entry),
                Item::Flush(done) => flushes.push(done),
            }
        }
        if !entries.is_empty() {
            while let Err(error) = store.append_audits(entries.clone()).await {
                tracing::error!(%error, entries = entries.len(), "the audit log can't be written; retrying");
                metrics::counter!("emergent_audit_failures_total").increment(1);
                tokio::time::sleep(RETRY_AFTER).await;
            }
        }
        for done in flushes {
            let _ = done.send(());
        }
    }
}
