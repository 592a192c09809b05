//! What the last starts of sandboxes showed: whether they work, and how long the next may take.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Cold starts that the estimate is made of.
const REMEMBERED: usize = 20;
/// A start shows for this long that sandboxes start.
const PROOF_TIME: Duration = Duration::from_secs(600);

/// The last starts of one provider.
#[derive(Debug, Default)]
pub(crate) struct Starts {
    seen: Mutex<Seen>,
}

#[derive(Debug, Default)]
struct Seen {
    cold: VecDeque<Duration>,
    /// When a sandbox last started; none if the last start failed.
    proven: Option<Instant>,
}

impl Starts {
    fn seen(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A sandbox was made and started.
    pub(crate) fn remember(&self, took: Duration) {
        let mut seen = self.seen();
        seen.proven = Some(Instant::now());
        seen.cold.push_back(took);
        if seen.cold.len() > REMEMBERED {
            seen.cold.pop_front();
        }
    }

    /// A sandbox started, though not from scratch.
    pub(crate) fn succeeded(&self) {
        self.seen().proven = Some(Instant::now());
    }

    /// A sandbox did not start.
    pub(crate) fn failed(&self) {
        self.seen().proven = None;
    }

    /// Whether a start has shown of late that sandboxes start.
    pub(crate) fn is_proven(&self) -> bool {
        self.seen().proven.is_some_and(|at| at.elapsed() < PROOF_TIME)
    }

    /// The median, once there is one.
    pub(crate) fn typical_ms(&self) -> Option<u64> {
        let mut cold: Vec<Duration> = self.seen().cold.iter().copied().collect();
        cold.sort_unstable();
        let middle = cold.get(cold.len() / 2)?;
        u64::try_from(middle.as_millis()).ok()
    }
}
