//! Firewall rules in chains of our own. Those of others are never changed: a jump to each of our chains is all we add.

use std::io::Write;
use std::path::Path;
use std::process::Stdio;

use crate::program::command;

/// Networks that are not the internet.
pub const PRIVATE: [&str; 12] = [
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

/// The table in which packets can be refused with a word to the sender.
pub const FILTER: &str = "filter";
/// Where what got past that is dropped, best first: one comes after it, and where a kernel does not have that one, one
/// before it does (and then nobody is told).
pub const GUARDS: [&str; 2] = ["security", "mangle"];

/// Who else changes the rules may hold their lock for so long, in seconds.
const LOCK_SECONDS: &str = "10";
/// How `iptables` ends when it could not look at the rules: they are locked, or it may not.
const COULD_NOT_LOOK: i32 = 4;

/// The rules of one version of the internet protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// Version 4.
    V4,
    /// Version 6.
    V6,
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

    /// What refuses a packet in a table: with a word to its sender where that can be.
    pub fn refusal(self, table: &str) -> &'static str {
        match (table, self) {
            (FILTER, Self::V4) => "REJECT --reject-with icmp-admin-prohibited",
            (FILTER, Self::V6) => "REJECT --reject-with icmp6-adm-prohibited",
            _ => "DROP",
        }
    }

    /// Loads rules as `iptables-restore` reads them. Chains that they do not name stay as they are.
    pub fn restore(self, script: &str) -> Result<(), String> {
        let program = format!("{}-restore", self.program());
        let cannot = |error: std::io::Error| format!("{program} can't be used: {error}");
        let mut child = command(&program)
            .args(["--noflush", "-w", LOCK_SECONDS])
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

    /// Runs one command on a table.
    pub fn run(self, table: &str, arguments: &[&str]) -> Result<(), String> {
        self.try_run(table, arguments)?
    }

    /// The same, with what the command itself refuses apart from rules that are locked.
    fn try_run(self, table: &str, arguments: &[&str]) -> Result<Result<(), String>, String> {
        let output = command(self.program())
            .args(["-w", LOCK_SECONDS, "-t", table])
            .args(arguments)
            .output()
            .map_err(|error| format!("{} can't be started: {error}", self.program()))?;
        if output.status.success() {
            return Ok(Ok(()));
        }
        let said = String::from_utf8_lossy(&output.stderr);
        let said = format!("{} -t {table} {}: {}", self.program(), arguments.join(" "), said.trim());
        // Who may not look has made no rules either.
        let is_locked = output.status.code() == Some(COULD_NOT_LOOK) && !said.contains("Permission denied");
        if is_locked { Err(said) } else { Ok(Err(said)) }
    }

    /// Whether there is such a chain.
    pub fn has_chain(self, table: &str, chain: &str) -> Result<bool, String> {
        Ok(self.try_run(table, &["-n", "-L", chain])?.is_ok())
    }

    /// Puts a jump to our chain before all else in another, unless it is there.
    pub fn ensure_jump(self, table: &str, parent: &str, packets: &[&str], chain: &str) -> Result<(), String> {
        let rule = [packets, &["-j", chain]].concat();
        if self.run(table, &[&["-C", parent][..], &rule].concat()).is_ok() {
            return Ok(());
        }
        self.run(table, &[&["-I", parent, "1"][..], &rule].concat())
    }

    /// Takes our jumps out of another chain, if there is any.
    pub fn remove_jumps(
        self,
        table: &str,
        parent: &str,
        packets: &[&str],
        chain: &str,
    ) -> Result<(), String> {
        // More than one only if two of us raced.
        for _ in 0..4 {
            if self.try_run(table, &[&["-D", parent][..], packets, &["-j", chain]].concat())?.is_err() {
                break;
            }
        }
        Ok(())
    }

    /// Removes a chain of ours, if it is there.
    pub fn remove_chain(self, table: &str, chain: &str) -> Result<(), String> {
        if self.has_chain(table, chain)? {
            self.run(table, &["-F", chain])?;
            self.run(table, &["-X", chain])?;
        }
        Ok(())
    }
}
