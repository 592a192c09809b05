//! Firecracker microVMs on one host: a service of its own, which servers ask for machines.
//!
//! Everything about a microVM is written down before it is done (`record`) and named after its id or its slot, so that a
//! manager that was killed at any moment is followed by one that takes back what runs and removes what is left (`recover`).
//! MicroVMs are processes of their own and outlive the manager.
//!
//! ```text
//!  server ──REST, bearer token──▶ http ──▶ machine ──▶ jailer ──▶ Firecracker ──▶ guest agent
//!     └──── channel: an upgraded request ──▶ vsock (a Unix socket of the jail) ───────┘
//! ```

mod cgroup;
mod console;
mod disks;
mod error;
mod firewall;
mod guest;
mod health;
mod http;
mod identity;
mod images;
mod initrd;
mod interfaces;
mod jail;
mod kernel;
mod kvm;
mod machine;
mod manager;
mod needs;
mod options;
mod process;
mod record;
mod recover;
mod slot;
mod snapshots;
mod socket;
mod tap;
mod vmm;

pub use error::ManagerError;
pub use http::{openapi, router};
pub use kvm::KVM_MISSING;
pub use manager::Manager;
pub use needs::{Lack, Need, examine};
pub use options::ManagerOptions;
