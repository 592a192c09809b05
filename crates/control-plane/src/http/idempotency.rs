//! The header `Idempotency-Key`: a request that is sent again, because its answer was lost, finds what the first one made.

use axum::http::HeaderMap;
use chrono::Utc;
use emergent_store::{Begun as Stored, IdempotencyStatus, IdempotentRequest, StoreError};
use emergent_wire::workspace::Workspace;
use emergent_wire::{ErrorCode, WorkspaceId};
use serde::Serialize;

use super::App;
use super::error::ApiError;
use crate::caller::Principal;

const HEADER: &str = "idempotency-key";

/// A key that this request works under.
pub(super) struct IdempotencyKey(IdempotentRequest);

/// Where a request with a key, or without, stands.
pub(super) enum Begun {
    /// Nothing was made for it yet.
    New(Option<IdempotencyKey>),
    /// An earlier request with the same key made this.
    Made(Box<Workspace>),
}

/// Looks for an earlier request with the same key.
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
                let message =
                    "the workspace that was made under this Idempotency-Key is gone: use another key";
                Err(ApiError::new(ErrorCode::Conflict, message))
            }
            Err(error) => Err(error.into()),
        },
        _ if is_interrupted(app, earlier.owner).await
            && store.take_over_idempotent(&request, earlier.owner).await? =>
        {
            // What its server had begun is undone by recovery.
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
async fn is_interrupted(app: &App, owner: Option<emergent_wire::id::ServerId>) -> bool {
    let Some(owner) = owner else { return true };
    if owner == app.workspaces.context.store.server() {
        return false;
    }
    let _ = app.workspaces.context.servers.look_for([Some(owner)], &app.workspaces.context.store).await;
    !app.workspaces.context.servers.is_alive(owner)
}

/// The request has made its workspace.
pub(super) async fn finish(app: &App, key: Option<IdempotencyKey>, id: WorkspaceId) {
    if let Some(IdempotencyKey(request)) = key
        && let Err(error) = app.workspaces.context.store.finish_idempotent(&request, id.0).await
    {
        tracing::warn!(workspace = %id, %error, "an idempotency key could not be written");
    }
}

/// The request has failed: the same key may be tried again.
pub(super) async fn forget(app: &App, key: Option<IdempotencyKey>) {
    if let Some(IdempotencyKey(request)) = key
        && let Err(error) = app.workspaces.context.store.forget_idempotent(&request).await
    {
        tracing::warn!(%error, "an idempotency key could not be removed");
    }
}
