//! MicroVMs.

use axum::Json;
use axum::body::Body;
use axum::extract::{Path, Query, Request, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::Response;
use emergent_wire::error::ErrorBody;
use emergent_wire::id::InstallationId;
use emergent_wire::manager::{CHANNEL_PROTOCOL, Machine, MachineList, MachineRequest};
use emergent_wire::{ErrorCode, WorkspaceId};
use hyper_util::rt::TokioIo;
use serde::Deserialize;

use super::error::ApiError;
use super::{App, run_to_end};

const PROTOCOL: HeaderValue = HeaderValue::from_static(CHANNEL_PROTOCOL);

#[derive(Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
pub(crate) struct Whose {
    /// Only those of this installation.
    #[param(value_type = Option<String>)]
    installation: Option<InstallationId>,
}

/// List microVMs.
#[utoipa::path(get, path = "/v1/machines", tag = "machines", params(Whose),
    responses((status = 200, body = MachineList), (status = "4XX", body = ErrorBody)))]
pub(super) async fn list(State(app): State<App>, Query(whose): Query<Whose>) -> Json<MachineList> {
    Json(MachineList { machines: app.manager.list(whose.installation) })
}

/// Make a microVM and start it.
///
/// Answers when its guest agent is ready. One that is there is started, or left as it is when it runs.
#[utoipa::path(put, path = "/v1/machines/{id}", tag = "machines", params(("id" = String, Path)),
    request_body = MachineRequest,
    responses((status = 200, body = Machine), (status = "4XX", body = ErrorBody), (status = "5XX", body = ErrorBody)))]
pub(super) async fn create(
    State(app): State<App>,
    Path(id): Path<WorkspaceId>,
    Json(request): Json<MachineRequest>,
) -> Result<Json<Machine>, ApiError> {
    run_to_end(async move { app.manager.create(id, request).await }).await
}

/// Show a microVM.
#[utoipa::path(get, path = "/v1/machines/{id}", tag = "machines", params(("id" = String, Path)),
    responses((status = 200, body = Machine), (status = "4XX", body = ErrorBody)))]
pub(super) async fn get(
    State(app): State<App>,
    Path(id): Path<WorkspaceId>,
) -> Result<Json<Machine>, ApiError> {
    Ok(Json(app.manager.get(id)?))
}

/// Remove a microVM and everything that belongs to it.
#[utoipa::path(delete, path = "/v1/machines/{id}", tag = "machines", params(("id" = String, Path)),
    responses((status = 204), (status = "4XX", body = ErrorBody), (status = "5XX", body = ErrorBody)))]
pub(super) async fn destroy(
    State(app): State<App>,
    Path(id): Path<WorkspaceId>,
) -> Result<StatusCode, ApiError> {
    run_to_end(async move { app.manager.destroy(id).await }).await.map(|_| StatusCode::NO_CONTENT)
}

/// Start a microVM that was stopped.
#[utoipa::path(post, path = "/v1/machines/{id}/start", tag = "machines", params(("id" = String, Path)),
    responses((status = 200, body = Machine), (status = "4XX", body = ErrorBody), (status = "5XX", body = ErrorBody)))]
pub(super) async fn start(
    State(app): State<App>,
    Path(id): Path<WorkspaceId>,
) -> Result<Json<Machine>, ApiError> {
    run_to_end(async move { app.manager.start(id).await }).await
}

/// Stop a microVM; its disk is kept.
#[utoipa::path(post, path = "/v1/machines/{id}/stop", tag = "machines", params(("id" = String, Path)),
    responses((status = 200, body = Machine), (status = "4XX", body = ErrorBody), (status = "5XX", body = ErrorBody)))]
pub(super) async fn stop(
    State(app): State<App>,
    Path(id): Path<WorkspaceId>,
) -> Result<Json<Machine>, ApiError> {
    run_to_end(async move { app.manager.stop(id).await }).await
}

/// Let a microVM go on that was being copied.
#[utoipa::path(post, path = "/v1/machines/{id}/go-on", tag = "machines", params(("id" = String, Path)),
    responses((status = 200, body = Machine), (status = "4XX", body = ErrorBody), (status = "5XX", body = ErrorBody)))]
pub(super) async fn go_on(
    State(app): State<App>,
    Path(id): Path<WorkspaceId>,
) -> Result<Json<Machine>, ApiError> {
    run_to_end(async move { app.manager.unpause(id).await }).await
}

/// Open a channel to the guest agent of a microVM.
///
/// The request is upgraded (`Upgrade: emergent-channel`); what follows is the agent's own protocol.
#[utoipa::path(get, path = "/v1/machines/{id}/channel", tag = "machines", params(("id" = String, Path)),
    responses((status = 101), (status = "4XX", body = ErrorBody), (status = "5XX", body = ErrorBody)))]
pub(super) async fn channel(
    State(app): State<App>,
    Path(id): Path<WorkspaceId>,
    mut request: Request,
) -> Result<Response, ApiError> {
    if request.headers().get(header::UPGRADE) != Some(&PROTOCOL) {
        let message = format!(
            "this address takes requests with `Connection: upgrade` and `Upgrade: {CHANNEL_PROTOCOL}`"
        );
        return Err(ApiError::new(ErrorCode::BadRequest, message));
    }
    let mut agent = app.manager.channel(id).await?;
    let upgraded = hyper::upgrade::on(&mut request);
    tokio::spawn(async move {
        match upgraded.await {
            Ok(upgraded) => {
                let _ = tokio::io::copy_bidirectional(&mut TokioIo::new(upgraded), &mut agent).await;
            }
            Err(error) => tracing::debug!(machine = %id, %error, "a request for a channel was not upgraded"),
        }
    });
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
    response.headers_mut().insert(header::UPGRADE, PROTOCOL);
    Ok(response)
}
