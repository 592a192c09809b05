//! Slots: everything that must differ between microVMs that run at the same time is derived from one number.
//!
//! ```text
//!  index ─▶ interface  fc1a2b3c-7
//!        ─▶ network    10.81.0.28/30: .29 is the host, .30 the microVM
//!        ─▶ MAC        06:00 and the address
//!        ─▶ user       1911333639
//! ```
//!
//! Invariant: at most one microVM has an index. Its record names the index before anything is made for it.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;

use parking_lot::Mutex;

/// The most slots: the number of networks with a prefix of 30 bits in one of 20 bits.
pub(crate) const MOST: u32 = 1 << (PREFIX - NETWORK_PREFIX);
/// The prefix length of a manager's network.
pub(crate) const NETWORK_PREFIX: u8 = 20;
/// The prefix length of a slot's network.
pub(crate) const PREFIX: u8 = 30;
/// An upper bound of the bytes that a microVM uses until its agent is ready. Measured: 28 MiB of 192, 42 of 1024, 164 of
/// 4096, 382 of 16384. The kernel's tables grow with its memory.
const fn start_bytes(memory: u64) -> u64 {
    let used = (64 << 20) + memory / 32;
    if used < memory { used } else { memory }
}

/// The parameters that all slots of a manager share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Naming {
    /// The manager's number, of 24 bits. It is part of its interfaces' names.
    pub(crate) manager: u32,
    /// The first address of the manager's network.
    pub(crate) network: Ipv4Addr,
}

impl Naming {
    /// The prefix of all interfaces and firewall chains of this manager.
    pub(crate) fn prefix(&self) -> String {
        format!("fc{:06x}-", self.manager & 0x00ff_ffff)
    }

    /// The user id of the first slot. No distribution and no container engine uses this range, and two managers on one host
    /// rarely have the same part of it.
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

/// The resources of one microVM on the host.
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
    /// The user id of its process. The group id is the same.
    pub(crate) uid: u32,
}

/// The slots of one manager.
#[derive(Debug)]
pub(crate) struct Slots {
    most: u32,
    /// The taken indices, each with the bytes that its microVM will use to start. 0 after the start.
    taken: Mutex<BTreeMap<u32, u64>>,
}

/// Why a microVM gets no slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoSlot {
    /// All are taken.
    #[error("all {most} slots for microVMs are taken: stop or destroy some, or raise FIRECRACKER_MAX_VMS")]
    AllTaken {
        /// The number of slots.
        most: u32,
    },
    /// The host has too little memory.
    #[error(
        "the host has {} MiB of memory left, the microVM wants {} MiB: stop others, or ask for less",
        left >> 20,
        wanted >> 20
    )]
    TooLittleMemory {
        /// The bytes that are available and not needed by microVMs that start.
        left: u64,
        /// The bytes of the microVM.
        wanted: u64,
    },
}

impl Slots {
    pub(crate) fn new(most: u32) -> Self {
        Self { most: most.min(MOST), taken: Mutex::default() }
    }

    /// Takes the lowest free index, so that its interface is reused. `memory` is the limit of its microVM and `available` is
    /// the available memory of the host. It must be enough for this microVM and for all others that start.
    pub(crate) fn take(&self, memory: u64, available: u64) -> Result<u32, NoSlot> {
        let mut taken = self.taken.lock();
        let all_taken = NoSlot::AllTaken { most: self.most };
        let index = (0..self.most).find(|index| !taken.contains_key(index)).ok_or(all_taken)?;
        let left = available.saturating_sub(taken.values().sum());
        if left < memory {
            return Err(NoSlot::TooLittleMemory { left, wanted: memory });
        }
        taken.insert(index, start_bytes(memory));
        Ok(index)
    }

    /// Takes the index that a record names. False if another microVM has it.
    pub(crate) fn take_back(&self, index: u32) -> bool {
        let mut taken = self.taken.lock();
        let is_free = !taken.contains_key(&index);
        if is_free {
            taken.insert(index, 0);
        }
        is_free
    }

    /// Ends a start: the host's available memory now shows the memory of this microVM.
    pub(crate) fn has_started(&self, index: u32) {
        if let Some(memory) = self.taken.lock().get_mut(&index) {
            *memory = 0;
        }
    }

    pub(crate) fn release(&self, index: u32) {
        self.taken.lock().remove(&index);
    }

    pub(crate) fn is_free(&self, index: u32) -> bool {
        !self.taken.lock().contains_key(&index)
    }

    pub(crate) fn count(&self) -> usize {
        self.taken.lock().len()
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
    fn a_slot_is_derived_from_its_index() {
        let slot = NAMING.slot(7);
        assert_eq!(slot.interface, "fc1a2b3c-7");
        assert_eq!((slot.host, slot.guest), (Ipv4Addr::new(10, 81, 0, 29), Ipv4Addr::new(10, 81, 0, 30)));
        assert_eq!((slot.mac.as_str(), slot.uid), ("06:00:0a:51:00:1e", 1_911_333_639));
    }

    #[test]
    fn no_two_slots_share_a_resource() {
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
    fn concurrent_takers_get_different_slots() {
        let slots = Slots::new(300);
        let taken: Vec<Result<u32, NoSlot>> = std::thread::scope(|scope| {
            let takers: Vec<_> = (0..8)
                .map(|_| scope.spawn(|| (0..50).map(|_| slots.take(0, 0)).collect::<Vec<_>>()))
                .collect();
            takers.into_iter().flat_map(|taker| taker.join().unwrap()).collect()
        });
        let given: HashSet<u32> = taken.iter().flatten().copied().collect();
        assert_eq!((given.len(), taken.iter().flatten().count()), (300, 300));
        assert_eq!(taken.iter().filter(|slot| **slot == Err(NoSlot::AllTaken { most: 300 })).count(), 100);
    }

    #[test]
    fn concurrent_starts_do_not_share_the_same_memory() {
        const GIB: u64 = 1 << 30;
        const START: u64 = start_bytes(GIB);
        let slots = Slots::new(300);
        assert_eq!(slots.take(GIB, GIB), Ok(0));
        // The available memory does not show the first one yet.
        assert_eq!(slots.take(GIB, GIB), Err(NoSlot::TooLittleMemory { left: GIB - START, wanted: GIB }));
        assert_eq!(slots.take(GIB - START, GIB), Ok(1));
        slots.has_started(0);
        slots.release(1);
        assert_eq!(slots.take(GIB / 2, GIB - START), Ok(1));
        // A small microVM uses at most its limit.
        assert_eq!((slots.take(1 << 20, GIB), slots.take(GIB, 2 * GIB)), (Ok(2), Ok(3)));
        let starting = start_bytes(GIB / 2) + (1 << 20) + START;
        assert_eq!(slots.take(1, starting), Err(NoSlot::TooLittleMemory { left: 0, wanted: 1 }));
        assert_eq!(slots.take(1, starting + 1), Ok(4));
    }

    proptest! {
        #[test]
        fn a_taken_slot_is_not_given_again(orders in proptest::collection::vec(0_u32..12, 0..200)) {
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
