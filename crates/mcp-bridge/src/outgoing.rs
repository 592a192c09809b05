//! The queue of lines for a process.

use tokio::sync::{OwnedSemaphorePermit, mpsc};

/// A line for the process, and its share of the queue's bytes.
pub(crate) struct Queued {
    pub(crate) line: String,
    pub(crate) _room: Option<OwnedSemaphorePermit>,
}

/// The reading end of the queue.
pub struct Outgoing(pub(crate) mpsc::Receiver<Queued>);

impl Outgoing {
    /// All lines in the queue, up to about this many bytes, in one piece; none when the bridge is closed.
    pub async fn next(&mut self, about: usize) -> Option<Vec<u8>> {
        let mut batch = self.0.recv().await?.line.into_bytes();
        batch.push(b'\n');
        // Clients that are about to write go first, because a batch costs each process on the way one wake-up.
        tokio::task::yield_now().await;
        while batch.len() < about
            && let Ok(more) = self.0.try_recv()
        {
            batch.extend_from_slice(more.line.as_bytes());
            batch.push(b'\n');
        }
        Some(batch)
    }
}
