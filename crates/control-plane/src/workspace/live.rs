//! What this process knows of a workspace: its channel, whether it is busy, who is changing it.
//!
//! Nothing here is needed after a restart: the store and the provider know everything that matters.

use std::sync::atomic::AtomicUsize;
use std::sync::{Mutex as StdMutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use emergent_guest_client::GuestClient;
use emergent_wire::workspace::ProviderName;
use tokio::sync::Mutex;

/// A use is written down at most this often.
const TOUCH_EVERY: Duration = Duration::from_secs(60);

/// A workspace as this process knows it.
#[derive(Default)]
pub(crate) struct Live {
    /// Held while the sandbox is made, stopped, resumed, removed or reconnected: one change at a time.
    pub(crate) changing: Mutex<()>,
    /// How calls reach the sandbox, while they may: none once the workspace is to be stopped or removed.
    reached: StdMutex<Option<Reached>>,
    /// Calls in progress.
    pub(crate) calls: AtomicUsize,
    touched: StdMutex<Option<Instant>>,
}

/// How a ready workspace is reached.
#[derive(Clone)]
pub(crate) struct Reached {
    pub(crate) channel: GuestClient,
    /// What the sandbox is on.
    pub(crate) provider: ProviderName,
}

impl Live {
    fn slot(&self) -> MutexGuard<'_, Option<Reached>> {
        self.reached.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How the sandbox is reached, if its channel is open. While it is, no call needs to ask the store.
    pub(crate) fn reached(&self) -> Option<Reached> {
        let mut slot = self.slot();
        if slot.as_ref().is_some_and(|reached| reached.channel.is_closed()) {
            *slot = None;
        }
        slot.clone()
    }

    pub(crate) fn set_reached(&self, new: Reached) {
        *self.slot() = Some(new);
    }

    /// From now on calls ask the store first. The channel lives as long as what is returned.
    pub(crate) fn close_to_calls(&self) -> Option<Reached> {
        self.slot().take()
    }

    /// Whether a use should be written down now.
    pub(crate) fn should_touch(&self) -> bool {
        let mut touched = self.touched.lock().unwrap_or_else(PoisonError::into_inner);
        let due = touched.is_none_or(|at| at.elapsed() >= TOUCH_EVERY);
        if due {
            *touched = Some(Instant::now());
        }
        due
    }
}
