//! Commands in the background: follow and kill.

use axum::Json;
use axum::extract::{Extension, State};
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use emergent_wire::error::ErrorBody;
use emergent_wire::tools::OperationAnswer;
use emergent_wire::{ErrorCode, ErrorDetail, OperationId, WorkspaceId};
use futures_util::Stream;
use serde::Deserialize;
use utoipa::IntoParams;

use super::App;
use super::error::ApiError;
use super::extract::{Ids, Params};
use super::route::RouteRule;
use super::stream::{self, OutputEvent};
use super::tools::asks_for;
use crate::caller::Caller;
use crate::workspace::{FollowedOperation, OperationEvent};

/// The part of the output to read.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct FollowParams {
    /// The bytes of output to skip, because the caller has them: `next_offset` of the last answer.
    #[serde(default)]
    offset: u64,
}

pub(super) const FOLLOW: RouteRule = RouteRule::workspace_use("operation");

/// Get the state of a command in the background, and its output from an offset on.
///
/// With `Accept: text/event-stream` its output is streamed until it ends. `Last-Event-ID` resumes a broken stream.
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
        let followed = app.workspaces.calls.follow_operation(&caller, id, operation, offset).await?;
        return Ok(stream::events(unfold(followed), Some(offset)));
    }
    Ok(Json(app.workspaces.calls.operation(&caller, id, operation, params.offset).await?).into_response())
}

/// The events of a command, up to its end or an error.
fn unfold(followed: FollowedOperation) -> impl Stream<Item = Result<OutputEvent, ErrorDetail>> + Send {
    futures_util::stream::unfold(Some(followed), async |followed| {
        let mut followed = followed?;
        Some(match followed.next().await {
            Ok(OperationEvent::Stdout(bytes)) => (Ok(OutputEvent::Stdout(bytes)), Some(followed)),
            Ok(OperationEvent::Stderr(bytes)) => (Ok(OutputEvent::Stderr(bytes)), Some(followed)),
            Ok(OperationEvent::Ended(answer)) => {
                let json = serde_json::to_vec(&answer).map(OutputEvent::Answer);
                (json.map_err(|error| ErrorDetail::new(ErrorCode::Internal, error.to_string())), None)
            }
            Err(error) => (Err(ApiError::from(error).0), None),
        })
    })
}

pub(super) const KILL: RouteRule = RouteRule::workspace_use("operation");

/// Kill a command in the background: SIGTERM, and SIGKILL 5 s later.
#[utoipa::path(delete, path = "/api/v1/agent/workspaces/{id}/operations/{operation}", tag = "tools",
    params(("id" = WorkspaceId, Path), ("operation" = OperationId, Path)),
    responses((status = 200, body = OperationAnswer), (status = "4XX", body = ErrorBody), (status = "5XX", body = ErrorBody)))]
pub(super) async fn kill(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    Ids(id, operation): Ids<WorkspaceId, OperationId>,
) -> Result<Json<OperationAnswer>, ApiError> {
    Ok(Json(app.workspaces.calls.kill_operation(&caller, id, operation).await?))
}
