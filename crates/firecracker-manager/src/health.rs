//! Whether microVMs can be made on this host, and how many more.

use std::fs;
use std::path::PathBuf;

use emergent_wire::manager::{MachinePhase, MachineRequest, ManagerHealth};
use emergent_wire::workspace::AvailableResources;

use crate::cgroup::Groups;
use crate::error::{ManagerError, on_host};
use crate::kvm;
use crate::machine::Begin;
use crate::manager::{Manager, cpus};
use crate::needs::{self, Need};
use crate::record::Record;

impl Manager {
    /// How the manager is doing.
    pub async fn health(&self) -> ManagerHealth {
        let needs = needs::examine(&self.options).await;
        let found =
            |what: &str| needs.iter().find(|need| need.what == what).and_then(|need| need.found.clone().ok());
        let is_needed = |need: &&Need| need.what != needs::KVM || self.options.require_kvm;
        let lacks = needs.iter().filter(is_needed).filter_map(|need| need.found.as_ref().err());
        let errors: Vec<String> = lacks.map(ToString::to_string).collect();
        let mut notes = Vec::new();
        if self.jails.groups == Groups::None {
            notes.push("no control groups can be used: CPU and memory of microVMs' processes are not limited by them".to_owned());
        }
        let running =
            |record: &Record| record.phase == MachinePhase::Running || record.phase == MachinePhase::Paused;
        let active = self.machines().values().filter(|machine| running(&machine.record())).count();
        ManagerHealth {
            healthy: errors.is_empty(),
            kvm_available: found(needs::KVM).is_some(),
            firecracker: found(needs::FIRECRACKER),
            jailer: found(needs::JAILER),
            kernel: Some(self.options.kernel.display().to_string()),
            active_vms: u32::try_from(active).unwrap_or(u32::MAX),
            max_vms: self.slots.most(),
            warm_pool_size: self.options.warm_pool_size,
            recovering: self.is_recovering(),
            available: self.available(),
            errors,
            notes,
        }
    }

    fn available(&self) -> AvailableResources {
        AvailableResources {
            cpus: u32::try_from(cpus()).unwrap_or(u32::MAX),
            memory_bytes: free_memory().unwrap_or(0),
            disk_bytes: rustix::fs::statvfs(&self.data_dir).map_or(0, |stat| stat.f_bavail * stat.f_frsize),
        }
    }

    /// Refuses to make a microVM where that can't work, with the words that say so.
    pub(crate) async fn check_usable(&self) -> Result<(), ManagerError> {
        if self.options.require_kvm {
            let device = self.options.kvm_device.clone();
            let checked = on_host("trying KVM", move || Ok::<_, std::io::Error>(kvm::check(&device))).await?;
            checked.map_err(|lack| ManagerError::Unavailable(lack.to_string()))?;
        }
        self.kernel.get().await.map(drop)
    }

    /// Checks what can be known before anything is made. Gives the file that the disk is copied from, and how the microVM
    /// begins.
    pub(crate) fn check_request(&self, request: &MachineRequest) -> Result<(PathBuf, Begin), ManagerError> {
        self.images.get(&request.image)?;
        let (source, begin) = match request.snapshot {
            None => (self.images.file(&request.image), Begin::Boot),
            Some(id) => {
                let copy = self.snapshots.get(id);
                let copy = copy.map_err(|_| ManagerError::NotFound(format!("copy {id}")))?;
                let begin = match copy.memory_limits {
                    None => Begin::Boot,
                    Some(limits) if limits == request.limits => Begin::Copy(id),
                    Some(_) => {
                        let message = "a copy with memory has the limits of what it is a copy of, and can have no others";
                        return Err(ManagerError::Unacceptable(message.to_owned()));
                    }
                };
                (self.snapshots.file(id), begin)
            }
        };
        let smallest = fs::metadata(&source).map_or(0, |found| found.len());
        if request.limits.disk.bytes() < smallest {
            return Err(ManagerError::Unacceptable(format!(
                "the disk must have at least {}M for this image",
                smallest.div_ceil(1 << 20)
            )));
        }
        Ok((source, begin))
    }
}

/// The memory of the host that is not in use, in bytes.
pub(crate) fn free_memory() -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.split_ascii_whitespace().next()?.parse::<u64>().ok().map(|kib| kib * 1024)
}
