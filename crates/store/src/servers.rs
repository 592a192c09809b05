//! The servers that work on one database, and which of them changes what.
//!
//! A row names the server that is changing it. What a server that ended had begun is finished or undone by another,
//! so it must be told from a server that still works: each counts up its own number, and who sees a number stand
//! still knows. No clocks are compared.

use emergent_wire::WorkspaceId;
use emergent_wire::id::ServerId;

use crate::db::Db;
use crate::error::Result;
use crate::open::Store;
use crate::query::query;
use crate::row::Reader;

impl Store {
    /// This server, new each time it starts.
    pub fn server(&self) -> ServerId {
        self.server_id()
    }

    /// Whether other servers may work on this database. A SQLite file belongs to one.
    pub fn is_shared(&self) -> bool {
        matches!(self.db(), Db::Postgres(_))
    }

    /// Shows the others that this server works.
    pub async fn beat(&self) -> Result<()> {
        query(
            "INSERT INTO servers (id, beat) VALUES ($1, 1)
             ON CONFLICT (id) DO UPDATE SET beat = servers.beat + 1",
        )
        .bind(self.server().0)
        .execute(&mut self.db().writer().await?)
        .await?;
        Ok(())
    }

    /// All servers that did not say they end, and how far each has counted.
    pub async fn servers(&self) -> Result<Vec<(ServerId, u64)>> {
        let rows = query("SELECT id, beat FROM servers ORDER BY id")
            .fetch_all(&mut self.db().reader().await?)
            .await?;
        rows.iter()
            .map(|row| {
                let row = Reader::by_id(row, "servers");
                Ok((ServerId(row.uuid("id")?), row.unsigned("beat")?))
            })
            .collect()
    }

    /// Forgets a server: itself when it ends, or one that is dead.
    pub async fn forget_server(&self, id: ServerId) -> Result<()> {
        query("DELETE FROM servers WHERE id = $1").bind(id.0).execute(&mut self.db().writer().await?).await?;
        Ok(())
    }

    /// Makes this server the one that changes a workspace, if `from` (or nobody) is; false if another is by now.
    pub async fn take_over(&self, id: WorkspaceId, from: Option<ServerId>) -> Result<bool> {
        let taken =
            query("UPDATE agent_workspaces SET owner = $2 WHERE id = $1 AND owner IS NOT DISTINCT FROM $3")
                .bind(id.0)
                .bind(self.server().0)
                .bind(from.map(|from| from.0))
                .execute(&mut self.db().writer().await?)
                .await?;
        Ok(taken == 1)
    }

    /// This server no longer changes a workspace.
    pub async fn release(&self, id: WorkspaceId) -> Result<()> {
        query("UPDATE agent_workspaces SET owner = NULL WHERE id = $1 AND owner = $2")
            .bind(id.0)
            .bind(self.server().0)
            .execute(&mut self.db().writer().await?)
            .await?;
        Ok(())
    }
}
