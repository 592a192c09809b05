//! The common part of the addresses of hosted MCP servers and of workspaces' MCP servers: the Origin policy and refusals.

use axum::body::Body;
use axum::http::{HeaderMap, HeaderValue, header};
use axum::response::{IntoResponse, Response};
use emergent_mcp_http::{Refusal, ResponseBody};
use emergent_wire::ErrorCode;

use super::App;
use super::error::ApiError;

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
    let mut response = ApiError::new(code_of(refusal), refusal.to_string()).into_response();
    if let Some(methods) = refusal.allow() {
        response.headers_mut().insert(header::ALLOW, HeaderValue::from_static(methods));
    }
    response
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
}
