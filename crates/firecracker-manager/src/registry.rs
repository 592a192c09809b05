//! The microVMs of one manager, by id.

use std::collections::HashMap;
use std::sync::Arc;

use emergent_wire::WorkspaceId;
use parking_lot::Mutex;

use crate::error::NotFound;
use crate::machine::{LockedMachine, Machine};

/// The microVMs of one manager.
#[derive(Default)]
pub(crate) struct Registry {
    machines: Mutex<HashMap<WorkspaceId, Arc<Machine>>>,
}

impl Registry {
    pub(crate) fn get(&self, id: WorkspaceId) -> Result<Arc<Machine>, NotFound> {
        self.machines.lock().get(&id).cloned().ok_or(NotFound::Machine(id))
    }

    pub(crate) fn all(&self) -> Vec<Arc<Machine>> {
        self.machines.lock().values().cloned().collect()
    }

    pub(crate) fn insert(&self, machine: Arc<Machine>) {
        self.machines.lock().insert(machine.id, machine);
    }

    pub(crate) fn remove(&self, id: WorkspaceId) {
        self.machines.lock().remove(&id);
    }

    /// Whether this microVM is registered. While an operation waits for a microVM's lock, the microVM can be removed, and
    /// another can be created with its id.
    pub(crate) fn contains(&self, machine: &Arc<Machine>) -> bool {
        self.machines.lock().get(&machine.id).is_some_and(|registered| Arc::ptr_eq(registered, machine))
    }

    /// Locks a registered microVM.
    pub(crate) async fn lock(&self, id: WorkspaceId) -> Result<LockedMachine, NotFound> {
        let machine = self.get(id)?.lock().await;
        if self.contains(&machine) { Ok(machine) } else { Err(NotFound::Machine(id)) }
    }

    /// Locks the microVM of this id; registers `new` if there is none.
    pub(crate) async fn lock_or_insert(
        &self,
        id: WorkspaceId,
        new: impl Fn() -> Arc<Machine>,
    ) -> LockedMachine {
        loop {
            let machine = Arc::clone(self.machines.lock().entry(id).or_insert_with(&new));
            let machine = machine.lock().await;
            if self.contains(&machine) {
                return machine;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use super::*;
    use crate::record::Records;
    use crate::record::tests::record;

    #[tokio::test]
    async fn an_operation_that_waited_for_a_removed_machine_does_not_get_it() {
        let directory = tempfile::tempdir().unwrap();
        let (registry, record) = (Registry::default(), record());
        let id = record.id;
        let records = Records::open(directory.path()).unwrap();
        let new = || Machine::new(record.clone(), records.clone());
        let removing = registry.lock_or_insert(id, new).await;
        let (waiting, creating, ()) = tokio::join!(biased; registry.lock(id), registry.lock_or_insert(id, new), async {
            registry.remove(id);
            drop(removing);
        });
        assert_eq!(waiting.err(), Some(NotFound::Machine(id)));
        assert!(registry.contains(&creating), "the id can be used again");
    }
}
