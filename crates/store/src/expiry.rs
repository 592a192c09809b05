//! How long workspaces live.
//!
//! Expiry is a column, not a timer: it survives a restart, and a use that comes between the sweep's look and its
//! act wins, as the act asks again whether the time is over. The time to live begins when the workspace is ready,
//! and never changes; a use moves the end ahead and never back.

use chrono::{DateTime, Utc};
use emergent_wire::WorkspaceId;
use emergent_wire::workspace::{Workspace, WorkspaceStatus};

use crate::db::{Lock, in_transaction, reading, writing};
use crate::error::{Result, StoreError};
use crate::open::Store;
use crate::types::{DbTime, DbUuid, Reader};
use crate::workspace_rows::{TABLE, WorkspaceRecord, columns, expiry};
use crate::workspaces::{status_of, updated_or_why};

impl Store {
    /// The workspace takes calls from now on: its time to live begins, and the last error is cleared. Refused
    /// while it is being destroyed.
    pub async fn set_ready(&self, id: WorkspaceId, now: DateTime<Utc>) -> Result<Workspace> {
        let expires_at = expiry(now, self.ttl(id).await?).map(DbTime::new);
        in_transaction!(self.db(), Lock::None, |connection| {
            let row = sqlx::query(concat!(
                "UPDATE agent_workspaces SET status = 'ready', error = NULL, last_used_at = $2, expires_at = $3,
                     owner = NULL
                 WHERE id = $1 AND status <> 'destroying' RETURNING ",
                columns!()
            ))
            .bind(DbUuid(id.0))
            .bind(DbTime::new(now))
            .bind(expires_at)
            .fetch_optional(&mut *connection)
            .await?;
            updated_or_why!(connection, id, row)
        })
    }

    /// The workspace was used: it expires its time to live after `now`. Never moves back in time.
    pub async fn touch(&self, id: WorkspaceId, now: DateTime<Utc>) -> Result<()> {
        // The time to live never changes, so it can be read beforehand, off the one writer.
        let expires_at = expiry(now, self.ttl(id).await?).map(DbTime::new);
        let touched = writing!(self.db(), |connection| {
            sqlx::query(
                "UPDATE agent_workspaces SET last_used_at = $2, expires_at = $3
                 WHERE id = $1 AND status <> 'destroying' AND last_used_at < $2",
            )
            .bind(DbUuid(id.0))
            .bind(DbTime::new(now))
            .bind(expires_at)
            .execute(&mut *connection)
            .await?
            .rows_affected()
        });
        if touched == 1 {
            return Ok(());
        }
        let status = reading!(self.db(), |connection| status_of!(connection, id));
        match status {
            WorkspaceStatus::Destroying => Err(StoreError::WrongState { id, status }),
            // It was used later than `now` already.
            _ => Ok(()),
        }
    }

    /// Up to `limit` agent workspaces whose time is over, the longest overdue first.
    pub async fn expired(&self, now: DateTime<Utc>, limit: u32) -> Result<Vec<WorkspaceId>> {
        reading!(self.db(), |connection| {
            let rows = sqlx::query(
                "SELECT id FROM agent_workspaces
                 WHERE expires_at <= $1 AND container_type = 'agent_workspace'
                   AND status IN ('ready', 'stopped', 'error')
                 ORDER BY expires_at, id LIMIT $2",
            )
            .bind(DbTime::new(now))
            .bind(i64::from(limit))
            .fetch_all(&mut *connection)
            .await?;
            rows.iter().map(|row| Reader::by_id(row, TABLE).uuid("id").map(WorkspaceId)).collect()
        })
    }

    /// Begins to destroy a workspace if its time is over still; `false` if it was used in the meantime.
    pub async fn expire(&self, id: WorkspaceId, now: DateTime<Utc>) -> Result<bool> {
        let expired = writing!(self.db(), |connection| {
            sqlx::query(
                "UPDATE agent_workspaces SET status = 'destroying', owner = $3
                 WHERE id = $1 AND expires_at <= $2 AND container_type = 'agent_workspace'
                   AND status IN ('ready', 'stopped', 'error')",
            )
            .bind(DbUuid(id.0))
            .bind(DbTime::new(now))
            .bind(DbUuid(self.server().0))
            .execute(&mut *connection)
            .await?
            .rows_affected()
        });
        Ok(expired == 1)
    }

    /// Ready agent workspaces that were last used before `before`.
    pub async fn unused_since(&self, before: DateTime<Utc>, limit: u32) -> Result<Vec<WorkspaceId>> {
        reading!(self.db(), |connection| {
            let rows = sqlx::query(
                "SELECT id FROM agent_workspaces
                 WHERE last_used_at < $1 AND container_type = 'agent_workspace' AND status = 'ready'
                 ORDER BY last_used_at, id LIMIT $2",
            )
            .bind(DbTime::new(before))
            .bind(i64::from(limit))
            .fetch_all(&mut *connection)
            .await?;
            rows.iter().map(|row| Reader::by_id(row, TABLE).uuid("id").map(WorkspaceId)).collect()
        })
    }

    /// Begins to stop a workspace if it was not used since `before`; `false` if it was.
    pub async fn stop_if_unused(&self, id: WorkspaceId, before: DateTime<Utc>) -> Result<bool> {
        let stopped = writing!(self.db(), |connection| {
            sqlx::query(
                "UPDATE agent_workspaces SET status = 'stopping', owner = $3
                 WHERE id = $1 AND last_used_at < $2 AND container_type = 'agent_workspace' AND status = 'ready'",
            )
            .bind(DbUuid(id.0))
            .bind(DbTime::new(before))
            .bind(DbUuid(self.server().0))
            .execute(&mut *connection)
            .await?
            .rows_affected()
        });
        Ok(stopped == 1)
    }

    async fn ttl(&self, id: WorkspaceId) -> Result<Option<u64>> {
        reading!(self.db(), |connection| {
            let row = sqlx::query("SELECT ttl_seconds FROM agent_workspaces WHERE id = $1")
                .bind(DbUuid(id.0))
                .fetch_optional(&mut *connection)
                .await?;
            let row = row.ok_or_else(|| StoreError::no_workspace(id))?;
            Reader::with_key(&row, TABLE, id).unsigned_or_null("ttl_seconds")
        })
    }
}
