//! Reads workspaces: one, a page, or all for recovery.

use std::collections::BTreeMap;

use emergent_wire::WorkspaceId;
use emergent_wire::workspace::{ContainerType, ProviderName, Workspace, WorkspaceList, WorkspaceStatus};

use crate::error::{Result, RowKind, StoreError};
use crate::open::Store;
use crate::page;
use crate::query::query;
use crate::row::Reader;
use crate::rows::{Rows, to_wire};
use crate::types::clean;
use crate::workspace_rows::{WORKSPACES, WorkspaceFilter, WorkspaceRecord};

impl Store {
    /// A workspace.
    pub async fn workspace(&self, id: WorkspaceId) -> Result<Workspace> {
        Ok(self.workspace_record(id).await?.workspace)
    }

    /// A workspace with the columns that only the server uses.
    pub async fn workspace_record(&self, id: WorkspaceId) -> Result<WorkspaceRecord> {
        let row = WORKSPACES
            .select("WHERE id = $1")
            .bind(id.0)
            .fetch_optional(&mut self.db().reader().await?)
            .await?;
        WorkspaceRecord::from_row(&row.ok_or_else(|| StoreError::no_workspace(id))?)
    }

    /// An MCP server by its name.
    pub async fn mcp_server_named(&self, name: &str) -> Result<WorkspaceRecord> {
        let row = WORKSPACES
            .select("WHERE name = $1")
            .bind(clean(name))
            .fetch_optional(&mut self.db().reader().await?)
            .await?;
        let missing = || StoreError::NotFound { kind: RowKind::McpServer, id: name.to_owned() };
        WorkspaceRecord::from_row(&row.ok_or_else(missing)?)
    }

    /// All MCP servers, oldest first.
    pub async fn mcp_servers(&self) -> Result<Rows<WorkspaceRecord>> {
        // A row of an unknown kind may be an MCP server, so it is in the list as a damaged row.
        let rows = WORKSPACES
            .select("WHERE container_type <> 'agent_workspace' ORDER BY created_at, id")
            .fetch_all(&mut self.db().reader().await?)
            .await?;
        Rows::read(&WORKSPACES, &rows, WorkspaceRecord::from_row)
    }

    /// A page of at most `limit` (up to 500) workspaces, newest first.
    pub async fn workspaces(
        &self,
        filter: WorkspaceFilter,
        cursor: Option<&str>,
        limit: u32,
    ) -> Result<WorkspaceList> {
        let [time, id] = page::after(cursor, self.db())?;
        let rows = WORKSPACES
            .select(
                "WHERE ($1 IS NULL OR container_type = $1)
                   AND ($2 IS NULL OR provider = $2)
                   AND ($3 IS NULL OR status = $3)
                   AND ($4 IS NULL OR agent_session_id = $4)
                   AND ($5 IS NULL OR (created_at, id) < ($5, $6))
                 ORDER BY created_at DESC, id DESC LIMIT $7",
            )
            .bind(filter.container_type.map(ContainerType::as_str))
            .bind(filter.provider.map(ProviderName::as_str))
            .bind(filter.status.map(WorkspaceStatus::as_str))
            .bind(filter.agent_session_id.map(|id| id.0))
            .bind(time)
            .bind(id)
            .bind(page::rows_wanted(limit))
            .fetch_all(&mut self.db().reader().await?)
            .await?;
        let (rows, next_cursor) = page::read(&WORKSPACES, rows, limit, WorkspaceRecord::from_row)?;
        let workspaces = rows.readable.into_iter().map(|record| record.workspace).collect();
        Ok(WorkspaceList { workspaces, unreadable: to_wire(rows.unreadable), next_cursor })
    }

    /// All workspaces in any of these statuses, oldest first. Damaged rows are among them whatever their status is.
    pub async fn workspaces_in(&self, statuses: &[WorkspaceStatus]) -> Result<Rows<WorkspaceRecord>> {
        // The statement does not filter, since a filter would hide rows with an unknown status.
        let rows =
            WORKSPACES.select("ORDER BY created_at, id").fetch_all(&mut self.db().reader().await?).await?;
        let mut rows = Rows::read(&WORKSPACES, &rows, WorkspaceRecord::from_row)?;
        rows.readable.retain(|record| statuses.contains(&record.workspace.status));
        Ok(rows)
    }

    /// The number of workspaces and MCP servers of each provider; those being destroyed don't count. Rows with a damaged provider
    /// belong to none: they are in the lists as damaged, and in the log.
    pub async fn active_counts(&self) -> Result<BTreeMap<ProviderName, u64>> {
        let rows = query(
            "SELECT provider, COUNT(*) AS active FROM agent_workspaces
             WHERE status <> 'destroying' AND provider <> '' GROUP BY provider",
        )
        .fetch_all(&mut self.db().reader().await?)
        .await?;
        let mut counts = BTreeMap::new();
        for row in &rows {
            // The reason of the error quotes the provider, so the rows can be found by it.
            let row = Reader::with_key(row, WORKSPACES.name, "(all rows of one provider)");
            match row.name("provider") {
                Ok(provider) => {
                    counts.insert(provider, row.unsigned("active")?);
                }
                Err(error) => tracing::warn!(%error, "workspaces are not counted: their provider is damaged"),
            }
        }
        Ok(counts)
    }
}
