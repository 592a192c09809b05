//! Families: all processes of a command, also those outside its process group.
//!
//! A command's processes carry a tag in their environment. A process without it (`env -i`) is found as the child of another. A
//! process that has left its parent, too (`setsid`, a double fork), is found as an orphan without a tag that was started while no
//! other command ran.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal};

use crate::procfs::{self, Process};

/// Marks every process that a command starts, so that those that left its process group can be found.
pub(crate) const TAG_VARIABLE: &str = "EMERGENT_COMMAND";
/// The time limit for the end of killed processes …
const KILL_TIME: Duration = Duration::from_secs(3);
/// … extended until at least this many rounds were made.
const LEAST_ROUNDS: usize = 10;
/// Rounds before the other processes of the sandbox are stopped during a round.
const PATIENT_ROUNDS: usize = 5;
/// The longest time for which all processes are stopped while a family is killed. A process that is forking stops after the
/// fork, which takes seconds when hundreds fork on half a CPU.
const STOPPED_TIME: Duration = Duration::from_secs(15);
/// The time between two rounds of killing.
const STOPPED_ROUND_TIME: Duration = Duration::from_millis(50);
/// Consecutive rounds that must find no process: a fork without CPU time may take a few tenths of a second.
const QUIET_ROUNDS: usize = 5;
/// The fewest processes of a family that can fill the sandbox.
const CROWD: usize = 100;

/// The tag of the command that a process belongs to.
pub(crate) fn tag_of(pid: i32) -> Option<String> {
    procfs::variable(pid, TAG_VARIABLE)
}

/// The processes of a command that runs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Family<'a> {
    pub(crate) tag: &'a str,
    /// The start time of the command, in clock ticks.
    pub(crate) began: u64,
    /// No other command runs: new orphans without a tag belong to this one.
    pub(crate) is_alone: bool,
}

impl Family<'_> {
    /// The processes that exist now.
    pub(crate) fn members(&self) -> Vec<i32> {
        let processes = procfs::processes();
        let tags: HashMap<i32, Option<String>> =
            processes.iter().map(|process| (process.pid, tag_of(process.pid))).collect();
        self.among(&processes, &tags, std::process::id().cast_signed())
    }

    fn among(&self, processes: &[Process], tags: &HashMap<i32, Option<String>>, own: i32) -> Vec<i32> {
        let tag = |process: &Process| tags.get(&process.pid).and_then(Option::as_deref);
        let is_left_behind = |process: &Process| {
            self.is_alone && own == 1 && process.parent == own && process.began >= self.began
        };
        let mut members: HashSet<i32> = processes
            .iter()
            .filter(|process| match tag(process) {
                Some(other) => other == self.tag,
                None => is_left_behind(process),
            })
            .map(|process| process.pid)
            .collect();
        loop {
            let before = members.len();
            let children = processes.iter().filter(|process| tag(process).is_none());
            let found: Vec<i32> =
                children.filter(|child| members.contains(&child.parent)).map(|child| child.pid).collect();
            members.extend(found);
            if members.len() == before {
                return members.into_iter().collect();
            }
        }
    }

    /// Kills them.
    pub(crate) fn kill(&self) {
        kill_all(|| self.members());
    }
}

/// All processes that carry a tag.
pub(crate) fn members(tag: &str) -> Vec<i32> {
    let own = std::process::id().cast_signed();
    procfs::process_ids().filter(|pid| *pid != own && tag_of(*pid).as_deref() == Some(tag)).collect()
}

/// Signals these processes.
pub(crate) fn signal(pids: &[i32], signal: Signal) {
    for pid in pids.iter().filter_map(|pid| Pid::from_raw(*pid)) {
        let _ = rustix::process::kill_process(pid, signal);
    }
}

/// Kills a family.
pub(crate) fn kill(tag: &str) {
    kill_all(|| members(tag));
}

/// Kills these processes, even if they fork faster than they are killed: when some are left after a few rounds, all processes
/// of the sandbox are stopped during the next ones.
pub(crate) fn kill_all(find: impl Fn() -> Vec<i32>) {
    let deadline = Instant::now() + KILL_TIME;
    for round in 0.. {
        let freeze = round >= PATIENT_ROUNDS;
        if freeze {
            signal_all(libc::SIGSTOP);
        }
        let found = find();
        signal(&found, Signal::KILL);
        if freeze {
            signal_all(libc::SIGCONT);
        }
        if found.is_empty() || (Instant::now() >= deadline && round >= LEAST_ROUNDS) {
            return;
        }
        // Nothing but the reaper learns of an orphan's end, so the processes are polled.
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Stops all processes and kills these; the others stay stopped. Processes that were being forked are found in a later round.
pub(crate) fn kill_while_stopped(find: impl Fn() -> Vec<i32>) {
    let deadline = Instant::now() + STOPPED_TIME;
    let mut quiet_rounds = 0;
    while Instant::now() < deadline {
        signal_all(libc::SIGSTOP);
        let found = find();
        signal(&found, Signal::KILL);
        quiet_rounds = if found.is_empty() { quiet_rounds + 1 } else { 0 };
        if quiet_rounds == QUIET_ROUNDS {
            return;
        }
        std::thread::sleep(STOPPED_ROUND_TIME);
    }
}

/// Kills every process but the agent. One system call kills all existing processes, so a round misses only those that are forked
/// during it. Channels of `connect` end, too; the server's next call opens another.
pub(crate) fn kill_everything() {
    let deadline = Instant::now() + KILL_TIME;
    for round in 0.. {
        signal_all(libc::SIGKILL);
        std::thread::sleep(Duration::from_millis(20));
        let is_late = Instant::now() >= deadline && round >= LEAST_ROUNDS;
        if is_late || procfs::processes().is_empty() {
            return;
        }
    }
}

/// Kills the largest family, if it has at least [`CROWD`] processes. Returns their number.
pub(crate) fn kill_crowd() -> Option<usize> {
    let (tag, pids) = most_numerous()?;
    let tag = tag.filter(|_| pids.len() >= CROWD)?;
    kill(&tag);
    Some(pids.len())
}

/// The family with the most processes: its tag, and its processes. Processes without a tag count as one family.
pub(crate) fn most_numerous() -> Option<(Option<String>, Vec<i32>)> {
    let mut families: HashMap<Option<String>, Vec<i32>> = HashMap::new();
    for process in procfs::processes().iter().filter(|process| !process.is_from_outside()) {
        families.entry(tag_of(process.pid)).or_default().push(process.pid);
    }
    families.into_iter().max_by_key(|(_, pids)| pids.len())
}

/// The family that uses the most memory: its tag and all it uses.
pub(crate) fn largest(processes: &[Process]) -> Option<(String, u64)> {
    let mut families: HashMap<String, u64> = HashMap::new();
    for process in processes {
        if let Some(tag) = tag_of(process.pid) {
            *families.entry(tag).or_default() += process.resident_bytes;
        }
    }
    families.into_iter().max_by_key(|(_, bytes)| *bytes)
}

/// Signals every process in the sandbox but this one.
pub(crate) fn signal_all(signal: i32) {
    if std::process::id() == 1 {
        // SAFETY: kill has no memory effects. As PID 1 of a PID namespace, -1 means the sandbox's processes.
        unsafe { libc::kill(-1, signal) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process(pid: i32, parent: i32, began: u64) -> Process {
        Process { pid, parent, began, session: pid, name: String::new(), resident_bytes: 0 }
    }

    #[test]
    fn processes_without_the_tag_are_found_by_their_parents_and_as_orphans_of_the_only_command() {
        let processes = [
            process(2, 1, 5),
            process(10, 1, 100),
            process(11, 10, 101),
            process(12, 11, 102),
            process(13, 1, 103),
        ];
        let tag = |pid: i32| (pid == 10).then(|| "own".to_owned());
        let mut tags: HashMap<i32, Option<String>> =
            processes.iter().map(|one| (one.pid, tag(one.pid))).collect();
        let members = |is_alone: bool, tags: &HashMap<i32, Option<String>>| {
            let mut found = Family { tag: "own", began: 100, is_alone }.among(&processes, tags, 1);
            found.sort_unstable();
            found
        };
        // 2 began before the command, 13 has left its parents.
        assert_eq!(members(true, &tags), [10, 11, 12, 13]);
        assert_eq!(members(false, &tags), [10, 11, 12]);
        tags.insert(11, Some("another command".to_owned()));
        assert_eq!(members(true, &tags), [10, 13]);
    }
}
