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
    /// Write openapi/*.json anew from the handlers
    Openapi,
    /// Measure the promises of SPECIFICATION.md as ratios, here and now
    Bench(bench::Options),
    /// Create, use and destroy many workspaces at once; say how long it took and what is left
    Load(load::Options),
    /// Crash a hosted MCP server again and again; say how soon it is back and what is left
    Crashes(crashes::Options),
    /// Run a fork bomb, a memory hog and a disk filler; say how much slower another workspace's calls are
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

/// Writes the APIs' descriptions where they are checked in.
fn write_openapi() -> Result<()> {
    // Asked when it runs: what was compiled in one clone may run in another.
    let own = std::env::var("CARGO_MANIFEST_DIR").context("run it with cargo")?;
    for (name, text) in emergent_control_plane::openapi_documents() {
        let path = Path::new(&own).join("../openapi").join(name);
        std::fs::write(&path, text).with_context(|| path.display().to_string())?;
    }
    Ok(())
}
