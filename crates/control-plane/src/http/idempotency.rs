//! The header `Idempotency-Key`: a client that repeats a request, because its answer was lost, gets the workspace of the first one.

use axum::http::HeaderMap;
use chrono::Utc;
use emergent_store::{Begun as Stored, IdempotencyStatus, IdempotentRequest, StoreError};
use emergent_wire::id::ServerId;
use emergent_wire::workspace::Workspace;
use emergent_wire::{ErrorCode, WorkspaceId};
use serde::Serialize;

use super::App;
use super::error::ApiError;
use crate::caller::Principal;

const HEADER: &str = "idempotency-key";

/// The key of a request in progress.
pub(super) struct IdempotencyKey(IdempotentRequest);

/// The result of looking for an earlier request with the same key.
pub(super) enum Begun {
    /// There is none. The key is None when the request has none.
    New(Option<IdempotencyKey>),
    /// An earlier request has made this workspace.
    Made(Box<Workspace>),
}

/// Looks for an earlier request with the same key, and begins a new one if there is none.
pub(super) async fn begin(
    app: &App,
    principal: &Principal,
    headers: &HeaderMap,
    operation: &str,
    request: &impl Serialize,
) -> Result<Begun, ApiError> {
    let Some(key) = headers.get(HEADER) else {
        return Ok(Begun::New(None));
    };
    let key = key.to_str().map_err(|_| {
        ApiError::new(ErrorCode::BadRequest, "Idempotency-Key must consist of visible ASCII characters")
    })?;
    let body =
        serde_json::to_vec(request).map_err(|error| ApiError::new(ErrorCode::Internal, error.to_string()))?;
    let request = IdempotentRequest::new(principal.token_id, key, operation, &body)?;
    let store = &app.workspaces.context.store;
    let earlier = match store.begin_idempotent(&request, None, Utc::now()).await? {
        Stored::New => return Ok(Begun::New(Some(IdempotencyKey(request)))),
        Stored::Earlier(earlier) => earlier,
    };
    match (earlier.status, earlier.resource_id) {
        (IdempotencyStatus::Done, Some(id)) => match store.workspace(WorkspaceId(id)).await {
            Ok(workspace) => Ok(Begun::Made(Box::new(workspace))),
            Err(StoreError::NotFound { .. }) => {
                let message = "the workspace of this Idempotency-Key was removed: use another key";
                Err(ApiError::new(ErrorCode::Conflict, message))
            }
            Err(error) => Err(error.into()),
        },
        _ if is_interrupted(app, earlier.owner).await?
            && store.take_over_idempotent(&request, earlier.owner).await? =>
        {
            // Recovery undoes the work that its server had begun.
            Ok(Begun::New(Some(IdempotencyKey(request))))
        }
        _ => {
            let message =
                "an earlier request with this Idempotency-Key is still in progress: retry in a moment";
            Err(ApiError::new(ErrorCode::Conflict, message))
        }
    }
}

/// Whether the server that worked on a request has ended.
async fn is_interrupted(app: &App, owner: Option<ServerId>) -> Result<bool, StoreError> {
    let Some(owner) = owner else { return Ok(true) };
    let context = &app.workspaces.context;
    if owner == context.store.server() {
        return Ok(false);
    }
    context.servers.refresh_for([Some(owner)], &context.store).await?;
    Ok(!context.servers.is_alive(owner))
}

/// Stores the workspace that the request has made.
pub(super) async fn complete(app: &App, key: Option<IdempotencyKey>, id: WorkspaceId) {
    if let Some(IdempotencyKey(request)) = key
        && let Err(error) = app.workspaces.context.store.finish_idempotent(&request, id.0).await
    {
        tracing::warn!(workspace = %id, %error, "the workspace of an idempotency key could not be stored");
    }
}

/// Removes the key of a request that has failed, so that it can be repeated.
pub(super) async fn forget(app: &App, key: Option<IdempotencyKey>) {
    if let Some(IdempotencyKey(request)) = key
        && let Err(error) = app.workspaces.context.store.forget_idempotent(&request).await
    {
        tracing::warn!(%error, "an idempotency key could not be removed");
    }
}
