//! Snapshots: copies of workspaces' files, which outlive them.
//!
//! ```text
//! creating ──▶ ready ──▶ destroying ──▶ (row gone)
//!     └──────────▲────────────▲
//!                │            │
//! (orphan) ──▶ quarantined ───┘
//! ```
//!
//! A quarantined snapshot holds files that recovery found without a row: of a workspace, or of a snapshot.

use chrono::{DateTime, Utc};
use emergent_wire::WorkspaceId;
use emergent_wire::id::{ServerId, SnapshotId};
use emergent_wire::snapshot::{Snapshot, SnapshotList, SnapshotStatus};
use emergent_wire::workspace::{NetworkMode, ProviderName, ResourceLimits};
use sqlx::types::Json;

use crate::error::{Result, RowKind, StoreError};
use crate::open::Store;
use crate::page;
use crate::query::{Table, query};
use crate::row::{Reader, Row};
use crate::rows::{Rows, to_wire};
use crate::types::clean;

const SNAPSHOTS: Table = Table {
    name: "workspace_snapshots",
    columns: "id, workspace_id, provider, description, image, network, resource_limits, memory, size_bytes, status, \
              owner, created_at",
};

/// A snapshot that is about to be made.
#[derive(Clone, Debug)]
pub struct NewSnapshot {
    /// Its id.
    pub id: SnapshotId,
    /// The copied workspace.
    pub workspace_id: WorkspaceId,
    /// The workspace's provider.
    pub provider: ProviderName,
    /// The caller's description.
    pub description: Option<String>,
    /// The workspace's image.
    pub image: String,
    /// The workspace's network mode.
    pub network: NetworkMode,
    /// The workspace's limits.
    pub limits: ResourceLimits,
    /// Whether it holds the workspace's memory too.
    pub memory: bool,
    /// The time of its request.
    pub created_at: DateTime<Utc>,
}

/// A snapshot with the columns that only the server uses.
#[derive(Clone, Debug, PartialEq)]
pub struct SnapshotRecord {
    /// The part that callers see.
    pub snapshot: Snapshot,
    /// The server that is making or removing it.
    pub owner: Option<ServerId>,
}

impl SnapshotRecord {
    fn from_row(row: &Row) -> Result<Self> {
        let row = Reader::by_id(row, SNAPSHOTS.name);
        let snapshot = Snapshot {
            id: SnapshotId(row.uuid("id")?),
            workspace_id: WorkspaceId(row.uuid("workspace_id")?),
            provider: row.name("provider")?,
            description: row.text_or_null("description")?,
            image: row.text("image")?,
            network: row.name("network")?,
            resource_limits: row.json("resource_limits")?,
            memory: row.boolean("memory")?,
            size_bytes: row.unsigned_or_null("size_bytes")?,
            status: row.name("status")?,
            created_at: row.time("created_at")?,
        };
        Ok(Self { snapshot, owner: row.uuid_or_null("owner")?.map(ServerId) })
    }
}

fn missing(id: SnapshotId) -> StoreError {
    StoreError::NotFound { kind: RowKind::Snapshot, id: id.to_string() }
}

impl Store {
    /// Inserts a snapshot that is about to be made.
    pub async fn insert_snapshot(&self, new: &NewSnapshot) -> Result<Snapshot> {
        let inserted = self.insert(new, SnapshotStatus::Creating, Some(self.server())).await?;
        inserted.ok_or_else(|| StoreError::Conflict { kind: "snapshot", name: new.id.to_string() })
    }

    /// Inserts a snapshot for files that go to quarantine. False if it was inserted before.
    pub async fn insert_quarantined(&self, new: &NewSnapshot) -> Result<bool> {
        Ok(self.insert(new, SnapshotStatus::Quarantined, None).await?.is_some())
    }

    /// Inserts a row, unless there is one with this id.
    async fn insert(
        &self,
        new: &NewSnapshot,
        status: SnapshotStatus,
        owner: Option<ServerId>,
    ) -> Result<Option<Snapshot>> {
        let row = SNAPSHOTS
            .returning(
                "INSERT INTO workspace_snapshots (id, workspace_id, provider, description, image, network,
                     resource_limits, memory, status, owner, created_at)
                 VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11) ON CONFLICT (id) DO NOTHING",
            )
            .bind(new.id.0)
            .bind(new.workspace_id.0)
            .bind(new.provider.as_str())
            .bind(new.description.as_deref().map(clean))
            .bind(clean(&new.image))
            .bind(new.network.as_str())
            .bind(Json(&new.limits))
            .bind(new.memory)
            .bind(status.as_str())
            .bind(owner.map(|owner| owner.0))
            .bind(new.created_at)
            .fetch_optional(&mut self.db().writer().await?)
            .await?;
        row.map(|row| SnapshotRecord::from_row(&row).map(|record| record.snapshot)).transpose()
    }

    /// Marks a snapshot as ready.
    pub async fn snapshot_is_ready(&self, id: SnapshotId, size_bytes: u64) -> Result<Snapshot> {
        let row = SNAPSHOTS
            .returning(
                "UPDATE workspace_snapshots SET status = 'ready', owner = NULL, size_bytes = $2
                 WHERE id = $1 AND status = 'creating'",
            )
            .bind(id.0)
            .bind(size_bytes)
            .fetch_optional(&mut self.db().writer().await?)
            .await?;
        Ok(SnapshotRecord::from_row(&row.ok_or_else(|| missing(id))?)?.snapshot)
    }

    /// Records the size of files in quarantine, and the limits of a workspace that is made from them.
    pub async fn note_quarantined(
        &self,
        id: SnapshotId,
        size_bytes: u64,
        limits: &ResourceLimits,
        memory: bool,
    ) -> Result<()> {
        query(
            "UPDATE workspace_snapshots SET size_bytes = $2, resource_limits = $3, memory = $4
             WHERE id = $1 AND status = 'quarantined'",
        )
        .bind(id.0)
        .bind(size_bytes)
        .bind(Json(limits))
        .bind(memory)
        .execute(&mut self.db().writer().await?)
        .await?;
        Ok(())
    }

    /// Turns a snapshot in quarantine into an ordinary one.
    pub async fn restore_quarantined(&self, id: SnapshotId) -> Result<Snapshot> {
        let row = SNAPSHOTS
            .returning(
                "UPDATE workspace_snapshots SET status = 'ready'
                 WHERE id = $1 AND status = 'quarantined' AND size_bytes IS NOT NULL",
            )
            .bind(id.0)
            .fetch_optional(&mut self.db().writer().await?)
            .await?;
        Ok(SnapshotRecord::from_row(&row.ok_or_else(|| missing(id))?)?.snapshot)
    }

    /// Begins to remove a snapshot. False if `owner` no longer owns it.
    pub async fn withdraw_snapshot(&self, id: SnapshotId, owner: Option<ServerId>) -> Result<bool> {
        let changed = query(
            "UPDATE workspace_snapshots SET status = 'destroying', owner = $2
             WHERE id = $1 AND owner IS NOT DISTINCT FROM $3",
        )
        .bind(id.0)
        .bind(self.server().0)
        .bind(owner.map(|owner| owner.0))
        .execute(&mut self.db().writer().await?)
        .await?;
        Ok(changed == 1)
    }

    /// Deletes the row of a snapshot whose files were removed.
    pub async fn delete_snapshot(&self, id: SnapshotId) -> Result<()> {
        query("DELETE FROM workspace_snapshots WHERE id = $1 AND status <> 'ready'")
            .bind(id.0)
            .execute(&mut self.db().writer().await?)
            .await?;
        Ok(())
    }

    /// A snapshot.
    pub async fn snapshot(&self, id: SnapshotId) -> Result<SnapshotRecord> {
        let row = SNAPSHOTS
            .select("WHERE id = $1")
            .bind(id.0)
            .fetch_optional(&mut self.db().reader().await?)
            .await?;
        SnapshotRecord::from_row(&row.ok_or_else(|| missing(id))?)
    }

    /// A page of at most `limit` (up to 500) snapshots, newest first; of one workspace, if given. Without those in quarantine.
    pub async fn snapshots(
        &self,
        workspace_id: Option<WorkspaceId>,
        cursor: Option<&str>,
        limit: u32,
    ) -> Result<SnapshotList> {
        self.snapshot_page(workspace_id, false, cursor, limit).await
    }

    /// A page of at most `limit` (up to 500) snapshots in quarantine, newest first.
    pub async fn quarantined_snapshots(&self, cursor: Option<&str>, limit: u32) -> Result<SnapshotList> {
        self.snapshot_page(None, true, cursor, limit).await
    }

    async fn snapshot_page(
        &self,
        workspace_id: Option<WorkspaceId>,
        quarantined: bool,
        cursor: Option<&str>,
        limit: u32,
    ) -> Result<SnapshotList> {
        let [time, id] = page::after(cursor, self.db())?;
        let rows = SNAPSHOTS
            .select(
                "WHERE ($1 IS NULL OR workspace_id = $1) AND ($2 IS NULL OR (created_at, id) < ($2, $3))
                   AND (status = 'quarantined') = $5
                 ORDER BY created_at DESC, id DESC LIMIT $4",
            )
            .bind(workspace_id.map(|id| id.0))
            .bind(time)
            .bind(id)
            .bind(page::rows_wanted(limit))
            .bind(quarantined)
            .fetch_all(&mut self.db().reader().await?)
            .await?;
        let (rows, next_cursor) = page::read(&SNAPSHOTS, rows, limit, SnapshotRecord::from_row)?;
        let snapshots = rows.readable.into_iter().map(|record| record.snapshot).collect();
        Ok(SnapshotList { snapshots, unreadable: to_wire(rows.unreadable), next_cursor })
    }

    /// All snapshots, those in quarantine included.
    pub async fn all_snapshots(&self) -> Result<Rows<SnapshotRecord>> {
        let rows = SNAPSHOTS.select("").fetch_all(&mut self.db().reader().await?).await?;
        Rows::read(&SNAPSHOTS, &rows, SnapshotRecord::from_row)
    }
}

const _: () = assert!(SnapshotStatus::ALL.len() == 4);
