//! The tools.

use std::thread;
use std::time::Duration;

use serde_json::json;
use serde_json::value::RawValue;

use crate::arguments::{Arguments, missing};
use crate::message::{Call, Meta, answer, data_result, error, failure_result, quoted, text_result};
use crate::mode::Mode;
use crate::process;
use crate::server::Server;

const INVALID: i32 = -32602;
/// The stack of a thread of a waiting call. There can be thousands.
const STACK: usize = 64 * 1024;

const TOOLS: [(&str, &str); 13] = [
    ("echo", "{text}: answers the text, and in structuredContent.meta the request's _meta"),
    ("sleep", "{ms, text}: answers the text after so many milliseconds"),
    ("pid", "Answers the process id"),
    ("env", "{name}: answers the value of an environment variable"),
    ("whoami", "Answers uid, gid, cwd, argv and pid"),
    ("crash", "{code}: exits with that code instead of answering"),
    ("stderr", "{text}: writes a line to standard error"),
    ("raw", "{line}: writes this line to standard output as it is, then answers"),
    (
        "progress",
        "{steps, text}: reports so many steps with the request's progress token, then answers the text",
    ),
    ("notify", "{method, params}: sends a notification, then answers"),
    ("ask", "{method, params}: sends a request and answers with the response it got, as it was"),
    ("spawn", "{seconds, inherit}: starts a process in a session of its own, and answers its id"),
    ("received", "Answers all notifications received so far"),
];

/// The result of `tools/list`.
pub(crate) fn list(mode: Mode) -> String {
    let long = matches!(mode, Mode::LongLine(_)).then_some(("long", "Answers with a long line"));
    let tools: Vec<_> = TOOLS
        .into_iter()
        .chain(long)
        .map(|(name, text)| json!({"name": name, "description": text, "inputSchema": {"type": "object"}}))
        .collect();
    json!({"tools": tools}).to_string()
}

/// Answers a `tools/call`.
pub(crate) fn call(server: &Server, id: &str, params: Option<&RawValue>) {
    let call = params.and_then(|params| serde_json::from_str::<Call>(params.get()).ok());
    let answered = match call {
        Some(call) => run(server, id, &call),
        None => Err("tools/call needs a name".to_owned()),
    };
    if let Err(message) = answered {
        server.send(error(id, INVALID, &message));
    }
}

/// Runs a tool. It answers before this returns, or later from its own thread.
fn run(server: &Server, id: &str, call: &Call) -> Result<(), String> {
    let arguments = Arguments::parse(call.arguments)?;
    match call.name.as_ref() {
        "echo" => {
            let (text, meta) = (arguments.text()?, call.meta.map_or("null", RawValue::get));
            let result = format!(
                r#"{{"content":[{{"type":"text","text":{text}}}],"structuredContent":{{"meta":{meta}}}}}"#
            );
            finish(server, id, &result);
        }
        "pid" => finish(server, id, &text_result(&quoted(&std::process::id().to_string()))),
        "env" => {
            let value = std::env::var(arguments.name()?);
            let result =
                value.map_or_else(|_| failure_result("not set"), |value| text_result(&quoted(&value)));
            finish(server, id, &result);
        }
        "whoami" => finish(server, id, &data_result(&process::whoami())),
        "crash" => std::process::exit(arguments.code.ok_or_else(|| missing("code"))?),
        "stderr" => {
            let text: String = serde_json::from_str(arguments.text()?).map_err(|error| error.to_string())?;
            eprintln!("{text}");
            finish(server, id, &text_result("\"written\""));
        }
        "raw" => {
            server.write(format!("{}\n", arguments.line()?));
            finish(server, id, &text_result("\"written\""));
        }
        "notify" => {
            server.notify(arguments.method()?, arguments.params());
            finish(server, id, &text_result("\"sent\""));
        }
        "received" => {
            finish(server, id, &data_result(&format!(r#"{{"notifications":{}}}"#, server.received())));
        }
        "spawn" => {
            let seconds = arguments.seconds.ok_or_else(|| missing("seconds"))?;
            let started = process::spawn_sleeper(seconds, arguments.inherit);
            let pid = started.map_err(|error| error.to_string())?;
            finish(server, id, &text_result(&quoted(&pid.to_string())));
        }
        "long" => match server.mode {
            Mode::LongLine(length) => finish(server, id, &long_result(id, length)),
            _ => return Err("long: only in mode long-line".to_owned()),
        },
        "sleep" => {
            let (text, ms) = (text_result(arguments.text()?), arguments.ms.ok_or_else(|| missing("ms"))?);
            later(server, id, move |_| {
                thread::sleep(Duration::from_millis(ms));
                text
            })?;
        }
        "progress" => {
            let (text, steps) =
                (text_result(arguments.text()?), arguments.steps.ok_or_else(|| missing("steps"))?);
            let meta = call.meta.and_then(|meta| serde_json::from_str::<Meta>(meta.get()).ok());
            let token = meta.and_then(|meta| meta.progress_token).map(|token| token.get().to_owned());
            later(server, id, move |server| {
                for step in token.iter().flat_map(|token| (1..=steps).map(move |step| (token, step))) {
                    report(server, step, steps);
                }
                text
            })?;
        }
        "ask" => {
            let response = server.ask(arguments.method()?, arguments.params().or(Some("{}")));
            later(server, id, move |_| match response.recv() {
                Ok(response) => data_result(&format!(r#"{{"response":{response}}}"#)),
                Err(_) => failure_result("no response"),
            })?;
        }
        name => return Err(format!("unknown tool: {name}")),
    }
    Ok(())
}

fn report(server: &Server, (token, step): (&String, u64), steps: u64) {
    let params = format!(r#"{{"progressToken":{token},"progress":{step},"total":{steps}}}"#);
    server.notify("notifications/progress", Some(&params));
}

/// Runs `work` in a thread, and answers with its result.
fn later(
    server: &Server,
    id: &str,
    work: impl FnOnce(&Server) -> String + Send + 'static,
) -> Result<(), String> {
    let (server, id) = (server.clone(), id.to_owned());
    let answering = move || {
        let result = work(&server);
        finish(&server, &id, &result);
    };
    thread::Builder::new().stack_size(STACK).spawn(answering).map(drop).map_err(|error| error.to_string())
}

/// Answers a call. In mode `twice` it answers two times.
fn finish(server: &Server, id: &str, result: &str) {
    let line = answer(id, result);
    server.send(if server.mode == Mode::Twice { line.repeat(2) } else { line });
}

/// A result that makes the line of the answer `length` bytes long.
fn long_result(id: &str, length: usize) -> String {
    let rest = answer(id, &text_result("\"\"")).len() - 1;
    text_result(&format!("\"{}\"", "x".repeat(length.saturating_sub(rest))))
}
