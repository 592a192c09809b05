//! The manager's health report: whether this host can run microVMs, and how many more.

use emergent_host::memory::available_memory;
use emergent_wire::manager::{MachinePhase, ManagerHealth};
use emergent_wire::workspace::AvailableResources;

use crate::cgroup::Groups;
use crate::requirements::{self, Requirement};
use crate::resources::{Resources, cpus};

pub(crate) async fn report(resources: &Resources, recovering: bool) -> ManagerHealth {
    let requirements = requirements::check(&resources.options).await;
    let found = |name: &str| {
        let requirement = requirements.iter().find(|requirement| requirement.name == name)?;
        requirement.status.clone().ok()
    };
    let is_required =
        |requirement: &&Requirement| requirement.name != requirements::KVM || resources.options.require_kvm;
    let unmet = requirements.iter().filter(is_required).filter_map(|each| each.status.as_ref().err());
    let errors: Vec<String> = unmet.map(ToString::to_string).collect();
    let mut notes = Vec::new();
    if resources.jails.groups == Groups::None {
        let note =
            "no control groups can be used: CPU and memory of microVMs' processes are not limited by them";
        notes.push(note.to_owned());
    }
    match resources.machines.count_damaged() {
        0 => {}
        count => notes.push(format!(
            "records of microVMs that can't be parsed: {count}; start the version of the manager that wrote them, or destroy \
             their workspaces"
        )),
    }
    let is_active = |phase| matches!(phase, MachinePhase::Running | MachinePhase::Paused);
    let active = resources.machines.all().iter().filter(|machine| is_active(machine.phase())).count();
    ManagerHealth {
        healthy: errors.is_empty(),
        kvm_available: found(requirements::KVM).is_some(),
        firecracker: found(requirements::FIRECRACKER),
        jailer: found(requirements::JAILER),
        kernel: Some(resources.options.kernel.display().to_string()),
        active_vms: u32::try_from(active).unwrap_or(u32::MAX),
        max_vms: resources.slots.most(),
        warm_pool_size: resources.options.warm_pool_size,
        recovering,
        available: available(resources),
        errors,
        notes,
    }
}

fn available(resources: &Resources) -> AvailableResources {
    AvailableResources {
        cpus: u32::try_from(cpus()).unwrap_or(u32::MAX),
        memory_bytes: available_memory().unwrap_or(0),
        disk_bytes: rustix::fs::statvfs(&resources.data_dir).map_or(0, |stat| stat.f_bavail * stat.f_frsize),
    }
}
