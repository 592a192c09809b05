//! Families: a command's processes, found by the tag in their environment wherever they went.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal};

use crate::procfs::{self, Process};

/// Marks every process that a command starts, so that those that left its process group can be found.
pub(crate) const TAG_VARIABLE: &str = "EMERGENT_COMMAND";
/// How long killed processes may take to be gone …
const KILL_TIME: Duration = Duration::from_secs(3);
/// … unless looking for them takes so long that this few rounds have not been made.
const LEAST_ROUNDS: usize = 10;
/// Rounds of killing before the rest of the sandbox is stopped for a moment.
const PATIENT_ROUNDS: usize = 5;
/// A family of fewer processes is not what fills the sandbox.
const CROWD: usize = 100;

/// The tag of the command that a process belongs to.
pub(crate) fn tag_of(pid: i32) -> Option<String> {
    procfs::variable(pid, TAG_VARIABLE)
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

/// Kills these processes, also such that fork faster than they can be killed: when some are still there after a few
/// rounds, everything in the sandbox is stopped while the next one looks for them.
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
        // The end of orphans is seen by the reaper alone, so it has to be looked for.
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Kills the family with the most processes, if they are a crowd. Says how many they were.
pub(crate) fn kill_crowd() -> Option<usize> {
    let mut families: HashMap<String, usize> = HashMap::new();
    for tag in procfs::process_ids().filter_map(tag_of) {
        *families.entry(tag).or_default() += 1;
    }
    let (tag, count) = families.into_iter().max_by_key(|(_, count)| *count)?;
    (count >= CROWD).then(|| {
        kill(&tag);
        count
    })
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
