//! Commands in the background: state, output, kill.

use std::sync::Arc;
use std::time::Duration;

use emergent_guest_client::Event;
use emergent_guest_protocol::{AttachCall, GuestCall, OperationCall};
use emergent_wire::tools::OperationAnswer;
use emergent_wire::{OperationId, WorkspaceId};

use super::calls::{Calls, GuestAnswer, GuestRequest, OutputLimit, RunningCall, TimeLimit};
use super::error::Result;
use crate::caller::Caller;
use crate::tools::{COMMAND_MARGIN, COMMAND_OUTPUT_BYTES, lossy};

/// The time limit for reading the state of a command.
const READ_TIMEOUT: Duration = Duration::from_secs(120);

impl Calls {
    /// The state of a command in the background, and its output from an offset on.
    pub(crate) async fn operation(
        self: &Arc<Self>,
        caller: &Caller,
        id: WorkspaceId,
        operation_id: OperationId,
        offset: u64,
    ) -> Result<OperationAnswer> {
        let call = GuestCall::Attach(AttachCall { operation_id, offset, follow: false });
        let time_limit = TimeLimit::Total(READ_TIMEOUT);
        let mut running = self.start(caller, id, GuestRequest { call, input: None, time_limit }).await?;
        let output = running.answer(OutputLimit::command(COMMAND_OUTPUT_BYTES)).await?;
        let mut answer: OperationAnswer = output.parse()?;
        running.complete_operation(&mut answer);
        answer.stdout = lossy(output.stdout);
        answer.stderr = lossy(output.stderr);
        Ok(answer)
    }

    /// Follows a command in the background until it ends.
    pub(crate) async fn follow_operation(
        self: &Arc<Self>,
        caller: &Caller,
        id: WorkspaceId,
        operation_id: OperationId,
        offset: u64,
    ) -> Result<FollowedOperation> {
        let call = GuestCall::Attach(AttachCall { operation_id, offset, follow: true });
        let request = GuestRequest { call, input: None, time_limit: TimeLimit::Unlimited };
        Ok(FollowedOperation(self.start(caller, id, request).await?))
    }

    /// Kills a command in the background.
    pub(crate) async fn kill_operation(
        self: &Arc<Self>,
        caller: &Caller,
        id: WorkspaceId,
        operation_id: OperationId,
    ) -> Result<OperationAnswer> {
        let call = GuestCall::KillOperation(OperationCall { operation_id });
        let time_limit = TimeLimit::Total(COMMAND_MARGIN * 2);
        let mut running = self.start(caller, id, GuestRequest { call, input: None, time_limit }).await?;
        running.answer(OutputLimit::NONE).await?.parse()
    }
}

/// A background command whose output is read while it runs.
pub(crate) struct FollowedOperation(RunningCall);

/// A piece of output, or the end of the command.
pub(crate) enum OperationEvent {
    Stdout(bytes::Bytes),
    Stderr(bytes::Bytes),
    Ended(Box<OperationAnswer>),
}

impl FollowedOperation {
    /// Waits for the next event. The end is the last one.
    pub(crate) async fn next(&mut self) -> Result<OperationEvent> {
        Ok(match self.0.next().await? {
            Event::Stdout(bytes) => OperationEvent::Stdout(bytes),
            Event::Stderr(bytes) => OperationEvent::Stderr(bytes),
            Event::Answer(json) => {
                let mut answer: OperationAnswer = GuestAnswer::of(json).parse()?;
                self.0.complete_operation(&mut answer);
                OperationEvent::Ended(Box::new(answer))
            }
        })
    }
}
