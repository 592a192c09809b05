//! Errors of tool calls.

use emergent_wire::{ErrorDetail, WorkspaceId};

use crate::workspace::WorkspaceError;

/// The error of a tool call. The fronts add the code and the advice for callers (`http/error_text.rs`).
#[derive(Debug, thiserror::Error)]
pub(crate) enum ToolError {
    #[error("this token may not use the tool '{tool}' in workspace {workspace}")]
    NotAllowed { tool: &'static str, workspace: WorkspaceId },
    /// The arguments are not a request of the tool.
    #[error("{0}")]
    Unreadable(String),
    /// A value of the request is out of range, as the request's own type has found (`emergent_wire::Validate`).
    #[error(transparent)]
    Invalid(ErrorDetail),
    #[error("content is not base64: {0}")]
    NotBase64(base64::DecodeError),
    #[error("content has {bytes} bytes: at most {limit} can be written")]
    ContentTooLarge { bytes: usize, limit: u64 },
    #[error("too many large files are in transfer")]
    TooManyLargeFiles,
    #[error("the client has disconnected")]
    ClientGone,
    #[error("the answer can't be written as JSON: {0}")]
    Unwritable(#[source] serde_json::Error),
    #[error(transparent)]
    Workspace(#[from] WorkspaceError),
}
