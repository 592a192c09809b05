//! Workspaces: create, list, get, stop, resume, destroy, attach, detach; and the providers.

use std::fmt::Display;

use axum::Json;
use axum::extract::{Extension, State};
use axum::http::{HeaderMap, StatusCode};
use emergent_store::WorkspaceFilter;
use emergent_wire::error::ErrorBody;
use emergent_wire::id::SessionId;
use emergent_wire::workspace::{
    AttachRequest, ContainerType, CreateWorkspace, DetachRequest, ProviderInfo, ProviderName, Workspace,
    WorkspaceList, WorkspaceStatus,
};
use emergent_wire::{ErrorCode, WorkspaceId};
use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;
use tracing::Instrument as _;
use utoipa::{IntoParams, ToSchema};

use super::App;
use super::error::ApiError;
use super::extract::{Body, Id, Params, page_limit};
use super::idempotency::{self, Begun, IdempotencyKey};
use super::route::{RouteRule, Target};
use crate::caller::Caller;
use crate::workspace::{Creation, WorkspaceError};

pub(super) const CREATE: RouteRule = RouteRule::admin("workspace.create").needs_sandboxes();

/// Create a workspace.
///
/// Answers when the workspace is ready, or, with the header `Prefer: respond-async`, at once with status `creating`. If the client
/// disconnects before the answer, the workspace is destroyed. With the header `Idempotency-Key` it is kept, and is the answer to the
/// same request with the same key.
#[utoipa::path(post, path = "/api/v1/agent/workspaces", tag = "workspaces", request_body = CreateWorkspace,
    params(("Prefer" = Option<String>, Header, description = "`respond-async` to answer at once"),
        ("Idempotency-Key" = Option<String>, Header, description = "the same key and request make one workspace")),
    responses((status = 201, body = Workspace), (status = 202, body = Workspace),
        (status = "4XX", body = ErrorBody), (status = "5XX", body = ErrorBody)))]
pub(super) async fn create(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    headers: HeaderMap,
    Body(request): Body<CreateWorkspace>,
) -> Result<(StatusCode, Json<Workspace>), ApiError> {
    let is_async = prefers_async(&headers);
    let key =
        match idempotency::begin(&app, &caller.principal, &headers, "workspace.create", &*request).await? {
            Begun::Made(workspace) => return Ok((StatusCode::CREATED, Json(*workspace))),
            Begun::New(key) => key,
        };
    let creation = app.workspaces.create.begin(request, !is_async).await;
    answer_creation(&app, creation, is_async, key).await
}

pub(super) fn prefers_async(headers: &HeaderMap) -> bool {
    let prefers = headers.get_all("prefer").iter().filter_map(|value| value.to_str().ok());
    prefers.flat_map(|value| value.split(',')).any(|value| value.trim() == "respond-async")
}

/// Makes a workspace whose row is written, and answers with it. In asynchronous mode, answers with the row.
pub(super) async fn answer_creation(
    app: &App,
    creation: Result<Creation, WorkspaceError>,
    is_async: bool,
    key: Option<IdempotencyKey>,
) -> Result<(StatusCode, Json<Workspace>), ApiError> {
    let creation = match creation {
        Ok(creation) => creation,
        Err(error) => {
            idempotency::forget(app, key).await;
            return Err(error.into());
        }
    };
    let row = creation.workspace.clone();
    let (answer, answered) = oneshot::channel();
    let (app, is_kept) = (app.clone(), is_async || key.is_some());
    // A task of its own, which goes on when the client disconnects.
    let create = async move {
        let made = app.workspaces.create.provision(creation).await;
        match &made {
            Ok(workspace) => idempotency::complete(&app, key, workspace.id).await,
            Err(_) => idempotency::forget(&app, key).await,
        }
        if let Err(Ok(workspace)) = answer.send(made)
            && !is_kept
        {
            let id = workspace.id;
            tracing::warn!(workspace = %id, "the client disconnected before the answer: the workspace is destroyed");
            if let Err(error) = app.workspaces.lifecycle.destroy(id).await {
                tracing::warn!(workspace = %id, %error, "the workspace of a client that disconnected could not be destroyed");
            }
        }
    };
    tokio::spawn(create.in_current_span());
    if is_async {
        return Ok((StatusCode::ACCEPTED, Json(row)));
    }
    let made = answered.await;
    let workspace =
        made.map_err(|_| ApiError::new(ErrorCode::Internal, "creating the workspace failed"))??;
    Ok((StatusCode::CREATED, Json(workspace)))
}

/// The workspaces to list.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct ListParams {
    /// Only workspaces of this kind.
    container_type: Option<ContainerType>,
    /// Only workspaces on this provider.
    provider: Option<ProviderName>,
    /// Only workspaces with this status.
    status: Option<WorkspaceStatus>,
    /// Only workspaces of this session.
    agent_session_id: Option<SessionId>,
    /// `next_cursor` of the page before.
    cursor: Option<String>,
    /// The size of the page: 1 to 500, 100 unless given.
    limit: Option<u32>,
}

pub(super) const LIST: RouteRule = RouteRule::admin("workspace.list").needs_sandboxes();

/// List workspaces, newest first.
#[utoipa::path(get, path = "/api/v1/agent/workspaces", tag = "workspaces", params(ListParams),
    responses((status = 200, body = WorkspaceList), (status = "4XX", body = ErrorBody)))]
pub(super) async fn list(
    State(app): State<App>,
    Params(params): Params<ListParams>,
) -> Result<Json<WorkspaceList>, ApiError> {
    let limit = page_limit(params.limit)?;
    let filter = WorkspaceFilter {
        container_type: params.container_type,
        provider: params.provider,
        status: params.status,
        agent_session_id: params.agent_session_id,
    };
    let page = app.workspaces.context.store.workspaces(filter, params.cursor.as_deref(), limit).await?;
    Ok(Json(page))
}

pub(super) const GET: RouteRule =
    RouteRule::admin("workspace.get").on(Target::AnyWorkspace).for_bound_tokens();

/// Get one workspace.
#[utoipa::path(get, path = "/api/v1/agent/workspaces/{id}", tag = "workspaces",
    params(("id" = WorkspaceId, Path)),
    responses((status = 200, body = Workspace), (status = "4XX", body = ErrorBody)))]
pub(super) async fn get(
    State(app): State<App>,
    Id(id): Id<WorkspaceId>,
) -> Result<Json<Workspace>, ApiError> {
    Ok(Json(app.workspaces.get(id).await?))
}

/// A workspace was destroyed.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct Destroyed {
    /// Its id.
    id: WorkspaceId,
    /// Always true: a failure is an error.
    destroyed: bool,
}

pub(super) const DESTROY: RouteRule = RouteRule::admin("workspace.destroy").on(Target::Workspace);

/// Destroy a workspace and all its files.
#[utoipa::path(delete, path = "/api/v1/agent/workspaces/{id}", tag = "workspaces",
    params(("id" = WorkspaceId, Path)),
    responses((status = 200, body = Destroyed), (status = "4XX", body = ErrorBody), (status = "5XX", body = ErrorBody)))]
pub(super) async fn destroy(
    State(app): State<App>,
    Id(id): Id<WorkspaceId>,
) -> Result<Json<Destroyed>, ApiError> {
    let workspaces = app.workspaces.clone();
    run_to_completion(async move { workspaces.lifecycle.destroy(id).await }).await?;
    Ok(Json(Destroyed { id, destroyed: true }))
}

pub(super) const STOP: RouteRule = RouteRule::admin("workspace.stop").on(Target::Workspace);

/// Stop a workspace. Its files are kept.
#[utoipa::path(post, path = "/api/v1/agent/workspaces/{id}/stop", tag = "workspaces",
    params(("id" = WorkspaceId, Path)),
    responses((status = 200, body = Workspace), (status = "4XX", body = ErrorBody), (status = "5XX", body = ErrorBody)))]
pub(super) async fn stop(
    State(app): State<App>,
    Id(id): Id<WorkspaceId>,
) -> Result<Json<Workspace>, ApiError> {
    let workspaces = app.workspaces.clone();
    run_to_completion(async move { workspaces.lifecycle.stop(id).await }).await.map(Json)
}

pub(super) const RESUME: RouteRule = RouteRule::admin("workspace.resume").on(Target::Workspace);

/// Resume a stopped workspace.
#[utoipa::path(post, path = "/api/v1/agent/workspaces/{id}/resume", tag = "workspaces",
    params(("id" = WorkspaceId, Path)),
    responses((status = 200, body = Workspace), (status = "4XX", body = ErrorBody), (status = "5XX", body = ErrorBody)))]
pub(super) async fn resume(
    State(app): State<App>,
    Id(id): Id<WorkspaceId>,
) -> Result<Json<Workspace>, ApiError> {
    let workspaces = app.workspaces.clone();
    run_to_completion(async move { workspaces.lifecycle.resume(id).await }).await.map(Json)
}

pub(super) const ATTACH: RouteRule = RouteRule::admin("workspace.attach").on(Target::Workspace);

/// Attach a holder to a workspace.
///
/// A workspace has at most one holder: a second one gets 409 with the name of the first. Attaching the same holder again succeeds.
#[utoipa::path(post, path = "/api/v1/agent/workspaces/{id}/attach", tag = "workspaces",
    params(("id" = WorkspaceId, Path)), request_body = AttachRequest,
    responses((status = 200, body = Workspace), (status = "4XX", body = ErrorBody)))]
pub(super) async fn attach(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    Id(id): Id<WorkspaceId>,
    Body(request): Body<AttachRequest>,
) -> Result<Json<Workspace>, ApiError> {
    let holder = request.into_inner().holder.unwrap_or(caller.principal.name);
    Ok(Json(app.workspaces.attach(id, &holder).await?))
}

pub(super) const DETACH: RouteRule = RouteRule::admin("workspace.detach").on(Target::Workspace);

/// Detach the holder of a workspace. Succeeds if there is none.
#[utoipa::path(post, path = "/api/v1/agent/workspaces/{id}/detach", tag = "workspaces",
    params(("id" = WorkspaceId, Path)), request_body = DetachRequest,
    responses((status = 200, body = Workspace), (status = "4XX", body = ErrorBody)))]
pub(super) async fn detach(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    Id(id): Id<WorkspaceId>,
    Body(request): Body<DetachRequest>,
) -> Result<Json<Workspace>, ApiError> {
    let DetachRequest { holder, force } = request.into_inner();
    let holder = holder.unwrap_or(caller.principal.name);
    let holder = (!force).then_some(holder.as_str());
    Ok(Json(app.workspaces.detach(id, holder).await?))
}

/// Runs a change in a task of its own, which goes on when the client disconnects, and waits for its end.
pub(super) async fn run_to_completion<T, E>(
    change: impl Future<Output = Result<T, E>> + Send + 'static,
) -> Result<T, ApiError>
where
    T: Send + 'static,
    E: Display + Into<ApiError> + Send + 'static,
{
    let (answer, answered) = oneshot::channel();
    let run = async move {
        if let Err(Err(error)) = answer.send(change.await) {
            tracing::warn!(%error, "a change failed after its client had disconnected");
        }
    };
    tokio::spawn(run.in_current_span());
    let failed = |_| ApiError::new(ErrorCode::Internal, "the server failed; its log has more");
    answered.await.map_err(failed)?.map_err(Into::into)
}

/// All providers.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct ProviderList {
    /// Each provider, including those that are disabled.
    providers: Vec<ProviderInfo>,
}

pub(super) const PROVIDERS: RouteRule = RouteRule::admin("providers").needs_sandboxes();

/// List the sandbox providers with their health.
#[utoipa::path(get, path = "/api/v1/agent/workspaces/providers", tag = "workspaces",
    responses((status = 200, body = ProviderList), (status = "4XX", body = ErrorBody)))]
pub(super) async fn providers(State(app): State<App>) -> Result<Json<ProviderList>, ApiError> {
    let active = app.workspaces.context.store.active_counts().await?;
    Ok(Json(ProviderList { providers: app.workspaces.health.infos(&active) }))
}
