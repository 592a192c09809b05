//! `make neighbours`: how much a fork bomb, a memory hog and a disk filler slow down the calls of another workspace.
//!
//! The attackers run side by side and start again whenever they are ended. The slowdown is the p95 of the neighbour's calls
//! beside them, divided by the p50 of the same calls before they begin.

use std::io::Write;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use emergent_test_support::microvm::Microvms;
use emergent_test_support::server::TestServer;
use serde_json::{Value, json};

use crate::bench::report::Unit;
use crate::bench::session::release_binary;
use crate::bench::stats::Summary;
use crate::bench::table::{Align, render};
use crate::load::{destroy, success};

/// The p95 beside the attackers may be this many times the p50 of a quiet host.
const MAX_SLOWDOWN: f64 = 10.0;
/// Destroying an attacker may take this long.
const MAX_DESTROY: Duration = Duration::from_secs(30);

const ATTACKERS: [(&str, &str); 3] = [
    ("fork bomb", ":(){ :|:& };:"),
    ("memory hog", "python3 -c 'all = []\nwhile True: all.append(bytearray(1 << 20))'"),
    ("disk filler", "head -c 100G /dev/zero > big; rm -f big"),
];

const CALLS: [(&str, &str); 2] = [("bash", r#"{"command":"true"}"#), ("read", r#"{"file_path":"file"}"#)];

/// How many calls, where.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Where the workspaces run: gvisor, docker or firecracker
    #[arg(long, default_value = "gvisor")]
    provider: String,
    /// Calls of each tool, on the quiet host and again beside the attackers
    #[arg(long, value_name = "N", default_value_t = 300)]
    calls: usize,
    /// Milliseconds between two calls
    #[arg(long, value_name = "MS", default_value_t = 20)]
    pause_ms: u64,
}

/// Runs the attackers, prints how slow the neighbour's calls were.
pub(crate) fn run(options: &Options) -> Result<ExitCode> {
    ensure!(options.calls > 0, "--calls must be at least 1");
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(measure(options))
}

async fn measure(options: &Options) -> Result<ExitCode> {
    let binary = release_binary()?;
    let server = if options.provider == "firecracker" {
        let microvms = Microvms::find_any(&binary).context("there is no Firecracker, and no double of it")?;
        microvms.start(&binary, &[]).await
    } else {
        TestServer::start_with(&binary, &[("EMERGENT_ALLOW_DOCKER", "true")]).await
    };
    let request = json!({
        "provider": options.provider,
        "network": "isolated",
        "resource_limits": { "cpu": "1", "memory": "512M", "disk": "1G" },
    });
    let neighbour = server.create(request.clone()).await;
    server.tool(&neighbour, "write", json!({ "file_path": "file", "content": "text\n" })).await.ok();
    call(&server, &neighbour, options).await?;
    let quiet = call(&server, &neighbour, options).await?;

    let mut attackers = Vec::new();
    for (name, _) in ATTACKERS {
        attackers.push((name, server.create(request.clone()).await));
    }
    let attacks =
        ATTACKERS.iter().zip(&attackers).map(|((_, command), (_, id))| attack(&server, id, command));
    let beside = tokio::select! {
        beside = call(&server, &neighbour, options) => beside?,
        _ = futures_util::future::join_all(attacks) => unreachable!("an attack never ends"),
    };

    let mut out = std::io::stdout().lock();
    let is_fast = report_calls(&mut out, &quiet, &beside)?;
    let mut is_in_time = true;
    // The attacks' calls have ended with the select: begin again, so that destroy meets attackers at work.
    for (index, (name, id)) in attackers.iter().enumerate() {
        let again = json!({ "command": endless(ATTACKERS[index].1), "background": true });
        server.tool(id, "bash", again).await;
        let took = destroy(&server, id).await?;
        is_in_time &= took < MAX_DESTROY;
        writeln!(out, "destroy of the {name}: {:.1} s", took.as_secs_f64())?;
    }
    destroy(&server, &neighbour).await?;
    server.stop();
    Ok(if is_fast && is_in_time { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn endless(command: &str) -> String {
    format!("while true; do {command}\ndone")
}

/// Attacks for ever. A command that is ended, or whose sandbox is started again, is followed by the next.
async fn attack(server: &TestServer, id: &str, command: &str) {
    loop {
        server.tool(id, "bash", json!({ "command": endless(command), "timeout_ms": 600_000 })).await;
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// How long each call of each tool took.
async fn call(server: &TestServer, id: &str, options: &Options) -> Result<[Vec<Duration>; 2]> {
    let mut times = [Vec::new(), Vec::new()];
    for _ in 0..options.calls {
        for ((tool, request), times) in CALLS.iter().zip(&mut times) {
            let request: Value = serde_json::from_str(request)?;
            let begun = Instant::now();
            success(server.tool(id, tool, request).await).context("a call of the neighbour failed")?;
            times.push(begun.elapsed());
            tokio::time::sleep(Duration::from_millis(options.pause_ms)).await;
        }
    }
    Ok(times)
}

/// Prints a line per tool; says whether all are within the limit.
fn report_calls(
    out: &mut impl Write,
    quiet: &[Vec<Duration>; 2],
    beside: &[Vec<Duration>; 2],
) -> Result<bool> {
    let columns = [
        ("neighbour's call", Align::Left),
        ("quiet p50", Align::Right),
        ("beside p50", Align::Right),
        ("beside p95", Align::Right),
        ("beside max", Align::Right),
        ("p95 / quiet p50", Align::Right),
    ];
    let mut rows = Vec::new();
    let mut is_fast = true;
    for ((tool, _), (quiet, beside)) in CALLS.iter().zip(quiet.iter().zip(beside)) {
        let quiet = Summary::of_durations(quiet).context("no calls")?;
        let beside = Summary::of_durations(beside).context("no calls")?;
        let slowdown = beside.p95 / quiet.p50;
        is_fast &= slowdown < MAX_SLOWDOWN;
        let times = [quiet.p50, beside.p50, beside.p95, beside.max].map(|time| Unit::Milliseconds.show(time));
        let ratio = format!("{slowdown:.1} (limit {MAX_SLOWDOWN})");
        rows.push([(*tool).to_owned()].into_iter().chain(times).chain([ratio]).collect());
    }
    out.write_all(render(&columns, &rows).as_bytes())?;
    Ok(is_fast)
}
