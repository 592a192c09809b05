//! Expiry of workspaces.
//!
//! Expiry is a column, not a timer, so it survives a restart. The sweep first lists overdue workspaces and then expires
//! each with a statement that checks the time again, so a use between the two wins. The time to live begins when the
//! workspace is ready and never changes. A use moves the expiry ahead and never back.

use chrono::{DateTime, Utc};
use emergent_wire::WorkspaceId;
use emergent_wire::workspace::{Workspace, WorkspaceStatus};

use crate::db::Lock;
use crate::error::{Result, StoreError};
use crate::open::Store;
use crate::query::query;
use crate::row::Reader;
use crate::workspace_rows::{WORKSPACES, expiry};
use crate::workspaces::{status_of, updated};

impl Store {
    /// Sets the status to `ready`, starts the time to live and clears the last error. Refused while the workspace is being
    /// destroyed.
    pub async fn set_ready(&self, id: WorkspaceId, now: DateTime<Utc>) -> Result<Workspace> {
        let expires_at = expiry(now, self.ttl(id).await?);
        self.db()
            .transaction(Lock::None, async |connection| {
                let row = WORKSPACES
                    .returning(
                        "UPDATE agent_workspaces
                         SET status = 'ready', error = NULL, last_used_at = $2, expires_at = $3, owner = NULL
                         WHERE id = $1 AND status <> 'destroying'",
                    )
                    .bind(id.0)
                    .bind(now)
                    .bind(expires_at)
                    .fetch_optional(connection)
                    .await?;
                updated(connection, id, row).await
            })
            .await
    }

    /// Records a use at `now`: the workspace expires its time to live later. An earlier use than the last changes nothing.
    pub async fn touch(&self, id: WorkspaceId, now: DateTime<Utc>) -> Result<()> {
        // The time to live never changes, so it can be read beforehand, off the one writer.
        let expires_at = expiry(now, self.ttl(id).await?);
        let touched = query(
            "UPDATE agent_workspaces SET last_used_at = $2, expires_at = $3
             WHERE id = $1 AND status <> 'destroying' AND last_used_at < $2",
        )
        .bind(id.0)
        .bind(now)
        .bind(expires_at)
        .execute(&mut self.db().writer().await?)
        .await?;
        if touched == 1 {
            return Ok(());
        }
        let status = status_of(&mut self.db().reader().await?, id).await?;
        match status {
            WorkspaceStatus::Destroying => Err(StoreError::WrongState { id, status }),
            // It was used later than `now` already.
            _ => Ok(()),
        }
    }

    /// Up to `limit` expired agent workspaces, the longest overdue first.
    pub async fn expired(&self, now: DateTime<Utc>, limit: u32) -> Result<Vec<WorkspaceId>> {
        let rows = query(
            "SELECT id FROM agent_workspaces
             WHERE expires_at <= $1 AND container_type = 'agent_workspace'
               AND status IN ('ready', 'stopped', 'error')
             ORDER BY expires_at, id LIMIT $2",
        )
        .bind(now)
        .bind(i64::from(limit))
        .fetch_all(&mut self.db().reader().await?)
        .await?;
        rows.iter().map(|row| Reader::by_id(row, WORKSPACES.name).uuid("id").map(WorkspaceId)).collect()
    }

    /// Begins to destroy a workspace if it is still expired. False if it was used meanwhile.
    pub async fn expire(&self, id: WorkspaceId, now: DateTime<Utc>) -> Result<bool> {
        let expired = query(
            "UPDATE agent_workspaces SET status = 'destroying', owner = $3
             WHERE id = $1 AND expires_at <= $2 AND container_type = 'agent_workspace'
               AND status IN ('ready', 'stopped', 'error')",
        )
        .bind(id.0)
        .bind(now)
        .bind(self.server().0)
        .execute(&mut self.db().writer().await?)
        .await?;
        Ok(expired == 1)
    }

    /// Ready agent workspaces that were last used before `before`.
    pub async fn unused_since(&self, before: DateTime<Utc>, limit: u32) -> Result<Vec<WorkspaceId>> {
        let rows = query(
            "SELECT id FROM agent_workspaces
             WHERE last_used_at < $1 AND container_type = 'agent_workspace' AND status = 'ready'
             ORDER BY last_used_at, id LIMIT $2",
        )
        .bind(before)
        .bind(i64::from(limit))
        .fetch_all(&mut self.db().reader().await?)
        .await?;
        rows.iter().map(|row| Reader::by_id(row, WORKSPACES.name).uuid("id").map(WorkspaceId)).collect()
    }

    /// Begins to stop a workspace unless it was used since `before`. False if it was.
    pub async fn stop_if_unused(&self, id: WorkspaceId, before: DateTime<Utc>) -> Result<bool> {
        let stopped = query(
                "UPDATE agent_workspaces SET status = 'stopping', owner = $3
                 WHERE id = $1 AND last_used_at < $2 AND container_type = 'agent_workspace' AND status = 'ready'",
            )
            .bind(id.0)
            .bind(before)
            .bind(self.server().0)
            .execute(&mut self.db().writer().await?)
            .await?;
        Ok(stopped == 1)
    }

    async fn ttl(&self, id: WorkspaceId) -> Result<Option<u64>> {
        let row = query("SELECT ttl_seconds FROM agent_workspaces WHERE id = $1")
            .bind(id.0)
            .fetch_optional(&mut self.db().reader().await?)
            .await?;
        let row = row.ok_or_else(|| StoreError::no_workspace(id))?;
        Reader::with_key(&row, WORKSPACES.name, id).unsigned_or_null("ttl_seconds")
    }
}
