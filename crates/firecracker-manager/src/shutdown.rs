//! Ends microVMs: stops them, cleans up after their runs, removes them.
//!
//! Every function can be repeated after a failure or a crash at any point: it skips the steps that are done.

use std::time::Duration;

use emergent_failpoint::failpoint;
use emergent_wire::WorkspaceId;
use emergent_wire::manager::MachinePhase;
use rustix::process::Signal;

use crate::error::{HostError, ManagerError, on_host};
use crate::guest;
use crate::machine::LockedMachine;
use crate::pause;
use crate::process::{self, Process};
use crate::resources::Resources;
use crate::vmm::Vmm;

/// The time between SIGTERM and SIGKILL for the processes of a microVM that is stopped.
const STOP_GRACE: Duration = Duration::from_secs(8);
/// The time limit for a microVM to power off after that.
const POWER_OFF_TIME: Duration = Duration::from_secs(5);
/// The time limit for a killed process to end.
const KILL_TIME: Duration = Duration::from_secs(10);

/// Stops a microVM. Its disk is kept.
pub(crate) async fn stop(resources: &Resources, machine: &LockedMachine) -> Result<(), ManagerError> {
    if let Some(process) = machine.live_process() {
        if let Err(error) = pause::unpause(resources, machine, false).await {
            tracing::warn!(machine = %machine.id, %error, "a microVM that is to be stopped could not be unpaused; it will be killed");
        }
        save_end(machine, None).await;
        failpoint!("manager.end_noted");
        power_off(resources, machine.id, process, STOP_GRACE).await;
    }
    end_run(resources, machine, None).await
}

/// Removes a microVM and everything that belongs to it.
pub(crate) async fn destroy(resources: &Resources, machine: &LockedMachine) -> Result<(), ManagerError> {
    if machine.phase() == MachinePhase::Running
        && let Some(process) = machine.live_process()
    {
        machine.update_even_unsaved(|record| record.phase = MachinePhase::Removing).await;
        failpoint!("manager.removal_noted");
        // The client has already ended the commands, so they get no grace period.
        power_off(resources, machine.id, process, Duration::ZERO).await;
    }
    Ok(remove(resources, machine).await?)
}

/// Cleans up after a run, however far it got: process, jail, control groups, rules, slot. The disk is kept, unless the
/// microVM is to be removed.
pub(crate) async fn end_run(
    resources: &Resources,
    machine: &LockedMachine,
    reason: Option<String>,
) -> Result<(), ManagerError> {
    if machine.phase() == MachinePhase::Removing {
        return Ok(remove(resources, machine).await?);
    }
    save_end(machine, reason).await;
    remove_run(resources, machine).await?;
    let slot = machine.record().slot;
    machine
        .update(|record| {
            record.process = None;
            record.slot = None;
            record.phase = MachinePhase::Stopped;
        })
        .await?;
    // After the record is saved: a slot that a saved record names must not be given to another microVM.
    if let Some(index) = slot {
        resources.slots.release(index);
    }
    Ok(())
}

/// Removes a microVM that does not run, or whose run was not asked to end.
pub(crate) async fn remove(resources: &Resources, machine: &LockedMachine) -> Result<(), HostError> {
    let id = machine.id;
    machine.update_even_unsaved(|record| record.phase = MachinePhase::Removing).await;
    remove_run(resources, machine).await?;
    unregister(resources, id, machine.record().slot).await
}

/// Removes a microVM whose record can't be parsed.
pub(crate) async fn remove_damaged(resources: &Resources, id: WorkspaceId) -> Result<(), HostError> {
    let _removing = resources.machines.removing_damaged.lock().await;
    let Some(record) = resources.machines.damaged(id) else {
        return Ok(());
    };
    release_run(resources, id, None, record.slot).await?;
    unregister(resources, id, record.slot).await
}

/// Removes the files of a microVM that has no run, and then the microVM.
async fn unregister(resources: &Resources, id: WorkspaceId, slot: Option<u32>) -> Result<(), HostError> {
    let records = resources.records.clone();
    on_host("removing the disk", move || records.remove(id)).await?;
    failpoint!("manager.files_removed");
    resources.machines.remove(id);
    if let Some(index) = slot {
        resources.slots.release(index);
    }
    Ok(())
}

/// Removes the resources of a run. The record keeps naming them.
async fn remove_run(resources: &Resources, machine: &LockedMachine) -> Result<(), HostError> {
    let record = machine.record();
    release_run(resources, record.id, record.process, record.slot).await?;
    machine.set_console(None);
    Ok(())
}

/// Ends the processes of a microVM, and removes its jail, its control groups and its rules.
async fn release_run(
    resources: &Resources,
    id: WorkspaceId,
    process: Option<Process>,
    slot: Option<u32>,
) -> Result<(), HostError> {
    match process {
        Some(process) => kill(process).await?,
        // A process may have been started and not been saved.
        None => kill_all_of(id).await?,
    }
    failpoint!("manager.process_killed");
    let jails = resources.jails.clone();
    on_host("removing the jail", move || jails.remove(id)).await?;
    failpoint!("manager.jail_removed");
    if let Some(index) = slot {
        resources.firewall.dismiss(&resources.naming.slot(index).interface).await?;
        failpoint!("manager.rules_removed");
    }
    Ok(())
}

/// Saves that a microVM is to end, and why, unless that is saved already.
async fn save_end(machine: &LockedMachine, reason: Option<String>) {
    if machine.phase() == MachinePhase::Ending {
        return;
    }
    machine
        .update_even_unsaved(|record| {
            record.phase = MachinePhase::Ending;
            record.ended.clone_from(&reason);
        })
        .await;
}

/// Asks a microVM to power off and waits for its end. The agent is asked first. If it does not listen, the kernel is asked
/// by Ctrl+Alt+Del, which some kernels ignore.
async fn power_off(resources: &Resources, id: WorkspaceId, process: Process, grace: Duration) {
    let vsock = resources.jails.vsock(id);
    let ask = async {
        guest::power_off(&vsock, grace).await;
        if let Err(error) = Vmm::at(resources.jails.api(id)).press_restart_keys().await {
            tracing::debug!(machine = %id, %error, "Ctrl+Alt+Del could not be sent to a microVM");
        }
        std::future::pending::<()>().await;
    };
    let ended = async {
        tokio::select! {
            () = process.ended() => {}
            () = ask => {}
        }
    };
    if tokio::time::timeout(grace + POWER_OFF_TIME, ended).await.is_err() {
        tracing::info!(machine = %id, "a microVM did not power off in time and is killed");
    }
}

/// Kills the processes that carry a microVM's id as an argument.
pub(crate) async fn kill_all_of(id: WorkspaceId) -> Result<(), HostError> {
    let processes = on_host("finding the microVM's processes", move || process::of_machine(&id.to_string()));
    for process in processes.await? {
        kill(process).await?;
    }
    Ok(())
}

/// Kills a process and waits for its end.
async fn kill(process: Process) -> Result<(), HostError> {
    process.signal(Signal::KILL).map_err(|error| HostError::io("killing the process of a microVM", error))?;
    match tokio::time::timeout(KILL_TIME, process.ended()).await {
        Ok(()) => Ok(()),
        Err(_) => {
            Err(HostError::TimedOut { step: "the end of a killed microVM", seconds: KILL_TIME.as_secs() })
        }
    }
}

/// Undoes an operation that failed. A second failure is only logged: `repair` tries again.
pub(crate) async fn undo(resources: &Resources, machine: &LockedMachine, keep_disk: bool) {
    let undone = if keep_disk {
        end_run(resources, machine, None).await
    } else {
        remove(resources, machine).await.map_err(ManagerError::from)
    };
    if let Err(error) = undone {
        tracing::warn!(machine = %machine.id, %error, "a failed start could not be undone; it is tried again");
    }
}
