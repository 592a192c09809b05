//! `make bench`: measures the promises on this machine.
//!
//! Machines differ and are noisy, so rows are ratios. The server and its baseline (`docker exec`, `docker run`, `rg`) are measured in
//! turns in the same run, and compared by their medians.
//!
//! ```text
//! Options ──▶ Session (a release server, one HTTP connection) ──▶ rows::* ──▶ report::Row ──▶ table, JSON
//! ```
//!
//! A broken promise is printed as MISS and is not an error. The exit code is 0 unless a row could not be measured. The server is a
//! [`TestServer`](emergent_test_support::server::TestServer). Its janitor removes everything with the label of the installation, even
//! if this process is killed. The containers of the baseline have the label too.

mod docker;
mod peers;
pub(crate) mod report;
pub(crate) mod rows;
pub(crate) mod session;
pub(crate) mod stats;
pub(crate) mod table;
mod turns;

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};

use report::{NotMeasured, Report};
use rows::Topic;
use session::Session;

/// The options.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// The file for the numbers [default: bench.json in cargo's target directory]
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Fewer rounds and a smaller tree to search, for rough numbers
    #[arg(long)]
    quick: bool,
    /// Only these rows
    #[arg(value_name = "ROW")]
    topics: Vec<Topic>,
}

/// Measures, prints the table, writes the JSON.
pub(crate) fn run(options: &Options) -> Result<ExitCode> {
    // With several threads, each measured call would include the wake-up of another thread.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let report = runtime.block_on(measure(options))?;
    let path = match &options.json {
        Some(path) => path.clone(),
        None => session::target_dir()?.join("bench.json"),
    };
    std::fs::write(&path, serde_json::to_string_pretty(&report.to_json())? + "\n")
        .with_context(|| path.display().to_string())?;
    std::io::stdout().write_all(report.to_text().as_bytes())?;
    eprintln!("written to {}", path.display());
    Ok(if report.not_measured.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

async fn measure(options: &Options) -> Result<Report> {
    let mut report = Report::new(options.quick);
    report.warning().inspect(|warning| eprintln!("{warning}"));
    let session = Session::start(options.quick).await?;
    for topic in Topic::chosen(&options.topics) {
        session.progress(&format!("{topic} …"));
        match topic.measure(&session).await {
            Ok(rows) => report.rows.extend(rows),
            Err(error) => {
                session.progress(&format!("{topic} could not be measured: {error:#}"));
                report.not_measured.push(NotMeasured { what: topic.to_string(), why: format!("{error:#}") });
            }
        }
    }
    report.notes = session.notes();
    session.end(report.not_measured.is_empty());
    Ok(report)
}
