//! Calls to the guest agent of a workspace.
//!
//! [`Calls::start`] sends a call; the [`RunningCall`] gives its output and its answer. Where the sandbox has ended, it is
//! started again first.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use emergent_guest_client::{Call, CallError, Event};
use emergent_guest_protocol::GuestCall;
use emergent_wire::tools::{BashAnswer, OperationAnswer};
use emergent_wire::workspace::ProviderName;
use emergent_wire::{OperationId, WorkspaceId};
use serde::de::DeserializeOwned;
use tokio::time::Instant;

use super::connections::Connections;
use super::context::Context;
use super::disk_space::DiskSpace;
use super::error::{Result, WorkspaceError};
use super::live::Busy;
use crate::caller::Caller;

/// A call to the guest agent, before it is sent.
pub(crate) struct GuestRequest<'a> {
    pub(crate) call: GuestCall,
    /// Bytes that follow the call, such as the content of a file.
    pub(crate) input: Option<&'a [u8]>,
    pub(crate) time_limit: TimeLimit,
}

/// The time that the agent has. When it is over, the call is cancelled.
#[derive(Clone, Copy, Debug)]
pub(crate) enum TimeLimit {
    /// From the start to the answer.
    Total(Duration),
    /// For each piece of output, because the client decides how fast they are read.
    EachPiece(Duration),
    Unlimited,
}

/// The workspace and the provider that a call went to.
#[derive(Clone, Copy)]
pub(crate) struct CallTarget {
    pub(crate) id: WorkspaceId,
    pub(crate) provider: ProviderName,
}

/// A call in progress. Dropping it cancels it.
pub(crate) struct RunningCall {
    call: Call,
    target: CallTarget,
    calls: Arc<Calls>,
    busy: Busy,
    time_limit: TimeLimit,
    /// Of a call with a total limit.
    deadline: Instant,
    /// Processes of the sandbox that the host had killed for want of memory when a command began.
    oom_kills_before: u64,
}

/// The answer of a call, and the output before it.
pub(crate) struct GuestAnswer {
    /// JSON that the agent wrote.
    pub(crate) json: Bytes,
    pub(crate) stdout: Vec<u8>,
    pub(crate) stderr: Vec<u8>,
}

/// The output of each stream that may come before an answer.
#[derive(Clone, Copy)]
pub(crate) struct OutputLimit {
    bytes: u64,
    /// Whether the client decides how much there is, by the file that it asks for.
    is_file: bool,
}

impl OutputLimit {
    /// The call has no output.
    pub(crate) const NONE: Self = Self { bytes: 0, is_file: false };

    /// The agent limits the output of a command. More is a fault of the agent.
    pub(crate) const fn command(bytes: usize) -> Self {
        Self { bytes: bytes as u64, is_file: false }
    }

    pub(crate) const fn file(bytes: u64) -> Self {
        Self { bytes, is_file: true }
    }

    fn exceeded(self) -> WorkspaceError {
        if self.is_file {
            return WorkspaceError::FileTooLarge { limit: self.bytes };
        }
        CallError::Garbled(format!("more than {} bytes of output", self.bytes)).into()
    }
}

impl GuestAnswer {
    /// An answer without output before it.
    pub(crate) fn of(json: Bytes) -> Self {
        Self { json, stdout: Vec::new(), stderr: Vec::new() }
    }

    pub(crate) fn parse<T: DeserializeOwned>(&self) -> Result<T> {
        serde_json::from_slice(&self.json).map_err(|error| CallError::Garbled(error.to_string()).into())
    }
}

/// Sends calls to guest agents.
pub(crate) struct Calls {
    pub(super) context: Arc<Context>,
    pub(super) disk_space: Arc<DiskSpace>,
    connections: Arc<Connections>,
}

impl Calls {
    pub(super) fn new(
        context: &Arc<Context>,
        disk_space: &Arc<DiskSpace>,
        connections: &Arc<Connections>,
    ) -> Arc<Self> {
        Arc::new(Self {
            context: Arc::clone(context),
            disk_space: Arc::clone(disk_space),
            connections: Arc::clone(connections),
        })
    }

    /// Sends a call to the agent of a workspace that is ready, and records the use of the workspace.
    pub(crate) async fn start(
        self: &Arc<Self>,
        caller: &Caller,
        id: WorkspaceId,
        request: GuestRequest<'_>,
    ) -> Result<RunningCall> {
        let (live, mut connection, mut busy) = self.connections.connect(id).await?;
        if caller.counts_as_use
            && let Some(used) = live.note_use(self.context.clock.now())
        {
            let context = Arc::clone(&self.context);
            tokio::spawn(async move { context.write_use(id, Some(used)).await });
        }
        let call = match connection.channel.start(&request.call).await {
            // The channel broke unnoticed: the call was not sent, so it can be sent again.
            Err(CallError::Lost(_)) => {
                (_, connection, busy) = self.connections.connect(id).await?;
                connection.channel.start(&request.call).await?
            }
            call => call?,
        };
        let target = CallTarget { id, provider: connection.provider };
        tracing::debug!(workspace = %id, provider = %target.provider, "the agent has the call");
        let is_command = matches!(request.call, GuestCall::Bash(_));
        let running = RunningCall {
            call,
            target,
            calls: Arc::clone(self),
            busy,
            time_limit: request.time_limit,
            deadline: request.time_limit.deadline(),
            oom_kills_before: if is_command { self.oom_kills(target) } else { 0 },
        };
        if let Some(input) = request.input {
            running.send_input(input).await?;
        }
        Ok(running)
    }

    /// The agent ends commands in time by itself. When it did not, and does not answer another call either, it has stopped:
    /// its channel is closed, and the next call starts the sandbox again.
    async fn close_if_silent(&self, id: WorkspaceId) {
        let Some(connection) = self.context.live(id).connection() else {
            return;
        };
        if super::usage::ask(&connection.channel).await.is_none() {
            tracing::warn!(workspace = %id, "the agent does not answer: its channel is closed");
            connection.channel.close();
        }
    }
}

impl TimeLimit {
    fn deadline(self) -> Instant {
        match self {
            Self::Total(limit) => Instant::now() + limit,
            Self::EachPiece(_) | Self::Unlimited => Instant::now(),
        }
    }
}

impl RunningCall {
    /// Completes the answer of a command with what only the host knows: whether memory or disk ran out.
    pub(crate) fn complete_command(&self, answer: &mut BashAnswer) {
        self.calls.judge_command(self.target, self.busy.live(), self.oom_kills_before, answer);
    }

    /// The same for a command in the background.
    pub(crate) fn complete_operation(&self, answer: &mut OperationAnswer) {
        self.calls.judge_operation(self.target, self.busy.live(), answer);
    }

    /// Notes that this call has started a command in the background.
    pub(crate) fn remember_operation(&self, id: OperationId) {
        self.busy.live().remember_operation(id, self.oom_kills_before);
    }

    async fn send_input(&self, input: &[u8]) -> Result<()> {
        let sent = async {
            self.call.send_input(input).await?;
            self.call.end_input().await
        };
        self.explain(tokio::time::timeout_at(self.deadline, sent).await.ok()).await
    }

    /// Waits for the next piece of output, or for the answer.
    pub(crate) async fn next(&mut self) -> Result<Event> {
        let next = self.call.next();
        let next = match self.time_limit {
            TimeLimit::Total(_) => tokio::time::timeout_at(self.deadline, next).await.ok(),
            TimeLimit::EachPiece(limit) => tokio::time::timeout(limit, next).await.ok(),
            TimeLimit::Unlimited => Some(next.await),
        };
        self.explain(next).await
    }

    /// Waits for the answer and keeps the output that comes before it.
    pub(crate) async fn answer(&mut self, limit: OutputLimit) -> Result<GuestAnswer> {
        let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
        loop {
            let (kept, bytes) = match self.next().await? {
                Event::Stdout(bytes) => (&mut stdout, bytes),
                Event::Stderr(bytes) => (&mut stderr, bytes),
                Event::Answer(json) => return Ok(GuestAnswer { json, stdout, stderr }),
            };
            if (kept.len() + bytes.len()) as u64 > limit.bytes {
                return Err(limit.exceeded());
            }
            kept.extend_from_slice(&bytes);
        }
    }

    /// Adds to an error what the host knows of it. Without a result the time limit is over.
    async fn explain<T>(&self, result: Option<Result<T, CallError>>) -> Result<T> {
        let Some(result) = result else {
            self.calls.close_if_silent(self.target.id).await;
            let limit = match self.time_limit {
                TimeLimit::Total(limit) | TimeLimit::EachPiece(limit) => limit,
                TimeLimit::Unlimited => Duration::ZERO,
            };
            return Err(WorkspaceError::NoAnswer(limit));
        };
        match result {
            Ok(value) => Ok(value),
            Err(error) => {
                let CallTarget { id, provider } = self.target;
                Err(self.calls.connections.explain_loss(id, provider, error).await)
            }
        }
    }
}
