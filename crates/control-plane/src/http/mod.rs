//! The REST API and the addresses for MCP clients. Handlers parse a request, call the domain, and convert the result. The domain
//! knows nothing of HTTP.
//!
//! ```text
//! mod          the list of routes, and the state of handlers
//! route        the rules of routes; access checks them, record counts and audits calls
//! error        errors as answers and statuses; error_text: their texts for callers
//! extract      bodies, parameters and ids of requests
//! workspaces, snapshots, tools, operations, pool, tokens, audit, events, ops, docs   handlers
//! mcp, mcp_endpoint, mcp_proxy                                                       handlers for hosted MCP servers
//! workspace_mcp, tool_schema                                                         the MCP server of a workspace
//! ```

mod access;
#[cfg(test)]
mod added_tool_tests;
mod audit;
mod docs;
mod docs_page;
mod error;
mod error_text;
mod events;
mod extract;
mod idempotency;
mod mcp;
mod mcp_endpoint;
mod mcp_front;
mod mcp_proxy;
mod mcp_view;
mod operations;
mod ops;
mod pool;
mod record;
mod route;
mod snapshots;
mod stream;
mod summary;
mod tokens;
mod tool_schema;
mod tools;
mod until_ended;
mod workspace_mcp;
mod workspaces;

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use axum::Router;
use axum::middleware;
use axum::routing::get;
use emergent_mcp_http::OriginPolicy;
use emergent_wire::ErrorCode;
use emergent_wire::error::ErrorBody;
use metrics_exporter_prometheus::PrometheusHandle;
use tower_http::timeout::RequestBodyTimeoutLayer;
use utoipa::OpenApi;
use utoipa_axum::routes;

use crate::audit::Audit;
use crate::mcp::McpHost;
use crate::tools::{ToolEntry, Tools, standard};
use crate::workspace::Workspaces;
use error::ApiError;
use route::Routes;
pub use route::{Access, DeclaredRoute};
pub(crate) use workspace_mcp::WorkspaceMcps;

/// The time limit for each piece of a request's body.
const BODY_PIECE_TIMEOUT: Duration = Duration::from_secs(30);

/// The state of all handlers.
#[derive(Clone)]
pub(crate) struct App {
    pub(crate) workspaces: Arc<Workspaces>,
    pub(crate) mcp: Arc<McpHost>,
    pub(crate) workspace_mcp: WorkspaceMcps,
    /// The pages that may use MCP servers.
    pub(crate) origins: Arc<OriginPolicy>,
    pub(crate) audit: Audit,
    pub(crate) metrics: PrometheusHandle,
    /// Set after the first recovery pass.
    pub(crate) ready: Arc<AtomicBool>,
    pub(crate) tools: Tools,
}

impl App {
    pub(crate) fn new(workspaces: Arc<Workspaces>, audit: Audit, metrics: PrometheusHandle) -> Self {
        Self::with_tools(standard(), workspaces, audit, metrics)
    }

    fn with_tools(
        table: Vec<Arc<ToolEntry>>,
        workspaces: Arc<Workspaces>,
        audit: Audit,
        metrics: PrometheusHandle,
    ) -> Self {
        let ready = Arc::default();
        let tools = Tools::new(table, Arc::clone(&workspaces), audit.clone());
        let workspace_mcp = WorkspaceMcps::new(&tools);
        let mcp = McpHost::new(Arc::clone(&workspaces));
        let origins = Arc::new(OriginPolicy::new(workspaces.context.settings.mcp.allowed_origins.clone()));
        Self { workspaces, mcp, workspace_mcp, origins, audit, metrics, ready, tools }
    }
}

/// The general part of the OpenAPI description.
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

/// All routes, each with its rule. Without an app, the routes are described but can't be served.
fn routes(app: Option<&App>) -> Routes {
    let tools = app.map_or_else(standard, |app| app.tools.table().to_vec());
    let routes = Routes::new(app, Description::openapi())
        .add(workspaces::CREATE, routes!(workspaces::create))
        .add(workspaces::LIST, routes!(workspaces::list))
        .add(workspaces::PROVIDERS, routes!(workspaces::providers))
        .add(workspaces::GET, routes!(workspaces::get))
        .add(workspaces::DESTROY, routes!(workspaces::destroy))
        .add(workspaces::STOP, routes!(workspaces::stop))
        .add(workspaces::RESUME, routes!(workspaces::resume))
        .add(workspaces::ATTACH, routes!(workspaces::attach))
        .add(workspaces::DETACH, routes!(workspaces::detach))
        .add(snapshots::CREATE, routes!(snapshots::create))
        .add(snapshots::RESTORE, routes!(snapshots::restore))
        .add(snapshots::LIST, routes!(snapshots::list))
        .add(snapshots::GET, routes!(snapshots::get))
        .add(snapshots::DELETE, routes!(snapshots::delete))
        .add(snapshots::LIST_QUARANTINE, routes!(snapshots::list_quarantine))
        .add(snapshots::RESTORE_QUARANTINED, routes!(snapshots::restore_quarantined))
        .add(snapshots::PURGE_QUARANTINED, routes!(snapshots::purge_quarantined))
        .add(pool::STATUS, routes!(pool::status))
        .add(pool::SET, routes!(pool::set))
        .add(pool::RESET, routes!(pool::reset))
        .add(events::LISTEN, routes!(events::listen));
    tools::add_routes(routes, &tools)
        .add(workspace_mcp::MESSAGE, routes!(workspace_mcp::post, workspace_mcp::get, workspace_mcp::delete))
        .add(operations::FOLLOW, routes!(operations::follow))
        .add(operations::KILL, routes!(operations::kill))
        .add(mcp::REGISTER, routes!(mcp::register))
        .add(mcp::LIST, routes!(mcp::list))
        .add(mcp::GET, routes!(mcp::get))
        .add(mcp::REMOVE, routes!(mcp::remove))
        .add(mcp::RESTART, routes!(mcp::restart))
        .add(mcp::CALL, routes!(mcp::call))
        .add(mcp::LOGS, routes!(mcp::logs))
        .add(mcp_endpoint::MESSAGE, routes!(mcp_endpoint::post, mcp_endpoint::listen, mcp_endpoint::end))
        .add(tokens::CREATE, routes!(tokens::create))
        .add(tokens::LIST, routes!(tokens::list))
        .add(tokens::REVOKE, routes!(tokens::revoke))
        .add(audit::LIST, routes!(audit::list))
        .add(audit::VERIFY, routes!(audit::verify))
        .add(audit::EXPORT, routes!(audit::export))
        .add(docs::OPENAPI, routes!(docs::openapi))
        .add(ops::LIVE, routes!(ops::live))
        .add(ops::READY, routes!(ops::ready))
        .add_page(ops::METRICS, "/metrics", get(ops::metrics))
        .add_page(docs::PAGE, "/api/docs", get(docs::page))
        .add_page(docs::HOME, "/", get(docs::home))
}

/// All routes as they are declared.
pub(crate) fn declared_routes() -> Vec<DeclaredRoute> {
    routes(None).declared()
}

/// The OpenAPI description.
pub(crate) fn openapi() -> utoipa::openapi::OpenApi {
    describe(routes(None))
}

fn describe(routes: Routes) -> utoipa::openapi::OpenApi {
    let (_, mut description) = routes.split();
    description.openapi = utoipa::openapi::OpenApiVersion::Version31;
    mark_optional_bodies(&mut description);
    description
}

/// Marks bodies without a required field as optional, because an empty body means no fields.
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
    let (routes, _) = routes(Some(app)).split();
    routes
        .fallback(unknown_address)
        .method_not_allowed_fallback(wrong_method)
        .layer(RequestBodyTimeoutLayer::new(BODY_PIECE_TIMEOUT))
        .layer(tower_http::catch_panic::CatchPanicLayer::custom(ops::panicked))
        .layer(middleware::from_fn(record::request_id))
        .with_state(app.clone())
}

async fn unknown_address() -> ApiError {
    ApiError::new(ErrorCode::NotFound, "there is nothing at this address: /api/docs lists the addresses")
}

async fn wrong_method() -> ApiError {
    ApiError::new(
        ErrorCode::MethodNotAllowed,
        "this address does not take this method: /api/docs lists the methods",
    )
}
