//! Gives each call an id and a span, and measures, logs and audits it.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use axum::extract::{Request, State};
use axum::http::HeaderValue;
use axum::middleware::Next;
use axum::response::Response;
use chrono::Utc;
use emergent_store::{AuditEntry, AuditOutcome};
use emergent_wire::ErrorCode;
use tracing::field::Empty;
use tracing::{Instrument as _, Span};

use super::App;
use super::error::FailedWith;
use super::route::{AuditPolicy, RouteRule, TargetId};
use super::summary::SummarySlot;
use crate::caller::Caller;

const HEADER: &str = "x-request-id";

/// The id of a request in the log and the audit log.
#[derive(Clone, Debug)]
pub(super) struct RequestId(String);

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Added to a request. It is set when the domain begins to record the call, which then audits and measures it, whatever happens to the
/// request.
#[derive(Clone, Debug, Default)]
pub(super) struct RecordedByDomain(Arc<AtomicBool>);

impl RecordedByDomain {
    pub(super) fn set(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// Gives each request an id: the client's, where it is valid, else a new one.
pub(super) async fn request_id(mut request: Request, next: Next) -> Response {
    let given =
        request.headers().get(HEADER).and_then(|value| value.to_str().ok()).filter(|text| is_valid(text));
    let id = given.map_or_else(|| uuid::Uuid::now_v7().simple().to_string(), str::to_owned);
    request.extensions_mut().insert(RequestId(id.clone()));
    // All log lines of this request carry these fields (docs/logging.md).
    let span = tracing::info_span!(
        "request",
        request = id,
        action = Empty,
        principal = Empty,
        workspace = Empty,
        error_code = Empty
    );
    let mut response = next.run(request).instrument(span).await;
    if let Ok(value) = HeaderValue::from_str(&id) {
        response.headers_mut().insert(HEADER, value);
    }
    response
}

fn is_valid(text: &str) -> bool {
    (1..=64).contains(&text.len())
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte))
}

/// Measures, logs and audits a call.
pub(super) async fn call(
    State((app, rule)): State<(App, RouteRule)>,
    mut request: Request,
    next: Next,
) -> Response {
    let (at, begun) = (Utc::now(), Instant::now());
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let request_id = request.extensions().get::<RequestId>().map(ToString::to_string);
    let span = Span::current();
    span.record("action", rule.action);
    let target = TargetId::of(&mut request, &rule, &app).await;
    if let Some(id) = target.0 {
        span.record("workspace", tracing::field::display(id));
    }
    let summary = SummarySlot::default();
    request.extensions_mut().insert(target);
    request.extensions_mut().insert(summary.clone());
    let recorded = RecordedByDomain::default();
    request.extensions_mut().insert(recorded.clone());
    let response = next.run(request).await;
    let duration = begun.elapsed();
    let status = response.status();
    let failed = response.extensions().get::<FailedWith>().map(|failed| failed.0);
    if let Some(code) = failed {
        span.record("error_code", code.as_str());
    }
    tracing::debug!(%method, path, status = status.as_u16(), took_ms = duration.as_millis(), "call");
    if recorded.is_set() {
        return response;
    }
    let outcome = match failed {
        Some(ErrorCode::Unauthorized | ErrorCode::Forbidden) => AuditOutcome::Denied,
        Some(_) => AuditOutcome::Failure,
        None => AuditOutcome::Success,
    };
    metrics::histogram!("emergent_call_seconds", "action" => rule.action).record(duration.as_secs_f64());
    metrics::counter!("emergent_calls_total", "action" => rule.action, "outcome" => outcome.as_str())
        .increment(1);
    let principal = response.extensions().get::<Caller>().map(|caller| caller.principal.clone());
    let entry = || AuditEntry {
        at,
        actor_token_id: principal.as_ref().map(|principal| principal.token_id),
        actor_name: principal.map(|principal| principal.name),
        workspace_id: target.0,
        session_id: None,
        tool: rule.action.to_owned(),
        outcome,
        error_code: failed.map(|code| code.as_str().to_owned()),
        duration_ms: u64::try_from(duration.as_millis()).unwrap_or(u64::MAX),
        request: summary.get(),
        request_id,
    };
    match rule.audit {
        AuditPolicy::Never => {}
        AuditPolicy::BeforeAnswer => app.audit.record(entry()).await,
        AuditPolicy::Soon => app.audit.record_soon(entry()).await,
    }
    response
}
