//! Out of memory: one process is killed, the workspace continues, and the caller gets the reason.
//!
//! gVisor's kernel does not kill a single process, so a thread of the agent does: it watches the available memory and kills the
//! largest process before none is left. Its interval depends on how fast memory could run out; it sleeps while no command runs.
//! When it is too late, the host kills a process of the sandbox, or the whole sandbox where the provider can't arrange that.
//! On other kernels the kernel kills a process (commands raise their score for it), and its counters tell the agent.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal};

use crate::agent::Agent;
use crate::procfs::{self, Memory, MemoryGauge};
use crate::{cgroup, family, log};

/// The reserve for gVisor's kernel, which is under the same limit …
const RESERVE_BYTES: u64 = 48 << 20;
/// … plus this part of all memory.
const RESERVE_PART: u64 = 32;
/// No process fills memory faster than this, even while the guard waits for a CPU.
const FILL_RATE_BYTES_PER_MS: u64 = 6 << 20;
/// The time limit for the release of a killed process's memory.
const RELEASE_TIME: Duration = Duration::from_secs(3);
/// The interval of readings meanwhile.
const RELEASE_LOOK: Duration = Duration::from_millis(3);
/// When available memory falls by this much meanwhile, another process is taking it.
const TAKEN_BYTES: u64 = 8 << 20;
/// Killed processes that are recorded for their callers.
const MAX_VICTIMS: usize = 64;

/// Watches the memory of a gVisor sandbox.
#[derive(Default)]
pub(crate) struct MemoryGuard {
    victims: Mutex<Vec<Victim>>,
    tight: AtomicBool,
}

#[derive(Clone, Debug)]
struct Victim {
    session: i32,
    /// The command it belonged to.
    tag: Option<String>,
    note: String,
    number: u64,
}

impl MemoryGuard {
    /// Whether memory is short: nothing is started ahead then.
    pub(crate) fn is_tight(&self) -> bool {
        self.tight.load(Ordering::Relaxed)
    }

    /// Watches for ever; returns at once where the kernel does this itself.
    pub(crate) fn run(&self, agent: &Agent) {
        let Some(gauge) = (!kernel_guards()).then(MemoryGauge::open).flatten() else {
            return;
        };
        loop {
            let seen = agent.activity.count();
            let Some(memory) = gauge.read() else { return };
            let reserve = reserve_of(memory);
            if memory.available < reserve {
                // On a busy host each system call may take long, and the choice takes many: meanwhile no process may allocate.
                family::signal_all(libc::SIGSTOP);
                let victim = self.kill_largest(memory);
                family::signal_all(libc::SIGCONT);
                wait_for_release(&gauge, victim);
            }
            let is_tight = memory.available < reserve * 2;
            self.tight.store(is_tight, Ordering::Relaxed);
            let spare = memory.available.saturating_sub(reserve);
            let pause = (spare / FILL_RATE_BYTES_PER_MS).clamp(1, 500);
            if is_tight || !agent.activity.wait_if_idle(agent, seen) {
                std::thread::sleep(Duration::from_millis(pause));
            }
        }
    }

    /// Kills the process that uses the most memory, or all processes of a command if those use more. Returns the one process.
    fn kill_largest(&self, memory: Memory) -> Option<Pid> {
        let processes = procfs::processes();
        let largest = processes.iter().max_by_key(|process| process.resident_bytes)?;
        let total = memory.total >> 20;
        let advice = "use less, or create the workspace with more memory";
        let family = family::largest(&processes).filter(|(_, bytes)| *bytes > largest.resident_bytes * 2);
        if let Some((tag, bytes)) = family {
            let used = bytes >> 20;
            let note = format!(
                "out of memory: a command's processes used {used} MiB of the workspace's {total} MiB and were killed; {advice}"
            );
            self.remember(0, Some(tag.clone()), &note);
            log(&note);
            family::kill(&tag);
            return None;
        }
        let note = format!(
            "out of memory: {} (pid {}) used {} MiB of the workspace's {total} MiB and was killed; {advice}",
            largest.name,
            largest.pid,
            largest.resident_bytes >> 20,
        );
        self.remember(largest.session, family::tag_of(largest.pid), &note);
        log(&note);
        let pid = Pid::from_raw(largest.pid)?;
        let _ = rustix::process::kill_process(pid, Signal::KILL);
        Some(pid)
    }

    fn remember(&self, session: i32, tag: Option<String>, note: &str) {
        let mut victims = self.victims.lock().unwrap_or_else(PoisonError::into_inner);
        let number = victims.last().map_or(1, |victim| victim.number + 1);
        victims.push(Victim { session, tag, note: note.to_owned(), number });
        if victims.len() > MAX_VICTIMS {
            victims.remove(0);
        }
    }
}

/// The memory that must stay available.
fn reserve_of(memory: Memory) -> u64 {
    RESERVE_BYTES + memory.total / RESERVE_PART
}

/// Waits for the memory of a killed process, which is free a moment after its end. Otherwise the next largest process would be
/// killed, too. Returns early when another process continues to allocate.
fn wait_for_release(gauge: &MemoryGauge, victim: Option<Pid>) {
    let deadline = Instant::now() + RELEASE_TIME;
    let mut most = 0;
    while let Some(memory) = gauge.read() {
        most = most.max(memory.available);
        let is_gone = victim.is_none_or(|pid| rustix::process::test_kill_process(pid).is_err());
        let is_free = is_gone && memory.available >= reserve_of(memory);
        let is_taken = memory.available + TAKEN_BYTES < most;
        if is_free || is_taken || Instant::now() >= deadline {
            return;
        }
        std::thread::sleep(RELEASE_LOOK);
    }
}

/// Compares before and after a command.
pub(crate) struct OomCheck {
    newest_victim: u64,
    kernel_kills: u64,
}

impl OomCheck {
    pub(crate) fn begin(guard: &MemoryGuard) -> Self {
        let victims = guard.victims.lock().unwrap_or_else(PoisonError::into_inner);
        Self {
            newest_victim: victims.last().map_or(0, |victim| victim.number),
            kernel_kills: cgroup::oom_kills(),
        }
    }

    /// The note for the caller when the command or one of its children was killed because memory ran out.
    pub(crate) fn victim(&self, guard: &MemoryGuard, pid: i32, tag: &str) -> Option<String> {
        let victims = guard.victims.lock().unwrap_or_else(PoisonError::into_inner);
        let mine = victims.iter().find(|victim| {
            victim.number > self.newest_victim
                && (victim.session == pid || victim.tag.as_deref() == Some(tag))
        });
        if let Some(victim) = mine {
            return Some(victim.note.clone());
        }
        drop(victims);
        (cgroup::oom_kills() > self.kernel_kills).then(|| {
            "out of memory: the kernel killed a process of this workspace; use less, or create it with more memory".to_owned()
        })
    }
}

/// Whether the kernel kills a single process when memory runs out (gVisor's does not).
fn kernel_guards() -> bool {
    static GUARDS: OnceLock<bool> = OnceLock::new();
    *GUARDS.get_or_init(|| !std::path::Path::new("/proc/sentry-meminfo").exists())
}

/// Makes the kernel kill a command before the agent.
pub(crate) fn make_first_victim(pid: i32) {
    if kernel_guards() {
        let _ = std::fs::write(format!("/proc/{pid}/oom_score_adj"), "500");
    }
}
