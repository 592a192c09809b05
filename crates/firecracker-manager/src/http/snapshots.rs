//! Copies of disks.

use axum::Json;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use emergent_wire::SnapshotId;
use emergent_wire::error::ErrorBody;
use emergent_wire::manager::{MachineSnapshot, MachineSnapshotList, MachineSnapshotRequest};

use super::error::ApiError;
use super::{App, run_to_end};

/// List copies.
#[utoipa::path(get, path = "/v1/snapshots", tag = "snapshots",
    responses((status = 200, body = MachineSnapshotList), (status = "4XX", body = ErrorBody)))]
pub(super) async fn list(State(app): State<App>) -> Result<Json<MachineSnapshotList>, ApiError> {
    Ok(Json(MachineSnapshotList { snapshots: app.manager.snapshots().await? }))
}

/// Copy a microVM's disk, and its memory if that is asked for.
#[utoipa::path(put, path = "/v1/snapshots/{id}", tag = "snapshots", params(("id" = String, Path)),
    request_body = MachineSnapshotRequest,
    responses((status = 200, body = MachineSnapshot), (status = "4XX", body = ErrorBody), (status = "5XX", body = ErrorBody)))]
pub(super) async fn create(
    State(app): State<App>,
    Path(id): Path<SnapshotId>,
    Json(request): Json<MachineSnapshotRequest>,
) -> Result<Json<MachineSnapshot>, ApiError> {
    run_to_end(async move { app.manager.snapshot(request.machine, id, request.memory).await }).await
}

/// Remove a copy, whole or not.
#[utoipa::path(delete, path = "/v1/snapshots/{id}", tag = "snapshots", params(("id" = String, Path)),
    responses((status = 204), (status = "4XX", body = ErrorBody), (status = "5XX", body = ErrorBody)))]
pub(super) async fn remove(
    State(app): State<App>,
    Path(id): Path<SnapshotId>,
) -> Result<StatusCode, ApiError> {
    run_to_end(async move { app.manager.remove_snapshot(id).await }).await.map(|_| StatusCode::NO_CONTENT)
}
