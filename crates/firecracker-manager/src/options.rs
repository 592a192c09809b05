//! What a manager is told when it starts.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use emergent_host::room::RoomRules;
use emergent_wire::ByteSize;
use serde::{Deserialize, Serialize};

/// What a manager is told when it starts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ManagerOptions {
    /// The Firecracker program.
    pub firecracker: PathBuf,
    /// Its jailer.
    pub jailer: PathBuf,
    /// The kernel that microVMs run.
    pub kernel: PathBuf,
    /// What is added to the kernel's arguments.
    pub kernel_arguments: String,
    /// How many microVMs may run at once.
    pub max_vms: u32,
    /// How many microVMs shall wait for work; servers keep the pool.
    pub warm_pool_size: u32,
    /// How long a microVM may take from its start until its agent answers, in seconds.
    pub boot_timeout_seconds: u64,
    /// The name servers that microVMs may ask; the host's unless given.
    pub nameservers: Vec<IpAddr>,
    /// The device that is KVM's.
    pub kvm_device: PathBuf,
    /// Whether microVMs are made only when KVM works. Turned off for a Firecracker that brings its own virtualization.
    pub require_kvm: bool,
    /// What is kept free on the host's disk. A server tells its own manager `workspaces.min_free_disk`.
    pub min_free_disk: ByteSize,
    /// How many times over the free disk may be promised to microVMs. A server tells its own manager
    /// `workspaces.disk_overcommit`.
    pub disk_overcommit: u32,
}

impl Default for ManagerOptions {
    fn default() -> Self {
        Self {
            firecracker: PathBuf::from("/usr/local/bin/firecracker"),
            jailer: PathBuf::from("/usr/local/bin/jailer"),
            kernel: PathBuf::from("/usr/local/share/emergent/vmlinux"),
            kernel_arguments: String::new(),
            max_vms: 64,
            warm_pool_size: 0,
            boot_timeout_seconds: 30,
            nameservers: Vec::new(),
            kvm_device: PathBuf::from("/dev/kvm"),
            require_kvm: true,
            min_free_disk: ByteSize::from_bytes(RoomRules::default().min_free_bytes),
            disk_overcommit: RoomRules::default().overcommit,
        }
    }
}

impl ManagerOptions {
    /// Whether everything that microVMs need is where it was said to be.
    pub fn is_installed(&self) -> bool {
        [&self.firecracker, &self.jailer, &self.kernel].iter().all(|path| path.is_file())
    }

    pub(crate) fn room_rules(&self) -> RoomRules {
        RoomRules { min_free_bytes: self.min_free_disk.bytes(), overcommit: self.disk_overcommit }
    }

    pub(crate) fn boot_timeout(&self) -> Duration {
        Duration::from_secs(self.boot_timeout_seconds)
    }
}
