//! Recovery after a manager has ended at any moment: adopts the microVMs that run, finishes or undoes the operations that
//! had begun, and removes the resources that no record names.

use std::sync::Arc;

use emergent_wire::WorkspaceId;
use emergent_wire::manager::MachinePhase;
use emergent_wire::workspace::NetworkMode;
use futures_util::future::join_all;
use parking_lot::Mutex;
use tokio::task::JoinHandle;

use crate::error::{HostError, ManagerError, on_host};
use crate::machine::{LockedMachine, Machine};
use crate::process::Process;
use crate::record::{DamagedRecord, LoadedRecords, Record};
use crate::resources::Resources;
use crate::{pause, shutdown, watch};

/// The action for one record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Action {
    /// It runs: watch it.
    Adopt,
    /// It is paused: let it run again, and watch it.
    Unpause,
    /// It was being stopped, and its process has not ended: stop it.
    Stop,
    /// Its run is over: clean up. Its disk is kept.
    End,
    /// It is stopped: there is nothing to do.
    Keep,
    /// Its creation was not finished, or it was being removed: remove it.
    Remove,
}

/// Decides the action from a record's phase and the state of its process. Pure.
fn action(phase: MachinePhase, is_alive: bool) -> Action {
    match (phase, is_alive) {
        (MachinePhase::Running, true) => Action::Adopt,
        (MachinePhase::Paused, true) => Action::Unpause,
        (MachinePhase::Ending, true) => Action::Stop,
        (MachinePhase::Reserved | MachinePhase::Removing, _) => Action::Remove,
        (MachinePhase::Stopped, _) => Action::Keep,
        _ => Action::End,
    }
}

/// The background task of a recovery.
pub(crate) struct Recovery {
    task: Mutex<Option<JoinHandle<()>>>,
}

impl Recovery {
    /// Registers all microVMs and adopts those that run. The rest is done in the background and for all microVMs at once: one
    /// that ends slowly delays no other.
    pub(crate) async fn start(resources: &Arc<Resources>) -> Result<Self, ManagerError> {
        let (records, snapshots) = (resources.records.clone(), resources.snapshots.clone());
        let found = on_host("reading the records of microVMs", move || {
            snapshots.remove_incomplete()?;
            records.load()
        });
        let LoadedRecords { readable, damaged } = found.await?;
        damaged.into_iter().for_each(|record| register_damaged(resources, record));
        let mut unfinished = Vec::new();
        for record in readable {
            unfinished.extend(register(resources, record).await);
        }
        let resources = Arc::clone(resources);
        let task = tokio::spawn(async move {
            // MicroVMs that run must not be without their rules. If this fails, `repair` and the next microVM try again.
            if let Err(error) = resources.repair_rules().await {
                tracing::warn!(%error, "the rules of microVMs could not be set; it is tried again");
            }
            let finished = unfinished.into_iter().map(|(machine, action)| {
                let resources = &resources;
                async move { finish(resources, &machine, action).await }
            });
            join_all(finished).await;
            remove_strays(&resources).await;
        });
        Ok(Self { task: Mutex::new(Some(task)) })
    }

    pub(crate) fn is_running(&self) -> bool {
        let task = self.task.lock();
        task.as_ref().is_some_and(|task| !task.is_finished())
    }

    /// Ends the task and waits for its end.
    pub(crate) async fn abort(&self) {
        let task = self.task.lock().take();
        if let Some(task) = task {
            task.abort();
            let _ = task.await;
        }
    }
}

/// Registers the microVM of a record. Returns it locked if there is something to finish, so that calls for it wait.
async fn register(resources: &Arc<Resources>, mut record: Record) -> Option<(LockedMachine, Action)> {
    if record.boot.as_ref().is_some_and(|boot| *boot != resources.boot_id) {
        // The host was restarted: the number belongs to another process now.
        record.process = None;
    }
    let action = action(record.phase, record.process.is_some_and(Process::is_alive));
    tracing::info!(machine = %record.id, phase = %record.phase, ?action, "a microVM of an earlier manager was found");
    if action == Action::End {
        if record.phase == MachinePhase::Running || record.phase == MachinePhase::Paused {
            record.ended = Some("its process ended while no manager ran".to_owned());
        }
        record.phase = MachinePhase::Ending;
    }
    record.slot = take_back_slot(resources, record.id, record.slot, Some(record.request.network));
    let process = record.process;
    let machine = Machine::new(record, resources.records.clone());
    resources.machines.insert(Arc::clone(&machine));
    match (action, process) {
        (Action::Adopt, Some(process)) => {
            watch::watch(resources, &machine, process);
            None
        }
        (Action::Keep, _) => None,
        _ => Some((machine.lock().await, action)),
    }
}

/// Registers a microVM whose record can't be parsed. It keeps its slot, jail and network, and its process is left alone.
fn register_damaged(resources: &Resources, mut record: DamagedRecord) {
    tracing::error!(machine = %record.id, slot = record.slot, reason = record.reason, "a record can't be parsed; its microVM stays as it is, and can only be destroyed");
    record.slot = take_back_slot(resources, record.id, record.slot, record.network);
    resources.machines.insert_damaged(record);
}

/// Marks a record's slot as taken, before any slot is given to a new microVM. Returns the slot that the record keeps.
fn take_back_slot(
    resources: &Resources,
    machine: WorkspaceId,
    slot: Option<u32>,
    network: Option<NetworkMode>,
) -> Option<u32> {
    let index = slot?;
    if !resources.slots.take_back(index) {
        tracing::error!(%machine, index, "two microVMs have the same slot; the second one loses it");
        return None;
    }
    if network == Some(NetworkMode::Nat) {
        let slot = resources.naming.slot(index);
        resources.firewall.add_admitted(&slot.interface, slot.guest);
    }
    slot
}

async fn finish(resources: &Arc<Resources>, machine: &LockedMachine, action: Action) {
    let finished = match (action, machine.record().process) {
        (Action::Unpause, Some(process)) => {
            let unpaused = pause::unpause(resources, machine, false).await;
            watch::watch(resources, machine, process);
            unpaused
        }
        (Action::Stop, _) => shutdown::stop(resources, machine).await,
        (Action::Remove, _) => shutdown::remove(resources, machine).await.map_err(ManagerError::from),
        _ => shutdown::end_run(resources, machine, None).await,
    };
    if let Err(error) = finished {
        tracing::error!(machine = %machine.id, ?action, %error, "the recovery of a microVM failed; it is tried again");
    }
}

/// Removes jails and interfaces that no record names, and makes the spare interfaces.
async fn remove_strays(resources: &Arc<Resources>) {
    let jails = resources.jails.clone();
    let found = on_host("listing jails", move || Ok::<_, std::io::Error>(jails.list())).await;
    // A jail is made after its record, so the jails are listed before the records are looked up.
    let strays = found.unwrap_or_default().into_iter().filter(|id| !resources.machines.contains_id(*id));
    let removed = strays.map(|id| async move {
        if let Err(error) = remove_stray_jail(resources, id).await {
            tracing::warn!(machine = %id, %error, "a jail without a record could not be removed; the next start tries again");
        }
    });
    join_all(removed).await;
    if let Err(error) = resources.remove_interfaces(resources.spare_interfaces()).await {
        tracing::warn!(%error, "interfaces without a record could not be removed");
    }
    if let Err(error) = resources.make_spare_interfaces().await {
        tracing::warn!(%error, "no spare interfaces were made; microVMs make their own");
    }
}

/// Removes a jail with its control groups and processes.
async fn remove_stray_jail(resources: &Resources, id: WorkspaceId) -> Result<(), HostError> {
    shutdown::kill_all_of(id).await?;
    let jails = resources.jails.clone();
    on_host("removing a jail", move || jails.remove(id)).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recovery_removes_disks_of_unacknowledged_machines_only() {
        for (phase, is_alive, expected) in [
            (MachinePhase::Reserved, false, Action::Remove),
            (MachinePhase::Reserved, true, Action::Remove),
            (MachinePhase::Configured, false, Action::End),
            (MachinePhase::Configured, true, Action::End),
            (MachinePhase::Running, true, Action::Adopt),
            (MachinePhase::Running, false, Action::End),
            (MachinePhase::Paused, true, Action::Unpause),
            (MachinePhase::Paused, false, Action::End),
            (MachinePhase::Ending, true, Action::Stop),
            (MachinePhase::Ending, false, Action::End),
            (MachinePhase::Stopped, false, Action::Keep),
            (MachinePhase::Removing, true, Action::Remove),
            (MachinePhase::Removing, false, Action::Remove),
        ] {
            assert_eq!(action(phase, is_alive), expected, "{phase} {is_alive}");
        }
    }
}
