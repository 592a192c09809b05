//! Commands in the background: they outlive the call and the channel that started them.
//!
//! Both streams go to one file in the order of their arrival. An offset counts output bytes, so any offset is valid, and a
//! reader can continue at its offset after a restart of the server. A list of segments maps bytes to streams. `state.json`
//! holds the end of the command. If it says `running` and the agent does not know the command, the sandbox was stopped while
//! the command ran.

use std::collections::HashMap;
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use emergent_guest_protocol::{AttachCall, BashCall, Kind};
use emergent_wire::tools::{OperationAnswer, OperationStatus};
use emergent_wire::{ErrorCode, ErrorDetail, OperationId, Validate as _};
use serde::{Deserialize, Serialize};

use crate::agent::Agent;
use crate::call::{Call, cancelled};
use crate::command::{Sink, Stopped, Stream};
use crate::memory::OomCheck;
use crate::output::{self, MAX_SAVED_BYTES};
use crate::wake::Wake;
use crate::{bash, workers};

/// Commands that may run in the background at once.
const MAX_RUNNING: usize = 32;
/// Segments that are recorded; the rest of the output counts as one stream.
const MAX_SEGMENTS: usize = 64 * 1024;
/// The limit of an answer without `follow`.
const MAX_ANSWER_BYTES: u64 = 100 * 1024;
/// The size of the read buffer.
const CHUNK_BYTES: usize = 32 * 1024;

/// The running commands in the background.
#[derive(Default)]
pub(crate) struct Operations {
    running: Mutex<HashMap<OperationId, Arc<Operation>>>,
}

/// One command in the background.
struct Operation {
    stop: AtomicBool,
    wake: Arc<Wake>,
    begun: Instant,
    progress: Mutex<Progress>,
    changed: Condvar,
}

#[derive(Clone, Default)]
struct Progress {
    /// Bytes in the file.
    length: u64,
    /// Bytes that were not saved because the file is full.
    dropped: u64,
    /// The end offset of each segment, and its stream.
    segments: Vec<(u64, bool)>,
    state: Option<State>,
}

/// The content of `state.json`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct State {
    running: bool,
    exit_code: Option<i32>,
    signal: Option<String>,
    duration_ms: u64,
    timed_out: bool,
    oom_killed: bool,
    notes: Vec<String>,
    /// Ends of segments with `true` for stderr.
    segments: Vec<(u64, bool)>,
}

impl Operations {
    fn running(&self) -> std::sync::MutexGuard<'_, HashMap<OperationId, Arc<Operation>>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn count(&self) -> usize {
        self.running().len()
    }

    /// Starts a command in the background.
    pub(crate) fn start(
        &self,
        agent: &Arc<Agent>,
        message: &BashCall,
    ) -> Result<OperationAnswer, ErrorDetail> {
        message.request.validate()?;
        let id = message.operation_id;
        let wake =
            Wake::new().map_err(|error| ErrorDetail::new(ErrorCode::LimitReached, error.to_string()))?;
        let operation = Arc::new(Operation {
            stop: AtomicBool::new(false),
            wake: Arc::new(wake),
            begun: Instant::now(),
            progress: Mutex::default(),
            changed: Condvar::new(),
        });
        {
            let mut running = self.running();
            if running.len() >= MAX_RUNNING {
                let message = format!("{MAX_RUNNING} commands run in the background already: end one first");
                return Err(ErrorDetail::new(ErrorCode::LimitReached, message));
            }
            running.insert(id, Arc::clone(&operation));
        }
        let begin = || -> Result<_, ErrorDetail> {
            let directory = output::make_directory(id).map_err(|error| cannot_save(&error))?;
            let file = File::create(directory.join("log")).map_err(|error| cannot_save(&error))?;
            save_state(&directory, &State { running: true, ..State::default() })
                .map_err(|error| cannot_save(&error))?;
            let before = (OomCheck::begin(&agent.memory), agent.disk.kills());
            Ok((directory, file, before, bash::start(agent, &message.request)?))
        };
        let (directory, file, (oom, disk_kills), started) = begin().inspect_err(|_| {
            self.running().remove(&id);
            let _ = std::fs::remove_dir_all(output::directory_of(id));
        })?;
        let timeout = message.request.effective_timeout_ms().map(Duration::from_millis);
        let (agent, followed) = (Arc::clone(agent), Arc::clone(&operation));
        workers::spawn_thread("background", move || {
            let mut sink = Log { file, operation: &followed };
            let (pid, tag) = (started.pid, started.tag.clone());
            let outcome = started.run(&mut sink, timeout, &followed.stop, &followed.wake, &agent.drain);
            let (exit_code, signal) = bash::describe_end(outcome.ended, outcome.stopped);
            let victim = oom.victim(&agent.memory, pid, &tag);
            let (is_victim, disk) = (victim.is_some(), agent.disk.note(&agent, disk_kills));
            let mut progress = followed.progress.lock().unwrap_or_else(PoisonError::into_inner);
            let dropped = (progress.dropped > 0)
                .then(|| format!("{} bytes of output were not saved", progress.dropped));
            let state = State {
                running: false,
                exit_code,
                signal,
                duration_ms: millis(outcome.duration),
                timed_out: outcome.stopped == Some(Stopped::TimedOut),
                oom_killed: is_victim,
                notes: victim
                    .into_iter()
                    .chain(agent.reaper.tasks.note(&tag, outcome.ended))
                    .chain(disk)
                    .chain(dropped)
                    .collect(),
                segments: progress.segments.clone(),
            };
            // When the disk is full, readers get the state in memory until the sandbox stops.
            let _ = save_state(&directory, &state);
            progress.state = Some(state);
            drop(progress);
            followed.changed.notify_all();
            agent.operations.forget_later(id, &followed);
        });
        Ok(operation.answer(id))
    }

    /// Forgets ended commands whose state is on the disk.
    fn forget_later(&self, id: OperationId, operation: &Operation) {
        if read_state(&output::directory_of(id)).is_some_and(|state| !state.running)
            || self.count() > MAX_RUNNING / 2
        {
            self.running().remove(&id);
        }
        operation.changed.notify_all();
    }

    /// Ends a command in the background and answers when it has ended.
    pub(crate) fn kill(&self, id: OperationId) -> Result<OperationAnswer, ErrorDetail> {
        let found = self.running().get(&id).cloned();
        let Some(operation) = found else {
            return stored(id).map(|(_, answer)| answer);
        };
        operation.stop.store(true, Ordering::SeqCst);
        operation.wake.set();
        let mut progress = operation.progress.lock().unwrap_or_else(PoisonError::into_inner);
        while progress.state.is_none() {
            progress = operation.changed.wait(progress).unwrap_or_else(PoisonError::into_inner);
        }
        drop(progress);
        Ok(operation.answer(id))
    }

    /// Sends output from an offset on, and answers with the state of the command.
    pub(crate) fn attach(
        &self,
        call: &Arc<Call>,
        message: &AttachCall,
    ) -> Result<OperationAnswer, ErrorDetail> {
        let id = message.operation_id;
        let found = self.running().get(&id).cloned();
        let (live, mut progress, mut answer) = match &found {
            Some(operation) => (Some(operation), operation.progress(), operation.answer(id)),
            None => {
                let (progress, answer) = stored(id)?;
                (None, progress, answer)
            }
        };
        let file = File::open(output::directory_of(id).join("log")).map_err(|error| cannot_save(&error))?;
        let mut offset = message.offset.min(progress.length);
        let most = if message.follow { u64::MAX } else { message.offset.saturating_add(MAX_ANSWER_BYTES) };
        loop {
            offset = send_from(call, &file, &progress, offset, most)?;
            let Some(operation) = live else { break };
            if !message.follow || progress.state.is_some() {
                break;
            }
            progress = operation.wait_beyond(offset, call)?;
        }
        if let Some(operation) = live {
            answer = operation.answer(id);
        }
        answer.next_offset = offset;
        answer.more = offset < progress.length;
        Ok(answer)
    }
}

impl Operation {
    fn progress(&self) -> Progress {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Waits until there is output beyond `offset`, the command has ended, or the call was cancelled.
    fn wait_beyond(&self, offset: u64, call: &Call) -> Result<Progress, ErrorDetail> {
        let mut progress = self.progress.lock().unwrap_or_else(PoisonError::into_inner);
        while progress.length <= offset && progress.state.is_none() {
            if call.is_cancelled() {
                return Err(cancelled());
            }
            // Bounded, because the cancellation of a call does not wake this thread.
            let waited = self.changed.wait_timeout(progress, Duration::from_secs(1));
            progress = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        Ok(progress.clone())
    }

    fn answer(&self, id: OperationId) -> OperationAnswer {
        let progress = self.progress.lock().unwrap_or_else(PoisonError::into_inner);
        match &progress.state {
            Some(state) => state.answer(id),
            None => {
                let running =
                    State { running: true, duration_ms: millis(self.begun.elapsed()), ..State::default() };
                running.answer(id)
            }
        }
    }
}

impl State {
    fn answer(&self, id: OperationId) -> OperationAnswer {
        OperationAnswer {
            operation_id: id,
            status: if self.running { OperationStatus::Running } else { OperationStatus::Exited },
            exit_code: self.exit_code,
            signal: self.signal.clone(),
            duration_ms: self.duration_ms,
            timed_out: self.timed_out,
            oom_killed: self.oom_killed,
            stdout: String::new(),
            stderr: String::new(),
            next_offset: 0,
            more: false,
            notes: self.notes.clone(),
        }
    }
}

/// Sends the file's bytes from `offset` up to `most` or its end, by stream, and returns the end offset.
fn send_from(
    call: &Call,
    file: &File,
    progress: &Progress,
    offset: u64,
    most: u64,
) -> Result<u64, ErrorDetail> {
    let mut offset = offset;
    let mut buffer = vec![0_u8; CHUNK_BYTES];
    let end = progress.length.min(most);
    while offset < end {
        let segment = progress.segments.partition_point(|(end, _)| *end <= offset);
        let (segment_end, is_stderr) = progress.segments.get(segment).copied().unwrap_or((end, false));
        let length = usize::try_from(segment_end.min(end) - offset).unwrap_or(usize::MAX).min(CHUNK_BYTES);
        let read = file.read_at(&mut buffer[..length], offset).map_err(|error| cannot_save(&error))?;
        if read == 0 {
            break;
        }
        call.send_data(if is_stderr { Kind::Stderr } else { Kind::Stdout }, &buffer[..read])?;
        offset += read as u64;
    }
    Ok(offset)
}

/// The recorded state of a command that this agent does not run.
fn stored(id: OperationId) -> Result<(Progress, OperationAnswer), ErrorDetail> {
    let directory = output::directory_of(id);
    let state = read_state(&directory).ok_or_else(|| {
        let message = format!("no operation {id} in this workspace (the output of the last 100 is kept)");
        ErrorDetail::new(ErrorCode::NotFound, message)
    })?;
    let length = std::fs::metadata(directory.join("log")).map_or(0, |metadata| metadata.len());
    let mut answer = state.answer(id);
    if state.running {
        answer.status = OperationStatus::Lost;
        answer.notes.push("the sandbox was stopped or restarted while the command ran".to_owned());
    }
    Ok((Progress { length, segments: state.segments, ..Progress::default() }, answer))
}

/// Appends output to the file and wakes its followers.
struct Log<'a> {
    file: File,
    operation: &'a Operation,
}

impl Sink for Log<'_> {
    fn take(&mut self, stream: Stream, bytes: &[u8]) -> bool {
        let length = self.operation.progress.lock().unwrap_or_else(PoisonError::into_inner).length;
        let room = usize::try_from(MAX_SAVED_BYTES.saturating_sub(length)).unwrap_or(usize::MAX);
        let part = &bytes[..bytes.len().min(room)];
        let saved = if self.file.write_all(part).is_ok() { part.len() } else { 0 };
        let mut progress = self.operation.progress.lock().unwrap_or_else(PoisonError::into_inner);
        progress.length += saved as u64;
        progress.dropped += (bytes.len() - saved) as u64;
        let (end, is_stderr) = (progress.length, stream == Stream::Stderr);
        let full = progress.segments.len() >= MAX_SEGMENTS;
        match progress.segments.last_mut() {
            Some(last) if last.1 == is_stderr || full => last.0 = end,
            _ => progress.segments.push((end, is_stderr)),
        }
        drop(progress);
        self.operation.changed.notify_all();
        true
    }
}

fn save_state(directory: &Path, state: &State) -> std::io::Result<()> {
    let temporary: PathBuf = directory.join("state.json.new");
    std::fs::write(&temporary, serde_json::to_vec(state)?)?;
    std::fs::rename(temporary, directory.join("state.json"))
}

fn read_state(directory: &Path) -> Option<State> {
    serde_json::from_slice(&std::fs::read(directory.join("state.json")).ok()?).ok()
}

fn cannot_save(error: &std::io::Error) -> ErrorDetail {
    let code = match error.raw_os_error() {
        Some(libc::ENOSPC | libc::EDQUOT) => ErrorCode::DiskFull,
        _ => ErrorCode::Unacceptable,
    };
    ErrorDetail::new(code, format!("the output of a background command can't be saved: {error}"))
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
