//! Failures as HTTP answers.

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use emergent_wire::error::ErrorBody;
use emergent_wire::{ErrorCode, ErrorDetail};

use crate::error::ManagerError;

/// A failure on its way to the server.
#[derive(Debug)]
pub(crate) struct ApiError(ErrorDetail);

impl ApiError {
    pub(crate) fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        Self(ErrorDetail::new(code, message))
    }
}

impl From<ManagerError> for ApiError {
    fn from(error: ManagerError) -> Self {
        Self(error.into())
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let code = self.0.code;
        let status = StatusCode::from_u16(code.http_status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let mut response = (status, Json(ErrorBody { error: self.0 })).into_response();
        if code == ErrorCode::Unauthorized {
            let realm = HeaderValue::from_static("Bearer realm=\"firecracker-manager\"");
            response.headers_mut().insert(header::WWW_AUTHENTICATE, realm);
        }
        response
    }
}
