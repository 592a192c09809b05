//! Egress rules of workspaces, in chains that are named after the installation.
//!
//! Traffic from the workspaces' bridge may go to the internet, and to the name servers they are given. It may not go
//! to the host, to private networks, to the metadata service, or over IPv6. Rules of others are never changed: one jump is
//! added to `DOCKER-USER` (or `FORWARD`) and one to `INPUT`.
//!
//! Egress is enforced twice: in the table `filter` (REJECT, so that connections fail at once) and again in a table that the
//! engine does not change (DROP). Whenever any network is created, the engine removes the jump to `DOCKER-USER` and adds it
//! again. In between only the second table is in force.

use std::net::IpAddr;

use emergent_host::firewall::{ESTABLISHED, FILTER, Family, GUARDS, egress_rules, families};

/// The rules for one bridge.
#[derive(Clone, Debug)]
pub(crate) struct Firewall {
    /// The bridge's interface; the chains are named after it.
    pub(crate) bridge: String,
    /// The name servers that DNS queries may go to.
    pub(crate) nameservers: Vec<IpAddr>,
}

impl Firewall {
    fn chains(&self) -> [String; 2] {
        [format!("{}-fwd", self.bridge), format!("{}-in", self.bridge)]
    }

    /// The script of both chains in one table. Loading it again changes nothing.
    fn script(&self, family: Family, table: &str) -> String {
        let [forward, input] = self.chains();
        let mut lines = vec![format!("*{table}"), format!(":{forward} - [0:0]"), format!(":{input} - [0:0]")];
        let refuse = family.refusal(table);
        if family == Family::V4 {
            lines.extend(egress_rules(&forward, &self.nameservers, "RETURN", refuse));
            lines.push(format!("-A {input} {ESTABLISHED} -j ACCEPT"));
        } else {
            lines.push(format!("-A {forward} -j {refuse}"));
        }
        lines.push(format!("-A {input} -j {refuse}"));
        lines.push("COMMIT\n".to_owned());
        lines.join("\n")
    }

    /// Adds the missing rules.
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
            // The first chain that forwarded packets pass.
            let users = "DOCKER-USER";
            let parent = if family.has_chain(FILTER, users)? { users } else { "FORWARD" };
            self.ensure_in(family, FILTER, parent)?;
        }
        Ok(())
    }

    fn ensure_in(&self, family: Family, table: &str, forward_parent: &str) -> Result<(), String> {
        family.restore(&self.script(family, table))?;
        let [forward, input] = self.chains();
        let ours = ["-i", &self.bridge];
        family.ensure_jump(table, forward_parent, &ours, &forward)?;
        Ok(family.ensure_jump(table, "INPUT", &ours, &input)?)
    }

    /// Removes the rules.
    pub(crate) fn remove(&self) -> Result<(), String> {
        for family in families() {
            for table in [FILTER].into_iter().chain(GUARDS) {
                let [forward, input] = self.chains();
                let ours = ["-i", &self.bridge];
                for parent in ["DOCKER-USER", "FORWARD"] {
                    family.remove_jumps(table, parent, &ours, &forward)?;
                }
                family.remove_jumps(table, "INPUT", &ours, &input)?;
                family.remove_chain(table, &forward)?;
                family.remove_chain(table, &input)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_servers_in_private_networks_are_reachable() {
        let firewall = Firewall {
            bridge: "em-0".into(),
            nameservers: vec!["10.1.2.3".parse().unwrap(), "::1".parse().unwrap()],
        };
        let script = firewall.script(Family::V4, FILTER);
        let dns = script.find("-d 10.1.2.3 -p udp --dport 53 -j RETURN").unwrap();
        let refused = script.find("-d 10.0.0.0/8 -j REJECT").unwrap();
        assert!(dns < refused);
        for network in ["169.254.0.0/16", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10"] {
            assert!(script.contains(&format!("-d {network} -j REJECT")), "{network}");
        }
        assert!(!script.contains("::1"));
        assert!(firewall.script(Family::V6, FILTER).contains("-A em-0-fwd -j REJECT"));
        // The second table has the same rules with DROP.
        for family in [Family::V4, Family::V6] {
            let dropped = firewall.script(family, FILTER).replace(family.refusal(FILTER), "DROP");
            assert_eq!(firewall.script(family, GUARDS[0]), dropped.replace("*filter", "*security"));
        }
    }
}
