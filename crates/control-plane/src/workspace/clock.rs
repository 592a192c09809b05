//! The clock that expiry and idle times are measured with.

use std::time::Instant;

use chrono::{DateTime, TimeDelta, Utc};

/// The time of day at the server's start, plus the monotonic time since then. So a change of the host's clock neither expires
/// workspaces early nor keeps them for ever.
///
/// In debug builds a test can move it: `EMERGENT_CLOCK_OFFSET` names a file with a number of seconds to add.
pub(crate) struct Clock {
    began: DateTime<Utc>,
    since: Instant,
    #[cfg(debug_assertions)]
    offset: Option<std::path::PathBuf>,
}

impl Clock {
    pub(crate) fn start() -> Self {
        Self {
            began: Utc::now(),
            since: Instant::now(),
            #[cfg(debug_assertions)]
            offset: std::env::var_os("EMERGENT_CLOCK_OFFSET").map(Into::into),
        }
    }

    pub(crate) fn now(&self) -> DateTime<Utc> {
        let passed = TimeDelta::from_std(self.since.elapsed()).unwrap_or_default() + self.offset();
        self.began.checked_add_signed(passed).unwrap_or(self.began)
    }

    #[cfg(debug_assertions)]
    fn offset(&self) -> TimeDelta {
        let text = self.offset.as_ref().and_then(|file| std::fs::read_to_string(file).ok());
        let seconds = text.and_then(|text| text.trim().parse().ok()).unwrap_or_default();
        TimeDelta::seconds(seconds)
    }

    #[cfg(not(debug_assertions))]
    #[allow(clippy::unused_self, reason = "debug builds use it")]
    fn offset(&self) -> TimeDelta {
        TimeDelta::zero()
    }
}
