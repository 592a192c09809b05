//! What workspaces can reach: rules in chains of our own, named after the installation.
//!
//! Traffic from the workspaces' bridge may go to the internet, and to the name servers they are given. It may not go
//! to the host, to private networks, to the metadata service, or over IPv6. Refused connections fail at once. Rules
//! of others are never changed: we add one jump to `DOCKER-USER` (or `FORWARD`) and one to `INPUT`.
//!
//! Others change those chains, too: whenever any network is made, the engine takes the jump to `DOCKER-USER` out and puts it
//! in again, and in between everything would be let through. So the rules are there twice: where a packet is refused
//! politely, and in a table that the engine does not touch, where what got past is dropped.

use std::io::Write;
use std::net::IpAddr;
use std::process::{Command, Stdio};

/// Networks that are not the internet.
const PRIVATE: [&str; 12] = [
    "0.0.0.0/8",
    "10.0.0.0/8",
    "100.64.0.0/10",
    "127.0.0.0/8",
    "169.254.0.0/16",
    "172.16.0.0/12",
    "192.0.0.0/24",
    "192.168.0.0/16",
    "198.18.0.0/15",
    "224.0.0.0/4",
    "240.0.0.0/4",
    "255.255.255.255/32",
];

/// The rules for one bridge.
#[derive(Clone, Debug)]
pub(crate) struct Firewall {
    /// The bridge's interface; the chains are named after it.
    pub(crate) bridge: String,
    /// Where DNS may go.
    pub(crate) nameservers: Vec<IpAddr>,
}

/// The table in which packets can be refused with a word to the sender.
const FILTER: &str = "filter";
/// Where what got past that is dropped, best first: one comes after it, and where a kernel does not have that one, one
/// before it does (and then nobody is told).
const GUARDS: [&str; 2] = ["security", "mangle"];

/// The two families.
const FAMILIES: [Family; 2] =
    [Family { command: "iptables", v4: true }, Family { command: "ip6tables", v4: false }];

#[derive(Clone, Copy)]
struct Family {
    command: &'static str,
    v4: bool,
}

impl Firewall {
    fn chains(&self) -> [String; 2] {
        [format!("{}-fwd", self.bridge), format!("{}-in", self.bridge)]
    }

    /// Our two chains in a table, complete, as `iptables-restore` reads them. Loading it again changes nothing.
    fn script(&self, family: Family, table: &str) -> String {
        let [forward, input] = self.chains();
        let mut lines = vec![format!("*{table}"), format!(":{forward} - [0:0]"), format!(":{input} - [0:0]")];
        let refuse = match (table, family.v4) {
            (FILTER, true) => "REJECT --reject-with icmp-admin-prohibited",
            (FILTER, false) => "REJECT --reject-with icmp6-adm-prohibited",
            _ => "DROP",
        };
        let established = "-m conntrack --ctstate ESTABLISHED,RELATED";
        if family.v4 {
            lines.push(format!("-A {forward} {established} -j RETURN"));
            for server in self.nameservers.iter().filter(|server| server.is_ipv4()) {
                for protocol in ["udp", "tcp"] {
                    lines.push(format!("-A {forward} -d {server} -p {protocol} --dport 53 -j RETURN"));
                }
            }
            for network in PRIVATE {
                lines.push(format!("-A {forward} -d {network} -j {refuse}"));
            }
            lines.push(format!("-A {input} {established} -j ACCEPT"));
        } else {
            lines.push(format!("-A {forward} -j {refuse}"));
        }
        lines.push(format!("-A {input} -j {refuse}"));
        lines.push("COMMIT\n".to_owned());
        lines.join("\n")
    }

    /// Puts the rules in place, where they are not.
    pub(crate) fn ensure(&self) -> Result<(), String> {
        for family in families() {
            let mut guarded = Err(String::new());
            for guard in GUARDS {
                guarded = self.ensure_in(family, guard, "FORWARD");
                if guarded.is_ok() {
                    break;
                }
            }
            guarded?;
            self.ensure_in(family, FILTER, family.forward_parent())?;
        }
        Ok(())
    }

    fn ensure_in(&self, family: Family, table: &str, forward_parent: &str) -> Result<(), String> {
        restore(family, &self.script(family, table))?;
        let [forward, input] = self.chains();
        family.ensure_jump(table, forward_parent, &self.bridge, &forward)?;
        family.ensure_jump(table, "INPUT", &self.bridge, &input)
    }

    /// Takes the rules away.
    pub(crate) fn remove(&self) -> Result<(), String> {
        for family in families() {
            for table in [FILTER].into_iter().chain(GUARDS) {
                let [forward, input] = self.chains();
                for parent in ["DOCKER-USER", "FORWARD"] {
                    family.remove_jumps(table, parent, &self.bridge, &forward);
                }
                family.remove_jumps(table, "INPUT", &self.bridge, &input);
                for chain in [forward, input] {
                    if family.run(&["-t", table, "-n", "-L", &chain]).is_ok() {
                        family.run(&["-t", table, "-F", &chain])?;
                        family.run(&["-t", table, "-X", &chain])?;
                    }
                }
            }
        }
        Ok(())
    }
}

/// The families that this host has.
fn families() -> impl Iterator<Item = Family> {
    FAMILIES.into_iter().filter(|family| family.v4 || has_ipv6())
}

impl Family {
    /// Where forwarded traffic can be refused before anybody accepts it.
    fn forward_parent(self) -> &'static str {
        if self.run(&["-n", "-L", "DOCKER-USER"]).is_ok() { "DOCKER-USER" } else { "FORWARD" }
    }

    fn ensure_jump(self, table: &str, parent: &str, bridge: &str, chain: &str) -> Result<(), String> {
        let rule = ["-i", bridge, "-j", chain];
        if self.run(&[&["-t", table, "-C", parent][..], &rule].concat()).is_ok() {
            return Ok(());
        }
        self.run(&[&["-t", table, "-I", parent, "1"][..], &rule].concat())
    }

    fn remove_jumps(self, table: &str, parent: &str, bridge: &str, chain: &str) {
        // More than one only if two servers raced.
        for _ in 0..4 {
            if self.run(&["-t", table, "-D", parent, "-i", bridge, "-j", chain]).is_err() {
                return;
            }
        }
    }

    fn run(self, arguments: &[&str]) -> Result<(), String> {
        let output = command(self.command)
            .args(["-w", "10"])
            .args(arguments)
            .output()
            .map_err(|error| format!("{} can't be started: {error}", self.command))?;
        if output.status.success() {
            return Ok(());
        }
        Err(format!(
            "{} {}: {}",
            self.command,
            arguments.join(" "),
            String::from_utf8_lossy(&output.stderr).trim()
        ))
    }
}

fn command(program: &str) -> Command {
    let mut command = Command::new(program);
    command.env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin").stdin(Stdio::null());
    command
}

fn restore(family: Family, script: &str) -> Result<(), String> {
    let program = format!("{}-restore", family.command);
    let cannot = |error: std::io::Error| format!("{program} can't be used: {error}");
    let mut child = command(&program)
        .args(["--noflush", "-w", "10"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(cannot)?;
    if let Some(mut stdin) = child.stdin.take() {
        stdin.write_all(script.as_bytes()).map_err(cannot)?;
    }
    let output = child.wait_with_output().map_err(cannot)?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!("{program} refused our rules: {}", String::from_utf8_lossy(&output.stderr).trim()))
}

fn has_ipv6() -> bool {
    std::path::Path::new("/proc/net/if_inet6").exists()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_servers_are_reachable_before_private_networks_are_refused() {
        let firewall = Firewall {
            bridge: "em-0".into(),
            nameservers: vec!["10.1.2.3".parse().unwrap(), "::1".parse().unwrap()],
        };
        let script = firewall.script(FAMILIES[0], FILTER);
        let dns = script.find("-d 10.1.2.3 -p udp --dport 53 -j RETURN").unwrap();
        let refused = script.find("-d 10.0.0.0/8 -j REJECT").unwrap();
        assert!(dns < refused);
        for network in ["169.254.0.0/16", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10"] {
            assert!(script.contains(&format!("-d {network} -j REJECT")), "{network}");
        }
        assert!(!script.contains("::1"));
        assert!(firewall.script(FAMILIES[1], FILTER).contains("-A em-0-fwd -j REJECT"));
        // The second line has the same rules, and answers nobody.
        for (number, family) in FAMILIES.into_iter().enumerate() {
            let reject =
                ["REJECT --reject-with icmp-admin-prohibited", "REJECT --reject-with icmp6-adm-prohibited"];
            let dropped = firewall.script(family, FILTER).replace(reject[number], "DROP");
            assert_eq!(firewall.script(family, GUARDS[0]), dropped.replace("*filter", "*security"));
        }
    }
}
