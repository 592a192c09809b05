//! Runs a server for the host. The call's input is its standard input; its output is sent as it comes. When the call is
//! cancelled or the channel ends, the agent ends the server and its descendants (end of input and SIGTERM, 5 s, SIGKILL).
//! When the server exits, the agent kills its descendants.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use emergent_guest_protocol::{ServeAnswer, ServeCall};
use emergent_wire::tools::WORKSPACE_DIR;
use emergent_wire::{ErrorCode, ErrorDetail};

use crate::agent::Agent;
use crate::bash::{self, Live};
use crate::call::Call;
use crate::command::{self, Sink, Started, Stream};
use crate::memory::OomCheck;
use crate::spawn::Input;
use crate::user::{self, User};
use crate::wake::Wake;
use crate::{family, log, workers};

/// The time limit for ending the descendants of a server.
const END_TIME: Duration = Duration::from_secs(10);

/// Runs a server to its end.
pub(crate) fn run(
    agent: &Arc<Agent>,
    call: &Arc<Call>,
    message: &ServeCall,
) -> Result<ServeAnswer, ErrorDetail> {
    let refused = |error: std::io::Error| ErrorDetail::new(ErrorCode::LimitReached, error.to_string());
    let wake = call.wake().map_err(refused)?;
    let oom = OomCheck::begin(&agent.memory);
    let user = find_user(message)?;
    let mut started = start(agent, message, &user)?;
    let (pid, tag) = (started.pid, started.tag.clone());
    if let Some(stdin) = started.stdin.take() {
        let fed = Arc::clone(call);
        if !workers::spawn_thread("serve", move || feed(&fed, stdin)) {
            // A server without input is useless: it is ended below.
            call.cancel();
        }
    }
    let mut sink = Live::new(call);
    let outcome = started.run(&mut sink, None, &call.cancelled, &wake, &agent.drain);
    end_family(agent, &user, &tag);
    sink.finish()?;
    // Ends the thread that waits for input.
    call.cancel();
    let (exit_code, signal) = bash::describe_end(outcome.ended, outcome.stopped);
    Ok(ServeAnswer {
        exit_code,
        signal,
        oom_killed: oom.victim(&agent.memory, pid, &tag).is_some(),
        duration_ms: u64::try_from(outcome.duration.as_millis()).unwrap_or(u64::MAX),
    })
}

/// Passes input to the server until the input or the server ends.
fn feed(call: &Call, stdin: OwnedFd) {
    let mut stdin = File::from(stdin);
    while let Ok(Some(bytes)) = call.next_input() {
        if stdin.write_all(&bytes).is_err() {
            return;
        }
    }
}

fn bad(text: String) -> ErrorDetail {
    ErrorDetail::new(ErrorCode::Unacceptable, text)
}

fn find_user(message: &ServeCall) -> Result<User, ErrorDetail> {
    Ok(message.user.as_deref().map(User::find).transpose().map_err(bad)?.unwrap_or_default())
}

/// Ends the descendants of a server that has exited.
fn end_family(agent: &Agent, user: &User, tag: &str) {
    if user.is_root() {
        return family::kill(tag);
    }
    let run = || -> std::io::Result<()> {
        let ids = user.ids();
        let (own, arguments) = (std::env::current_exe()?, [user::END_FAMILY, &ids, tag]);
        let directory = Path::new("/");
        let ending =
            command::start(&agent.reaper, &own, &arguments, directory, &BTreeMap::new(), &Input::Nothing)?;
        let (never, wake) = (AtomicBool::new(false), Arc::new(Wake::new()?));
        ending.run(&mut Nowhere, Some(END_TIME), &never, &wake, &agent.drain);
        Ok(())
    };
    if let Err(error) = run() {
        log(&format!("the descendants of a server could not be ended: {error}"));
    }
}

/// Discards output.
struct Nowhere;

impl Sink for Nowhere {
    fn take(&mut self, _stream: Stream, _bytes: &[u8]) -> bool {
        true
    }
}

fn start(agent: &Arc<Agent>, message: &ServeCall, user: &User) -> Result<Started, ErrorDetail> {
    let (name, arguments) =
        message.command.split_first().ok_or_else(|| bad("there is no command to run".to_owned()))?;
    message.owned.iter().for_each(|directory| user.own(Path::new(directory)));
    let environment = environment(agent, message, user);
    let directory = PathBuf::from(message.directory.as_deref().unwrap_or(WORKSPACE_DIR));
    // An image may name a working directory that it does not have.
    let _ = std::fs::create_dir_all(&directory);
    let program = find_program(name, &directory, &environment)
        .ok_or_else(|| bad(format!("'{name}' is not in the image: it can't be run")))?;
    let program = program.to_string_lossy().into_owned();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let start = |path: &Path, arguments: &[&str]| {
        command::start(&agent.reaper, path, arguments, &directory, &environment, &Input::Pipe)
    };
    let started = if user.is_root() {
        start(Path::new(&program), &arguments)
    } else {
        let ids = user.ids();
        let all: Vec<&str> = [user::RUN_AS, &ids, &program].into_iter().chain(arguments).collect();
        std::env::current_exe().and_then(|own| start(&own, &all))
    };
    started.map_err(|error| bad(format!("'{name}' can't be run: {error}")))
}

/// The variables of the image, its user and the server.
fn environment(agent: &Agent, message: &ServeCall, user: &User) -> BTreeMap<String, String> {
    let mut environment = agent.environment();
    if !user.is_root() {
        environment.insert("USER".to_owned(), user.name.clone());
        if std::env::var_os("HOME").is_none_or(|home| home == "/root") {
            environment.insert("HOME".to_owned(), user.home.clone());
        }
    }
    environment.extend(message.environment.clone());
    environment
}

/// The program that a shell would run.
fn find_program(name: &str, directory: &Path, environment: &BTreeMap<String, String>) -> Option<PathBuf> {
    if name.contains('/') {
        let path = directory.join(name);
        return path.is_file().then_some(path);
    }
    let path = environment.get("PATH").map_or("", String::as_str);
    path.split(':').filter(|part| !part.is_empty()).map(|part| Path::new(part).join(name)).find(|path| {
        use std::os::unix::fs::PermissionsExt;
        std::fs::metadata(path).is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o111 != 0)
    })
}
