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

use super::App;
use super::error::ApiError;
use super::route::{AuditPolicy, RouteRule};
use crate::workspace::DiskLevel;

/// The health of the server.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct Health {
    /// `ok`, or the problem.
    status: String,
    /// The kind of the problem. Absent if there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    code: Option<HealthCode>,
    /// Conditions that will become problems.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    warnings: Vec<String>,
}

/// The reason why the server is not ready.
#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(super) enum HealthCode {
    /// The first recovery pass has not ended.
    Starting,
    /// The database does not answer.
    DatabaseUnavailable,
    /// The host's disk is full. Requests that need no room are answered.
    HostDiskFull,
}

impl Health {
    fn ok() -> Self {
        Self { status: "ok".to_owned(), code: None, warnings: Vec::new() }
    }
}

pub(super) const LIVE: RouteRule = RouteRule::open("health.live");

/// Check whether the process answers.
#[utoipa::path(get, path = "/health/live", tag = "operations", security(()), responses((status = 200, body = Health)))]
pub(super) async fn live() -> Json<Health> {
    Json(Health::ok())
}

pub(super) const READY: RouteRule = RouteRule::open("health.ready");

/// Check whether the server can take requests: its database answers, the first recovery pass has ended, and the host's disk has room.
/// On a full disk the server still answers requests that need no room, such as removals.
#[utoipa::path(get, path = "/health/ready", tag = "operations", security(()),
    responses((status = 200, body = Health), (status = 503, body = Health)))]
pub(super) async fn ready(State(app): State<App>) -> (StatusCode, Json<Health>) {
    let refuse = |code, status: &str| {
        let health = Health { status: status.to_owned(), code: Some(code), ..Health::ok() };
        (StatusCode::SERVICE_UNAVAILABLE, Json(health))
    };
    if !app.ready.load(Ordering::Relaxed) {
        return refuse(HealthCode::Starting, "starting");
    }
    if app.workspaces.context.store.ping().await.is_err() {
        return refuse(HealthCode::DatabaseUnavailable, "the database does not answer");
    }
    // The client may have no token, so the answer has neither paths nor numbers.
    match app.workspaces.disk_space.level() {
        DiskLevel::Full => refuse(HealthCode::HostDiskFull, "the host's disk is full"),
        DiskLevel::Low => {
            let warnings = vec!["the host's disk is nearly full".to_owned()];
            (StatusCode::OK, Json(Health { warnings, ..Health::ok() }))
        }
        DiskLevel::Enough => (StatusCode::OK, Json(Health::ok())),
    }
}

pub(super) const METRICS: RouteRule = RouteRule::admin("metrics").audited(AuditPolicy::Never);

/// Metrics for Prometheus. Needs an admin token.
pub(super) async fn metrics(State(app): State<App>) -> Response {
    match app.workspaces.context.store.active_counts().await {
        Ok(counts) => {
            for (provider, count) in counts {
                #[allow(clippy::cast_precision_loss, reason = "a count of workspaces is small")]
                metrics::gauge!("emergent_workspaces_active", "provider" => provider.as_str())
                    .set(count as f64);
            }
        }
        Err(error) => tracing::warn!(%error, "the metrics have old counts: workspaces can't be counted"),
    }
    let text = app.metrics.render() + &app.workspaces.usage.metrics();
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], text).into_response()
}

/// The answer to a request whose handler panicked. The panic hook has logged the panic.
#[allow(clippy::needless_pass_by_value, reason = "the layer wants a function that takes the panic")]
pub(super) fn panicked(_panic: Box<dyn Any + Send + 'static>) -> Response {
    tracing::error!("a handler panicked");
    ApiError::new(ErrorCode::Internal, "the server failed; its log has more").into_response()
}
