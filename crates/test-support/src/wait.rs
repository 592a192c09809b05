//! Waits for conditions. Tests wait for a condition and never for a time.

use std::time::{Duration, Instant};

/// The pause between two checks of a condition.
const PAUSE: Duration = Duration::from_millis(50);

/// Checks a condition until it holds. Panics with `what` when it does not hold within the time limit.
#[track_caller]
pub fn wait_until(
    what: &str,
    limit: Duration,
    mut holds: impl AsyncFnMut() -> bool,
) -> impl Future<Output = ()> {
    let (begun, place) = (Instant::now(), std::panic::Location::caller());
    async move {
        while !holds().await {
            assert!(begun.elapsed() < limit, "{place}: not within {} s: {what}", limit.as_secs());
            tokio::time::sleep(PAUSE).await;
        }
    }
}
