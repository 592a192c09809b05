//! How long sandboxes took to start, for an estimate of the next.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// Cold starts that the estimate is made of.
const REMEMBERED: usize = 20;

/// The last cold starts of one provider.
#[derive(Debug, Default)]
pub(crate) struct Starts {
    last: Mutex<VecDeque<Duration>>,
}

impl Starts {
    pub(crate) fn remember(&self, took: Duration) {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        last.push_back(took);
        if last.len() > REMEMBERED {
            last.pop_front();
        }
    }

    /// The median, once there is one.
    pub(crate) fn typical_ms(&self) -> Option<u64> {
        let mut last: Vec<Duration> =
            self.last.lock().unwrap_or_else(PoisonError::into_inner).iter().copied().collect();
        last.sort_unstable();
        let middle = last.get(last.len() / 2)?;
        u64::try_from(middle.as_millis()).ok()
    }
}
