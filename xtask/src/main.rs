//! Tasks of the project: `cargo run -p xtask -- openapi`, `cargo run --release -p xtask -- bench`, `… -- load`.

mod bench;
mod crashes;
mod load;
mod neighbours;

use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};

/// Tasks of the project.
#[derive(Parser)]
#[command(name = "xtask", bin_name = "cargo run -p xtask --")]
struct Arguments {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Write openapi/*.json from the handlers
    Openapi,
    /// Measure the promises of SPECIFICATION.md as ratios on this machine
    Bench(bench::Options),
    /// Create, use and destroy many workspaces at once; print the durations and the leftovers
    Load(load::Options),
    /// Crash a hosted MCP server many times; print the times until it is back and the leftovers
    Crashes(crashes::Options),
    /// Run a fork bomb, a memory hog and a disk filler; print the slowdown of another workspace's calls
    Neighbours(neighbours::Options),
}

fn main() -> Result<ExitCode> {
    match Arguments::parse().task {
        Task::Openapi => write_openapi().map(|()| ExitCode::SUCCESS),
        Task::Bench(options) => bench::run(&options),
        Task::Load(options) => load::run(&options),
        Task::Crashes(options) => crashes::run(&options),
        Task::Neighbours(options) => neighbours::run(&options),
    }
}

/// Writes the OpenAPI documents to their checked-in files.
fn write_openapi() -> Result<()> {
    // The variable is read at run time, because a program that was compiled in one clone may run in another.
    let own = std::env::var("CARGO_MANIFEST_DIR").context("run it with cargo")?;
    for (name, text) in emergent_control_plane::openapi_documents() {
        let path = Path::new(&own).join("../openapi").join(name);
        std::fs::write(&path, text).with_context(|| path.display().to_string())?;
    }
    Ok(())
}
