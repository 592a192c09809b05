//! The calls of the server's REST API. No other module of this program knows a path or a method of it.

use emergent_wire::{OperationId, SnapshotId, TokenId, WorkspaceId};
use reqwest::Method;

use super::Call;

/// Answers while the server's process works.
pub(crate) const LIVE: &str = "/health/live";
/// Answers with a success when the server takes requests.
pub(crate) const READY: &str = "/health/ready";
/// Lists the providers.
pub(crate) const PROVIDERS: &str = "/api/v1/agent/workspaces/providers";

/// A change of a workspace's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StateChange {
    Stop,
    Resume,
}

impl StateChange {
    fn as_str(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Resume => "resume",
        }
    }
}

fn workspaces(method: Method, rest: &[&str]) -> Call {
    Call::new(method, &[&["agent", "workspaces"], rest].concat())
}

fn workspace(method: Method, id: WorkspaceId, rest: &[&str]) -> Call {
    workspaces(method, &[&[id.to_string().as_str()], rest].concat())
}

pub(crate) fn list_workspaces() -> Call {
    workspaces(Method::GET, &[])
}

pub(crate) fn create_workspace() -> Call {
    workspaces(Method::POST, &[])
}

pub(crate) fn get_workspace(id: WorkspaceId) -> Call {
    workspace(Method::GET, id, &[])
}

pub(crate) fn destroy_workspace(id: WorkspaceId) -> Call {
    workspace(Method::DELETE, id, &[])
}

pub(crate) fn change_workspace(id: WorkspaceId, change: StateChange) -> Call {
    workspace(Method::POST, id, &[change.as_str()])
}

pub(crate) fn attach_workspace(id: WorkspaceId) -> Call {
    workspace(Method::POST, id, &["attach"])
}

pub(crate) fn detach_workspace(id: WorkspaceId) -> Call {
    workspace(Method::POST, id, &["detach"])
}

/// Calls a tool by its name.
pub(crate) fn tool(id: WorkspaceId, name: &str) -> Call {
    workspace(Method::POST, id, &[name])
}

pub(crate) fn get_operation(id: WorkspaceId, operation: OperationId) -> Call {
    workspace(Method::GET, id, &["operations", &operation.to_string()])
}

pub(crate) fn kill_operation(id: WorkspaceId, operation: OperationId) -> Call {
    workspace(Method::DELETE, id, &["operations", &operation.to_string()])
}

/// The path of a workspace's MCP endpoint.
pub(crate) fn workspace_mcp_path(id: WorkspaceId) -> String {
    format!("/api/v1/agent/workspaces/{id}/mcp")
}

pub(crate) fn create_snapshot(id: WorkspaceId) -> Call {
    workspace(Method::POST, id, &["snapshot"])
}

pub(crate) fn list_snapshots() -> Call {
    workspaces(Method::GET, &["snapshots"])
}

pub(crate) fn delete_snapshot(id: SnapshotId) -> Call {
    workspaces(Method::DELETE, &["snapshots", &id.to_string()])
}

pub(crate) fn create_from_snapshot() -> Call {
    workspaces(Method::POST, &["from-snapshot"])
}

pub(crate) fn list_quarantine() -> Call {
    workspaces(Method::GET, &["quarantine"])
}

pub(crate) fn restore_from_quarantine(id: SnapshotId) -> Call {
    workspaces(Method::POST, &["quarantine", &id.to_string(), "restore"])
}

pub(crate) fn purge_from_quarantine(id: SnapshotId) -> Call {
    workspaces(Method::DELETE, &["quarantine", &id.to_string()])
}

pub(crate) fn get_pool() -> Call {
    Call::new(Method::GET, &["agent", "pool"])
}

pub(crate) fn set_pool() -> Call {
    Call::new(Method::PUT, &["agent", "pool"])
}

pub(crate) fn reset_pool() -> Call {
    Call::new(Method::DELETE, &["agent", "pool"])
}

fn mcp(method: Method, rest: &[&str]) -> Call {
    Call::new(method, &[&["mcp", "servers"], rest].concat())
}

pub(crate) fn list_mcp_servers() -> Call {
    mcp(Method::GET, &[])
}

pub(crate) fn register_mcp_server() -> Call {
    mcp(Method::POST, &[])
}

/// `name` is the server's name or id, here and below.
pub(crate) fn get_mcp_server(name: &str) -> Call {
    mcp(Method::GET, &[name])
}

pub(crate) fn call_mcp_server(name: &str) -> Call {
    mcp(Method::POST, &[name, "call"])
}

pub(crate) fn get_mcp_logs(name: &str) -> Call {
    mcp(Method::GET, &[name, "logs"])
}

pub(crate) fn restart_mcp_server(name: &str) -> Call {
    mcp(Method::POST, &[name, "restart"])
}

pub(crate) fn remove_mcp_server(name: &str) -> Call {
    mcp(Method::DELETE, &[name])
}

pub(crate) fn list_tokens() -> Call {
    Call::new(Method::GET, &["tokens"])
}

pub(crate) fn create_token() -> Call {
    Call::new(Method::POST, &["tokens"])
}

pub(crate) fn revoke_token(id: TokenId) -> Call {
    Call::new(Method::DELETE, &["tokens", &id.to_string()])
}

/// Answered with server-sent events.
pub(crate) fn follow_events() -> Call {
    Call::new(Method::GET, &["events"]).events()
}

pub(crate) fn list_audit_records() -> Call {
    Call::new(Method::GET, &["audit"])
}

pub(crate) fn verify_audit_log() -> Call {
    // The server reads and hashes every record.
    Call::new(Method::GET, &["audit", "verify"]).within(super::CHANGE_TIMEOUT)
}

pub(crate) fn export_audit_records() -> Call {
    Call::new(Method::GET, &["audit", "export"])
}
