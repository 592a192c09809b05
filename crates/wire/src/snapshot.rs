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
    /// The status of a snapshot.
    SnapshotStatus {
        /// It is being made.
        Creating = "creating",
        /// Workspaces can be created from it.
        Ready = "ready",
        /// It is being removed.
        Destroying = "destroying",
        /// Files that had no row in the database. They are removed after a time unless somebody restores them.
        Quarantined = "quarantined",
    }
);

/// The longest description.
pub const MAX_DESCRIPTION_BYTES: usize = 500;

/// The request for a snapshot.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct CreateSnapshot {
    /// A description.
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
    /// The copied workspace, which may have been destroyed since.
    pub workspace_id: WorkspaceId,
    /// The provider that made it. Only this provider can use it.
    pub provider: ProviderName,
    /// A description.
    pub description: Option<String>,
    /// The workspace's image.
    pub image: String,
    /// The workspace's network mode.
    pub network: NetworkMode,
    /// The workspace's limits.
    pub resource_limits: ResourceLimits,
    /// Whether it holds the workspace's memory too.
    #[serde(default)]
    pub memory: bool,
    /// Its size on the host's disk; null until it is ready.
    pub size_bytes: Option<u64>,
    /// Its status.
    pub status: SnapshotStatus,
    /// The time of its request.
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

/// The request for a workspace with the files of a snapshot. A field that is left out has the value of the copied
/// workspace. Variables are never copied.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct FromSnapshot {
    /// The snapshot.
    pub snapshot_id: SnapshotId,
    /// Its resource limits; the disk can't be smaller than the snapshot's, and all of it is as in the snapshot where that
    /// holds memory.
    #[serde(default, deserialize_with = "object::one_or_null", skip_serializing_if = "Option::is_none")]
    pub resource_limits: Option<RequestedLimits>,
    /// Variables that every command in the workspace sees. Sealed at rest, never shown again.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub environment: BTreeMap<String, String>,
    /// Its network mode.
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
