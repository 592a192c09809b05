//! `emergent`: the server, its client, and a doctor for the machine, in one binary.
//!
//! This file dispatches to the commands. A command returns its exit code. An error becomes one line on stderr and exit code 1.
//! clap exits with 2 for an invalid command line.
//!
//! ```text
//! args        the command line            workspace/  commands for workspaces and their tools
//! client/     the REST client             mcp/, snapshot, quarantine, pool, token, events, audit
//! sse         streamed answers            serve       the server
//! short_id    prefixes of ids             doctor/     checks of this machine
//! output, json, values, progress          formats and terminal output
//! ```

mod args;
mod audit;
mod client;
mod connection;
mod context;
mod doctor;
mod events;
mod firecracker_install;
mod firecracker_manager;
mod json;
mod mcp;
mod output;
mod pool;
mod progress;
mod quarantine;
mod serve;
mod short_id;
mod snapshot;
mod sse;
mod token;
mod values;
mod workspace;

use std::future::Future;
use std::process::ExitCode;

use anyhow::{Context as _, Result};
use clap::{CommandFactory, Parser};

use crate::args::{Cli, Command};
use crate::client::ApiError;
use crate::output::StdoutClosed;

/// The exit code of a program that SIGPIPE killed, as a shell reports it.
const EXIT_STDOUT_CLOSED: u8 = 141;

fn main() -> ExitCode {
    let cli = Cli::parse();
    let json = cli.command.wants_json();
    match run(cli.command) {
        Ok(code) => ExitCode::from(code),
        Err(error) if error.chain().any(|cause| cause.is::<StdoutClosed>()) => {
            ExitCode::from(EXIT_STDOUT_CLOSED)
        }
        Err(error) => {
            report(&error, json);
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> Result<u8> {
    match command {
        Command::Serve(args) => serve::run(&args),
        Command::Doctor(args) => block_on(doctor::run(args)),
        Command::Workspace(args) => block_on(workspace::run(args)),
        Command::Snapshot(args) => block_on(snapshot::run(args)),
        Command::Quarantine(args) => block_on(quarantine::run(args)),
        Command::Mcp(args) => block_on(mcp::run(args)),
        Command::Pool(args) => block_on(pool::run(args)),
        Command::Token(args) => block_on(token::run(args)),
        Command::Events(args) => block_on(events::run(args)),
        Command::Audit(args) => block_on(audit::run(args)),
        Command::Firecracker(args) => block_on(firecracker_install::run(args)),
        Command::FirecrackerManager(args) => firecracker_manager::run(&args),
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "emergent", &mut script);
            output::bytes(&script)?;
            Ok(0)
        }
    }
}

/// Runs a client command. One thread is enough for it, and starts faster.
fn block_on(work: impl Future<Output = Result<u8>>) -> Result<u8> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("can't start the runtime")?;
    let result = runtime.block_on(work);
    // A blocked thread, such as one that reads a hung file system, does not delay the exit.
    runtime.shutdown_background();
    result
}

/// Prints the error on stderr. With `--json` the server's error body goes to stdout.
fn report(error: &anyhow::Error, json: bool) {
    let refused = error.downcast_ref::<ApiError>();
    if let (true, Some(body)) = (json, refused.and_then(|refused| refused.body.as_ref())) {
        // A closed stdout changes nothing: the exit code reports the failure.
        let _ = output::line(json::pretty(body));
    }
    output::note(format_args!("error: {}", output::printable(&format!("{error:#}"))));
    if let Some(hint) = refused.and_then(|refused| refused.hint.as_ref()) {
        output::note(format_args!("hint: {hint}"));
    }
}
