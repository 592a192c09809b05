//! Errors as callers see them: each error of a domain module gets its code, and a text that says what to do next.
//!
//! Domain modules return their own errors (`workspace::error`, `tools::error`, …) and know neither codes nor routes. The fronts
//! (REST, MCP) convert them here with [`ErrorDetail::from`], and the audit log takes its codes from here. `http/error.rs` makes a
//! status of a code.

use emergent_guest_client::CallError;
use emergent_providers::ProviderError;
use emergent_store::StoreError;
use emergent_wire::workspace::{RejectedCandidate, WorkspaceStatus};
use emergent_wire::{ErrorCode, ErrorDetail};
use serde_json::{Value, json};

use crate::tools::ToolError;
use crate::workspace::WorkspaceError;
use crate::workspace::error::{SandboxLost, SnapshotError};

impl From<ToolError> for ErrorDetail {
    fn from(error: ToolError) -> Self {
        match error {
            ToolError::Workspace(error) => error.into(),
            ToolError::Invalid(detail) => detail,
            ToolError::TooManyLargeFiles => Self::new(code_of_tool(&error), format!("{error}: retry later")),
            error => Self::new(code_of_tool(&error), error.to_string()),
        }
    }
}

/// The code of a tool's error.
pub(crate) fn code_of_tool(error: &ToolError) -> ErrorCode {
    match error {
        ToolError::NotAllowed { .. } => ErrorCode::Forbidden,
        ToolError::Unreadable(_) | ToolError::NotBase64(_) => ErrorCode::BadRequest,
        ToolError::Invalid(detail) => detail.code,
        ToolError::ContentTooLarge { .. } => ErrorCode::TooLarge,
        ToolError::TooManyLargeFiles => ErrorCode::Unavailable,
        ToolError::ClientGone => ErrorCode::Cancelled,
        ToolError::Unwritable(_) => ErrorCode::Internal,
        ToolError::Workspace(error) => code_of_workspace(error),
    }
}

impl From<WorkspaceError> for ErrorDetail {
    fn from(error: WorkspaceError) -> Self {
        match error {
            WorkspaceError::Store(error) => of_store(&error),
            WorkspaceError::Call(CallError::Failed(detail)) | WorkspaceError::Invalid(detail) => detail,
            WorkspaceError::Checkout(error) => WorkspaceError::Call(error.0).into(),
            WorkspaceError::ProviderFailed { provider, error } => {
                let mut detail = Self::from(*error);
                detail.details.get_or_insert_with(|| json!({ "provider": provider }));
                detail
            }
            WorkspaceError::AllProvidersFailed(failures) => of_failures(failures),
            WorkspaceError::NotUndone { .. } => {
                let message = error.to_string();
                let WorkspaceError::NotUndone { error, .. } = error else { unreachable!() };
                Self { message, ..Self::from(*error) }
            }
            error => Self {
                code: code_of_workspace(&error),
                message: format!("{error}{}", advice_for(&error)),
                details: details_of(&error),
            },
        }
    }
}

/// The code of a workspace's error.
pub(crate) fn code_of_workspace(error: &WorkspaceError) -> ErrorCode {
    match error {
        WorkspaceError::Store(error) => code_of_store(error),
        WorkspaceError::Provider(error) | WorkspaceError::NotRestarted { error, .. } => {
            code_of_provider(error)
        }
        WorkspaceError::Call(error) => code_of_call(error),
        WorkspaceError::Checkout(error) => code_of_call(&error.0),
        WorkspaceError::Invalid(detail) | WorkspaceError::Placement(detail) => detail.code,
        WorkspaceError::ProviderDisabled(_) => ErrorCode::Unavailable,
        WorkspaceError::NoSandbox | WorkspaceError::WrongState { .. } => ErrorCode::WrongState,
        WorkspaceError::IsMcpServer(_) | WorkspaceError::CreatesMcpServer => ErrorCode::Unacceptable,
        WorkspaceError::Held { .. } | WorkspaceError::ChangedElsewhere(_) => ErrorCode::Conflict,
        WorkspaceError::NoAnswer(_) => ErrorCode::DeadlineExceeded,
        WorkspaceError::FileTooLarge { .. } => ErrorCode::TooLarge,
        WorkspaceError::EndedAtStart | WorkspaceError::SandboxLost(_) => ErrorCode::SandboxLost,
        WorkspaceError::ProviderFailed { error, .. } | WorkspaceError::NotUndone { error, .. } => {
            code_of_workspace(error)
        }
        WorkspaceError::AllProvidersFailed(failures) => code_of_failures(failures),
        WorkspaceError::HostDiskFull(_) => ErrorCode::HostDiskFull,
        WorkspaceError::Snapshot(error) => match error {
            SnapshotError::NotReady { .. }
            | SnapshotError::NotQuarantined { .. }
            | SnapshotError::InProgress(_) => ErrorCode::WrongState,
            SnapshotError::NotSupported(_)
            | SnapshotError::NoMemory(_)
            | SnapshotError::FixedLimits(_)
            | SnapshotError::SmallerDisk { .. } => ErrorCode::Unacceptable,
        },
    }
}

/// The next step for the caller, as the end of the sentence.
fn advice_for(error: &WorkspaceError) -> String {
    let advice = match error {
        WorkspaceError::NoSandbox => ": wait until it is ready",
        WorkspaceError::WrongState { status, .. } => return format!(": {}", advice_for_status(*status)),
        WorkspaceError::IsMcpServer(id) => return format!(": use /api/v1/mcp/servers/{id}"),
        WorkspaceError::CreatesMcpServer => ": use POST /api/v1/mcp/servers",
        WorkspaceError::Held { .. } => ": wait until it detaches, or detach it with force",
        WorkspaceError::ChangedElsewhere(_) => ": retry in a moment",
        WorkspaceError::Call(CallError::Lost(_)) => {
            "; the call may have had effects: look before you repeat it"
        }
        WorkspaceError::EndedAtStart => ": try again",
        WorkspaceError::HostDiskFull(_) => {
            ". Nothing was changed; destroy workspaces or snapshots that are not needed, then retry"
        }
        WorkspaceError::Snapshot(SnapshotError::NotSupported(_)) => " (see GET …/providers)",
        WorkspaceError::Snapshot(SnapshotError::NoMemory(_)) => {
            " (see GET …/providers): leave `memory` out to copy the files"
        }
        WorkspaceError::Snapshot(SnapshotError::InProgress(_)) => ": wait until it is ready",
        WorkspaceError::Snapshot(SnapshotError::FixedLimits(_)) => "; leave them out",
        _ => "",
    };
    advice.to_owned()
}

/// The way out of a status that does not allow the request.
fn advice_for_status(status: WorkspaceStatus) -> &'static str {
    match status {
        WorkspaceStatus::Creating => "wait until it is ready",
        WorkspaceStatus::Stopping => "wait until it is stopped, then resume it",
        WorkspaceStatus::Stopped => "resume it first (POST …/resume)",
        WorkspaceStatus::Destroying => "it is being removed; create a new one",
        WorkspaceStatus::Ready => "it is in use",
        WorkspaceStatus::Error => {
            "see metadata.error; destroy it, or try a tool call, which tries to revive it"
        }
    }
}

fn details_of(error: &WorkspaceError) -> Option<Value> {
    Some(match error {
        WorkspaceError::Placement(detail) => return detail.details.clone(),
        WorkspaceError::WrongState { status, .. } => json!({ "status": status }),
        WorkspaceError::Held { holder, .. } => json!({ "attached_to": holder }),
        WorkspaceError::SandboxLost(SandboxLost::EndedByServer(reason)) => json!({ "reason": reason }),
        WorkspaceError::SandboxLost(SandboxLost::Ended { reason, out_of_memory }) => {
            json!({ "reason": reason, "oom_killed": out_of_memory })
        }
        _ => return None,
    })
}

/// One error for the failures of all candidates. A reason that they have in common is said once.
fn of_failures(failures: Vec<(RejectedCandidate, WorkspaceError)>) -> ErrorDetail {
    let code = code_of_failures(&failures);
    let message = WorkspaceError::AllProvidersFailed(failures);
    let WorkspaceError::AllProvidersFailed(failures) = &message else { unreachable!() };
    let candidates: Vec<&RejectedCandidate> = failures.iter().map(|(candidate, _)| candidate).collect();
    let details = json!({ "candidates": candidates });
    let is_common = |reason: &str| candidates.iter().all(|candidate| candidate.reason == reason);
    match candidates.first() {
        Some(first) if is_common(&first.reason) => ErrorDetail::new(code, first.reason.clone()),
        _ => ErrorDetail::new(code, message.to_string()),
    }
    .with_details(details)
}

/// The code that all failures have in common.
fn code_of_failures(failures: &[(RejectedCandidate, WorkspaceError)]) -> ErrorCode {
    let mut codes = failures.iter().map(|(_, error)| code_of_workspace(error));
    let first = codes.next().unwrap_or(ErrorCode::ProviderFailed);
    if codes.all(|code| code == first) { first } else { ErrorCode::ProviderFailed }
}

/// An error of the store. Faults of the database are logged here.
pub(crate) fn of_store(error: &StoreError) -> ErrorDetail {
    let code = code_of_store(error);
    let message = match error {
        StoreError::NotFound { kind, .. } => {
            format!("{error}: list what there is with GET /api/v1/{}", path_of(kind))
        }
        StoreError::LimitReached { .. } => {
            format!("{error}: destroy workspaces that are not needed, or wait until one is")
        }
        StoreError::WrongState { status, .. } => format!("{error}: {}", advice_for_status(*status)),
        StoreError::Unavailable(source) => {
            tracing::warn!(error = %source, "the database does not answer");
            format!("{error}: retry later")
        }
        StoreError::Unwritable(source) => {
            tracing::error!(error = %source, "the database can't be written");
            format!("{error}; nothing was changed; make it writable or free space, then retry")
        }
        error if code == ErrorCode::Internal => {
            tracing::error!(error = error as &dyn std::error::Error, "the store failed");
            format!("{error}; the server's log has more")
        }
        error => error.to_string(),
    };
    let details = match error {
        StoreError::LimitReached { limit, current } => Some(json!({ "limit": limit, "current": current })),
        StoreError::WrongState { status, .. } => Some(json!({ "status": status })),
        _ => None,
    };
    ErrorDetail { code, message, details }
}

/// The same, for [`Result::map_err`].
pub(crate) fn error_of(error: StoreError) -> ErrorDetail {
    WorkspaceError::from(error).into()
}

fn code_of_store(error: &StoreError) -> ErrorCode {
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

fn path_of(kind: &str) -> &'static str {
    match kind {
        "token" => "tokens",
        "snapshot" => "agent/workspaces/snapshots",
        "MCP server" => "mcp/servers",
        _ => "agent/workspaces",
    }
}

fn code_of_provider(error: &ProviderError) -> ErrorCode {
    match error {
        ProviderError::Unavailable(_) => ErrorCode::Unavailable,
        ProviderError::Unacceptable(_) => ErrorCode::Unacceptable,
        ProviderError::NoRoom(_) => ErrorCode::HostDiskFull,
        ProviderError::TimedOut { .. } => ErrorCode::DeadlineExceeded,
        ProviderError::NotRunning(_)
        | ProviderError::Gone(_)
        | ProviderError::Unresponsive(_)
        | ProviderError::Failed { .. } => ErrorCode::ProviderFailed,
    }
}

fn code_of_call(error: &CallError) -> ErrorCode {
    match error {
        CallError::Failed(detail) => detail.code,
        CallError::AgentTooOld(_) => ErrorCode::WrongState,
        CallError::Lost(_) | CallError::Garbled(_) => ErrorCode::SandboxLost,
    }
}
