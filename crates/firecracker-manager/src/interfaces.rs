//! The interfaces of a manager's slots: some are made ahead, all are used again, and removed when nobody needs them.
//!
//! Invariant: an interface is removed only while its slot is free, and each is made or removed by one at a time. Who takes a
//! slot and finds its interface removed makes it again.

use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::slot::{Naming, Slot, Slots};
use crate::tap;

/// The interfaces of one manager. Everything here blocks.
#[derive(Debug)]
pub(crate) struct Interfaces {
    naming: Naming,
    /// Held for each change; true when none is made any more.
    is_closed: Mutex<bool>,
}

impl Interfaces {
    pub(crate) fn new(naming: Naming) -> Self {
        Self { naming, is_closed: Mutex::default() }
    }

    fn change(&self) -> MutexGuard<'_, bool> {
        self.is_closed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes the one of a slot, unless it is there.
    pub(crate) fn ensure(&self, slot: &Slot) -> io::Result<()> {
        let _change = self.change();
        tap::ensure(slot)
    }

    /// Makes those of the slots that are given first, so that a start finds its own there.
    pub(crate) fn make_ahead(&self, slots: &Slots, count: u32) -> io::Result<()> {
        for index in 0..count {
            let is_closed = self.change();
            if !*is_closed && slots.is_free(index) {
                tap::ensure(&self.naming.slot(index))?;
            }
        }
        Ok(())
    }

    /// Removes those that nobody uses, but for those of the first slots.
    pub(crate) fn remove_unused(&self, slots: &Slots, but: u32) -> io::Result<()> {
        let prefix = self.naming.prefix();
        for interface in tap::list(&prefix)? {
            let index = interface.strip_prefix(&prefix).and_then(|index| index.parse::<u32>().ok());
            let _change = self.change();
            if index.is_some_and(|index| index >= but && slots.is_free(index)) {
                tap::remove(&interface)?;
            }
        }
        Ok(())
    }

    /// None is made ahead after this.
    pub(crate) fn close(&self) {
        *self.change() = true;
    }
}
