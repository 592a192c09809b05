//! Priority of the agent and of gVisor over commands, within one gVisor sandbox.
//!
//! gVisor runs each process of the sandbox as a process of the host, cloned from the first one that it made. A clone inherits
//! its parent's OOM score and scheduling priority. So it is enough to set both once, when only the agent runs:
//!
//! - **Memory.** The first process gets the highest OOM score, so later ones (commands) have it too. The agent watches memory
//!   and acts first, but on a busy host it may be too late; then the kernel ends a command and not the whole sandbox.
//! - **CPU.** gVisor and the agent get the highest priority within the sandbox's control group. Otherwise a fork bomb in a
//!   sandbox with half a CPU leaves the agent, which ends fork bombs, without CPU time. Other sandboxes are not affected:
//!   the group's quota and weight stay.
//!
//! Both are a second line. Where they can't be set (no root, another host, a gVisor that works otherwise) the agent works
//! without them.

use std::fs;
use std::io;

use emergent_host::processes::{self, unless_gone};
use procfs::process::{Process, Task};
use rustix::process::{Pid, setpriority_process};

/// The OOM score of processes that the kernel kills before all others of the same memory limit.
const FIRST: &str = "1000";

/// The highest scheduling priority.
const HIGHEST_PRIORITY: i32 = -20;

/// Makes commands that start later the first to be killed and the last to be scheduled. `sandbox` is the process of gVisor.
pub(crate) fn prefer_agent_over_commands(sandbox: i32) -> io::Result<()> {
    let mut processes = children(sandbox)?;
    processes.sort_by_key(|pid| (start_time(*pid), *pid));
    let Some((first, others)) = processes.split_first() else {
        return Ok(());
    };
    fs::write(format!("/proc/{first}/oom_score_adj"), FIRST)?;
    others.iter().chain([&sandbox]).try_for_each(|pid| prioritize(*pid))
}

/// Gives all threads of a process the highest priority; threads that they start later inherit it.
fn prioritize(process: i32) -> io::Result<()> {
    for thread in threads(process)? {
        // `setpriority` takes no id as the calling thread.
        let Some(thread) = Pid::from_raw(thread?.tid) else { continue };
        match setpriority_process(Some(thread), HIGHEST_PRIORITY) {
            // The thread has ended.
            Ok(()) | Err(rustix::io::Errno::SRCH) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// The threads of a process. A process that is gone is an error.
fn threads(of: i32) -> io::Result<impl Iterator<Item = io::Result<Task>>> {
    let threads = Process::new(of).and_then(|process| process.tasks()).map_err(io::Error::other)?;
    Ok(threads.filter_map(|thread| unless_gone(thread).transpose()))
}

fn children(of: i32) -> io::Result<Vec<i32>> {
    let mut all = Vec::new();
    for thread in threads(of)? {
        all.extend(thread?.children().unwrap_or_default().into_iter().map(u32::cast_signed));
    }
    Ok(all)
}

/// The start time of a process, in ticks since the host's start.
fn start_time(pid: i32) -> Option<u64> {
    Some(processes::stat(pid).ok()??.starttime)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use super::*;

    #[test]
    fn children_of_any_thread_are_found_in_the_order_of_their_start() {
        let spawn = || std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let mut started = [spawn(), std::thread::spawn(spawn).join().unwrap()];
        let own = std::process::id().cast_signed();
        let mut found = children(own).unwrap();
        found.sort_by_key(|pid| (start_time(*pid), *pid));
        let expected: Vec<i32> = started.iter().map(|child| child.id().cast_signed()).collect();
        found.retain(|pid| expected.contains(pid));
        started.iter_mut().for_each(|child| child.kill().and_then(|()| child.wait()).map(drop).unwrap());
        assert_eq!(found, expected);
        assert!(threads(own).unwrap().any(|thread| thread.unwrap().tid == own));
        assert!(threads(expected[0]).is_err(), "it has ended");
    }
}
