//! The tools of a workspace: one table of them, and one path that every call takes.
//!
//! ```text
//!  REST ───────────┐
//!  workspace MCP ──┼─▶ Tools::prepare ─────────────▶ PreparedCall::run ──────────────▶ ToolAnswer
//!  (other fronts) ─┘   authorise, parse, validate    run; audit and measure the end
//! ```
//!
//! A tool is a request type that implements [`Tool`]: its texts, its effect, how it runs, and how a model sees its answer.
//! **To add a tool**, write that type and one entry in [`standard`]. The REST path, the OpenAPI description, the MCP tool, the audit
//! entries and the metrics follow from the entry.
//!
//! Invariant: each call that reaches [`Tools::prepare`] has exactly one audit entry with its outcome, also when it is refused, fails, or
//! is dropped because its client disconnected. If its output is sent while it runs, an entry `started` comes before the output.

mod bash;
mod call;
mod error;
mod files;
mod git;
mod large_files;
#[cfg(test)]
mod read_tests;
mod search;
mod stream;
mod table;
mod text;

pub(crate) use bash::{MARGIN as COMMAND_MARGIN, OUTPUT_BYTES as COMMAND_OUTPUT_BYTES};
pub(crate) use call::{Output, PreparedCall, Tools};
pub(crate) use error::ToolError;
pub(crate) use stream::{RunningTool, ToolEvent};
pub(crate) use table::{Arguments, Effect, Shown, Streaming, ToolAnswer, ToolEntry, TypeSchema, standard};
pub(crate) use text::lossy;
#[cfg(test)]
pub(crate) use {
    call::ToolContext,
    table::{AnswerTypes, Tool},
};
