//! A workspace's tools as an MCP server: the same tools as under the other addresses, for any MCP client.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{Extensions, StatusCode, header};
use axum::response::{IntoResponse, Response};
use emergent_wire::error::ErrorBody;
use emergent_wire::workspace::ContainerType;
use emergent_wire::{ErrorCode, ErrorDetail, WorkspaceId};
use emergent_workspace_mcp::{Call, Config, Hints, ToolContent, ToolDescription, ToolResult, WorkspaceMcp};

use super::App;
use super::error::ApiError;
use super::extract::Id;
use super::mcp_endpoint::origin_is_allowed;
use super::route::{AuditPolicy, RouteRule};
use crate::caller::Caller;
use crate::tools::{Arguments, Effect, Output, Shown, ToolEntry, Tools, schema};
use crate::workspace::WorkspaceError;

/// The largest file that is sent raw here: it goes through a model's context, or twice through its client's memory. REST sends
/// larger ones.
const MAX_RAW_BYTES: u64 = 4 << 20;
/// The longest refusal of the MCP library that is kept.
const REFUSAL_BYTES: usize = 64 << 10;

/// The MCP servers of the workspaces that have MCP clients.
#[derive(Clone)]
pub(crate) struct WorkspaceMcps {
    servers: Arc<Mutex<HashMap<WorkspaceId, Arc<WorkspaceMcp>>>>,
    /// The tools of all of them, with their schemas.
    described: Arc<[ToolDescription]>,
}

impl WorkspaceMcps {
    pub(crate) fn new(tools: &Tools) -> Self {
        let described = tools.table().iter().map(|tool| describe(tool)).collect();
        Self { servers: Arc::default(), described }
    }

    fn servers(&self) -> MutexGuard<'_, HashMap<WorkspaceId, Arc<WorkspaceMcp>>> {
        self.servers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Removes idle ones.
    pub(crate) fn forget_idle(&self) {
        self.servers().retain(|_, server| Arc::strong_count(server) > 1 || !server.is_idle());
    }
}

/// All methods. The calls of tools in the messages have entries of their own in the audit log.
pub(super) const MESSAGE: RouteRule = RouteRule::workspace_use("workspace.mcp").audited(AuditPolicy::Never);

/// Send a message to a workspace's MCP server (Streamable HTTP).
///
/// For MCP clients: point them at this address, with `Authorization: Bearer …`. The tools are those of the workspace.
#[utoipa::path(post, path = "/api/v1/agent/workspaces/{id}/mcp", tag = "tools",
    params(("id" = WorkspaceId, Path)), request_body = Object,
    responses((status = 200, description = "A JSON-RPC message, or events with several"), (status = 202),
        (status = "4XX", body = ErrorBody)))]
pub(super) async fn post(state: State<App>, id: Id<WorkspaceId>, request: Request) -> Response {
    handle(state, id, request).await
}

/// Listen to a workspace's MCP server.
#[utoipa::path(get, path = "/api/v1/agent/workspaces/{id}/mcp", tag = "tools", params(("id" = WorkspaceId, Path)),
    responses((status = 200, description = "Events", content_type = "text/event-stream"), (status = "4XX", body = ErrorBody)))]
pub(super) async fn get(state: State<App>, id: Id<WorkspaceId>, request: Request) -> Response {
    handle(state, id, request).await
}

/// End a session with a workspace's MCP server.
#[utoipa::path(delete, path = "/api/v1/agent/workspaces/{id}/mcp", tag = "tools", params(("id" = WorkspaceId, Path)),
    responses((status = 202), (status = "4XX", body = ErrorBody)))]
pub(super) async fn delete(state: State<App>, id: Id<WorkspaceId>, request: Request) -> Response {
    handle(state, id, request).await
}

async fn handle(State(app): State<App>, Id(id): Id<WorkspaceId>, mut request: Request) -> Response {
    if !origin_is_allowed(request.headers(), &app.workspaces.context.settings.mcp.allowed_origins) {
        let message =
            "pages of this origin may not use MCP servers: allow it in the settings (mcp.allowed_origins)";
        return ApiError::new(ErrorCode::Forbidden, message).into_response();
    }
    // It was checked by our own rule.
    request.headers_mut().remove(header::ORIGIN);
    match server_of(&app, id).await {
        Ok(server) => with_error_body(server.handle(request).await.map(Body::new)).await,
        Err(error) => error.into_response(),
    }
}

/// Gives a refusal that the MCP library wrote as plain text the body that all failures have.
async fn with_error_body(response: Response) -> Response {
    let status = response.status();
    if !status.is_client_error() || response.headers().contains_key(header::CONTENT_TYPE) {
        return response;
    }
    let allow = response.headers().get(header::ALLOW).cloned();
    let text = axum::body::to_bytes(response.into_body(), REFUSAL_BYTES).await.unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let code = match status {
        StatusCode::NOT_FOUND => ErrorCode::NotFound,
        StatusCode::METHOD_NOT_ALLOWED => ErrorCode::MethodNotAllowed,
        StatusCode::NOT_ACCEPTABLE => ErrorCode::NotAcceptable,
        StatusCode::UNSUPPORTED_MEDIA_TYPE => ErrorCode::UnsupportedMediaType,
        _ => ErrorCode::BadRequest,
    };
    let mut refusal = ApiError::new(code, text).into_response();
    *refusal.status_mut() = status;
    refusal.headers_mut().extend(allow.map(|value| (header::ALLOW, value)));
    refusal
}

/// The MCP server of a workspace; a new one where nobody uses it yet.
async fn server_of(app: &App, id: WorkspaceId) -> Result<Arc<WorkspaceMcp>, ApiError> {
    if let Some(server) = app.workspace_mcp.servers().get(&id) {
        return Ok(Arc::clone(server));
    }
    let workspace = app.workspaces.context.store.workspace(id).await?;
    if workspace.container_type == ContainerType::McpServer {
        return Err(WorkspaceError::IsMcpServer(id).into());
    }
    let described = Arc::clone(&app.workspace_mcp.described);
    let tools = WorkspaceTools { id, tools: app.tools.clone(), described };
    let new = Arc::new(WorkspaceMcp::new(Arc::new(tools), Config::default()));
    Ok(Arc::clone(app.workspace_mcp.servers().entry(id).or_insert(new)))
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
    let schemas = (schema::of_arguments(tool), schema::of_answer(tool));
    ToolDescription::new(tool.name, tool.title, tool.instructions, schemas, hints)
}

#[async_trait]
impl emergent_workspace_mcp::Tools for WorkspaceTools {
    fn all(&self) -> &[ToolDescription] {
        &self.described
    }

    fn is_allowed(&self, name: &str, http: &Extensions) -> bool {
        let (caller, tool) = (http.get::<Caller>(), self.tools.find(name));
        caller.zip(tool).is_some_and(|(caller, tool)| self.tools.allows(&caller.principal, self.id, tool))
    }

    async fn call(&self, call: Call) -> Result<ToolResult, ErrorDetail> {
        let Some((caller, tool)) = call.http.get::<Caller>().zip(self.tools.find(&call.name)) else {
            return Err(ErrorDetail::new(ErrorCode::Internal, "a call of a tool came without its caller"));
        };
        let call_of_tool =
            self.tools.prepare(caller, self.id, tool, Arguments::Object(call.arguments)).await?;
        let output = match call.output {
            Some(sink) => Output::Shown(Box::new(move |bytes| sink.write(bytes))),
            None => Output::InAnswer,
        };
        let answer = call_of_tool.with_max_raw_bytes(MAX_RAW_BYTES).run(output).await?;
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
    fn the_tools_are_described_as_checked_in() {
        let tools: Vec<ToolDescription> = standard().iter().map(|tool| describe(tool)).collect();
        insta::assert_json_snapshot!("tools", serde_json::to_value(tools).unwrap());
    }
}
