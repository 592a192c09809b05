//! The pause before a crashed process is restarted: a pure state machine; the time is an argument.
//!
//! ```text
//!            ┌─────────────── a quiet minute, or a restart by hand ───────────────┐
//!            ▼                                                                    │
//! at once (up to 3 crashes in 60 s) ──▶ 5 s ──▶ 15 s ──▶ 45 s ──▶ 120 s ──▶ 300 s ─┘ (stays there)
//! ```

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// The time over which crashes are counted.
pub const WINDOW: Duration = Duration::from_secs(60);
/// The crashes in that time without a pause.
pub const MAX_RECENT: usize = 3;
/// The pauses after further crashes. The last one repeats.
pub const PAUSES: [Duration; 5] = [
    Duration::from_secs(5),
    Duration::from_secs(15),
    Duration::from_secs(45),
    Duration::from_secs(120),
    Duration::from_secs(300),
];

/// The crashes of one process.
#[derive(Clone, Debug, Default)]
pub struct CrashLoop {
    recent: VecDeque<Instant>,
    /// The pauses since the process last ran for [`WINDOW`].
    pauses: usize,
}

/// The decision after a crash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// The pause before the restart.
    pub pause: Duration,
    /// Whether this is the first pause of a crash loop, which is reported.
    pub alert: bool,
}

impl CrashLoop {
    /// Decides after a crash at `now` of a process that was started at `started`.
    pub fn crashed(&mut self, started: Instant, now: Instant) -> Verdict {
        if now.saturating_duration_since(started) >= WINDOW {
            *self = Self::default();
        }
        self.recent.push_back(now);
        // Nothing runs during a pause, so crashes on both sides of a pause are counted together.
        while self.recent.front().is_some_and(|at| now.saturating_duration_since(*at) > WINDOW) {
            self.recent.pop_front();
        }
        if self.pauses == 0 && self.recent.len() <= MAX_RECENT {
            return Verdict { pause: Duration::ZERO, alert: false };
        }
        let pause = PAUSES[self.pauses.min(PAUSES.len() - 1)];
        self.pauses += 1;
        self.recent.truncate(MAX_RECENT + 1);
        Verdict { pause, alert: self.pauses == 1 }
    }

    /// Forgets all crashes, after a restart by hand.
    pub fn reset(&mut self) {
        *self = Self::default();
    }

    /// Whether the next crash is followed by a pause.
    pub fn is_looping(&self) -> bool {
        self.pauses > 0
    }

    /// The number of crashes in the last minute.
    pub fn recent(&self, now: Instant) -> usize {
        self.recent.iter().filter(|at| now.saturating_duration_since(**at) <= WINDOW).count()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Crashes at once, always; the pauses in seconds.
    fn crash_often(crashes: &mut CrashLoop, now: &mut Instant, times: usize) -> Vec<u64> {
        let mut pauses = Vec::new();
        for _ in 0..times {
            let verdict = crashes.crashed(*now, *now + Duration::from_millis(10));
            *now += Duration::from_millis(10) + verdict.pause;
            pauses.push(verdict.pause.as_secs());
        }
        pauses
    }

    #[test]
    fn pauses_grow_after_three_crashes_in_a_minute() {
        let (mut crashes, mut now) = (CrashLoop::default(), Instant::now());
        let pauses = crash_often(&mut crashes, &mut now, 10);
        assert_eq!(pauses, [0, 0, 0, 5, 15, 45, 120, 300, 300, 300]);
        crashes.reset();
        assert_eq!(crash_often(&mut crashes, &mut now, 4), [0, 0, 0, 5]);
    }

    #[test]
    fn a_process_that_ran_for_a_minute_is_restarted_at_once_again() {
        let (mut crashes, mut now) = (CrashLoop::default(), Instant::now());
        crash_often(&mut crashes, &mut now, 6);
        assert!(crashes.is_looping());
        let verdict = crashes.crashed(now, now + WINDOW);
        assert_eq!(verdict, Verdict { pause: Duration::ZERO, alert: false });
        assert!(!crashes.is_looping());
    }

    #[test]
    fn three_crashes_a_minute_never_cause_a_pause() {
        let (mut crashes, mut now) = (CrashLoop::default(), Instant::now());
        for _ in 0..50 {
            let lived = Duration::from_millis(20_100);
            assert_eq!(crashes.crashed(now, now + lived).pause, Duration::ZERO);
            now += lived;
        }
    }

    proptest! {
        #[test]
        fn pauses_never_shrink_without_a_reason_and_alerts_come_once(
            lives in prop::collection::vec(0_u64..90_000, 1..40),
        ) {
            let (mut crashes, mut now) = (CrashLoop::default(), Instant::now());
            let (mut last, mut alerts) = (Duration::ZERO, 0);
            for life in lives {
                let life = Duration::from_millis(life);
                let verdict = crashes.crashed(now, now + life);
                if life >= WINDOW {
                    (last, alerts) = (Duration::ZERO, 0);
                }
                prop_assert!(verdict.pause >= last);
                prop_assert!(verdict.pause == Duration::ZERO || PAUSES.contains(&verdict.pause));
                prop_assert!(crashes.recent.len() <= MAX_RECENT + 2);
                alerts += usize::from(verdict.alert);
                prop_assert!(alerts <= 1);
                prop_assert_eq!(crashes.is_looping(), verdict.pause > Duration::ZERO);
                last = verdict.pause;
                now += life + verdict.pause;
            }
        }
    }
}
