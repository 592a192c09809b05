//! Failures as HTTP answers: all have the same form of body, and the code decides the status.
//!
//! An error of the domain becomes an [`ApiError`] when it is answered. Faults of the database are logged here, and nowhere before.

use axum::Json;
use axum::http::{HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use emergent_store::StoreError;
use emergent_wire::error::ErrorBody;
use emergent_wire::{ErrorCode, ErrorDetail};

use super::error_text;
use crate::mcp::McpError;
use crate::tools::ToolError;
use crate::workspace::WorkspaceError;

/// The time after which a client may retry after 503, in seconds.
const RETRY_AFTER: HeaderValue = HeaderValue::from_static("5");

/// A failure that is sent to the client.
#[derive(Debug)]
pub(crate) struct ApiError(pub(crate) ErrorDetail);

impl ApiError {
    pub(crate) fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        Self(ErrorDetail::new(code, message))
    }

    /// An error of the store. A fault of the database is logged.
    pub(crate) fn of_store(error: &StoreError) -> Self {
        log_fault(error);
        Self(error_text::of_store(error))
    }
}

impl From<ErrorDetail> for ApiError {
    fn from(detail: ErrorDetail) -> Self {
        Self(detail)
    }
}

impl From<StoreError> for ApiError {
    fn from(error: StoreError) -> Self {
        Self::of_store(&error)
    }
}

impl From<WorkspaceError> for ApiError {
    fn from(error: WorkspaceError) -> Self {
        error.store_error().into_iter().for_each(log_fault);
        Self(error.into())
    }
}

impl From<ToolError> for ApiError {
    fn from(error: ToolError) -> Self {
        match error {
            ToolError::Workspace(error) => error.into(),
            error => Self(error.into()),
        }
    }
}

impl From<McpError> for ApiError {
    fn from(error: McpError) -> Self {
        match error {
            McpError::Store(error) => error.into(),
            McpError::Workspace(error) => error.into(),
            error => Self(error.into()),
        }
    }
}

/// Logs an error of the store that is a fault of the database.
fn log_fault(error: &StoreError) {
    let cause: &dyn std::error::Error = error;
    match error {
        StoreError::Unavailable(_) => tracing::warn!(error = cause, "the database does not answer"),
        StoreError::Unwritable(_) => tracing::error!(error = cause, "the database can't be written"),
        error if error_text::is_internal(error) => tracing::error!(error = cause, "the store failed"),
        _ => {}
    }
}

/// Added to the response, for the audit log.
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
