//! When a process that ended is started again: a pure state machine, which is told the time.
//!
//! ```text
//!            ┌─────────────── a quiet minute, or a restart by hand ───────────────┐
//!            ▼                                                                    │
//! at once (up to 3 crashes in 60 s) ──▶ 5 s ──▶ 15 s ──▶ 45 s ──▶ 120 s ──▶ 300 s ─┘ (stays there)
//! ```

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Crashes are counted over this time.
pub const WINDOW: Duration = Duration::from_secs(60);
/// So many in it are borne.
pub const BORNE: usize = 3;
/// The pauses after that.
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
    /// Pauses that were made; they count until the process has run for a while.
    pauses: usize,
}

/// What to do after a crash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// Start it again after this.
    pub pause: Duration,
    /// It crashes again and again: somebody should know. Only the first time.
    pub alert: bool,
}

impl CrashLoop {
    /// A process that was started at `started` has crashed.
    pub fn crashed(&mut self, started: Instant, now: Instant) -> Verdict {
        if now.saturating_duration_since(started) >= WINDOW {
            *self = Self::default();
        }
        self.recent.push_back(now);
        // During a pause nothing can crash, so what is counted are crashes with a pause between them as well.
        while self.recent.front().is_some_and(|at| now.saturating_duration_since(*at) > WINDOW) {
            self.recent.pop_front();
        }
        if self.pauses == 0 && self.recent.len() <= BORNE {
            return Verdict { pause: Duration::ZERO, alert: false };
        }
        let pause = PAUSES[self.pauses.min(PAUSES.len() - 1)];
        self.pauses += 1;
        self.recent.truncate(BORNE + 1);
        Verdict { pause, alert: self.pauses == 1 }
    }

    /// Somebody restarted it by hand.
    pub fn reset(&mut self) {
        *self = Self::default();
    }

    /// Whether it is being held back.
    pub fn is_looping(&self) -> bool {
        self.pauses > 0
    }

    /// Crashes in the last minute.
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
    fn after_three_crashes_in_a_minute_it_waits_longer_and_longer() {
        let (mut crashes, mut now) = (CrashLoop::default(), Instant::now());
        let pauses = crash_often(&mut crashes, &mut now, 10);
        assert_eq!(pauses, [0, 0, 0, 5, 15, 45, 120, 300, 300, 300]);
        crashes.reset();
        assert_eq!(crash_often(&mut crashes, &mut now, 4), [0, 0, 0, 5]);
    }

    #[test]
    fn who_runs_for_a_minute_is_trusted_again() {
        let (mut crashes, mut now) = (CrashLoop::default(), Instant::now());
        crash_often(&mut crashes, &mut now, 6);
        assert!(crashes.is_looping());
        let verdict = crashes.crashed(now, now + WINDOW);
        assert_eq!(verdict, Verdict { pause: Duration::ZERO, alert: false });
        assert!(!crashes.is_looping());
    }

    #[test]
    fn three_crashes_a_minute_are_borne_for_ever() {
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
                prop_assert!(crashes.recent.len() <= BORNE + 2);
                alerts += usize::from(verdict.alert);
                prop_assert!(alerts <= 1);
                prop_assert_eq!(crashes.is_looping(), verdict.pause > Duration::ZERO);
                last = verdict.pause;
                now += life + verdict.pause;
            }
        }
    }
}
