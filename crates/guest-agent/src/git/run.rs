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
/// The author and committer of commits where neither git's configuration nor the environment names one.
const FALLBACK_IDENTITY: [(&str, &str); 2] = [("NAME", "Emergent Agent"), ("EMAIL", "agent@emergent.local")];
/// The keys of git's configuration that name an author or a committer.
const IDENTITY_KEYS: &str = r"^(user|author|committer)\.(name|email)$";

/// git in a directory.
pub(super) struct Git {
    agent: Arc<Agent>,
    call: Arc<Call>,
    program: PathBuf,
    pub(super) directory: PathBuf,
    /// Variables for the parts of an identity that are not configured.
    identity: BTreeMap<String, String>,
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
        let identity = BTreeMap::new();
        Ok(Self { agent: Arc::clone(agent), call: Arc::clone(call), program, directory, identity })
    }

    /// The same in another directory.
    pub(super) fn at(&self, directory: &Path) -> Self {
        Self {
            agent: Arc::clone(&self.agent),
            call: Arc::clone(&self.call),
            program: self.program.clone(),
            directory: directory.to_owned(),
            identity: self.identity.clone(),
        }
    }

    /// The same, able to commit: the fallback identity fills what nobody has set.
    pub(super) fn with_identity(&self) -> Self {
        // Fails when no key is set.
        let keys = self.output(&["config", "--name-only", "--get-regexp", IDENTITY_KEYS]).unwrap_or_default();
        let identity = missing_identity(&String::from_utf8_lossy(&keys), &self.agent.environment());
        Self { identity, ..self.at(&self.directory) }
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
        environment.extend(self.identity.clone());
        environment
    }
}

/// The variables that give the author and the committer what neither the set `keys` of git's configuration nor the
/// `environment` gives them.
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

#[cfg(test)]
mod tests {
    use super::*;

    fn missing(keys: &str, variables: &[&str]) -> Vec<String> {
        let environment = variables.iter().map(|name| ((*name).to_owned(), "x".to_owned())).collect();
        missing_identity(keys, &environment).into_keys().collect()
    }

    #[test]
    fn the_fallback_identity_fills_only_what_nobody_has_set() {
        let all = ["GIT_AUTHOR_EMAIL", "GIT_AUTHOR_NAME", "GIT_COMMITTER_EMAIL", "GIT_COMMITTER_NAME"];
        assert_eq!(missing("", &[]), all);
        assert_eq!(missing("user.name\nuser.email\n", &[]), [""; 0]);
        assert_eq!(missing("user.name\n", &[]), ["GIT_AUTHOR_EMAIL", "GIT_COMMITTER_EMAIL"]);
        assert_eq!(missing("author.name\nauthor.email\n", &[]), all[2..]);
        assert_eq!(missing("", &["GIT_AUTHOR_NAME", "EMAIL"]), ["GIT_COMMITTER_NAME"]);
        assert_eq!(missing("", &all), [""; 0]);
    }
}
