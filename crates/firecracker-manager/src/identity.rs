//! The identity of a manager: its number and its network. It is chosen when the data directory is first opened, and saved.

use std::fs;
use std::io;
use std::net::Ipv4Addr;
use std::path::Path;

use procfs::net::RouteEntry;
use serde::{Deserialize, Serialize};

use crate::record::write_whole;
use crate::slot::NETWORK_PREFIX;

/// The identity of a manager.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Identity {
    /// A number of 24 bits, which is part of the names of interfaces, chains and control groups.
    pub(crate) manager: u32,
    /// The network of its microVMs.
    pub(crate) network: Ipv4Addr,
}

impl Identity {
    pub(crate) fn load_or_choose(data_dir: &Path) -> io::Result<Self> {
        let path = data_dir.join("manager.json");
        match fs::read(&path) {
            Ok(bytes) => Ok(serde_json::from_slice(&bytes)?),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let routes = procfs::net::route().unwrap_or_default();
                let chosen = Self::choose(&routes)?;
                write_whole(&path, &serde_json::to_vec(&chosen)?)?;
                Ok(chosen)
            }
            Err(error) => Err(error),
        }
    }

    /// Chooses a random number, and a private network that no route of the host leads to.
    fn choose(routes: &[RouteEntry]) -> io::Result<Self> {
        let mut random = [0; 4];
        getrandom::fill(&mut random).map_err(|error| io::Error::other(error.to_string()))?;
        let manager = u32::from_le_bytes(random) & 0x00ff_ffff;
        let mut free = candidates(manager).filter(|network| !is_routed(*network, routes));
        let network = free.next().ok_or_else(|| {
            io::Error::other("the host has routes to all private networks: none is left for microVMs")
        })?;
        Ok(Self { manager, network })
    }
}

/// All private networks of the right size. Those of 10.0.0.0/8 come first; the seed decides where each range begins.
fn candidates(seed: u32) -> impl Iterator<Item = Ipv4Addr> {
    let size = 1_u32 << (32 - NETWORK_PREFIX);
    let ranges = [
        (Ipv4Addr::new(10, 0, 0, 0), 8),
        (Ipv4Addr::new(172, 16, 0, 0), 12),
        (Ipv4Addr::new(192, 168, 0, 0), 16),
    ];
    ranges.into_iter().flat_map(move |(first, prefix)| {
        let count = 1_u32 << (NETWORK_PREFIX - prefix);
        (0..count)
            .map(move |step| Ipv4Addr::from(u32::from(first) + (seed.wrapping_add(step) % count) * size))
    })
}

/// Whether a route of the host overlaps with a manager's network. The default route does not count.
fn is_routed(network: Ipv4Addr, routes: &[RouteEntry]) -> bool {
    let network = u32::from(network);
    routes.iter().any(|route| {
        let (to, mask) = (u32::from(route.destination), u32::from(route.mask));
        let common = mask & (u32::MAX << (32 - NETWORK_PREFIX));
        mask != 0 && to & common == network & common
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use procfs::FromRead as _;
    use procfs::net::RouteEntries;

    use super::*;

    const ROUTES: &str = "Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT\n\
        eth0 00000000 0100000A 0003 0 0 0 00000000 0 0 0\n\
        eth0 0000200A 00000000 0001 0 0 0 00F0FFFF 0 0 0\n\
        docker0 000011AC 00000000 0001 0 0 0 0000FFFF 0 0 0\n";

    fn parse(routes: &str) -> Vec<RouteEntry> {
        RouteEntries::from_read(routes.as_bytes()).unwrap().0
    }

    #[test]
    fn networks_that_the_host_has_routes_to_are_not_chosen() {
        let routes = parse(ROUTES);
        assert!(is_routed(Ipv4Addr::new(10, 32, 0, 0), &routes));
        assert!(!is_routed(Ipv4Addr::new(10, 33, 0, 0), &routes));
        let wide = parse(&ROUTES.replace("00F0FFFF", "0000F0FF"));
        assert!(is_routed(Ipv4Addr::new(10, 47, 0, 0), &wide));
        for _ in 0..50 {
            let chosen = Identity::choose(&routes).unwrap();
            assert_ne!(chosen.network, Ipv4Addr::new(10, 32, 0, 0));
            assert!(chosen.manager < 1 << 24 && chosen.network.octets()[0] == 10);
        }
        // The host's own network is all of 10.0.0.0/8.
        let all = parse(&ROUTES.replace("00F0FFFF", "000000FF"));
        let [a, b, c, _] = Identity::choose(&all).unwrap().network.octets();
        assert!(a == 172 && (16..32).contains(&b) && b != 17 && c % 16 == 0, "{a}.{b}.{c}.0");
    }

    #[test]
    fn an_identity_is_chosen_once() {
        let directory = tempfile::tempdir().unwrap();
        let first = Identity::load_or_choose(directory.path()).unwrap();
        assert_eq!(Identity::load_or_choose(directory.path()).unwrap(), first);
    }
}
