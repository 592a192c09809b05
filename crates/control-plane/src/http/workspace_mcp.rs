//! A workspace's tools as an MCP server: the same tools as under the other addresses, for any MCP client.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use async_trait::async_trait;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use base64::Engine as _;
use chrono::Utc;
use emergent_store::{AuditEntry, AuditOutcome};
use emergent_wire::error::ErrorBody;
use emergent_wire::tools::{ReadAnswer, ReadRequest, Tool};
use emergent_wire::workspace::ContainerType;
use emergent_wire::{ErrorCode, ErrorDetail, WorkspaceId};
use emergent_workspace_mcp::{Call, Config, MAX_RAW_BYTES, ToolAnswer, ToolRequest, Tools, WorkspaceMcp};
use serde_json::Value;
use sha2::{Digest, Sha256};

use super::App;
use super::error::ApiError;
use super::extract::Id;
use super::mcp_endpoint::origin_is_allowed;
use super::route::{AuditPolicy, RouteRule};
use super::summary::Summarize;
use crate::audit::Audit;
use crate::caller::Caller;
use crate::workspace::{Workspaces, error_of, is_mcp_server};

/// The longest refusal of the MCP library that is kept.
const REFUSAL_BYTES: usize = 64 << 10;

/// The MCP servers of workspaces that somebody uses.
#[derive(Clone, Default)]
pub(crate) struct WorkspaceMcps(Arc<Mutex<HashMap<WorkspaceId, Arc<WorkspaceMcp>>>>);

impl WorkspaceMcps {
    fn servers(&self) -> MutexGuard<'_, HashMap<WorkspaceId, Arc<WorkspaceMcp>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Forgets those that nobody uses.
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
    if !origin_is_allowed(request.headers(), &app.workspaces.settings.mcp.allowed_origins) {
        let message =
            "pages of this origin may not use MCP servers: allow it in the settings (mcp.allowed_origins)";
        return ApiError::new(ErrorCode::Forbidden, message).into_response();
    }
    // It was checked by our own rule.
    request.headers_mut().remove(header::ORIGIN);
    match server_of(&app, id).await {
        Ok(server) => with_error_body(server.handle(request).await.map(Body::new)).await,
        Err(error) => ApiError(error).into_response(),
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
async fn server_of(app: &App, id: WorkspaceId) -> Result<Arc<WorkspaceMcp>, ErrorDetail> {
    if let Some(server) = app.workspace_mcp.servers().get(&id) {
        return Ok(Arc::clone(server));
    }
    let workspace = app.workspaces.store.workspace(id).await.map_err(error_of)?;
    if workspace.container_type == ContainerType::McpServer {
        return Err(is_mcp_server(id));
    }
    let tools = WorkspaceTools { id, workspaces: Arc::clone(&app.workspaces), audit: app.audit.clone() };
    let new = Arc::new(WorkspaceMcp::new(Arc::new(tools), Config::default()));
    Ok(Arc::clone(app.workspace_mcp.servers().entry(id).or_insert(new)))
}

/// Runs the tools of one workspace.
struct WorkspaceTools {
    id: WorkspaceId,
    workspaces: Arc<Workspaces>,
    audit: Audit,
}

#[async_trait]
impl Tools for WorkspaceTools {
    fn allowed(&self) -> Vec<Tool> {
        Tool::ALL.to_vec()
    }

    async fn call(&self, call: Call) -> Result<ToolAnswer, ErrorDetail> {
        let (at, begun) = (Utc::now(), Instant::now());
        let (tool, request) = (call.request.tool(), summary(&call.request));
        let Some(caller) = call.http.get::<Caller>().cloned() else {
            return Err(ErrorDetail::new(ErrorCode::Internal, "a call of a tool came without its caller"));
        };
        let answer = self.run(&caller, call).await;
        let failed = answer.as_ref().err().map(|error| error.code);
        let outcome = if failed.is_some() { AuditOutcome::Failure } else { AuditOutcome::Success };
        metrics::counter!("emergent_calls_total", "action" => tool.as_str(), "outcome" => outcome.as_str())
            .increment(1);
        metrics::histogram!("emergent_call_seconds", "action" => tool.as_str())
            .record(begun.elapsed().as_secs_f64());
        self.audit
            .record(AuditEntry {
                at,
                actor_token_id: Some(caller.principal.token_id),
                actor_name: Some(caller.principal.name),
                workspace_id: Some(self.id),
                session_id: None,
                tool: tool.as_str().to_owned(),
                outcome,
                error_code: failed.map(|code| code.as_str().to_owned()),
                duration_ms: u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX),
                request,
                request_id: caller.request_id,
            })
            .await;
        answer
    }
}

impl WorkspaceTools {
    async fn run(&self, caller: &Caller, call: Call) -> Result<ToolAnswer, ErrorDetail> {
        let (workspaces, id) = (&self.workspaces, self.id);
        Ok(match (call.request, call.output) {
            (ToolRequest::Bash(request), _) if request.background => {
                workspaces.bash_background(caller, id, request).await?.into()
            }
            (ToolRequest::Bash(request), Some(output)) => {
                workspaces.bash_watched(caller, id, request, move |bytes| output.write(bytes)).await?.into()
            }
            (ToolRequest::Bash(request), None) => workspaces.bash(caller, id, request).await?.into(),
            (ToolRequest::Read(request), _) if request.raw => self.read_raw(caller, request).await?.into(),
            (ToolRequest::Read(request), _) => workspaces.read(caller, id, request).await?.into(),
            (ToolRequest::Write(request), _) => workspaces.write(caller, id, request).await?.into(),
            (ToolRequest::Edit(request), _) => workspaces.edit(caller, id, request).await?.into(),
            (ToolRequest::Glob(request), _) => workspaces.glob(caller, id, request).await?.into(),
            (ToolRequest::Grep(request), _) => workspaces.grep(caller, id, request).await?.into(),
            (ToolRequest::Git(request), _) => workspaces.git(caller, id, request).await?.into(),
        })
    }

    /// A file's bytes, as many as a message holds.
    async fn read_raw(&self, caller: &Caller, request: ReadRequest) -> Result<ReadAnswer, ErrorDetail> {
        let mut file = self.workspaces.read_raw(caller, self.id, request).await?;
        let mut bytes = Vec::new();
        while let Some(piece) = file.next().await? {
            bytes.extend_from_slice(&piece);
            if bytes.len() as u64 > MAX_RAW_BYTES {
                let message =
                    format!("the file has more than the {} MiB that a message holds", MAX_RAW_BYTES >> 20);
                return Err(ErrorDetail::new(ErrorCode::TooLarge, message));
            }
        }
        Ok(ReadAnswer {
            content: base64::engine::general_purpose::STANDARD.encode(&bytes),
            file_size: bytes.len() as u64,
            sha256: Some(hex::encode(Sha256::digest(&bytes))),
            is_binary: std::str::from_utf8(&bytes).is_err(),
            ..ReadAnswer::default()
        })
    }
}

/// What the audit log keeps of a call.
fn summary(request: &ToolRequest) -> Value {
    match request {
        ToolRequest::Bash(request) => request.summary(),
        ToolRequest::Read(request) => request.summary(),
        ToolRequest::Write(request) => request.summary(),
        ToolRequest::Edit(request) => request.summary(),
        ToolRequest::Glob(request) => request.summary(),
        ToolRequest::Grep(request) => request.summary(),
        ToolRequest::Git(request) => request.summary(),
    }
}
