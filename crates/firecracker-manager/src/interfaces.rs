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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use std::net::Ipv4Addr;
    use std::path::Path;
    use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

    use super::*;

    #[test]
    fn who_has_a_slot_has_its_interface_whatever_is_made_and_removed_meanwhile() {
        const SLOTS: u32 = 4;
        let naming = Naming { manager: std::process::id(), network: Ipv4Addr::new(10, 255, 240, 0) };
        let (interfaces, slots) = (Interfaces::new(naming), Slots::new(SLOTS));
        let (is_done, rounds) = (AtomicBool::new(false), AtomicU32::new(0));
        let use_slots = || {
            for _ in 0..10 {
                let index = slots.take(0, 0).unwrap();
                let slot = naming.slot(index);
                interfaces.ensure(&slot).unwrap();
                // As long as all of them are removed and made once more.
                let begun = rounds.load(Ordering::Relaxed);
                while rounds.load(Ordering::Relaxed) < begun + 2 && !is_done.load(Ordering::Relaxed) {
                    assert!(Path::new("/sys/class/net").join(&slot.interface).exists());
                    std::thread::yield_now();
                }
                slots.release(index);
            }
        };
        std::thread::scope(|scope| {
            let tidy = scope.spawn(|| {
                let mut tidied = Ok(());
                while tidied.is_ok() && !is_done.load(Ordering::Relaxed) {
                    tidied = interfaces.make_ahead(&slots, SLOTS);
                    tidied = tidied.and(interfaces.remove_unused(&slots, 0));
                    rounds.fetch_add(1, Ordering::Relaxed);
                }
                is_done.store(true, Ordering::Relaxed);
                tidied
            });
            let users = [scope.spawn(use_slots), scope.spawn(use_slots)];
            let used = users.map(|user| user.join());
            is_done.store(true, Ordering::Relaxed);
            let tidied = tidy.join();
            interfaces.close();
            interfaces.remove_unused(&Slots::new(SLOTS), 0).unwrap();
            used.into_iter().for_each(|used| used.unwrap());
            tidied.unwrap().unwrap();
        });
        interfaces.make_ahead(&slots, SLOTS).unwrap();
        assert_eq!(tap::list(&naming.prefix()).unwrap(), Vec::<String>::new());
    }
}
