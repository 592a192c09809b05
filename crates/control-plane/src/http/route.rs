//! Rules of routes. Each handler has a [`RouteRule`] beside it: the access that it needs, and how its calls are recorded.
//!
//! A route can be added to the server only with its rule ([`Routes::add`]), which adds these layers around the handler:
//!
//! ```text
//!  request ──▶ record ──▶ access ──▶ target ──▶ body limit ──▶ handler
//!              counts,    principal  workspace or
//!              audits     and rule   hosted MCP server
//! ```

use axum::extract::{DefaultBodyLimit, RawPathParams, Request, State};
use axum::http::Method;
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::MethodRouter;
use axum::{RequestExt, Router};
use emergent_wire::access::TokenScope;
use emergent_wire::{ErrorCode, WorkspaceId};
use utoipa::openapi::{OpenApi, PathItem};
use utoipa_axum::router::{OpenApiRouter, UtoipaMethodRouter};

use super::error::ApiError;
use super::{App, access, record};
use crate::workspace::WorkspaceError;

/// The largest body, unless the rule says otherwise.
pub(super) const BODY_BYTES: usize = 5 << 20;

/// The access that a route needs, and how its calls are recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RouteRule {
    /// The name of a call in the audit log and the metrics.
    pub(super) action: &'static str,
    pub(super) access: Access,
    pub(super) target: Target,
    pub(super) audit: AuditPolicy,
    /// Whether a call extends the life of the workspace that it uses.
    pub(super) counts_as_use: bool,
    /// Whether the route exists only while workspaces are enabled.
    needs_sandboxes: bool,
    body_bytes: usize,
}

/// The tokens that may call a route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// No token is needed.
    Open,
    /// Admin tokens.
    Admin,
    /// Admin tokens, and tokens that are bound to the workspace or MCP server in the path.
    Bound,
}

/// The kind of object that `{id}` in a route's path names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Target {
    /// Neither a workspace nor an MCP server.
    None,
    /// An agent's workspace. The workspace of a hosted MCP server is refused, because only its supervisor changes it.
    Workspace,
    /// A workspace of either kind.
    AnyWorkspace,
    /// A hosted MCP server, by its id or its name.
    McpServer,
}

/// Whether and when a call is written to the audit log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AuditPolicy {
    Never,
    /// Before the answer is sent.
    BeforeAnswer,
    /// Soon after the answer, for frequent calls.
    Soon,
}

impl RouteRule {
    /// For clients without a token. Not audited.
    pub(super) const fn open(action: &'static str) -> Self {
        Self { access: Access::Open, audit: AuditPolicy::Never, ..Self::admin(action) }
    }

    /// For admin tokens.
    pub(super) const fn admin(action: &'static str) -> Self {
        Self {
            action,
            access: Access::Admin,
            target: Target::None,
            audit: AuditPolicy::BeforeAnswer,
            counts_as_use: false,
            needs_sandboxes: false,
            body_bytes: BODY_BYTES,
        }
    }

    /// For admin tokens and tokens of the workspace. A call extends the life of the workspace.
    pub(super) const fn workspace_use(action: &'static str) -> Self {
        Self { counts_as_use: true, ..Self::admin(action).on(Target::Workspace).for_bound_tokens() }
    }

    /// Sets the kind of object that `{id}` in the path names.
    pub(super) const fn on(self, target: Target) -> Self {
        Self { target, needs_sandboxes: true, ..self }
    }

    /// Also allows tokens that are bound to the target.
    pub(super) const fn for_bound_tokens(self) -> Self {
        Self { access: Access::Bound, ..self }
    }

    /// Restricts the route to servers on which workspaces are enabled.
    pub(super) const fn needs_sandboxes(self) -> Self {
        Self { needs_sandboxes: true, ..self }
    }

    pub(super) const fn audited(self, audit: AuditPolicy) -> Self {
        Self { audit, ..self }
    }

    pub(super) const fn body_bytes(self, body_bytes: usize) -> Self {
        Self { body_bytes, ..self }
    }

    /// Whether a token of this scope may call the route for this target.
    pub(super) fn allows(&self, scope: &TokenScope, target: Option<WorkspaceId>) -> bool {
        match (self.access, scope) {
            (Access::Open, _) | (_, TokenScope::Admin) => true,
            (Access::Bound, TokenScope::Workspace { workspace_id }) => target == Some(*workspace_id),
            // No route accepts tokens of projects or sessions yet.
            (Access::Admin | Access::Bound, _) => false,
        }
    }
}

/// The id of the workspace or MCP server that a request's path names. None where the path names none, or one that is not known here.
#[derive(Clone, Copy, Debug)]
pub(super) struct TargetId(pub(super) Option<WorkspaceId>);

impl TargetId {
    pub(super) async fn of(request: &mut Request, rule: &RouteRule, app: &App) -> Self {
        let params = request.extract_parts::<RawPathParams>().await.ok();
        let id = params.as_ref().and_then(|params| params.iter().find(|(name, _)| *name == "id"));
        Self(match (rule.target, id) {
            (Target::None, _) | (_, None) => None,
            (Target::Workspace | Target::AnyWorkspace, Some((_, id))) => id.parse().ok(),
            (Target::McpServer, Some((_, id))) => id.parse().ok().or_else(|| app.mcp.supervised_id(id)),
        })
    }
}

/// A route as it is declared.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeclaredRoute {
    /// `GET`, `POST`, ….
    pub method: String,
    /// With parameters in braces.
    pub path: String,
    /// The name of a call in the audit log and the metrics.
    pub action: &'static str,
    /// The tokens that may call it.
    pub access: Access,
    pub(crate) rule: RouteRule,
}

/// The routes of the server, each with its rule.
pub(super) struct Routes {
    /// None when the routes are only described.
    app: Option<App>,
    router: OpenApiRouter<App>,
    declared: Vec<DeclaredRoute>,
}

impl Routes {
    pub(super) fn new(app: Option<&App>, description: OpenApi) -> Self {
        let router = OpenApiRouter::with_openapi(description);
        Self { app: app.cloned(), router, declared: Vec::new() }
    }

    /// Adds a route that the description of the API lists.
    pub(super) fn add(mut self, rule: RouteRule, routes: UtoipaMethodRouter<App>) -> Self {
        let (schemas, paths, handlers) = routes;
        for (path, item) in &paths.paths {
            self.declared.extend(methods(item).map(|method| declare(&method, path, rule)));
        }
        let handlers = self.guard(rule, handlers);
        Self { router: self.router.routes((schemas, paths, handlers)), ..self }
    }

    /// Adds a GET route that the description of the API does not list: a page, or the metrics.
    pub(super) fn add_page(mut self, rule: RouteRule, path: &str, handlers: MethodRouter<App>) -> Self {
        self.declared.push(declare(&Method::GET, path, rule));
        let handlers = self.guard(rule, handlers);
        Self { router: self.router.route(path, handlers), ..self }
    }

    fn guard(&self, rule: RouteRule, handlers: MethodRouter<App>) -> MethodRouter<App> {
        let Some(app) = &self.app else { return handlers };
        let state = (app.clone(), rule);
        handlers
            .route_layer(DefaultBodyLimit::max(rule.body_bytes))
            .route_layer(middleware::from_fn_with_state(state.clone(), check_target))
            .route_layer(middleware::from_fn_with_state(state.clone(), access::check))
            .route_layer(middleware::from_fn_with_state(state, record::call))
    }

    pub(super) fn declared(self) -> Vec<DeclaredRoute> {
        self.declared
    }

    pub(super) fn split(self) -> (Router<App>, OpenApi) {
        self.router.split_for_parts()
    }
}

fn declare(method: &Method, path: &str, rule: RouteRule) -> DeclaredRoute {
    let (method, path) = (method.to_string(), path.to_owned());
    DeclaredRoute { method, path, action: rule.action, access: rule.access, rule }
}

fn methods(item: &PathItem) -> impl Iterator<Item = Method> {
    let methods = [
        (item.get.is_some(), Method::GET),
        (item.put.is_some(), Method::PUT),
        (item.post.is_some(), Method::POST),
        (item.delete.is_some(), Method::DELETE),
        (item.patch.is_some(), Method::PATCH),
    ];
    methods.into_iter().filter_map(|(is_there, method)| is_there.then_some(method))
}

/// Refuses calls while workspaces are disabled, and calls to workspaces of hosted MCP servers.
async fn check_target(State((app, rule)): State<(App, RouteRule)>, request: Request, next: Next) -> Response {
    if rule.needs_sandboxes && !app.workspaces.context.settings.workspaces.enabled {
        let message = "agent workspaces are disabled on this server (ENABLE_AGENT_WORKSPACES)";
        return ApiError::new(ErrorCode::NotFound, message).into_response();
    }
    let target = request.extensions().get::<TargetId>().and_then(|target| target.0);
    if rule.target == Target::Workspace
        && let Some(id) = target.filter(|id| app.mcp.supervises(*id))
    {
        return ApiError::from(WorkspaceError::IsMcpServer(id)).into_response();
    }
    next.run(request).await
}

#[cfg(test)]
mod tests {
    use emergent_wire::id::{ProjectId, SessionId};

    use super::super::declared_routes;
    use super::*;

    /// The routes with a token that allow this scope for this target.
    fn allowed(scope: &TokenScope, target: Option<WorkspaceId>) -> Vec<String> {
        let routes = declared_routes().into_iter().filter(|route| route.access != Access::Open);
        let allowed = routes.filter(|route| route.rule.allows(scope, target));
        allowed.map(|route| format!("{} {}", route.method, route.path)).collect()
    }

    #[test]
    fn a_workspace_token_may_use_its_own_workspace_or_mcp_server_and_nothing_else() {
        let (own, other) = (WorkspaceId::generate(), WorkspaceId::generate());
        let scope = TokenScope::Workspace { workspace_id: own };
        let mut routes = allowed(&scope, Some(own));
        routes.sort();
        let workspace = "/api/v1/agent/workspaces/{id}";
        let server = "/api/v1/mcp/servers/{id}";
        let mut expected: Vec<String> =
            ["bash", "exec", "read", "write", "edit", "glob", "grep", "git", "mcp"]
                .iter()
                .map(|tool| format!("POST {workspace}/{tool}"))
                .collect();
        for (method, route) in [
            ("GET", workspace.to_owned()),
            ("GET", format!("{workspace}/mcp")),
            ("DELETE", format!("{workspace}/mcp")),
            ("GET", format!("{workspace}/operations/{{operation}}")),
            ("DELETE", format!("{workspace}/operations/{{operation}}")),
            ("GET", server.to_owned()),
            ("POST", format!("{server}/call")),
            ("GET", format!("{server}/mcp")),
            ("POST", format!("{server}/mcp")),
            ("DELETE", format!("{server}/mcp")),
        ] {
            expected.push(format!("{method} {route}"));
        }
        expected.sort();
        assert_eq!(routes, expected);
        assert_eq!(allowed(&scope, Some(other)), [""; 0]);
        assert_eq!(allowed(&scope, None), [""; 0]);
    }

    #[test]
    fn no_route_accepts_a_token_of_a_project_or_a_session_yet() {
        let own = WorkspaceId::generate();
        for scope in [
            TokenScope::Project { project_id: ProjectId::generate() },
            TokenScope::Session { session_id: SessionId::generate(), workspace_id: Some(own) },
        ] {
            assert_eq!(allowed(&scope, Some(own)), [""; 0]);
        }
    }

    #[test]
    fn rules_match_their_paths() {
        for DeclaredRoute { method, path, rule, .. } in declared_routes() {
            let on_target = rule.target != Target::None;
            assert!(on_target || rule.access != Access::Bound, "{method} {path}: bound tokens need a target");
            assert!(on_target || !rule.counts_as_use, "{method} {path}: a use needs a target");
            let below = ["/api/v1/agent/workspaces/{id}", "/api/v1/mcp/servers/{id}"];
            assert_eq!(on_target, below.iter().any(|base| path.starts_with(base)), "{method} {path}");
            let below = ["/api/v1/agent/", "/api/v1/mcp/"];
            assert_eq!(
                rule.needs_sandboxes,
                below.iter().any(|base| path.starts_with(base)),
                "{method} {path}"
            );
        }
    }
}
