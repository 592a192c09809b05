//! Runs git itself.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use emergent_wire::git_url::redact_urls;
use emergent_wire::tools::{MAX_STREAM_BYTES, MAX_TIMEOUT_MS};
use emergent_wire::{ErrorCode, ErrorDetail};

use super::credentials::CredentialObserver;
use super::failure::{self, SpaceWatch};
use crate::agent::Agent;
use crate::call::{Call, cancelled};
use crate::command::{self, Sink, Stopped, Stream};
use crate::reaper::Ended;
use crate::shell::find_program;
use crate::spawn::Input;

/// The part of git's output that is kept: enough for a status of thousands of files.
const MAX_OUTPUT_BYTES: usize = 4 << 20;
/// The author and committer of commits where neither git's configuration nor the environment names one.
const FALLBACK_IDENTITY: [(&str, &str); 2] = [("NAME", "Emergent Agent"), ("EMAIL", "agent@emergent.local")];
/// The keys of git's configuration that name an author or a committer.
const IDENTITY_KEYS: &str = r"^(user|author|committer)\.(name|email)$";

/// The time for all commands of a call.
const CALL_TIME: Duration = Duration::from_millis(MAX_TIMEOUT_MS);
/// The time for a command that helps to find the reason of a failure.
const PROBE_TIME: Duration = Duration::from_secs(10);
/// The settings of every git command.
const SETTINGS: [&str; 4] =
    ["safe.directory=*", "color.ui=false", "core.quotePath=false", "protocol.ext.allow=never"];

/// git in a directory.
pub(super) struct Git {
    agent: Arc<Agent>,
    call: Arc<Call>,
    program: PathBuf,
    pub(super) directory: PathBuf,
    /// Variables besides those of every git command.
    variables: BTreeMap<String, String>,
    /// The end of the call's time.
    deadline: Instant,
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
        let (variables, deadline) = (BTreeMap::new(), Instant::now() + CALL_TIME);
        Ok(Self { agent: Arc::clone(agent), call: Arc::clone(call), program, directory, variables, deadline })
    }

    /// The same in another directory.
    pub(super) fn at(&self, directory: &Path) -> Self {
        Self {
            agent: Arc::clone(&self.agent),
            call: Arc::clone(&self.call),
            program: self.program.clone(),
            directory: directory.to_owned(),
            variables: self.variables.clone(),
            deadline: self.deadline,
        }
    }

    /// The same with an identity for commits: the fallback identity fills the parts that are not set.
    pub(super) fn with_identity(&self) -> Self {
        // Exits with an error when no key is set.
        let list = ["config", "--name-only", "--get-regexp", IDENTITY_KEYS];
        let keys = self.execute(&list, None).map(|(captured, _)| captured.stdout).unwrap_or_default();
        let variables = missing_identity(&String::from_utf8_lossy(&keys), &self.agent.environment());
        Self { variables, ..self.at(&self.directory) }
    }

    /// The same with further variables.
    pub(super) fn with_variables<const N: usize>(&self, further: [(&str, &str); N]) -> Self {
        let mut git = self.at(&self.directory);
        git.variables.extend(further.map(|(name, value)| (name.to_owned(), value.to_owned())));
        git
    }

    /// The standard output of a command that succeeds.
    pub(super) fn output(&self, arguments: &[&str]) -> Result<Vec<u8>, ErrorDetail> {
        self.run(arguments, None).map(|captured| captured.stdout)
    }

    /// Whether a command exits with status 0.
    pub(super) fn succeeds(&self, arguments: &[&str]) -> bool {
        matches!(self.execute(arguments, None), Ok((_, Ended::Exited(0))))
    }

    /// Whether a command exits with another status. One that can't be started does not.
    pub(super) fn fails(&self, arguments: &[&str]) -> bool {
        matches!(self.execute(arguments, None), Ok((_, Ended::Exited(status))) if status != 0)
    }

    /// Runs a command that helps to find the reason of a failure.
    pub(super) fn probe(&self, arguments: &[&str]) -> Result<(Captured, Ended), ErrorDetail> {
        self.execute_within(PROBE_TIME, arguments, None)
    }

    /// The first line of a probe's standard output, if it succeeds and prints one.
    pub(super) fn first_line(&self, arguments: &[&str]) -> Option<String> {
        let (captured, Ended::Exited(0)) = self.probe(arguments).ok()? else { return None };
        let text = String::from_utf8(captured.stdout).ok()?;
        text.lines().next().filter(|line| !line.is_empty()).map(str::to_owned)
    }

    /// Exchanges commits with a remote (none: the branch's own). Returns both streams of a command that succeeds.
    pub(super) fn transfer(&self, arguments: &[&str], remote: Option<&str>) -> Result<String, ErrorDetail> {
        let observer = CredentialObserver::new().map_err(|error| refused(&error))?;
        let transfer = Transfer { remote, is_push: arguments.first() == Some(&"push"), observer };
        let captured = self.run(arguments, Some(&transfer))?;
        let both = [captured.stdout, captured.stderr].concat();
        Ok(redact_urls(&String::from_utf8_lossy(&both[..both.len().min(MAX_STREAM_BYTES)])).into_owned())
    }

    /// The standard output of a command that succeeds as text, cut at the limit of an answer, and whether it was cut.
    pub(super) fn text(&self, arguments: &[&str]) -> Result<(String, bool), ErrorDetail> {
        let captured = self.run(arguments, None)?;
        let shown = &captured.stdout[..captured.stdout.len().min(MAX_STREAM_BYTES)];
        Ok((String::from_utf8_lossy(shown).into_owned(), captured.total > shown.len()))
    }

    fn run(&self, arguments: &[&str], transfer: Option<&Transfer<'_>>) -> Result<Captured, ErrorDetail> {
        match self.execute(arguments, transfer)? {
            (captured, Ended::Exited(0)) => Ok(captured),
            (captured, _) => Err(failure::error(self, arguments, &captured, transfer)),
        }
    }

    /// Runs git to its end. A failure of git is not an error here.
    fn execute(
        &self,
        arguments: &[&str],
        transfer: Option<&Transfer<'_>>,
    ) -> Result<(Captured, Ended), ErrorDetail> {
        self.execute_within(CALL_TIME, arguments, transfer)
    }

    fn execute_within(
        &self,
        most: Duration,
        arguments: &[&str],
        transfer: Option<&Transfer<'_>>,
    ) -> Result<(Captured, Ended), ErrorDetail> {
        if !self.directory.is_dir() {
            let message = format!("{} is not a directory", self.directory.display());
            return Err(ErrorDetail::new(ErrorCode::FileNotFound, message));
        }
        let timeout = time_left(self.deadline, most, Instant::now()).ok_or_else(too_late)?;
        let helper = transfer.and_then(|transfer| transfer.observer.setting().ok());
        let mut all: Vec<&str> = SETTINGS.iter().flat_map(|setting| ["-c", setting]).collect();
        all.extend(helper.iter().flat_map(|setting| ["-c", setting]));
        all.extend(arguments);
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
        let wake = self.call.wake().map_err(|error| refused(&error))?;
        let (mut captured, tag) = (Captured::new(&self.directory), started.tag.clone());
        let outcome =
            started.run(&mut captured, Some(timeout), &self.call.cancelled, &wake, &self.agent.drain);
        captured.space.look();
        captured.wrote_over_limit = self.agent.disk.has_killed(&tag);
        match outcome.stopped {
            Some(Stopped::Cancelled) => Err(cancelled()),
            Some(Stopped::TimedOut) => Err(too_late()),
            None => Ok((captured, outcome.ended)),
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
        environment.extend(self.variables.clone());
        environment
    }
}

/// The time for a command: at most `most`, and no more than its call has left. None when its call has none left.
fn time_left(deadline: Instant, most: Duration, now: Instant) -> Option<Duration> {
    let left = deadline.saturating_duration_since(now);
    (!left.is_zero()).then_some(left.min(most))
}

fn too_late() -> ErrorDetail {
    let message = format!("git did not end within {} s and was stopped", CALL_TIME.as_secs());
    ErrorDetail::new(ErrorCode::DeadlineExceeded, message)
}

fn refused(error: &std::io::Error) -> ErrorDetail {
    ErrorDetail::new(ErrorCode::LimitReached, error.to_string())
}

/// Variables for the parts of author and committer that neither the `keys` of git's configuration nor the `environment` set.
fn missing_identity(keys: &str, environment: &BTreeMap<String, String>) -> BTreeMap<String, String> {
    let is_set = |section: &str, field: &str| {
        let key = format!("{section}.{field}").to_lowercase();
        keys.lines().any(|line| line == key)
    };
    let mut missing = BTreeMap::new();
    for role in ["AUTHOR", "COMMITTER"] {
        for (field, fallback) in FALLBACK_IDENTITY {
            let variable = format!("GIT_{role}_{field}");
            // git takes the variable EMAIL where nothing else names one.
            let in_environment =
                environment.contains_key(&variable) || (field == "EMAIL" && environment.contains_key(field));
            if !in_environment && !is_set("user", field) && !is_set(role, field) {
                missing.insert(variable, fallback.to_owned());
            }
        }
    }
    missing
}

/// The exchange of commits with a remote.
pub(super) struct Transfer<'a> {
    pub(super) remote: Option<&'a str>,
    pub(super) is_push: bool,
    observer: CredentialObserver,
}

impl Transfer<'_> {
    /// Whether the remote has asked for credentials or rejected some.
    pub(super) fn was_asked_for_credentials(&self) -> bool {
        self.observer.was_asked()
    }
}

/// The output of a command, cut at limits.
pub(super) struct Captured {
    pub(super) stdout: Vec<u8>,
    pub(super) stderr: Vec<u8>,
    /// The length of the whole standard output.
    total: usize,
    space: SpaceWatch,
    /// One of the command's processes was killed because it wrote over the disk limit that the agent enforces.
    wrote_over_limit: bool,
}

impl Captured {
    fn new(directory: &Path) -> Self {
        let space = SpaceWatch::new(directory);
        Self { stdout: Vec::new(), stderr: Vec::new(), total: 0, space, wrote_over_limit: false }
    }

    pub(super) fn disk_was_full(&self) -> bool {
        self.wrote_over_limit || self.space.was_full()
    }
}

impl Sink for Captured {
    fn take(&mut self, stream: Stream, bytes: &[u8]) -> bool {
        let (buffer, most) = match stream {
            Stream::Stdout => {
                self.total += bytes.len();
                (&mut self.stdout, MAX_OUTPUT_BYTES)
            }
            Stream::Stderr => {
                self.space.look();
                (&mut self.stderr, MAX_STREAM_BYTES)
            }
        };
        buffer.extend_from_slice(&bytes[..bytes.len().min(most - buffer.len())]);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn missing(keys: &str, variables: &[&str]) -> Vec<String> {
        let environment = variables.iter().map(|name| ((*name).to_owned(), "x".to_owned())).collect();
        missing_identity(keys, &environment).into_keys().collect()
    }

    #[test]
    fn all_commands_of_a_call_share_its_time() {
        let (begin, second) = (Instant::now(), Duration::from_secs(1));
        let deadline = begin + CALL_TIME;
        assert_eq!(time_left(deadline, CALL_TIME, begin), Some(CALL_TIME));
        assert_eq!(time_left(deadline, CALL_TIME, begin + second), Some(CALL_TIME - second));
        assert_eq!(time_left(deadline, PROBE_TIME, begin + second), Some(PROBE_TIME));
        assert_eq!(time_left(deadline, PROBE_TIME, deadline - second), Some(second));
        assert_eq!(time_left(deadline, PROBE_TIME, deadline), None);
    }

    #[test]
    fn the_fallback_identity_fills_only_parts_that_are_not_set() {
        let all = ["GIT_AUTHOR_EMAIL", "GIT_AUTHOR_NAME", "GIT_COMMITTER_EMAIL", "GIT_COMMITTER_NAME"];
        assert_eq!(missing("", &[]), all);
        assert_eq!(missing("user.name\nuser.email\n", &[]), [""; 0]);
        assert_eq!(missing("user.name\n", &[]), ["GIT_AUTHOR_EMAIL", "GIT_COMMITTER_EMAIL"]);
        assert_eq!(missing("author.name\nauthor.email\n", &[]), all[2..]);
        assert_eq!(missing("", &["GIT_AUTHOR_NAME", "EMAIL"]), ["GIT_COMMITTER_NAME"]);
        assert_eq!(missing("", &all), [""; 0]);
    }
}
