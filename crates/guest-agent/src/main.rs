//! The guest agent: the one process of ours inside every sandbox.
//!
//! `emergent-guest init` is the sandbox's first process. It serves the channel on its standard input and output,
//! reaps orphans, guards the memory, and takes further channels from `emergent-guest connect`, which the server
//! starts in the sandbox when the first channel broke: it hands its own standard input and output over to the
//! agent and waits, so that every channel is served by the one process that knows the running commands.
//! `emergent-guest run-as` becomes another user's program, and `end-family` ends what that has started; the agent starts
//! and ends servers with them.
//!
//! It has no runtime dependency (static binary, no shell, no name service look-ups), no async runtime, and one
//! thread for each call that runs.

mod activity;
mod agent;
mod background;
mod bash;
mod call;
mod cgroup;
mod command;
mod connection;
mod disk;
mod dispatch;
mod family;
mod git;
mod handover;
mod memory;
mod output;
mod procfs;
mod reaper;
mod search;
mod serve;
mod shell;
mod spawn;
mod tunnel;
mod user;
mod wake;
mod workers;

use std::os::fd::OwnedFd;
use std::process::ExitCode;

use agent::Agent;

fn main() -> ExitCode {
    limit_allocator();
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let result = match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["init"] => init(),
        ["connect"] => handover::connect(),
        [user::RUN_AS, ids, program, ref rest @ ..] => user::run_as(ids, program, rest),
        [user::END_FAMILY, ids, tag] => user::end_family(ids, tag),
        ["version"] => {
            log(&format!(
                "emergent-guest {} protocol {}",
                env!("CARGO_PKG_VERSION"),
                emergent_guest_protocol::PROTOCOL_VERSION
            ));
            Ok(())
        }
        _ => Err("usage: emergent-guest init|connect|version".to_owned()),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            log(&message);
            ExitCode::FAILURE
        }
    }
}

/// Runs the sandbox until it is told to stop.
fn init() -> Result<(), String> {
    agent::block_stop_signals();
    restore_stack_limit();
    let agent = Agent::start();
    let listener = handover::listen()?;
    let (input, output) = take_stdio()?;
    connection::serve_in_background(&agent, input, output, None);
    let accepting = std::sync::Arc::clone(&agent);
    workers::spawn_thread("accept", move || handover::accept_for_ever(&accepting, &listener));
    agent.run_until_signalled();
    Ok(())
}

/// Standard input and output become the first channel; what the agent or a child prints by mistake must not
/// get into it.
fn take_stdio() -> Result<(OwnedFd, OwnedFd), String> {
    let take = || -> rustix::io::Result<(OwnedFd, OwnedFd)> {
        let input = rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdin(), 3)?;
        let output = rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdout(), 3)?;
        rustix::stdio::dup2_stdout(rustix::stdio::stderr())?;
        if let Ok(null) = rustix::fs::open("/dev/null", rustix::fs::OFlags::RDONLY, rustix::fs::Mode::empty())
        {
            rustix::stdio::dup2_stdin(&null)?;
        }
        Ok((input, output))
    };
    take().map_err(|error| format!("can't take over standard input and output: {error}"))
}

/// The agent itself runs with a small stack; what it starts gets the usual one.
fn restore_stack_limit() {
    const USUAL_BYTES: libc::rlim_t = 8 << 20;
    // SAFETY: both calls only read and write the limit on this stack.
    unsafe {
        let mut limit: libc::rlimit = std::mem::zeroed();
        if libc::getrlimit(libc::RLIMIT_STACK, &raw mut limit) == 0 && limit.rlim_cur < USUAL_BYTES {
            limit.rlim_cur = USUAL_BYTES.min(limit.rlim_max);
            libc::setrlimit(libc::RLIMIT_STACK, &raw const limit);
        }
    }
}

/// One memory pool instead of one per thread: the agent must stay small.
fn limit_allocator() {
    // SAFETY: mallopt only changes the allocator's own settings, and no other thread runs yet.
    #[cfg(target_env = "gnu")]
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1);
        libc::mallopt(libc::M_TRIM_THRESHOLD, 256 * 1024);
        libc::mallopt(libc::M_MMAP_THRESHOLD, 256 * 1024);
    }
}

/// The agent's own log: standard error, which the server keeps with the workspace's logs.
pub(crate) fn log(message: &str) {
    use std::io::Write;
    let _ = writeln!(std::io::stderr(), "{message}");
}
