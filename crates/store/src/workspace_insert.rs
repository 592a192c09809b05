//! Inserts the rows of workspaces that are about to be made.

use emergent_wire::id::ServerId;
use emergent_wire::workspace::{ContainerType, Placement, Workspace};
use serde_json::Value;
use sqlx::types::Json;

use crate::db::{Connection, Lock};
use crate::error::{Result, RowKind, StoreError};
use crate::open::Store;
use crate::query::query;
use crate::types::{clean, clean_json, json_of};
use crate::workspace_rows::{NewWorkspace, WORKSPACES, WorkspaceRecord, expiry};

/// The sandbox of a workspace that is inserted with one.
pub(crate) struct Placed<'a> {
    pub(crate) provider_workspace_id: &'a str,
    pub(crate) placement: &'a Placement,
}

/// Refuses one more agent workspace when the limit is reached. Must run under [`Lock::WorkspaceLimit`].
pub(crate) async fn check_limit(connection: &mut Connection, limit: Option<u32>) -> Result<()> {
    let Some(limit) = limit else { return Ok(()) };
    let count = query(
        "SELECT COUNT(*) AS count FROM agent_workspaces
         WHERE container_type = 'agent_workspace' AND status <> 'destroying'",
    );
    let current = count.fetch_count(connection).await?;
    if current >= u64::from(limit) {
        return Err(StoreError::LimitReached { limit, current });
    }
    Ok(())
}

/// Inserts the row of a workspace that is about to be made. Fails with [`StoreError::Conflict`] if its id is in use.
pub(crate) async fn insert_workspace(
    connection: &mut Connection,
    new: &NewWorkspace,
    server: ServerId,
    placed: Option<Placed<'_>>,
) -> Result<Workspace> {
    let metadata = clean_json(Value::Object(new.metadata.clone()));
    let mcp_config = new.mcp_config.as_ref().map(json_of).transpose()?;
    let placement = placed.as_ref().map(|placed| json_of(placed.placement)).transpose()?;
    let row = WORKSPACES
        .returning(
            "INSERT INTO agent_workspaces (id, agent_session_id, container_type, provider,
                 provider_workspace_id, repository_url, branch, deployment_mode, lifecycle, status,
                 created_at, last_used_at, expires_at, resource_limits, snapshot_id, mcp_config, metadata,
                 image, network, environment_sealed, ttl_seconds, placement, owner, name)
             VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, 'creating', $10, $10, $11, $12, $13, $14, $15, $16,
                 $17, $18, $19, $20, $21, $22)
             ON CONFLICT (id) DO NOTHING",
        )
        .bind(new.id.0)
        .bind(new.agent_session_id.map(|id| id.0))
        .bind(new.container_type.as_str())
        .bind(placed.as_ref().map_or("", |placed| placed.placement.provider.as_str()))
        .bind(clean(placed.as_ref().map_or("", |placed| placed.provider_workspace_id)))
        .bind(new.repository_url.as_deref().map(clean))
        .bind(new.branch.as_deref().map(clean))
        .bind(new.deployment_mode.as_str())
        .bind(new.lifecycle.as_str())
        .bind(new.created_at)
        .bind(expiry(new.created_at, new.ttl_seconds))
        .bind(Json(&new.resource_limits))
        .bind(new.snapshot_id.map(|id| id.to_string()))
        .bind(mcp_config.map(Json))
        .bind(Json(&metadata))
        .bind(clean(&new.image))
        .bind(new.network.as_str())
        .bind(new.environment_sealed.as_deref())
        .bind(new.ttl_seconds)
        .bind(placement.map(Json))
        .bind(server.0)
        .bind(new.name.as_deref().map(clean))
        .fetch_optional(connection)
        .await?;
    match row {
        Some(row) => Ok(WorkspaceRecord::from_row(&row)?.workspace),
        None => Err(StoreError::Conflict { kind: "workspace", name: new.id.to_string() }),
    }
}

impl Store {
    /// Inserts a workspace that is about to be made. With a `limit`, an agent workspace is refused unless fewer than
    /// that many agent workspaces are live. All are live except those that are being destroyed.
    pub async fn insert_creating(&self, new: NewWorkspace, limit: Option<u32>) -> Result<Workspace> {
        let limit = limit.filter(|_| new.container_type == ContainerType::AgentWorkspace);
        let lock = if limit.is_some() { Lock::WorkspaceLimit } else { Lock::None };
        let inserted = self
            .db()
            .transaction(lock, async |connection| {
                check_limit(connection, limit).await?;
                insert_workspace(connection, &new, self.server(), None).await
            })
            .await;
        inserted.map_err(|error| match (error, new.agent_session_id) {
            (StoreError::Database(sqlx::Error::Database(error)), Some(session))
                if error.is_foreign_key_violation() =>
            {
                let (kind, id) = (RowKind::Session, session.to_string());
                StoreError::NotFound { kind, id }
            }
            (StoreError::Database(sqlx::Error::Database(error)), _) if error.is_unique_violation() => {
                StoreError::Conflict { kind: "MCP server", name: new.name.unwrap_or_default() }
            }
            (error, _) => error,
        })
    }
}
