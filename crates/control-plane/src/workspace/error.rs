//! Errors of workspaces. They name the object and the cause. The fronts add the code and the advice for callers
//! (`http/error_text.rs`).

use std::time::Duration;

use emergent_guest_client::CallError;
use emergent_providers::ProviderError;
use emergent_store::StoreError;
use emergent_wire::snapshot::SnapshotStatus;
use emergent_wire::workspace::{ProviderName, RejectedCandidate, WorkspaceStatus};
use emergent_wire::{ByteSize, ErrorDetail, SnapshotId, WorkspaceId};

use super::placement::NoProvider;

pub(crate) type Result<T, E = WorkspaceError> = std::result::Result<T, E>;

/// The error of an operation on a workspace or a snapshot.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WorkspaceError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Provider(#[from] ProviderError),
    /// A call to the guest agent failed.
    #[error(transparent)]
    Call(#[from] CallError),
    /// A value of the request is out of range, as the request's own type has found (`emergent_wire::Validate`).
    #[error(transparent)]
    Invalid(#[from] ErrorDetail),
    #[error(transparent)]
    NoProvider(#[from] NoProvider),
    #[error("the provider '{0}' is not enabled on this server; its workspaces can't be used")]
    ProviderDisabled(ProviderName),
    #[error("the workspace has no sandbox yet")]
    NoSandbox,
    #[error("workspace {id} is {status}")]
    WrongState { id: WorkspaceId, status: WorkspaceStatus },
    #[error("{0} is an MCP server, not a workspace")]
    IsMcpServer(WorkspaceId),
    #[error("MCP servers are registered, not created as workspaces")]
    CreatesMcpServer,
    #[error("workspace {id} is attached to '{holder}'")]
    Held { id: WorkspaceId, holder: String },
    #[error("workspace {0} is being changed by another server")]
    ChangedElsewhere(WorkspaceId),
    /// The agent did not answer in time.
    #[error("the sandbox did not answer within {} s; the call was cancelled", .0.as_secs())]
    NoAnswer(Duration),
    #[error("the file is larger than {} MiB, the most that an answer can hold here", limit >> 20)]
    FileTooLarge { limit: u64 },
    /// The sandbox ended between its start and the call.
    #[error("the sandbox ended as soon as it was started")]
    EndedAtStart,
    /// The sandbox ended while a call ran.
    #[error(transparent)]
    SandboxLost(#[from] SandboxLost),
    #[error("the sandbox has ended ({reason}) and can't be started again: {error}")]
    NotRestarted { reason: String, error: ProviderError },
    /// The checkout of a repository failed.
    #[error(transparent)]
    Checkout(CheckoutError),
    /// The one provider that was tried failed.
    #[error("{error}")]
    ProviderFailed { provider: ProviderName, error: Box<WorkspaceError> },
    /// Each provider that was tried failed, for these reasons.
    #[error("every provider failed: {}", each(.0))]
    AllProvidersFailed(Vec<(RejectedCandidate, WorkspaceError)>),
    /// A creation failed, and its sandbox can't be removed now.
    #[error("{error}; its sandbox can't be removed yet ({problem})")]
    NotUndone { error: Box<WorkspaceError>, problem: ProviderError },
    #[error("the host's disk is full: {0}")]
    HostDiskFull(DiskShortage),
    #[error(transparent)]
    Snapshot(#[from] SnapshotError),
    #[error("a setting can't be written as JSON: {0}")]
    Unwritable(#[source] serde_json::Error),
}

impl WorkspaceError {
    /// The error of the store, if this is one.
    pub(crate) fn store_error(&self) -> Option<&StoreError> {
        match self {
            Self::Store(error) => Some(error),
            _ => None,
        }
    }
}

/// A column of a workspace's row that holds a value which the server never writes.
pub(crate) fn damaged_workspace(
    id: WorkspaceId,
    column: &'static str,
    reason: impl std::fmt::Display,
) -> StoreError {
    StoreError::Corrupt { table: "agent_workspaces", row: id.to_string(), column, reason: reason.to_string() }
}

/// A setting in the database with a value which the server never writes.
pub(crate) fn damaged_setting(key: &str, reason: impl std::fmt::Display) -> StoreError {
    StoreError::Corrupt {
        table: "settings",
        row: key.to_owned(),
        column: "value",
        reason: reason.to_string(),
    }
}

/// The way a sandbox was lost.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SandboxLost {
    /// The server ended it for this reason.
    #[error("the sandbox was ended while the call ran: {0}")]
    EndedByServer(String),
    /// The provider knows why it ended.
    #[error(
        "the sandbox ended while the call ran: {reason}. Its files are kept, and the next call starts it again"
    )]
    Ended { reason: String, out_of_memory: bool },
}

/// The error of a checkout.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct CheckoutError(pub(crate) CallError);

/// The free space of the host's disk, and the space that is kept free.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{} MiB are free, and {} MiB are kept free (workspaces.min_free_disk)",
    free_bytes >> 20,
    min_free_bytes >> 20
)]
pub(crate) struct DiskShortage {
    pub(crate) free_bytes: u64,
    pub(crate) min_free_bytes: u64,
}

/// The error of an operation on a snapshot.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SnapshotError {
    #[error("{0} can't make snapshots on this host: its disks are ordinary volumes")]
    NotSupported(ProviderName),
    #[error("{0} can't make snapshots of memory")]
    NoMemory(ProviderName),
    #[error("snapshot {id} is {status}, not ready")]
    NotReady { id: SnapshotId, status: SnapshotStatus },
    #[error("snapshot {0} is being created")]
    InProgress(SnapshotId),
    #[error("snapshot {id} is {status}, not in quarantine")]
    NotQuarantined { id: SnapshotId, status: SnapshotStatus },
    #[error("snapshot {0} includes memory, so a workspace made from it has the same resource_limits")]
    FixedLimits(SnapshotId),
    #[error(
        "resource_limits.disk is {requested}: the snapshot's disk has {actual}, and a disk can only grow"
    )]
    SmallerDisk { requested: ByteSize, actual: ByteSize },
}

fn each(failures: &[(RejectedCandidate, WorkspaceError)]) -> String {
    let each: Vec<String> =
        failures.iter().map(|(failed, _)| format!("{}: {}", failed.provider, failed.reason)).collect();
    each.join("; ")
}
