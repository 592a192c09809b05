//! What a manager does first: takes back the microVMs that run, finishes or undoes what an earlier one had begun, and
//! removes what belongs to nobody.

use std::collections::HashSet;
use std::sync::Arc;

use emergent_wire::WorkspaceId;
use emergent_wire::manager::MachinePhase;
use emergent_wire::workspace::NetworkMode;
use futures_util::future::join_all;

use crate::error::{ManagerError, on_host};
use crate::machine::{Machine, kill};
use crate::manager::Manager;
use crate::process::{self, Process};
use crate::record::Record;

/// What to do with a microVM that was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// It runs: look after it.
    Adopt,
    /// It runs but for a moment: let it go on, and look after it.
    GoOn,
    /// Nothing of it may run; its disk stays.
    End,
    /// It was never finished, or was being removed.
    Remove,
}

/// Pure: from what is written and whether its process lives to what is to be done.
fn step(record: &Record, lives: bool) -> Step {
    match (record.phase, lives) {
        (MachinePhase::Running, true) => Step::Adopt,
        (MachinePhase::Paused, true) => Step::GoOn,
        (MachinePhase::Reserved | MachinePhase::Removing, _) => Step::Remove,
        _ => Step::End,
    }
}

impl Manager {
    pub(crate) async fn recover(self: &Arc<Self>) -> Result<(), ManagerError> {
        let (records, snapshots) = (self.records.clone(), self.snapshots.clone());
        let found = on_host("reading what microVMs there are", move || {
            snapshots.sweep()?;
            records.load()
        })
        .await?;
        for record in &found {
            // The lowest are given first, so what is taken must be known before anything else.
            if let Some(index) = record.slot
                && !self.slots.take_back(index)
            {
                tracing::error!(machine = %record.id, index, "two microVMs have the same slot");
            }
            self.machines().insert(record.id, Machine::new(record.clone()));
        }
        let open = found.iter().filter(|record| record.request.network == NetworkMode::Nat);
        for record in open {
            if let Some(index) = record.slot {
                let slot = self.naming.slot(index);
                self.firewall.expect(&slot.interface, slot.guest);
            }
        }
        join_all(found.iter().map(|record| self.recover_one(record))).await;
        self.remove_strays().await;
        if let Err(error) = self.prepare_interfaces().await {
            tracing::warn!(%error, "no interfaces were made ahead");
        }
        if self.slots.count() > 0 {
            // It is tried again now and then, and by the next microVM.
            if let Err(error) = self.firewall.repair().await {
                tracing::warn!(%error, "the rules of microVMs could not be put back");
            }
        }
        Ok(())
    }

    async fn recover_one(self: &Arc<Self>, record: &Record) {
        let Ok(machine) = self.machine(record.id) else {
            return;
        };
        let _operation = machine.operation.lock().await;
        let lives = record.process.is_some_and(Process::is_alive);
        let step = step(record, lives);
        let done = match (step, record.process) {
            (Step::Adopt, Some(process)) => {
                self.watch(&machine, process);
                Ok(())
            }
            (Step::GoOn, Some(process)) => {
                let gone_on = self.let_go_on(&machine, false).await;
                self.watch(&machine, process);
                gone_on
            }
            (Step::Remove, _) => self.remove_locked(&machine).await,
            _ => {
                let was_running =
                    record.phase == MachinePhase::Running || record.phase == MachinePhase::Paused;
                let why = was_running.then(|| "its process ended while no manager ran".to_owned());
                self.end_run(&machine, why.or_else(|| record.ended.clone())).await
            }
        };
        match done {
            Ok(()) => {
                tracing::info!(machine = %record.id, phase = %record.phase, lives, ?step, "a microVM was found")
            }
            Err(error) => {
                tracing::error!(machine = %record.id, phase = %record.phase, ?step, %error, "a microVM that was found could not be taken back");
            }
        }
    }

    /// Removes jails, control groups, processes and interfaces that no record names.
    async fn remove_strays(self: &Arc<Self>) {
        let known: HashSet<WorkspaceId> = self.machines().keys().copied().collect();
        let strays: Vec<WorkspaceId> =
            self.jails.list().into_iter().filter(|id| !known.contains(id)).collect();
        for id in strays {
            for process in process::of_machine(&id.to_string()) {
                if let Err(error) = kill(process).await {
                    tracing::warn!(machine = %id, %error, "a process that belongs to nobody could not be ended");
                }
            }
            let jails = self.jails.clone();
            if let Err(error) = on_host("removing a jail", move || jails.remove(id)).await {
                tracing::warn!(machine = %id, %error, "a jail that belongs to nobody could not be removed");
            }
        }
        if let Err(error) = self.remove_interfaces(0).await {
            tracing::warn!(%error, "interfaces that belong to nobody could not be removed");
        }
    }
}

#[cfg(test)]
mod tests {
    use emergent_wire::id::InstallationId;
    use emergent_wire::manager::MachineRequest;
    use emergent_wire::workspace::ResourceLimits;

    use super::*;

    #[test]
    fn a_disk_is_removed_only_where_nobody_was_told_of_it() {
        let request = MachineRequest {
            installation: InstallationId::generate(),
            image: "i".into(),
            limits: ResourceLimits::default(),
            network: NetworkMode::Nat,
            snapshot: None,
        };
        let mut record = Record::new(WorkspaceId::generate(), request);
        for (phase, lives, expected) in [
            (MachinePhase::Reserved, false, Step::Remove),
            (MachinePhase::Reserved, true, Step::Remove),
            (MachinePhase::Configured, false, Step::End),
            (MachinePhase::Configured, true, Step::End),
            (MachinePhase::Running, true, Step::Adopt),
            (MachinePhase::Running, false, Step::End),
            (MachinePhase::Paused, true, Step::GoOn),
            (MachinePhase::Paused, false, Step::End),
            (MachinePhase::Stopped, false, Step::End),
            (MachinePhase::Stopped, true, Step::End),
            (MachinePhase::Removing, true, Step::Remove),
            (MachinePhase::Removing, false, Step::Remove),
        ] {
            record.phase = phase;
            assert_eq!(step(&record, lives), expected, "{phase} {lives}");
        }
    }
}
