//! The logs of hosted servers.

use serde::{Deserialize, Serialize};

use crate::names::names;

/// A line of a server's log.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct McpLogLine {
    /// Its number, from 1 on, without a gap.
    pub number: u64,
    /// `stderr`: the server wrote it. `supervisor`: it is about the server.
    pub source: McpLogSource,
    /// The text.
    pub text: String,
}

names!(
    /// The source of a line.
    McpLogSource {
        /// The server, to standard error.
        Stderr = "stderr",
        /// The server's supervisor.
        Supervisor = "supervisor",
    }
);

/// A server's log.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct McpLogs {
    /// The last lines, oldest first.
    pub lines: Vec<McpLogLine>,
}
