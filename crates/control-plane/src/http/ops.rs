//! Health and metrics.

use std::any::Any;
use std::sync::atomic::Ordering;

use axum::Json;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use emergent_wire::ErrorCode;
use serde::Serialize;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::App;
use super::error::ApiError;

/// Routes that need no token.
pub(super) fn open_routes() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(live)).routes(routes!(ready))
}

/// How the server is doing.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct Health {
    /// `ok`, or what is wrong.
    status: &'static str,
}

/// Whether the process answers.
#[utoipa::path(get, path = "/health/live", tag = "operations", security(()), responses((status = 200, body = Health)))]
pub(super) async fn live() -> Json<Health> {
    Json(Health { status: "ok" })
}

/// Whether the server can take requests: its database answers and it has looked after what a crash left.
#[utoipa::path(get, path = "/health/ready", tag = "operations", security(()),
    responses((status = 200, body = Health), (status = 503, body = Health)))]
pub(super) async fn ready(State(app): State<App>) -> (StatusCode, Json<Health>) {
    let status = if !app.ready.load(Ordering::Relaxed) {
        "starting"
    } else if app.workspaces.store.ping().await.is_err() {
        "the database does not answer"
    } else {
        return (StatusCode::OK, Json(Health { status: "ok" }));
    };
    (StatusCode::SERVICE_UNAVAILABLE, Json(Health { status }))
}

/// Metrics for Prometheus. Needs an admin token.
pub(super) async fn metrics(State(app): State<App>) -> Response {
    if let Ok(counts) = app.workspaces.store.active_counts().await {
        for (provider, count) in counts {
            #[allow(clippy::cast_precision_loss, reason = "a count of workspaces is small")]
            metrics::gauge!("emergent_workspaces_active", "provider" => provider.as_str()).set(count as f64);
        }
    }
    let text = app.metrics.render() + &app.workspaces.usage_metrics();
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], text).into_response()
}

/// A fault of ours must not take the connection down without a word.
#[allow(clippy::needless_pass_by_value, reason = "the layer wants a function that takes the panic")]
pub(super) fn panicked(_panic: Box<dyn Any + Send + 'static>) -> Response {
    tracing::error!("a handler panicked");
    ApiError::new(ErrorCode::Internal, "the server failed; its log says more").into_response()
}
