//! A request in progress.

use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::Instant;

use crate::Bridge;
use crate::error::BridgeError;
use crate::routes::Item;

/// A request and the items that come back. Dropping it before the answer cancels the request.
pub struct Exchange {
    bridge: Bridge,
    /// The bridge's id of the request; none once it has ended.
    own: Option<u64>,
    raw_id: String,
    receiver: mpsc::Receiver<Item>,
    within: Duration,
    deadline: Instant,
}

impl Exchange {
    pub(crate) fn new(
        bridge: Bridge,
        own: Option<u64>,
        raw_id: String,
        receiver: mpsc::Receiver<Item>,
        within: Duration,
    ) -> Self {
        Self { bridge, own, raw_id, receiver, within, deadline: Instant::now() + within }
    }

    /// The next item; none after the answer. A time-out cancels the request; progress restarts its time. Cancel safe.
    pub async fn next(&mut self) -> Option<Item> {
        let item = match tokio::time::timeout_at(self.deadline, self.receiver.recv()).await {
            Ok(item) => item?,
            Err(_) => {
                let own = self.own.take()?;
                self.bridge.cancel(own);
                return Some(Item::failed(&self.raw_id, BridgeError::TimedOut(self.within.as_millis())));
            }
        };
        match &item {
            Item::Progress(_) => self.deadline = Instant::now() + self.within,
            Item::Answer(_) | Item::Failed { .. } | Item::Cancelled => self.own = None,
            Item::Message(_) => {}
        }
        Some(item)
    }
}

impl Drop for Exchange {
    fn drop(&mut self) {
        if let Some(own) = self.own.take() {
            self.bridge.cancel(own);
        }
    }
}

/// Removes a request that is dropped before it is in the queue of the process.
pub(crate) struct ForgetOnDrop<'a> {
    bridge: &'a Bridge,
    own: Option<u64>,
}

impl<'a> ForgetOnDrop<'a> {
    pub(crate) fn new(bridge: &'a Bridge, own: u64) -> Self {
        Self { bridge, own: Some(own) }
    }

    pub(crate) fn keep(mut self) -> Option<u64> {
        self.own.take()
    }
}

impl Drop for ForgetOnDrop<'_> {
    fn drop(&mut self) {
        if let Some(own) = self.own {
            self.bridge.forget(own);
        }
    }
}
