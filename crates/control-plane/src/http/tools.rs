//! The seven tools of one workspace.

use axum::Json;
use axum::body::Body as HttpBody;
use axum::extract::{Extension, FromRequest, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use base64::Engine as _;
use emergent_wire::error::ErrorBody;
use emergent_wire::git::{GitAnswer, GitRequest};
use emergent_wire::tools::{
    BashAnswer, BashRequest, EditAnswer, EditRequest, GlobAnswer, GlobRequest, GrepAnswer, GrepRequest,
    OperationAnswer, ReadAnswer, ReadRequest, WriteAnswer, WriteRequest,
};
use emergent_wire::{ErrorCode, WorkspaceId};
use sha2::{Digest, Sha256};

use super::App;
use super::error::ApiError;
use super::extract::{Body, Id};
use super::route::{BODY_BYTES, RouteRule};
use super::stream;
use crate::caller::Caller;
use crate::workspace::FileStream;

/// The largest body of `write`: 64 MiB as JSON text or base64.
const WRITE_BODY_BYTES: usize = 140 << 20;

/// Whether the client asks for this kind of answer by name.
pub(super) fn asks_for(headers: &HeaderMap, kind: &str) -> bool {
    let accepted = headers.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok());
    accepted
        .flat_map(|value| value.split(','))
        .any(|value| value.split(';').next().unwrap_or("").trim() == kind)
}

/// Of `exec`, too.
pub(super) const BASH: RouteRule = RouteRule::workspace_use("bash");

/// Run a command.
///
/// Answers when it has ended; with `Accept: text/event-stream` its output comes as events `stdout` and `stderr`, then
/// one `result`; with `background` it answers at once with an operation.
#[utoipa::path(post, path = "/api/v1/agent/workspaces/{id}/bash", tag = "tools",
    params(("id" = WorkspaceId, Path)), request_body = BashRequest,
    responses((status = 200, body = BashAnswer), (status = 202, body = OperationAnswer),
        (status = "4XX", body = ErrorBody), (status = "5XX", body = ErrorBody)))]
pub(super) async fn bash(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    Id(id): Id<WorkspaceId>,
    headers: HeaderMap,
    Body(request): Body<BashRequest>,
) -> Result<Response, ApiError> {
    if request.background {
        let started = app.workspaces.bash_background(&caller, id, request).await?;
        return Ok((StatusCode::ACCEPTED, Json(started)).into_response());
    }
    if asks_for(&headers, "text/event-stream") {
        let output = app.workspaces.bash_stream(&caller, id, request).await?;
        return Ok(stream::events(output, None));
    }
    Ok(Json(app.workspaces.bash(&caller, id, request).await?).into_response())
}

/// Run a command (another name for `bash`).
#[utoipa::path(post, path = "/api/v1/agent/workspaces/{id}/exec", tag = "tools",
    params(("id" = WorkspaceId, Path)), request_body = BashRequest,
    responses((status = 200, body = BashAnswer), (status = 202, body = OperationAnswer),
        (status = "4XX", body = ErrorBody), (status = "5XX", body = ErrorBody)))]
pub(super) async fn exec(
    state: State<App>,
    caller: Extension<Caller>,
    id: Id<WorkspaceId>,
    headers: HeaderMap,
    body: Body<BashRequest>,
) -> Result<Response, ApiError> {
    bash(state, caller, id, headers, body).await
}

pub(super) const READ: RouteRule = RouteRule::workspace_use("read");

/// Read a file or list a directory.
///
/// With `raw` the exact bytes, base64 in `content`, or as they are with `Accept: application/octet-stream`.
#[utoipa::path(post, path = "/api/v1/agent/workspaces/{id}/read", tag = "tools",
    params(("id" = WorkspaceId, Path)), request_body = ReadRequest,
    responses((status = 200, body = ReadAnswer), (status = "4XX", body = ErrorBody), (status = "5XX", body = ErrorBody)))]
pub(super) async fn read(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    Id(id): Id<WorkspaceId>,
    headers: HeaderMap,
    Body(request): Body<ReadRequest>,
) -> Result<Response, ApiError> {
    if !request.raw {
        return Ok(Json(app.workspaces.read(&caller, id, request).await?).into_response());
    }
    let as_bytes = asks_for(&headers, "application/octet-stream");
    let file = app.workspaces.read_raw(&caller, id, request).await?;
    if as_bytes {
        return Ok(([(header::CONTENT_TYPE, "application/octet-stream")], bytes_of(file)).into_response());
    }
    let _place = large_body(&app).await?;
    let bytes = file.collect().await?;
    let answer = ReadAnswer {
        content: base64::engine::general_purpose::STANDARD.encode(&bytes),
        file_size: bytes.len() as u64,
        sha256: Some(hex::encode(Sha256::digest(&bytes))),
        is_binary: std::str::from_utf8(&bytes).is_err(),
        ..ReadAnswer::default()
    };
    Ok(Json(answer).into_response())
}

/// A file as a body that is read as the client takes it.
fn bytes_of(file: FileStream) -> HttpBody {
    let pieces = futures_util::stream::try_unfold(file, |mut file| async move {
        let next = file.next().await.map_err(std::io::Error::other)?;
        Ok::<_, std::io::Error>(next.map(|bytes| (bytes, file)))
    });
    HttpBody::from_stream(pieces)
}

/// A place among the few large bodies that may be in memory at once.
async fn large_body(app: &App) -> Result<tokio::sync::OwnedSemaphorePermit, ApiError> {
    let place = app.large_bodies.clone().acquire_owned();
    match tokio::time::timeout(std::time::Duration::from_secs(30), place).await {
        Ok(Ok(place)) => Ok(place),
        _ => Err(ApiError::new(ErrorCode::Unavailable, "too many large files are in transfer: retry later")),
    }
}

pub(super) const WRITE: RouteRule = RouteRule::workspace_use("write").body_bytes(WRITE_BODY_BYTES);

/// Write a file.
#[utoipa::path(post, path = "/api/v1/agent/workspaces/{id}/write", tag = "tools",
    params(("id" = WorkspaceId, Path)), request_body = WriteRequest,
    responses((status = 200, body = WriteAnswer), (status = "4XX", body = ErrorBody), (status = "5XX", body = ErrorBody)))]
pub(super) async fn write(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    Id(id): Id<WorkspaceId>,
    request: axum::extract::Request,
) -> Result<Json<WriteAnswer>, ApiError> {
    let length = request.headers().get(header::CONTENT_LENGTH);
    let length = length.and_then(|value| value.to_str().ok()?.parse::<usize>().ok());
    // A body of unknown length may be large.
    let _place = match length {
        Some(length) if length <= BODY_BYTES => None,
        _ => Some(large_body(&app).await?),
    };
    let Body(request) = Body::<WriteRequest>::from_request(request, &app).await?;
    Ok(Json(app.workspaces.write(&caller, id, request).await?))
}

pub(super) const EDIT: RouteRule = RouteRule::workspace_use("edit");

/// Replace text in a file.
#[utoipa::path(post, path = "/api/v1/agent/workspaces/{id}/edit", tag = "tools",
    params(("id" = WorkspaceId, Path)), request_body = EditRequest,
    responses((status = 200, body = EditAnswer), (status = "4XX", body = ErrorBody), (status = "5XX", body = ErrorBody)))]
pub(super) async fn edit(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    Id(id): Id<WorkspaceId>,
    Body(request): Body<EditRequest>,
) -> Result<Json<EditAnswer>, ApiError> {
    Ok(Json(app.workspaces.edit(&caller, id, request).await?))
}

pub(super) const GLOB: RouteRule = RouteRule::workspace_use("glob");

/// Find files by name.
#[utoipa::path(post, path = "/api/v1/agent/workspaces/{id}/glob", tag = "tools",
    params(("id" = WorkspaceId, Path)), request_body = GlobRequest,
    responses((status = 200, body = GlobAnswer), (status = "4XX", body = ErrorBody), (status = "5XX", body = ErrorBody)))]
pub(super) async fn glob(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    Id(id): Id<WorkspaceId>,
    Body(request): Body<GlobRequest>,
) -> Result<Json<GlobAnswer>, ApiError> {
    Ok(Json(app.workspaces.glob(&caller, id, request).await?))
}

pub(super) const GREP: RouteRule = RouteRule::workspace_use("grep");

/// Search file contents.
#[utoipa::path(post, path = "/api/v1/agent/workspaces/{id}/grep", tag = "tools",
    params(("id" = WorkspaceId, Path)), request_body = GrepRequest,
    responses((status = 200, body = GrepAnswer), (status = "4XX", body = ErrorBody), (status = "5XX", body = ErrorBody)))]
pub(super) async fn grep(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    Id(id): Id<WorkspaceId>,
    Body(request): Body<GrepRequest>,
) -> Result<Json<GrepAnswer>, ApiError> {
    Ok(Json(app.workspaces.grep(&caller, id, request).await?))
}

pub(super) const GIT: RouteRule = RouteRule::workspace_use("git");

/// Use git.
#[utoipa::path(post, path = "/api/v1/agent/workspaces/{id}/git", tag = "tools",
    params(("id" = WorkspaceId, Path)), request_body = GitRequest,
    responses((status = 200, body = GitAnswer), (status = "4XX", body = ErrorBody), (status = "5XX", body = ErrorBody)))]
pub(super) async fn git(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    Id(id): Id<WorkspaceId>,
    Body(request): Body<GitRequest>,
) -> Result<Json<GitAnswer>, ApiError> {
    Ok(Json(app.workspaces.git(&caller, id, request).await?))
}
