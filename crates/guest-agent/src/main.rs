//! The guest agent: the one process of ours inside every sandbox.
//!
//! `emergent-guest init` is the sandbox's first process. It serves the channel on its standard input and output,
//! reaps orphans, guards the memory, and takes further channels from `emergent-guest connect`, which the server
//! starts in the sandbox when the first channel broke: it hands its own standard input and output over to the
//! agent and waits, so that every channel is served by the one process that knows the running commands.
//! As `/init` it is the first process of a virtual machine, and channels come over vsock (`machine`).
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
mod listen;
mod machine;
mod memory;
mod output;
mod procfs;
mod reaper;
mod search;
mod serve;
mod shell;
mod spawn;
mod tasks;
mod tunnel;
mod user;
mod wake;
mod workers;

use std::os::fd::OwnedFd;
use std::process::ExitCode;

use agent::Agent;

fn main() -> ExitCode {
    limit_allocator();
    let mut arguments = std::env::args();
    let is_first = arguments.next().as_deref() == Some(machine::INIT) && std::process::id() == 1;
    // A kernel passes on whatever words it does not know.
    let arguments: Vec<String> = if is_first { vec![machine::INIT.to_owned()] } else { arguments.collect() };
    let result = match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["init"] => init(),
        [machine::INIT] => machine::run(),
        ["connect"] => handover::connect(),
        [user::RUN_AS, ids, program, ref rest @ ..] => user::run_as(ids, program, rest),
        [user::END_FAMILY, ids, tag] => user::end_family(ids, tag),
        [git::credentials::SUBCOMMAND, name, operation] => git::credentials::report(name, operation),
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
    set_usual_limits();
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

/// What commands may use at most, the same in every sandbox. The agent itself runs with a small stack; what it starts gets
/// the usual one. Open files are as many as the host's engine likes, in a machine few.
fn set_usual_limits() {
    const STACK_BYTES: libc::rlim_t = 8 << 20;
    const OPEN_FILES: libc::rlim_t = 16 << 10;
    const MOST_OPEN_FILES: libc::rlim_t = 1 << 20;
    // SAFETY: the calls only read and write the limit on this stack.
    unsafe {
        let mut limit: libc::rlimit = std::mem::zeroed();
        if libc::getrlimit(libc::RLIMIT_STACK, &raw mut limit) == 0 && limit.rlim_cur < STACK_BYTES {
            limit.rlim_cur = STACK_BYTES.min(limit.rlim_max);
            libc::setrlimit(libc::RLIMIT_STACK, &raw const limit);
        }
        if libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) == 0 {
            if machine::is_machine() {
                limit.rlim_max = MOST_OPEN_FILES;
            }
            limit.rlim_cur = OPEN_FILES.min(limit.rlim_max);
            libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit);
        }
        // No core files unless a command asks for them.
        if libc::getrlimit(libc::RLIMIT_CORE, &raw mut limit) == 0 {
            limit.rlim_cur = 0;
            libc::setrlimit(libc::RLIMIT_CORE, &raw const limit);
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
