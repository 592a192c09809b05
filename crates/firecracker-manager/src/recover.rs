//! What a manager does first: takes back the microVMs that run, finishes or undoes what an earlier one had begun, and
//! removes what belongs to nobody.

use std::sync::{Arc, PoisonError};

use emergent_wire::WorkspaceId;
use emergent_wire::manager::MachinePhase;
use emergent_wire::workspace::NetworkMode;
use futures_util::future::join_all;

use crate::error::{ManagerError, on_host};
use crate::machine::{Machine, kill};
use crate::manager::Manager;
use crate::process::{self, Process};

/// What to do with a microVM that was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// It runs: look after it.
    Adopt,
    /// It runs but for a moment: let it go on, and look after it.
    GoOn,
    /// It was being stopped, and has not ended yet.
    Stop,
    /// Nothing of it may run; its disk stays.
    End,
    /// It has nothing but its disk.
    Leave,
    /// It was never finished, or was being removed.
    Remove,
}

/// Pure: from what is written and whether its process lives to what is to be done.
fn step(phase: MachinePhase, lives: bool) -> Step {
    match (phase, lives) {
        (MachinePhase::Running, true) => Step::Adopt,
        (MachinePhase::Paused, true) => Step::GoOn,
        (MachinePhase::Ending, true) => Step::Stop,
        (MachinePhase::Reserved | MachinePhase::Removing, _) => Step::Remove,
        (MachinePhase::Stopped, _) => Step::Leave,
        _ => Step::End,
    }
}

impl Manager {
    /// Takes back what runs, and looks after all else in the background: one microVM that takes long to be ended keeps
    /// nobody from the others.
    pub(crate) async fn recover(self: &Arc<Self>) -> Result<(), ManagerError> {
        let (records, snapshots) = (self.records.clone(), self.snapshots.clone());
        let found = on_host("reading what microVMs there are", move || {
            snapshots.sweep()?;
            records.load()
        })
        .await?;
        let mut left = Vec::new();
        for mut record in found {
            if record.boot.as_ref().is_some_and(|boot| *boot != self.boot) {
                record.process = None;
            }
            let step = step(record.phase, record.process.is_some_and(Process::is_alive));
            tracing::info!(machine = %record.id, phase = %record.phase, ?step, "a microVM was found");
            if step == Step::End {
                if record.phase == MachinePhase::Running || record.phase == MachinePhase::Paused {
                    record.ended = Some("its process ended while no manager ran".to_owned());
                }
                record.phase = MachinePhase::Ending;
            }
            // What is taken must be known before any is given.
            if let Some(index) = record.slot {
                if self.slots.take_back(index) {
                    if record.request.network == NetworkMode::Nat {
                        let slot = self.naming.slot(index);
                        self.firewall.expect(&slot.interface, slot.guest);
                    }
                } else {
                    tracing::error!(machine = %record.id, index, "two microVMs have the same slot");
                    record.slot = None;
                }
            }
            let (id, process) = (record.id, record.process);
            let machine = Machine::new(record);
            self.machines().insert(id, Arc::clone(&machine));
            match (step, process) {
                (Step::Adopt, Some(process)) => self.watch(&machine, process),
                (Step::Leave, _) => {}
                _ => {
                    // Before anybody else can: who asks for it waits.
                    let operation = Arc::clone(&machine.operation).lock_owned().await;
                    left.push((machine, step, operation));
                }
            }
        }
        let manager = Arc::clone(self);
        let recovery = tokio::spawn(async move {
            // What runs must not be without its rules; it is tried again now and then, and by the next microVM.
            if let Err(error) = manager.repair_rules().await {
                tracing::warn!(%error, "the rules of microVMs could not be put back");
            }
            let ended = left.into_iter().map(|(machine, step, operation)| {
                let manager = &manager;
                async move {
                    manager.finish(&machine, step).await;
                    drop(operation);
                }
            });
            join_all(ended).await;
            manager.tidy().await;
        });
        *self.recovery.lock().unwrap_or_else(PoisonError::into_inner) = Some(recovery);
        Ok(())
    }

    /// Whether what an earlier manager left is still being looked after.
    pub(crate) fn is_recovering(&self) -> bool {
        let recovery = self.recovery.lock().unwrap_or_else(PoisonError::into_inner);
        recovery.as_ref().is_some_and(|task| !task.is_finished())
    }

    /// Brings a microVM that was found to where it belongs. Its operation is ours.
    async fn finish(self: &Arc<Self>, machine: &Arc<Machine>, step: Step) {
        let record = machine.record();
        let done = match (step, record.process) {
            (Step::GoOn, Some(process)) => {
                let gone_on = self.let_go_on(machine, false).await;
                self.watch(machine, process);
                gone_on
            }
            (Step::Stop, _) => self.stop_locked(machine).await,
            (Step::Remove, _) => self.remove_locked(machine).await,
            _ => self.end_run(machine, None).await,
        };
        if let Err(error) = done {
            tracing::error!(machine = %machine.id, ?step, %error, "a microVM that was found could not be taken back; it is tried again");
        }
    }

    /// Removes what no record names, and makes what is kept ahead.
    async fn tidy(self: &Arc<Self>) {
        let jails = self.jails.clone();
        let strays = on_host("listing jails", move || Ok::<_, std::io::Error>(jails.list())).await;
        // Listed before it is asked which are known: a jail is made after its record.
        let strays = strays.unwrap_or_default().into_iter().filter(|id| self.machine(*id).is_err());
        join_all(strays.map(|id| self.remove_stray(id))).await;
        if let Err(error) = self.remove_interfaces(self.interfaces_ahead()).await {
            tracing::warn!(%error, "interfaces that belong to nobody could not be removed");
        }
        let manager = Arc::clone(self);
        let made = on_host("making interfaces ahead", move || {
            manager.interfaces.make_ahead(&manager.slots, manager.interfaces_ahead())
        });
        if let Err(error) = made.await {
            tracing::warn!(%error, "no interfaces were made ahead");
        }
    }

    /// Removes a jail, its control groups and its processes that no record names.
    async fn remove_stray(&self, id: WorkspaceId) {
        let removed = async {
            let processes = on_host("looking for processes", move || process::of_machine(&id.to_string()));
            for process in processes.await? {
                kill(process).await?;
            }
            let jails = self.jails.clone();
            on_host("removing a jail", move || jails.remove(id)).await
        };
        if let Err(error) = removed.await {
            tracing::warn!(machine = %id, %error, "a jail that belongs to nobody could not be removed");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_is_removed_only_where_nobody_was_told_of_it() {
        for (phase, lives, expected) in [
            (MachinePhase::Reserved, false, Step::Remove),
            (MachinePhase::Reserved, true, Step::Remove),
            (MachinePhase::Configured, false, Step::End),
            (MachinePhase::Configured, true, Step::End),
            (MachinePhase::Running, true, Step::Adopt),
            (MachinePhase::Running, false, Step::End),
            (MachinePhase::Paused, true, Step::GoOn),
            (MachinePhase::Paused, false, Step::End),
            (MachinePhase::Ending, true, Step::Stop),
            (MachinePhase::Ending, false, Step::End),
            (MachinePhase::Stopped, false, Step::Leave),
            (MachinePhase::Removing, true, Step::Remove),
            (MachinePhase::Removing, false, Step::Remove),
        ] {
            assert_eq!(step(phase, lives), expected, "{phase} {lives}");
        }
    }
}
