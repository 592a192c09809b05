//! `workspace bash`: runs a command like a local one. Its output is streamed, and its exit code becomes that of this program.

use std::time::Duration;

use anyhow::{Result, bail};
use clap::Args;
use emergent_wire::WorkspaceId;
use emergent_wire::tools::{BashAnswer, BashRequest, MAX_TIMEOUT_MS, OperationAnswer, ToolRequest as _};
use reqwest::StatusCode;
use serde::Deserialize;

use super::exit_status::Ending;
use crate::client::{ApiError, Call, calls};
use crate::context::Context;
use crate::sse::{Event, EventStream};
use crate::{output, values};

/// The time limit of the call, beyond the time-out of the command.
const MARGIN: Duration = Duration::from_secs(60);

/// Run a command in a workspace
///
/// The output is printed as the command writes it. The exit code is that of the command, 124 if the time-out ended it, or 128
/// plus the signal's number if a signal did. The command runs in bash (sh if the image has no bash) with an empty standard
/// input. Several words are joined with spaces, so quote a command line with quotes, pipes or variables. With --json the
/// answer is printed at the end, and the exit code only tells whether the call succeeded.
#[derive(Args, Debug)]
#[command(
    override_usage = "emergent workspace bash [OPTIONS] <ID> -- <COMMAND>...",
    after_help = "\
Examples:
  emergent workspace bash 3fa2c9d1 -- uname -a
  emergent workspace bash 3fa2c9d1 -- 'grep -c . *.py | sort'
  emergent workspace bash 3fa2c9d1 --workdir /tmp --env MODE=test --timeout 5m -- 'make test'
  op=$(emergent workspace bash 3fa2c9d1 --background -- 'make all')
  emergent workspace operation 3fa2c9d1 $op --follow"
)]
pub(super) struct BashArgs {
    /// The workspace's id, or a unique prefix or suffix of it
    id: String,
    /// The working directory [default: /workspace]
    #[arg(long, short = 'w', value_name = "DIR")]
    workdir: Option<String>,
    /// The time-out: seconds, or 500ms, 5m [default: 2m, at most 10m; in the background none]
    #[arg(long, short = 't', value_name = "DURATION", value_parser = values::duration)]
    timeout: Option<Duration>,
    /// An environment variable. NAME alone passes on its value from here
    #[arg(long, short = 'e', value_name = "NAME[=VALUE]", value_parser = values::variable)]
    env: Vec<(String, String)>,
    /// Run it in the background, and print the id of the operation
    #[arg(long, short = 'b')]
    background: bool,
    /// The command
    #[arg(required = true, trailing_var_arg = true, value_name = "COMMAND")]
    command: Vec<String>,
}

/// The data of an output event.
#[derive(Deserialize)]
struct OutputChunk {
    text: String,
}

pub(super) async fn run(context: &Context, args: BashArgs) -> Result<u8> {
    let id = context.workspace_id(&args.id).await?;
    let request = BashRequest {
        command: args.command.join(" "),
        workdir: args.workdir,
        timeout_ms: args.timeout.map(values::millis),
        environment: values::environment(None, &args.env)?,
        background: args.background,
    };
    let limit = args.timeout.unwrap_or(Duration::from_millis(MAX_TIMEOUT_MS));
    let call = calls::tool(id, BashRequest::NAME).body(&request)?.within(limit + MARGIN);
    if args.background {
        let answer = context.client.call(call).await?;
        context.show(&answer, |operation: OperationAnswer| {
            output::line(operation.operation_id)?;
            output::note(format_args!(
                "follow it with: emergent workspace operation {id} {} --follow",
                operation.operation_id
            ));
            Ok(())
        })?;
        return Ok(0);
    }
    if context.json {
        let answer = context.client.call(call).await?;
        context.show(&answer, |_: BashAnswer| Ok(()))?;
        return Ok(0);
    }
    stream(context, id, call.events()).await
}

async fn stream(context: &Context, id: WorkspaceId, call: Call) -> Result<u8> {
    let mut events = EventStream::new(context.client.send(call).await?);
    while let Some(event) = events.next().await? {
        if print_output(&event)? {
            continue;
        }
        if event.event == "result" {
            let answer: BashAnswer = serde_json::from_str(&event.data)?;
            return Ok(report(&Ending::from(&answer)));
        }
    }
    bail!(
        "the server ended the connection while the command ran: it may have had effects (check with: emergent \
         workspace get {id})"
    )
}

/// Writes an output event to stdout or stderr. Returns false for another event, and an error for an `error` event.
pub(super) fn print_output(event: &Event) -> Result<bool> {
    match event.event.as_str() {
        "stdout" => {
            let chunk: OutputChunk = serde_json::from_str(&event.data)?;
            output::bytes(chunk.text.as_bytes())?;
        }
        "stderr" => {
            let chunk: OutputChunk = serde_json::from_str(&event.data)?;
            output::error_bytes(chunk.text.as_bytes());
        }
        "error" => return Err(ApiError::parse(StatusCode::OK, &event.data).into()),
        _ => return Ok(false),
    }
    Ok(true)
}

/// Prints the messages about the end of a command, and returns its exit code.
pub(super) fn report(ending: &Ending) -> u8 {
    for message in ending.messages() {
        output::note(format_args!("emergent: {}", output::one_line(&message)));
    }
    ending.exit_code()
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: BashArgs,
    }

    fn command(line: &[&str]) -> String {
        let line = Line::try_parse_from([&["bash", "beef"], line].concat()).unwrap();
        line.args.command.join(" ")
    }

    #[test]
    fn words_after_the_flags_are_joined_to_the_command() {
        assert_eq!(command(&["--", "uname -a"]), "uname -a");
        assert_eq!(command(&["--", "uname", "-a"]), "uname -a");
        assert_eq!(command(&["--timeout", "5", "--", "ls", "--timeout", "7"]), "ls --timeout 7");
        assert_eq!(command(&["ls", "-l", "--all"]), "ls -l --all");
        assert_eq!(command(&["--", "git", "diff", "--", "a b"]), "git diff -- a b");
        assert!(Line::try_parse_from(["bash", "beef"]).is_err());
        assert!(Line::try_parse_from(["bash", "beef", "--timeout", "soon", "--", "x"]).is_err());
    }

    #[test]
    fn error_event_in_the_stream_becomes_an_error() {
        let event = |event: &str, data: &str| Event { event: event.into(), data: data.into(), id: None };
        let error = print_output(&event("error", r#"{"error":{"code":"sandbox_lost","message":"gone"}}"#))
            .unwrap_err();
        assert_eq!(error.to_string(), "gone (sandbox_lost)");
        assert!(!print_output(&event("result", "{}")).unwrap());
        assert!(!print_output(&event("ping", "")).unwrap());
    }
}
