//! What microVMs can reach: rules in chains of our own, named after the manager.
//!
//! A microVM with a network may reach the internet and the name servers it is given, from its own address alone. It may
//! not reach the host, private networks, the metadata service, or other microVMs; nobody may connect to it; IPv6 is closed.
//! One that has no network may send nothing: only the vsock channel works. As in the containers' firewall the rules are
//! there twice, since others change the chains that we jump from.
//!
//! The rules are made of the set of microVMs that have a network, as a whole and at once: many that come at the same
//! time are put in with one call.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use emergent_host::firewall::{FILTER, Family, GUARDS, PRIVATE, families};

use crate::error::{ManagerError, on_host};

/// The rules of one manager.
#[derive(Debug)]
pub(crate) struct Firewall {
    rules: Arc<Rules>,
    /// Interface and address of those that have a network.
    open: Mutex<Open>,
    /// The number of the set that is in force. Held while rules are loaded.
    in_force: tokio::sync::Mutex<u64>,
}

#[derive(Clone, Debug)]
struct Open {
    /// Counts changes; none is in force at first.
    number: u64,
    machines: BTreeMap<String, Ipv4Addr>,
}

#[derive(Debug)]
struct Rules {
    /// How all interfaces begin.
    prefix: String,
    nameservers: Vec<IpAddr>,
}

impl Firewall {
    pub(crate) fn new(prefix: String, nameservers: Vec<IpAddr>) -> Self {
        let rules = Arc::new(Rules { prefix, nameservers });
        let open = Open { number: 1, machines: BTreeMap::new() };
        Self { rules, open: Mutex::new(open), in_force: tokio::sync::Mutex::new(0) }
    }

    /// The name servers that microVMs can reach.
    pub(crate) fn nameservers(&self) -> Vec<String> {
        self.rules.nameservers.iter().filter(|server| server.is_ipv4()).map(ToString::to_string).collect()
    }

    /// Lets a microVM out.
    pub(crate) async fn admit(&self, interface: &str, address: Ipv4Addr) -> Result<(), ManagerError> {
        self.change(false, |machines| machines.insert(interface.to_owned(), address) != Some(address)).await
    }

    /// One that was let out before is among those that the next change puts in.
    pub(crate) fn expect(&self, interface: &str, address: Ipv4Addr) {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        open.machines.insert(interface.to_owned(), address);
    }

    /// Lets a microVM out no more, and sees to it that it is held: without our rules it would reach the host.
    pub(crate) async fn dismiss(&self, interface: &str) -> Result<(), ManagerError> {
        self.change(false, |machines| machines.remove(interface).is_some()).await
    }

    /// Puts back what somebody has taken away.
    pub(crate) async fn repair(&self) -> Result<(), ManagerError> {
        self.change(true, |_| true).await
    }

    /// Changes the set and puts it in force; from the ground up when nothing is yet, or others may have changed it.
    async fn change(
        &self,
        from_the_ground_up: bool,
        change: impl FnOnce(&mut BTreeMap<String, Ipv4Addr>) -> bool,
    ) -> Result<(), ManagerError> {
        let wanted = {
            let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
            if change(&mut open.machines) {
                open.number += 1;
            }
            open.number
        };
        let mut in_force = self.in_force.lock().await;
        // Who had the lock before may have put ours in with his own.
        if *in_force >= wanted && !from_the_ground_up {
            return Ok(());
        }
        let open = self.open.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let rules = Arc::clone(&self.rules);
        let (is_new, number) = (*in_force == 0 || from_the_ground_up, open.number);
        if is_new {
            // Until it is known that they are.
            *in_force = 0;
        }
        let set = move || match is_new {
            true => rules.ensure(&open.machines),
            false => rules.replace(&open.machines),
        };
        on_host("setting the firewall rules", set).await?;
        *in_force = number;
        Ok(())
    }

    /// Takes all rules away, unless somebody needs them: whoever does after this has looked waits, and puts them in again.
    pub(crate) async fn remove_if(&self, is_unused: impl FnOnce() -> bool) -> Result<(), ManagerError> {
        let mut in_force = self.in_force.lock().await;
        if !is_unused() {
            return Ok(());
        }
        *in_force = 0;
        let rules = Arc::clone(&self.rules);
        on_host("removing the firewall rules", move || rules.remove()).await
    }
}

/// The table that guards what gets past the filter; the kernel's tables don't change.
fn guard_of(family: Family) -> Result<&'static str, String> {
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
    Err("no table of the kernel's firewall can be used".to_owned())
}

/// A jump from a chain of the kernel's to one of ours.
struct Jump {
    table: &'static str,
    parent: &'static str,
    /// Whether it is for packets that come from microVMs, or that go to them.
    comes: bool,
    chain: &'static str,
}

impl Rules {
    fn chain(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    fn jumps(guard: &'static str) -> [Jump; 8] {
        let jump = |table, parent, comes, chain| Jump { table, parent, comes, chain };
        [
            jump(guard, "FORWARD", true, "fwd"),
            jump(guard, "FORWARD", false, "out"),
            jump(guard, "INPUT", true, "in"),
            jump(FILTER, "FORWARD", true, "fwd"),
            jump(FILTER, "FORWARD", false, "out"),
            jump(FILTER, "INPUT", true, "in"),
            jump("mangle", "FORWARD", true, "mss"),
            jump("nat", "POSTROUTING", false, "nat"),
        ]
    }

    /// The chains that keep microVMs apart from the rest, in one table.
    fn walls(&self, family: Family, table: &str, open: &BTreeMap<String, Ipv4Addr>) -> String {
        let [forward, out, input, free] = ["fwd", "out", "in", "free"].map(|name| self.chain(name));
        let refuse = family.refusal(table);
        // In the filter others may refuse what we let pass; in the guard that is not for us to decide again.
        let accept = if table == FILTER { "ACCEPT" } else { "RETURN" };
        let established = "-m conntrack --ctstate ESTABLISHED,RELATED";
        let mut lines = vec![format!("*{table}")];
        lines.extend([&forward, &out, &input, &free].map(|chain| format!(":{chain} - [0:0]")));
        if family == Family::V4 {
            for (interface, address) in open {
                lines.push(format!("-A {forward} -i {interface} -s {address} -g {free}"));
                lines.push(format!("-A {out} -o {interface} -d {address} {established} -j {accept}"));
            }
            lines.push(format!("-A {free} {established} -j {accept}"));
            for server in self.nameservers.iter().filter(|server| server.is_ipv4()) {
                for protocol in ["udp", "tcp"] {
                    lines.push(format!("-A {free} -d {server} -p {protocol} --dport 53 -j {accept}"));
                }
            }
            lines.extend(PRIVATE.iter().map(|network| format!("-A {free} -d {network} -j {refuse}")));
            lines.push(format!("-A {free} -j {accept}"));
        }
        lines.extend([forward, out, input].map(|chain| format!("-A {chain} -j {refuse}")));
        lines.push("COMMIT\n".to_owned());
        lines.join("\n")
    }

    /// Addresses that are the host's outside, and packets that fit through whatever lies on the way.
    fn translation(&self, open: &BTreeMap<String, Ipv4Addr>) -> String {
        let (nat, mss) = (self.chain("nat"), self.chain("mss"));
        let mut lines = vec!["*nat".to_owned(), format!(":{nat} - [0:0]")];
        lines.extend(open.values().map(|address| format!("-A {nat} -s {address} -j MASQUERADE")));
        lines.extend(["COMMIT", "*mangle"].map(str::to_owned));
        lines.push(format!(":{mss} - [0:0]"));
        lines.push(format!("-A {mss} -p tcp --tcp-flags SYN,RST SYN -j TCPMSS --clamp-mss-to-pmtu"));
        lines.push("COMMIT\n".to_owned());
        lines.join("\n")
    }

    fn ensure(&self, open: &BTreeMap<String, Ipv4Addr>) -> Result<(), String> {
        if !open.is_empty() {
            let path = "/proc/sys/net/ipv4/ip_forward";
            if std::fs::read_to_string(path).is_ok_and(|text| text.trim() != "1") {
                std::fs::write(path, "1").map_err(|error| format!("{path}: {error}"))?;
            }
        }
        for family in families() {
            let guard = guard_of(family)?;
            family.restore(&self.script(family, guard, open))?;
            for jump in Self::jumps(guard) {
                if family == Family::V4 || jump.table == guard || jump.table == FILTER {
                    self.put(family, &jump)?;
                }
            }
        }
        Ok(())
    }

    /// The same with the jumps as they are: one call. Nothing of version 6 depends on who is let out.
    fn replace(&self, open: &BTreeMap<String, Ipv4Addr>) -> Result<(), String> {
        Family::V4.restore(&self.script(Family::V4, guard_of(Family::V4)?, open))
    }

    /// All our chains of a family.
    fn script(&self, family: Family, guard: &str, open: &BTreeMap<String, Ipv4Addr>) -> String {
        let mut script: String =
            [guard, FILTER].iter().map(|table| self.walls(family, table, open)).collect();
        if family == Family::V4 {
            script.push_str(&self.translation(open));
        }
        script
    }

    fn put(&self, family: Family, jump: &Jump) -> Result<(), String> {
        let ours = self.packets(jump);
        let ours: Vec<&str> = ours.iter().map(String::as_str).collect();
        family.ensure_jump(jump.table, jump.parent, &ours, &self.chain(jump.chain))
    }

    /// Which packets a jump is for. Those to translate leave by any interface but ours, and come from one of ours by their
    /// address.
    fn packets(&self, jump: &Jump) -> Vec<String> {
        let all = format!("{}+", self.prefix);
        match (jump.table, jump.comes) {
            ("nat", _) => vec!["!".to_owned(), "-o".to_owned(), all],
            (_, true) => vec!["-i".to_owned(), all],
            (_, false) => vec!["-o".to_owned(), all],
        }
    }

    fn remove(&self) -> Result<(), String> {
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
    fn only_what_was_admitted_gets_out_and_only_from_its_own_address() {
        let open = BTreeMap::from([("fc000001-4".to_owned(), Ipv4Addr::new(10, 81, 0, 18))]);
        let script = rules().walls(Family::V4, FILTER, &open);
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
        let closed = rules().walls(Family::V4, FILTER, &BTreeMap::new());
        assert!(!closed.contains("-A fc000001-fwd -i"));
        // Version 6 is closed, and the guard answers nobody.
        assert!(!rules().walls(Family::V6, FILTER, &open).contains("ACCEPT"));
        assert!(!rules().walls(Family::V4, GUARDS[0], &open).contains("REJECT"));
    }

    #[test]
    fn chains_have_names_that_the_kernel_takes() {
        // 28 characters at most.
        assert!(rules().chain("free").len() <= 28);
    }
}
