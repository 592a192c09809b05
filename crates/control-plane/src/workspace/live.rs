//! What this process knows of a workspace: its channel, whether it is busy, who is changing it.
//!
//! Nothing here is needed after a restart: the store and the provider know everything that matters.

use std::sync::Mutex as StdMutex;
use std::sync::PoisonError;
use std::sync::atomic::AtomicUsize;
use std::time::{Duration, Instant};

use emergent_guest_client::GuestClient;
use tokio::sync::Mutex;

/// A use is written down at most this often.
const TOUCH_EVERY: Duration = Duration::from_secs(60);

/// A workspace as this process knows it.
#[derive(Default)]
pub(crate) struct Live {
    /// Held while the sandbox is made, stopped, resumed, removed or reconnected: one change at a time.
    pub(crate) changing: Mutex<()>,
    /// The channel, while there is one.
    channel: StdMutex<Option<GuestClient>>,
    /// Calls in progress.
    pub(crate) calls: AtomicUsize,
    touched: StdMutex<Option<Instant>>,
}

impl Live {
    /// The channel, if it is open.
    pub(crate) fn channel(&self) -> Option<GuestClient> {
        let mut channel = self.channel.lock().unwrap_or_else(PoisonError::into_inner);
        if channel.as_ref().is_some_and(GuestClient::is_closed) {
            *channel = None;
        }
        channel.clone()
    }

    pub(crate) fn set_channel(&self, new: Option<GuestClient>) {
        *self.channel.lock().unwrap_or_else(PoisonError::into_inner) = new;
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
