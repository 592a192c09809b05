//! Firecracker microVMs, made by a manager on a host with KVM.
//!
//! The manager owns all parts of a microVM: disk, process, interface, rules. The provider uses the manager's REST API. The
//! channel to the guest agent is an upgraded request. Images come from an image source: before the first microVM of an image, its
//! root file system is sent to the manager.

mod client;
mod images;
mod provider;

pub use client::{Client as ManagerClient, MANAGER_TOKEN_FILE, ManagerClientError};
pub(crate) use provider::entry;
