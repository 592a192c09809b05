//! Texts of domain errors for callers: the error itself, and the next step. The domain knows no addresses of the REST API, so the
//! advice that names one is here. Conversions do not log ([`ApiError`](super::error::ApiError) does).

use emergent_guest_client::CallError;
use emergent_store::{RowKind, StoreError};
use emergent_wire::ErrorDetail;
use emergent_wire::workspace::{RejectedCandidate, WorkspaceStatus};
use serde_json::{Value, json};

use crate::codes;
use crate::mcp::McpError;
use crate::tools::ToolError;
use crate::workspace::WorkspaceError;
use crate::workspace::error::{SandboxLost, SnapshotError};

impl From<ToolError> for ErrorDetail {
    fn from(error: ToolError) -> Self {
        match error {
            ToolError::Workspace(error) => error.into(),
            ToolError::Invalid(detail) => detail,
            ToolError::TooManyLargeFiles => Self::new(error.code(), format!("{error}: retry later")),
            error => Self::new(error.code(), error.to_string()),
        }
    }
}

impl From<McpError> for ErrorDetail {
    fn from(error: McpError) -> Self {
        match error {
            McpError::Store(error) => of_store(&error),
            McpError::Workspace(error) => error.into(),
            error => Self::new(error.code(), format!("{error}{}", advice_for_mcp(&error))),
        }
    }
}

/// The next step for the caller, as the end of the sentence.
fn advice_for_mcp(error: &McpError) -> String {
    match error {
        McpError::NotFound(_) => ": list the MCP servers with GET /api/v1/mcp/servers".to_owned(),
        McpError::SpeaksHttp(id) => format!(": use its endpoint /api/v1/mcp/servers/{id}/mcp"),
        _ => String::new(),
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
                code: error.code(),
                message: format!("{error}{}", advice_for(&error)),
                details: details_of(&error),
            },
        }
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
            "; the call may have had effects: check before you repeat it"
        }
        WorkspaceError::EndedAtStart => ": try again",
        WorkspaceError::HostDiskFull(_) => {
            ". Nothing was changed; destroy workspaces or snapshots that are not needed, then retry"
        }
        WorkspaceError::Snapshot(error) => advice_for_snapshot(error),
        _ => "",
    };
    advice.to_owned()
}

fn advice_for_snapshot(error: &SnapshotError) -> &'static str {
    match error {
        SnapshotError::NotSupported(_) => " (see GET /api/v1/agent/workspaces/providers)",
        SnapshotError::NoMemory(_) => {
            " (see GET /api/v1/agent/workspaces/providers): leave `memory` out to copy only the files"
        }
        SnapshotError::InProgress(_) => ": wait until it is ready",
        SnapshotError::FixedLimits(_) => ": leave them out",
        SnapshotError::NotReady { .. }
        | SnapshotError::NotQuarantined { .. }
        | SnapshotError::SmallerDisk { .. } => "",
    }
}

/// The next step where a status does not allow the request.
fn advice_for_status(status: WorkspaceStatus) -> &'static str {
    match status {
        WorkspaceStatus::Creating => "wait until it is ready",
        WorkspaceStatus::Stopping => "wait until it is stopped, then resume it",
        WorkspaceStatus::Stopped => "resume it first (POST …/resume)",
        WorkspaceStatus::Destroying => "it is being removed; create a new one",
        WorkspaceStatus::Ready => "it is in use",
        WorkspaceStatus::Error => {
            "see metadata.error; destroy it, or try a tool call, which tries to start it again"
        }
    }
}

fn details_of(error: &WorkspaceError) -> Option<Value> {
    Some(match error {
        WorkspaceError::NoProvider(error) => json!({ "candidates": error.rejected }),
        WorkspaceError::WrongState { status, .. } => json!({ "status": status }),
        WorkspaceError::Held { holder, .. } => json!({ "attached_to": holder }),
        WorkspaceError::SandboxLost(SandboxLost::EndedByServer(reason)) => json!({ "reason": reason }),
        WorkspaceError::SandboxLost(SandboxLost::Ended { reason, out_of_memory }) => {
            json!({ "reason": reason, "oom_killed": out_of_memory })
        }
        _ => return None,
    })
}

/// One error for the failures of all candidates. A reason that they have in common is given once.
fn of_failures(failures: Vec<(RejectedCandidate, WorkspaceError)>) -> ErrorDetail {
    let error = WorkspaceError::AllProvidersFailed(failures);
    let (code, message) = (error.code(), error.to_string());
    let WorkspaceError::AllProvidersFailed(failures) = error else { unreachable!() };
    let candidates: Vec<RejectedCandidate> = failures.into_iter().map(|(candidate, _)| candidate).collect();
    let mut reasons = candidates.iter().map(|candidate| &candidate.reason);
    let common = reasons.next().filter(|first| reasons.all(|reason| reason == *first));
    let details = json!({ "candidates": candidates });
    ErrorDetail::new(code, common.cloned().unwrap_or(message)).with_details(details)
}

/// The text for an error of the store.
pub(super) fn of_store(error: &StoreError) -> ErrorDetail {
    let message = match error {
        StoreError::NotFound { kind, .. } => {
            format!("{error}: find the right one with GET /api/v1/{}", list_path(*kind))
        }
        StoreError::LimitReached { .. } => {
            format!("{error}: destroy workspaces that are not needed, or wait until one is")
        }
        StoreError::WrongState { status, .. } => format!("{error}: {}", advice_for_status(*status)),
        StoreError::Unavailable(_) => format!("{error}: retry later"),
        StoreError::Unwritable(_) => {
            format!("{error}; nothing was changed; make it writable or free space, then retry")
        }
        error if is_internal(error) => format!("{error}; the server's log has more"),
        error => error.to_string(),
    };
    let details = match error {
        StoreError::LimitReached { limit, current } => Some(json!({ "limit": limit, "current": current })),
        StoreError::WrongState { status, .. } => Some(json!({ "status": status })),
        _ => None,
    };
    ErrorDetail { code: codes::of_store(error), message, details }
}

/// Whether the store failed for a reason that callers can't know.
pub(super) fn is_internal(error: &StoreError) -> bool {
    codes::of_store(error) == emergent_wire::ErrorCode::Internal
}

/// The address of the list of a kind of row.
fn list_path(kind: RowKind) -> &'static str {
    match kind {
        RowKind::Token => "tokens",
        RowKind::Snapshot => "agent/workspaces/snapshots",
        RowKind::McpServer => "mcp/servers",
        RowKind::Workspace
        | RowKind::Project
        | RowKind::Session
        | RowKind::Setting
        | RowKind::IdempotencyKey => "agent/workspaces",
    }
}

#[cfg(test)]
mod tests {
    use emergent_mcp_bridge::BridgeError;
    use emergent_wire::{ErrorCode, WorkspaceId};

    use super::*;

    #[test]
    fn errors_of_hosted_servers_have_a_code_and_the_next_step() {
        let id = WorkspaceId::generate();
        let down = || BridgeError::Down("it has ended".into());
        for (error, code, text) in [
            (McpError::NotFound("x".to_owned()), ErrorCode::NotFound, "GET /api/v1/mcp/servers".to_owned()),
            (McpError::SpeaksHttp(id), ErrorCode::Unacceptable, format!("/api/v1/mcp/servers/{id}/mcp")),
            (McpError::Starting, ErrorCode::Unavailable, "try again".to_owned()),
            (McpError::NotSent(down()), ErrorCode::Unavailable, "it has ended".to_owned()),
            (McpError::NotAnswered(down()), ErrorCode::SandboxLost, "it has ended".to_owned()),
        ] {
            let detail = ErrorDetail::from(error);
            assert_eq!(detail.code, code, "{detail}");
            assert!(detail.message.contains(&text), "{detail}");
        }
    }
}
