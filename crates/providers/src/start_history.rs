//! The history of sandbox starts of one provider: whether starts succeed, and how long a cold start takes.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// Number of cold starts that the median is made of.
const MAX_COLD_STARTS: usize = 20;
/// A successful start is evidence for this long.
const EVIDENCE_TIME: Duration = Duration::from_secs(600);

/// The recent starts of one provider.
#[derive(Debug, Default)]
pub(crate) struct StartHistory {
    recent: Mutex<Recent>,
}

#[derive(Debug, Default)]
struct Recent {
    cold: VecDeque<Duration>,
    /// The time of the last start. None: it failed, or there was none.
    last_success: Option<Instant>,
}

impl StartHistory {
    /// Records a sandbox that was created and started.
    pub(crate) fn record_cold_start(&self, took: Duration) {
        let mut recent = self.recent.lock();
        recent.last_success = Some(Instant::now());
        recent.cold.push_back(took);
        if recent.cold.len() > MAX_COLD_STARTS {
            recent.cold.pop_front();
        }
    }

    /// Records a start of an existing sandbox, or of a probe.
    pub(crate) fn record_success(&self) {
        self.recent.lock().last_success = Some(Instant::now());
    }

    /// Records a failed start.
    pub(crate) fn record_failure(&self) {
        self.recent.lock().last_success = None;
    }

    /// Whether the last start succeeded, and not long ago.
    pub(crate) fn succeeded_recently(&self) -> bool {
        self.recent.lock().last_success.is_some_and(|at| at.elapsed() < EVIDENCE_TIME)
    }

    /// The median time of a cold start. None before the first one.
    pub(crate) fn median_ms(&self) -> Option<u64> {
        let mut cold: Vec<Duration> = self.recent.lock().cold.iter().copied().collect();
        cold.sort_unstable();
        let middle = cold.get(cold.len() / 2)?;
        u64::try_from(middle.as_millis()).ok()
    }
}
