//! The common part of the addresses of hosted MCP servers and of workspaces' MCP servers: the Origin policy and refusals.

use axum::body::Body;
use axum::http::{HeaderMap, HeaderValue, header};
use axum::response::{IntoResponse, Response};
use emergent_mcp_http::{Cause, Refusal, ResponseBody};
use emergent_wire::ErrorCode;

use super::App;
use super::error::ApiError;
use crate::mcp::McpError;
use crate::workspace::WorkspaceError;

/// Refuses requests from web pages whose origin is not allowed.
pub(super) fn check_origin(app: &App, headers: &HeaderMap) -> Result<(), ApiError> {
    app.origins.check(headers).map_err(|refusal| ApiError::new(ErrorCode::Forbidden, refusal.to_string()))
}

/// The answer of the HTTP stack. Refusals get this server's error body.
pub(super) fn answer(result: Result<Response<ResponseBody>, Refusal>) -> Response {
    match result {
        Ok(response) => response.map(Body::new),
        Err(refusal) => refused(&refusal),
    }
}

fn refused(refusal: &Refusal) -> Response {
    let error = match refusal {
        Refusal::Failed(cause) => failed(cause),
        _ => ApiError::new(code_of(refusal), refusal.to_string()),
    };
    let mut response = error.into_response();
    if let Some(methods) = refusal.allow() {
        response.headers_mut().insert(header::ALLOW, HeaderValue::from_static(methods));
    }
    response
}

/// The failure of a hosted server, with the code that it has at the other addresses.
fn failed(cause: &Cause) -> ApiError {
    match cause.downcast_ref::<McpError>() {
        Some(McpError::Store(error) | McpError::Workspace(WorkspaceError::Store(error))) => {
            ApiError::of_store(error)
        }
        Some(error) => ApiError::new(error.code(), error.to_string()),
        None => ApiError::new(ErrorCode::Unavailable, cause.to_string()),
    }
}

fn code_of(refusal: &Refusal) -> ErrorCode {
    match refusal {
        Refusal::NotAcceptable(_) => ErrorCode::NotAcceptable,
        Refusal::UnsupportedMediaType => ErrorCode::UnsupportedMediaType,
        Refusal::BodyTooLarge(_) => ErrorCode::TooLarge,
        Refusal::MethodNotAllowed | Refusal::NoSessions => ErrorCode::MethodNotAllowed,
        Refusal::SessionUnknown | Refusal::EventExpired => ErrorCode::NotFound,
        Refusal::TooManySessions(_) => ErrorCode::LimitReached,
        Refusal::Unavailable(_) | Refusal::Failed(_) => ErrorCode::Unavailable,
        Refusal::BodyTooSlow(_)
        | Refusal::BodyUnreadable(_)
        | Refusal::UnknownVersion
        | Refusal::SessionMissing
        | Refusal::EventForeign => ErrorCode::BadRequest,
    }
}

#[cfg(test)]
mod tests {
    use axum::http::StatusCode;
    use emergent_guest_client::{CallError, Closed};
    use emergent_guest_protocol::AgentTooOld;
    use emergent_mcp_http::PeerError;
    use emergent_store::StoreError;

    use super::*;

    #[test]
    fn refusals_have_the_status_of_the_protocol() {
        for refusal in [
            Refusal::NotAcceptable("application/json"),
            Refusal::UnsupportedMediaType,
            Refusal::BodyTooLarge(1),
            Refusal::BodyTooSlow(1),
            Refusal::BodyUnreadable("reset".to_owned()),
            Refusal::MethodNotAllowed,
            Refusal::NoSessions,
            Refusal::UnknownVersion,
            Refusal::SessionMissing,
            Refusal::SessionUnknown,
            Refusal::EventForeign,
            Refusal::EventExpired,
            Refusal::TooManySessions(1),
            Refusal::Unavailable("starting".to_owned()),
        ] {
            assert_eq!(refused(&refusal).status(), refusal.status(), "{refusal:?}");
        }
        assert_eq!(refused(&Refusal::NoSessions).headers()[header::ALLOW], "POST");
    }

    #[test]
    fn a_failure_of_a_hosted_server_keeps_its_status() {
        for (error, status) in [
            (McpError::Starting, StatusCode::SERVICE_UNAVAILABLE),
            (CallError::Lost(Closed::Silent).into(), StatusCode::BAD_GATEWAY),
            (CallError::AgentTooOld(AgentTooOld { agent: 1, needed: 2 }).into(), StatusCode::CONFLICT),
            (StoreError::BadCursor.into(), StatusCode::BAD_REQUEST),
        ] {
            let text = error.to_string();
            let PeerError::Failed(cause) = PeerError::failed(error) else { panic!("{text}") };
            let response = answer(Err(Refusal::Failed(cause)));
            assert_eq!(response.status(), status, "{text}");
            let is_temporary = status == StatusCode::SERVICE_UNAVAILABLE;
            assert_eq!(response.headers().contains_key(header::RETRY_AFTER), is_temporary, "{text}");
        }
    }
}
