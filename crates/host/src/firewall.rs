//! Firewall rules in our own chains. Rules of other programs are never changed: the only addition to their chains is a jump
//! to each of ours.

use std::io::{self, Write};
use std::net::IpAddr;
use std::path::Path;
use std::process::Stdio;

use rustix::thread::CapabilitySet;

use crate::program::command;

/// Networks that are not part of the internet.
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

/// The table that refuses packets with an answer to the sender (REJECT).
pub const FILTER: &str = "filter";
/// Tables that enforce the same rules a second time (DROP), in order of preference. `security` comes after `filter`. Some
/// kernels do not have it; `mangle` comes before `filter`, so senders get no answer there.
pub const GUARDS: [&str; 2] = ["security", "mangle"];

/// Matches the packets of connections that exist.
pub const ESTABLISHED: &str = "-m conntrack --ctstate ESTABLISHED,RELATED";

/// The time limit for another program to release the lock of the rules, in seconds.
const LOCK_SECONDS: &str = "10";
/// The exit status of `iptables` when it has no access to the rules: they are locked, or the process has no rights.
const NO_ACCESS: i32 = 4;

/// Why the firewall's rules could not be read or changed.
#[derive(Debug, thiserror::Error)]
pub enum FirewallError {
    /// The program could not be run.
    #[error("{program} can't be used: {reason}")]
    NotRun {
        /// The program.
        program: String,
        /// Why.
        reason: io::Error,
    },
    /// `iptables-restore` did not load our rules.
    #[error("{program} refused our rules: {stderr}")]
    RulesRefused {
        /// The program.
        program: String,
        /// Its standard error.
        stderr: String,
    },
    /// Another program held the lock of the rules for too long.
    #[error("{command}: {stderr}")]
    Locked {
        /// The command line.
        command: String,
        /// Its standard error.
        stderr: String,
    },
    /// `iptables` refused a command.
    #[error("{command}: {stderr}")]
    CommandRefused {
        /// The command line.
        command: String,
        /// Its standard error.
        stderr: String,
    },
    /// The kernel has none of [`GUARDS`].
    #[error(
        "no table of the kernel's firewall can be used; load the kernel's modules (modprobe ip_tables ip6_tables)"
    )]
    NoGuard,
    /// A setting of the kernel could not be changed.
    #[error("{path}: {reason}")]
    Setting {
        /// The file of the setting.
        path: &'static str,
        /// Why.
        reason: io::Error,
    },
}

impl From<FirewallError> for String {
    fn from(error: FirewallError) -> Self {
        error.to_string()
    }
}

/// The rules of one version of the internet protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// Version 4.
    V4,
    /// Version 6.
    V6,
}

/// Rules of a chain for packets to the internet. They accept answers and DNS queries to the name servers, and refuse packets to
/// private networks. `accept` and `refuse` are targets. IPv4 only.
pub fn egress_rules(chain: &str, nameservers: &[IpAddr], accept: &str, refuse: &str) -> Vec<String> {
    let mut rules = vec![format!("-A {chain} {ESTABLISHED} -j {accept}")];
    for server in nameservers.iter().filter(|server| server.is_ipv4()) {
        for protocol in ["udp", "tcp"] {
            rules.push(format!("-A {chain} -d {server} -p {protocol} --dport 53 -j {accept}"));
        }
    }
    rules.extend(PRIVATE.iter().map(|network| format!("-A {chain} -d {network} -j {refuse}")));
    rules
}

/// The families that this host has.
pub fn families() -> impl Iterator<Item = Family> {
    let has_v6 = Path::new("/proc/net/if_inet6").exists();
    [Family::V4, Family::V6].into_iter().filter(move |family| *family == Family::V4 || has_v6)
}

impl Family {
    fn program(self) -> &'static str {
        match self {
            Self::V4 => "iptables",
            Self::V6 => "ip6tables",
        }
    }

    /// The target that refuses a packet in a table: REJECT, with an answer to the sender, where the table has it.
    pub fn refusal(self, table: &str) -> &'static str {
        match (table, self) {
            (FILTER, Self::V4) => "REJECT --reject-with icmp-admin-prohibited",
            (FILTER, Self::V6) => "REJECT --reject-with icmp6-adm-prohibited",
            _ => "DROP",
        }
    }

    /// Loads rules in the format of `iptables-restore`. Chains that the script does not name stay as they are.
    pub fn restore(self, script: &str) -> Result<(), FirewallError> {
        let program = format!("{}-restore", self.program());
        let not_run = |reason| FirewallError::NotRun { program: program.clone(), reason };
        let mut child = command(&program)
            .args(["--noflush", "-w", LOCK_SECONDS])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(not_run)?;
        if let Some(mut stdin) = child.stdin.take() {
            stdin.write_all(script.as_bytes()).map_err(not_run)?;
        }
        let output = child.wait_with_output().map_err(not_run)?;
        if output.status.success() {
            return Ok(());
        }
        let stderr = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        Err(FirewallError::RulesRefused { program, stderr })
    }

    /// Runs one command on a table.
    pub fn run(self, table: &str, arguments: &[&str]) -> Result<(), FirewallError> {
        let output = command(self.program())
            .args(["-w", LOCK_SECONDS, "-t", table])
            .args(arguments)
            .output()
            .map_err(|reason| FirewallError::NotRun { program: self.program().to_owned(), reason })?;
        if output.status.success() {
            return Ok(());
        }
        let stderr = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        let command = format!("{} -t {table} {}", self.program(), arguments.join(" "));
        // The status is the same for locked rules and for missing rights. Without the right there are no rules of ours
        // either, so that is a refusal of the command.
        if output.status.code() == Some(NO_ACCESS) && may_change_rules() {
            Err(FirewallError::Locked { command, stderr })
        } else {
            Err(FirewallError::CommandRefused { command, stderr })
        }
    }

    /// Runs a command whose refusal is an answer: false if `iptables` refused it.
    fn succeeds(self, table: &str, arguments: &[&str]) -> Result<bool, FirewallError> {
        match self.run(table, arguments) {
            Ok(()) => Ok(true),
            Err(FirewallError::CommandRefused { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Whether a chain exists.
    pub fn has_chain(self, table: &str, chain: &str) -> Result<bool, FirewallError> {
        self.succeeds(table, &["-n", "-L", chain])
    }

    /// Inserts a jump to our chain at the top of another chain, unless it is there.
    pub fn ensure_jump(
        self,
        table: &str,
        parent: &str,
        packets: &[&str],
        chain: &str,
    ) -> Result<(), FirewallError> {
        let rule = [packets, &["-j", chain]].concat();
        if self.run(table, &[&["-C", parent][..], &rule].concat()).is_ok() {
            return Ok(());
        }
        self.run(table, &[&["-I", parent, "1"][..], &rule].concat())
    }

    /// Removes our jumps from another chain, if it has any.
    pub fn remove_jumps(
        self,
        table: &str,
        parent: &str,
        packets: &[&str],
        chain: &str,
    ) -> Result<(), FirewallError> {
        // There is more than one only if two servers inserted it at the same time.
        for _ in 0..4 {
            if !self.succeeds(table, &[&["-D", parent][..], packets, &["-j", chain]].concat())? {
                break;
            }
        }
        Ok(())
    }

    /// Removes one of our chains, if it is there.
    pub fn remove_chain(self, table: &str, chain: &str) -> Result<(), FirewallError> {
        if self.has_chain(table, chain)? {
            self.run(table, &["-F", chain])?;
            self.run(table, &["-X", chain])?;
        }
        Ok(())
    }
}

/// Whether the kernel lets this process read and change rules.
fn may_change_rules() -> bool {
    rustix::thread::capabilities(None).is_ok_and(|sets| sets.effective.contains(CapabilitySet::NET_ADMIN))
}
