//! Snapshots: copies of workspaces' files, and workspaces made of them.

use std::collections::BTreeMap;

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};

use crate::error::{ErrorCode, ErrorDetail};
use crate::id::{SnapshotId, WorkspaceId};
use crate::names::names;
use crate::object;
use crate::unreadable::UnreadableRow;
use crate::validate::Validate;
use crate::workspace::{CreateWorkspace, NetworkMode, ProviderName, RequestedLimits, ResourceLimits};

names!(
    /// Where a snapshot stands.
    SnapshotStatus {
        /// It is being made.
        Creating = "creating",
        /// Workspaces can be made of it.
        Ready = "ready",
        /// It is being removed.
        Destroying = "destroying",
        /// Files that were found without a record. They can be restored, and are removed when nobody does so in time.
        Quarantined = "quarantined",
    }
);

/// The longest description.
pub const MAX_DESCRIPTION_BYTES: usize = 500;

/// Asks for a snapshot.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct CreateSnapshot {
    /// What to remember it by.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub description: Option<String>,
    /// Copy its memory too, where the provider can (`memory_snapshots`): what runs in it goes on in workspaces that are made
    /// of the copy, with the variables that it has. Calls in progress are cut off; commands in the background are not.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub memory: bool,
}

impl Validate for CreateSnapshot {
    fn validate(&self) -> Result<(), ErrorDetail> {
        if self.description.as_ref().is_some_and(|text| text.len() > MAX_DESCRIPTION_BYTES) {
            let message = format!("description is over {MAX_DESCRIPTION_BYTES} bytes");
            return Err(ErrorDetail::new(ErrorCode::BadRequest, message));
        }
        Ok(())
    }
}

/// A copy of a workspace's files. It outlives the workspace.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Snapshot {
    /// Its id.
    pub id: SnapshotId,
    /// What it is a copy of; may be gone.
    pub workspace_id: WorkspaceId,
    /// What it was made on, and can be used on.
    pub provider: ProviderName,
    /// What to remember it by.
    pub description: Option<String>,
    /// The workspace's image.
    pub image: String,
    /// What the workspace could reach.
    pub network: NetworkMode,
    /// The workspace's limits.
    pub resource_limits: ResourceLimits,
    /// Whether it holds the workspace's memory too.
    #[serde(default)]
    pub memory: bool,
    /// What it takes on the host's disk; null until it is ready.
    pub size_bytes: Option<u64>,
    /// Where it stands.
    pub status: SnapshotStatus,
    /// When it was asked for.
    pub created_at: DateTime<Utc>,
}

/// A page of snapshots.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct SnapshotList {
    /// The snapshots, newest first.
    pub snapshots: Vec<Snapshot>,
    /// Rows of this page that can't be read.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unreadable: Vec<UnreadableRow>,
    /// Pass this as `cursor` for the next page; null on the last.
    pub next_cursor: Option<String>,
}

/// Asks for a workspace with the files of a snapshot. What is left out is as in the workspace that it is a copy of,
/// but for variables, which are never copied.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct FromSnapshot {
    /// The snapshot.
    pub snapshot_id: SnapshotId,
    /// What it may use at most; the disk can't be smaller than the snapshot's, and all of it is as in the snapshot where that
    /// holds memory.
    #[serde(default, deserialize_with = "object::one_or_null", skip_serializing_if = "Option::is_none")]
    pub resource_limits: Option<RequestedLimits>,
    /// Variables that every command in the workspace sees. Sealed at rest, never shown again.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub environment: BTreeMap<String, String>,
    /// What it can reach.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<NetworkMode>,
    /// It expires this long after its last use; 30 days unless given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttl_seconds: Option<u64>,
}

impl Validate for FromSnapshot {
    fn validate(&self) -> Result<(), ErrorDetail> {
        CreateWorkspace {
            resource_limits: self.resource_limits,
            environment: self.environment.clone(),
            ttl_seconds: self.ttl_seconds,
            ..CreateWorkspace::default()
        }
        .validate()
    }
}
