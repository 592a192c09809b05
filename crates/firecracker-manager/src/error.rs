//! The errors of the manager.
//!
//! Each module has an error of its own. [`ManagerError`] joins them for the callers of [`crate::Manager`]. Only
//! `http/error.rs` knows the codes and statuses that they become.

use std::io;
use std::path::PathBuf;

use emergent_host::firewall::FirewallError;
use emergent_wire::{SnapshotId, WorkspaceId};
use tokio::task::JoinError;

use crate::admission::RequestError;
use crate::disks::DiskError;
use crate::guest::GuestError;
use crate::images::ImageError;
use crate::launch::LaunchError;
use crate::machine::StateError;
use crate::record::DamagedRecord;
use crate::requirements::UnmetRequirement;
use crate::slot::NoSlot;
use crate::vmm::VmmError;

/// Why an operation of the manager failed.
#[derive(Debug, thiserror::Error)]
pub enum ManagerError {
    /// Another manager uses the directory.
    #[error("another manager runs in {}", .0.display())]
    DirectoryInUse(PathBuf),
    /// This host can't run microVMs: a part is missing or does not work.
    #[error(transparent)]
    UnmetRequirement(#[from] UnmetRequirement),
    /// The request can't be met on any host.
    #[error(transparent)]
    Request(#[from] RequestError),
    /// The limit of microVMs is reached, or the host has too little memory.
    #[error(transparent)]
    NoSlot(#[from] NoSlot),
    /// The object does not exist.
    #[error(transparent)]
    NotFound(#[from] NotFound),
    /// The microVM's record can't be parsed.
    #[error(transparent)]
    Damaged(#[from] DamagedRecord),
    /// The microVM's phase does not allow the operation.
    #[error(transparent)]
    State(#[from] StateError),
    /// The image could not be made.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// The microVM's process did not get ready.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// Firecracker's API failed.
    #[error(transparent)]
    Vmm(#[from] VmmError),
    /// The guest agent failed.
    #[error(transparent)]
    Guest(#[from] GuestError),
    /// A step on the host failed.
    #[error(transparent)]
    Host(#[from] HostError),
}

/// An object that does not exist.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotFound {
    /// A microVM.
    #[error("there is no microVM {0} here")]
    Machine(WorkspaceId),
    /// An image.
    #[error("there is no image {0} here")]
    Image(String),
    /// A snapshot.
    #[error("there is no snapshot {0} here")]
    Snapshot(SnapshotId),
}

/// A step on the host that failed.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// The host's disk has no space for it.
    #[error("{0}")]
    DiskFull(io::Error),
    /// A system call or a program failed.
    #[error("{step}: {reason}")]
    Failed {
        /// The step.
        step: &'static str,
        /// Why.
        reason: io::Error,
    },
    /// The firewall's rules could not be changed.
    #[error("{step}: {reason}")]
    Firewall {
        /// The step.
        step: &'static str,
        /// Why.
        reason: FirewallError,
    },
    /// The thread of the step panicked, or the runtime is shutting down.
    #[error("{step}: {reason}")]
    Aborted {
        /// The step.
        step: &'static str,
        /// Why.
        reason: JoinError,
    },
    /// The step took too long.
    #[error("{step} did not end within {seconds} s")]
    TimedOut {
        /// The step.
        step: &'static str,
        /// The time limit.
        seconds: u64,
    },
}

impl HostError {
    /// An input or output error in a step.
    pub(crate) fn io(step: &'static str, reason: io::Error) -> Self {
        if reason.kind() == io::ErrorKind::StorageFull {
            Self::DiskFull(reason)
        } else {
            Self::Failed { step, reason }
        }
    }
}

/// An error that needs the name of its step to be understood.
pub(crate) trait InStep {
    /// The complete error.
    type Complete: Send;

    /// Adds the step.
    fn in_step(self, step: &'static str) -> Self::Complete;
}

impl InStep for io::Error {
    type Complete = HostError;

    fn in_step(self, step: &'static str) -> HostError {
        HostError::io(step, self)
    }
}

impl InStep for FirewallError {
    type Complete = HostError;

    fn in_step(self, step: &'static str) -> HostError {
        HostError::Firewall { step, reason: self }
    }
}

impl InStep for DiskError {
    type Complete = ManagerError;

    fn in_step(self, step: &'static str) -> ManagerError {
        match self {
            Self::Request(error) => error.into(),
            Self::Io(error) => HostError::io(step, error).into(),
        }
    }
}

/// Runs a blocking step on a thread for blocking work.
pub(crate) async fn on_host<T, E>(
    step: &'static str,
    work: impl FnOnce() -> Result<T, E> + Send + 'static,
) -> Result<T, E::Complete>
where
    T: Send + 'static,
    E: InStep + Send + 'static,
    E::Complete: From<HostError>,
{
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result.map_err(|error| error.in_step(step)),
        Err(reason) => Err(HostError::Aborted { step, reason }.into()),
    }
}
