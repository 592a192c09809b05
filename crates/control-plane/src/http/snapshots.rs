//! Snapshots: create, list, get, delete; workspaces made from them; and the quarantine.

use axum::Json;
use axum::extract::{Extension, State};
use axum::http::{HeaderMap, StatusCode};
use emergent_wire::error::ErrorBody;
use emergent_wire::snapshot::{CreateSnapshot, FromSnapshot, Snapshot, SnapshotList};
use emergent_wire::workspace::Workspace;
use emergent_wire::{SnapshotId, WorkspaceId};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use super::App;
use super::error::ApiError;
use super::extract::{Body, Id, Params, page_limit};
use super::idempotency::{self, Begun};
use super::route::{RouteRule, Target};
use super::workspaces::{answer_creation, prefers_async, run_to_completion};
use crate::caller::Caller;

pub(super) const CREATE: RouteRule = RouteRule::admin("workspace.snapshot").on(Target::Workspace);

/// Copy a workspace's files.
///
/// The workspace is paused for that time. The copy is kept when the workspace is destroyed.
#[utoipa::path(post, path = "/api/v1/agent/workspaces/{id}/snapshot", tag = "snapshots",
    params(("id" = WorkspaceId, Path)), request_body = CreateSnapshot,
    responses((status = 201, body = Snapshot), (status = "4XX", body = ErrorBody), (status = "5XX", body = ErrorBody)))]
pub(super) async fn create(
    State(app): State<App>,
    Id(id): Id<WorkspaceId>,
    Body(request): Body<CreateSnapshot>,
) -> Result<(StatusCode, Json<Snapshot>), ApiError> {
    let workspaces = app.workspaces.clone();
    let snapshot = run_to_completion(async move { workspaces.snapshots.create(id, request).await }).await?;
    Ok((StatusCode::CREATED, Json(snapshot)))
}

pub(super) const RESTORE: RouteRule = RouteRule::admin("workspace.from_snapshot").needs_sandboxes();

/// Create a workspace with the files of a snapshot.
///
/// Answers when the workspace is ready, or, with the header `Prefer: respond-async`, at once with status `creating`.
#[utoipa::path(post, path = "/api/v1/agent/workspaces/from-snapshot", tag = "snapshots", request_body = FromSnapshot,
    params(("Prefer" = Option<String>, Header, description = "`respond-async` to answer at once"),
        ("Idempotency-Key" = Option<String>, Header, description = "the same key and request make one workspace")),
    responses((status = 201, body = Workspace), (status = 202, body = Workspace),
        (status = "4XX", body = ErrorBody), (status = "5XX", body = ErrorBody)))]
pub(super) async fn restore(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    headers: HeaderMap,
    Body(request): Body<FromSnapshot>,
) -> Result<(StatusCode, Json<Workspace>), ApiError> {
    let is_async = prefers_async(&headers);
    let key =
        match idempotency::begin(&app, &caller.principal, &headers, "workspace.from_snapshot", &*request)
            .await?
        {
            Begun::Made(workspace) => return Ok((StatusCode::CREATED, Json(*workspace))),
            Begun::New(key) => key,
        };
    let creation = app.workspaces.create.begin_from_snapshot(request, !is_async).await;
    answer_creation(&app, creation, is_async, key).await
}

/// The snapshots to list.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct ListParams {
    /// Only snapshots of this workspace.
    workspace_id: Option<WorkspaceId>,
    /// `next_cursor` of the page before.
    cursor: Option<String>,
    /// The size of the page: 1 to 500, 100 unless given.
    limit: Option<u32>,
}

pub(super) const LIST: RouteRule = RouteRule::admin("snapshot.list").needs_sandboxes();

/// List snapshots, newest first.
#[utoipa::path(get, path = "/api/v1/agent/workspaces/snapshots", tag = "snapshots", params(ListParams),
    responses((status = 200, body = SnapshotList), (status = "4XX", body = ErrorBody)))]
pub(super) async fn list(
    State(app): State<App>,
    Params(params): Params<ListParams>,
) -> Result<Json<SnapshotList>, ApiError> {
    let limit = page_limit(params.limit)?;
    let page =
        app.workspaces.context.store.snapshots(params.workspace_id, params.cursor.as_deref(), limit).await;
    Ok(Json(page?))
}

pub(super) const GET: RouteRule = RouteRule::admin("snapshot.get").needs_sandboxes();

/// Get one snapshot.
#[utoipa::path(get, path = "/api/v1/agent/workspaces/snapshots/{id}", tag = "snapshots",
    params(("id" = SnapshotId, Path)),
    responses((status = 200, body = Snapshot), (status = "4XX", body = ErrorBody)))]
pub(super) async fn get(State(app): State<App>, Id(id): Id<SnapshotId>) -> Result<Json<Snapshot>, ApiError> {
    Ok(Json(app.workspaces.context.store.snapshot(id).await?.snapshot))
}

/// A snapshot was removed.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct SnapshotDestroyed {
    /// Its id.
    id: SnapshotId,
    /// Always true: a failure is an error.
    destroyed: bool,
}

pub(super) const DELETE: RouteRule = RouteRule::admin("snapshot.delete").needs_sandboxes();

/// Remove a snapshot. Workspaces that were made from it keep their files.
#[utoipa::path(delete, path = "/api/v1/agent/workspaces/snapshots/{id}", tag = "snapshots",
    params(("id" = SnapshotId, Path)),
    responses((status = 200, body = SnapshotDestroyed), (status = "4XX", body = ErrorBody), (status = "5XX", body = ErrorBody)))]
pub(super) async fn delete(
    State(app): State<App>,
    Id(id): Id<SnapshotId>,
) -> Result<Json<SnapshotDestroyed>, ApiError> {
    let workspaces = app.workspaces.clone();
    run_to_completion(async move { workspaces.snapshots.delete(id).await }).await?;
    Ok(Json(SnapshotDestroyed { id, destroyed: true }))
}

/// The page of the quarantine to list.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct QuarantineParams {
    /// `next_cursor` of the page before.
    cursor: Option<String>,
    /// The size of the page: 1 to 500, 100 unless given.
    limit: Option<u32>,
}

pub(super) const LIST_QUARANTINE: RouteRule = RouteRule::admin("quarantine.list").needs_sandboxes();

/// List files in quarantine, newest first: disks and snapshots that were found without a row in the database.
#[utoipa::path(get, path = "/api/v1/agent/workspaces/quarantine", tag = "snapshots", params(QuarantineParams),
    responses((status = 200, body = SnapshotList), (status = "4XX", body = ErrorBody)))]
pub(super) async fn list_quarantine(
    State(app): State<App>,
    Params(params): Params<QuarantineParams>,
) -> Result<Json<SnapshotList>, ApiError> {
    let limit = page_limit(params.limit)?;
    let page = app.workspaces.context.store.quarantined_snapshots(params.cursor.as_deref(), limit).await;
    Ok(Json(page?))
}

pub(super) const RESTORE_QUARANTINED: RouteRule = RouteRule::admin("quarantine.restore").needs_sandboxes();

/// Turn files in quarantine into an ordinary snapshot, from which a workspace can be created.
#[utoipa::path(post, path = "/api/v1/agent/workspaces/quarantine/{id}/restore", tag = "snapshots",
    params(("id" = SnapshotId, Path)),
    responses((status = 200, body = Snapshot), (status = "4XX", body = ErrorBody)))]
pub(super) async fn restore_quarantined(
    State(app): State<App>,
    Id(id): Id<SnapshotId>,
) -> Result<Json<Snapshot>, ApiError> {
    Ok(Json(app.workspaces.quarantine.restore(id).await?))
}

pub(super) const PURGE_QUARANTINED: RouteRule = RouteRule::admin("quarantine.purge").needs_sandboxes();

/// Remove files in quarantine. They can't be restored after that.
#[utoipa::path(delete, path = "/api/v1/agent/workspaces/quarantine/{id}", tag = "snapshots",
    params(("id" = SnapshotId, Path)),
    responses((status = 200, body = SnapshotDestroyed), (status = "4XX", body = ErrorBody), (status = "5XX", body = ErrorBody)))]
pub(super) async fn purge_quarantined(
    State(app): State<App>,
    Id(id): Id<SnapshotId>,
) -> Result<Json<SnapshotDestroyed>, ApiError> {
    let workspaces = app.workspaces.clone();
    run_to_completion(async move { workspaces.quarantine.purge(id).await }).await?;
    Ok(Json(SnapshotDestroyed { id, destroyed: true }))
}
