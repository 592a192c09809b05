//! Requests and answers of the tools, the same over REST, the command line, MCP and the guest channel.
//!
//! Every request refuses unknown fields, so that a typo never passes silently. `file_path` may be written
//! `path` everywhere. Paths are absolute or relative to `/workspace`.

mod bash;
mod files;
mod search;

use std::collections::BTreeMap;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::{ErrorCode, ErrorDetail};
use crate::validate::Validate;

pub use bash::{BashAnswer, BashOutcome, BashRequest, OperationAnswer, OperationStatus};
pub use files::{
    ContentEncoding, EditAnswer, EditRequest, ReadAnswer, ReadRequest, WriteAnswer, WriteRequest,
};
pub use search::{GlobAnswer, GlobRequest, GrepAnswer, GrepMatch, GrepRequest};

/// The directory of a workspace's files. Relative paths start here.
pub const WORKSPACE_DIR: &str = "/workspace";
/// The directory of the guest agent's programs.
pub const AGENT_DIR: &str = "/.emergent";
/// The name of the directory in which the guest agent keeps files in a workspace.
pub const AGENT_FILES: &str = ".emergent";
/// The directory in which the guest agent saves the output of commands.
pub const OUTPUT_DIR: &str = "/workspace/.emergent/output";
/// The most bytes of each output stream in an answer of bash; more is cut in the middle.
pub const MAX_STREAM_BYTES: usize = 50 * 1024;
/// The most bytes of text in an answer of read.
pub const MAX_READ_BYTES: usize = 50 * 1024;
/// The most characters of one line that read and grep show.
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
/// The time limit of a command unless the caller gives one.
pub const DEFAULT_TIMEOUT_MS: u64 = 120_000;
/// The longest a command in the foreground may run.
pub const MAX_TIMEOUT_MS: u64 = 600_000;
/// The longest a command in the background may run when a time-out is given; without one it may run for ever.
pub const MAX_BACKGROUND_TIMEOUT_MS: u64 = 7 * 24 * 3_600_000;
/// The time between SIGTERM and SIGKILL when a command is ended.
pub const TERMINATE_GRACE_MS: u64 = 5_000;
/// Variables one call may set.
pub const MAX_ENVIRONMENT_ENTRIES: usize = 256;

/// The request of one tool. The server's table of tools (`tools/` of the control plane) has an entry for each.
pub trait ToolRequest: Serialize + DeserializeOwned + Validate {
    /// The tool's name in paths, lists of tools and logs.
    const NAME: &'static str;
    /// The tool's answer.
    type Answer: Serialize + DeserializeOwned + Send;
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

pub(crate) fn check_range(field: &str, value: Option<u64>, least: u64, most: u64) -> Result<(), ErrorDetail> {
    match value {
        Some(value) if value < least || value > most => Err(ErrorDetail::new(
            ErrorCode::BadRequest,
            format!("{field} is {value}: it must be from {least} to {most}"),
        )),
        _ => Ok(()),
    }
}

pub(crate) fn check_text(field: &str, text: &str) -> Result<(), ErrorDetail> {
    if text.len() > MAX_TEXT_BYTES {
        return Err(ErrorDetail::new(
            ErrorCode::TooLarge,
            format!("{field} has {} bytes: at most {MAX_TEXT_BYTES} are allowed", text.len()),
        ));
    }
    Ok(())
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
