//! Pauses a microVM while it is copied, and lets it run again.
//!
//! There are two ways. For a snapshot of the disk alone, the Firecracker process is stopped by a signal. For a snapshot of
//! the memory, Firecracker's API pauses the guest. The API is not used for disks: after a pause, Firecracker 1.16 delivers
//! nothing from the vsock until the guest has confirmed a reset, and only a snapshot of the memory tells the guest of the
//! reset.

use std::time::Duration;

use emergent_host::files::remove_if_there;
use emergent_wire::WorkspaceId;
use emergent_wire::manager::MachinePhase;

use crate::error::{HostError, ManagerError, on_host};
use crate::jail::{MEMORY, STATE};
use crate::machine::LockedMachine;
use crate::resources::Resources;
use crate::vmm::Vmm;
use crate::{guest, shutdown};

/// The time limit for the agent to answer after a pause.
const CONNECT_TIME: Duration = Duration::from_secs(20);

/// Pauses a microVM that runs.
pub(crate) async fn pause(
    resources: &Resources,
    machine: &LockedMachine,
    with_memory: bool,
) -> Result<(), ManagerError> {
    let record = machine.update(|record| record.phase = MachinePhase::Paused).await?;
    match record.process {
        Some(process) if !with_memory => {
            Ok(on_host("stopping the microVM's process", move || process.freeze()).await?)
        }
        _ => Ok(Vmm::at(resources.jails.api(machine.id)).set_paused(true).await?),
    }
}

/// Lets a microVM run again that is paused; does nothing for others. `memory_was_copied` says whether a snapshot of the
/// memory was made since Firecracker's API paused the guest. If not, one is made and thrown away, for the vsock.
pub(crate) async fn unpause(
    resources: &Resources,
    machine: &LockedMachine,
    memory_was_copied: bool,
) -> Result<(), ManagerError> {
    let record = machine.record();
    if record.phase != MachinePhase::Paused {
        return Ok(());
    }
    if let Some(process) = record.process {
        process.thaw().map_err(|error| HostError::io("continuing the microVM's process", error))?;
    }
    let vmm = Vmm::at(resources.jails.api(machine.id));
    if vmm.is_paused().await? {
        let copied = if memory_was_copied { Ok(()) } else { copy_memory(resources, machine.id).await };
        remove_memory_files(resources, machine.id).await?;
        vmm.set_paused(false).await?;
        let vsock = resources.jails.vsock(machine.id);
        if copied.is_err() && guest::connect(&vsock, CONNECT_TIME).await.is_err() {
            let reason = "its vsock did not survive a pause".to_owned();
            return shutdown::end_run(resources, machine, Some(reason)).await;
        }
    }
    machine.update(|record| record.phase = MachinePhase::Running).await?;
    Ok(())
}

/// Writes the state and the memory of a paused microVM to files of its jail.
pub(crate) async fn copy_memory(resources: &Resources, id: WorkspaceId) -> Result<(), ManagerError> {
    remove_memory_files(resources, id).await?;
    Ok(Vmm::at(resources.jails.api(id)).copy_memory(STATE, MEMORY).await?)
}

/// Removes these files. A microVM that was started from such files keeps them open, so it is not affected.
async fn remove_memory_files(resources: &Resources, id: WorkspaceId) -> Result<(), HostError> {
    let files = [resources.jails.file(id, STATE), resources.jails.file(id, MEMORY)];
    on_host("removing memory files", move || files.iter().try_for_each(|file| remove_if_there(file))).await
}
