//! `make neighbours`: the slowdown of a workspace's calls beside a fork bomb, a memory hog and a disk filler.
//!
//! The attackers run at the same time, and start again when they are ended. The slowdown is the p95 of the neighbour's calls beside
//! the attackers, divided by the p50 of the same calls before the attacks.

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

/// The limit of the slowdown.
const MAX_SLOWDOWN: f64 = 10.0;
/// The time limit for destroying an attacker.
const MAX_DESTROY: Duration = Duration::from_secs(30);

const ATTACKERS: [(&str, &str); 3] = [
    ("fork bomb", ":(){ :|:& };:"),
    ("memory hog", "python3 -c 'all = []\nwhile True: all.append(bytearray(1 << 20))'"),
    ("disk filler", "head -c 100G /dev/zero > big; rm -f big"),
];

const CALLS: [(&str, &str); 2] = [("bash", r#"{"command":"true"}"#), ("read", r#"{"file_path":"file"}"#)];

/// The options.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// The provider: gvisor, docker or firecracker
    #[arg(long, default_value = "gvisor")]
    provider: String,
    /// The number of calls of each tool, on the quiet host and again beside the attackers
    #[arg(long, value_name = "N", default_value_t = 300)]
    calls: usize,
    /// The pause between two calls in milliseconds
    #[arg(long, value_name = "MS", default_value_t = 20)]
    pause_ms: u64,
}

/// Runs the attackers and prints the durations of the neighbour's calls.
pub(crate) fn run(options: &Options) -> Result<ExitCode> {
    ensure!(options.calls > 0, "--calls must be at least 1");
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(measure(options))
}

async fn measure(options: &Options) -> Result<ExitCode> {
    let binary = release_binary()?;
    let server = if options.provider == "firecracker" {
        let microvms =
            Microvms::find_any(&binary).context("neither Firecracker nor its double is installed")?;
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
    // The select has ended the calls of the attackers. They start again, so that each destroy has a running attacker.
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

/// Attacks forever. It starts the command again when it ends.
async fn attack(server: &TestServer, id: &str, command: &str) {
    loop {
        server.tool(id, "bash", json!({ "command": endless(command), "timeout_ms": 600_000 })).await;
        // The pause limits the rate of calls that fail at once.
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// The duration of each call of each tool.
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

/// Prints a line for each tool. Returns whether all slowdowns are below the limit.
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
