//! Authentication: each request needs the manager's token.

use axum::extract::{Request, State};
use axum::http::header;
use axum::middleware::Next;
use axum::response::Response;
use emergent_wire::ErrorCode;
use secrecy::ExposeSecret;
use subtle::ConstantTimeEq;

use super::App;
use super::error::ApiError;

pub(crate) async fn check(
    State(app): State<App>,
    request: Request,
    next: Next,
) -> Result<Response, ApiError> {
    let given = request.headers().get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    let given = given.and_then(|value| value.strip_prefix("Bearer ")).unwrap_or_default().trim();
    if !given.is_empty() && bool::from(given.as_bytes().ct_eq(app.token.expose_secret().as_bytes())) {
        return Ok(next.run(request).await);
    }
    let message = "the manager's token is needed: it is in the file manager-token of its data directory";
    Err(ApiError::new(ErrorCode::Unauthorized, message))
}
