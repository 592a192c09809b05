//! Egress rules of microVMs, in our own chains, which are named after the manager.
//!
//! A microVM with a network reaches the internet and its name servers, from its own address only. It does not reach the
//! host, private networks, the metadata service or other microVMs. Nothing can connect to it. IPv6 is blocked. A microVM
//! without a network sends nothing: only its vsock works. The rules are enforced twice, in `filter` (REJECT) and in a guard
//! table (DROP), because other programs change the chains that jump to ours.
//!
//! All rules are generated from the set of admitted microVMs and replaced in one step. So the admissions of microVMs that
//! start at the same time share one call of `iptables-restore`.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::{Arc, OnceLock};

use emergent_host::firewall::{ESTABLISHED, FILTER, Family, FirewallError, GUARDS, egress_rules, families};
use parking_lot::Mutex;

use crate::error::{HostError, on_host};

/// The rules of one manager.
#[derive(Debug)]
pub(crate) struct Firewall {
    rules: Arc<Rules>,
    wanted: Mutex<Admitted>,
    /// The version of the set that is in force; 0 if none is. Locked while rules are loaded.
    in_force: tokio::sync::Mutex<u64>,
}

/// The microVMs that have a network.
#[derive(Clone, Debug)]
struct Admitted {
    /// Counts the changes of the set.
    version: u64,
    /// Addresses by interface.
    machines: BTreeMap<String, Ipv4Addr>,
}

#[derive(Debug)]
struct Rules {
    /// The prefix of all our interfaces and chains.
    prefix: String,
    nameservers: Vec<IpAddr>,
}

impl Firewall {
    pub(crate) fn new(prefix: String, nameservers: Vec<IpAddr>) -> Self {
        let rules = Arc::new(Rules { prefix, nameservers });
        let wanted = Admitted { version: 1, machines: BTreeMap::new() };
        Self { rules, wanted: Mutex::new(wanted), in_force: tokio::sync::Mutex::new(0) }
    }

    /// The name servers that microVMs can reach.
    pub(crate) fn nameservers(&self) -> Vec<String> {
        self.rules.nameservers.iter().filter(|server| server.is_ipv4()).map(ToString::to_string).collect()
    }

    /// Gives a microVM its network.
    pub(crate) async fn admit(&self, interface: &str, address: Ipv4Addr) -> Result<(), HostError> {
        self.change(false, |machines| machines.insert(interface.to_owned(), address) != Some(address)).await
    }

    /// Adds a microVM that an earlier manager admitted. The next change sets its rules.
    pub(crate) fn add_admitted(&self, interface: &str, address: Ipv4Addr) {
        let mut wanted = self.wanted.lock();
        wanted.machines.insert(interface.to_owned(), address);
    }

    /// Takes a microVM's network. This sets the rules if none are in force: without rules, the microVM would reach the host.
    pub(crate) async fn dismiss(&self, interface: &str) -> Result<(), HostError> {
        self.change(false, |machines| machines.remove(interface).is_some()).await
    }

    /// Sets all rules again, in case another program has removed them.
    pub(crate) async fn repair(&self) -> Result<(), HostError> {
        self.change(true, |_| true).await
    }

    /// Changes the set and puts it in force. The jumps are set too if no rules are in force, or if `with_jumps` is true.
    async fn change(
        &self,
        with_jumps: bool,
        change: impl FnOnce(&mut BTreeMap<String, Ipv4Addr>) -> bool,
    ) -> Result<(), HostError> {
        let version = {
            let mut wanted = self.wanted.lock();
            if change(&mut wanted.machines) {
                wanted.version += 1;
            }
            wanted.version
        };
        let mut in_force = self.in_force.lock().await;
        // The call that held the lock before may have loaded this change with its own.
        if *in_force >= version && !with_jumps {
            return Ok(());
        }
        let admitted = self.wanted.lock().clone();
        let rules = Arc::clone(&self.rules);
        let (with_jumps, version) = (*in_force == 0 || with_jumps, admitted.version);
        if with_jumps {
            // If loading fails, the next call sets the jumps again.
            *in_force = 0;
        }
        let set = move || match with_jumps {
            true => rules.ensure(&admitted.machines),
            false => rules.replace_chains(&admitted.machines),
        };
        on_host("setting the firewall rules", set).await?;
        *in_force = version;
        Ok(())
    }

    /// Removes all rules if `is_unused` is true. A microVM that is admitted after the check waits for the lock, and sets the
    /// rules again.
    pub(crate) async fn remove_if(&self, is_unused: impl FnOnce() -> bool) -> Result<(), HostError> {
        let mut in_force = self.in_force.lock().await;
        if !is_unused() {
            return Ok(());
        }
        *in_force = 0;
        let rules = Arc::clone(&self.rules);
        on_host("removing the firewall rules", move || rules.remove()).await
    }
}

/// The guard table of this host. It is looked up once, because the kernel's tables do not change.
fn guard_of(family: Family) -> Result<&'static str, FirewallError> {
    static FOUND: [OnceLock<&str>; 2] = [const { OnceLock::new() }; 2];
    let found = &FOUND[usize::from(family == Family::V6)];
    if let Some(guard) = found.get() {
        return Ok(guard);
    }
    for guard in GUARDS {
        if family.has_chain(guard, "FORWARD")? {
            return Ok(found.get_or_init(|| guard));
        }
    }
    Err(FirewallError::NoGuard)
}

/// A jump from one of the kernel's chains to one of ours.
struct Jump {
    table: &'static str,
    parent: &'static str,
    direction: Direction,
    chain: &'static str,
}

/// The packets that a jump matches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Direction {
    FromMachines,
    ToMachines,
    /// Packets that leave the host by another interface.
    Outside,
}

impl Rules {
    fn chain(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    fn jumps(guard: &'static str) -> [Jump; 8] {
        use Direction::{FromMachines, Outside, ToMachines};
        let jump = |table, parent, direction, chain| Jump { table, parent, direction, chain };
        [
            jump(guard, "FORWARD", FromMachines, "fwd"),
            jump(guard, "FORWARD", ToMachines, "out"),
            jump(guard, "INPUT", FromMachines, "in"),
            jump(FILTER, "FORWARD", FromMachines, "fwd"),
            jump(FILTER, "FORWARD", ToMachines, "out"),
            jump(FILTER, "INPUT", FromMachines, "in"),
            jump("mangle", "FORWARD", FromMachines, "mss"),
            jump("nat", "POSTROUTING", Outside, "nat"),
        ]
    }

    /// The chains that isolate microVMs, in one table.
    fn isolation(&self, family: Family, table: &str, admitted: &BTreeMap<String, Ipv4Addr>) -> String {
        let [forward, out, input, free] = ["fwd", "out", "in", "free"].map(|name| self.chain(name));
        let refuse = family.refusal(table);
        // In the guard table, a packet that we accept must still pass the rules of other programs.
        let accept = if table == FILTER { "ACCEPT" } else { "RETURN" };
        let mut lines = vec![format!("*{table}")];
        lines.extend([&forward, &out, &input, &free].map(|chain| format!(":{chain} - [0:0]")));
        if family == Family::V4 {
            for (interface, address) in admitted {
                lines.push(format!("-A {forward} -i {interface} -s {address} -g {free}"));
                lines.push(format!("-A {out} -o {interface} -d {address} {ESTABLISHED} -j {accept}"));
            }
            lines.extend(egress_rules(&free, &self.nameservers, accept, refuse));
            lines.push(format!("-A {free} -j {accept}"));
        }
        lines.extend([forward, out, input].map(|chain| format!("-A {chain} -j {refuse}")));
        lines.push("COMMIT\n".to_owned());
        lines.join("\n")
    }

    /// Address translation, and TCP segments that fit the path's MTU.
    fn translation(&self, admitted: &BTreeMap<String, Ipv4Addr>) -> String {
        let (nat, mss) = (self.chain("nat"), self.chain("mss"));
        let mut lines = vec!["*nat".to_owned(), format!(":{nat} - [0:0]")];
        lines.extend(admitted.values().map(|address| format!("-A {nat} -s {address} -j MASQUERADE")));
        lines.extend(["COMMIT", "*mangle"].map(str::to_owned));
        lines.push(format!(":{mss} - [0:0]"));
        lines.push(format!("-A {mss} -p tcp --tcp-flags SYN,RST SYN -j TCPMSS --clamp-mss-to-pmtu"));
        lines.push("COMMIT\n".to_owned());
        lines.join("\n")
    }

    /// Sets the chains of all families and the jumps to them.
    fn ensure(&self, admitted: &BTreeMap<String, Ipv4Addr>) -> Result<(), FirewallError> {
        if !admitted.is_empty() {
            let path = "/proc/sys/net/ipv4/ip_forward";
            if std::fs::read_to_string(path).is_ok_and(|text| text.trim() != "1") {
                std::fs::write(path, "1").map_err(|reason| FirewallError::Setting { path, reason })?;
            }
        }
        for family in families() {
            let guard = guard_of(family)?;
            family.restore(&self.script(family, guard, admitted))?;
            for jump in Self::jumps(guard) {
                if family == Family::V4 || jump.table == guard || jump.table == FILTER {
                    self.ensure_jump(family, &jump)?;
                }
            }
        }
        Ok(())
    }

    /// Replaces the content of the chains in one call. The rules of IPv6 do not depend on the admitted microVMs.
    fn replace_chains(&self, admitted: &BTreeMap<String, Ipv4Addr>) -> Result<(), FirewallError> {
        Family::V4.restore(&self.script(Family::V4, guard_of(Family::V4)?, admitted))
    }

    /// All our chains of a family.
    fn script(&self, family: Family, guard: &str, admitted: &BTreeMap<String, Ipv4Addr>) -> String {
        let mut script: String =
            [guard, FILTER].iter().map(|table| self.isolation(family, table, admitted)).collect();
        if family == Family::V4 {
            script.push_str(&self.translation(admitted));
        }
        script
    }

    fn ensure_jump(&self, family: Family, jump: &Jump) -> Result<(), FirewallError> {
        let ours = self.packets(jump);
        let ours: Vec<&str> = ours.iter().map(String::as_str).collect();
        family.ensure_jump(jump.table, jump.parent, &ours, &self.chain(jump.chain))
    }

    /// The arguments that match a jump's packets.
    fn packets(&self, jump: &Jump) -> Vec<String> {
        let all = format!("{}+", self.prefix);
        match jump.direction {
            Direction::Outside => vec!["!".to_owned(), "-o".to_owned(), all],
            Direction::FromMachines => vec!["-i".to_owned(), all],
            Direction::ToMachines => vec!["-o".to_owned(), all],
        }
    }

    fn remove(&self) -> Result<(), FirewallError> {
        for family in families() {
            for guard in GUARDS {
                for jump in Self::jumps(guard) {
                    let ours = self.packets(&jump);
                    let ours: Vec<&str> = ours.iter().map(String::as_str).collect();
                    family.remove_jumps(jump.table, jump.parent, &ours, &self.chain(jump.chain))?;
                }
                for table in [guard, FILTER, "mangle", "nat"] {
                    for name in ["fwd", "out", "in", "free", "mss", "nat"] {
                        family.remove_chain(table, &self.chain(name))?;
                    }
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use super::*;

    fn rules() -> Rules {
        Rules { prefix: "fc000001-".into(), nameservers: vec!["10.1.2.3".parse().unwrap()] }
    }

    #[test]
    fn admitted_machines_reach_the_internet_from_their_own_address_only() {
        let open = BTreeMap::from([("fc000001-4".to_owned(), Ipv4Addr::new(10, 81, 0, 18))]);
        let script = rules().isolation(Family::V4, FILTER, &open);
        let admitted = script.find("-A fc000001-fwd -i fc000001-4 -s 10.81.0.18 -g fc000001-free").unwrap();
        let refused = script.find("-A fc000001-fwd -j REJECT").unwrap();
        assert!(admitted < refused);
        let dns = script.find("-d 10.1.2.3 -p udp --dport 53 -j ACCEPT").unwrap();
        for network in ["10.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10"] {
            assert!(
                dns < script.find(&format!("-A fc000001-free -d {network} -j REJECT")).unwrap(),
                "{network}"
            );
        }
        assert!(script.contains("-A fc000001-in -j REJECT"));
        let closed = rules().isolation(Family::V4, FILTER, &BTreeMap::new());
        assert!(!closed.contains("-A fc000001-fwd -i"));
        // IPv6 is blocked, and the guard drops without an answer.
        assert!(!rules().isolation(Family::V6, FILTER, &open).contains("ACCEPT"));
        assert!(!rules().isolation(Family::V4, GUARDS[0], &open).contains("REJECT"));
    }

    #[test]
    fn chain_names_are_short_enough_for_the_kernel() {
        // 28 characters at most.
        assert!(rules().chain("free").len() <= 28);
    }
}
