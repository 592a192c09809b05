//! The address of a workspace's MCP server (Streamable HTTP), which offers the tools of the workspace.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use async_trait::async_trait;
use axum::extract::{Extension, Request, State};
use axum::response::Response;
use emergent_wire::error::ErrorBody;
use emergent_wire::workspace::ContainerType;
use emergent_wire::{ErrorCode, ErrorDetail, TokenId, WorkspaceId};
use emergent_workspace_mcp::{Call, Config, Hints, ToolContent, ToolDescription, ToolResult, WorkspaceMcp};
use parking_lot::Mutex;

use super::error::ApiError;
use super::extract::Id;
use super::route::{AuditPolicy, RouteRule};
use super::{App, mcp_front, tool_schema};
use crate::caller::Caller;
use crate::tools::{Arguments, Effect, Output, Shown, ToolEntry, ToolError, Tools};
use crate::workspace::WorkspaceError;

/// The largest file that MCP clients can read raw, because it passes through a model's context or twice through the client's
/// memory. REST sends larger files.
const MAX_RAW_BYTES: u64 = 4 << 20;

/// The MCP servers of the workspaces that have MCP clients.
#[derive(Clone)]
pub(crate) struct WorkspaceMcps {
    servers: Arc<Mutex<HashMap<WorkspaceId, Arc<WorkspaceMcp<Caller>>>>>,
    /// The tools with their schemas, which are the same in all workspaces.
    described: Arc<[ToolDescription]>,
}

impl WorkspaceMcps {
    pub(crate) fn new(tools: &Tools) -> Self {
        let described = tools.table().iter().map(|tool| describe(tool)).collect();
        Self { servers: Arc::default(), described }
    }

    /// Ends idle sessions, and removes servers without sessions and calls.
    pub(crate) fn sweep(&self) {
        self.servers.lock().retain(|_, server| {
            server.sweep();
            Arc::strong_count(server) > 1 || !server.is_idle()
        });
    }

    /// The tokens that have sessions.
    pub(crate) fn session_owners(&self) -> HashSet<TokenId> {
        self.servers.lock().values().flat_map(|server| server.owners()).collect()
    }

    /// Ends the sessions of a token, and cancels their calls.
    pub(crate) fn end_sessions_of(&self, owner: TokenId) {
        let all: Vec<_> = self.servers.lock().values().cloned().collect();
        all.iter().for_each(|server| server.end_of_owner(&owner));
    }
}

/// The rule of all methods. Tool calls in the messages have audit entries of their own.
pub(super) const MESSAGE: RouteRule = RouteRule::workspace_use("workspace.mcp").audited(AuditPolicy::Never);

/// Send a message to a workspace's MCP server (Streamable HTTP).
///
/// For MCP clients: point them at this address, with `Authorization: Bearer …`. The tools are those of the workspace.
#[utoipa::path(post, path = "/api/v1/agent/workspaces/{id}/mcp", tag = "tools",
    params(("id" = WorkspaceId, Path)), request_body = Object,
    responses((status = 200, description = "A JSON-RPC message, or events with several"), (status = 202),
        (status = "4XX", body = ErrorBody)))]
pub(super) async fn post(
    app: State<App>,
    id: Id<WorkspaceId>,
    caller: Extension<Caller>,
    request: Request,
) -> Result<Response, ApiError> {
    handle(app, id, caller, request).await
}

/// Listen to a workspace's MCP server.
#[utoipa::path(get, path = "/api/v1/agent/workspaces/{id}/mcp", tag = "tools", params(("id" = WorkspaceId, Path)),
    responses((status = 200, description = "Events", content_type = "text/event-stream"), (status = "4XX", body = ErrorBody)))]
pub(super) async fn get(
    app: State<App>,
    id: Id<WorkspaceId>,
    caller: Extension<Caller>,
    request: Request,
) -> Result<Response, ApiError> {
    handle(app, id, caller, request).await
}

/// End a session with a workspace's MCP server.
#[utoipa::path(delete, path = "/api/v1/agent/workspaces/{id}/mcp", tag = "tools", params(("id" = WorkspaceId, Path)),
    responses((status = 202), (status = "4XX", body = ErrorBody)))]
pub(super) async fn delete(
    app: State<App>,
    id: Id<WorkspaceId>,
    caller: Extension<Caller>,
    request: Request,
) -> Result<Response, ApiError> {
    handle(app, id, caller, request).await
}

async fn handle(
    State(app): State<App>,
    Id(id): Id<WorkspaceId>,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Result<Response, ApiError> {
    mcp_front::check_origin(&app, request.headers())?;
    let server = server_of(&app, id).await?;
    Ok(mcp_front::answer(server.handle(&caller, request).await))
}

/// The MCP server of a workspace. The first request makes it.
async fn server_of(app: &App, id: WorkspaceId) -> Result<Arc<WorkspaceMcp<Caller>>, ApiError> {
    if let Some(server) = app.workspace_mcp.servers.lock().get(&id) {
        return Ok(Arc::clone(server));
    }
    let workspace = app.workspaces.context.store.workspace(id).await?;
    if workspace.container_type == ContainerType::McpServer {
        return Err(WorkspaceError::IsMcpServer(id).into());
    }
    let described = Arc::clone(&app.workspace_mcp.described);
    let tools = WorkspaceTools { id, tools: app.tools.clone(), described };
    let new = Arc::new(WorkspaceMcp::new(Arc::new(tools), Config::default()));
    Ok(Arc::clone(app.workspace_mcp.servers.lock().entry(id).or_insert(new)))
}

/// The tools of one workspace for MCP clients.
struct WorkspaceTools {
    id: WorkspaceId,
    tools: Tools,
    described: Arc<[ToolDescription]>,
}

fn describe(tool: &ToolEntry) -> ToolDescription {
    let hints = Hints {
        read_only: tool.effect == Effect::ReadsFiles,
        idempotent: matches!(tool.effect, Effect::ReadsFiles | Effect::ReplacesFile),
        open_world: tool.effect == Effect::Anything,
    };
    let schemas = (tool_schema::of_arguments(tool), tool_schema::of_answer(tool));
    ToolDescription::new(tool.name, tool.title, tool.instructions, schemas, hints)
}

#[async_trait]
impl emergent_workspace_mcp::Tools<Caller> for WorkspaceTools {
    fn all(&self) -> &[ToolDescription] {
        &self.described
    }

    fn is_allowed(&self, name: &str, caller: &Caller) -> bool {
        self.tools.find(name).is_some_and(|tool| self.tools.allows(&caller.principal, self.id, tool))
    }

    async fn call(&self, call: Call<Caller>) -> Result<ToolResult, ErrorDetail> {
        let Some(tool) = self.tools.find(&call.name) else {
            return Err(ErrorDetail::new(ErrorCode::Internal, "the tool is not in the table"));
        };
        self.run(tool, call).await.map_err(|error| ApiError::from(error).0)
    }
}

impl WorkspaceTools {
    async fn run(&self, tool: &ToolEntry, call: Call<Caller>) -> Result<ToolResult, ToolError> {
        let arguments = Arguments::Object(call.arguments);
        let prepared = self.tools.prepare(&call.caller, self.id, tool, arguments).await?;
        let output = match call.output {
            Some(sink) => Output::Shown(Box::new(move |bytes| sink.write(bytes))),
            None => Output::InAnswer,
        };
        let answer = prepared.with_max_raw_bytes(MAX_RAW_BYTES).run(output).await?;
        let content = match answer.show() {
            Shown::Text(text) => ToolContent::Text(text),
            Shown::Image { data, media_type } => {
                ToolContent::Image { data, media_type: media_type.to_owned() }
            }
        };
        Ok(ToolResult { data: answer.to_value()?, content })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tools::standard;

    #[test]
    fn tool_descriptions_are_those_of_the_snapshot() {
        let tools: Vec<ToolDescription> = standard().iter().map(|tool| describe(tool)).collect();
        insta::assert_json_snapshot!("tools", serde_json::to_value(tools).unwrap());
    }
}
