//! The audit log.

use axum::Json;
use axum::extract::State;
use chrono::{DateTime, Utc};
use emergent_store::{AuditFilter, AuditOutcome, AuditPage, StoreError};
use emergent_wire::error::ErrorBody;
use emergent_wire::{ErrorCode, WorkspaceId};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use super::App;
use super::error::ApiError;
use super::extract::Params;
use crate::workspace::error_of;

/// Which calls to list.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct AuditParams {
    /// In this workspace.
    workspace_id: Option<WorkspaceId>,
    /// Of this tool or action, such as `bash` or `workspace.create`.
    tool: Option<String>,
    /// That ended as `success`, `failure` or `denied`.
    outcome: Option<String>,
    /// Not before this time (RFC 3339).
    since: Option<DateTime<Utc>>,
    /// Before this time (RFC 3339).
    until: Option<DateTime<Utc>>,
    /// Where the last page ended.
    cursor: Option<String>,
    /// How many at most: 1 to 500, 100 unless given.
    limit: Option<u32>,
}

/// List audited calls, newest first. Every call to the API is audited; contents never are.
#[utoipa::path(get, path = "/api/v1/audit", tag = "access", params(AuditParams),
    responses((status = 200, body = Object, description = "`records` with `seq`, `at`, `actor_name`, `workspace_id`, \
        `tool`, `outcome`, `error_code`, `duration_ms`, `request`, `request_id`, `prev_hash`, `hash`; `next_cursor`"),
        (status = "4XX", body = ErrorBody)))]
pub(super) async fn list(
    State(app): State<App>,
    Params(params): Params<AuditParams>,
) -> Result<Json<AuditPage>, ApiError> {
    let limit = params.limit.unwrap_or(100);
    if !(1..=500).contains(&limit) {
        return Err(ApiError::new(ErrorCode::BadRequest, "limit must be from 1 to 500"));
    }
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
    let page =
        app.workspaces.store.audit_page(&filter, params.cursor.as_deref(), limit).await.map_err(error_of)?;
    Ok(Json(page))
}

/// Whether the audit log is what was written.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct Verified {
    /// Whether every record is as it was written, and none is missing.
    ok: bool,
    /// How many records there are, when all is well.
    records: u64,
    /// The first record that is not.
    broken_at: Option<u64>,
    /// What is wrong with it.
    reason: Option<String>,
}

/// Check the hash chain of the audit log.
#[utoipa::path(get, path = "/api/v1/audit/verify", tag = "access",
    responses((status = 200, body = Verified), (status = "4XX", body = ErrorBody)))]
pub(super) async fn verify(State(app): State<App>) -> Result<Json<Verified>, ApiError> {
    app.audit.flush().await;
    match app.workspaces.store.verify_audit().await {
        Ok(records) => Ok(Json(Verified { ok: true, records, broken_at: None, reason: None })),
        Err(StoreError::AuditBroken(broken)) => Ok(Json(Verified {
            ok: false,
            records: 0,
            broken_at: Some(broken.seq),
            reason: Some(broken.to_string()),
        })),
        Err(error) => Err(error_of(error).into()),
    }
}
