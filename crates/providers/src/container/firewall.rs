//! What workspaces can reach: rules in chains of our own, named after the installation.
//!
//! Traffic from the workspaces' bridge may go to the internet, and to the name servers they are given. It may not go
//! to the host, to private networks, to the metadata service, or over IPv6. Refused connections fail at once. Rules
//! of others are never changed: we add one jump to `DOCKER-USER` (or `FORWARD`) and one to `INPUT`.

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

    /// Our two chains, complete, as `iptables-restore` reads them. Loading it again changes nothing.
    fn script(&self, family: Family) -> String {
        let [forward, input] = self.chains();
        let mut lines =
            vec!["*filter".to_owned(), format!(":{forward} - [0:0]"), format!(":{input} - [0:0]")];
        let reject = if family.v4 { "icmp-admin-prohibited" } else { "icmp6-adm-prohibited" };
        let established = "-m conntrack --ctstate ESTABLISHED,RELATED";
        if family.v4 {
            lines.push(format!("-A {forward} {established} -j RETURN"));
            for server in self.nameservers.iter().filter(|server| server.is_ipv4()) {
                for protocol in ["udp", "tcp"] {
                    lines.push(format!("-A {forward} -d {server} -p {protocol} --dport 53 -j RETURN"));
                }
            }
            for network in PRIVATE {
                lines.push(format!("-A {forward} -d {network} -j REJECT --reject-with {reject}"));
            }
            lines.push(format!("-A {input} {established} -j ACCEPT"));
        } else {
            lines.push(format!("-A {forward} -j REJECT --reject-with {reject}"));
        }
        lines.push(format!("-A {input} -j REJECT --reject-with {reject}"));
        lines.push("COMMIT\n".to_owned());
        lines.join("\n")
    }

    /// Puts the rules in place, where they are not.
    pub(crate) fn ensure(&self) -> Result<(), String> {
        for family in FAMILIES {
            if !family.v4 && !has_ipv6() {
                continue;
            }
            restore(family, &self.script(family))?;
            let [forward, input] = self.chains();
            let parent = family.forward_parent();
            family.ensure_jump(parent, &self.bridge, &forward)?;
            family.ensure_jump("INPUT", &self.bridge, &input)?;
        }
        Ok(())
    }

    /// Takes the rules away.
    pub(crate) fn remove(&self) -> Result<(), String> {
        for family in FAMILIES {
            if !family.v4 && !has_ipv6() {
                continue;
            }
            let [forward, input] = self.chains();
            for parent in ["DOCKER-USER", "FORWARD"] {
                family.remove_jumps(parent, &self.bridge, &forward);
            }
            family.remove_jumps("INPUT", &self.bridge, &input);
            for chain in [forward, input] {
                if family.run(&["-n", "-L", &chain]).is_ok() {
                    family.run(&["-F", &chain])?;
                    family.run(&["-X", &chain])?;
                }
            }
        }
        Ok(())
    }
}

impl Family {
    /// Where forwarded traffic can be refused before anybody accepts it.
    fn forward_parent(self) -> &'static str {
        if self.run(&["-n", "-L", "DOCKER-USER"]).is_ok() { "DOCKER-USER" } else { "FORWARD" }
    }

    fn ensure_jump(self, parent: &str, bridge: &str, chain: &str) -> Result<(), String> {
        let rule = ["-i", bridge, "-j", chain];
        if self.run(&[&["-C", parent][..], &rule].concat()).is_ok() {
            return Ok(());
        }
        self.run(&[&["-I", parent, "1"][..], &rule].concat())
    }

    fn remove_jumps(self, parent: &str, bridge: &str, chain: &str) {
        // More than one only if two servers raced.
        for _ in 0..4 {
            if self.run(&["-D", parent, "-i", bridge, "-j", chain]).is_err() {
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
        let script = firewall.script(FAMILIES[0]);
        let dns = script.find("-d 10.1.2.3 -p udp --dport 53 -j RETURN").unwrap();
        let refused = script.find("-d 10.0.0.0/8 -j REJECT").unwrap();
        assert!(dns < refused);
        for network in ["169.254.0.0/16", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10"] {
            assert!(script.contains(&format!("-d {network} -j REJECT")), "{network}");
        }
        assert!(!script.contains("::1"));
        assert!(firewall.script(FAMILIES[1]).contains("-A em-0-fwd -j REJECT"));
    }
}
