//! Failures as HTTP answers: one body for all, with a status that its code decides.

use axum::Json;
use axum::http::{HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use emergent_store::StoreError;
use emergent_wire::error::ErrorBody;
use emergent_wire::{ErrorCode, ErrorDetail};

use crate::errors::of_store;
use crate::tools::ToolError;
use crate::workspace::WorkspaceError;

/// When to try again after 503, in seconds.
const RETRY_AFTER: HeaderValue = HeaderValue::from_static("5");

/// A failure on its way to the client.
#[derive(Debug)]
pub(crate) struct ApiError(pub(crate) ErrorDetail);

impl ApiError {
    pub(crate) fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        Self(ErrorDetail::new(code, message))
    }
}

impl From<ErrorDetail> for ApiError {
    fn from(detail: ErrorDetail) -> Self {
        Self(detail)
    }
}

impl From<WorkspaceError> for ApiError {
    fn from(error: WorkspaceError) -> Self {
        Self(error.into())
    }
}

impl From<ToolError> for ApiError {
    fn from(error: ToolError) -> Self {
        Self(error.into())
    }
}

impl From<StoreError> for ApiError {
    fn from(error: StoreError) -> Self {
        Self(of_store(&error))
    }
}

/// Left on the answer for the audit log.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FailedWith(pub(crate) ErrorCode);

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let code = self.0.code;
        let status = StatusCode::from_u16(code.http_status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let extra: Option<(HeaderName, HeaderValue)> = match code {
            ErrorCode::Unauthorized => {
                Some((header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer realm=\"emergent\"")))
            }
            ErrorCode::Unavailable => Some((header::RETRY_AFTER, RETRY_AFTER)),
            // The rest of the body is not read, so the connection can't be used again.
            ErrorCode::TooLarge => Some((header::CONNECTION, HeaderValue::from_static("close"))),
            _ => None,
        };
        let mut response = (status, Json(ErrorBody { error: self.0 })).into_response();
        if let Some((name, value)) = extra {
            response.headers_mut().insert(name, value);
        }
        response.extensions_mut().insert(FailedWith(code));
        response
    }
}
