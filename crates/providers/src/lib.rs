//! Sandbox providers: who makes, keeps and removes the isolated machines that workspaces run in.
//!
//! [`WorkspaceProvider`] is the seam: the control plane knows nothing below it. Every provider puts the same guest
//! agent into its sandboxes and opens a channel to it, so tools behave the same everywhere.
//!
//! Invariant: whatever a provider makes outside the database is named after its workspace and carries the
//! installation's id, so that it can be found again ([`WorkspaceProvider::list`]) after any crash, and nothing that
//! belongs to somebody else is ever touched.

mod container;
mod error;
mod firecracker;
mod image;
mod provider;
mod sandbox;
mod start_history;

pub use container::{
    ContainerHost, ContainerOptions, ContainerProvider, DOCKER_HOST_VARIABLE, DockerImages, Engine,
    EngineError, GVISOR_MISSING, Runtime,
};
pub use error::ProviderError;
pub use firecracker::{FirecrackerOptions, FirecrackerProvider, MANAGER_TOKEN_FILE, ManagerClient};
pub use image::{ExportLease, ImageConfig, ImageProgram, ImageSource, RootArchive};
pub use provider::{Health, SharedProvider, WorkspaceProvider};
pub use sandbox::{
    DiskFault, DiskUse, Observed, ObservedState, Sandbox, SandboxExit, SandboxId, SandboxSpec, SnapshotInfo,
    Volume,
};
