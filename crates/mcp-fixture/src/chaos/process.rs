//! The process: its signals, its identity, and child processes that outlive it.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::thread;

use serde_json::json;

/// The argument that makes this program sleep and exit. The next argument is the number of seconds.
pub(crate) const SLEEPER: &str = "--sleep";

/// Lets SIGTERM end the process, or ignores it. The first process of a container ignores the signal unless it has a handler, so
/// the handler is set.
pub(crate) fn set_termination(ends: bool) {
    extern "C" fn end(_signal: libc::c_int) {
        // SAFETY: `_exit` may be called from a signal handler, which `std::process::exit` may not.
        unsafe { libc::_exit(0) }
    }
    let handler = if ends { end as *const () as libc::sighandler_t } else { libc::SIG_IGN };
    // SAFETY: the handler is a function of the kind asked for, and does nothing that a handler must not do.
    unsafe { libc::signal(libc::SIGTERM, handler) };
}

/// User, group, directory, arguments and id of the process, as JSON.
pub(crate) fn whoami() -> String {
    // SAFETY: these calls take nothing and can't fail.
    let (uid, gid) = unsafe { (libc::getuid(), libc::getgid()) };
    let directory = std::env::current_dir().map(|path| path.display().to_string()).unwrap_or_default();
    let argv: Vec<String> = std::env::args().collect();
    json!({"uid": uid, "gid": gid, "cwd": directory, "argv": argv, "pid": std::process::id()}).to_string()
}

/// Starts a process that sleeps in a session of its own, so that killing this process group does not end it. It can inherit
/// standard output and error, which keeps them open when this process has ended.
pub(crate) fn spawn_sleeper(seconds: u64, inherit: bool) -> io::Result<u32> {
    let output = || if inherit { Stdio::inherit() } else { Stdio::null() };
    let mut command = Command::new(std::env::current_exe()?);
    command.arg(SLEEPER).arg(seconds.to_string());
    command.stdin(Stdio::null()).stdout(output()).stderr(output());
    // SAFETY: between fork and exec only `setsid` is called, which needs no memory and takes no lock.
    unsafe {
        command.pre_exec(|| if libc::setsid() < 0 { Err(io::Error::last_os_error()) } else { Ok(()) });
    }
    let mut child = command.spawn()?;
    let pid = child.id();
    thread::spawn(move || child.wait());
    Ok(pid)
}
