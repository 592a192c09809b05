//! Percentiles of a few dozen samples.

use std::time::Duration;

use serde::Serialize;

/// The summary of many samples of one quantity.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Summary {
    pub(crate) p50: f64,
    pub(crate) p95: f64,
    pub(crate) p99: f64,
    pub(crate) min: f64,
    pub(crate) max: f64,
    pub(crate) samples: usize,
}

impl Summary {
    /// Summarises durations in milliseconds. `None` without samples.
    pub(crate) fn of_durations(durations: &[Duration]) -> Option<Self> {
        Self::of(durations.iter().map(|duration| duration.as_secs_f64() * 1e3).collect())
    }

    /// Summarises numbers. `None` without samples.
    pub(crate) fn of(mut samples: Vec<f64>) -> Option<Self> {
        samples.sort_by(f64::total_cmp);
        Some(Self {
            p50: percentile(&samples, 50)?,
            p95: percentile(&samples, 95)?,
            p99: percentile(&samples, 99)?,
            min: *samples.first()?,
            max: *samples.last()?,
            samples: samples.len(),
        })
    }
}

/// The percentile by the nearest-rank method. The median of an even number of samples is the mean of the middle two.
fn percentile(sorted: &[f64], percent: usize) -> Option<f64> {
    let count = sorted.len();
    if percent == 50 && count > 0 && count.is_multiple_of(2) {
        return Some(f64::midpoint(sorted[count / 2 - 1], sorted[count / 2]));
    }
    let rank = (count * percent).div_ceil(100).max(1);
    sorted.get(rank - 1).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn summary(samples: &[f64]) -> Summary {
        Summary::of(samples.to_vec()).unwrap()
    }

    #[test]
    fn no_samples_have_no_summary() {
        assert_eq!(Summary::of(Vec::new()), None);
        assert_eq!(Summary::of_durations(&[]), None);
    }

    #[test]
    fn one_sample_is_every_percentile() {
        let one = Summary { p50: 7.0, p95: 7.0, p99: 7.0, min: 7.0, max: 7.0, samples: 1 };
        assert_eq!(summary(&[7.0]), one);
    }

    #[test]
    fn summary_does_not_depend_on_the_order_of_samples() {
        assert_eq!(summary(&[3.0, 1.0, 2.0]), summary(&[1.0, 2.0, 3.0]));
        assert_eq!(summary(&[3.0, 1.0, 2.0]).p50, 2.0);
    }

    #[test]
    fn median_of_an_even_number_is_the_mean_of_the_middle_two() {
        assert_eq!(summary(&[1.0, 2.0, 4.0, 100.0]).p50, 3.0);
    }

    #[test]
    fn one_outlier_in_a_hundred_shows_only_in_the_maximum() {
        let mut samples: Vec<f64> = (1..=100).map(f64::from).collect();
        samples[99] = 9999.0;
        let summary = summary(&samples);
        assert_eq!((summary.p50, summary.p95, summary.p99, summary.max), (50.5, 95.0, 99.0, 9999.0));
    }

    #[test]
    fn durations_are_summarised_in_milliseconds() {
        let summary = Summary::of_durations(&[Duration::from_micros(1500)]).unwrap();
        assert_eq!(summary.p50, 1.5);
    }
}
