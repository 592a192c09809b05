//! `make crashes`: a hosted MCP server crashes many times. Prints the times until it is back, and everything that is left.
//!
//! The server delays the restart after the fourth crash in a minute, so the test restarts it after each third one.

use std::io::Write;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use emergent_test_support::mcp::{self, SERVERS};
use emergent_test_support::server::TestServer;
use serde_json::json;

use crate::bench::report::Unit;
use crate::bench::session::release_binary;
use crate::bench::stats::Summary;
use crate::load::{ProcessUsage, process_usage};

/// The number of crashes without a delay of the restart.
const CRASHES_WITHOUT_DELAY: usize = 3;
/// The number of printed samples of the server's memory.
const SAMPLES: usize = 10;

/// The options.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// The number of crashes
    #[arg(value_name = "N", default_value_t = 1000)]
    times: usize,
    /// The provider
    #[arg(long, default_value = "docker")]
    provider: String,
}

/// Runs the test and prints its results.
pub(crate) fn run(options: &Options) -> Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(crash(options))
}

async fn crash(options: &Options) -> Result<ExitCode> {
    let binary = release_binary()?;
    let mut server = TestServer::start(&binary).await;
    server.register(&mcp::image(&binary), json!({ "name": "fragile", "provider": options.provider })).await;
    server.wait_for_status("fragile", "ready").await;
    let begun = Instant::now();
    let mut back = Vec::new();
    let mut first: Option<ProcessUsage> = None;
    for turn in 1..=options.times {
        let crashed = Instant::now();
        server.mcp_tool("fragile", "crash", json!({ "code": 1 })).await.error(502);
        // The next call waits until the MCP server is ready again.
        let text = server.mcp_text("fragile", "echo", json!({ "text": "back" })).await;
        ensure!(text == "back", "it answered {text}");
        back.push(crashed.elapsed());
        if turn % CRASHES_WITHOUT_DELAY == 0 {
            server.request("POST", &format!("{SERVERS}/fragile/restart"), None).await.ok();
        }
        if turn % options.times.div_ceil(SAMPLES) == 0 {
            let now = process_usage(server.pid())?;
            let processes = server.mcp_server("fragile").await["usage"]["processes"].clone();
            ensure!(processes == 1, "{processes} processes run in the sandbox");
            let ProcessUsage { mebibytes, files, threads } = now;
            let elapsed = begun.elapsed().as_secs_f64();
            eprintln!(
                "{elapsed:6.1} s  {turn} crashes: server {mebibytes:.1} MiB, {files} files, {threads} threads"
            );
            let first = *first.get_or_insert(now);
            ensure!(files <= first.files + 4, "files are left open: {} before, {files} now", first.files);
        }
    }
    server.remove_mcp("fragile").await;
    server.terminate();
    let left = server.leftovers();
    let summary = Summary::of_durations(&back).context("no crash")?;
    let mut out = std::io::stdout().lock();
    let show = |time: f64| Unit::Milliseconds.show(time);
    writeln!(
        out,
        "{} crashes; ready again after p50 {}, p99 {}, max {}; {} left",
        options.times,
        show(summary.p50),
        show(summary.p99),
        show(summary.max),
        left.len()
    )?;
    left.iter().try_for_each(|leftover| writeln!(out, "left: {leftover}"))?;
    let is_in_time = summary.max < Duration::from_secs(5).as_secs_f64() * 1e3;
    Ok(if left.is_empty() && is_in_time { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
