//! The microVMs of one manager, by id.

use std::collections::HashMap;
use std::sync::Arc;

use emergent_wire::WorkspaceId;
use parking_lot::Mutex;

use crate::error::{ManagerError, NotFound};
use crate::machine::{LockedMachine, Machine};
use crate::record::DamagedRecord;

/// The microVMs of one manager.
#[derive(Default)]
pub(crate) struct Registry {
    machines: Mutex<HashMap<WorkspaceId, Entry>>,
    /// Held while a microVM with a damaged record is removed.
    pub(crate) removing_damaged: tokio::sync::Mutex<()>,
}

enum Entry {
    Machine(Arc<Machine>),
    Damaged(DamagedRecord),
}

impl Entry {
    fn machine(&self) -> Result<&Arc<Machine>, DamagedRecord> {
        match self {
            Self::Machine(machine) => Ok(machine),
            Self::Damaged(record) => Err(record.clone()),
        }
    }
}

impl Registry {
    pub(crate) fn get(&self, id: WorkspaceId) -> Result<Arc<Machine>, ManagerError> {
        let machines = self.machines.lock();
        let entry = machines.get(&id).ok_or(NotFound::Machine(id))?;
        Ok(Arc::clone(entry.machine()?))
    }

    /// All microVMs whose records are readable.
    pub(crate) fn all(&self) -> Vec<Arc<Machine>> {
        self.machines.lock().values().filter_map(|entry| entry.machine().ok().cloned()).collect()
    }

    /// The record of a microVM, if it is damaged.
    pub(crate) fn damaged(&self, id: WorkspaceId) -> Option<DamagedRecord> {
        self.machines.lock().get(&id).and_then(|entry| entry.machine().err())
    }

    /// The number of damaged records.
    pub(crate) fn count_damaged(&self) -> usize {
        self.machines.lock().values().filter(|entry| matches!(entry, Entry::Damaged(_))).count()
    }

    pub(crate) fn insert(&self, machine: Arc<Machine>) {
        self.machines.lock().insert(machine.id, Entry::Machine(machine));
    }

    pub(crate) fn insert_damaged(&self, record: DamagedRecord) {
        self.machines.lock().insert(record.id, Entry::Damaged(record));
    }

    pub(crate) fn remove(&self, id: WorkspaceId) {
        self.machines.lock().remove(&id);
    }

    /// Whether there is a microVM with this id, with a readable or a damaged record.
    pub(crate) fn contains_id(&self, id: WorkspaceId) -> bool {
        self.machines.lock().contains_key(&id)
    }

    /// Whether this microVM is registered. While an operation waits for a microVM's lock, the microVM can be removed, and
    /// another can be created with its id.
    pub(crate) fn contains(&self, machine: &Arc<Machine>) -> bool {
        self.get(machine.id).is_ok_and(|registered| Arc::ptr_eq(&registered, machine))
    }

    /// Locks a registered microVM.
    pub(crate) async fn lock(&self, id: WorkspaceId) -> Result<LockedMachine, ManagerError> {
        let machine = self.get(id)?.lock().await;
        if self.contains(&machine) { Ok(machine) } else { Err(NotFound::Machine(id).into()) }
    }

    /// Locks the microVM of this id; registers `new` if there is none.
    pub(crate) async fn lock_or_insert(
        &self,
        id: WorkspaceId,
        new: impl Fn() -> Arc<Machine>,
    ) -> Result<LockedMachine, DamagedRecord> {
        loop {
            let machine = {
                let mut machines = self.machines.lock();
                let entry = machines.entry(id).or_insert_with(|| Entry::Machine(new()));
                Arc::clone(entry.machine()?)
            };
            let machine = machine.lock().await;
            if self.contains(&machine) {
                return Ok(machine);
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
        let removing = registry.lock_or_insert(id, new).await.unwrap();
        let (waiting, creating, ()) = tokio::join!(biased; registry.lock(id), registry.lock_or_insert(id, new), async {
            registry.remove(id);
            drop(removing);
        });
        let refused = waiting.err();
        assert!(matches!(refused, Some(ManagerError::NotFound(NotFound::Machine(of))) if of == id));
        assert!(registry.contains(&creating.unwrap()), "the id can be used again");
    }

    #[tokio::test]
    async fn a_machine_with_a_damaged_record_is_not_created_again() {
        let directory = tempfile::tempdir().unwrap();
        let (registry, record) = (Registry::default(), record());
        let records = Records::open(directory.path()).unwrap();
        let damaged = DamagedRecord { id: record.id, slot: None, network: None, reason: String::new() };
        registry.insert_damaged(damaged.clone());
        let new = || Machine::new(record.clone(), records.clone());
        assert_eq!(registry.lock_or_insert(record.id, new).await.err(), Some(damaged));
        assert!(registry.contains_id(record.id) && registry.all().is_empty());
    }
}
