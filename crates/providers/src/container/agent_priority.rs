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

use rustix::process::{Pid, setpriority_process};

/// The OOM score of processes that the kernel kills before all others of the same memory limit.
const FIRST: &str = "1000";

/// The highest scheduling priority.
const HIGHEST_PRIORITY: i32 = -20;

/// Makes commands that start later the first to be killed and the last to be scheduled. `sandbox` is the process of gVisor.
pub(crate) fn prefer_agent_over_commands(sandbox: i64) -> io::Result<()> {
    let mut processes = children(sandbox)?;
    processes.sort_by_key(|pid| (start_time(*pid), *pid));
    let Some((first, others)) = processes.split_first() else {
        return Ok(());
    };
    fs::write(format!("/proc/{first}/oom_score_adj"), FIRST)?;
    others.iter().chain([&sandbox]).try_for_each(|pid| prioritize(*pid))
}

/// Gives all threads of a process the highest priority; threads that they start later inherit it.
fn prioritize(process: i64) -> io::Result<()> {
    for thread in fs::read_dir(format!("/proc/{process}/task"))? {
        let name = thread?.file_name();
        let Some(thread) = name.to_str().and_then(|id| Pid::from_raw(id.parse().ok()?)) else {
            continue;
        };
        match setpriority_process(Some(thread), HIGHEST_PRIORITY) {
            // The thread has ended.
            Ok(()) | Err(rustix::io::Errno::SRCH) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

fn children(of: i64) -> io::Result<Vec<i64>> {
    let mut all = Vec::new();
    for thread in fs::read_dir(format!("/proc/{of}/task"))? {
        let text = fs::read_to_string(thread?.path().join("children")).unwrap_or_default();
        all.extend(text.split_ascii_whitespace().filter_map(|pid| pid.parse::<i64>().ok()));
    }
    Ok(all)
}

/// The start time of a process, in ticks since the host's start.
fn start_time(pid: i64) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(')')?.1.split_ascii_whitespace().nth(19)?.parse().ok()
}
