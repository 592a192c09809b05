//! Starts processes and collects their exit statuses: those of commands, and as PID 1 those of all orphans.
//!
//! One thread waits for any child. A process is started and registered under one lock, so that its status is never collected
//! before it is registered.

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};

use crate::spawn::{self, Input, Program, Spawned};
use crate::tasks::TaskGuard;
use crate::wake::Wake;

/// The end of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ended {
    Exited(i32),
    Signalled(i32),
}

/// The exit status of one process, once it has ended.
#[derive(Debug, Default)]
pub(crate) struct Exit {
    ended: OnceLock<Ended>,
    wake: Mutex<Option<Arc<Wake>>>,
}

impl Exit {
    /// The end of the process. None while it runs.
    pub(crate) fn ended(&self) -> Option<Ended> {
        self.ended.get().copied()
    }

    /// Sets `wake`, and no other, when the process ends.
    pub(crate) fn notify(&self, wake: &Arc<Wake>) {
        *self.wake.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::clone(wake));
        if self.ended().is_some() {
            wake.set();
        }
    }
}

/// All children.
#[derive(Default)]
pub(crate) struct Reaper {
    children: Mutex<HashMap<i32, Arc<Exit>>>,
    spawned: Condvar,
    /// Limits the tasks of the started processes.
    pub(crate) tasks: TaskGuard,
}

impl Reaper {
    /// Starts a process.
    pub(crate) fn spawn(
        &self,
        program: &Program<'_>,
        input: &Input,
    ) -> std::io::Result<(Spawned, Arc<Exit>)> {
        let mut children = self.children.lock().unwrap_or_else(PoisonError::into_inner);
        let spawned = spawn::spawn(program, input)?;
        let exit = Arc::new(Exit::default());
        children.insert(spawned.pid, Arc::clone(&exit));
        drop(children);
        self.spawned.notify_all();
        self.tasks.admit(spawned.pid);
        Ok((spawned, exit))
    }

    /// Collects exit statuses for ever.
    pub(crate) fn run(&self) {
        loop {
            // Waits without collecting: a spawn that fails collects its own child, under the lock.
            let Some(pid) = wait_for_any() else {
                let children = self.children.lock().unwrap_or_else(PoisonError::into_inner);
                // There is no child; only a spawn makes one.
                if children.is_empty() {
                    drop(self.spawned.wait(children).unwrap_or_else(PoisonError::into_inner));
                }
                continue;
            };
            let mut children = self.children.lock().unwrap_or_else(PoisonError::into_inner);
            let Some(ended) = collect(pid) else { continue };
            let Some(exit) = children.remove(&pid) else {
                continue;
            };
            drop(children);
            let _ = exit.ended.set(ended);
            if let Some(wake) = exit.wake.lock().unwrap_or_else(PoisonError::into_inner).as_ref() {
                wake.set();
            }
        }
    }
}

/// Waits until some child has ended and leaves it for [`collect`]. None when there is no child.
fn wait_for_any() -> Option<i32> {
    loop {
        // SAFETY: siginfo_t is plain data that waitid fills in; zeroes are a valid value of it.
        let (result, pid) = unsafe {
            let mut info: libc::siginfo_t = std::mem::zeroed();
            let result = libc::waitid(libc::P_ALL, 0, &raw mut info, libc::WEXITED | libc::WNOWAIT);
            (result, info.si_pid())
        };
        if result == 0 {
            return Some(pid);
        }
        if std::io::Error::last_os_error().raw_os_error() != Some(libc::EINTR) {
            return None;
        }
    }
}

/// Collects the end of one child.
fn collect(pid: i32) -> Option<Ended> {
    let mut status = 0;
    // SAFETY: waitpid writes the status through a valid pointer and touches nothing else.
    let result = unsafe { libc::waitpid(pid, &raw mut status, libc::WNOHANG) };
    if result != pid {
        return None;
    }
    if libc::WIFSIGNALED(status) {
        return Some(Ended::Signalled(libc::WTERMSIG(status)));
    }
    Some(Ended::Exited(libc::WEXITSTATUS(status)))
}

/// A signal's name.
pub(crate) fn signal_name(signal: i32) -> String {
    let name = match signal {
        libc::SIGHUP => "SIGHUP",
        libc::SIGINT => "SIGINT",
        libc::SIGQUIT => "SIGQUIT",
        libc::SIGILL => "SIGILL",
        libc::SIGTRAP => "SIGTRAP",
        libc::SIGABRT => "SIGABRT",
        libc::SIGBUS => "SIGBUS",
        libc::SIGFPE => "SIGFPE",
        libc::SIGKILL => "SIGKILL",
        libc::SIGUSR1 => "SIGUSR1",
        libc::SIGSEGV => "SIGSEGV",
        libc::SIGUSR2 => "SIGUSR2",
        libc::SIGPIPE => "SIGPIPE",
        libc::SIGALRM => "SIGALRM",
        libc::SIGTERM => "SIGTERM",
        libc::SIGXCPU => "SIGXCPU",
        libc::SIGXFSZ => "SIGXFSZ",
        libc::SIGSYS => "SIGSYS",
        other => return format!("signal {other}"),
    };
    name.to_owned()
}
