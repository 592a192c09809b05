//! The REST API. Handlers parse, call and convert; what they call knows nothing of HTTP.

mod access;
mod audit;
mod docs;
mod error;
mod events;
mod extract;
mod idempotency;
mod mcp;
mod mcp_endpoint;
mod mcp_modern;
mod mcp_proxy;
mod mcp_reply;
mod operations;
mod ops;
mod pool;
mod record;
mod snapshots;
mod stream;
mod summary;
mod tokens;
mod tools;
mod until_ended;
mod workspace_mcp;
mod workspaces;

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::middleware;
use emergent_wire::ErrorCode;
use emergent_wire::error::ErrorBody;
use metrics_exporter_prometheus::PrometheusHandle;
use tokio::sync::Semaphore;
use tower_http::timeout::RequestBodyTimeoutLayer;
use utoipa::OpenApi;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::audit::Audit;
use crate::mcp::McpHost;
use crate::workspace::Workspaces;
use error::ApiError;
pub(crate) use workspace_mcp::WorkspaceMcps;

/// The largest body, but for `write`.
const BODY_BYTES: usize = 5 << 20;
/// The largest body of `write`: 64 MiB as JSON text or base64.
const WRITE_BODY_BYTES: usize = 140 << 20;
/// How long a client may take to send the next piece of a body.
const BODY_PIECE_TIME: Duration = Duration::from_secs(30);
/// Large bodies that are read at once.
const LARGE_BODIES: usize = 4;

/// What every handler can reach.
#[derive(Clone)]
pub(crate) struct App {
    pub(crate) workspaces: Arc<Workspaces>,
    pub(crate) mcp: Arc<McpHost>,
    pub(crate) workspace_mcp: WorkspaceMcps,
    pub(crate) audit: Audit,
    pub(crate) metrics: PrometheusHandle,
    /// Whether the first recovery pass has ended.
    pub(crate) ready: Arc<AtomicBool>,
    pub(crate) large_bodies: Arc<Semaphore>,
}

impl App {
    pub(crate) fn new(workspaces: Arc<Workspaces>, audit: Audit, metrics: PrometheusHandle) -> Self {
        let (ready, large_bodies) = (Arc::default(), Arc::new(Semaphore::new(LARGE_BODIES)));
        let mcp = McpHost::new(Arc::clone(&workspaces));
        let workspace_mcp = WorkspaceMcps::default();
        Self { workspaces, mcp, workspace_mcp, audit, metrics, ready, large_bodies }
    }
}

/// What the API says of itself.
#[derive(OpenApi)]
#[openapi(
    info(
        title = "Emergent workspaces",
        description = "Isolated machines for AI agents. Every address under /api/v1 needs `Authorization: Bearer …`; \
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

/// Everything under `/api/v1`.
fn api() -> OpenApiRouter<App> {
    let write =
        OpenApiRouter::new().routes(routes!(tools::write)).layer(DefaultBodyLimit::max(WRITE_BODY_BYTES));
    OpenApiRouter::with_openapi(Description::openapi())
        .routes(routes!(workspaces::create, workspaces::list))
        .routes(routes!(workspaces::providers))
        .routes(routes!(workspaces::get, workspaces::destroy))
        .routes(routes!(workspaces::stop))
        .routes(routes!(workspaces::resume))
        .routes(routes!(workspaces::attach))
        .routes(routes!(workspaces::detach))
        .routes(routes!(snapshots::create))
        .routes(routes!(snapshots::restore))
        .routes(routes!(snapshots::list))
        .routes(routes!(snapshots::get, snapshots::delete))
        .routes(routes!(snapshots::list_quarantine))
        .routes(routes!(snapshots::restore_quarantined))
        .routes(routes!(snapshots::purge_quarantined))
        .routes(routes!(pool::status, pool::set, pool::reset))
        .routes(routes!(events::listen))
        .routes(routes!(tools::bash))
        .routes(routes!(tools::exec))
        .routes(routes!(tools::read))
        .routes(routes!(tools::edit))
        .routes(routes!(tools::glob))
        .routes(routes!(tools::grep))
        .routes(routes!(tools::git))
        .routes(routes!(workspace_mcp::post, workspace_mcp::get, workspace_mcp::delete))
        .routes(routes!(operations::follow, operations::kill))
        .routes(routes!(mcp::register, mcp::list))
        .routes(routes!(mcp::get, mcp::remove))
        .routes(routes!(mcp::restart))
        .routes(routes!(mcp::call))
        .routes(routes!(mcp::logs))
        .routes(routes!(mcp_endpoint::post, mcp_endpoint::listen, mcp_endpoint::end))
        .routes(routes!(tokens::create, tokens::list))
        .routes(routes!(tokens::revoke))
        .routes(routes!(audit::list))
        .routes(routes!(audit::verify))
        .routes(routes!(audit::export))
        .routes(routes!(docs::openapi))
        .layer(DefaultBodyLimit::max(BODY_BYTES))
        .merge(write)
}

/// The OpenAPI description, as it is checked in.
pub(crate) fn openapi() -> utoipa::openapi::OpenApi {
    let (_, mut description) = api().merge(ops::open_routes()).split_for_parts();
    description.openapi = utoipa::openapi::OpenApiVersion::Version31;
    mark_optional_bodies(&mut description);
    description
}

/// Says which bodies can be left out: an empty one means no fields, so those of which no field is required.
fn mark_optional_bodies(description: &mut utoipa::openapi::OpenApi) {
    use utoipa::openapi::{Ref, RefOr, Required, Schema};
    let components = description.components.clone().unwrap_or_default();
    let needs_no_field = |schema: &RefOr<Schema>| {
        let RefOr::Ref(Ref { ref_location, .. }) = schema else {
            return false;
        };
        let name = ref_location.rsplit('/').next().unwrap_or_default();
        matches!(components.schemas.get(name), Some(RefOr::T(Schema::Object(object))) if object.required.is_empty())
    };
    for path in description.paths.paths.values_mut() {
        for operation in [&mut path.post, &mut path.put].into_iter().flatten() {
            if let Some(RefOr::T(body)) = &mut operation.request_body
                && body.content.values().all(|content| {
                    matches!(content, RefOr::T(content) if content.schema.as_ref().is_some_and(needs_no_field))
                })
            {
                body.required = Some(Required::False);
            }
        }
    }
}

/// The whole server.
pub(crate) fn router(app: &App) -> Router {
    let (api, _) = api().split_for_parts();
    let (open, _) = ops::open_routes().split_for_parts();
    let guarded = api
        .fallback(nothing_here)
        .method_not_allowed_fallback(wrong_method)
        .layer(middleware::from_fn_with_state(app.clone(), workspaces::if_enabled))
        .layer(middleware::from_fn_with_state(app.clone(), access::check))
        .layer(middleware::from_fn_with_state(app.clone(), record::calls));
    let metrics = Router::new()
        .route("/metrics", axum::routing::get(ops::metrics))
        .layer(middleware::from_fn_with_state(app.clone(), access::check));
    Router::new()
        .merge(guarded)
        .merge(metrics)
        .merge(open)
        .merge(docs::pages())
        .fallback(nothing_here)
        .layer(RequestBodyTimeoutLayer::new(BODY_PIECE_TIME))
        .layer(tower_http::catch_panic::CatchPanicLayer::custom(ops::panicked))
        .layer(middleware::from_fn(record::request_id))
        .with_state(app.clone())
}

async fn nothing_here() -> ApiError {
    ApiError::new(ErrorCode::NotFound, "there is nothing at this address: /api/docs shows what there is")
}

async fn wrong_method() -> ApiError {
    ApiError::new(
        ErrorCode::MethodNotAllowed,
        "this address does not take this method: /api/docs shows what it takes",
    )
}
