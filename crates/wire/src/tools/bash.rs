//! The request and the answers of bash, in the foreground and in the background.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{
    DEFAULT_TIMEOUT_MS, MAX_BACKGROUND_TIMEOUT_MS, MAX_TIMEOUT_MS, ToolRequest, check_environment,
    check_path, check_range, check_text,
};
use crate::error::{ErrorCode, ErrorDetail};
use crate::id::OperationId;
use crate::validate::Validate;

/// Runs a command with bash (or sh where the image has no bash).
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct BashRequest {
    /// The command, as one would type it. Its standard input is empty.
    pub command: String,
    /// The working directory; `/workspace` unless given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workdir: Option<String>,
    /// After this time the command gets SIGTERM, 5 s later SIGKILL. Default 120000, at most 600000 (in the
    /// background: no default, at most a week).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_ms: Option<u64>,
    /// Variables for this command alone, on top of the workspace's own.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub environment: BTreeMap<String, String>,
    /// Answer at once with an operation id; the command goes on.
    #[serde(default)]
    pub background: bool,
}

/// The result of a command that ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct BashAnswer {
    /// Standard output; over 50 KiB its head and tail with a note between them.
    pub stdout: String,
    /// Standard error, cut in the same way.
    pub stderr: String,
    /// The exit code; null when the command did not exit by itself (time-out, signal).
    pub exit_code: Option<i32>,
    /// The signal that ended the command, if one did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub signal: Option<String>,
    /// The run time of the command.
    pub duration_ms: u64,
    /// Whether stdout or stderr was cut.
    pub truncated: bool,
    /// All the bytes the command wrote to stdout.
    pub stdout_bytes: u64,
    /// All the bytes the command wrote to stderr.
    pub stderr_bytes: u64,
    /// The time-out ended the command.
    #[serde(default)]
    pub timed_out: bool,
    /// The command, or one of its children, was killed because the workspace ran out of memory.
    #[serde(default)]
    pub oom_killed: bool,
    /// The file in the workspace that holds all of stdout, when it was cut.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stdout_path: Option<String>,
    /// The file in the workspace that holds all of stderr, when it was cut.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stderr_path: Option<String>,
    /// Notes for the caller: saved output incomplete, out of memory, and the like.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
    /// The operation's id.
    pub operation_id: OperationId,
}

/// The status of a command in the background.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum OperationStatus {
    /// It runs.
    Running,
    /// It ended; `exit_code` or `signal` says how.
    Exited,
    /// The sandbox was stopped or died under it; how it would have ended is not known.
    Lost,
}

/// A command in the background, and its output from an offset on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct OperationAnswer {
    /// The operation's id.
    pub operation_id: OperationId,
    /// Its status.
    pub status: OperationStatus,
    /// The exit code, once it exited by itself.
    pub exit_code: Option<i32>,
    /// The signal that ended it, if one did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub signal: Option<String>,
    /// Its run time, until now if it still runs.
    pub duration_ms: u64,
    /// A time-out ended it.
    #[serde(default)]
    pub timed_out: bool,
    /// It, or one of its children, was killed because the workspace ran out of memory.
    #[serde(default)]
    pub oom_killed: bool,
    /// Standard output since `offset`.
    pub stdout: String,
    /// Standard error since `offset`.
    pub stderr: String,
    /// Pass this as `offset` to go on where this answer ends.
    pub next_offset: u64,
    /// Whether output beyond `next_offset` is there already.
    pub more: bool,
    /// Notes for the caller.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
}

/// The answer of bash.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum BashOutcome {
    /// The command has ended.
    Ended(BashAnswer),
    /// The command was started in the background.
    Started(OperationAnswer),
}

impl ToolRequest for BashRequest {
    const NAME: &'static str = "bash";
    type Answer = BashOutcome;
}

impl Validate for BashRequest {
    fn validate(&self) -> Result<(), ErrorDetail> {
        if self.command.trim().is_empty() {
            return Err(ErrorDetail::new(ErrorCode::BadRequest, "command is empty: give a command to run"));
        }
        if self.command.contains('\0') {
            return Err(ErrorDetail::new(ErrorCode::BadRequest, "command contains a NUL byte"));
        }
        check_text("command", &self.command)?;
        if let Some(workdir) = &self.workdir {
            check_path("workdir", workdir)?;
        }
        let most = if self.background { MAX_BACKGROUND_TIMEOUT_MS } else { MAX_TIMEOUT_MS };
        check_range("timeout_ms", self.timeout_ms, 1, most)?;
        check_environment(&self.environment)
    }
}

impl BashRequest {
    /// The time-out that applies; none for a command in the background that did not ask for one.
    pub fn effective_timeout_ms(&self) -> Option<u64> {
        match (self.timeout_ms, self.background) {
            (Some(timeout_ms), _) => Some(timeout_ms),
            (None, true) => None,
            (None, false) => Some(DEFAULT_TIMEOUT_MS),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_answers_are_told_apart_by_their_fields() {
        let id = OperationId::generate();
        let started = OperationAnswer {
            operation_id: id,
            status: OperationStatus::Running,
            exit_code: None,
            signal: None,
            duration_ms: 0,
            timed_out: false,
            oom_killed: false,
            stdout: String::new(),
            stderr: String::new(),
            next_offset: 0,
            more: false,
            notes: Vec::new(),
        };
        let ended = BashAnswer {
            stdout: String::new(),
            stderr: String::new(),
            exit_code: Some(0),
            signal: None,
            duration_ms: 0,
            truncated: false,
            stdout_bytes: 0,
            stderr_bytes: 0,
            timed_out: false,
            oom_killed: false,
            stdout_path: None,
            stderr_path: None,
            notes: Vec::new(),
            operation_id: id,
        };
        for outcome in [BashOutcome::Started(started), BashOutcome::Ended(ended)] {
            let json = serde_json::to_string(&outcome).unwrap();
            assert_eq!(serde_json::from_str::<BashOutcome>(&json).unwrap(), outcome);
        }
    }
}
