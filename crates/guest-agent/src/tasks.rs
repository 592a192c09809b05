//! Limits how many tasks (processes and threads) the commands of a workspace have.
//!
//! Where the agent can make control groups (gVisor, a virtual machine), commands run in a group of their own: beyond its
//! `pids.max` a `fork` fails, and the agent keeps its room. In a plain container the engine limits the container.
//!
//! A command at the limit, as a fork bomb is at once, keeps all others from starting and takes all CPU time. So a guard ends the
//! command with the most processes, and its caller is told. Each system call of the guard may take long meanwhile: it looks
//! with few of them and stops everybody else before it chooses. A bomb that forks faster than its processes can be told from
//! others, or that hides from its command, costs the workspace all its processes.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use crate::agent::Agent;
use crate::{family, log, machine, procfs, reaper};

/// The group that commands run in, below the sandbox's own.
const GROUP: &str = "emergent-commands";
/// How often the guard looks while commands run.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// So many looks in a row must find the limit reached by threads: processes that use many are no bomb.
const PATIENCE: u32 = 20;
/// Processes alone may be this part of the limit: programs that need many tasks have threads, and bombs have processes.
const PROCESS_PART: usize = 2;
/// The limit counts as reached from this part of it on: a bomb's processes come and go.
const REACHED_PERCENT: usize = 90;
/// Every so many looks the processes are counted also where few tasks are seen: ended processes that nobody has waited for are
/// no tasks.
const COUNT_EVERY: u64 = 10;
/// Tasks that were found to be threads are not looked at again for this time …
const CLEARED_FOR: Duration = Duration::from_secs(10);
/// … unless they have become more by this part of the limit.
const CLEARED_PART: usize = 8;
/// Commands that are remembered for their callers.
const MAX_ENDED: usize = 64;
/// A command that is ended by a signal within this time after all processes were killed ended for that reason.
const KILLED_WITH_ALL: Duration = Duration::from_secs(10);

/// Watches the number of tasks.
#[derive(Default)]
pub(crate) struct TaskGuard {
    group: OnceLock<Option<PathBuf>>,
    ended: Mutex<Vec<Ended>>,
}

/// A command that was ended.
struct Ended {
    whose: Whose,
    note: String,
}

/// Which command was ended.
enum Whose {
    /// The command with this tag.
    Tagged(String),
    /// A command whose processes carry no tag.
    Unknown,
    /// Every command that ran at this time.
    AllCommands(Instant),
}

impl TaskGuard {
    /// The group of commands, made when it is first asked for; none where the sandbox has none to divide.
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

    /// Makes a process, and all that it starts from now on, count against the limit.
    pub(crate) fn admit(&self, pid: i32) {
        if let Some(group) = self.group() {
            // A process that has ended already counts no more.
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

    /// How many processes there are, those included that have ended and were not waited for. A virtual machine's `/proc` shows
    /// threads of its kernel as processes, so there the group is asked.
    fn processes(&self) -> usize {
        if !machine::is_machine() {
            return procfs::process_ids().count();
        }
        let listed = self.group().and_then(|group| fs::read_to_string(group.join("cgroup.procs")).ok());
        listed.map_or(0, |text| text.lines().count())
    }

    /// Ends the command with the most processes, if there are as many as there may be. `stop_first` stops all processes before
    /// they are counted: while a bomb rages, each system call of the guard waits for one of every process of the bomb.
    fn end_crowd(&self, most: usize, stop_first: bool, is_over: bool) -> bool {
        // Callers that wait for the end of a command are told only when this is done.
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
        // The kernel ends stopped processes whose parents are gone (SIGHUP). A bomb that has ended that way leaves few
        // processes, and the largest family among those is not to blame.
        let few = most / PROCESS_PART / 2;
        let crowd = family::most_numerous().filter(|(_, pids)| pids.len() >= few || self.processes() >= few);
        let reason =
            format!("the workspace's limit of {most} tasks, half of which may be processes, was reached");
        let note = format!("{reason}: the processes of a command were killed; {ADVICE}");
        log(&note);
        let whose = match &crowd {
            Some((Some(tag), _)) => Whose::Tagged(tag.clone()),
            _ => Whose::Unknown,
        };
        remember(&mut ended, Ended { whose, note });
        // Everybody else stays stopped meanwhile, so that a bomb can't fork faster than its processes are found.
        match crowd {
            Some((Some(tag), _)) => family::kill_while_stopped(|| family::members(&tag)),
            Some((None, _)) => family::kill_while_stopped(untagged),
            None => {}
        }
        if procfs::processes().len() >= few {
            let note = format!("{reason}: all processes of the workspace were killed; {ADVICE}");
            log(&note);
            remember(&mut ended, Ended { whose: Whose::AllCommands(Instant::now()), note });
            family::kill_everything();
        }
        family::signal_all(libc::SIGCONT);
        true
    }

    /// What to tell the caller of a command that was ended by a signal. Where it is not known which command it was, the first
    /// to ask is told.
    pub(crate) fn note(&self, tag: &str, end: reaper::Ended) -> Option<String> {
        if !matches!(end, reaper::Ended::Signalled(_)) {
            return None;
        }
        let mut ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        let mine = ended.iter().position(|one| match &one.whose {
            Whose::Tagged(other) => other == tag,
            Whose::Unknown => true,
            Whose::AllCommands(at) => at.elapsed() < KILLED_WITH_ALL,
        })?;
        match ended[mine].whose {
            Whose::AllCommands(_) => Some(ended[mine].note.clone()),
            _ => Some(ended.remove(mine).note),
        }
    }
}

/// What the caller of a command that was ended can do.
const ADVICE: &str = "start fewer at once, or raise the limit (workspaces.max_tasks)";

fn remember(ended: &mut Vec<Ended>, one: Ended) {
    ended.push(one);
    if ended.len() > MAX_ENDED {
        ended.remove(0);
    }
}

/// How many tasks were there, and when, when they were found to be threads and not processes.
#[derive(Default)]
struct Cleared(Option<(usize, Instant)>);

impl Cleared {
    fn holds(&self, tasks: usize, most: usize, now: Instant) -> bool {
        self.0.is_some_and(|(then, at)| {
            tasks < then + most / CLEARED_PART && now.saturating_duration_since(at) < CLEARED_FOR
        })
    }
}

/// Whether this many are as many as there may be, or almost.
fn is_near(count: usize, most: usize) -> bool {
    count * 100 >= most * REACHED_PERCENT
}

/// Tasks as the control group counts them: threads too, but not processes that have ended and were not waited for.
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

/// Processes that do not say which command they belong to.
fn untagged() -> Vec<i32> {
    let processes = procfs::processes();
    let hidden = processes.iter().filter(|one| !one.is_the_hosts() && family::tag_of(one.pid).is_none());
    hidden.map(|one| one.pid).collect()
}

/// Makes the group for commands in the sandbox's own, of either version.
fn make_group(root: &Path) -> Option<PathBuf> {
    let first = root.join("pids");
    let parent = if first.join("pids.max").exists() || first.join("cgroup.procs").exists() {
        first
    } else {
        // Version 2 counts in a group only what its parent was told to.
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
    fn threads_are_cleared_for_a_while_and_until_they_are_many_more() {
        let at = Instant::now();
        let cleared = Cleared(Some((256, at)));
        assert!(!Cleared::default().holds(256, 512, at));
        assert!(cleared.holds(300, 512, at));
        assert!(!cleared.holds(320, 512, at));
        assert!(!cleared.holds(256, 512, at + CLEARED_FOR));
    }
}
