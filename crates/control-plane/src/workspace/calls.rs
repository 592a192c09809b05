//! Calls to the guest agent of a workspace.
//!
//! [`Calls::start`] sends a call, and [`RunningCall`] has its output and its answer. A sandbox that has ended is restarted first.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use emergent_guest_client::{Call, CallError, Event, GuestClient};
use emergent_guest_protocol::GuestCall;
use emergent_wire::tools::{BashAnswer, OperationAnswer};
use emergent_wire::workspace::ProviderName;
use emergent_wire::{OperationId, WorkspaceId};
use serde::de::DeserializeOwned;
use tokio::time::Instant;
use tracing::Instrument as _;

use super::connections::Connections;
use super::context::Context;
use super::disk_space::DiskSpace;
use super::error::{Result, WorkspaceError};
use super::live::CallGuard;
use crate::caller::Caller;

/// The time limit to send a call that has none for its answer.
const SEND_TIMEOUT: Duration = Duration::from_secs(60);

/// A call to the guest agent, before it is sent.
pub(crate) struct GuestRequest<'a> {
    pub(crate) call: GuestCall,
    /// Bytes that follow the call, such as the content of a file.
    pub(crate) input: Option<&'a [u8]>,
    pub(crate) time_limit: TimeLimit,
}

/// The time limit of a call. The call is cancelled after it.
#[derive(Clone, Copy, Debug)]
pub(crate) enum TimeLimit {
    /// From the start to the answer.
    Total(Duration),
    /// For each piece of output, where the client decides how fast they are read.
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
    guard: CallGuard,
    time_limit: TimeLimit,
    /// For a call with a total limit.
    deadline: Instant,
    /// The host's count of out-of-memory kills in the sandbox when a command began.
    oom_kills_before: u64,
}

/// The answer of a call, and the output before it.
pub(crate) struct GuestAnswer {
    /// JSON that the agent wrote.
    pub(crate) json: Bytes,
    pub(crate) stdout: Vec<u8>,
    pub(crate) stderr: Vec<u8>,
}

/// The limit on the output of each stream before an answer.
#[derive(Clone, Copy)]
pub(crate) struct OutputLimit(usize);

impl OutputLimit {
    /// The call has no output.
    pub(crate) const NONE: Self = Self(0);

    /// For the output of a command, which the agent limits. More output is a fault of the agent.
    pub(crate) const fn command(bytes: usize) -> Self {
        Self(bytes)
    }
}

impl GuestAnswer {
    /// An answer without output.
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
        let (live, mut connection, mut guard) = self.connections.connect(id).await?;
        if caller.counts_as_use
            && let Some(used) = live.note_use(self.context.clock.now())
        {
            let context = Arc::clone(&self.context);
            let write = async move { context.write_use(id, Some(used)).await };
            tokio::spawn(write.in_current_span());
        }
        let call = match self.send(id, &connection.channel, &request).await? {
            // The channel was lost before. The call was not sent, so it can be sent again.
            Err(CallError::Lost(_)) => {
                (_, connection, guard) = self.connections.connect(id).await?;
                self.send(id, &connection.channel, &request).await??
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
            guard,
            time_limit: request.time_limit,
            deadline: request.time_limit.deadline(),
            oom_kills_before: if is_command { self.oom_kills(target) } else { 0 },
        };
        if let Some(input) = request.input {
            running.send_input(input).await?;
        }
        Ok(running)
    }

    /// Sends a call within its time limit. An agent that does not read makes it wait.
    async fn send(
        &self,
        id: WorkspaceId,
        channel: &GuestClient,
        request: &GuestRequest<'_>,
    ) -> Result<Result<Call, CallError>> {
        let limit = match request.time_limit {
            TimeLimit::Total(limit) | TimeLimit::EachPiece(limit) => limit,
            TimeLimit::Unlimited => SEND_TIMEOUT,
        };
        match tokio::time::timeout(limit, channel.start(&request.call)).await {
            Ok(call) => Ok(call),
            Err(_) => {
                self.close_if_silent(id).await;
                Err(WorkspaceError::NoAnswer(limit))
            }
        }
    }

    /// Closes the channel of an agent that does not answer at all, after a call that had no answer in time. (The agent itself ends
    /// commands in time.) The next call restarts the sandbox.
    async fn close_if_silent(&self, id: WorkspaceId) {
        let Some(connection) = self.context.live(id).connection() else {
            return;
        };
        if super::usage::read(&connection.channel).await.is_none() {
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
    /// Adds to the answer of a command whether the host ran out of memory or disk space, which the agent can't see.
    pub(crate) fn complete_command(&self, answer: &mut BashAnswer) {
        self.calls.complete_command(self.target, self.guard.live(), self.oom_kills_before, answer);
    }

    /// The same for a command in the background.
    pub(crate) fn complete_operation(&self, answer: &mut OperationAnswer) {
        self.calls.complete_operation(self.target, self.guard.live(), answer);
    }

    /// Notes that this call has started a command in the background.
    pub(crate) fn note_operation(&self, id: OperationId) {
        self.guard.live().note_operation(id, self.oom_kills_before);
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

    /// Waits for the answer. Collects the output before it.
    pub(crate) async fn answer(&mut self, limit: OutputLimit) -> Result<GuestAnswer> {
        let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
        loop {
            let (kept, bytes) = match self.next().await? {
                Event::Stdout(bytes) => (&mut stdout, bytes),
                Event::Stderr(bytes) => (&mut stderr, bytes),
                Event::Answer(json) => return Ok(GuestAnswer { json, stdout, stderr }),
            };
            if kept.len() + bytes.len() > limit.0 {
                return Err(CallError::Garbled(format!("more than {} bytes of output", limit.0)).into());
            }
            kept.extend_from_slice(&bytes);
        }
    }

    /// Adds the host's knowledge to an error. None as a result means that the time limit is over.
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
