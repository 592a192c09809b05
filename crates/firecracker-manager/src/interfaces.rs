//! The TAP interfaces of a manager's slots. Some are made before they are needed (spares). Interfaces are reused, and removed
//! when no microVM needs them.
//!
//! Invariant: an interface is removed only while its slot is free, and one thread at a time makes or removes interfaces. A
//! start whose slot has no interface makes it.

use std::io;

use parking_lot::Mutex;

use crate::slot::{Naming, Slot, Slots};
use crate::tap;

/// The interfaces of one manager. Its functions block.
#[derive(Debug)]
pub(crate) struct Interfaces {
    naming: Naming,
    /// Locked for each change. True if no more spares are made.
    is_closed: Mutex<bool>,
}

impl Interfaces {
    pub(crate) fn new(naming: Naming) -> Self {
        Self { naming, is_closed: Mutex::default() }
    }

    /// Makes the interface of a slot, unless it exists.
    pub(crate) fn ensure(&self, slot: &Slot) -> io::Result<()> {
        let _change = self.is_closed.lock();
        tap::ensure(slot)
    }

    /// Makes the interfaces of the first slots, which are the first to be taken.
    pub(crate) fn make_spares(&self, slots: &Slots, count: u32) -> io::Result<()> {
        for index in 0..count {
            let is_closed = self.is_closed.lock();
            if !*is_closed && slots.is_free(index) {
                tap::ensure(&self.naming.slot(index))?;
            }
        }
        Ok(())
    }

    /// Removes the interfaces of free slots, except those of the first `kept` slots.
    pub(crate) fn remove_unused(&self, slots: &Slots, kept: u32) -> io::Result<()> {
        let prefix = self.naming.prefix();
        for interface in tap::list(&prefix)? {
            let index = interface.strip_prefix(&prefix).and_then(|index| index.parse::<u32>().ok());
            let _change = self.is_closed.lock();
            if index.is_some_and(|index| index >= kept && slots.is_free(index)) {
                tap::remove(&interface)?;
            }
        }
        Ok(())
    }

    /// Ends the making of spares.
    pub(crate) fn close(&self) {
        *self.is_closed.lock() = true;
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
    fn an_interface_in_use_survives_concurrent_making_and_removing() {
        const SLOTS: u32 = 4;
        let naming = Naming { manager: std::process::id(), network: Ipv4Addr::new(10, 255, 240, 0) };
        let (interfaces, slots) = (Interfaces::new(naming), Slots::new(SLOTS));
        let (is_done, rounds) = (AtomicBool::new(false), AtomicU32::new(0));
        let use_slots = || {
            for _ in 0..10 {
                let index = slots.take(0, 0).unwrap();
                let slot = naming.slot(index);
                interfaces.ensure(&slot).unwrap();
                // Until all interfaces were removed and made once more.
                let begun = rounds.load(Ordering::Relaxed);
                while rounds.load(Ordering::Relaxed) < begun + 2 && !is_done.load(Ordering::Relaxed) {
                    assert!(Path::new("/sys/class/net").join(&slot.interface).exists());
                    std::thread::yield_now();
                }
                slots.release(index);
            }
        };
        std::thread::scope(|scope| {
            let cleaner = scope.spawn(|| {
                let mut cleaned = Ok(());
                while cleaned.is_ok() && !is_done.load(Ordering::Relaxed) {
                    cleaned = interfaces.make_spares(&slots, SLOTS);
                    cleaned = cleaned.and(interfaces.remove_unused(&slots, 0));
                    rounds.fetch_add(1, Ordering::Relaxed);
                }
                is_done.store(true, Ordering::Relaxed);
                cleaned
            });
            let users = [scope.spawn(use_slots), scope.spawn(use_slots)];
            let used = users.map(|user| user.join());
            is_done.store(true, Ordering::Relaxed);
            let cleaned = cleaner.join();
            interfaces.close();
            interfaces.remove_unused(&Slots::new(SLOTS), 0).unwrap();
            used.into_iter().for_each(|used| used.unwrap());
            cleaned.unwrap().unwrap();
        });
        interfaces.make_spares(&slots, SLOTS).unwrap();
        assert_eq!(tap::list(&naming.prefix()).unwrap(), Vec::<String>::new());
    }
}
