//! `workspace bash`: runs a command and behaves as if it ran here: its output as it comes, its exit code at the end.

use std::time::Duration;

use anyhow::{Result, bail};
use clap::Args;
use emergent_wire::WorkspaceId;
use emergent_wire::tools::{BashAnswer, BashRequest, MAX_TIMEOUT_MS, OperationAnswer};
use reqwest::StatusCode;
use serde::Deserialize;

use super::exit_status::Ending;
use crate::client::{ApiError, Call};
use crate::context::Context;
use crate::sse::{Event, EventStream};
use crate::{output, values};

/// How much longer than the command the server may take to answer.
const MARGIN: Duration = Duration::from_secs(60);

/// Run a command in a workspace
///
/// Its output comes as it is written, and its exit code becomes this command's: 124 when the time-out ended it,
/// 128 and the signal's number when a signal did. The command runs in bash (sh where there is none) with an empty
/// standard input. Several words are joined by spaces, so quote a command line that has quotes, pipes or variables
/// of its own. With --json the answer comes at the end, and the exit code says whether the call worked.
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
    /// The workspace's id, or a unique piece of its beginning or end
    id: String,
    /// Where it runs [default: /workspace]
    #[arg(long, short = 'w', value_name = "DIR")]
    workdir: Option<String>,
    /// How long it may run: seconds, or 500ms, 5m [default: 2m, at most 10m; in the background for ever]
    #[arg(long, short = 't', value_name = "DURATION", value_parser = values::duration)]
    timeout: Option<Duration>,
    /// A variable for this command; NAME alone takes the value it has here
    #[arg(long, short = 'e', value_name = "NAME[=VALUE]", value_parser = values::variable)]
    env: Vec<(String, String)>,
    /// Print the id of the operation at once; the command goes on
    #[arg(long, short = 'b')]
    background: bool,
    /// The command
    #[arg(required = true, trailing_var_arg = true, value_name = "COMMAND")]
    command: Vec<String>,
}

/// A piece of output.
#[derive(Deserialize)]
pub(super) struct Piece {
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
    let call =
        Call::post(&["agent", "workspaces", &id.to_string(), "bash"]).body(&request)?.within(limit + MARGIN);
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
        if pass_on(&event)? {
            continue;
        }
        if event.event == "result" {
            let answer: BashAnswer = serde_json::from_str(&event.data)?;
            return Ok(tell(&Ending::from(&answer)));
        }
    }
    bail!(
        "the server ended the connection while the command ran: it may have had effects (look with: emergent \
         workspace get {id})"
    )
}

/// Writes a piece of output to where it belongs; false when the event is something else. A failure ends it.
pub(super) fn pass_on(event: &Event) -> Result<bool> {
    match event.event.as_str() {
        "stdout" => {
            let piece: Piece = serde_json::from_str(&event.data)?;
            output::bytes(piece.text.as_bytes())?;
        }
        "stderr" => {
            let piece: Piece = serde_json::from_str(&event.data)?;
            output::error_bytes(piece.text.as_bytes());
        }
        "error" => return Err(ApiError::parse(StatusCode::OK, &event.data).into()),
        _ => return Ok(false),
    }
    Ok(true)
}

/// Says what there is to say about the end of a command, and gives its exit code.
pub(super) fn tell(ending: &Ending) -> u8 {
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
    fn the_command_is_everything_after_the_flags() {
        assert_eq!(command(&["--", "uname -a"]), "uname -a");
        assert_eq!(command(&["--", "uname", "-a"]), "uname -a");
        assert_eq!(command(&["--timeout", "5", "--", "ls", "--timeout", "7"]), "ls --timeout 7");
        assert_eq!(command(&["ls", "-l", "--all"]), "ls -l --all");
        assert_eq!(command(&["--", "git", "diff", "--", "a b"]), "git diff -- a b");
        assert!(Line::try_parse_from(["bash", "beef"]).is_err());
        assert!(Line::try_parse_from(["bash", "beef", "--timeout", "soon", "--", "x"]).is_err());
    }

    #[test]
    fn a_failure_in_the_stream_is_an_error() {
        let event = |event: &str, data: &str| Event { event: event.into(), data: data.into(), id: None };
        let error =
            pass_on(&event("error", r#"{"error":{"code":"sandbox_lost","message":"gone"}}"#)).unwrap_err();
        assert_eq!(error.to_string(), "gone (sandbox_lost)");
        assert!(!pass_on(&event("result", "{}")).unwrap());
        assert!(!pass_on(&event("ping", "")).unwrap());
    }
}
