//! Cleans up after a microVM whose process ends by itself.

use std::sync::Arc;

use emergent_wire::manager::MachinePhase;

use crate::machine::Machine;
use crate::process::Process;
use crate::resources::Resources;
use crate::shutdown;

/// Watches the process of a microVM in the background. The task does not keep the manager alive.
pub(crate) fn watch(resources: &Arc<Resources>, machine: &Arc<Machine>, process: Process) {
    let (resources, machine) = (Arc::downgrade(resources), Arc::clone(machine));
    tokio::spawn(async move {
        process.ended().await;
        let Some(resources) = resources.upgrade() else {
            return;
        };
        let machine = machine.lock().await;
        if !resources.machines.contains(&machine) || machine.record().process != Some(process) {
            return;
        }
        let reason = machine.end_reason();
        if matches!(machine.phase(), MachinePhase::Running | MachinePhase::Paused) {
            tracing::warn!(machine = %machine.id, reason, "a microVM has ended");
        }
        if let Err(error) = shutdown::end_run(&resources, &machine, Some(reason)).await {
            tracing::warn!(machine = %machine.id, %error, "the resources of a microVM that has ended could not be removed; it is tried again");
        }
    });
}
