//! What is measured, one file for each topic.

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
    /// A command that does nothing, against docker exec
    Bash,
    /// A file of 10 KiB is read, against docker exec
    Read,
    /// A file of 10 KiB is written, against docker exec
    Write,
    /// A file of 10 KiB is edited, against docker exec
    Edit,
    /// A workspace is created, against docker run
    Create,
    /// A workspace is created from the warm pool, against one without
    Warm,
    /// A large tree is searched, against rg
    Grep,
    /// A tool of a hosted MCP server is called, against raw stdio and other bridges
    Mcp,
    /// What idle workspaces cost
    Idle,
    /// MicroVMs: started, made of a copy of memory, many at once, what each costs
    Microvm,
}

impl fmt::Display for Topic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.to_possible_value().as_ref().map_or("", |value| value.get_name()))
    }
}

impl Topic {
    /// The topics that were asked for in their usual order; all when none was.
    pub(crate) fn chosen(asked: &[Topic]) -> Vec<Topic> {
        let is_chosen = |topic: &&Topic| asked.is_empty() || asked.contains(topic);
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
