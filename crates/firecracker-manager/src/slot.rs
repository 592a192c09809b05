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

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// So many microVMs may run at once: as many networks of four addresses are in a network of 20 bits.
pub(crate) const MOST: u32 = 1 << (PREFIX - NETWORK_PREFIX);
/// Bits of an address that name a manager's network.
pub(crate) const NETWORK_PREFIX: u8 = 20;
/// Bits of an address that name a slot's network.
pub(crate) const PREFIX: u8 = 30;
/// At most so much of its memory a microVM takes until its agent is ready, in bytes: measured was 28 MiB of 192, 42 of 1024,
/// 164 of 4096, 382 of 16384. A kernel takes the more the more it may have, to describe it.
const fn start_bytes(memory: u64) -> u64 {
    let taken = (64 << 20) + memory / 32;
    if taken < memory { taken } else { memory }
}

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
    /// Each with the memory that its microVM takes to start and has not taken yet, in bytes.
    taken: Mutex<BTreeMap<u32, u64>>,
}

/// Why there is no slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoSlot {
    /// All are taken.
    Full,
    /// So much of the memory is not spoken for, in bytes.
    Memory(u64),
}

impl Slots {
    pub(crate) fn new(most: u32) -> Self {
        Self { most: most.min(MOST), taken: Mutex::default() }
    }

    fn taken(&self) -> MutexGuard<'_, BTreeMap<u32, u64>> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the lowest index that is free, so that what was made for it is used again; if its microVM can have this much
    /// of the memory that was found free, when all others that start have what they take for it.
    pub(crate) fn take(&self, memory: u64, free: u64) -> Result<u32, NoSlot> {
        let mut taken = self.taken();
        let index = (0..self.most).find(|index| !taken.contains_key(index)).ok_or(NoSlot::Full)?;
        let left = free.saturating_sub(taken.values().sum());
        if left < memory {
            return Err(NoSlot::Memory(left));
        }
        taken.insert(index, start_bytes(memory));
        Ok(index)
    }

    /// Takes an index that a record says is its own. False when another has it.
    pub(crate) fn take_back(&self, index: u32) -> bool {
        let mut taken = self.taken();
        let is_free = !taken.contains_key(&index);
        if is_free {
            taken.insert(index, 0);
        }
        is_free
    }

    /// A microVM has started: what it took for that is seen in what is free.
    pub(crate) fn has_started(&self, index: u32) {
        if let Some(memory) = self.taken().get_mut(&index) {
            *memory = 0;
        }
    }

    pub(crate) fn release(&self, index: u32) {
        self.taken().remove(&index);
    }

    pub(crate) fn is_free(&self, index: u32) -> bool {
        !self.taken().contains_key(&index)
    }

    pub(crate) fn count(&self) -> usize {
        self.taken().len()
    }

    pub(crate) fn most(&self) -> u32 {
        self.most
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use std::collections::{BTreeSet, HashSet};

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
        let taken: Vec<Result<u32, NoSlot>> = std::thread::scope(|scope| {
            let takers: Vec<_> = (0..8)
                .map(|_| scope.spawn(|| (0..50).map(|_| slots.take(0, 0)).collect::<Vec<_>>()))
                .collect();
            takers.into_iter().flat_map(|taker| taker.join().unwrap()).collect()
        });
        let given: HashSet<u32> = taken.iter().flatten().copied().collect();
        assert_eq!((given.len(), taken.iter().flatten().count()), (300, 300));
        assert_eq!(taken.iter().filter(|slot| **slot == Err(NoSlot::Full)).count(), 100);
    }

    #[test]
    fn memory_is_given_to_one_only_of_those_that_start_at_once() {
        const GIB: u64 = 1 << 30;
        const START: u64 = start_bytes(GIB);
        let slots = Slots::new(300);
        assert_eq!(slots.take(GIB, GIB), Ok(0));
        // The first has taken nothing yet of what is free.
        assert_eq!(slots.take(GIB, GIB), Err(NoSlot::Memory(GIB - START)));
        assert_eq!(slots.take(GIB - START, GIB), Ok(1));
        slots.has_started(0);
        slots.release(1);
        assert_eq!(slots.take(GIB / 2, GIB - START), Ok(1));
        // A small one takes what it may have and no more.
        assert_eq!((slots.take(1 << 20, GIB), slots.take(GIB, 2 * GIB)), (Ok(2), Ok(3)));
        let starting = start_bytes(GIB / 2) + (1 << 20) + START;
        assert_eq!(slots.take(1, starting), Err(NoSlot::Memory(0)));
        assert_eq!(slots.take(1, starting + 1), Ok(4));
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
                } else if let Ok(index) = slots.take(0, 0) {
                    prop_assert!(index < 8 && held.insert(index));
                } else {
                    prop_assert_eq!(held.len(), 8);
                }
                prop_assert_eq!(slots.count(), held.len());
            }
        }
    }
}
