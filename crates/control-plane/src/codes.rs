//! The stable code of each domain error: for the fronts, which answer with it, and for the audit log.
//!
//! Domain modules return their own errors and know no codes. Texts for callers are in `http/error_text.rs`, the HTTP
//! status of a code is `ErrorCode::http_status`.

use emergent_mcp_bridge::BridgeError;
use emergent_store::StoreError;
use emergent_wire::ErrorCode;
use emergent_wire::workspace::RejectedCandidate;

use crate::mcp::McpError;
use crate::tools::ToolError;
use crate::workspace::WorkspaceError;
use crate::workspace::error::SnapshotError;

impl ToolError {
    /// The error's code.
    pub(crate) fn code(&self) -> ErrorCode {
        match self {
            Self::NotAllowed { .. } => ErrorCode::Forbidden,
            Self::Unreadable(_) | Self::NotBase64(_) => ErrorCode::BadRequest,
            Self::Invalid(detail) => detail.code,
            Self::ContentTooLarge { .. } => ErrorCode::TooLarge,
            Self::TooManyLargeFiles => ErrorCode::Unavailable,
            Self::ClientGone => ErrorCode::Cancelled,
            Self::Unwritable(_) => ErrorCode::Internal,
            Self::Workspace(error) => error.code(),
        }
    }
}

impl WorkspaceError {
    /// The error's code.
    pub(crate) fn code(&self) -> ErrorCode {
        match self {
            Self::Store(error) => of_store(error),
            Self::Provider(error) | Self::NotRestarted { error, .. } => error.code(),
            Self::Call(error) => error.code(),
            Self::Checkout(error) => error.0.code(),
            Self::Invalid(detail) => detail.code,
            Self::NoProvider(error) if error.is_permanent => ErrorCode::Unacceptable,
            Self::NoProvider(_) | Self::ProviderDisabled(_) => ErrorCode::Unavailable,
            Self::NoSandbox | Self::WrongState { .. } => ErrorCode::WrongState,
            Self::IsMcpServer(_) | Self::CreatesMcpServer => ErrorCode::Unacceptable,
            Self::Held { .. } | Self::ChangedElsewhere(_) => ErrorCode::Conflict,
            Self::NoAnswer(_) => ErrorCode::DeadlineExceeded,
            Self::FileTooLarge { .. } => ErrorCode::TooLarge,
            Self::EndedAtStart | Self::SandboxLost(_) => ErrorCode::SandboxLost,
            Self::ProviderFailed { error, .. } | Self::NotUndone { error, .. } => error.code(),
            Self::AllProvidersFailed(failures) => of_failures(failures),
            Self::HostDiskFull(_) => ErrorCode::HostDiskFull,
            Self::Snapshot(error) => of_snapshot(error),
            Self::Unwritable(_) => ErrorCode::Internal,
        }
    }
}

impl McpError {
    /// The error's code.
    pub(crate) fn code(&self) -> ErrorCode {
        match self {
            Self::Store(error) => of_store(error),
            Self::Workspace(error) => error.code(),
            Self::NotFound(_) => ErrorCode::NotFound,
            Self::NotSupervised(_) | Self::Elsewhere | Self::Starting | Self::SupervisorEnded => {
                ErrorCode::Unavailable
            }
            Self::NoProgram | Self::SpeaksHttp(_) => ErrorCode::Unacceptable,
            Self::InvalidMessage(_) => ErrorCode::BadRequest,
            // The call may have had effects.
            Self::NotAnswered(BridgeError::Down(_)) | Self::EndedBeforeAnswer => ErrorCode::SandboxLost,
            Self::NotSent(error) | Self::NotAnswered(error) => of_bridge(error),
        }
    }
}

/// The code of the store's error.
pub(crate) fn of_store(error: &StoreError) -> ErrorCode {
    match error {
        StoreError::NotFound { .. } => ErrorCode::NotFound,
        StoreError::LimitReached { .. } | StoreError::TooManyIdempotencyKeys { .. } => {
            ErrorCode::LimitReached
        }
        StoreError::WrongState { .. } => ErrorCode::WrongState,
        StoreError::Conflict { .. }
        | StoreError::LastAdminToken { .. }
        | StoreError::IdempotencyKeyReused => ErrorCode::Conflict,
        StoreError::BadIdempotencyKey | StoreError::BadCursor => ErrorCode::BadRequest,
        StoreError::TokenRefused(_) => ErrorCode::Unauthorized,
        StoreError::Unavailable(_) | StoreError::Unwritable(_) => ErrorCode::Unavailable,
        _ => ErrorCode::Internal,
    }
}

fn of_snapshot(error: &SnapshotError) -> ErrorCode {
    match error {
        SnapshotError::NotReady { .. }
        | SnapshotError::NotQuarantined { .. }
        | SnapshotError::InProgress(_) => ErrorCode::WrongState,
        SnapshotError::NotSupported(_)
        | SnapshotError::NoMemory(_)
        | SnapshotError::FixedLimits(_)
        | SnapshotError::SmallerDisk { .. } => ErrorCode::Unacceptable,
    }
}

/// The code that all failures have in common, else that of a failed provider.
fn of_failures(failures: &[(RejectedCandidate, WorkspaceError)]) -> ErrorCode {
    let mut codes = failures.iter().map(|(_, error)| error.code());
    let first = codes.next().unwrap_or(ErrorCode::ProviderFailed);
    if codes.all(|code| code == first) { first } else { ErrorCode::ProviderFailed }
}

fn of_bridge(error: &BridgeError) -> ErrorCode {
    match error {
        BridgeError::Down(_) | BridgeError::Refused(_) => ErrorCode::Unavailable,
        BridgeError::Busy => ErrorCode::LimitReached,
        BridgeError::DuplicateId => ErrorCode::Conflict,
        BridgeError::TimedOut(_) => ErrorCode::DeadlineExceeded,
        BridgeError::AnswerTooLong(_) => ErrorCode::ProviderFailed,
    }
}
