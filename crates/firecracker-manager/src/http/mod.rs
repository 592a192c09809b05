//! The manager's REST API. Handlers parse, call and convert.

mod access;
mod error;
mod images;
mod machines;
mod snapshots;

use std::sync::Arc;

use axum::extract::{DefaultBodyLimit, State};
use axum::{Json, Router, middleware};
use emergent_wire::ErrorCode;
use emergent_wire::error::ErrorBody;
use emergent_wire::manager::ManagerHealth;
use secrecy::SecretString;
use utoipa::OpenApi;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::manager::Manager;
use error::ApiError;

/// The largest body, except for images.
const BODY_BYTES: usize = 1 << 20;

/// The state of all handlers.
#[derive(Clone)]
pub(crate) struct App {
    manager: Arc<Manager>,
    token: Arc<SecretString>,
}

#[derive(OpenApi)]
#[openapi(
    info(
        title = "Emergent Firecracker manager",
        description = "MicroVMs on one host, for servers that ask for them. Every address needs `Authorization: Bearer …`; \
                       every failure has the body `ErrorBody`.",
        license(name = "Apache-2.0", identifier = "Apache-2.0")
    ),
    modifiers(&BearerToken),
    security(("token" = [])),
    components(schemas(ErrorBody))
)]
struct Description;

struct BearerToken;

impl utoipa::Modify for BearerToken {
    fn modify(&self, openapi: &mut utoipa::openapi::OpenApi) {
        use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityScheme};
        let scheme = SecurityScheme::Http(HttpBuilder::new().scheme(HttpAuthScheme::Bearer).build());
        openapi.components.get_or_insert_default().add_security_scheme("token", scheme);
    }
}

fn api() -> OpenApiRouter<App> {
    let images = OpenApiRouter::new().routes(routes!(images::put)).layer(DefaultBodyLimit::disable());
    OpenApiRouter::with_openapi(Description::openapi())
        .routes(routes!(health))
        .routes(routes!(machines::list))
        .routes(routes!(machines::create, machines::get, machines::destroy))
        .routes(routes!(machines::start))
        .routes(routes!(machines::stop))
        .routes(routes!(machines::go_on))
        .routes(routes!(machines::channel))
        .routes(routes!(images::get))
        .routes(routes!(snapshots::list))
        .routes(routes!(snapshots::create, snapshots::remove))
        .routes(routes!(retire))
        .layer(DefaultBodyLimit::max(BODY_BYTES))
        .merge(images)
}

/// The OpenAPI description, as it is checked in.
pub fn openapi() -> utoipa::openapi::OpenApi {
    let (_, mut description) = api().split_for_parts();
    description.openapi = utoipa::openapi::OpenApiVersion::Version31;
    description
}

/// The whole service. Each request needs this token.
pub fn router(manager: Arc<Manager>, token: SecretString) -> Router {
    let app = App { manager, token: Arc::new(token) };
    let (api, _) = api().split_for_parts();
    api.fallback(nothing_here)
        .layer(middleware::from_fn_with_state(app.clone(), access::check))
        .with_state(app)
}

/// Runs an operation to its end, also if the client closes the connection.
async fn run_to_end<T: Send + 'static>(
    work: impl Future<Output = Result<T, crate::ManagerError>> + Send + 'static,
) -> Result<Json<T>, ApiError> {
    match tokio::spawn(work).await {
        Ok(done) => Ok(Json(done?)),
        Err(error) => Err(ApiError::new(ErrorCode::Internal, error.to_string())),
    }
}

async fn nothing_here() -> ApiError {
    ApiError::new(ErrorCode::NotFound, "there is nothing at this address")
}

/// The health of the manager.
#[utoipa::path(get, path = "/v1/health", tag = "manager",
    responses((status = 200, body = ManagerHealth), (status = "4XX", body = ErrorBody)))]
async fn health(State(app): State<App>) -> Json<ManagerHealth> {
    Json(app.manager.health().await)
}

/// Remove what no microVM needs any more.
///
/// Firewall rules and most interfaces stay for the next microVM until this is asked for, and while one runs.
#[utoipa::path(post, path = "/v1/retire", tag = "manager",
    responses((status = 204), (status = "4XX", body = ErrorBody)))]
async fn retire(State(app): State<App>) -> Result<axum::http::StatusCode, ApiError> {
    let retired = run_to_end(async move { app.manager.remove_shared_resources().await });
    retired.await.map(|_| axum::http::StatusCode::NO_CONTENT)
}
