//! Limits how many tasks (processes and threads) the commands of a workspace have.
//!
//! Where the agent can make control groups (gVisor, a virtual machine), commands run in a group of their own: above its
//! `pids.max` a `fork` fails, and the agent can still start threads. In a plain container the engine limits the container.
//!
//! A command at the limit, such as a fork bomb, keeps other commands from starting and takes all CPU time. So a guard ends the
//! command with the most processes and tells its caller. Each system call of the guard competes with those of the fork bomb,
//! so the guard uses few of them, and stops all other processes before it counts them. When a bomb forks faster than the guard
//! finds its processes, or hides from its command, the guard kills all processes of the workspace.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use crate::agent::Agent;
use crate::{family, log, machine, procfs, reaper};

/// The group that commands run in, below the sandbox's own.
const GROUP: &str = "emergent-commands";
/// The interval of the guard while commands run.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// Consecutive readings at the limit after which threads count as a bomb, too.
const PATIENCE: u32 = 20;
/// The divisor of the limit for processes: programs with many tasks use threads, bombs use processes.
const PROCESS_PART: usize = 2;
/// The limit counts as reached from this percentage on: the number of a bomb's processes varies.
const REACHED_PERCENT: usize = 90;
/// Every so many readings the guard counts processes even when there are few tasks: zombies are processes but not tasks.
const COUNT_EVERY: u64 = 10;
/// The time for which tasks that were found to be threads are not counted again …
const CLEARED_FOR: Duration = Duration::from_secs(10);
/// … unless their number has grown by this part of the limit.
const CLEARED_PART: usize = 8;
/// Ended commands that are recorded for their callers.
const MAX_ENDED: usize = 64;
/// After the guard has killed all processes, a command that ends by a signal within this time was one of them.
const KILLED_WITH_ALL: Duration = Duration::from_secs(10);

/// Watches the number of tasks.
#[derive(Default)]
pub(crate) struct TaskGuard {
    group: OnceLock<Option<PathBuf>>,
    ended: Mutex<Vec<Ended>>,
}

/// A command that was ended.
struct Ended {
    command: EndedCommand,
    note: String,
}

/// The command that was ended.
enum EndedCommand {
    /// The command with this tag.
    Tagged(String),
    /// A command whose processes carry no tag.
    Unknown,
    /// Every command that ran at this time.
    AllCommands(Instant),
}

impl TaskGuard {
    /// The group of commands, created on first use; none where the sandbox has no control groups.
    fn group(&self) -> Option<&Path> {
        self.group.get_or_init(|| make_group(Path::new("/sys/fs/cgroup"))).as_deref()
    }

    /// Sets the limit.
    pub(crate) fn limit(&self, most: Option<u32>) {
        if let Some(group) = self.group() {
            let text = most.map_or_else(|| "max".to_owned(), |most| most.to_string());
            if let Err(error) = fs::write(group.join("pids.max"), text) {
                log(&format!("the number of tasks can't be limited: {error}"));
            }
        }
    }

    /// Moves a process, and so its later descendants, into the group.
    pub(crate) fn admit(&self, pid: i32) {
        if let Some(group) = self.group() {
            // Fails for a process that has ended, which does not matter.
            let _ = fs::write(group.join("cgroup.procs"), pid.to_string());
        }
    }

    /// Watches for ever.
    pub(crate) fn run(&self, agent: &Agent) {
        let gauge = TaskGauge::open(self.group());
        let mut reached = 0;
        let mut cleared = Cleared::default();
        for look in 0_u64.. {
            let seen = agent.activity.count();
            let most = agent.configuration().max_tasks.and_then(|most| usize::try_from(most).ok());
            if let Some(most) = most {
                let tasks = gauge.read();
                reached = if tasks.is_some_and(|tasks| is_near(tasks, most)) { reached + 1 } else { 0 };
                let is_suspect = match tasks {
                    Some(tasks) => {
                        tasks >= most / PROCESS_PART && !cleared.holds(tasks, most, Instant::now())
                    }
                    None => true,
                };
                if is_suspect || look % COUNT_EVERY == 0 || reached >= PATIENCE {
                    if self.end_crowd(most, is_suspect && tasks.is_some(), reached >= PATIENCE) {
                        reached = 0;
                    } else if let Some(tasks) = tasks.filter(|_| is_suspect) {
                        cleared = Cleared(Some((tasks, Instant::now())));
                    }
                }
            }
            if reached > 0 || !agent.activity.wait_if_idle(agent, seen) {
                std::thread::sleep(LOOK_EVERY);
            }
        }
    }

    /// The number of processes, including zombies. A virtual machine's `/proc` lists threads of its kernel as processes, so
    /// there the group is read.
    fn processes(&self) -> usize {
        if !machine::is_machine() {
            return procfs::process_ids().count();
        }
        let listed = self.group().and_then(|group| fs::read_to_string(group.join("cgroup.procs")).ok());
        listed.map_or(0, |text| text.lines().count())
    }

    /// Ends the command with the most processes, if the limit is reached. `stop_first` stops all processes before they are
    /// counted: otherwise each system call of the guard waits for one of every process of the bomb.
    fn end_crowd(&self, most: usize, stop_first: bool, is_over: bool) -> bool {
        // Locked, so that callers of ended commands get their note only after this is done.
        let mut ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        if stop_first {
            family::signal_all(libc::SIGSTOP);
        }
        if !is_over && self.processes() < most / PROCESS_PART {
            if stop_first {
                family::signal_all(libc::SIGCONT);
            }
            return false;
        }
        family::signal_all(libc::SIGSTOP);
        // The kernel ends stopped processes whose parents have ended (SIGHUP). A bomb that ends that way leaves few processes,
        // and the largest family among those is not the bomb.
        let few = most / PROCESS_PART / 2;
        let crowd = family::most_numerous().filter(|(_, pids)| pids.len() >= few || self.processes() >= few);
        let reason =
            format!("the workspace's limit of {most} tasks, half of which may be processes, was reached");
        let note = format!("{reason}: the processes of a command were killed; {ADVICE}");
        log(&note);
        let command = match &crowd {
            Some((Some(tag), _)) => EndedCommand::Tagged(tag.clone()),
            _ => EndedCommand::Unknown,
        };
        remember(&mut ended, Ended { command, note });
        // All processes stay stopped meanwhile, so that a bomb can't fork faster than its processes are found.
        match crowd {
            Some((Some(tag), _)) => family::kill_while_stopped(|| family::members(&tag)),
            Some((None, _)) => family::kill_while_stopped(untagged),
            None => {}
        }
        if procfs::processes().len() >= few {
            let note = format!("{reason}: all processes of the workspace were killed; {ADVICE}");
            log(&note);
            remember(&mut ended, Ended { command: EndedCommand::AllCommands(Instant::now()), note });
            family::kill_everything();
        }
        family::signal_all(libc::SIGCONT);
        true
    }

    /// The note for the caller of a command that ended by a signal. When the ended command is unknown, the first caller that
    /// asks gets the note.
    pub(crate) fn note(&self, tag: &str, end: reaper::Ended) -> Option<String> {
        if !matches!(end, reaper::Ended::Signalled(_)) {
            return None;
        }
        let mut ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        let mine = ended.iter().position(|one| match &one.command {
            EndedCommand::Tagged(other) => other == tag,
            EndedCommand::Unknown => true,
            EndedCommand::AllCommands(at) => at.elapsed() < KILLED_WITH_ALL,
        })?;
        match ended[mine].command {
            EndedCommand::AllCommands(_) => Some(ended[mine].note.clone()),
            _ => Some(ended.remove(mine).note),
        }
    }
}

/// The advice for the caller of an ended command.
const ADVICE: &str = "start fewer at once, or raise the limit (workspaces.max_tasks)";

fn remember(ended: &mut Vec<Ended>, one: Ended) {
    ended.push(one);
    if ended.len() > MAX_ENDED {
        ended.remove(0);
    }
}

/// The number of tasks that were found to be threads and not processes, and the time of that.
#[derive(Default)]
struct Cleared(Option<(usize, Instant)>);

impl Cleared {
    fn holds(&self, tasks: usize, most: usize, now: Instant) -> bool {
        self.0.is_some_and(|(then, at)| {
            tasks < then + most / CLEARED_PART && now.saturating_duration_since(at) < CLEARED_FOR
        })
    }
}

/// Whether this number is at the limit, or almost.
fn is_near(count: usize, most: usize) -> bool {
    count * 100 >= most * REACHED_PERCENT
}

/// Reads the number of tasks from the control group. It includes threads and excludes zombies.
struct TaskGauge {
    file: Option<fs::File>,
}

impl TaskGauge {
    fn open(group: Option<&Path>) -> Self {
        let own = group.map(|group| group.join("pids.current"));
        let engines = ["/sys/fs/cgroup/pids.current", "/sys/fs/cgroup/pids/pids.current"].map(PathBuf::from);
        Self { file: own.into_iter().chain(engines).find_map(|path| fs::File::open(path).ok()) }
    }

    fn read(&self) -> Option<usize> {
        let mut text = [0; 32];
        let length = self.file.as_ref()?.read_at(&mut text, 0).ok()?;
        str::from_utf8(&text[..length]).ok()?.trim().parse().ok()
    }
}

/// Processes without a command's tag.
fn untagged() -> Vec<i32> {
    let processes = procfs::processes();
    let hidden = processes.iter().filter(|one| !one.is_from_outside() && family::tag_of(one.pid).is_none());
    hidden.map(|one| one.pid).collect()
}

/// Creates the group for commands in the sandbox's own, with either version of control groups.
fn make_group(root: &Path) -> Option<PathBuf> {
    let first = root.join("pids");
    let parent = if first.join("pids.max").exists() || first.join("cgroup.procs").exists() {
        first
    } else {
        // Version 2 counts only the resources that are enabled in the parent.
        fs::write(root.join("cgroup.subtree_control"), "+pids").ok()?;
        root.to_owned()
    };
    let group = parent.join(GROUP);
    match fs::create_dir(&group) {
        Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => None,
        _ => group.join("pids.max").exists().then_some(group),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_are_counted_again_after_a_time_or_when_their_number_has_grown() {
        let at = Instant::now();
        let cleared = Cleared(Some((256, at)));
        assert!(!Cleared::default().holds(256, 512, at));
        assert!(cleared.holds(300, 512, at));
        assert!(!cleared.holds(320, 512, at));
        assert!(!cleared.holds(256, 512, at + CLEARED_FOR));
    }
}
