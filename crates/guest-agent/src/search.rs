//! Glob and grep: each search is a process of its own, so that it can be killed, and so that the engine costs nothing
//! while nobody searches. Who has searched once will search again: then one process is started ahead.

use std::io::Write;
use std::path::Path;
use std::process::Stdio;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use emergent_guest_tools::search::{Search, SearchReply, SearchRequest};
use emergent_wire::{ErrorCode, ErrorDetail};

use crate::agent::Agent;
use crate::call::{Call, cancelled};
use crate::command::{self, Sink, Started, Stopped, Stream};
use crate::memory::OomCheck;

/// The search program's name, beside the agent's own.
const PROGRAM: &str = "search";
/// A search that takes longer is ended.
const SEARCH_TIME: Duration = Duration::from_secs(110);
/// The most that is taken of a reply; the engine's own limits are far below.
const MAX_REPLY_BYTES: usize = 16 << 20;

/// A search process that waits for its request.
#[derive(Default)]
pub(crate) struct Searches {
    waiting: Mutex<Option<Started>>,
}

impl Searches {
    fn lock(&self) -> MutexGuard<'_, Option<Started>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A process that waits, or a new one.
    fn take(&self, agent: &Agent) -> std::io::Result<Started> {
        let waiting = self.lock().take().filter(|started| started.exit.ended().is_none());
        waiting.map_or_else(|| start(agent), Ok)
    }

    /// Starts a process ahead, in the background.
    fn refill(agent: &Arc<Agent>) {
        if agent.memory.is_tight() || agent.searches.waiting() > 0 {
            return;
        }
        let running = Arc::clone(agent);
        agent.workers.run(move || {
            if let Ok(started) = start(&running) {
                *running.searches.lock() = Some(started);
            }
        });
    }

    /// Lets the waiting process go: it reads the end of its input and exits.
    pub(crate) fn discard(&self) {
        self.lock().take();
    }

    /// How many processes wait.
    pub(crate) fn waiting(&self) -> usize {
        usize::from(self.lock().is_some())
    }
}

fn start(agent: &Agent) -> std::io::Result<Started> {
    let program = std::env::current_exe()?.with_file_name(PROGRAM);
    let environment = agent.environment();
    command::start(&agent.reaper, &program, &[], Path::new("/"), &environment, Stdio::piped())
}

/// Runs a search to its end.
pub(crate) fn run(agent: &Arc<Agent>, call: &Arc<Call>, search: Search) -> Result<SearchReply, ErrorDetail> {
    let found = run_one(agent, call, search);
    Searches::refill(agent);
    found
}

fn run_one(agent: &Arc<Agent>, call: &Arc<Call>, search: Search) -> Result<SearchReply, ErrorDetail> {
    let context = agent.context();
    let request =
        SearchRequest { workspace_dir: context.workspace_dir, confined_to: context.confined_to, search };
    let failed = |reason: &dyn std::fmt::Display| {
        ErrorDetail::new(ErrorCode::LimitReached, format!("the search can't be run: {reason}"))
    };
    let json = serde_json::to_vec(&request).map_err(|error| failed(&error))?;
    agent.memory.begin_activity();
    let oom = OomCheck::begin(&agent.memory);
    let mut started = agent.searches.take(agent).map_err(|error| failed(&error))?;
    // A request is at most as long as a pattern and a path, but that may be more than a pipe holds: the program reads
    // all of it before it answers, so this can't wait for ever.
    let sent = started.stdin.take().map(|stdin| std::fs::File::from(stdin).write_all(&json));
    if let Some(Err(error)) = sent {
        return Err(failed(&error));
    }
    let (pid, tag) = (started.pid, started.tag.clone());
    let wake = call.wake().map_err(|error| failed(&error))?;
    let mut reply = Reply::default();
    let outcome = started.run(&mut reply, Some(SEARCH_TIME), &call.cancelled, &wake, &agent.drain);
    match outcome.stopped {
        Some(Stopped::Cancelled) => return Err(cancelled()),
        Some(Stopped::TimedOut) => {
            let message = "the search did not end within 110 s: search a smaller directory, or use `include`";
            return Err(ErrorDetail::new(ErrorCode::DeadlineExceeded, message));
        }
        None => {}
    }
    match serde_json::from_slice(&reply.stdout) {
        Ok(SearchReply::Err(error)) => Err(error),
        Ok(found) => Ok(found),
        Err(_) => Err(match oom.victim(&agent.memory, pid, &tag) {
            Some(note) => ErrorDetail::new(ErrorCode::LimitReached, note),
            None => failed(&format!("it ended with {:?}", outcome.ended)),
        }),
    }
}

#[derive(Default)]
struct Reply {
    stdout: Vec<u8>,
}

impl Sink for Reply {
    fn take(&mut self, stream: Stream, bytes: &[u8]) -> bool {
        if stream == Stream::Stdout {
            self.stdout.extend_from_slice(bytes);
        }
        self.stdout.len() <= MAX_REPLY_BYTES
    }
}
