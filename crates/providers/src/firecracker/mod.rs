//! Firecracker microVMs, made by a manager on a host with KVM.
//!
//! The manager keeps everything that is a microVM's: disk, process, interface, rules. The provider asks for it over the
//! manager's REST API, and reaches the guest agent by a request to the manager that becomes the channel. Images come
//! from the Docker engine: the first microVM of an image has its files exported and sent to the manager.

mod client;
mod images;
mod provider;

pub use client::{Client as ManagerClient, MANAGER_TOKEN_FILE};
pub(crate) use provider::entry;
