//! Errors of hosted MCP servers. They name the object and the cause, and the next step where it needs no address. The fronts add the
//! code and the advice with addresses (`http/error_text.rs`).

use emergent_guest_client::CallError;
use emergent_mcp_bridge::BridgeError;
use emergent_mcp_protocol::envelope::InvalidMessage;
use emergent_providers::ProviderError;
use emergent_store::StoreError;
use emergent_wire::WorkspaceId;
use emergent_wire::workspace::WorkspaceStatus;

use crate::workspace::WorkspaceError;

pub(crate) type Result<T, E = McpError> = std::result::Result<T, E>;

/// The error of an operation on a hosted MCP server.
#[derive(Debug, thiserror::Error)]
pub(crate) enum McpError {
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The error of its sandbox.
    #[error(transparent)]
    Workspace(#[from] WorkspaceError),
    /// No server has this id or name.
    #[error("there is no MCP server '{0}'")]
    NotFound(String),
    /// Its row is in a status in which it has no supervisor.
    #[error("the MCP server is {0}: try again in a moment")]
    NotSupervised(WorkspaceStatus),
    #[error("another server of this installation runs this MCP server: send the request to that server")]
    Elsewhere,
    /// Its sandbox or its program is not known yet.
    #[error("the MCP server is being started: try again in a moment")]
    Starting,
    /// Its supervisor has ended, because the MCP server is removed or this process shuts down.
    #[error("the supervisor of the MCP server has ended: try again in a moment")]
    SupervisorEnded,
    /// Neither the registration nor the image names a program.
    #[error("the image runs nothing by itself: register the server with a command")]
    NoProgram,
    /// A call without a session needs a server on stdio.
    #[error("this server speaks HTTP by itself")]
    SpeaksHttp(WorkspaceId),
    #[error(transparent)]
    InvalidMessage(#[from] InvalidMessage),
    /// The request did not reach the process.
    #[error(transparent)]
    NotSent(BridgeError),
    /// The request reached the process, which did not answer. The call may have had effects.
    #[error(transparent)]
    NotAnswered(BridgeError),
    /// The process ended while it had the request. The call may have had effects.
    #[error("the MCP server ended before it answered")]
    EndedBeforeAnswer,
}

impl McpError {
    /// Whether the server's row does not exist.
    pub(super) fn is_row_missing(&self) -> bool {
        matches!(
            self,
            Self::Store(StoreError::NotFound { .. })
                | Self::Workspace(WorkspaceError::Store(StoreError::NotFound { .. }))
        )
    }
}

impl From<ProviderError> for McpError {
    fn from(error: ProviderError) -> Self {
        Self::Workspace(error.into())
    }
}

impl From<CallError> for McpError {
    fn from(error: CallError) -> Self {
        Self::Workspace(error.into())
    }
}
