//! Requests and answers of the seven tools, the same over REST, the command line, MCP and the guest channel.
//!
//! Every request refuses unknown fields, so that a typo never passes silently. `file_path` may be written
//! `path` everywhere. Paths are absolute or relative to `/workspace`.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::error::{ErrorCode, ErrorDetail};
use crate::id::OperationId;

/// Where relative paths start and where a workspace's files live.
pub const WORKSPACE_DIR: &str = "/workspace";
/// Where the guest agent keeps what it must not lose: saved output of commands.
pub const OUTPUT_DIR: &str = "/workspace/.emergent/output";
/// How much of each output stream an answer of bash holds; more is cut in the middle.
pub const MAX_STREAM_BYTES: usize = 50 * 1024;
/// How much text an answer of read holds.
pub const MAX_READ_BYTES: usize = 50 * 1024;
/// How many characters of one line read and grep show.
pub const MAX_LINE_CHARS: usize = 2000;
/// The largest file that write makes, edit changes, and read hands out raw.
pub const MAX_FILE_BYTES: u64 = 64 << 20;
/// The largest command of bash, and the largest string of edit.
pub const MAX_TEXT_BYTES: usize = 1 << 20;
/// The longest path the kernel takes.
pub const MAX_PATH_BYTES: usize = 4095;
/// Lines an answer of read holds when the caller does not say.
pub const DEFAULT_READ_LINES: u64 = 2000;
/// Entries an answer of glob or grep holds when the caller does not say.
pub const DEFAULT_MATCHES: u32 = 100;
/// The most entries that can be asked for.
pub const MAX_MATCHES: u32 = 10_000;
/// How long a command runs when the caller does not say.
pub const DEFAULT_TIMEOUT_MS: u64 = 120_000;
/// The longest a command in the foreground may run.
pub const MAX_TIMEOUT_MS: u64 = 600_000;
/// The longest a command in the background may run when a time-out is given; without one it may run for ever.
pub const MAX_BACKGROUND_TIMEOUT_MS: u64 = 7 * 24 * 3_600_000;
/// How long a command that is told to end (SIGTERM) has until it is killed (SIGKILL).
pub const TERMINATE_GRACE_MS: u64 = 5_000;
/// Variables one call may set.
pub const MAX_ENVIRONMENT_ENTRIES: usize = 256;

/// The seven tools.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)]
pub enum Tool {
    Bash,
    Read,
    Write,
    Edit,
    Glob,
    Grep,
    Git,
}

impl Tool {
    /// All tools, in the order in which they are documented.
    pub const ALL: [Tool; 7] =
        [Tool::Bash, Tool::Read, Tool::Write, Tool::Edit, Tool::Glob, Tool::Grep, Tool::Git];

    /// The tool's name in addresses, requests and logs.
    pub const fn as_str(self) -> &'static str {
        match self {
            Tool::Bash => "bash",
            Tool::Read => "read",
            Tool::Write => "write",
            Tool::Edit => "edit",
            Tool::Glob => "glob",
            Tool::Grep => "grep",
            Tool::Git => "git",
        }
    }
}

/// Runs a command with bash (or sh where the image has no bash).
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct BashRequest {
    /// The command, as one would type it. Its standard input is empty.
    pub command: String,
    /// Where it runs; `/workspace` unless given.
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

/// What became of a command.
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
    /// How long the command ran.
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
    /// What the caller should know besides: saved output incomplete, out of memory, and the like.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
    /// The operation's id.
    pub operation_id: OperationId,
}

/// Where a command in the background stands.
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
    /// Where it stands.
    pub status: OperationStatus,
    /// The exit code, once it exited by itself.
    pub exit_code: Option<i32>,
    /// The signal that ended it, if one did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub signal: Option<String>,
    /// How long it ran or has been running.
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
    /// What the caller should know besides.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
}

/// Reads a file (as numbered lines, or raw) or lists a directory.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct ReadRequest {
    /// The file or directory.
    #[serde(alias = "path")]
    pub file_path: String,
    /// The first line to show, from 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub offset: Option<u64>,
    /// How many lines to show; 2000 unless given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<u64>,
    /// Give the exact bytes, base64, instead of numbered lines.
    #[serde(default)]
    pub raw: bool,
}

/// A file's lines, a directory's entries, or a file's bytes.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ReadAnswer {
    /// Lines as `N: text`; entries one a line with `/` after directories; base64 when raw; empty for a binary file.
    pub content: String,
    /// Lines of the file, or entries of the directory. Null for a file too large to count (over 256 MiB).
    pub total_lines: Option<u64>,
    /// The file's size in bytes.
    pub file_size: u64,
    /// Whether the path is a directory.
    pub is_dir: bool,
    /// Whether the file is binary.
    pub is_binary: bool,
    /// Whether there is more than this answer shows.
    pub truncated: bool,
    /// SHA-256 of the whole file, for `expected_sha256` of edit. Null for directories and files over 256 MiB.
    pub sha256: Option<String>,
    /// What kind of file it is, when binary or raw.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub media_type: Option<String>,
    /// The line to pass as `offset` to read on, when truncated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_offset: Option<u64>,
    /// How to go on, in words.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

/// How `content` of write is written in JSON.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum ContentEncoding {
    /// Text.
    #[default]
    #[serde(rename = "utf-8", alias = "utf8")]
    Utf8,
    /// Base64 (standard alphabet, padded) of any bytes.
    #[serde(rename = "base64")]
    Base64,
}

/// Writes a whole file.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct WriteRequest {
    /// The file; missing directories above it are made.
    #[serde(alias = "path")]
    pub file_path: String,
    /// What the file shall hold, at most 64 MiB.
    pub content: String,
    /// How `content` is written here.
    #[serde(default)]
    pub encoding: ContentEncoding,
}

/// A file was written.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct WriteAnswer {
    /// Always true: a failure is an error.
    pub success: bool,
    /// The file's absolute path.
    pub file_path: String,
    /// Its size now.
    pub bytes_written: u64,
    /// Whether it is new.
    pub created: bool,
    /// SHA-256 of what it holds now.
    pub sha256: String,
}

/// Replaces a piece of text in a file.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct EditRequest {
    /// The file.
    #[serde(alias = "path")]
    pub file_path: String,
    /// What to replace. Empty: make a new file out of `new_string`.
    pub old_string: String,
    /// What to put there.
    pub new_string: String,
    /// Replace every occurrence instead of insisting on exactly one.
    #[serde(default)]
    pub replace_all: bool,
    /// Refuse (409) unless the file has this SHA-256 now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expected_sha256: Option<String>,
}

/// A file was edited.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct EditAnswer {
    /// Always true: a failure is an error.
    pub success: bool,
    /// Lines that were added or removed, whichever is more in each place, summed.
    pub lines_changed: u64,
    /// Occurrences replaced.
    pub replacements: u64,
    /// What changed, as a unified diff (cut at 50 KiB).
    pub diff: String,
    /// Which matcher found `old_string`: `exact`, `line_trimmed`, ….
    pub matched_by: String,
    /// SHA-256 of the file now.
    pub sha256: String,
}

/// Finds files by name.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct GlobRequest {
    /// A glob such as `**/*.ts` or `src/{a,b}/*.rs`, relative to `path`.
    pub pattern: String,
    /// The directory to search; `/workspace` unless given.
    #[serde(default, alias = "file_path", skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// How many paths to give; 100 unless given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<u32>,
}

/// Files found by name, newest first.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct GlobAnswer {
    /// Absolute paths, newest first.
    pub matches: Vec<String>,
    /// How many `matches` holds.
    pub count: u64,
    /// Whether more files matched.
    pub truncated: bool,
}

/// Searches file contents with a regular expression (ripgrep's engine).
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct GrepRequest {
    /// The regular expression.
    pub pattern: String,
    /// The file or directory to search; `/workspace` unless given.
    #[serde(default, alias = "file_path", skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// Only files whose name or path matches this glob, such as `*.rs`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub include: Option<String>,
    /// How many matching lines to give; 100 unless given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<u32>,
    /// Ignore the case of letters.
    #[serde(default)]
    pub ignore_case: bool,
    /// Lines of context to show around each match (at most 50).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub context: Option<u32>,
}

/// One matching line.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct GrepMatch {
    /// The file's absolute path.
    pub file_path: String,
    /// The line's number, from 1.
    pub line_number: u64,
    /// The line without its end, cut at 2000 characters.
    pub line: String,
    /// Lines before it, when context was asked for.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub before: Vec<String>,
    /// Lines after it, when context was asked for.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub after: Vec<String>,
}

/// Matching lines, by path and line.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct GrepAnswer {
    /// The matches, sorted by path, then line.
    pub matches: Vec<GrepMatch>,
    /// Whether there are more.
    pub truncated: bool,
    /// Files that could not be searched, with the reason (at most 20).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub skipped: Vec<String>,
}

/// Refuses a path that no file can have.
pub fn check_path(field: &str, path: &str) -> Result<(), ErrorDetail> {
    let problem = if path.is_empty() {
        "is empty"
    } else if path.contains('\0') {
        "contains a NUL byte"
    } else if path.len() > MAX_PATH_BYTES {
        "is longer than 4095 bytes"
    } else {
        return Ok(());
    };
    Err(ErrorDetail::new(
        ErrorCode::InvalidPath,
        format!("{field} {problem}: give an absolute path, or one relative to {WORKSPACE_DIR}"),
    ))
}

/// Refuses variables that no process can have.
pub fn check_environment(environment: &BTreeMap<String, String>) -> Result<(), ErrorDetail> {
    let refuse = |message: String| Err(ErrorDetail::new(ErrorCode::BadRequest, message));
    if environment.len() > MAX_ENVIRONMENT_ENTRIES {
        return refuse(format!("environment has more than {MAX_ENVIRONMENT_ENTRIES} variables"));
    }
    for (name, value) in environment {
        let valid_name = name.bytes().enumerate().all(|(index, byte)| {
            byte == b'_' || byte.is_ascii_alphabetic() || (index > 0 && byte.is_ascii_digit())
        });
        if name.is_empty() || name.len() > 256 || !valid_name {
            return refuse(format!(
                "environment: '{}' is not a variable name (letters, digits and _, not starting with a digit)",
                name.escape_debug().take(64).collect::<String>()
            ));
        }
        if value.contains('\0') || value.len() > 64 * 1024 {
            return refuse(format!("environment: the value of {name} has a NUL byte or is over 64 KiB"));
        }
    }
    Ok(())
}

fn check_range(field: &str, value: Option<u64>, least: u64, most: u64) -> Result<(), ErrorDetail> {
    match value {
        Some(value) if value < least || value > most => Err(ErrorDetail::new(
            ErrorCode::BadRequest,
            format!("{field} is {value}: it must be from {least} to {most}"),
        )),
        _ => Ok(()),
    }
}

fn check_text(field: &str, text: &str) -> Result<(), ErrorDetail> {
    if text.len() > MAX_TEXT_BYTES {
        return Err(ErrorDetail::new(
            ErrorCode::TooLarge,
            format!("{field} has {} bytes: at most {MAX_TEXT_BYTES} are allowed", text.len()),
        ));
    }
    Ok(())
}

impl BashRequest {
    /// Checks ranges and lengths.
    pub fn validate(&self) -> Result<(), ErrorDetail> {
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

    /// The time-out that applies; none for a command in the background that did not ask for one.
    pub fn effective_timeout_ms(&self) -> Option<u64> {
        match (self.timeout_ms, self.background) {
            (Some(timeout_ms), _) => Some(timeout_ms),
            (None, true) => None,
            (None, false) => Some(DEFAULT_TIMEOUT_MS),
        }
    }
}

impl ReadRequest {
    /// Checks ranges and lengths.
    pub fn validate(&self) -> Result<(), ErrorDetail> {
        check_path("file_path", &self.file_path)?;
        check_range("offset", self.offset, 1, u64::MAX)?;
        check_range("limit", self.limit, 1, 1_000_000)?;
        if self.raw && (self.offset.is_some() || self.limit.is_some()) {
            return Err(ErrorDetail::new(
                ErrorCode::BadRequest,
                "raw gives the whole file: leave offset and limit out",
            ));
        }
        Ok(())
    }
}

impl WriteRequest {
    /// Checks the path; the content's size is checked where it is decoded.
    pub fn validate(&self) -> Result<(), ErrorDetail> {
        check_path("file_path", &self.file_path)
    }
}

impl EditRequest {
    /// Checks ranges and lengths.
    pub fn validate(&self) -> Result<(), ErrorDetail> {
        check_path("file_path", &self.file_path)?;
        check_text("old_string", &self.old_string)?;
        check_text("new_string", &self.new_string)?;
        if let Some(sha256) = &self.expected_sha256
            && (sha256.len() != 64 || !sha256.bytes().all(|b| b.is_ascii_hexdigit()))
        {
            return Err(ErrorDetail::new(
                ErrorCode::BadRequest,
                "expected_sha256 must be 64 hexadecimal digits, as read returns them",
            ));
        }
        Ok(())
    }
}

fn check_pattern(pattern: &str) -> Result<(), ErrorDetail> {
    if pattern.is_empty() || pattern.contains('\0') || pattern.len() > 64 * 1024 {
        return Err(ErrorDetail::new(
            ErrorCode::InvalidPattern,
            "pattern is empty, has a NUL byte or is over 64 KiB",
        ));
    }
    Ok(())
}

impl GlobRequest {
    /// Checks ranges and lengths.
    pub fn validate(&self) -> Result<(), ErrorDetail> {
        check_pattern(&self.pattern)?;
        if let Some(path) = &self.path {
            check_path("path", path)?;
        }
        check_range("limit", self.limit.map(u64::from), 1, u64::from(MAX_MATCHES))
    }
}

impl GrepRequest {
    /// Checks ranges and lengths.
    pub fn validate(&self) -> Result<(), ErrorDetail> {
        check_pattern(&self.pattern)?;
        if let Some(path) = &self.path {
            check_path("path", path)?;
        }
        check_range("limit", self.limit.map(u64::from), 1, u64::from(MAX_MATCHES))?;
        check_range("context", self.context.map(u64::from), 0, 50)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_fields_are_refused() {
        assert!(serde_json::from_str::<BashRequest>(r#"{"command":"x","timeout":5}"#).is_err());
        assert!(serde_json::from_str::<ReadRequest>(r#"{"path":"x"}"#).is_ok());
        assert!(serde_json::from_str::<ReadRequest>(r#"{"path":"x","file_path":"y"}"#).is_err());
        assert!(serde_json::from_str::<GlobRequest>(r#"{"pattern":"*","file_path":"y"}"#).is_ok());
    }

    #[test]
    fn values_out_of_range_are_refused() {
        let bash = |timeout_ms, background| BashRequest {
            command: "true".into(),
            timeout_ms: Some(timeout_ms),
            background,
            ..Default::default()
        };
        assert!(bash(600_000, false).validate().is_ok());
        assert!(bash(600_001, false).validate().is_err());
        assert!(bash(600_001, true).validate().is_ok());
        assert!(bash(0, false).validate().is_err());
        assert!(BashRequest { command: " \n".into(), ..Default::default() }.validate().is_err());
        assert!(check_path("file_path", "a\0b").is_err());
        assert!(check_path("file_path", &"a".repeat(5000)).is_err());
        let variable = |name: &str| check_environment(&BTreeMap::from([(name.into(), "v".into())]));
        assert!(variable("PATH_2").is_ok());
        for name in ["", "2A", "A=B", "A B", "A\0"] {
            assert!(variable(name).is_err(), "{name:?}");
        }
    }
}
