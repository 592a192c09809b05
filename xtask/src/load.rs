//! `make load`: many concurrent workspaces, from create to destroy.
//!
//! Each round creates `--at-once` workspaces at the same time. Each runs its first command as soon as it is ready. After the last
//! command, all are destroyed at the same time. A failed call and a leftover are errors.

use std::io::Write;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use emergent_test_support::server::{Answer, POOL, TestServer, WORKSPACES};
use futures_util::future::join_all;
use serde_json::{Value, json};

use crate::bench::report::Unit;
use crate::bench::rows::idle::resident;
use crate::bench::session::release_binary;
use crate::bench::stats::Summary;
use crate::bench::table::{Align, render};

/// The number of printed samples of the server's memory.
const SAMPLES: usize = 10;

/// The options.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// The number of concurrent workspaces
    #[arg(long, value_name = "N", default_value_t = 50)]
    at_once: usize,
    /// The number of rounds; the server's memory is printed ten times
    #[arg(long, value_name = "N", default_value_t = 1)]
    rounds: usize,
    /// The provider
    #[arg(long, default_value = "gvisor")]
    provider: String,
    /// The number of spares at the start
    #[arg(long, value_name = "N", default_value_t = 0)]
    pool: usize,
}

/// The duration of each phase of each workspace.
#[derive(Default)]
struct Phases {
    create: Vec<Duration>,
    command: Vec<Duration>,
    both: Vec<Duration>,
    destroy: Vec<Duration>,
}

/// The memory, open files and threads of a process.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ProcessUsage {
    pub(crate) mebibytes: f64,
    pub(crate) files: usize,
    pub(crate) threads: usize,
}

/// Runs the load and prints its results.
pub(crate) fn run(options: &Options) -> Result<ExitCode> {
    ensure!(options.at_once > 0 && options.rounds > 0, "--at-once and --rounds must be at least 1");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(load(options))
}

async fn load(options: &Options) -> Result<ExitCode> {
    let limit = (options.at_once + 1).to_string();
    let environment = [("EMERGENT_ALLOW_DOCKER", "true"), ("WORKSPACE_MAX_CONCURRENT", &limit)];
    let mut server = TestServer::start_with(&release_binary()?, &environment).await;
    if options.pool > 0 {
        let shape =
            json!({ "size": options.pool, "provider": options.provider, "resource_limits": limits() });
        server.request("PUT", POOL, Some(json!({ "shapes": [shape] }))).await.ok();
        server.wait_for_pool(options.pool as u64).await;
    }
    let begun = Instant::now();
    let mut phases = Phases::default();
    let mut failures = Vec::new();
    let print_usage = |when: &str| -> Result<()> {
        let ProcessUsage { mebibytes, files, threads } = process_usage(server.pid())?;
        let elapsed = begun.elapsed().as_secs_f64();
        eprintln!("{elapsed:6.1} s  {when}: server {mebibytes:.1} MiB, {files} files, {threads} threads");
        Ok(())
    };
    print_usage("at start")?;
    for round in 1..=options.rounds {
        let created = join_all((0..options.at_once).map(|_| create_and_use(&server, options))).await;
        let mut ids = Vec::new();
        for one in created {
            match one {
                Ok((id, create, command)) => {
                    ids.push(id);
                    phases.create.push(create);
                    phases.command.push(command);
                    phases.both.push(create + command);
                }
                Err(error) => failures.push(format!("{error:#}")),
            }
        }
        let is_shown = round % options.rounds.div_ceil(SAMPLES) == 0;
        if is_shown {
            print_usage(&format!("round {round}, with {} workspaces", ids.len()))?;
        }
        for destroyed in join_all(ids.iter().map(|id| destroy(&server, id))).await {
            match destroyed {
                Ok(took) => phases.destroy.push(took),
                Err(error) => failures.push(format!("{error:#}")),
            }
        }
    }
    if options.pool > 0 {
        server.turn_pool_off().await;
    }
    print_usage("at the end")?;
    let mut left = rows_left(&server).await?;
    server.terminate();
    left.extend(server.leftovers());

    let mut out = std::io::stdout().lock();
    out.write_all(phases.table()?.as_bytes())?;
    let all = options.at_once * options.rounds;
    writeln!(out, "{all} created, {} failed, {} left", failures.len(), left.len())?;
    for failure in failures.iter().take(10) {
        writeln!(out, "failed: {failure}")?;
    }
    for leftover in &left {
        writeln!(out, "left: {leftover}")?;
    }
    Ok(if failures.is_empty() && left.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

impl Phases {
    fn table(&self) -> Result<String> {
        let columns = [
            ("phase", Align::Left),
            ("p50", Align::Right),
            ("p95", Align::Right),
            ("p99", Align::Right),
            ("max", Align::Right),
        ];
        let phases = [
            ("create", &self.create),
            ("first command", &self.command),
            ("create to first command", &self.both),
            ("destroy", &self.destroy),
        ];
        let mut rows = Vec::new();
        for (name, durations) in phases {
            let summary = Summary::of_durations(durations).with_context(|| format!("no {name} succeeded"))?;
            let times = [summary.p50, summary.p95, summary.p99, summary.max];
            let times = times.map(|time| Unit::Milliseconds.show(time));
            rows.push([name.to_owned()].into_iter().chain(times).collect());
        }
        Ok(render(&columns, &rows))
    }
}

/// The resource limits of each workspace.
fn limits() -> Value {
    json!({ "cpu": "1", "memory": "512M", "disk": "1G" })
}

/// Creates a workspace and runs its first command. Returns the id and both durations.
async fn create_and_use(server: &TestServer, options: &Options) -> Result<(String, Duration, Duration)> {
    let request = json!({
        "provider": options.provider,
        "warm_start": options.pool > 0,
        "resource_limits": limits(),
    });
    let begun = Instant::now();
    let created = success(server.request("POST", WORKSPACES, Some(request)).await)?;
    let create = begun.elapsed();
    let id = created["id"].as_str().context("no id")?.to_owned();
    let answer = server.tool(&id, "bash", json!({ "command": "echo $((6 * 7))" })).await;
    let command = begun.elapsed().saturating_sub(create);
    let answer = success(answer)?;
    ensure!(answer["stdout"] == "42\n", "the first command gave another output: {answer}");
    Ok((id, create, command))
}

/// Destroys a workspace and returns the duration.
pub(crate) async fn destroy(server: &TestServer, id: &str) -> Result<Duration> {
    let begun = Instant::now();
    success(server.request("DELETE", &format!("{WORKSPACES}/{id}"), None).await)?;
    Ok(begun.elapsed())
}

/// The body of a successful answer.
pub(crate) fn success(answer: Answer) -> Result<Value> {
    if !(200..300).contains(&answer.status) {
        bail!("{} {}", answer.status, answer.body);
    }
    Ok(answer.body)
}

/// The workspaces in the server's list.
async fn rows_left(server: &TestServer) -> Result<Vec<String>> {
    let list = success(server.request("GET", WORKSPACES, None).await)?;
    let items = list["workspaces"].as_array().context("a list of workspaces")?;
    Ok(items.iter().map(|item| format!("row {} ({})", item["id"], item["status"])).collect())
}

pub(crate) fn process_usage(pid: u32) -> Result<ProcessUsage> {
    let count = |what: &str| -> Result<usize> {
        let path = format!("/proc/{pid}/{what}");
        Ok(std::fs::read_dir(&path).context(path)?.count())
    };
    let mebibytes = resident(&std::fs::read_to_string(format!("/proc/{pid}/status"))?)?;
    Ok(ProcessUsage { mebibytes, files: count("fd")?, threads: count("task")? })
}
