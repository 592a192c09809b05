//! The servers that share one database, and the owners of rows.
//!
//! A row names its owner: the server that is changing it. When a server dies, another one finishes or undoes its
//! changes. Each server counts up its own number (its beat). A server whose beat stands still is dead. No clocks are
//! compared.

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

    /// Counts up this server's beat.
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

    /// The beats of all servers that were not deleted.
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

    /// Deletes a server: this one when it ends, or a dead one.
    pub async fn forget_server(&self, id: ServerId) -> Result<()> {
        query("DELETE FROM servers WHERE id = $1").bind(id.0).execute(&mut self.db().writer().await?).await?;
        Ok(())
    }

    /// Makes this server the owner of a workspace if `from` still is. False if the owner is another one.
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

    /// Ends this server's ownership of a workspace.
    pub async fn release(&self, id: WorkspaceId) -> Result<()> {
        query("UPDATE agent_workspaces SET owner = NULL WHERE id = $1 AND owner = $2")
            .bind(id.0)
            .bind(self.server().0)
            .execute(&mut self.db().writer().await?)
            .await?;
        Ok(())
    }
}
