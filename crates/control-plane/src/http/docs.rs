//! The API's description: for programs and for people.

use axum::Router;
use axum::http::header;
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

async fn page() -> Html<String> {
    let description = serde_json::to_value(super::openapi()).unwrap_or_default();
    Html(crate::docs_page::render(&description))
}
