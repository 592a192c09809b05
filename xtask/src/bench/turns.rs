//! Measures in turns: ours, baseline, ours, baseline, …
//!
//! A disturbance of the machine then affects both, and the ratio stays.

use std::time::Duration;

use anyhow::{Context, Result};

use super::stats::Summary;

/// The number of rounds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rounds {
    /// First rounds, whose times are discarded.
    pub(crate) warm_up: usize,
    /// Rounds whose times are counted.
    pub(crate) counted: usize,
}

/// Two summaries of a measurement in turns, in milliseconds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pair {
    pub(crate) ours: Summary,
    pub(crate) baseline: Summary,
}

/// Measures two functions in turns. Each returns its own duration, so that its preparation and cleanup are not measured.
pub(crate) async fn in_turns(
    rounds: Rounds,
    ours: impl AsyncFnMut() -> Result<Duration>,
    baseline: impl AsyncFnMut() -> Result<Duration>,
) -> Result<Pair> {
    runs_in_turns(rounds, 1, ours, baseline).await
}

/// Measures two functions in turns: `ours` `run` times in a row, then `baseline` once.
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

/// Measures one function, without pauses.
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
