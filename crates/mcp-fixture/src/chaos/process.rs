//! The process itself: its signals, who it is, and the children it leaves behind.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::thread;

use serde_json::json;

/// The argument that makes this program a mere sleeper; the next one says for how many seconds.
pub(crate) const SLEEPER: &str = "--sleep";

/// Ends the process on SIGTERM, or not at all. As the first process of a container it would ignore the signal unless
/// it handles it, so the well-behaved modes do.
pub(crate) fn set_termination(ends: bool) {
    extern "C" fn end(_signal: libc::c_int) {
        // SAFETY: `_exit` may be called from a signal handler, which `std::process::exit` may not.
        unsafe { libc::_exit(0) }
    }
    let handler = if ends { end as *const () as libc::sighandler_t } else { libc::SIG_IGN };
    // SAFETY: the handler is a function of the kind asked for, and does nothing that a handler must not do.
    unsafe { libc::signal(libc::SIGTERM, handler) };
}

/// Who and where this is, as JSON.
pub(crate) fn whoami() -> String {
    // SAFETY: these calls take nothing and can't fail.
    let (uid, gid) = unsafe { (libc::getuid(), libc::getgid()) };
    let directory = std::env::current_dir().map(|path| path.display().to_string()).unwrap_or_default();
    let argv: Vec<String> = std::env::args().collect();
    json!({"uid": uid, "gid": gid, "cwd": directory, "argv": argv, "pid": std::process::id()}).to_string()
}

/// Starts a process that sleeps in a session of its own, out of reach of who kills this one's process group. It may
/// inherit standard output and error, so that they stay open when this process is gone.
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
