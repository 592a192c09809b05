//! The disk limit where no file system enforces it: the agent measures, warns, refuses writes over the limit, and kills a
//! process that continues to write.
//!
//! ```text
//! 80 %, 90 %        a warning in the log and in the answer of every command
//! 100 %             tools that write refuse; commands run, so that files can be removed
//! over and growing  the process that has written the most is killed
//! ```

use std::collections::VecDeque;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use emergent_wire::tools::WORKSPACE_DIR;
use emergent_wire::{ErrorCode, ErrorDetail};
use rustix::process::{Pid, Signal};

use crate::agent::Agent;
use crate::{family, log, procfs, workers};

/// A measurement is used for at least this long, and for ten times as long as it took.
const MEASURE_EVERY: Duration = Duration::from_secs(2);
/// The levels of warnings.
const WARN_PERCENT: [u64; 3] = [80, 90, 100];
/// Commands with a killed process that are recorded.
const MAX_VICTIMS: usize = 64;

/// The state of the watched disk.
#[derive(Default)]
pub(crate) struct Watch {
    last: Mutex<Option<Measured>>,
    /// The last of [`WARN_PERCENT`] that was logged.
    warned_percent: AtomicU64,
    watching: AtomicBool,
    killed: AtomicU64,
    /// The tags of the commands that the killed processes belonged to.
    victims: Mutex<VecDeque<String>>,
}

#[derive(Clone, Copy)]
struct Measured {
    used: u64,
    until: Instant,
}

impl Watch {
    /// Fails when the workspace is over a limit that the agent enforces.
    pub(crate) fn refuse_if_full(&self, agent: &Agent) -> Result<(), ErrorDetail> {
        match self.fill(agent) {
            Some((used, limit)) if used >= limit => Err(ErrorDetail::new(
                ErrorCode::DiskFull,
                format!("{}: remove files with bash to go on", says(used, limit)),
            )),
            _ => Ok(()),
        }
    }

    /// Used and allowed bytes, where the agent enforces the limit.
    fn fill(&self, agent: &Agent) -> Option<(u64, u64)> {
        let limit = agent.configuration().watched_disk_bytes?;
        Some((self.used(), limit))
    }

    /// The bytes used under the workspace, from the last measurement unless it is too old.
    pub(crate) fn used(&self) -> u64 {
        let now = Instant::now();
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(measured) = *last
            && now < measured.until
        {
            return measured.used;
        }
        let used = size_of(Path::new(WORKSPACE_DIR));
        let pause = MEASURE_EVERY.max(now.elapsed() * 10);
        *last = Some(Measured { used, until: Instant::now() + pause });
        used
    }

    /// The number of processes that were killed for writing over the limit.
    pub(crate) fn kills(&self) -> u64 {
        self.killed.load(Ordering::SeqCst)
    }

    /// Whether a process of this command was killed for writing over the limit.
    pub(crate) fn has_killed(&self, tag: &str) -> bool {
        self.victims().iter().any(|victim| victim == tag)
    }

    fn victims(&self) -> MutexGuard<'_, VecDeque<String>> {
        self.victims.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The note for a command's caller; `kills` is the number of kills before the command.
    pub(crate) fn note(&self, agent: &Agent, kills: u64) -> Option<String> {
        let (used, limit) = self.fill(agent)?;
        let text = says(used, limit);
        if self.kills() > kills {
            return Some(format!(
                "{text}: a process that wrote over the limit was killed; remove files to go on"
            ));
        }
        (percent(used, limit) >= WARN_PERCENT[0]).then_some(text)
    }

    /// Starts the watching thread once, if there is a limit.
    pub(crate) fn begin(&self, agent: &Arc<Agent>) {
        let has_limit = agent.configuration().watched_disk_bytes.is_some();
        if has_limit && !self.watching.swap(true, Ordering::SeqCst) {
            let watched = Arc::clone(agent);
            workers::spawn_thread("disk", move || watched.disk.run(&watched));
        }
    }

    fn run(&self, agent: &Agent) {
        let mut before = u64::MAX;
        loop {
            let seen = agent.activity.count();
            if let Some((used, limit)) = self.fill(agent) {
                self.warn(used, limit);
                if used > limit && used > before {
                    self.kill_largest_writer(used, limit);
                }
                before = used;
            }
            if agent.activity.wait_if_idle(agent, seen) {
                continue;
            }
            let until =
                self.last.lock().unwrap_or_else(PoisonError::into_inner).map(|measured| measured.until);
            let pause = until.map_or(MEASURE_EVERY, |until| until.saturating_duration_since(Instant::now()));
            std::thread::sleep(pause.max(Duration::from_millis(100)));
        }
    }

    /// Logs each level once, and again after the disk was below it.
    fn warn(&self, used: u64, limit: u64) {
        let percent = percent(used, limit);
        let reached = WARN_PERCENT.into_iter().filter(|step| percent >= *step).max().unwrap_or(0);
        if self.warned_percent.swap(reached, Ordering::SeqCst) < reached {
            log(&format!("warning: {}", says(used, limit)));
        }
    }

    fn kill_largest_writer(&self, used: u64, limit: u64) {
        let processes = procfs::processes();
        let Some(writer) = processes.iter().max_by_key(|process| procfs::written_bytes(process.pid)) else {
            return;
        };
        if let Some(pid) = Pid::from_raw(writer.pid) {
            self.killed.fetch_add(1, Ordering::SeqCst);
            let mut victims = self.victims();
            victims.extend(family::tag_of(writer.pid));
            if victims.len() > MAX_VICTIMS {
                victims.pop_front();
            }
            drop(victims);
            let _ = rustix::process::kill_process(pid, Signal::KILL);
            log(&format!(
                "{}: {} (pid {}), which wrote the most, was killed",
                says(used, limit),
                writer.name,
                writer.pid
            ));
        }
    }
}

fn percent(used: u64, limit: u64) -> u64 {
    used.saturating_mul(100) / limit.max(1)
}

fn says(used: u64, limit: u64) -> String {
    let state = if used >= limit { "full" } else { "nearly full" };
    format!(
        "the workspace's disk is {state}: {} of {} MiB are used ({} %)",
        used >> 20,
        limit >> 20,
        percent(used, limit)
    )
}

/// Blocks used by all files below a directory; hard links count once each.
fn size_of(directory: &Path) -> u64 {
    let mut total = 0;
    let mut left = vec![directory.to_owned()];
    while let Some(directory) = left.pop() {
        for entry in std::fs::read_dir(&directory).into_iter().flatten().flatten() {
            let Ok(metadata) = entry.metadata() else { continue };
            total += metadata.blocks() * 512;
            if metadata.is_dir() {
                left.push(entry.path());
            }
        }
    }
    total
}

/// Used and total bytes of the file system under the workspace.
pub(crate) fn file_system() -> (u64, u64) {
    rustix::fs::statvfs(WORKSPACE_DIR).map_or((0, 0), |stat| {
        let total = stat.f_blocks * stat.f_frsize;
        (total - stat.f_bfree * stat.f_frsize, total)
    })
}
