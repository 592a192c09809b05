//! Tells the guards (memory, disk) when there is something to guard: while no command runs they sleep.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use crate::agent::Agent;
use crate::{machine, procfs};

/// More processes than an idle sandbox has: the agent, what holds its channels, and what was started ahead.
const MOST_IDLE: usize = 24;

/// How many commands have begun.
#[derive(Default)]
pub(crate) struct Activity {
    begun: Mutex<u64>,
    changed: Condvar,
}

impl Activity {
    fn lock(&self) -> MutexGuard<'_, u64> {
        self.begun.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A command has begun: its process must exist, or a guard that looks just then goes back to sleep for good.
    pub(crate) fn begin(&self) {
        *self.lock() += 1;
        self.changed.notify_all();
    }

    /// To be asked before a guard looks around.
    pub(crate) fn count(&self) -> u64 {
        *self.lock()
    }

    /// Waits until a command has begun since `seen`, if nothing runs now. False when something runs.
    pub(crate) fn wait_if_idle(&self, agent: &Agent, seen: u64) -> bool {
        // Looking at each process takes long when there are many, and many are not idle. (A virtual machine's kernel has threads
        // that are listed like processes.)
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
