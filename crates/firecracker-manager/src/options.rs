//! The configuration of a manager.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use emergent_host::room::RoomRules;
use emergent_wire::ByteSize;
use serde::{Deserialize, Serialize};

/// The configuration of a manager.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ManagerOptions {
    /// The Firecracker program.
    pub firecracker: PathBuf,
    /// Its jailer.
    pub jailer: PathBuf,
    /// The kernel that microVMs run.
    pub kernel: PathBuf,
    /// Additional arguments of the kernel.
    pub kernel_arguments: String,
    /// The most microVMs that run at the same time.
    pub max_vms: u32,
    /// The size of the warm pool, which servers keep filled.
    pub warm_pool_size: u32,
    /// The time limit from a microVM's start until its agent answers, in seconds.
    pub boot_timeout_seconds: u64,
    /// The name servers of microVMs. The host's are used if this is empty.
    pub nameservers: Vec<IpAddr>,
    /// The device of KVM.
    pub kvm_device: PathBuf,
    /// Whether KVM must work. Set to false for a Firecracker that has its own virtualization.
    pub require_kvm: bool,
    /// The bytes that are kept free on the host's disk. A server passes `workspaces.min_free_disk` to its own manager.
    pub min_free_disk: ByteSize,
    /// The multiple of the free bytes that can be promised to disks of microVMs. A server passes `workspaces.disk_overcommit` to
    /// its own manager.
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
    /// Whether the configured files exist.
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
