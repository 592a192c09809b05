//! Access control: checks a request's token against the rule of its route (`route.rs`) before the handler runs.
//!
//! When a token is revoked or expires, its requests in progress and their streams end.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use chrono::Utc;
use emergent_otlp::continue_trace;
use emergent_wire::ErrorCode;
use emergent_wire::access::Token;

use super::App;
use super::error::ApiError;
use super::record::RequestId;
use super::route::{Access, RouteRule, TargetId};
use super::until_ended::UntilEnded;
use crate::caller::Caller;
use crate::listener::Connection;

/// Lets a request through when its token may call this route. The handler finds the [`Caller`] in the extensions.
pub(super) async fn check(
    State((app, rule)): State<(App, RouteRule)>,
    mut request: Request,
    next: Next,
) -> Response {
    if rule.access == Access::Open {
        return next.run(request).await;
    }
    let header = request.headers().get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    let secret = header.and_then(bearer).map(str::to_owned);
    let target = request.extensions().get::<TargetId>().copied();
    let has_token = secret.is_some();
    match authenticate(&app, secret.as_deref(), &rule, target).await {
        Ok(token) => {
            if let Some(connection) = request.extensions().get::<Arc<Connection>>() {
                connection.trust();
            }
            let caller = Caller {
                principal: token.clone().into(),
                request_id: request.extensions().get::<RequestId>().map(ToString::to_string),
                counts_as_use: rule.counts_as_use,
            };
            tracing::Span::current().record("principal", caller.principal.name.as_str());
            continue_trace(request.headers());
            request.extensions_mut().insert(caller.clone());
            let mut ended = Box::pin(token_ended(app, secret.unwrap_or_default(), token));
            let mut response = tokio::select! {
                biased;
                response = next.run(request) => response.map(|body| Body::new(UntilEnded::new(body, ended))),
                () = &mut ended => {
                    let message = "the token was revoked or expired while the request was in progress";
                    ApiError::new(ErrorCode::Unauthorized, message).into_response()
                }
            };
            response.extensions_mut().insert(caller);
            response
        }
        Err(error) => {
            let mut response = error.into_response();
            if has_token && response.status() == StatusCode::UNAUTHORIZED {
                // Tells clients that they need another token.
                let challenge =
                    HeaderValue::from_static("Bearer realm=\"emergent\", error=\"invalid_token\"");
                response.headers_mut().insert(header::WWW_AUTHENTICATE, challenge);
            }
            response
        }
    }
}

async fn token_ended(app: App, secret: String, token: Token) {
    app.workspaces.context.store.token_ended(&secret, &token).await;
}

/// The token of a request, if it may call the route for this target.
async fn authenticate(
    app: &App,
    secret: Option<&str>,
    rule: &RouteRule,
    target: Option<TargetId>,
) -> Result<Token, ApiError> {
    let secret = secret.ok_or_else(|| {
        let message = "this needs a token: send 'Authorization: Bearer …' with one from `emergent token create`, \
                       or the admin token in the server's data directory";
        ApiError::new(ErrorCode::Unauthorized, message)
    })?;
    let token = app.workspaces.context.store.verify_token(secret, Utc::now()).await?;
    if !rule.allows(&token.scope, target.and_then(|target| target.0)) {
        return Err(ApiError::new(ErrorCode::Forbidden, "this token may not do this: use an admin token"));
    }
    Ok(token)
}

fn bearer(header: &str) -> Option<&str> {
    let (scheme, secret) = header.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| secret.trim()).filter(|secret| !secret.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bearer_token_is_found_in_its_header() {
        assert_eq!(bearer("Bearer abc"), Some("abc"));
        assert_eq!(bearer("bearer  abc "), Some("abc"));
        for header in ["abc", "Basic abc", "Bearer ", ""] {
            assert_eq!(bearer(header), None, "{header}");
        }
    }
}
