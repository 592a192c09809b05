//! The report of measurements and promises, as a table and as JSON.

use std::fmt;

use serde_json::{Value, json};

use super::stats::Summary;
use super::table::{Align, render};
use super::turns::Pair;

/// The unit of a row's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unit {
    Milliseconds,
    Mebibytes,
    PerSecond,
}

impl Unit {
    fn as_str(self) -> &'static str {
        match self {
            Unit::Milliseconds => "ms",
            Unit::Mebibytes => "MiB",
            Unit::PerSecond => "/s",
        }
    }

    pub(crate) fn show(self, value: f64) -> String {
        let decimals = if value < 10.0 { 2 } else { usize::from(value < 1000.0) };
        format!("{value:.decimals$} {}", self.as_str())
    }
}

/// The comparison with the baseline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ratio {
    /// The baseline's time divided by ours. More is better.
    TimesFaster,
    /// Our time divided by the baseline's. Less is better.
    TimesAsLong,
    /// Our share of the baseline. Less is better.
    Share,
}

/// A promise about a row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Promise {
    /// The ratio is at least this.
    AtLeastTimes(f64),
    /// The ratio is at most this.
    AtMostTimes(f64),
    /// Our median is less than this.
    Below(f64),
    /// Our median is at most this.
    AtMost(f64),
    /// Our median is at least this.
    AtLeast(f64),
    /// Our median exceeds the baseline's by at most this.
    AtMostOver(f64),
    /// Our 99th percentile is less than this.
    P99Below(f64),
    /// A goal: the ratio should be at least this. A lower ratio is not a miss.
    Goal(f64),
}

/// One line of the table.
#[derive(Clone, Debug)]
pub(crate) struct Row {
    name: String,
    unit: Unit,
    ours: Summary,
    baseline: Option<Summary>,
    ratio: Ratio,
    promises: Vec<Promise>,
    /// Only the ratio is meaningful.
    ratio_only: bool,
}

impl Row {
    /// Our times and those of the baseline.
    pub(crate) fn compared(name: &str, pair: Pair, ratio: Ratio, promises: &[Promise]) -> Self {
        Self {
            name: name.to_owned(),
            unit: Unit::Milliseconds,
            ours: pair.ours,
            baseline: Some(pair.baseline),
            ratio,
            promises: promises.to_vec(),
            ratio_only: false,
        }
    }

    /// A quantity without a baseline.
    pub(crate) fn alone(name: &str, unit: Unit, ours: Summary, promises: &[Promise]) -> Self {
        Self {
            name: name.to_owned(),
            unit,
            ours,
            baseline: None,
            ratio: Ratio::TimesAsLong,
            promises: promises.to_vec(),
            ratio_only: false,
        }
    }

    /// Our share of the baseline.
    pub(crate) fn share(name: &str, unit: Unit, pair: Pair, promises: &[Promise]) -> Self {
        Self { unit, ..Self::compared(name, pair, Ratio::Share, promises) }
    }

    /// The row without its numbers and promises, on machines where only the ratio is meaningful.
    pub(crate) fn ratio_only(mut self) -> Self {
        self.promises.clear();
        self.ratio_only = true;
        self
    }

    fn ratio(&self) -> Option<f64> {
        let baseline = self.baseline?.p50;
        Some(match self.ratio {
            Ratio::TimesFaster => baseline / self.ours.p50,
            Ratio::TimesAsLong | Ratio::Share => self.ours.p50 / baseline,
        })
    }

    /// Whether every promise is kept. `None` without a promise.
    fn is_kept(&self) -> Option<bool> {
        let ratio = self.ratio().unwrap_or(f64::NAN);
        let kept = self.promises.iter().filter_map(|promise| match *promise {
            Promise::AtLeastTimes(least) => Some(ratio >= least),
            Promise::AtMostTimes(most) => Some(ratio <= most),
            Promise::Below(limit) => Some(self.ours.p50 < limit),
            Promise::AtMost(most) => Some(self.ours.p50 <= most),
            Promise::AtLeast(least) => Some(self.ours.p50 >= least),
            Promise::AtMostOver(most) => Some(self.ours.p50 - self.baseline?.p50 <= most),
            Promise::P99Below(limit) => Some(self.ours.p99 < limit),
            Promise::Goal(_) => None,
        });
        kept.reduce(|all, one| all && one)
    }

    fn promise(&self) -> String {
        let texts = self.promises.iter().map(|promise| match *promise {
            Promise::AtLeastTimes(least) => format!("≥ {least} ×"),
            Promise::AtMostTimes(most) => format!("≤ {most} ×"),
            Promise::Below(limit) => format!("< {limit} {}", self.unit.as_str()),
            Promise::AtMost(most) => format!("≤ {most} {}", self.unit.as_str()),
            Promise::AtLeast(least) => format!("≥ {least} {}", self.unit.as_str()),
            Promise::AtMostOver(most) => {
                let over = self.ours.p50 - self.baseline.map_or(0.0, |baseline| baseline.p50);
                format!("≤ {most} {} more (is {over:.2})", self.unit.as_str())
            }
            Promise::P99Below(limit) => {
                format!("p99 < {limit} {} (is {})", self.unit.as_str(), self.unit.show(self.ours.p99))
            }
            Promise::Goal(least) => format!("goal ≥ {least} ×"),
        });
        texts.collect::<Vec<_>>().join(", ")
    }

    /// Our numbers and those of the baseline, if they are meaningful.
    fn numbers(&self) -> Option<(Summary, Option<Summary>)> {
        (!self.ratio_only).then_some((self.ours, self.baseline))
    }

    fn cells(&self) -> Vec<String> {
        let ratio = self.ratio().map(|ratio| match self.ratio {
            Ratio::TimesFaster => format!("{ratio:.1} × faster"),
            Ratio::TimesAsLong => format!("{ratio:.2} × as long"),
            Ratio::Share => format!("{:.1} % of it", ratio * 100.0),
        });
        let verdict = match self.is_kept() {
            Some(true) => "ok",
            Some(false) => "MISS",
            None => "",
        };
        vec![
            self.name.clone(),
            self.numbers().map(|(ours, _)| self.unit.show(ours.p50)).unwrap_or_default(),
            self.numbers().and_then(|(_, baseline)| Some(self.unit.show(baseline?.p50))).unwrap_or_default(),
            ratio.unwrap_or_default(),
            self.promise(),
            verdict.to_owned(),
        ]
    }

    fn to_json(&self) -> Value {
        let ratio_is = match self.ratio {
            Ratio::TimesFaster => "times_faster",
            Ratio::TimesAsLong => "times_as_long",
            Ratio::Share => "share",
        };
        json!({
            "row": self.name.trim_start_matches([' ', '…']),
            "unit": self.unit.as_str(),
            "ours": self.numbers().map(|(ours, _)| ours),
            "baseline": self.numbers().and_then(|(_, baseline)| baseline),
            "ratio": self.ratio(),
            "ratio_is": self.baseline.map(|_| ratio_is),
            "promise": self.promise(),
            "ok": self.is_kept(),
        })
    }
}

/// A row that could not be measured.
#[derive(Debug)]
pub(crate) struct NotMeasured {
    pub(crate) what: String,
    pub(crate) why: String,
}

impl fmt::Display for NotMeasured {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "not measured: {}: {}", self.what, self.why)
    }
}

/// All results.
#[derive(Debug)]
pub(crate) struct Report {
    quick: bool,
    begun_at: chrono::DateTime<chrono::Utc>,
    /// The machine's load average (1 min) before the first measurement.
    load: f64,
    pub(crate) rows: Vec<Row>,
    /// Notes for a reader of the table.
    pub(crate) notes: Vec<String>,
    pub(crate) not_measured: Vec<NotMeasured>,
}

impl Report {
    /// An empty report that begins now.
    pub(crate) fn new(quick: bool) -> Self {
        let load = file("/proc/loadavg").split(' ').next().and_then(|text| text.parse().ok()).unwrap_or(0.0);
        let begun_at = chrono::Utc::now();
        Self { quick, begun_at, load, rows: Vec::new(), notes: Vec::new(), not_measured: Vec::new() }
    }

    /// The warning about a busy machine.
    pub(crate) fn warning(&self) -> Option<String> {
        (self.load > 0.5 * f64::from(cpus())).then(|| {
            format!(
                "the machine is busy (load {} on {} CPUs): the numbers will be worse than on a quiet one",
                self.load,
                cpus()
            )
        })
    }

    /// The table, followed by the notes and the rows that could not be measured.
    pub(crate) fn to_text(&self) -> String {
        let columns = [
            ("row", Align::Left),
            ("ours p50", Align::Right),
            ("baseline p50", Align::Right),
            ("ratio", Align::Right),
            ("promise", Align::Left),
            ("", Align::Left),
        ];
        let rows: Vec<_> = self.rows.iter().map(Row::cells).collect();
        let notes = self.notes.iter().map(|note| format!("note: {note}\n"));
        let failures = self.not_measured.iter().map(|failure| format!("{failure}\n"));
        std::iter::once(render(&columns, &rows)).chain(notes).chain(failures).collect()
    }

    /// All numbers, with percentiles.
    pub(crate) fn to_json(&self) -> Value {
        json!({
            "begun_at": self.begun_at.to_rfc3339_opts(chrono::SecondsFormat::Secs, true),
            "quick": self.quick,
            "machine": {
                "cpus": cpus(),
                "load": self.load,
                "kernel": file("/proc/sys/kernel/osrelease"),
            },
            "rows": self.rows.iter().map(Row::to_json).collect::<Vec<_>>(),
            "notes": self.notes,
            "not_measured": self
                .not_measured
                .iter()
                .map(|failure| json!({ "row": failure.what, "reason": failure.why }))
                .collect::<Vec<_>>(),
        })
    }
}

fn cpus() -> u32 {
    std::thread::available_parallelism().map_or(1, |cpus| u32::try_from(cpus.get()).unwrap_or(u32::MAX))
}

fn file(path: &str) -> String {
    std::fs::read_to_string(path).unwrap_or_default().trim().to_owned()
}
