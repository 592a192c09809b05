//! Access tokens.

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use chrono::Utc;
use emergent_store::NewToken;
use emergent_wire::TokenId;
use emergent_wire::access::{CreateToken, CreatedToken, TokenList};
use emergent_wire::error::ErrorBody;

use super::App;
use super::error::ApiError;
use super::extract::{Body, Id};
use super::route::RouteRule;

pub(super) const CREATE: RouteRule = RouteRule::admin("token.create");

/// Create a token. Its secret is shown only in this answer.
#[utoipa::path(post, path = "/api/v1/tokens", tag = "access", request_body = CreateToken,
    responses((status = 201, body = CreatedToken), (status = "4XX", body = ErrorBody)))]
pub(super) async fn create(
    State(app): State<App>,
    Body(request): Body<CreateToken>,
) -> Result<(StatusCode, Json<CreatedToken>), ApiError> {
    let store = &app.workspaces.context.store;
    if let Some(id) = request.workspace_id {
        store.workspace(id).await?;
    }
    let scope = request.scope();
    let CreateToken { name, ttl_seconds, .. } = request.into_inner();
    let new = NewToken { scope, name, ttl_seconds };
    let created = store.create_token(&new, Utc::now()).await?;
    Ok((StatusCode::CREATED, Json(created)))
}

pub(super) const LIST: RouteRule = RouteRule::admin("token.list");

/// List the tokens that are not revoked, without their secrets.
#[utoipa::path(get, path = "/api/v1/tokens", tag = "access",
    responses((status = 200, body = TokenList), (status = "4XX", body = ErrorBody)))]
pub(super) async fn list(State(app): State<App>) -> Result<Json<TokenList>, ApiError> {
    let tokens = app.workspaces.context.store.tokens().await?;
    let unreadable = tokens.unreadable.into_iter().map(Into::into).collect();
    Ok(Json(TokenList { tokens: tokens.readable, unreadable }))
}

pub(super) const REVOKE: RouteRule = RouteRule::admin("token.revoke");

/// Revoke a token.
#[utoipa::path(delete, path = "/api/v1/tokens/{id}", tag = "access", params(("id" = TokenId, Path)),
    responses((status = 204), (status = "4XX", body = ErrorBody)))]
pub(super) async fn revoke(State(app): State<App>, Id(id): Id<TokenId>) -> Result<StatusCode, ApiError> {
    app.workspaces.context.store.revoke_token(id, Utc::now()).await?;
    Ok(StatusCode::NO_CONTENT)
}
