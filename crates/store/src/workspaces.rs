//! Changes of workspaces' rows.
//!
//! A status changes by compare-and-set only ([`Store::transition`]), so of two callers that want different
//! statuses one wins and the other gets the new status in its error. The status
//! `destroying` is final: no use, error or expiry changes it.

use std::collections::BTreeMap;

use chrono::{DateTime, Utc};
use emergent_wire::WorkspaceId;
use emergent_wire::id::SessionId;
use emergent_wire::workspace::{Placement, ProviderName, Workspace, WorkspaceStatus};
use serde_json::{Map, Value};
use sqlx::types::Json;

use crate::db::{Connection, Lock};
use crate::error::{Result, StoreError};
use crate::open::Store;
use crate::query::query;
use crate::row::{Reader, Row};
use crate::seal::SealingKey;
use crate::types::{clean, clean_json, json_of};
use crate::workspace_rows::{WORKSPACES, WorkspaceRecord};

/// The status of a workspace.
pub(crate) async fn status_of(connection: &mut Connection, id: WorkspaceId) -> Result<WorkspaceStatus> {
    let row = query("SELECT status FROM agent_workspaces WHERE id = $1")
        .bind(id.0)
        .fetch_optional(connection)
        .await?;
    let row = row.ok_or_else(|| StoreError::no_workspace(id))?;
    Reader::with_key(&row, WORKSPACES.name, id).name("status")
}

/// The workspace in the row that an `UPDATE … RETURNING` gave. Without a row the workspace is gone, or its status does
/// not allow the change.
pub(crate) async fn updated(
    connection: &mut Connection,
    id: WorkspaceId,
    row: Option<Row>,
) -> Result<Workspace> {
    match row {
        Some(row) => Ok(WorkspaceRecord::from_row(&row)?.workspace),
        None => Err(StoreError::WrongState { id, status: status_of(connection, id).await? }),
    }
}

/// The holder of a workspace that an attach or a detach did not change.
async fn holder_of(connection: &mut Connection, id: WorkspaceId) -> Result<String> {
    let row = query("SELECT status, attached_to FROM agent_workspaces WHERE id = $1")
        .bind(id.0)
        .fetch_optional(connection)
        .await?;
    let row = row.ok_or_else(|| StoreError::no_workspace(id))?;
    let row = Reader::with_key(&row, WORKSPACES.name, id);
    match row.text_or_null("attached_to")? {
        Some(holder) => Ok(holder),
        None => Err(StoreError::WrongState { id, status: row.name("status")? }),
    }
}

impl Store {
    /// Inserts a session unless it exists.
    pub async fn ensure_session(&self, id: SessionId, now: DateTime<Utc>) -> Result<()> {
        query("INSERT INTO agent_sessions (id, created_at) VALUES ($1, $2) ON CONFLICT (id) DO NOTHING")
            .bind(id.0)
            .bind(now)
            .execute(&mut self.db().writer().await?)
            .await?;
        Ok(())
    }

    /// Changes the status from one of `from` to `to`. Fails with [`StoreError::WrongState`] if it has another one. The
    /// status `ready` clears the last error. `stopping` and `destroying` make this server the row's owner; each other
    /// status clears the owner.
    pub async fn transition(
        &self,
        id: WorkspaceId,
        from: &[WorkspaceStatus],
        to: WorkspaceStatus,
    ) -> Result<Workspace> {
        let [a, b, c, d, e, f] = status_parameters(from);
        self.db()
            .transaction(Lock::None, async |connection| {
                let row = WORKSPACES
                    .returning(
                        "UPDATE agent_workspaces
                         SET status = $2, error = CASE WHEN $2 = 'ready' THEN NULL ELSE error END,
                             owner = CASE WHEN $2 IN ('stopping', 'destroying') THEN $9 END
                         WHERE id = $1 AND status IN ($3, $4, $5, $6, $7, $8)",
                    )
                    .bind(id.0)
                    .bind(to.as_str())
                    .bind(a)
                    .bind(b)
                    .bind(c)
                    .bind(d)
                    .bind(e)
                    .bind(f)
                    .bind(self.server().0)
                    .fetch_optional(connection)
                    .await?;
                updated(connection, id, row).await
            })
            .await
    }

    /// Records the sandbox of a workspace before or after it is made. Refused while the workspace is being destroyed.
    pub async fn set_placed(
        &self,
        id: WorkspaceId,
        provider: ProviderName,
        provider_workspace_id: &str,
        placement: &Placement,
    ) -> Result<Workspace> {
        let placement = json_of(placement)?;
        self.db()
            .transaction(Lock::None, async |connection| {
                let row = WORKSPACES
                    .returning(
                        "UPDATE agent_workspaces
                         SET provider = $2, provider_workspace_id = $3, placement = $4
                         WHERE id = $1 AND status <> 'destroying'",
                    )
                    .bind(id.0)
                    .bind(provider.as_str())
                    .bind(clean(provider_workspace_id))
                    .bind(Json(&placement))
                    .fetch_optional(connection)
                    .await?;
                updated(connection, id, row).await
            })
            .await
    }

    /// Records an error and sets the status to `error`. A workspace that is being destroyed keeps its status.
    pub async fn set_error(&self, id: WorkspaceId, message: &str) -> Result<Workspace> {
        self.db()
            .transaction(Lock::None, async |connection| {
                let row = WORKSPACES
                    .returning(
                        "UPDATE agent_workspaces
                         SET error = $2, owner = NULL,
                             status = CASE WHEN status = 'destroying' THEN status ELSE 'error' END
                         WHERE id = $1",
                    )
                    .bind(id.0)
                    .bind(clean(message))
                    .fetch_optional(connection)
                    .await?;
                updated(connection, id, row).await
            })
            .await
    }

    /// Attaches a workspace to `holder`. The inner error is the name of another holder that it is attached to.
    pub async fn attach(
        &self,
        id: WorkspaceId,
        holder: &str,
        now: DateTime<Utc>,
    ) -> Result<std::result::Result<Workspace, String>> {
        self.db()
            .transaction(Lock::None, async |connection| {
                let row = WORKSPACES
                    .returning(
                        "UPDATE agent_workspaces
                         SET attached_to = $2, attached_at = CASE WHEN attached_to = $2 THEN attached_at ELSE $3 END
                         WHERE id = $1 AND status <> 'destroying' AND (attached_to IS NULL OR attached_to = $2)",
                    )
                    .bind(id.0)
                    .bind(clean(holder))
                    .bind(now)
                    .fetch_optional(connection)
                    .await?;
                if let Some(row) = row {
                    return Ok(Ok(WorkspaceRecord::from_row(&row)?.workspace));
                }
                holder_of(connection, id).await.map(Err)
            })
            .await
    }

    /// Detaches a workspace from `holder`, or from any holder if none is given. The inner error is the name of another
    /// holder that it is attached to. To detach a workspace without a holder is no error.
    pub async fn detach(
        &self,
        id: WorkspaceId,
        holder: Option<&str>,
    ) -> Result<std::result::Result<Workspace, String>> {
        self.db()
            .transaction(Lock::None, async |connection| {
                let row = WORKSPACES
                    .returning(
                        "UPDATE agent_workspaces SET attached_to = NULL, attached_at = NULL
                         WHERE id = $1 AND (attached_to IS NULL OR $2 IS NULL OR attached_to = $2)",
                    )
                    .bind(id.0)
                    .bind(holder.map(clean))
                    .fetch_optional(connection)
                    .await?;
                if let Some(row) = row {
                    return Ok(Ok(WorkspaceRecord::from_row(&row)?.workspace));
                }
                holder_of(connection, id).await.map(Err)
            })
            .await
    }

    /// Removes the row, and the workspace's tokens with it; `false` if it was gone already.
    pub async fn delete_workspace(&self, id: WorkspaceId) -> Result<bool> {
        let deleted = query("DELETE FROM agent_workspaces WHERE id = $1")
            .bind(id.0)
            .execute(&mut self.db().writer().await?)
            .await?;
        // Its tokens went with it.
        self.known_tokens().forget();
        Ok(deleted == 1)
    }

    /// Sets these fields of the metadata and leaves the others; null removes a field.
    pub async fn merge_metadata(&self, id: WorkspaceId, fields: Map<String, Value>) -> Result<Workspace> {
        let Value::Object(fields) = clean_json(Value::Object(fields)) else {
            return self.workspace(id).await;
        };
        self.db()
            .transaction(Lock::None, async |connection| {
                // An update that changes nothing locks the row, in words that both engines know.
                let row =
                    query("UPDATE agent_workspaces SET status = status WHERE id = $1 RETURNING metadata")
                        .bind(id.0)
                        .fetch_optional(connection)
                        .await?;
                let row = row.ok_or_else(|| StoreError::no_workspace(id))?;
                let mut metadata: Map<String, Value> =
                    Reader::with_key(&row, WORKSPACES.name, id).json_or_null("metadata")?.unwrap_or_default();
                for (name, value) in &fields {
                    if value.is_null() {
                        metadata.remove(name);
                    } else {
                        metadata.insert(name.clone(), value.clone());
                    }
                }
                let row = WORKSPACES
                    .returning("UPDATE agent_workspaces SET metadata = $2 WHERE id = $1")
                    .bind(id.0)
                    .bind(Json(&metadata))
                    .fetch_one(connection)
                    .await?;
                Ok(WorkspaceRecord::from_row(&row)?.workspace)
            })
            .await
    }

    /// The variables that every command in the workspace sees.
    pub async fn environment(&self, id: WorkspaceId, key: &SealingKey) -> Result<BTreeMap<String, String>> {
        let row = query("SELECT environment_sealed FROM agent_workspaces WHERE id = $1")
            .bind(id.0)
            .fetch_optional(&mut self.db().reader().await?)
            .await?;
        let row = row.ok_or_else(|| StoreError::no_workspace(id))?;
        let sealed = Reader::with_key(&row, WORKSPACES.name, id).bytes_or_null("environment_sealed")?;
        Ok(key.open_environment(id, sealed.as_deref())?)
    }
}

/// The statuses as six parameters. Unused parameters are empty texts, which equal no status.
fn status_parameters(statuses: &[WorkspaceStatus]) -> [&'static str; 6] {
    let mut names = [""; 6];
    for (index, status) in WorkspaceStatus::ALL.iter().enumerate() {
        if statuses.contains(status)
            && let Some(name) = names.get_mut(index)
        {
            *name = status.as_str();
        }
    }
    names
}

const _: () = assert!(WorkspaceStatus::ALL.len() == 6);
