//! Measures two things in turns: ours, baseline, ours, baseline, …
//!
//! What disturbs the machine for a while then disturbs both, and the ratio stays.

use std::time::Duration;

use anyhow::{Context, Result};

use super::stats::Summary;

/// How often to measure.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rounds {
    /// Rounds whose times are thrown away.
    pub(crate) warm_up: usize,
    /// Rounds that count.
    pub(crate) counted: usize,
}

/// What was measured in turns, in milliseconds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pair {
    pub(crate) ours: Summary,
    pub(crate) baseline: Summary,
}

/// Measures two things in turns. Each says itself how long it took, so that it can prepare and clear up unmeasured.
pub(crate) async fn in_turns(
    rounds: Rounds,
    ours: impl AsyncFnMut() -> Result<Duration>,
    baseline: impl AsyncFnMut() -> Result<Duration>,
) -> Result<Pair> {
    runs_in_turns(rounds, 1, ours, baseline).await
}

/// Measures two things in turns, one of them `run` times in a row each time.
pub(crate) async fn runs_in_turns(
    rounds: Rounds,
    run: usize,
    mut ours: impl AsyncFnMut() -> Result<Duration>,
    mut baseline: impl AsyncFnMut() -> Result<Duration>,
) -> Result<Pair> {
    let mut times = (Vec::new(), Vec::new());
    for round in 0..rounds.warm_up + rounds.counted {
        let is_counted = round >= rounds.warm_up;
        for _ in 0..run {
            let took = ours().await?;
            times.0.extend(is_counted.then_some(took));
        }
        let took = baseline().await?;
        times.1.extend(is_counted.then_some(took));
    }
    Ok(Pair { ours: summarise(&times.0)?, baseline: summarise(&times.1)? })
}

/// Measures one thing, again and again.
pub(crate) async fn back_to_back(
    rounds: Rounds,
    mut ours: impl AsyncFnMut() -> Result<Duration>,
) -> Result<Summary> {
    let mut times = Vec::new();
    for round in 0..rounds.warm_up + rounds.counted {
        let took = ours().await?;
        if round >= rounds.warm_up {
            times.push(took);
        }
    }
    summarise(&times)
}

fn summarise(times: &[Duration]) -> Result<Summary> {
    Summary::of_durations(times).context("no rounds")
}
