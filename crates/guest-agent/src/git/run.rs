//! Runs git itself.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use emergent_wire::git_url::redact_urls;
use emergent_wire::tools::{MAX_STREAM_BYTES, MAX_TIMEOUT_MS};
use emergent_wire::{ErrorCode, ErrorDetail};

use crate::agent::Agent;
use crate::call::{Call, cancelled};
use crate::command::{self, Sink, Stopped, Stream};
use crate::reaper::Ended;
use crate::shell::find_program;
use crate::spawn::Input;

/// What is kept of git's output: enough for a status of thousands of files.
const MAX_OUTPUT_BYTES: usize = 4 << 20;
/// Who commits when no other identity is known.
const IDENTITY: (&str, &str) = ("Emergent Agent", "agent@emergent.local");

/// git in a directory.
pub(super) struct Git {
    agent: Arc<Agent>,
    call: Arc<Call>,
    program: PathBuf,
    pub(super) directory: PathBuf,
}

impl Git {
    pub(super) fn new(agent: &Arc<Agent>, call: &Arc<Call>, directory: PathBuf) -> Result<Self, ErrorDetail> {
        let path = agent.environment().remove("PATH").unwrap_or_default();
        let program = find_program(&path, "git").ok_or_else(|| {
            ErrorDetail::new(
                ErrorCode::Unacceptable,
                "the image has no git: install it, or use an image that has it",
            )
        })?;
        Ok(Self { agent: Arc::clone(agent), call: Arc::clone(call), program, directory })
    }

    /// The same in another directory.
    pub(super) fn at(&self, directory: &Path) -> Self {
        Self {
            agent: Arc::clone(&self.agent),
            call: Arc::clone(&self.call),
            program: self.program.clone(),
            directory: directory.to_owned(),
        }
    }

    /// What git printed, when it succeeded.
    pub(super) fn output(&self, arguments: &[&str]) -> Result<Vec<u8>, ErrorDetail> {
        self.run(arguments).map(|captured| captured.stdout)
    }

    /// What git printed to either stream, when it succeeded.
    pub(super) fn output_with_errors(&self, arguments: &[&str]) -> Result<String, ErrorDetail> {
        let captured = self.run(arguments)?;
        let both = [captured.stdout, captured.stderr].concat();
        Ok(redact_urls(&String::from_utf8_lossy(&both[..both.len().min(MAX_STREAM_BYTES)])).into_owned())
    }

    /// What git printed as text, cut at what an answer holds, and whether it was cut.
    pub(super) fn text(&self, arguments: &[&str]) -> Result<(String, bool), ErrorDetail> {
        let captured = self.run(arguments)?;
        let shown = &captured.stdout[..captured.stdout.len().min(MAX_STREAM_BYTES)];
        Ok((String::from_utf8_lossy(shown).into_owned(), captured.total > shown.len()))
    }

    fn run(&self, arguments: &[&str]) -> Result<Captured, ErrorDetail> {
        if !self.directory.is_dir() {
            let message = format!("{} is not a directory", self.directory.display());
            return Err(ErrorDetail::new(ErrorCode::FileNotFound, message));
        }
        let options = [
            "-c",
            "safe.directory=*",
            "-c",
            "color.ui=false",
            "-c",
            "core.quotePath=false",
            "-c",
            "protocol.ext.allow=never",
        ];
        let all: Vec<&str> = options.iter().chain(arguments).copied().collect();
        let started = command::start(
            &self.agent.reaper,
            &self.program,
            &all,
            &self.directory,
            &self.environment(),
            &Input::Nothing,
        )
        .map_err(|error| {
            ErrorDetail::new(ErrorCode::Unacceptable, format!("git can't be started: {error}"))
        })?;
        self.agent.activity.begin();
        let wake =
            self.call.wake().map_err(|error| ErrorDetail::new(ErrorCode::LimitReached, error.to_string()))?;
        let mut captured = Captured::default();
        let timeout = Some(Duration::from_millis(MAX_TIMEOUT_MS));
        let outcome = started.run(&mut captured, timeout, &self.call.cancelled, &wake, &self.agent.drain);
        match (outcome.stopped, outcome.ended) {
            (Some(Stopped::Cancelled), _) => Err(cancelled()),
            (Some(Stopped::TimedOut), _) => Err(ErrorDetail::new(
                ErrorCode::DeadlineExceeded,
                "git did not end within 10 minutes and was stopped",
            )),
            (None, Ended::Exited(0)) => Ok(captured),
            (None, _) => Err(failure(arguments, &captured)),
        }
    }

    fn environment(&self) -> BTreeMap<String, String> {
        let mut environment = self.agent.environment();
        let mut set = |name: &str, value: &str| {
            environment.insert(name.to_owned(), value.to_owned());
        };
        set("GIT_TERMINAL_PROMPT", "0");
        set("GIT_ASKPASS", "true");
        set("GIT_PAGER", "cat");
        set("GIT_EDITOR", "true");
        set("GIT_OPTIONAL_LOCKS", "0");
        set("LC_ALL", "C.UTF-8");
        for role in ["AUTHOR", "COMMITTER"] {
            set(&format!("GIT_{role}_NAME"), IDENTITY.0);
            set(&format!("GIT_{role}_EMAIL"), IDENTITY.1);
        }
        environment
    }
}

#[derive(Default)]
struct Captured {
    stdout: Vec<u8>,
    stderr: Vec<u8>,
    total: usize,
}

impl Sink for Captured {
    fn take(&mut self, stream: Stream, bytes: &[u8]) -> bool {
        let (buffer, most) = match stream {
            Stream::Stdout => {
                self.total += bytes.len();
                (&mut self.stdout, MAX_OUTPUT_BYTES)
            }
            Stream::Stderr => (&mut self.stderr, MAX_STREAM_BYTES),
        };
        buffer.extend_from_slice(&bytes[..bytes.len().min(most - buffer.len())]);
        true
    }
}

/// git's own words, and what to do where they don't say.
fn failure(arguments: &[&str], captured: &Captured) -> ErrorDetail {
    let words = [captured.stderr.as_slice(), &captured.stdout[..captured.stdout.len().min(4096)]].concat();
    let words = String::from_utf8_lossy(&words[..words.len().min(4096)]);
    // A remote that was set up by hand may hold a credential.
    let words = redact_urls(words.trim());
    let action = arguments.first().copied().unwrap_or_default();
    let hint = if words.contains("not a git repository") {
        "; clone a repository first, or give its directory as path"
    } else if words.contains("could not read Username") || words.contains("Authentication failed") {
        "; the repository needs credentials"
    } else if words.contains("No space left on device") {
        return ErrorDetail::new(
            ErrorCode::DiskFull,
            format!("git {action}: the workspace's disk is full: {words}"),
        );
    } else {
        ""
    };
    ErrorDetail::new(ErrorCode::GitFailed, format!("git {action} failed: {words}{hint}"))
}
