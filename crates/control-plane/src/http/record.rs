//! Every call is numbered, timed, logged, counted and audited, in one place.

use std::time::Instant;

use axum::extract::{Request, State};
use axum::http::{HeaderValue, Method};
use axum::middleware::Next;
use axum::response::Response;
use chrono::Utc;
use emergent_store::{AuditEntry, AuditOutcome};
use emergent_wire::ErrorCode;

use super::App;
use super::access::{Caller, workspace_route};
use super::error::FailedWith;
use super::summary::SummarySlot;

const HEADER: &str = "x-request-id";
const QUARANTINE: &str = "/api/v1/agent/workspaces/quarantine/";
const SNAPSHOTS: &str = "/api/v1/agent/workspaces/snapshots/";

/// A request's number.
#[derive(Clone, Debug)]
pub(super) struct RequestId(String);

/// Gives every request an id: the client's own, when it is a sane one.
pub(super) async fn request_id(mut request: Request, next: Next) -> Response {
    let given =
        request.headers().get(HEADER).and_then(|value| value.to_str().ok()).filter(|text| is_sane(text));
    let id = given.map_or_else(|| uuid::Uuid::now_v7().simple().to_string(), str::to_owned);
    request.extensions_mut().insert(RequestId(id.clone()));
    let mut response = next.run(request).await;
    if let Ok(value) = HeaderValue::from_str(&id) {
        response.headers_mut().insert(HEADER, value);
    }
    response
}

fn is_sane(text: &str) -> bool {
    (1..=64).contains(&text.len())
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte))
}

/// Logs, counts and audits a call.
pub(super) async fn calls(State(app): State<App>, mut request: Request, next: Next) -> Response {
    let (at, begun) = (Utc::now(), Instant::now());
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let request_id = request.extensions().get::<RequestId>().map(|id| id.0.clone());
    let summary = SummarySlot::default();
    request.extensions_mut().insert(summary.clone());
    let response = next.run(request).await;
    let took = begun.elapsed();
    let action = action_of(&method, &path);
    let status = response.status();
    let failed = response.extensions().get::<FailedWith>().map(|failed| failed.0);
    let outcome = match failed {
        Some(ErrorCode::Unauthorized | ErrorCode::Forbidden) => AuditOutcome::Denied,
        Some(_) => AuditOutcome::Failure,
        None => AuditOutcome::Success,
    };
    metrics::histogram!("emergent_call_seconds", "action" => action.clone()).record(took.as_secs_f64());
    metrics::counter!("emergent_calls_total", "action" => action.clone(), "outcome" => outcome.as_str())
        .increment(1);
    let caller = response.extensions().get::<Caller>().map(|caller| caller.0.clone());
    let workspace = workspace_route(&path).map(|(id, _)| id).or_else(|| {
        let server = path.strip_prefix("/api/v1/mcp/servers/")?.split('/').next()?;
        server.parse().ok().or_else(|| app.mcp.known(server))
    });
    tracing::debug!(request = request_id, %method, path, status = status.as_u16(), took_ms = took.as_millis(), "call");
    if is_audited(&action) {
        let is_frequent = matches!(action.as_str(), "mcp.call" | "mcp.message");
        let entry = AuditEntry {
            at,
            actor_token_id: caller.as_ref().map(|token| token.id),
            actor_name: caller.map(|token| token.name),
            workspace_id: workspace,
            session_id: None,
            tool: action,
            outcome,
            error_code: failed.map(|code| code.as_str().to_owned()),
            duration_ms: u64::try_from(took.as_millis()).unwrap_or(u64::MAX),
            request: summary.get(),
            request_id,
        };
        if is_frequent {
            app.audit.record_soon(entry).await;
        } else {
            app.audit.record(entry).await;
        }
    }
    response
}

/// What a call does, as a name with few values.
fn action_of(method: &Method, path: &str) -> String {
    if let Some((_, rest)) = workspace_route(path) {
        return match (method, rest.as_slice()) {
            (&Method::GET, []) => "workspace.get".to_owned(),
            (&Method::DELETE, []) => "workspace.destroy".to_owned(),
            (_, ["operations", _]) => "operation".to_owned(),
            (_, ["mcp"]) => "workspace.mcp".to_owned(),
            (&Method::POST, ["exec"]) => "bash".to_owned(),
            (&Method::POST, [tool @ ("bash" | "read" | "write" | "edit" | "glob" | "grep" | "git")]) => {
                (*tool).to_owned()
            }
            (&Method::POST, [change @ ("stop" | "resume" | "attach" | "detach" | "snapshot")]) => {
                format!("workspace.{change}")
            }
            _ => "unknown".to_owned(),
        };
    }
    if let Some(rest) = path.strip_prefix("/api/v1/mcp/servers/") {
        let action = match (method, rest.split_once('/').map(|(_, rest)| rest)) {
            (&Method::GET, None) => "mcp.get",
            (&Method::DELETE, None) => "mcp.remove",
            (&Method::POST, Some("restart")) => "mcp.restart",
            (&Method::POST, Some("call")) => "mcp.call",
            (&Method::GET, Some("logs")) => "mcp.logs",
            (_, Some("mcp")) => "mcp.message",
            _ => "unknown",
        };
        return action.to_owned();
    }
    let action = match (method, path) {
        (&Method::POST, "/api/v1/agent/workspaces") => "workspace.create",
        (&Method::GET, "/api/v1/agent/workspaces") => "workspace.list",
        (&Method::GET, "/api/v1/agent/workspaces/providers") => "providers",
        (&Method::POST, "/api/v1/agent/workspaces/from-snapshot") => "workspace.from_snapshot",
        (&Method::GET, "/api/v1/agent/workspaces/snapshots") => "snapshot.list",
        (&Method::GET, path) if path.starts_with(SNAPSHOTS) => "snapshot.get",
        (&Method::DELETE, path) if path.starts_with(SNAPSHOTS) => "snapshot.delete",
        (&Method::GET, "/api/v1/agent/workspaces/quarantine") => "quarantine.list",
        (&Method::POST, path) if path.starts_with(QUARANTINE) => "quarantine.restore",
        (&Method::DELETE, path) if path.starts_with(QUARANTINE) => "quarantine.purge",
        (&Method::GET, "/api/v1/agent/pool") => "pool.get",
        (&Method::PUT, "/api/v1/agent/pool") => "pool.set",
        (&Method::DELETE, "/api/v1/agent/pool") => "pool.reset",
        (&Method::POST, "/api/v1/mcp/servers") => "mcp.register",
        (&Method::GET, "/api/v1/mcp/servers") => "mcp.list",
        (&Method::GET, "/api/v1/events") => "events",
        (&Method::POST, "/api/v1/tokens") => "token.create",
        (&Method::GET, "/api/v1/tokens") => "token.list",
        (&Method::DELETE, path) if path.starts_with("/api/v1/tokens/") => "token.revoke",
        (_, "/api/v1/audit") => "audit.list",
        (_, "/api/v1/audit/verify") => "audit.verify",
        (_, "/api/v1/audit/export") => "audit.export",
        (_, "/api/v1/openapi.json") => "openapi",
        _ => "unknown",
    };
    action.to_owned()
}

/// Looking at the audit log or the API's description is not worth an entry; the calls in MCP's messages to a workspace
/// have entries of their own.
fn is_audited(action: &str) -> bool {
    !matches!(action, "audit.list" | "audit.verify" | "openapi" | "workspace.mcp")
}
