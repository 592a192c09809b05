//! Workspaces: their rows, from the intent to make one until it is gone.
//!
//! A status changes by compare-and-set only ([`Store::transition`]), so of two callers that want different
//! things one wins and the other is told what the status is. A workspace that is being destroyed goes no way
//! but out: no use, error or expiry brings it back.

use std::collections::BTreeMap;

use chrono::{DateTime, Utc};
use emergent_wire::WorkspaceId;
use emergent_wire::id::SessionId;
use emergent_wire::workspace::{
    ContainerType, Placement, ProviderName, Workspace, WorkspaceList, WorkspaceStatus,
};
use serde_json::{Map, Value};
use sqlx::types::Json;

use crate::db::{Lock, in_transaction, reading, writing};
use crate::error::{Result, StoreError};
use crate::open::Store;
use crate::page;
use crate::seal::SealingKey;
use crate::types::{DbTime, DbUuid, Reader, clean, clean_json};
use crate::workspace_rows::{NewWorkspace, TABLE, WorkspaceFilter, WorkspaceRecord, columns, expiry};

/// The status of a row, or that there is none.
macro_rules! status_of {
    ($connection:expr, $id:expr) => {{
        let row = sqlx::query("SELECT status FROM agent_workspaces WHERE id = $1")
            .bind(DbUuid($id.0))
            .fetch_optional(&mut *$connection)
            .await?;
        let row = row.ok_or_else(|| StoreError::no_workspace($id))?;
        Reader::with_key(&row, TABLE, $id).name::<WorkspaceStatus>("status")?
    }};
}

/// The row that an `UPDATE … RETURNING` of one workspace gave; or why it gave none.
macro_rules! updated_or_why {
    ($connection:expr, $id:expr, $row:expr) => {
        match $row {
            Some(row) => Ok(WorkspaceRecord::from_row(&row)?.workspace),
            None => {
                let status = status_of!($connection, $id);
                Err(StoreError::WrongState { id: $id, status })
            }
        }
    };
}

/// Who holds a workspace; or why it can't be held.
macro_rules! holder_of {
    ($connection:expr, $id:expr) => {{
        let row = sqlx::query("SELECT status, attached_to FROM agent_workspaces WHERE id = $1")
            .bind(DbUuid($id.0))
            .fetch_optional(&mut *$connection)
            .await?;
        let row = row.ok_or_else(|| StoreError::no_workspace($id))?;
        let row = Reader::with_key(&row, TABLE, $id);
        match row.text_or_null("attached_to")? {
            Some(holder) => Ok(Err(holder)),
            None => Err(StoreError::WrongState { id: $id, status: row.name("status")? }),
        }
    }};
}

/// Refuses one more agent workspace when the limit is reached. Must run under [`Lock::WorkspaceLimit`].
macro_rules! check_limit {
    ($connection:expr, $limit:expr) => {
        if let Some(limit) = $limit {
            let current: i64 = sqlx::query_scalar(
                "SELECT COUNT(*) FROM agent_workspaces
                 WHERE container_type = 'agent_workspace' AND status <> 'destroying'",
            )
            .fetch_one(&mut *$connection)
            .await?;
            if current >= i64::from(limit) {
                let current = current.unsigned_abs();
                return Err(StoreError::LimitReached { limit, current });
            }
        }
    };
}

/// Writes the row of a workspace that is about to be made, on a provider or not yet; no row: its id is taken.
macro_rules! insert_workspace {
    ($connection:expr, $new:expr, $server:expr, $placed:expr) => {{
        let new = &$new;
        let placed = $placed;
        let created_at = DbTime::new(new.created_at);
        let expires_at = expiry(new.created_at, new.ttl_seconds).map(DbTime::new);
        let metadata = clean_json(serde_json::Value::Object(new.metadata.clone()));
        let placement =
            placed.map(|(_, _, placement)| clean_json(serde_json::to_value(placement).unwrap_or_default()));
        sqlx::query(concat!(
            "INSERT INTO agent_workspaces (id, agent_session_id, container_type, provider,
                 provider_workspace_id, repository_url, branch, deployment_mode, lifecycle, status,
                 created_at, last_used_at, expires_at, resource_limits, snapshot_id, mcp_config, metadata,
                 image, network, environment_sealed, ttl_seconds, placement, owner, name)
             VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, 'creating', $10, $10, $11, $12, $13, $14, $15, $16,
                 $17, $18, $19, $20, $21, $22)
             ON CONFLICT (id) DO NOTHING RETURNING ",
            columns!()
        ))
        .bind(DbUuid(new.id.0))
        .bind(new.agent_session_id.map(|id| DbUuid(id.0)))
        .bind(new.container_type.as_str())
        .bind(placed.map_or("", |(provider, _, _)| provider.as_str()))
        .bind(clean(placed.map_or("", |(_, name, _)| name)))
        .bind(new.repository_url.as_deref().map(clean))
        .bind(new.branch.as_deref().map(clean))
        .bind(new.deployment_mode.as_str())
        .bind(new.lifecycle.as_str())
        .bind(created_at)
        .bind(expires_at)
        .bind(Json(&new.resource_limits))
        .bind(new.snapshot_id.as_deref().map(clean))
        .bind(new.mcp_config.clone().map(clean_json).map(Json))
        .bind(Json(&metadata))
        .bind(clean(&new.image))
        .bind(new.network.as_str())
        .bind(new.environment_sealed.as_deref())
        .bind(new.ttl_seconds.map(|ttl| i64::try_from(ttl).unwrap_or(i64::MAX)))
        .bind(placement.map(Json))
        .bind(DbUuid($server.0))
        .bind(new.name.as_deref().map(clean))
        .fetch_optional(&mut *$connection)
        .await?
    }};
}
pub(crate) use {check_limit, insert_workspace, status_of, updated_or_why};

impl Store {
    /// Writes down that a workspace is about to be made. With a `limit`, and for an agent workspace, only while
    /// fewer than that many agent workspaces live: all but those that are being destroyed.
    pub async fn insert_creating(&self, new: NewWorkspace, limit: Option<u32>) -> Result<Workspace> {
        let limit = limit.filter(|_| new.container_type == ContainerType::AgentWorkspace);
        let lock = if limit.is_some() { Lock::WorkspaceLimit } else { Lock::None };
        let inserted = in_transaction!(self.db(), lock, |connection| {
            check_limit!(connection, limit);
            let placed: Option<(ProviderName, &str, &Placement)> = None;
            let row = insert_workspace!(connection, new, self.server(), placed);
            match row {
                Some(row) => Ok(WorkspaceRecord::from_row(&row)?.workspace),
                None => Err(StoreError::Conflict { kind: "workspace", name: new.id.to_string() }),
            }
        });
        inserted.map_err(|error| match (error, new.agent_session_id) {
            (StoreError::Database(sqlx::Error::Database(error)), Some(session))
                if error.is_foreign_key_violation() =>
            {
                let (kind, id) = ("session", session.to_string());
                StoreError::NotFound { kind, id }
            }
            (StoreError::Database(sqlx::Error::Database(error)), _) if error.is_unique_violation() => {
                StoreError::Conflict { kind: "MCP server", name: new.name.clone().unwrap_or_default() }
            }
            (error, _) => error,
        })
    }

    /// Makes sure that a session is there for workspaces to belong to.
    pub async fn ensure_session(&self, id: SessionId, now: DateTime<Utc>) -> Result<()> {
        writing!(self.db(), |connection| {
            sqlx::query(
                "INSERT INTO agent_sessions (id, created_at) VALUES ($1, $2) ON CONFLICT (id) DO NOTHING",
            )
            .bind(DbUuid(id.0))
            .bind(DbTime::new(now))
            .execute(&mut *connection)
            .await?;
        });
        Ok(())
    }

    /// A workspace.
    pub async fn workspace(&self, id: WorkspaceId) -> Result<Workspace> {
        Ok(self.workspace_record(id).await?.workspace)
    }

    /// A workspace, with what only the server needs to know.
    pub async fn workspace_record(&self, id: WorkspaceId) -> Result<WorkspaceRecord> {
        reading!(self.db(), |connection| {
            let row = sqlx::query(concat!("SELECT ", columns!(), " FROM agent_workspaces WHERE id = $1"))
                .bind(DbUuid(id.0))
                .fetch_optional(&mut *connection)
                .await?;
            WorkspaceRecord::from_row(&row.ok_or_else(|| StoreError::no_workspace(id))?)
        })
    }

    /// An MCP server by its name.
    pub async fn mcp_server_named(&self, name: &str) -> Result<WorkspaceRecord> {
        reading!(self.db(), |connection| {
            let row = sqlx::query(concat!("SELECT ", columns!(), " FROM agent_workspaces WHERE name = $1"))
                .bind(clean(name))
                .fetch_optional(&mut *connection)
                .await?;
            let missing = || StoreError::NotFound { kind: "MCP server", id: name.to_owned() };
            WorkspaceRecord::from_row(&row.ok_or_else(missing)?)
        })
    }

    /// All MCP servers, oldest first.
    pub async fn mcp_servers(&self) -> Result<Vec<WorkspaceRecord>> {
        reading!(self.db(), |connection| {
            let rows = sqlx::query(concat!(
                "SELECT ",
                columns!(),
                " FROM agent_workspaces WHERE container_type = 'mcp_server' AND lifecycle = 'persistent'
                 ORDER BY created_at, id"
            ))
            .fetch_all(&mut *connection)
            .await?;
            rows.iter().map(WorkspaceRecord::from_row).collect()
        })
    }

    /// A page of at most `limit` (up to 500) workspaces, newest first.
    pub async fn workspaces(
        &self,
        filter: WorkspaceFilter,
        cursor: Option<&str>,
        limit: u32,
    ) -> Result<WorkspaceList> {
        let after = cursor.map(page::parse_time_cursor).transpose()?;
        let mut workspaces: Vec<Workspace> = reading!(self.db(), |connection| {
            let rows = sqlx::query(concat!(
                "SELECT ",
                columns!(),
                " FROM agent_workspaces
                 WHERE ($1 IS NULL OR container_type = $1)
                   AND ($2 IS NULL OR provider = $2)
                   AND ($3 IS NULL OR status = $3)
                   AND ($4 IS NULL OR agent_session_id = $4)
                   AND ($5 IS NULL OR (created_at, id) < ($5, $6))
                 ORDER BY created_at DESC, id DESC LIMIT $7"
            ))
            .bind(filter.container_type.map(ContainerType::as_str))
            .bind(filter.provider.map(ProviderName::as_str))
            .bind(filter.status.map(WorkspaceStatus::as_str))
            .bind(filter.agent_session_id.map(|id| DbUuid(id.0)))
            .bind(after.map(|(time, _)| DbTime::new(time)))
            .bind(after.map(|(_, id)| DbUuid(id)))
            .bind(page::rows_wanted(limit))
            .fetch_all(&mut *connection)
            .await?;
            let read = rows.iter().map(|row| Ok(WorkspaceRecord::from_row(row)?.workspace));
            read.collect::<Result<_>>()?
        });
        let next_cursor =
            page::cut(&mut workspaces, limit, |last| page::time_cursor(last.created_at, last.id.0));
        Ok(WorkspaceList { workspaces, next_cursor })
    }

    /// All workspaces in any of these statuses, oldest first: what recovery has to look at.
    pub async fn workspaces_in(&self, statuses: &[WorkspaceStatus]) -> Result<Vec<WorkspaceRecord>> {
        let [a, b, c, d, e, f] = six(statuses);
        reading!(self.db(), |connection| {
            let rows = sqlx::query(concat!(
                "SELECT ",
                columns!(),
                " FROM agent_workspaces WHERE status IN ($1, $2, $3, $4, $5, $6) ORDER BY created_at, id"
            ))
            .bind(a)
            .bind(b)
            .bind(c)
            .bind(d)
            .bind(e)
            .bind(f)
            .fetch_all(&mut *connection)
            .await?;
            rows.iter().map(WorkspaceRecord::from_row).collect()
        })
    }

    /// Changes the status from one of `from` to `to`, or says which status it has. Becoming ready clears the
    /// last error. A status that is on its way makes this server the one that changes the row; any other ends that.
    pub async fn transition(
        &self,
        id: WorkspaceId,
        from: &[WorkspaceStatus],
        to: WorkspaceStatus,
    ) -> Result<Workspace> {
        let [a, b, c, d, e, f] = six(from);
        in_transaction!(self.db(), Lock::None, |connection| {
            let row = sqlx::query(concat!(
                "UPDATE agent_workspaces
                 SET status = $2, error = CASE WHEN $2 = 'ready' THEN NULL ELSE error END,
                     owner = CASE WHEN $2 IN ('stopping', 'destroying') THEN $9 END
                 WHERE id = $1 AND status IN ($3, $4, $5, $6, $7, $8) RETURNING ",
                columns!()
            ))
            .bind(DbUuid(id.0))
            .bind(to.as_str())
            .bind(a)
            .bind(b)
            .bind(c)
            .bind(d)
            .bind(e)
            .bind(f)
            .bind(DbUuid(self.server().0))
            .fetch_optional(&mut *connection)
            .await?;
            updated_or_why!(connection, id, row)
        })
    }

    /// Writes down where a workspace is, or is about to be. Refused while it is being destroyed.
    pub async fn set_placed(
        &self,
        id: WorkspaceId,
        provider: ProviderName,
        provider_workspace_id: &str,
        placement: &Placement,
    ) -> Result<Workspace> {
        let placement = clean_json(serde_json::to_value(placement).unwrap_or_default());
        in_transaction!(self.db(), Lock::None, |connection| {
            let row = sqlx::query(concat!(
                "UPDATE agent_workspaces SET provider = $2, provider_workspace_id = $3, placement = $4
                 WHERE id = $1 AND status <> 'destroying' RETURNING ",
                columns!()
            ))
            .bind(DbUuid(id.0))
            .bind(provider.as_str())
            .bind(clean(provider_workspace_id))
            .bind(Json(&placement))
            .fetch_optional(&mut *connection)
            .await?;
            updated_or_why!(connection, id, row)
        })
    }

    /// Writes down what failed, and sets the status to `error`; a workspace that is being destroyed stays so.
    pub async fn set_error(&self, id: WorkspaceId, message: &str) -> Result<Workspace> {
        in_transaction!(self.db(), Lock::None, |connection| {
            let row = sqlx::query(concat!(
                "UPDATE agent_workspaces
                 SET error = $2, status = CASE WHEN status = 'destroying' THEN status ELSE 'error' END, owner = NULL
                 WHERE id = $1 RETURNING ",
                columns!()
            ))
            .bind(DbUuid(id.0))
            .bind(clean(message))
            .fetch_optional(&mut *connection)
            .await?;
            updated_or_why!(connection, id, row)
        })
    }

    /// Lets `holder` hold the workspace, if nobody else does; otherwise says who does.
    pub async fn attach(
        &self,
        id: WorkspaceId,
        holder: &str,
        now: DateTime<Utc>,
    ) -> Result<std::result::Result<Workspace, String>> {
        in_transaction!(self.db(), Lock::None, |connection| {
            let row = sqlx::query(concat!(
                "UPDATE agent_workspaces
                 SET attached_to = $2, attached_at = CASE WHEN attached_to = $2 THEN attached_at ELSE $3 END
                 WHERE id = $1 AND status <> 'destroying' AND (attached_to IS NULL OR attached_to = $2)
                 RETURNING ",
                columns!()
            ))
            .bind(DbUuid(id.0))
            .bind(clean(holder))
            .bind(DbTime::new(now))
            .fetch_optional(&mut *connection)
            .await?;
            if let Some(row) = row {
                return Ok(Ok(WorkspaceRecord::from_row(&row)?.workspace));
            }
            holder_of!(connection, id)
        })
    }

    /// Ends the hold of `holder`, or of anybody; says who holds it if that is somebody else. A workspace that nobody
    /// holds is let go all the same.
    pub async fn detach(
        &self,
        id: WorkspaceId,
        holder: Option<&str>,
    ) -> Result<std::result::Result<Workspace, String>> {
        in_transaction!(self.db(), Lock::None, |connection| {
            let row = sqlx::query(concat!(
                "UPDATE agent_workspaces SET attached_to = NULL, attached_at = NULL
                 WHERE id = $1 AND (attached_to IS NULL OR $2 IS NULL OR attached_to = $2) RETURNING ",
                columns!()
            ))
            .bind(DbUuid(id.0))
            .bind(holder.map(clean))
            .fetch_optional(&mut *connection)
            .await?;
            if let Some(row) = row {
                return Ok(Ok(WorkspaceRecord::from_row(&row)?.workspace));
            }
            holder_of!(connection, id)
        })
    }

    /// Removes the row, and the workspace's tokens with it; `false` if it was gone already.
    pub async fn delete_workspace(&self, id: WorkspaceId) -> Result<bool> {
        let deleted = writing!(self.db(), |connection| {
            sqlx::query("DELETE FROM agent_workspaces WHERE id = $1")
                .bind(DbUuid(id.0))
                .execute(&mut *connection)
                .await?
                .rows_affected()
        });
        // Its tokens went with it.
        self.known_tokens().forget();
        Ok(deleted == 1)
    }

    /// Sets these fields of the metadata and leaves the others; null removes a field.
    pub async fn merge_metadata(&self, id: WorkspaceId, fields: Map<String, Value>) -> Result<Workspace> {
        let Value::Object(fields) = clean_json(Value::Object(fields)) else {
            return self.workspace(id).await;
        };
        in_transaction!(self.db(), Lock::None, |connection| {
            // An update that changes nothing locks the row, in words that both engines know.
            let row =
                sqlx::query("UPDATE agent_workspaces SET status = status WHERE id = $1 RETURNING metadata")
                    .bind(DbUuid(id.0))
                    .fetch_optional(&mut *connection)
                    .await?;
            let row = row.ok_or_else(|| StoreError::no_workspace(id))?;
            let mut metadata: Map<String, Value> =
                Reader::with_key(&row, TABLE, id).json_or_null("metadata")?.unwrap_or_default();
            for (name, value) in &fields {
                if value.is_null() {
                    metadata.remove(name);
                } else {
                    metadata.insert(name.clone(), value.clone());
                }
            }
            let row = sqlx::query(concat!(
                "UPDATE agent_workspaces SET metadata = $2 WHERE id = $1 RETURNING ",
                columns!()
            ))
            .bind(DbUuid(id.0))
            .bind(Json(&metadata))
            .fetch_one(&mut *connection)
            .await?;
            Ok(WorkspaceRecord::from_row(&row)?.workspace)
        })
    }

    /// The variables that every command in the workspace sees.
    pub async fn environment(&self, id: WorkspaceId, key: &SealingKey) -> Result<BTreeMap<String, String>> {
        let sealed = reading!(self.db(), |connection| {
            let row = sqlx::query("SELECT environment_sealed FROM agent_workspaces WHERE id = $1")
                .bind(DbUuid(id.0))
                .fetch_optional(&mut *connection)
                .await?;
            let row = row.ok_or_else(|| StoreError::no_workspace(id))?;
            Reader::with_key(&row, TABLE, id).bytes_or_null("environment_sealed")?
        });
        Ok(key.open_environment(id, sealed.as_deref())?)
    }

    /// How many workspaces and MCP servers each provider has; those being destroyed don't count.
    pub async fn active_counts(&self) -> Result<BTreeMap<ProviderName, u64>> {
        reading!(self.db(), |connection| {
            let rows = sqlx::query(
                "SELECT provider, COUNT(*) AS active FROM agent_workspaces
                 WHERE status <> 'destroying' AND provider <> '' GROUP BY provider",
            )
            .fetch_all(&mut *connection)
            .await?;
            rows.iter()
                .map(|row| {
                    let row = Reader::with_key(row, TABLE, "(counts)");
                    Ok((row.name("provider")?, row.unsigned("active")?))
                })
                .collect()
        })
    }
}

/// The statuses for a fixed list of six parameters: there are no more, and '' is none of them.
fn six(statuses: &[WorkspaceStatus]) -> [&'static str; 6] {
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
