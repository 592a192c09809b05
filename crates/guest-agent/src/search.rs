//! Glob and grep run in a process of their own, so that a search can be killed and the engine uses no memory while no search
//! runs. The process waits for the next search for a while. Concurrent searches have a process each.

use std::io::Write;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use emergent_guest_tools::search::{
    LENGTH_BYTES, MAX_MESSAGE_BYTES, Search, SearchReply, SearchRequest, message_content, to_message,
};
use emergent_wire::{ErrorCode, ErrorDetail};

use crate::agent::Agent;
use crate::call::{Call, cancelled};
use crate::command::{self, Outcome, Sink, Started, Stopped, Stream};
use crate::memory::OomCheck;
use crate::reaper::Ended;
use crate::spawn::Input;

/// The search program's name, beside the agent's own.
const PROGRAM: &str = "search";
/// The time limit of a search.
const SEARCH_TIME: Duration = Duration::from_secs(110);

/// The starts of the process for one search: it is started again when a program in the sandbox has killed it.
const MAX_STARTS: usize = 3;

/// A search process that waits for its next request.
#[derive(Default)]
pub(crate) struct Searches {
    waiting: Mutex<Option<Started>>,
}

impl Searches {
    fn lock(&self) -> MutexGuard<'_, Option<Started>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The process that waits, if there is one.
    fn take(&self) -> Option<Started> {
        self.lock().take().filter(|started| started.exit.ended().is_none())
    }

    /// Keeps a process for the next search. One that is not kept reads the end of its input and exits.
    fn keep(&self, started: Started) {
        *self.lock() = Some(started);
    }

    /// Ends the waiting process: it reads the end of its input and exits.
    pub(crate) fn discard(&self) {
        self.lock().take();
    }

    /// The process that waits.
    pub(crate) fn waiting(&self) -> Option<i32> {
        self.lock().as_ref().filter(|started| started.exit.ended().is_none()).map(|started| started.pid)
    }
}

fn start(agent: &Agent) -> std::io::Result<Started> {
    let program = std::env::current_exe()?.with_file_name(PROGRAM);
    let environment = agent.environment();
    command::start(&agent.reaper, &program, &[], Path::new("/"), &environment, &Input::Pipe)
}

/// Runs a search to its end.
pub(crate) fn run(agent: &Arc<Agent>, call: &Arc<Call>, search: Search) -> Result<SearchReply, ErrorDetail> {
    let context = agent.context();
    let request =
        SearchRequest { workspace_dir: context.workspace_dir, confined_to: context.confined_to, search };
    let message = to_message(&request).map_err(|error| failed(&error))?;
    if let Some(waiting) = agent.searches.take()
        && let Some(reply) = ask(agent, call, waiting, &message)?
    {
        return Ok(reply);
    }
    // There was no waiting process, or it has just exited.
    let mut how = String::new();
    for _ in 0..MAX_STARTS {
        let started = start(agent).map_err(|error| failed(&error))?;
        let exit = Arc::clone(&started.exit);
        if let Some(reply) = ask(agent, call, started, &message)? {
            return Ok(reply);
        }
        how = match exit.ended() {
            // The process has ended: its pipe is closed.
            None => String::new(),
            Some(Ended::Exited(code)) => format!(" (exit code {code})"),
            Some(Ended::Signalled(signal)) => format!(" (signal {signal})"),
        };
        if !matches!(exit.ended(), None | Some(Ended::Signalled(libc::SIGKILL))) {
            break;
        }
    }
    Err(failed(&format_args!("its process ended without an answer{how}")))
}

/// Sends a request to a process and waits for the reply; none when the process ended without one.
fn ask(
    agent: &Arc<Agent>,
    call: &Arc<Call>,
    mut started: Started,
    message: &[u8],
) -> Result<Option<SearchReply>, ErrorDetail> {
    agent.activity.begin();
    let oom = OomCheck::begin(&agent.memory);
    // A request is at most as long as a pattern and a path, but that may be more than a pipe holds: the program reads
    // all of it before it answers, so this can't wait for ever.
    let Some(stdin) = started.stdin.take() else {
        return Ok(None);
    };
    let mut stdin = std::fs::File::from(stdin);
    let sent = stdin.write_all(message);
    started.stdin = Some(stdin.into());
    if sent.is_err() {
        return Ok(None);
    }
    let wake = call.wake().map_err(|error| failed(&error))?;
    let mut reply = Reply::default();
    match started.follow(&mut reply, Some(SEARCH_TIME), &call.cancelled, &wake) {
        Some(Outcome { stopped: Some(Stopped::Cancelled), .. }) => return Err(cancelled()),
        Some(Outcome { stopped: Some(Stopped::TimedOut), .. }) => {
            let message = "the search did not end within 110 s: search a smaller directory, or use `include`";
            return Err(ErrorDetail::new(ErrorCode::DeadlineExceeded, message));
        }
        Some(Outcome { stopped: None, .. }) => {
            return match oom.victim(&agent.memory, started.pid, &started.tag) {
                Some(note) => Err(ErrorDetail::new(ErrorCode::LimitReached, note)),
                None => Ok(None),
            };
        }
        None => {}
    }
    if !agent.memory.is_tight() {
        agent.searches.keep(started);
    }
    match reply.content().and_then(|content| serde_json::from_slice(content).ok()) {
        Some(SearchReply::Err(error)) => Err(error),
        Some(found) => Ok(Some(found)),
        None => Err(failed(&"its reply can't be read")),
    }
}

fn failed(reason: &dyn std::fmt::Display) -> ErrorDetail {
    ErrorDetail::new(ErrorCode::LimitReached, format!("the search can't be run: {reason}"))
}

#[derive(Default)]
struct Reply {
    stdout: Vec<u8>,
}

impl Reply {
    fn content(&self) -> Option<&[u8]> {
        message_content(&self.stdout).ok().flatten()
    }
}

impl Sink for Reply {
    fn take(&mut self, stream: Stream, bytes: &[u8]) -> bool {
        if stream == Stream::Stdout {
            self.stdout.extend_from_slice(bytes);
        }
        self.stdout.len() <= LENGTH_BYTES + MAX_MESSAGE_BYTES
    }

    fn is_complete(&self) -> bool {
        self.content().is_some()
    }
}
