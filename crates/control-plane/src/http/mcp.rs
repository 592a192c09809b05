//! Hosted MCP servers: register, list, get, remove, restart, call, logs. All addresses take a server's id or its name.

use std::convert::Infallible;
use std::time::Duration;

use axum::Json;
use axum::extract::{Path, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::sse::{Event as SseEvent, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use emergent_wire::error::ErrorBody;
use emergent_wire::mcp::{MAX_TIMEOUT_MS, McpLogLine, McpLogs, McpServer, McpServerList, RegisterMcpServer};
use emergent_wire::{ErrorCode, ErrorDetail, Validate, WorkspaceId};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use serde_json::{Value, json};
use utoipa::{IntoParams, ToSchema};

use super::App;
use super::error::ApiError;
use super::extract::{Body, Params};
use super::mcp_view::{self, log_line};
use super::route::{AuditPolicy, RouteRule, Target};
use super::stream::KEEP_ALIVE;
use super::workspaces::run_to_completion;
use crate::summary::Summarize;

/// The lines of a log that are sent unless the caller names a number.
const DEFAULT_LINES: usize = 200;

pub(super) const REGISTER: RouteRule = RouteRule::admin("mcp.register").needs_sandboxes();

/// Register an MCP server and start it.
///
/// Answers when the server is ready or its first start has failed: see `status` and `last_exit`. A server that does not start
/// stays registered, and is started again according to its restart policy.
#[utoipa::path(post, path = "/api/v1/mcp/servers", tag = "mcp", request_body = RegisterMcpServer,
    responses((status = 201, body = McpServer), (status = "4XX", body = ErrorBody), (status = "5XX", body = ErrorBody)))]
pub(super) async fn register(
    State(app): State<App>,
    Body(request): Body<RegisterMcpServer>,
) -> Result<(StatusCode, Json<McpServer>), ApiError> {
    let report = run_to_completion(async move { app.mcp.register(request).await }).await?;
    Ok((StatusCode::CREATED, Json(mcp_view::server(report))))
}

pub(super) const LIST: RouteRule = RouteRule::admin("mcp.list").needs_sandboxes();

/// List MCP servers, oldest first.
#[utoipa::path(get, path = "/api/v1/mcp/servers", tag = "mcp",
    responses((status = 200, body = McpServerList), (status = "4XX", body = ErrorBody)))]
pub(super) async fn list(State(app): State<App>) -> Result<Json<McpServerList>, ApiError> {
    let reports = app.mcp.reports().await?;
    let servers = reports.readable.into_iter().map(mcp_view::server).collect();
    let unreadable = reports.unreadable.into_iter().map(Into::into).collect();
    Ok(Json(McpServerList { servers, unreadable }))
}

pub(super) const GET: RouteRule = RouteRule::admin("mcp.get").on(Target::McpServer).for_bound_tokens();

/// Get one MCP server.
#[utoipa::path(get, path = "/api/v1/mcp/servers/{id}", tag = "mcp",
    params(("id" = String, Path, description = "Id or name")),
    responses((status = 200, body = McpServer), (status = "4XX", body = ErrorBody)))]
pub(super) async fn get(State(app): State<App>, Path(id): Path<String>) -> Result<Json<McpServer>, ApiError> {
    let id = app.mcp.find(&id).await?.workspace.id;
    Ok(Json(mcp_view::server(app.mcp.report(id).await?)))
}

/// An MCP server was removed.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct Removed {
    /// Its id.
    id: WorkspaceId,
    /// Always true: a failure is an error.
    removed: bool,
}

pub(super) const REMOVE: RouteRule = RouteRule::admin("mcp.remove").on(Target::McpServer);

/// Stop an MCP server and remove it with all its files.
#[utoipa::path(delete, path = "/api/v1/mcp/servers/{id}", tag = "mcp",
    params(("id" = String, Path, description = "Id or name")),
    responses((status = 200, body = Removed), (status = "4XX", body = ErrorBody), (status = "5XX", body = ErrorBody)))]
pub(super) async fn remove(
    State(app): State<App>,
    Path(id): Path<String>,
) -> Result<Json<Removed>, ApiError> {
    let id = app.mcp.find(&id).await?.workspace.id;
    run_to_completion(async move { app.mcp.remove(id).await }).await?;
    Ok(Json(Removed { id, removed: true }))
}

pub(super) const RESTART: RouteRule = RouteRule::admin("mcp.restart").on(Target::McpServer);

/// Restart an MCP server in a new container with its files.
///
/// Its process has 10 s to end. Its crashes are no longer counted.
#[utoipa::path(post, path = "/api/v1/mcp/servers/{id}/restart", tag = "mcp",
    params(("id" = String, Path, description = "Id or name")),
    responses((status = 200, body = McpServer), (status = "4XX", body = ErrorBody), (status = "5XX", body = ErrorBody)))]
pub(super) async fn restart(
    State(app): State<App>,
    Path(id): Path<String>,
) -> Result<Json<McpServer>, ApiError> {
    let id = app.mcp.find(&id).await?.workspace.id;
    let report = run_to_completion(async move { app.mcp.restart(id).await }).await?;
    Ok(Json(mcp_view::server(report)))
}

/// A call of a method.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct CallRequest {
    /// The method, such as `tools/call`.
    method: String,
    /// Its parameters, as the server expects them.
    #[schema(value_type = Option<Object>)]
    params: Option<Box<RawValue>>,
    /// The time limit; the server's own unless given.
    timeout_ms: Option<u64>,
}

impl Validate for CallRequest {
    fn validate(&self) -> Result<(), ErrorDetail> {
        if self.timeout_ms.is_some_and(|timeout| !(1..=MAX_TIMEOUT_MS).contains(&timeout)) {
            let message = format!("timeout_ms must be from 1 to {MAX_TIMEOUT_MS}");
            return Err(ErrorDetail::new(ErrorCode::BadRequest, message));
        }
        if self.method.is_empty() || self.method.len() > 200 {
            return Err(ErrorDetail::new(ErrorCode::BadRequest, "method is empty or over 200 bytes"));
        }
        Ok(())
    }
}

impl Summarize for CallRequest {
    fn summary(&self) -> Value {
        let method: String = self.method.chars().take(100).collect();
        // The name of the tool, never its arguments.
        let name = self.params.as_ref().and_then(|params| {
            let name = serde_json::from_str::<Value>(params.get()).ok()?.get("name")?.as_str()?.to_owned();
            Some(name.chars().take(100).collect::<String>())
        });
        json!({ "method": method, "name": name })
    }
}

/// The server's answer: a result or an error.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct CallAnswer {
    /// The result, as the server gave it.
    #[schema(value_type = Option<Object>)]
    result: Option<Box<RawValue>>,
    /// The error, with the server's code and message.
    #[schema(value_type = Option<Object>)]
    error: Option<Box<RawValue>>,
}

pub(super) const CALL: RouteRule =
    RouteRule::admin("mcp.call").on(Target::McpServer).for_bound_tokens().audited(AuditPolicy::Soon);

/// Call a method of an MCP server.
///
/// A time-out cancels the call and leaves the server running.
#[utoipa::path(post, path = "/api/v1/mcp/servers/{id}/call", tag = "mcp", request_body = CallRequest,
    params(("id" = String, Path, description = "Id or name")),
    responses((status = 200, body = CallAnswer), (status = "4XX", body = ErrorBody), (status = "5XX", body = ErrorBody)))]
pub(super) async fn call(
    State(app): State<App>,
    Path(id): Path<String>,
    Body(request): Body<CallRequest>,
) -> Result<Json<CallAnswer>, ApiError> {
    let id = app.mcp.id_of(&id).await?;
    let time_limit = request.timeout_ms.map(Duration::from_millis);
    let server = app.mcp.supervised(id).await?;
    let answer = app.mcp.call(&server, &request.method, request.params.as_deref(), time_limit).await?;
    Ok(Json(CallAnswer { result: answer.result, error: answer.error }))
}

/// The lines to send.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct LogParams {
    /// The number of last lines; 200 unless given.
    tail: Option<usize>,
    /// Whether to keep sending lines as they are written.
    follow: Option<bool>,
}

pub(super) const LOGS: RouteRule = RouteRule::admin("mcp.logs").on(Target::McpServer);

/// Get the log of an MCP server: its standard error and the notes of its supervisor.
///
/// The last 2,000 lines are kept while this server runs. With `follow`, lines are server-sent events whose ids are the numbers of
/// the lines.
#[utoipa::path(get, path = "/api/v1/mcp/servers/{id}/logs", tag = "mcp",
    params(("id" = String, Path, description = "Id or name"), LogParams),
    responses((status = 200, body = McpLogs), (status = "4XX", body = ErrorBody)))]
pub(super) async fn logs(
    State(app): State<App>,
    Path(id): Path<String>,
    headers: HeaderMap,
    Params(params): Params<LogParams>,
) -> Result<Response, ApiError> {
    let id = app.mcp.id_of(&id).await?;
    let server = app.mcp.supervised(id).await?;
    let tail = params.tail.unwrap_or(DEFAULT_LINES);
    if !params.follow.unwrap_or(false) {
        let lines = server.journal.after(0, tail).into_iter().map(log_line).collect();
        return Ok(Json(McpLogs { lines }).into_response());
    }
    let after = headers.get("last-event-id").and_then(|id| id.to_str().ok()?.parse().ok());
    let known = server.journal.after(after.unwrap_or(0), after.map_or(tail, |_| usize::MAX));
    let seen = known.last().map_or(after.unwrap_or(0), |entry| entry.number);
    let watch = server.journal.watch();
    let known: Vec<McpLogLine> = known.into_iter().map(log_line).collect();
    let state = (server, watch, known.into_iter(), seen);
    let events = futures_util::stream::unfold(state, |(server, mut watch, mut lines, mut seen)| async move {
        loop {
            if let Some(line) = lines.next() {
                let data = serde_json::to_string(&line).unwrap_or_default();
                let event = SseEvent::default().event("log").id(line.number.to_string()).data(data);
                return Some((Ok::<_, Infallible>(event), (server, watch, lines, seen)));
            }
            let new = server.journal.after(seen, usize::MAX);
            if new.is_empty() {
                tokio::select! {
                    changed = watch.changed() => changed.ok()?,
                    () = server.supervisor_ended() => return None,
                }
                continue;
            }
            seen = new.last().map_or(seen, |entry| entry.number);
            let new: Vec<McpLogLine> = new.into_iter().map(log_line).collect();
            lines = new.into_iter();
        }
    });
    Ok(Sse::new(events).keep_alive(KeepAlive::new().interval(KEEP_ALIVE)).into_response())
}
