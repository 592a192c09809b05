//! Commands in the background: follow them and end them.

use axum::Json;
use axum::extract::{Extension, State};
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use emergent_wire::error::ErrorBody;
use emergent_wire::tools::OperationAnswer;
use emergent_wire::{OperationId, WorkspaceId};
use serde::Deserialize;
use utoipa::IntoParams;

use super::App;
use super::error::ApiError;
use super::extract::{Ids, Params};
use super::route::RouteRule;
use super::stream;
use super::tools::asks_for;
use crate::caller::Caller;

/// Where to go on.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct FollowParams {
    /// Output bytes that the caller has already: `next_offset` of the last answer.
    #[serde(default)]
    offset: u64,
}

pub(super) const FOLLOW: RouteRule = RouteRule::workspace_use("operation");

/// Look at a command in the background, and read its output from an offset on.
///
/// With `Accept: text/event-stream` it is followed until it ends; `Last-Event-ID` goes on where a stream broke.
#[utoipa::path(get, path = "/api/v1/agent/workspaces/{id}/operations/{operation}", tag = "tools",
    params(("id" = WorkspaceId, Path), ("operation" = OperationId, Path), FollowParams),
    responses((status = 200, body = OperationAnswer), (status = "4XX", body = ErrorBody), (status = "5XX", body = ErrorBody)))]
pub(super) async fn follow(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    Ids(id, operation): Ids<WorkspaceId, OperationId>,
    headers: HeaderMap,
    Params(params): Params<FollowParams>,
) -> Result<Response, ApiError> {
    if asks_for(&headers, "text/event-stream") {
        let last = headers.get("last-event-id").and_then(|value| value.to_str().ok()?.parse().ok());
        let offset = last.unwrap_or(params.offset);
        let output = app.workspaces.operation_stream(&caller, id, operation, offset).await?;
        return Ok(stream::events(output, Some(offset)));
    }
    Ok(Json(app.workspaces.operation(&caller, id, operation, params.offset).await?).into_response())
}

pub(super) const KILL: RouteRule = RouteRule::workspace_use("operation");

/// End a command in the background: SIGTERM, and SIGKILL 5 s later.
#[utoipa::path(delete, path = "/api/v1/agent/workspaces/{id}/operations/{operation}", tag = "tools",
    params(("id" = WorkspaceId, Path), ("operation" = OperationId, Path)),
    responses((status = 200, body = OperationAnswer), (status = "4XX", body = ErrorBody), (status = "5XX", body = ErrorBody)))]
pub(super) async fn kill(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    Ids(id, operation): Ids<WorkspaceId, OperationId>,
) -> Result<Json<OperationAnswer>, ApiError> {
    Ok(Json(app.workspaces.kill_operation(&caller, id, operation).await?))
}
