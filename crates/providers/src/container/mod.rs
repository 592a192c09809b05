//! Containers on a Docker engine: on gVisor's runtime (`gvisor`), or on the engine's own (`docker`).
//!
//! A workspace is one container and one volume, both named `agent-workspace-{id}`, and its named volumes. The container's first
//! process is the guest agent. The first channel to it is the container's own standard input and output, attached before the
//! start. When this channel breaks (a restart of the server or the engine), a new one is opened by one long-lived `exec` of
//! `emergent-guest connect`, which passes its streams to the agent. Tool calls never start an exec.

mod agent_priority;
mod disk;
mod disk_watch;
mod engine;
mod engine_error;
#[cfg(test)]
mod engine_tests;
mod entries;
mod file_lock;
mod firewall;
mod guest_files;
mod guest_image;
mod host;
mod images;
mod legacy_guest;
mod network;
mod oom;
mod probe;
mod processes;
mod provider;
mod removal;
mod running;
mod snapshots;
mod spec;
mod start;
mod state;
mod stream;

pub(crate) use entries::{docker_entry, gvisor_entry};
pub(crate) use host::ContainerHost;
pub use images::DockerImages;

/// The label with the installation that owns a container, volume or network.
pub(crate) const LABEL_INSTALLATION: &str = "emergent.installation";
/// The label with the workspace that a container or volume belongs to.
pub(crate) const LABEL_WORKSPACE: &str = "emergent.workspace";
/// The label with the number of bytes that a sandbox may write outside its volumes.
pub(crate) const LABEL_ROOT_LIMIT: &str = "emergent.root-limit";

/// The name of a workspace's named volume.
pub(crate) fn volume_name_of(id: emergent_wire::WorkspaceId, volume: &str) -> String {
    format!("{}-{volume}", name_of(id))
}

/// The name of a workspace's container and volume.
pub(crate) fn name_of(id: emergent_wire::WorkspaceId) -> String {
    format!("agent-workspace-{id}")
}
