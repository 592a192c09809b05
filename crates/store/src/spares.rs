//! Warm spares: sandboxes that wait for a workspace.
//!
//! ```text
//! filling ──▶ ready ──claim──▶ (a workspace with its id)
//!    │          │
//!    └──────────┴──▶ leaving ──▶ (row gone)
//! ```
//!
//! A claim removes the spare's row and writes the workspace's in one transaction: two requests never get one spare,
//! and after a crash each sandbox has exactly one row that says what it is.

use chrono::{DateTime, Utc};
use emergent_wire::WorkspaceId;
use emergent_wire::id::ServerId;
use emergent_wire::pool::SpareStatus;
use emergent_wire::workspace::{NetworkMode, Placement, ProviderName, ResourceLimits, Workspace};
use sqlx::types::Json;

use crate::db::Lock;
use crate::error::Result;
use crate::open::Store;
use crate::query::{Table, query};
use crate::row::{Reader, Row};
use crate::rows::Rows;
use crate::types::clean;
use crate::workspace_insert::{Placed, check_limit, insert_workspace};
use crate::workspace_rows::NewWorkspace;

const SPARES: Table = Table {
    name: "warm_spares",
    columns: "id, provider, image, image_digest, network, resource_limits, status, owner, created_at",
};

/// The properties of a spare. A request gets a spare only if all of them are equal.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Shape {
    /// Its provider.
    pub provider: ProviderName,
    /// The image.
    pub image: String,
    /// Its network mode.
    pub network: NetworkMode,
    /// Its resource limits.
    pub limits: ResourceLimits,
}

/// A spare.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Spare {
    /// The id of the workspace that it becomes.
    pub id: WorkspaceId,
    /// Its properties.
    pub shape: Shape,
    /// The digest of the image when the spare was made.
    pub image_digest: String,
    /// Its status.
    pub status: SpareStatus,
    /// The server that is making or removing it.
    pub owner: Option<ServerId>,
    /// The time its creation began.
    pub created_at: DateTime<Utc>,
}

impl Spare {
    fn from_row(row: &Row) -> Result<Self> {
        let row = Reader::by_id(row, SPARES.name);
        Ok(Self {
            id: WorkspaceId(row.uuid("id")?),
            shape: Shape {
                provider: row.name("provider")?,
                image: row.text("image")?,
                network: row.name("network")?,
                limits: row.json("resource_limits")?,
            },
            image_digest: row.text("image_digest")?,
            status: row.name("status")?,
            owner: row.uuid_or_null("owner")?.map(ServerId),
            created_at: row.time("created_at")?,
        })
    }
}

/// The values that a claim writes besides the workspace's own.
#[derive(Clone, Debug)]
pub struct Claim {
    /// The spare.
    pub spare: WorkspaceId,
    /// The provider's name for the sandbox.
    pub provider_workspace_id: String,
    /// Why its provider was chosen.
    pub placement: Placement,
}

impl Store {
    /// Inserts a spare that is about to be made. False if `most` spares of this shape and digest exist or are being made;
    /// the limit holds over all servers. A spare with damaged limits may be of this shape, so it counts.
    pub async fn insert_spare(
        &self,
        id: WorkspaceId,
        shape: &Shape,
        digest: &str,
        most: u32,
    ) -> Result<bool> {
        self.db()
            .transaction(Lock::Pool, async |connection| {
                // The engines compare JSON differently, so limits are compared here.
                let rows = query(
                    "SELECT id, resource_limits FROM warm_spares
                     WHERE provider = $1 AND image = $2 AND network = $3 AND image_digest = $4
                       AND status IN ('filling', 'ready')",
                )
                .bind(shape.provider.as_str())
                .bind(clean(&shape.image))
                .bind(shape.network.as_str())
                .bind(clean(digest))
                .fetch_all(connection)
                .await?;
                let is_same = |row: &&Row| {
                    let limits = Reader::by_id(row, SPARES.name).json::<ResourceLimits>("resource_limits");
                    limits.map_or(true, |limits| limits == shape.limits)
                };
                if rows.iter().filter(is_same).count() >= most as usize {
                    return Ok(false);
                }
                query(
                "INSERT INTO warm_spares (id, provider, image, image_digest, network, resource_limits, status,
                     owner, created_at)
                 VALUES ($1, $2, $3, $4, $5, $6, 'filling', $7, $8)",
            )
            .bind(id.0)
            .bind(shape.provider.as_str())
            .bind(clean(&shape.image))
            .bind(clean(digest))
            .bind(shape.network.as_str())
            .bind(Json(&shape.limits))
            .bind(self.server().0)
            .bind(Utc::now())
            .execute(connection)
            .await?;
                Ok(true)
            })
            .await
    }

    /// Marks a spare as ready to be claimed. False if it is being removed.
    pub async fn spare_is_ready(&self, id: WorkspaceId) -> Result<bool> {
        let changed = query(
            "UPDATE warm_spares SET status = 'ready', owner = NULL WHERE id = $1 AND status = 'filling'",
        )
        .bind(id.0)
        .execute(&mut self.db().writer().await?)
        .await?;
        Ok(changed == 1)
    }

    /// Begins to remove a spare, so that it can't be claimed. False if it is gone, was claimed, or another server removes
    /// it.
    pub async fn withdraw_spare(&self, id: WorkspaceId, owner: Option<ServerId>) -> Result<bool> {
        let changed = query(
            "UPDATE warm_spares SET status = 'leaving', owner = $2
             WHERE id = $1 AND owner IS NOT DISTINCT FROM $3",
        )
        .bind(id.0)
        .bind(self.server().0)
        .bind(owner.map(|owner| owner.0))
        .execute(&mut self.db().writer().await?)
        .await?;
        Ok(changed == 1)
    }

    /// Deletes the row of a spare whose sandbox was removed.
    pub async fn delete_spare(&self, id: WorkspaceId) -> Result<()> {
        query("DELETE FROM warm_spares WHERE id = $1 AND status <> 'ready'")
            .bind(id.0)
            .execute(&mut self.db().writer().await?)
            .await?;
        Ok(())
    }

    /// All spares, oldest first.
    pub async fn spares(&self) -> Result<Rows<Spare>> {
        let rows = SPARES.select("ORDER BY created_at, id").fetch_all(&mut self.db().reader().await?).await?;
        Rows::read(&SPARES, &rows, Spare::from_row)
    }

    /// Makes a spare the sandbox of a new workspace, which gets the spare's id. None if the spare was claimed before.
    pub async fn claim_spare(
        &self,
        new: NewWorkspace,
        claim: &Claim,
        limit: Option<u32>,
    ) -> Result<Option<Workspace>> {
        let new = NewWorkspace { id: claim.spare, ..new };
        let provider_workspace_id = claim.provider_workspace_id.as_str();
        self.db()
            .transaction(Lock::WorkspaceLimit, async |connection| {
                let removed = query("DELETE FROM warm_spares WHERE id = $1 AND status = 'ready'")
                    .bind(claim.spare.0)
                    .execute(connection)
                    .await?;
                if removed == 0 {
                    return Ok(None);
                }
                check_limit(connection, limit).await?;
                let placed = Placed { provider_workspace_id, placement: &claim.placement };
                insert_workspace(connection, &new, self.server(), Some(placed)).await.map(Some)
            })
            .await
    }
}
