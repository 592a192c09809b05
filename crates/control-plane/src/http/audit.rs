//! The audit log.

use axum::Json;
use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::response::IntoResponse;
use chrono::{DateTime, Utc};
use emergent_store::{AuditFilter, AuditOutcome, AuditPage, AuditRange, StoreError};
use emergent_wire::error::ErrorBody;
use emergent_wire::{ErrorCode, WorkspaceId};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use super::App;
use super::error::ApiError;
use super::extract::{Params, page_limit};
use super::route::{AuditPolicy, RouteRule};

/// The calls to list.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct AuditParams {
    /// Only calls to this workspace.
    workspace_id: Option<WorkspaceId>,
    /// Only calls of this tool or action, such as `bash` or `workspace.create`.
    tool: Option<String>,
    /// Only records with this outcome: `success`, `failure` or `denied`, or `started` for the beginning of a call whose output is sent
    /// while it runs.
    outcome: Option<String>,
    /// Only calls at or after this time (RFC 3339).
    since: Option<DateTime<Utc>>,
    /// Only calls before this time (RFC 3339).
    until: Option<DateTime<Utc>>,
    /// `next_cursor` of the page before.
    cursor: Option<String>,
    /// The size of the page: 1 to 500, 100 unless given.
    limit: Option<u32>,
}

pub(super) const LIST: RouteRule = RouteRule::admin("audit.list").audited(AuditPolicy::Never);

/// List audited calls, newest first. Calls to the API are audited, without their contents.
///
/// A call has one record, which is written before the answer is sent. A call whose output is sent while it runs has two with the same
/// `request_id`: `started` before the output, and its outcome at the end.
#[utoipa::path(get, path = "/api/v1/audit", tag = "access", params(AuditParams),
    responses((status = 200, body = Object, description = "`records` with `seq`, `at`, `actor_name`, `workspace_id`, \
        `tool`, `outcome`, `error_code`, `duration_ms`, `request`, `request_id`, `prev_hash`, `hash`; `next_cursor`"),
        (status = "4XX", body = ErrorBody)))]
pub(super) async fn list(
    State(app): State<App>,
    Params(params): Params<AuditParams>,
) -> Result<Json<AuditPage>, ApiError> {
    let limit = page_limit(params.limit)?;
    let outcome = params.outcome.map(|text| text.parse::<AuditOutcome>()).transpose();
    let filter = AuditFilter {
        workspace_id: params.workspace_id,
        tool: params.tool,
        outcome: outcome
            .map_err(|error| ApiError::new(ErrorCode::BadRequest, format!("outcome: {error}")))?,
        since: params.since,
        until: params.until,
    };
    app.audit.flush().await;
    let page = app.workspaces.context.store.audit_page(&filter, params.cursor.as_deref(), limit).await?;
    Ok(Json(page))
}

/// The result of checking the audit log.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct Verified {
    /// Whether each record is as it was written, and none is missing.
    ok: bool,
    /// The number of records; 0 when the log is broken.
    records: u64,
    /// The first broken record.
    broken_at: Option<u64>,
    /// The fault of that record.
    reason: Option<String>,
    /// The last record that retention has exported and removed. The last export must end with its hash.
    anchor: Option<Anchor>,
}

/// The last record that was removed.
#[derive(Debug, Serialize, ToSchema)]
struct Anchor {
    /// Its number.
    seq: u64,
    /// Its hash, in hexadecimal.
    hash: String,
    /// The time of its removal.
    at: DateTime<Utc>,
}

/// The records to export.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct ExportParams {
    /// Only records before this time (RFC 3339).
    before: Option<DateTime<Utc>>,
    /// Only records after the one with this number, such as the last one of the page before.
    after: Option<u64>,
    /// The size of the page: 1 to 1000, 1000 unless given.
    limit: Option<u32>,
}

pub(super) const EXPORT: RouteRule = RouteRule::admin("audit.export");

/// Export records of the audit log, oldest first, one JSON object a line. The body is empty when there are no more. Unlike the list,
/// each line has all values that its hash covers, so that `emergent audit verify --export` can check it without the server.
#[utoipa::path(get, path = "/api/v1/audit/export", tag = "access", params(ExportParams),
    responses((status = 200, content_type = "application/x-ndjson", body = String), (status = "4XX", body = ErrorBody)))]
pub(super) async fn export(
    State(app): State<App>,
    Params(params): Params<ExportParams>,
) -> Result<impl IntoResponse, ApiError> {
    let limit = params.limit.unwrap_or(1000);
    if !(1..=1000).contains(&limit) {
        return Err(ApiError::new(ErrorCode::BadRequest, "limit must be from 1 to 1000"));
    }
    app.audit.flush().await;
    let range = AuditRange { before: params.before.unwrap_or(DateTime::<Utc>::MAX_UTC), through: None };
    let rows = app.workspaces.context.store.export_audit(params.after, &range, limit).await?;
    let lines: String = rows.iter().map(|row| row.to_line() + "\n").collect();
    Ok(([(CONTENT_TYPE, "application/x-ndjson")], lines))
}

pub(super) const VERIFY: RouteRule = RouteRule::admin("audit.verify").audited(AuditPolicy::Never);

/// Check the hash chain of the audit log.
#[utoipa::path(get, path = "/api/v1/audit/verify", tag = "access",
    responses((status = 200, body = Verified), (status = "4XX", body = ErrorBody)))]
pub(super) async fn verify(State(app): State<App>) -> Result<Json<Verified>, ApiError> {
    app.audit.flush().await;
    let store = &app.workspaces.context.store;
    let anchor = store.audit_anchor().await?;
    let anchor = anchor.map(|anchor| Anchor { seq: anchor.seq, hash: anchor.hash, at: anchor.at });
    match store.verify_audit().await {
        Ok(records) => Ok(Json(Verified { ok: true, records, broken_at: None, reason: None, anchor })),
        Err(StoreError::AuditBroken(broken)) => Ok(Json(Verified {
            ok: false,
            records: 0,
            broken_at: Some(broken.seq),
            reason: Some(broken.to_string()),
            anchor,
        })),
        Err(error) => Err(error.into()),
    }
}
