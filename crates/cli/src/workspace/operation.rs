//! `workspace operation`: a command in the background. Its output can be read from any offset, also after the
//! connection broke or the server was restarted.

use std::time::Duration;

use anyhow::{Context as _, Result};
use clap::Args;
use emergent_wire::tools::{OperationAnswer, OperationStatus};
use emergent_wire::{OperationId, WorkspaceId};

use super::bash::{pass_on, tell};
use super::exit_status::Ending;
use crate::client::{ApiError, Call};
use crate::context::Context;
use crate::output::{self, StdoutClosed};
use crate::progress;
use crate::sse::EventStream;

/// How often a lost connection is made again before giving up, unless output comes in between.
const ATTEMPTS: u32 = 30;
/// The pause before each of them.
const PAUSE: Duration = Duration::from_secs(1);

/// Look at, follow or kill a command in the background
///
/// Prints its output so far. With --follow it stays until the command ends and passes on its exit code; it
/// survives a restart of the server.
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  op=$(emergent workspace bash 3fa2c9d1 --background -- 'make all')
  emergent workspace operation 3fa2c9d1 $op
  emergent workspace operation 3fa2c9d1 $op --follow
  emergent workspace operation 3fa2c9d1 $op --kill")]
pub(super) struct OperationArgs {
    /// The workspace's id, or a unique piece of its beginning or end
    id: String,
    /// The operation's id, as `bash --background` printed it
    operation: OperationId,
    /// Leave out the output before this offset
    #[arg(long, value_name = "N", default_value_t = 0)]
    offset: u64,
    /// Stay until it ends, and exit with its code
    #[arg(long, short, conflicts_with_all = ["kill", "json"])]
    follow: bool,
    /// End it: SIGTERM, and SIGKILL five seconds later
    #[arg(long, conflicts_with = "offset")]
    kill: bool,
}

pub(super) async fn run(context: &Context, args: &OperationArgs) -> Result<u8> {
    let id = context.workspace_id(&args.id).await?;
    if args.follow {
        return follow(context, id, args).await;
    }
    let path = [id.to_string(), args.operation.to_string()];
    let path = ["agent", "workspaces", &path[0], "operations", &path[1]];
    if args.kill {
        let killed = context.client.call(Call::delete(&path));
        let answer = progress::during("ending the command", killed).await?;
        context.show(&answer, |operation: OperationAnswer| {
            describe(id, &operation);
            Ok(())
        })?;
        return Ok(0);
    }
    let mut offset = args.offset;
    loop {
        let answer = context.client.call(Call::get(&path).query("offset", Some(offset))).await?;
        if context.json {
            context.show(&answer, |_: OperationAnswer| Ok(()))?;
            return Ok(0);
        }
        let operation: OperationAnswer = answer.parse()?;
        output::bytes(operation.stdout.as_bytes())?;
        output::error_bytes(operation.stderr.as_bytes());
        if !operation.more || operation.next_offset <= offset {
            describe(id, &operation);
            return Ok(0);
        }
        offset = operation.next_offset;
    }
}

/// Says on stderr where the command stands.
fn describe(id: WorkspaceId, operation: &OperationAnswer) {
    let seconds = operation.duration_ms as f64 / 1000.0;
    match operation.status {
        OperationStatus::Running => output::note(format_args!(
            "emergent: running for {seconds:.1} s; go on with: emergent workspace operation {id} {} --offset {}",
            operation.operation_id, operation.next_offset
        )),
        OperationStatus::Exited => {
            let code = tell(&Ending::from(operation));
            output::note(format_args!("emergent: ended after {seconds:.1} s, exit code {code}"));
        }
        OperationStatus::Lost => {
            tell(&Ending::from(operation));
        }
    }
}

async fn follow(context: &Context, id: WorkspaceId, args: &OperationArgs) -> Result<u8> {
    let mut offset = args.offset;
    let mut left = ATTEMPTS;
    loop {
        let before = offset;
        match follow_once(context, id, args.operation, &mut offset).await {
            Ok(Some(code)) => return Ok(code),
            Ok(None) if left == 0 => {
                anyhow::bail!("the server keeps ending the connection; the command may still run")
            }
            Err(error) if left == 0 || !is_passing(&error) => return Err(error),
            Ok(None) | Err(_) => {}
        }
        left = if offset == before { left - 1 } else { ATTEMPTS };
        tokio::time::sleep(PAUSE).await;
    }
}

/// Follows until the command ends (its exit code) or the connection does (none). `offset` is where to go on.
async fn follow_once(
    context: &Context,
    id: WorkspaceId,
    operation: OperationId,
    offset: &mut u64,
) -> Result<Option<u8>> {
    let call = Call::get(&["agent", "workspaces", &id.to_string(), "operations", &operation.to_string()])
        .query("offset", Some(*offset))
        .events();
    let mut events = EventStream::new(context.client.send(call).await?);
    while let Some(event) = events.next().await? {
        if pass_on(&event)? {
            // An event in the middle of a character has no offset to resume at.
            if let Some(id) = &event.id {
                *offset = id.parse().context("the server sent an offset that is no number")?;
            }
        } else if event.event == "result" {
            let answer: OperationAnswer = serde_json::from_str(&event.data)?;
            return Ok(Some(tell(&Ending::from(&answer))));
        }
    }
    Ok(None)
}

/// Whether trying again may help: no connection, a broken one, or a server that says "later".
fn is_passing(error: &anyhow::Error) -> bool {
    if error.chain().any(|cause| cause.is::<StdoutClosed>()) {
        return false;
    }
    match error.downcast_ref::<ApiError>() {
        Some(refused) => refused.status == reqwest::StatusCode::SERVICE_UNAVAILABLE,
        None => error.chain().any(|cause| cause.is::<reqwest::Error>()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_passes_is_tried_again() {
        let refused = |status| anyhow::Error::new(ApiError::parse(status, "{}"));
        assert!(is_passing(&refused(reqwest::StatusCode::SERVICE_UNAVAILABLE)));
        assert!(!is_passing(&refused(reqwest::StatusCode::NOT_FOUND)));
        assert!(!is_passing(&anyhow::Error::new(StdoutClosed).context("writing")));
        assert!(!is_passing(&anyhow::anyhow!("something else")));
    }
}
