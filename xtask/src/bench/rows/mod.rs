//! The measurements, with a file for each topic.

mod bash;
mod create;
mod files;
mod grep;
pub(crate) mod idle;
mod mcp;
mod microvm;
mod warm;

use std::fmt;

use anyhow::Result;
use clap::ValueEnum;

use super::report::Row;
use super::session::Session;

/// Rows that are measured together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub(crate) enum Topic {
    /// Runs the command `true`, against docker exec
    Bash,
    /// Reads a file of 10 KiB, against docker exec
    Read,
    /// Writes a file of 10 KiB, against docker exec
    Write,
    /// Edits a file of 10 KiB, against docker exec
    Edit,
    /// Creates a workspace, against docker run
    Create,
    /// Creates a workspace from the warm pool, against a cold create
    Warm,
    /// Searches a large tree, against rg
    Grep,
    /// Calls a tool of a hosted MCP server, against raw stdio and other bridges
    Mcp,
    /// The memory of idle workspaces
    Idle,
    /// MicroVMs: boot, memory snapshots, many at once, memory
    Microvm,
}

impl fmt::Display for Topic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.to_possible_value().as_ref().map_or("", |value| value.get_name()))
    }
}

impl Topic {
    /// The given topics in their usual order. All topics if none is given.
    pub(crate) fn chosen(given: &[Topic]) -> Vec<Topic> {
        let is_chosen = |topic: &&Topic| given.is_empty() || given.contains(topic);
        Self::value_variants().iter().filter(is_chosen).copied().collect()
    }

    /// Measures the topic's rows.
    pub(crate) async fn measure(self, session: &Session) -> Result<Vec<Row>> {
        match self {
            Topic::Bash => bash::measure(session).await,
            Topic::Read => files::read(session).await,
            Topic::Write => files::write(session).await,
            Topic::Edit => files::edit(session).await,
            Topic::Create => create::measure(session).await,
            Topic::Warm => warm::measure(session).await,
            Topic::Grep => grep::measure(session).await,
            Topic::Mcp => mcp::measure(session).await,
            Topic::Idle => idle::measure(session).await,
            Topic::Microvm => microvm::measure(session).await,
        }
    }
}
