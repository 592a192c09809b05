//! Runs one process to its end: passes its output to a sink, limits its time, and ends its whole family.
//!
//! ```text
//! running ──time-out, cancel, kill──▶ terminating (SIGTERM) ──5 s──▶ killed (SIGKILL)
//!    │                                     │                              │
//!    └───────────── the process ends ──────┴──────────────────────────────┘
//! ```
//!
//! The call ends when the process ends, not when its streams close: background processes of the command continue. Their output
//! is read and dropped, so that they neither block nor get SIGPIPE.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use emergent_wire::tools::TERMINATE_GRACE_MS;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, Signal};

use crate::family::Family;
use crate::reaper::{Ended, Exit, Reaper};
use crate::spawn::{Input, Program, Spawned};
use crate::wake::Wake;
use crate::{family, memory, procfs, workers};

/// Commands that run now, in the foreground or the background.
static RUNNING: AtomicUsize = AtomicUsize::new(0);

/// The capacity of a pipe: the most output that is left in it when its process has ended.
const PIPE_BYTES: usize = 64 * 1024;

/// The time for which a start waits while the task limit is reached, and the interval of its attempts.
const ROOM_TIME: Duration = Duration::from_secs(5);
const ROOM_LOOK_EVERY: Duration = Duration::from_millis(50);

/// One of a process's two output streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stream {
    Stdout,
    Stderr,
}

/// Takes the output of a process.
pub(crate) trait Sink {
    /// Whether it can take output now; if not, the pipes are not read.
    fn is_ready(&mut self) -> bool {
        true
    }

    /// Takes output. `false` ends the command.
    fn take(&mut self, stream: Stream, bytes: &[u8]) -> bool;

    /// Whether the output is complete although the process continues.
    fn is_complete(&self) -> bool {
        false
    }
}

/// A started process.
pub(crate) struct Started {
    pub(crate) pid: i32,
    pub(crate) tag: String,
    pub(crate) exit: Arc<Exit>,
    pub(crate) stdin: Option<OwnedFd>,
    stdout: Option<OwnedFd>,
    stderr: Option<OwnedFd>,
    /// The start of its command, in clock ticks.
    began: u64,
}

/// The reason for which the agent ended a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stopped {
    TimedOut,
    Cancelled,
}

/// The end of a command.
pub(crate) struct Outcome {
    pub(crate) ended: Ended,
    pub(crate) stopped: Option<Stopped>,
    pub(crate) duration: Duration,
}

/// Starts a process in a session of its own.
pub(crate) fn start(
    reaper: &Reaper,
    program: &Path,
    arguments: &[&str],
    directory: &Path,
    environment: &BTreeMap<String, String>,
    input: &Input,
) -> std::io::Result<Started> {
    let tag = uuid::Uuid::new_v4().simple().to_string();
    let program =
        Program { path: program, arguments, directory, environment, tag: (family::TAG_VARIABLE, &tag) };
    let (Spawned { pid, stdin, stdout, stderr }, exit) = start_when_possible(reaper, &program, input)?;
    memory::make_first_victim(pid);
    Ok(Started { pid, tag, exit, stdin, stdout: Some(stdout), stderr: Some(stderr), began: u64::MAX })
}

/// Starts a process. While the task limit is reached it waits for the task guard to make room.
fn start_when_possible(
    reaper: &Reaper,
    program: &Program<'_>,
    input: &Input,
) -> std::io::Result<(Spawned, Arc<Exit>)> {
    let deadline = Instant::now() + ROOM_TIME;
    loop {
        match reaper.spawn(program, input) {
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock && Instant::now() < deadline => {
                std::thread::sleep(ROOM_LOOK_EVERY);
            }
            started => return started,
        }
    }
}

impl Started {
    /// Signals the process group, and those of its family that left it.
    fn signal(&self, signal: Signal) {
        if self.exit.ended().is_none()
            && let Some(group) = Pid::from_raw(self.pid)
        {
            let _ = rustix::process::kill_process_group(group, signal);
        }
        family::signal(&self.family().members(), signal);
    }

    fn family(&self) -> Family<'_> {
        Family { tag: &self.tag, began: self.began, is_alone: RUNNING.load(Ordering::SeqCst) == 1 }
    }

    /// Reads the process's output until it has ended.
    ///
    /// `wake` must be the one that is set when `stop` becomes true or the sink becomes ready.
    pub(crate) fn run(
        mut self,
        sink: &mut dyn Sink,
        timeout: Option<Duration>,
        stop: &AtomicBool,
        wake: &Arc<Wake>,
        drain: &Drain,
    ) -> Outcome {
        RUNNING.fetch_add(1, Ordering::SeqCst);
        self.began = procfs::now_ticks();
        // Only a search's reply is complete before the end of the process, and `follow` runs those.
        let outcome = loop {
            if let Some(outcome) = self.follow(sink, timeout, stop, wake) {
                break outcome;
            }
        };
        RUNNING.fetch_sub(1, Ordering::SeqCst);
        for stream in [self.stdout.take(), self.stderr.take()].into_iter().flatten() {
            drain.add(stream);
        }
        outcome
    }

    /// Reads the process's output until it ends, or the sink is complete: then there is no outcome yet.
    pub(crate) fn follow(
        &mut self,
        sink: &mut dyn Sink,
        timeout: Option<Duration>,
        stop: &AtomicBool,
        wake: &Arc<Wake>,
    ) -> Option<Outcome> {
        let begun = Instant::now();
        let mut phase = Phase::Running { deadline: timeout.map(|timeout| begun + timeout) };
        let mut stopped = None;
        self.exit.notify(wake);
        for stream in [&self.stdout, &self.stderr].into_iter().flatten() {
            let _ = rustix::io::ioctl_fionbio(stream, true);
        }
        let mut buffer = vec![0_u8; PIPE_BYTES];
        let ended = loop {
            self.wait(sink.is_ready(), wake, phase.next_deadline());
            wake.clear();
            let ended = self.exit.ended();
            let wanted = self.pump(sink, &mut buffer);
            if stopped.is_none() && sink.is_complete() {
                return None;
            }
            if let Some(ended) = ended {
                // All its output is in the pipes by now.
                if sink.is_ready() || stop.load(Ordering::SeqCst) {
                    self.pump(sink, &mut buffer);
                    break ended;
                }
                continue;
            }
            let reason = if !wanted || stop.load(Ordering::SeqCst) {
                Some(Stopped::Cancelled)
            } else if phase.is_over() {
                Some(Stopped::TimedOut)
            } else {
                None
            };
            if let Some(signal) = phase.advance(reason) {
                stopped = stopped.or(reason);
                self.signal(signal);
            }
        };
        let duration = begun.elapsed();
        if stopped.is_some() {
            self.end_family(&phase);
        }
        Some(Outcome { ended, stopped, duration })
    }

    /// Waits until there is output to take, a wake-up, or the deadline.
    fn wait(&self, take_output: bool, wake: &Arc<Wake>, deadline: Option<Instant>) {
        let mut fds = vec![PollFd::new(wake, PollFlags::IN)];
        if take_output {
            fds.extend(
                [&self.stdout, &self.stderr].into_iter().flatten().map(|fd| PollFd::new(fd, PollFlags::IN)),
            );
        }
        let timeout = deadline.map(|deadline| {
            let left = deadline.saturating_duration_since(Instant::now());
            Timespec { tv_sec: left.as_secs().cast_signed(), tv_nsec: left.subsec_nanos().into() }
        });
        let _ = poll(&mut fds, timeout.as_ref());
    }

    /// Takes the bytes in the pipes, at most the capacity of each. False when the sink takes no more.
    fn pump(&mut self, sink: &mut dyn Sink, buffer: &mut [u8]) -> bool {
        for stream in [Stream::Stdout, Stream::Stderr] {
            let pipe = match stream {
                Stream::Stdout => &mut self.stdout,
                Stream::Stderr => &mut self.stderr,
            };
            let mut taken = 0;
            while taken < PIPE_BYTES && sink.is_ready() {
                let Some(fd) = pipe else { break };
                match rustix::io::read(fd, &mut *buffer) {
                    Ok(0) => *pipe = None,
                    Ok(length) => {
                        taken += length;
                        if !sink.take(stream, &buffer[..length]) {
                            return false;
                        }
                    }
                    Err(Errno::INTR) => {}
                    Err(Errno::AGAIN) => break,
                    Err(_) => *pipe = None,
                }
            }
        }
        true
    }

    /// Ends the family of a command that the agent has ended: the rest of the grace, then SIGKILL.
    fn end_family(&self, phase: &Phase) {
        // Nothing but the reaper learns of an orphan's end, so the processes are polled.
        const LOOK_EVERY: Duration = Duration::from_millis(20);
        let deadline = phase.next_deadline().unwrap_or_else(Instant::now);
        while Instant::now() < deadline && !self.family().members().is_empty() {
            std::thread::sleep(LOOK_EVERY);
        }
        self.family().kill();
    }
}

enum Phase {
    Running { deadline: Option<Instant> },
    Terminating { kill_at: Instant },
    Killed,
}

impl Phase {
    fn next_deadline(&self) -> Option<Instant> {
        match self {
            Phase::Running { deadline } => *deadline,
            Phase::Terminating { kill_at } => Some(*kill_at),
            Phase::Killed => None,
        }
    }

    fn is_over(&self) -> bool {
        self.next_deadline().is_some_and(|deadline| Instant::now() >= deadline)
    }

    /// The signal to send now, if any.
    fn advance(&mut self, reason: Option<Stopped>) -> Option<Signal> {
        match self {
            Phase::Running { .. } if reason.is_some() => {
                let kill_at = Instant::now() + Duration::from_millis(TERMINATE_GRACE_MS);
                *self = Phase::Terminating { kill_at };
                Some(Signal::TERM)
            }
            Phase::Terminating { .. } if self.is_over() => {
                *self = Phase::Killed;
                Some(Signal::KILL)
            }
            _ => None,
        }
    }
}

/// Reads and drops the output of processes whose command has ended.
#[derive(Default)]
pub(crate) struct Drain {
    pipes: Arc<Mutex<Vec<OwnedFd>>>,
    wake: OnceLock<Option<Arc<Wake>>>,
}

/// Further pipes are closed: a process that writes to one gets SIGPIPE.
const MAX_DRAINED: usize = 256;

impl Drain {
    fn add(&self, pipe: OwnedFd) {
        let wake = self.wake.get_or_init(|| {
            let wake = Arc::new(Wake::new().ok()?);
            let (pipes, woken) = (Arc::clone(&self.pipes), Arc::clone(&wake));
            workers::spawn_thread("drain", move || drain_pipes(&pipes, &woken)).then_some(wake)
        });
        let Some(wake) = wake else { return };
        let mut pipes = self.pipes.lock().unwrap_or_else(PoisonError::into_inner);
        if pipes.len() < MAX_DRAINED {
            pipes.push(pipe);
        }
        drop(pipes);
        wake.set();
    }
}

fn drain_pipes(added: &Mutex<Vec<OwnedFd>>, wake: &Wake) {
    let mut pipes: Vec<OwnedFd> = Vec::new();
    let mut buffer = [0_u8; 4096];
    loop {
        let mut fds = vec![PollFd::new(wake, PollFlags::IN)];
        fds.extend(pipes.iter().map(|pipe| PollFd::from_borrowed_fd(pipe.as_fd(), PollFlags::IN)));
        let _ = poll(&mut fds, None);
        let ready: Vec<bool> = fds.iter().skip(1).map(|fd| !fd.revents().is_empty()).collect();
        drop(fds);
        wake.clear();
        let mut index = 0;
        pipes.retain(|pipe| {
            let is_ready = ready.get(index).copied().unwrap_or(false);
            index += 1;
            !is_ready
                || match rustix::io::read(pipe, &mut buffer) {
                    Ok(length) => length > 0,
                    Err(error) => error == Errno::AGAIN || error == Errno::INTR,
                }
        });
        pipes.append(&mut added.lock().unwrap_or_else(PoisonError::into_inner));
        pipes.truncate(MAX_DRAINED);
    }
}
