//! The description of the API, for programs and for people.

use axum::extract::State;
use axum::http::{HeaderMap, header};
use axum::response::{Html, IntoResponse, Redirect, Response};

use super::App;
use super::route::{AuditPolicy, RouteRule};

pub(super) const OPENAPI: RouteRule = RouteRule::admin("openapi").audited(AuditPolicy::Never);

/// Get the description of the API for programs.
#[utoipa::path(get, path = "/api/v1/openapi.json", tag = "operations",
    responses((status = 200, body = Object, description = "OpenAPI 3.1")))]
pub(super) async fn openapi() -> Response {
    let json = super::openapi().to_json().unwrap_or_default();
    ([(header::CONTENT_TYPE, "application/json")], json).into_response()
}

pub(super) const PAGE: RouteRule = RouteRule::open("docs");

/// The description as a page for people, which loads nothing from other hosts.
pub(super) async fn page(State(app): State<App>, headers: HeaderMap) -> Response {
    let description = serde_json::to_value(super::openapi()).unwrap_or_default();
    let host = headers.get(header::HOST).and_then(|host| host.to_str().ok()).unwrap_or("127.0.0.1:7171");
    let scheme = if app.workspaces.context.settings.tls.certificate.is_some() { "https" } else { "http" };
    let page = super::docs_page::render(&description, &format!("{scheme}://{host}"));
    let policy = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'";
    ([(header::CONTENT_SECURITY_POLICY, policy)], Html(page)).into_response()
}

pub(super) const HOME: RouteRule = RouteRule::open("home");

pub(super) async fn home() -> Redirect {
    Redirect::to("/api/docs")
}
