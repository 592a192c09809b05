//! The time by which workspaces live.

use std::time::Instant;

use chrono::{DateTime, TimeDelta, Utc};

/// The time of day when the server started, and what has passed since. A host's clock that is set while the server
/// runs neither ends workspaces early nor keeps them for ever.
pub(crate) struct Clock {
    began: DateTime<Utc>,
    since: Instant,
}

impl Clock {
    pub(crate) fn start() -> Self {
        Self { began: Utc::now(), since: Instant::now() }
    }

    pub(crate) fn now(&self) -> DateTime<Utc> {
        let passed = TimeDelta::from_std(self.since.elapsed()).unwrap_or_default();
        self.began.checked_add_signed(passed).unwrap_or(self.began)
    }
}
