//! The guest agent: the server's process inside every sandbox.
//!
//! | command | purpose |
//! |---|---|
//! | `init` | The first process of a container. It serves the channel on its standard input and output, reaps orphans, and guards memory and tasks. |
//! | `/init` | The same as the first process of a virtual machine. Channels come over vsock (`machine`). |
//! | `connect` | Opens another channel after the first one broke: it passes its standard input and output to the agent. So one process serves all channels and knows all running commands. |
//! | `run-as` | Changes its user and executes a server's program. |
//! | `end-family` | Kills the processes that such a program has started. |
//! | `git-credential` | Reports to the agent that git asks for credentials. |
//!
//! The agent is a static binary without a shell, name service look-ups or an async runtime. Each running call has a thread.

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
use emergent_guest_protocol::{CONNECT_COMMAND, INIT_COMMAND, PROTOCOL_VERSION};
use emergent_guest_tools::procfs;

fn main() -> ExitCode {
    limit_allocator();
    let mut arguments = std::env::args();
    let is_first = arguments.next().as_deref() == Some(machine::INIT) && std::process::id() == 1;
    // The kernel passes the parameters that it does not know to `/init`.
    let arguments: Vec<String> = if is_first { vec![machine::INIT.to_owned()] } else { arguments.collect() };
    let result = match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [INIT_COMMAND] => init(),
        [machine::INIT] => machine::run(),
        [CONNECT_COMMAND] => handover::connect(),
        [user::RUN_AS, ids, program, ref rest @ ..] => user::run_as(ids, program, rest),
        [user::END_FAMILY, ids, tag] => user::end_family(ids, tag),
        [git::credentials::SUBCOMMAND, name, operation] => git::credentials::report(name, operation),
        ["version"] => {
            log(&format!("emergent-guest {} protocol {PROTOCOL_VERSION}", env!("CARGO_PKG_VERSION")));
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

/// Runs the sandbox until it gets SIGTERM or SIGINT.
fn init() -> Result<(), String> {
    agent::block_stop_signals();
    set_usual_limits();
    let agent = Agent::start();
    let listener = handover::listen()?;
    let (input, output) = take_stdio()?;
    connection::serve_in_background(&agent, input, output, None, connection::MAX_CONNECTIONS);
    let accepting = std::sync::Arc::clone(&agent);
    workers::spawn_thread("accept", move || handover::accept_channels(&accepting, &listener));
    agent.run_until_signalled();
    Ok(())
}

/// Makes standard input and output the first channel. Both are replaced, so that output of the agent or a child by mistake
/// can't get into the channel.
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

/// Sets the resource limits of commands, the same in every sandbox. Without this, commands would inherit the agent's small
/// stack, and the limit on open files of the engine (in a virtual machine: of the kernel).
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
