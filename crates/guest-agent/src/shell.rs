//! Shells. Starting bash takes about 20 ms on gVisor, so a few shells are started ahead. Each waits for one command on its
//! standard input, runs it and exits. A command runs in the same environment in a new shell and in a waiting one.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use emergent_wire::tools::WORKSPACE_DIR;
use emergent_wire::{ErrorCode, ErrorDetail};

use crate::agent::Agent;
use crate::command::{self, Started};
use crate::spawn::Input;
use crate::{family, log};

/// The number of waiting shells.
const WAITING_SHELLS: usize = 3;
/// bash reads a pipe byte by byte: beyond this a new shell with the command as its argument is faster.
const MAX_PIPED_BYTES: usize = 8 * 1024;
/// The kernel's limit for one argument is 128 KiB.
const MAX_ARGUMENT_BYTES: usize = 120 * 1024;
/// The script of a waiting shell: it reads a command up to a NUL byte and runs it with an empty standard input.
const LAUNCHER: &str = r#"IFS= read -r -d "" || exit; exec </dev/null; eval "$REPLY""#;

/// The shells of the sandbox.
#[derive(Default)]
pub(crate) struct Shells {
    waiting: Mutex<Vec<Started>>,
    /// Held while a shell is started: until it is in the list, it looks like a command's process.
    starting: Mutex<()>,
    closed: AtomicBool,
    refilling: AtomicBool,
    program: OnceLock<Option<Program>>,
}

/// The shell that the image has.
#[derive(Clone, Debug)]
struct Program {
    path: PathBuf,
    is_bash: bool,
}

impl Shells {
    /// Starts `command`.
    pub(crate) fn start(
        &self,
        agent: &Arc<Agent>,
        command: &str,
        directory: &Path,
        extra: &BTreeMap<String, String>,
    ) -> Result<Started, ErrorDetail> {
        let program = self.program(agent).ok_or_else(|| {
            let message = "the image has neither bash nor sh: the bash tool can't run commands in it, but the file tools work";
            ErrorDetail::new(ErrorCode::Unacceptable, message)
        })?;
        if let Some(started) = self.use_waiting(agent, command, directory, extra) {
            return Ok(started);
        }
        let mut environment = agent.environment();
        environment.extend(extra.clone());
        let start = || {
            if command.len() <= MAX_ARGUMENT_BYTES {
                let arguments = ["-c", command];
                command::start(
                    &agent.reaper,
                    &program.path,
                    &arguments,
                    directory,
                    &environment,
                    &Input::Nothing,
                )
            } else {
                start_long(agent, &program, command, directory, &environment)
            }
        };
        let started = start().or_else(|error| {
            // A fork bomb must be killed here: no command that could end it can be started.
            let crowd = (error.raw_os_error() == Some(libc::EAGAIN)).then(family::kill_crowd).flatten();
            let count = crowd.ok_or(error)?;
            log(&format!("no room for another process: the {count} processes of a command were killed"));
            start()
        });
        started.map_err(|error| cannot_start(&error))
    }

    /// Passes the command to a waiting shell, if there is one with the same environment.
    fn use_waiting(
        &self,
        agent: &Agent,
        command: &str,
        directory: &Path,
        extra: &BTreeMap<String, String>,
    ) -> Option<Started> {
        let mut script = String::new();
        if directory != Path::new(WORKSPACE_DIR) {
            script += &format!("cd -- {} || exit; unset OLDPWD; ", quote(directory.to_str()?));
        }
        for (name, value) in extra {
            script += &format!("export {name}={}; ", quote(value));
        }
        // On one line with the command, so that line numbers in messages are the command's own.
        script += "unset REPLY; ";
        script += command;
        if script.len() > MAX_PIPED_BYTES || agent.memory.is_tight() {
            return None;
        }
        script.push('\0');
        loop {
            let mut shell = self.waiting.lock().unwrap_or_else(PoisonError::into_inner).pop()?;
            let stdin = shell.stdin.take()?;
            if shell.exit.ended().is_none() && std::fs::File::from(stdin).write_all_bytes(script.as_bytes()) {
                return Some(shell);
            }
        }
    }

    /// Starts shells in the background until enough wait.
    pub(crate) fn refill(&self, agent: &Arc<Agent>) {
        if self.refilling.swap(true, Ordering::SeqCst) {
            return;
        }
        let refilling = agent.workers.run(Arc::clone(agent), |agent| {
            agent.shells.refill_now(&agent);
            agent.shells.refilling.store(false, Ordering::SeqCst);
        });
        if refilling.is_err() {
            self.refilling.store(false, Ordering::SeqCst);
        }
    }

    fn refill_now(&self, agent: &Agent) {
        let Some(program) = self.program(agent).filter(|program| program.is_bash) else {
            return;
        };
        while !self.closed.load(Ordering::SeqCst) {
            let configuration = agent.configuration();
            let waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner).len();
            if waiting >= WAITING_SHELLS {
                return;
            }
            let environment = agent.environment();
            let directory = Path::new(WORKSPACE_DIR);
            let _starting = self.starting.lock().unwrap_or_else(PoisonError::into_inner);
            let started = command::start(
                &agent.reaper,
                &program.path,
                &["-c", LAUNCHER],
                directory,
                &environment,
                &Input::Pipe,
            );
            let Ok(shell) = started else { return };
            let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
            // The shell may have the environment of an older configuration.
            if Arc::ptr_eq(&configuration, &agent.configuration()) && !self.closed.load(Ordering::SeqCst) {
                waiting.insert(0, shell);
            }
        }
    }

    /// Ends the waiting shells: they read the end of their input and exit.
    pub(crate) fn discard(&self) {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    /// Starts no more shells ahead.
    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
        self.discard();
    }

    /// Starts shells ahead again.
    pub(crate) fn open(&self) {
        self.closed.store(false, Ordering::SeqCst);
    }

    /// Runs `look` with the ids of the waiting shells, while no shell is being started.
    pub(crate) fn look<T>(&self, at: impl FnOnce(Vec<i32>) -> T) -> T {
        let _none_starts = self.starting.lock().unwrap_or_else(PoisonError::into_inner);
        at(self.waiting())
    }

    fn waiting(&self) -> Vec<i32> {
        let waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        waiting.iter().filter(|shell| shell.exit.ended().is_none()).map(|shell| shell.pid).collect()
    }

    fn program(&self, agent: &Agent) -> Option<Program> {
        if let Some(Some(program)) = self.program.get() {
            return Some(program.clone());
        }
        let path = agent.environment().remove("PATH").unwrap_or_default();
        let find = |name: &str| find_program(&path, name);
        let found = find("bash")
            .map(|path| Program { path, is_bash: true })
            .or_else(|| find("sh").map(|path| Program { path, is_bash: false }));
        // Only a success is cached: a shell may be installed later.
        found.map(|program| self.program.get_or_init(|| Some(program)).clone()).unwrap_or_default()
    }
}

/// A program by its name, in the directories of `path`.
pub(crate) fn find_program(path: &str, name: &str) -> Option<PathBuf> {
    path.split(':')
        .filter(|directory| directory.starts_with('/'))
        .map(|directory| Path::new(directory).join(name))
        .find(|candidate| {
            rustix::fs::access(candidate, rustix::fs::Access::EXEC_OK).is_ok() && candidate.is_file()
        })
}

/// Puts a command that is too long for an argument into a file without a name.
fn start_long(
    agent: &Agent,
    program: &Program,
    command: &str,
    directory: &Path,
    environment: &BTreeMap<String, String>,
) -> std::io::Result<Started> {
    let file = rustix::fs::memfd_create("command", rustix::fs::MemfdFlags::CLOEXEC)?;
    let mut file = std::fs::File::from(file);
    std::io::Write::write_all(&mut file, command.as_bytes())?;
    std::io::Seek::rewind(&mut file)?;
    let reader = r#"command=$(cat); exec </dev/null; eval "unset command; $command""#;
    command::start(&agent.reaper, &program.path, &["-c", reader], directory, environment, &Input::File(file))
}

/// Quotes a text for the shell.
fn quote(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}

fn cannot_start(error: &std::io::Error) -> ErrorDetail {
    match error.raw_os_error() {
        Some(libc::EAGAIN | libc::ENOMEM) => ErrorDetail::new(
            ErrorCode::LimitReached,
            "the workspace has no room for another process: stop and resume it to end them all",
        ),
        _ => ErrorDetail::new(ErrorCode::Unacceptable, format!("the shell can't be started: {error}")),
    }
}

trait WriteAllBytes {
    fn write_all_bytes(self, bytes: &[u8]) -> bool;
}

impl WriteAllBytes for std::fs::File {
    fn write_all_bytes(mut self, bytes: &[u8]) -> bool {
        std::io::Write::write_all(&mut self, bytes).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quoted_text_is_one_word() {
        for text in ["", "a b", "it's", "$(rm -rf /)", "`x`", "a\nb", "'", "\\"] {
            let output =
                std::process::Command::new("sh").args(["-c", &format!("printf %s {}", quote(text))]).output();
            assert_eq!(String::from_utf8(output.unwrap().stdout).unwrap(), text);
        }
    }
}
