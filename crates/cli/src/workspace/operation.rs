//! `workspace operation`: a command in the background. Its output can be read from any offset, so that a client continues after a
//! broken connection or a restart of the server.

use std::time::Duration;

use anyhow::{Context as _, Result};
use clap::Args;
use emergent_wire::tools::{OperationAnswer, OperationStatus};
use emergent_wire::{OperationId, WorkspaceId};

use super::bash::{print_output, report};
use super::exit_status::Ending;
use crate::client::{ApiError, calls};
use crate::context::Context;
use crate::output::{self, StdoutClosed};
use crate::progress;
use crate::sse::EventStream;

/// The number of retries after a lost connection. New output resets it.
const RETRIES: u32 = 30;
/// The pause before each retry.
const RETRY_PAUSE: Duration = Duration::from_secs(1);

/// Read, follow or kill a command in the background
///
/// Prints its output so far. With --follow it continues until the command ends, and exits with the command's exit code. It
/// reconnects after a restart of the server.
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  op=$(emergent workspace bash 3fa2c9d1 --background -- 'make all')
  emergent workspace operation 3fa2c9d1 $op
  emergent workspace operation 3fa2c9d1 $op --follow
  emergent workspace operation 3fa2c9d1 $op --kill")]
pub(super) struct OperationArgs {
    /// The workspace's id, or a unique prefix or suffix of it
    id: String,
    /// The operation's id, which `bash --background` printed
    operation: OperationId,
    /// Skip the output before this offset
    #[arg(long, value_name = "N", default_value_t = 0)]
    offset: u64,
    /// Print output until the command ends, and exit with its exit code
    #[arg(long, short, conflicts_with_all = ["kill", "json"])]
    follow: bool,
    /// Kill it with SIGTERM, and with SIGKILL five seconds later
    #[arg(long, conflicts_with = "offset")]
    kill: bool,
}

pub(super) async fn run(context: &Context, args: &OperationArgs) -> Result<u8> {
    let id = context.workspace_id(&args.id).await?;
    if args.follow {
        return follow(context, id, args).await;
    }
    if args.kill {
        let killed = context.client.call(calls::kill_operation(id, args.operation));
        let answer = progress::during("killing the command", killed).await?;
        context.show(&answer, |operation: OperationAnswer| {
            describe(id, &operation);
            Ok(())
        })?;
        return Ok(0);
    }
    let mut offset = args.offset;
    loop {
        let call = calls::get_operation(id, args.operation).query("offset", Some(offset));
        let answer = context.client.call(call).await?;
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

/// Prints the status of the command on stderr.
fn describe(id: WorkspaceId, operation: &OperationAnswer) {
    let seconds = operation.duration_ms as f64 / 1000.0;
    match operation.status {
        OperationStatus::Running => output::note(format_args!(
            "emergent: running for {seconds:.1} s; continue with: emergent workspace operation {id} {} --offset {}",
            operation.operation_id, operation.next_offset
        )),
        OperationStatus::Exited => {
            let code = report(&Ending::from(operation));
            output::note(format_args!("emergent: ended after {seconds:.1} s, exit code {code}"));
        }
        OperationStatus::Lost => {
            report(&Ending::from(operation));
        }
    }
}

async fn follow(context: &Context, id: WorkspaceId, args: &OperationArgs) -> Result<u8> {
    let mut offset = args.offset;
    let mut left = RETRIES;
    loop {
        let before = offset;
        match follow_once(context, id, args.operation, &mut offset).await {
            Ok(Some(code)) => return Ok(code),
            Ok(None) if left == 0 => {
                anyhow::bail!("the server keeps ending the connection; the command may still run")
            }
            Err(error) if left == 0 || !is_transient(&error) => return Err(error),
            Ok(None) | Err(_) => {}
        }
        left = if offset == before { left - 1 } else { RETRIES };
        tokio::time::sleep(RETRY_PAUSE).await;
    }
}

/// Follows until the command ends, and returns its exit code. `None` if the connection ended first. `offset` is advanced to the
/// end of the printed output.
async fn follow_once(
    context: &Context,
    id: WorkspaceId,
    operation: OperationId,
    offset: &mut u64,
) -> Result<Option<u8>> {
    let call = calls::get_operation(id, operation).query("offset", Some(*offset)).events();
    let mut events = EventStream::new(context.client.send(call).await?);
    while let Some(event) = events.next().await? {
        if print_output(&event)? {
            // An event that ends within a character has no id, because no offset can resume there.
            if let Some(id) = &event.id {
                *offset = id.parse().context("the server sent an offset that is not a number")?;
            }
        } else if event.event == "result" {
            let answer: OperationAnswer = serde_json::from_str(&event.data)?;
            return Ok(Some(report(&Ending::from(&answer))));
        }
    }
    Ok(None)
}

/// Whether a retry may succeed: the connection failed, or the server is unavailable for now.
fn is_transient(error: &anyhow::Error) -> bool {
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
    fn only_transient_errors_are_retried() {
        let refused = |status| anyhow::Error::new(ApiError::parse(status, "{}"));
        assert!(is_transient(&refused(reqwest::StatusCode::SERVICE_UNAVAILABLE)));
        assert!(!is_transient(&refused(reqwest::StatusCode::NOT_FOUND)));
        assert!(!is_transient(&anyhow::Error::new(StdoutClosed).context("writing")));
        assert!(!is_transient(&anyhow::anyhow!("something else")));
    }
}
