//! Providers of sandboxes: the isolated machines that workspaces run in.
//!
//! [`WorkspaceProvider`] is the seam to the control plane, with the contract of every provider. [`ProviderTable`] lists the
//! providers. Every provider puts the same guest agent into its sandboxes and opens a channel to it, so tools behave the same
//! everywhere.
//!
//! Invariant: every object outside the database is named after its workspace and labelled with the installation's id. So it is
//! found after any crash ([`WorkspaceProvider::list`]), and objects of others are never touched.

mod container;
mod error;
mod firecracker;
mod image;
mod provider;
mod sandbox;
mod settings;
mod start_history;
mod table;
mod traced;

pub use container::DockerImages;
pub use error::ProviderError;
pub use firecracker::{MANAGER_TOKEN_FILE, ManagerClient, ManagerClientError};
pub use image::{ExportLease, ImageConfig, ImageProgram, ImageSource, RootArchive};
pub use provider::{Health, SharedProvider, WorkspaceProvider};
pub use sandbox::{
    DiskFault, DiskUse, Observed, ObservedState, Sandbox, SandboxExit, SandboxId, SandboxSpec, SnapshotInfo,
    Volume,
};
pub use settings::{ManagerAddress, OpenContext, ProviderConfig};
pub use table::{Absence, OpenProvider, ProviderEntry, ProviderFacts, ProviderTable, Providers, Ranks};
