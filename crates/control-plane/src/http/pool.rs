//! The warm pool.

use axum::Json;
use axum::extract::State;
use emergent_wire::error::ErrorBody;
use emergent_wire::pool::{PoolStatus, PoolTarget};

use super::App;
use super::error::ApiError;
use super::extract::Body;
use super::route::RouteRule;

pub(super) const STATUS: RouteRule = RouteRule::admin("pool.get").needs_sandboxes();

/// Get the target and the state of the warm pool.
#[utoipa::path(get, path = "/api/v1/agent/pool", tag = "pool",
    responses((status = 200, body = PoolStatus), (status = "4XX", body = ErrorBody)))]
pub(super) async fn status(State(app): State<App>) -> Result<Json<PoolStatus>, ApiError> {
    Ok(Json(app.workspaces.pool.status().await?))
}

pub(super) const SET: RouteRule = RouteRule::admin("pool.set").needs_sandboxes();

/// Set the target of the warm pool.
///
/// The target is kept until it is set again or reset, also after a restart. An empty list turns the pool off.
#[utoipa::path(put, path = "/api/v1/agent/pool", tag = "pool", request_body = PoolTarget,
    responses((status = 200, body = PoolStatus), (status = "4XX", body = ErrorBody)))]
pub(super) async fn set(
    State(app): State<App>,
    Body(target): Body<PoolTarget>,
) -> Result<Json<PoolStatus>, ApiError> {
    app.workspaces.pool.set_target(Some(target)).await?;
    Ok(Json(app.workspaces.pool.status().await?))
}

pub(super) const RESET: RouteRule = RouteRule::admin("pool.reset").needs_sandboxes();

/// Reset the target of the warm pool to that of the configuration.
#[utoipa::path(delete, path = "/api/v1/agent/pool", tag = "pool",
    responses((status = 200, body = PoolStatus), (status = "4XX", body = ErrorBody)))]
pub(super) async fn reset(State(app): State<App>) -> Result<Json<PoolStatus>, ApiError> {
    app.workspaces.pool.set_target(None).await?;
    Ok(Json(app.workspaces.pool.status().await?))
}
