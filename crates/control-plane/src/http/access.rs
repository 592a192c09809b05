//! Who may do what: one rule for all routes, checked before any handler runs.
//!
//! Everything under `/api/v1` needs a token. An admin token may do everything. A workspace token may look at its one
//! workspace and use its tools, and nothing else. What is not listed here is denied.
//!
//! A request, and the stream that answers it, last no longer than the token: when it is revoked they end.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use chrono::Utc;
use emergent_wire::access::{Token, TokenScope};
use emergent_wire::tools::Tool;
use emergent_wire::{ErrorCode, WorkspaceId};

use super::App;
use super::error::ApiError;
use super::until_ended::UntilEnded;
use crate::connections::Connection;
use crate::workspace::error_of;

/// Who asks. Every handler under `/api/v1` can take it.
#[derive(Clone, Debug)]
pub(crate) struct Caller(pub(crate) Token);

/// Lets a request through when its token may do what it asks.
pub(crate) async fn check(State(app): State<App>, mut request: Request, next: Next) -> Response {
    let header = request.headers().get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    let secret = header.and_then(bearer).map(str::to_owned);
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let has_token = secret.is_some();
    match caller(&app, secret.clone(), &method, &path).await {
        Ok(caller) => {
            if let Some(connection) = request.extensions().get::<Arc<Connection>>() {
                connection.trust();
            }
            request.extensions_mut().insert(caller.clone());
            let mut ended = Box::pin(token_ended(app, secret.unwrap_or_default(), caller.0.clone()));
            let mut response = tokio::select! {
                biased;
                response = next.run(request) => response.map(|body| Body::new(UntilEnded::new(body, ended))),
                () = &mut ended => {
                    let message = "the token was revoked, or its time was over, while the request was in progress";
                    ApiError::new(ErrorCode::Unauthorized, message).into_response()
                }
            };
            response.extensions_mut().insert(caller);
            response
        }
        Err(error) => {
            let mut response = error.into_response();
            if has_token && response.status() == StatusCode::UNAUTHORIZED {
                // Clients must know whether to get a token, or another one.
                let challenge =
                    HeaderValue::from_static("Bearer realm=\"emergent\", error=\"invalid_token\"");
                response.headers_mut().insert(header::WWW_AUTHENTICATE, challenge);
            }
            response
        }
    }
}

async fn token_ended(app: App, secret: String, token: Token) {
    app.workspaces.store.token_ended(&secret, &token).await;
}

async fn caller(app: &App, secret: Option<String>, method: &Method, path: &str) -> Result<Caller, ApiError> {
    let secret = secret.ok_or_else(|| {
        let message = "this needs a token: send 'Authorization: Bearer …' with one from `emergent token create`, \
                       or the admin token in the server's data directory";
        ApiError::new(ErrorCode::Unauthorized, message)
    })?;
    let token = app.workspaces.store.verify_token(&secret, Utc::now()).await.map_err(error_of)?;
    if !allows(&token.scope, method, path) {
        return Err(ApiError::new(ErrorCode::Forbidden, "this token may not do this: use an admin token"));
    }
    Ok(Caller(token))
}

fn bearer(header: &str) -> Option<&str> {
    let (scheme, secret) = header.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| secret.trim()).filter(|secret| !secret.is_empty())
}

/// The rule.
fn allows(scope: &TokenScope, method: &Method, path: &str) -> bool {
    match scope {
        TokenScope::Admin => true,
        TokenScope::Workspace { workspace_id } => {
            let own = |(id, _): &(WorkspaceId, Vec<&str>)| id == workspace_id;
            workspace_route(path).filter(own).is_some_and(|(_, rest)| is_tool_route(method, &rest))
                || mcp_route(path).filter(own).is_some_and(|(_, rest)| is_mcp_route(method, &rest))
        }
    }
}

/// The workspace that an address is about, and what comes after its id.
pub(crate) fn workspace_route(path: &str) -> Option<(WorkspaceId, Vec<&str>)> {
    route_below("/api/v1/agent/workspaces/", path)
}

/// The MCP server that an address is about, where it is named by its id, and what comes after it.
fn mcp_route(path: &str) -> Option<(WorkspaceId, Vec<&str>)> {
    route_below("/api/v1/mcp/servers/", path)
}

fn route_below<'a>(base: &str, path: &'a str) -> Option<(WorkspaceId, Vec<&'a str>)> {
    let mut segments = path.strip_prefix(base)?.split('/');
    let id = segments.next()?.parse().ok()?;
    Some((id, segments.collect()))
}

/// What a token for one MCP server may do: look at it, and use it.
fn is_mcp_route(method: &Method, rest: &[&str]) -> bool {
    match rest {
        [] => method == Method::GET,
        ["call"] => method == Method::POST,
        ["mcp"] => true,
        _ => false,
    }
}

fn is_tool_route(method: &Method, rest: &[&str]) -> bool {
    match rest {
        [] => method == Method::GET,
        ["mcp"] => true,
        [tool] => {
            method == Method::POST
                && (*tool == "exec" || Tool::ALL.iter().any(|known| known.as_str() == *tool))
        }
        ["operations", _] => method == Method::GET || method == Method::DELETE,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_workspace_token_reaches_its_own_tools_and_nothing_else() {
        let own = WorkspaceId::generate();
        let scope = TokenScope::Workspace { workspace_id: own };
        let base = "/api/v1/agent/workspaces";
        let allowed = |method: Method, path: &str| allows(&scope, &method, path);
        for tool in ["bash", "exec", "read", "write", "edit", "glob", "grep", "git"] {
            assert!(allowed(Method::POST, &format!("{base}/{own}/{tool}")), "{tool}");
            assert!(!allowed(Method::POST, &format!("{base}/{}/{tool}", WorkspaceId::generate())), "{tool}");
        }
        assert!(allowed(Method::GET, &format!("{base}/{own}")));
        assert!(allowed(Method::GET, &format!("{base}/{own}/operations/x")));
        let servers = "/api/v1/mcp/servers";
        for (method, rest) in
            [(Method::GET, ""), (Method::POST, "/call"), (Method::POST, "/mcp"), (Method::GET, "/mcp")]
        {
            assert!(allowed(method.clone(), &format!("{servers}/{own}{rest}")), "{method} {rest}");
            let other = WorkspaceId::generate();
            assert!(!allowed(method, &format!("{servers}/{other}{rest}")), "{rest}");
        }
        for (method, rest) in [(Method::DELETE, ""), (Method::POST, "/restart"), (Method::GET, "/logs")] {
            assert!(!allowed(method.clone(), &format!("{servers}/{own}{rest}")), "{method} {rest}");
        }
        for (method, path) in [
            (Method::DELETE, format!("{base}/{own}")),
            (Method::POST, format!("{base}/{own}/stop")),
            (Method::POST, format!("{base}/{own}/resume")),
            (Method::POST, format!("{base}/{own}/bash/")),
            (Method::POST, base.to_owned()),
            (Method::GET, base.to_owned()),
            (Method::GET, format!("{base}/providers")),
            (Method::GET, "/api/v1/audit".to_owned()),
            (Method::POST, "/api/v1/tokens".to_owned()),
            (Method::GET, "/api/v1/openapi.json".to_owned()),
        ] {
            assert!(!allowed(method.clone(), &path), "{method} {path}");
        }
    }

    #[test]
    fn a_bearer_token_is_found_in_its_header() {
        assert_eq!(bearer("Bearer abc"), Some("abc"));
        assert_eq!(bearer("bearer  abc "), Some("abc"));
        for header in ["abc", "Basic abc", "Bearer ", ""] {
            assert_eq!(bearer(header), None, "{header}");
        }
    }
}
