//! The Firecracker manager: a service that creates, keeps and removes microVMs on one host.
//!
//! Every step is saved in a microVM's record before it is done (`record`), and every resource is named after the microVM's id
//! or its slot. So after a manager was killed at any moment, the next one adopts the microVMs that run and removes the rest
//! (`recover`). MicroVMs are processes of their own and outlive the manager.
//!
//! ```text
//!  server ──REST, bearer token──▶ http ──▶ manager ──▶ launch ──▶ jailer ──▶ Firecracker ──▶ guest agent
//!     └──── channel: an upgraded request ──▶ vsock (a Unix socket of the jail) ────────────────┘
//! ```
//!
//! | module | responsibility |
//! |---|---|
//! | `http` | the REST front: the only place that knows codes and statuses |
//! | `manager` | the operations, each under its microVM's lock |
//! | `admission`, `launch`, `boot`, `watch` | from a request to an agent that answers, and its unexpected end |
//! | `pause`, `snapshot`, `shutdown` | copies of a microVM, and its end |
//! | `recover` | the work that an earlier manager left |
//! | `registry`, `machine`, `record` | the microVMs, their locks, their records on disk |
//! | `resources` | the parts that all operations share |
//! | `slot`, `interfaces`, `tap`, `firewall` | network and identity on the host |
//! | `disks`, `images`, `snapshots`, `kernel`, `initrd`, `jail`, `cgroup` | files and limits |
//! | `vmm`, `guest`, `process`, `console`, `socket` | one microVM's API, agent, process, output |
//! | `requirements`, `kvm`, `health` | whether this host can run microVMs |

mod admission;
mod boot;
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
mod launch;
mod machine;
mod manager;
mod options;
mod pause;
mod process;
mod record;
mod recover;
mod registry;
mod requirements;
mod resources;
mod shutdown;
mod slot;
mod snapshot;
mod snapshots;
mod socket;
mod tap;
mod vmm;
mod watch;

pub use error::ManagerError;
pub use http::{openapi, router};
pub use kvm::KVM_MISSING;
pub use manager::Manager;
pub use options::ManagerOptions;
pub use requirements::{Requirement, UnmetRequirement, check as check_requirements};
