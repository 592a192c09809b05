//! Wakes the guards (memory, tasks, disk) when a command starts. They sleep while no command runs.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use crate::agent::Agent;
use crate::{machine, procfs};

/// The most processes of an idle sandbox: the agent, the holders of its channels, the processes started ahead.
const MOST_IDLE: usize = 24;

/// Counts the commands that have been started.
#[derive(Default)]
pub(crate) struct Activity {
    begun: Mutex<u64>,
    changed: Condvar,
}

impl Activity {
    fn lock(&self) -> MutexGuard<'_, u64> {
        self.begun.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A command was started. Its process must exist already: a guard that finds no process sleeps until the next command.
    pub(crate) fn begin(&self) {
        *self.lock() += 1;
        self.changed.notify_all();
    }

    /// The count. A guard reads it before it looks at the processes.
    pub(crate) fn count(&self) -> u64 {
        *self.lock()
    }

    /// If no command runs, waits until the count differs from `seen`. False when a command runs.
    pub(crate) fn wait_if_idle(&self, agent: &Agent, seen: u64) -> bool {
        // Many processes are not idle, and reading each of them takes long. (A virtual machine lists its kernel's threads like
        // processes.)
        let are_many = !machine::is_machine() && procfs::process_ids().count() > MOST_IDLE;
        if are_many || !agent.processes().is_empty() {
            return false;
        }
        let mut begun = self.lock();
        while *begun == seen {
            begun = self.changed.wait(begun).unwrap_or_else(PoisonError::into_inner);
        }
        true
    }
}
