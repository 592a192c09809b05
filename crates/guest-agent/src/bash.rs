//! The bash tool: runs a command in the foreground and sends its output as it comes or at the end.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use emergent_guest_protocol::{BashCall, Kind};
use emergent_wire::tools::{BashAnswer, BashRequest, WORKSPACE_DIR};
use emergent_wire::{ErrorCode, ErrorDetail, Validate as _};

use crate::agent::Agent;
use crate::call::{Call, cancelled};
use crate::command::{Outcome, Sink, Started, Stopped, Stream};
use crate::memory::OomCheck;
use crate::output::Collected;
use crate::reaper::{Ended, signal_name};

/// Runs a command to its end.
pub(crate) fn run(
    agent: &Arc<Agent>,
    call: &Arc<Call>,
    message: &BashCall,
) -> Result<BashAnswer, ErrorDetail> {
    let request = &message.request;
    request.validate()?;
    let (oom, disk_kills) = (OomCheck::begin(&agent.memory), agent.disk.kills());
    let started = start(agent, request)?;
    let (pid, tag) = (started.pid, started.tag.clone());
    let timeout = request.effective_timeout_ms().map(Duration::from_millis);
    let wake = call.wake().map_err(|error| ErrorDetail::new(ErrorCode::LimitReached, error.to_string()))?;
    let mut answer;
    let outcome;
    if message.stream {
        let collected = message.collect.then(|| Collected::new(message.operation_id));
        let mut sink = Watched { live: Live::new(call), collected };
        outcome = started.run(&mut sink, timeout, &call.cancelled, &wake, &agent.drain);
        answer = answer_of(message, &outcome);
        (answer.stdout_bytes, answer.stderr_bytes) = (sink.live.stdout, sink.live.stderr);
        if let Some(output) = &sink.collected {
            describe_output(&mut answer, output);
            answer.stdout = String::from_utf8_lossy(&output.stdout.shown()).into_owned();
            answer.stderr = String::from_utf8_lossy(&output.stderr.shown()).into_owned();
        }
        sink.live.finish()?;
    } else {
        let mut output = Collected::new(message.operation_id);
        outcome = started.run(&mut output, timeout, &call.cancelled, &wake, &agent.drain);
        answer = answer_of(message, &outcome);
        describe_output(&mut answer, &output);
        call.send_data(Kind::Stdout, &output.stdout.shown())?;
        call.send_data(Kind::Stderr, &output.stderr.shown())?;
    }
    if outcome.stopped == Some(Stopped::Cancelled) {
        return Err(cancelled());
    }
    if let Some(note) = oom.victim(&agent.memory, pid, &tag) {
        answer.oom_killed = true;
        answer.notes.push(note);
    }
    answer.notes.extend(agent.reaper.tasks.note(&tag, outcome.ended));
    answer.notes.extend(agent.disk.note(agent, disk_kills));
    Ok(answer)
}

/// Starts the command of a request in its directory.
pub(crate) fn start(agent: &Arc<Agent>, request: &BashRequest) -> Result<Started, ErrorDetail> {
    let directory = directory_of(request)?;
    let started = agent.shells.start(agent, &request.command, &directory, &request.environment)?;
    agent.activity.begin();
    Ok(started)
}

fn directory_of(request: &BashRequest) -> Result<PathBuf, ErrorDetail> {
    let directory = match &request.workdir {
        None => return Ok(WORKSPACE_DIR.into()),
        Some(workdir) => Path::new(WORKSPACE_DIR).join(workdir),
    };
    match std::fs::metadata(&directory) {
        Ok(metadata) if metadata.is_dir() => Ok(directory),
        Ok(_) => Err(ErrorDetail::new(
            ErrorCode::WrongFileType,
            format!("workdir {} is not a directory", directory.display()),
        )),
        Err(error) => Err(ErrorDetail::new(
            ErrorCode::FileNotFound,
            format!("workdir {}: {error}; create it first, or leave workdir out", directory.display()),
        )),
    }
}

fn answer_of(message: &BashCall, outcome: &Outcome) -> BashAnswer {
    let (exit_code, signal) = describe_end(outcome.ended, outcome.stopped);
    BashAnswer {
        stdout: String::new(),
        stderr: String::new(),
        exit_code,
        signal,
        duration_ms: u64::try_from(outcome.duration.as_millis()).unwrap_or(u64::MAX),
        truncated: false,
        stdout_bytes: 0,
        stderr_bytes: 0,
        timed_out: outcome.stopped == Some(Stopped::TimedOut),
        oom_killed: false,
        stdout_path: None,
        stderr_path: None,
        notes: Vec::new(),
        operation_id: message.operation_id,
    }
}

/// The exit code and the signal for the caller. A command that the agent ended has no exit code.
pub(crate) fn describe_end(ended: Ended, stopped: Option<Stopped>) -> (Option<i32>, Option<String>) {
    match ended {
        Ended::Exited(code) if stopped.is_none() => (Some(code), None),
        Ended::Exited(_) => (None, None),
        Ended::Signalled(signal) => (None, Some(signal_name(signal))),
    }
}

fn describe_output(answer: &mut BashAnswer, output: &Collected) {
    answer.stdout_bytes = output.stdout.total;
    answer.stderr_bytes = output.stderr.total;
    answer.truncated = output.stdout.is_cut() || output.stderr.is_cut();
    answer.stdout_path = output.stdout.path();
    answer.stderr_path = output.stderr.path();
    answer.notes.extend(output.stdout.note("stdout"));
    answer.notes.extend(output.stderr.note("stderr"));
}

/// Sends output as it comes, and optionally collects it.
struct Watched<'a> {
    live: Live<'a>,
    collected: Option<Collected>,
}

impl Sink for Watched<'_> {
    fn is_ready(&mut self) -> bool {
        self.live.is_ready()
    }

    fn take(&mut self, stream: Stream, bytes: &[u8]) -> bool {
        if let Some(collected) = &mut self.collected {
            collected.take(stream, bytes);
        }
        self.live.take(stream, bytes)
    }
}

/// Sends output as it comes. The command's output is not read while the host grants no credit.
pub(crate) struct Live<'a> {
    call: &'a Call,
    stdout: u64,
    stderr: u64,
    /// Output that waits for credit.
    pending: Option<(Kind, Vec<u8>)>,
}

impl<'a> Live<'a> {
    pub(crate) fn new(call: &'a Call) -> Self {
        Self { call, stdout: 0, stderr: 0, pending: None }
    }

    /// Sends as much as the credit allows. False when the channel has ended.
    fn send(&mut self, kind: Kind, mut bytes: &[u8]) -> bool {
        while !bytes.is_empty() {
            match self.call.send_some(kind, bytes) {
                Ok(0) => {
                    self.pending = Some((kind, bytes.to_vec()));
                    return true;
                }
                Ok(sent) => bytes = &bytes[sent..],
                Err(_) => return false,
            }
        }
        true
    }

    /// Waits until all output is sent.
    pub(crate) fn finish(self) -> Result<(), ErrorDetail> {
        self.pending.map_or(Ok(()), |(kind, bytes)| self.call.send_data(kind, &bytes))
    }
}

impl Sink for Live<'_> {
    fn is_ready(&mut self) -> bool {
        if let Some((kind, bytes)) = self.pending.take() {
            self.send(kind, &bytes);
        }
        self.pending.is_none() && self.call.has_output_credit()
    }

    fn take(&mut self, stream: Stream, bytes: &[u8]) -> bool {
        let (kind, total) = match stream {
            Stream::Stdout => (Kind::Stdout, &mut self.stdout),
            Stream::Stderr => (Kind::Stderr, &mut self.stderr),
        };
        *total += bytes.len() as u64;
        self.send(kind, bytes)
    }
}
