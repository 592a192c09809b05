//! The API's description: for programs and for people.

use axum::Router;
use axum::extract::State;
use axum::http::{HeaderMap, header};
use axum::response::{Html, IntoResponse, Response};
use axum::routing::get;

use super::App;

/// The description as a program reads it.
#[utoipa::path(get, path = "/api/v1/openapi.json", tag = "operations",
    responses((status = 200, body = Object, description = "OpenAPI 3.1")))]
pub(super) async fn openapi() -> Response {
    let json = super::openapi().to_json().unwrap_or_default();
    ([(header::CONTENT_TYPE, "application/json")], json).into_response()
}

/// The page for people: made from the description, with nothing loaded from elsewhere.
pub(super) fn pages() -> Router<App> {
    Router::new()
        .route("/api/docs", get(page))
        .route("/", get(|| async { axum::response::Redirect::to("/api/docs") }))
}

async fn page(State(app): State<App>, headers: HeaderMap) -> Response {
    let description = serde_json::to_value(super::openapi()).unwrap_or_default();
    let host = headers.get(header::HOST).and_then(|host| host.to_str().ok()).unwrap_or("127.0.0.1:7171");
    let scheme = if app.workspaces.settings.tls.certificate.is_some() { "https" } else { "http" };
    let page = crate::docs_page::render(&description, &format!("{scheme}://{host}"));
    let policy = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'";
    ([(header::CONTENT_SECURITY_POLICY, policy)], Html(page)).into_response()
}
