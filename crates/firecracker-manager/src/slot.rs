//! Slots: one number decides everything that must differ between microVMs that run at once.
//!
//! ```text
//!  index ─▶ interface  fc1a2b3c-7
//!        ─▶ network    10.81.0.28/30: .29 is the host, .30 the microVM
//!        ─▶ MAC        06:00 and the address
//!        ─▶ user       1911333639
//! ```
//!
//! Invariant: an index is taken by at most one microVM. Who has taken one is written in its record before anything is made.

use std::collections::BTreeSet;
use std::net::Ipv4Addr;
use std::sync::{Mutex, PoisonError};

/// So many microVMs may run at once: as many networks of four addresses are in a network of 20 bits.
pub(crate) const MOST: u32 = 1 << (PREFIX - NETWORK_PREFIX);
/// Bits of an address that name a manager's network.
pub(crate) const NETWORK_PREFIX: u8 = 20;
/// Bits of an address that name a slot's network.
pub(crate) const PREFIX: u8 = 30;

/// What all slots of a manager have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Naming {
    /// Tells the interfaces of this manager from all others: 24 bits.
    pub(crate) manager: u32,
    /// The first address of the network that all slots lie in.
    pub(crate) network: Ipv4Addr,
}

impl Naming {
    /// How all interfaces of this manager begin, and its firewall chains.
    pub(crate) fn prefix(&self) -> String {
        format!("fc{:06x}-", self.manager & 0x00ff_ffff)
    }

    /// The user of the first slot. They lie where no distribution and no range for containers has any, and those of two
    /// managers on a host are hardly ever the same.
    fn first_uid(&self) -> u32 {
        const FIRST: u32 = 1_900_000_000;
        FIRST + (self.manager & 0xffff) * MOST
    }

    /// One slot.
    pub(crate) fn slot(&self, index: u32) -> Slot {
        let base = u32::from(self.network) + index * 4;
        let guest = Ipv4Addr::from(base + 2);
        let [a, b, c, d] = guest.octets();
        Slot {
            index,
            interface: format!("{}{index}", self.prefix()),
            host: Ipv4Addr::from(base + 1),
            guest,
            mac: format!("06:00:{a:02x}:{b:02x}:{c:02x}:{d:02x}"),
            uid: self.first_uid() + index,
        }
    }
}

/// A microVM's own place on the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Slot {
    pub(crate) index: u32,
    /// The TAP interface.
    pub(crate) interface: String,
    /// The host's address on it.
    pub(crate) host: Ipv4Addr,
    /// The microVM's address.
    pub(crate) guest: Ipv4Addr,
    /// The microVM's hardware address.
    pub(crate) mac: String,
    /// Who its process runs as; a group of the same number goes with it.
    pub(crate) uid: u32,
}

/// The slots that are taken.
#[derive(Debug)]
pub(crate) struct Slots {
    most: u32,
    taken: Mutex<BTreeSet<u32>>,
}

impl Slots {
    pub(crate) fn new(most: u32) -> Self {
        Self { most: most.min(MOST), taken: Mutex::default() }
    }

    /// Takes the lowest index that is free, so that what was made for it is used again.
    pub(crate) fn take(&self) -> Option<u32> {
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let free = (0..self.most).find(|index| !taken.contains(index))?;
        taken.insert(free);
        Some(free)
    }

    /// Takes an index that a record says is its own. False when another has it.
    pub(crate) fn take_back(&self, index: u32) -> bool {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner).insert(index)
    }

    pub(crate) fn release(&self, index: u32) {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner).remove(&index);
    }

    /// Does something with a slot that nobody has, and that nobody gets meanwhile.
    pub(crate) fn while_free<T>(&self, index: u32, step: impl FnOnce() -> T) -> Option<T> {
        if !self.take_back(index) {
            return None;
        }
        let done = step();
        self.release(index);
        Some(done)
    }

    pub(crate) fn count(&self) -> usize {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    pub(crate) fn most(&self) -> u32 {
        self.most
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;

    const NAMING: Naming = Naming { manager: 0x1a_2b3c, network: Ipv4Addr::new(10, 81, 0, 0) };

    #[test]
    fn a_slot_is_all_that_must_differ() {
        let slot = NAMING.slot(7);
        assert_eq!(slot.interface, "fc1a2b3c-7");
        assert_eq!((slot.host, slot.guest), (Ipv4Addr::new(10, 81, 0, 29), Ipv4Addr::new(10, 81, 0, 30)));
        assert_eq!((slot.mac.as_str(), slot.uid), ("06:00:0a:51:00:1e", 1_911_333_639));
    }

    #[test]
    fn no_two_of_all_slots_share_anything() {
        let mut seen = HashSet::new();
        for index in 0..MOST {
            let slot = NAMING.slot(index);
            // An interface's name has at most 15 characters.
            assert!(slot.interface.len() <= 15, "{}", slot.interface);
            assert_eq!(slot.guest.octets()[..2], [10, 81]);
            assert!(
                seen.insert(slot.interface) && seen.insert(slot.mac) && seen.insert(slot.uid.to_string())
            );
            assert!(seen.insert(slot.guest.to_string()) && seen.insert(slot.host.to_string()));
        }
    }

    #[test]
    fn many_at_once_get_different_slots() {
        let slots = Slots::new(300);
        let taken: Vec<Option<u32>> = std::thread::scope(|scope| {
            let takers: Vec<_> =
                (0..8).map(|_| scope.spawn(|| (0..50).map(|_| slots.take()).collect::<Vec<_>>())).collect();
            takers.into_iter().flat_map(|taker| taker.join().unwrap()).collect()
        });
        let given: HashSet<u32> = taken.iter().flatten().copied().collect();
        assert_eq!((given.len(), taken.iter().flatten().count()), (300, 300));
        assert_eq!(taken.iter().filter(|slot| slot.is_none()).count(), 100);
    }

    proptest! {
        #[test]
        fn what_is_taken_is_never_given(orders in proptest::collection::vec(0_u32..12, 0..200)) {
            let slots = Slots::new(8);
            let mut held = BTreeSet::new();
            for order in orders {
                if order < 8 {
                    slots.release(order);
                    held.remove(&order);
                } else if let Some(index) = slots.take() {
                    prop_assert!(index < 8 && held.insert(index));
                } else {
                    prop_assert_eq!(held.len(), 8);
                }
                prop_assert_eq!(slots.count(), held.len());
            }
        }
    }
}
