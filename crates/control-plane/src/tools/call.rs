//! The one path of a tool call: authorise, read, run, audit, measure.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use chrono::{DateTime, Utc};
use emergent_guest_client::Event;
use emergent_guest_protocol::GuestCall;
use emergent_store::{AuditEntry, AuditOutcome};
use emergent_wire::access::TokenScope;
use emergent_wire::{ErrorCode, WorkspaceId};
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};

use super::error::ToolError;
use super::table::{AnyRequest, Arguments, Streaming, ToolAnswer, ToolEntry};
use crate::audit::Audit;
use crate::caller::{Caller, Principal};
use crate::errors::code_of_tool;
use crate::workspace::{GuestRequest, OutputLimit, RunningCall, TimeLimit, Workspaces};

/// Large files that are in memory at once, on their way in or out.
const LARGE_FILES: usize = 4;
/// How long a call waits to be one of them.
const WAIT_FOR_LARGE_FILE: Duration = Duration::from_secs(30);
/// The time that a tool has which only reads or changes files.
const FILE_TOOL_TIME: Duration = Duration::from_secs(120);

/// The tools, and what their calls need.
#[derive(Clone)]
pub(crate) struct Tools {
    table: Arc<[Arc<ToolEntry>]>,
    workspaces: Arc<Workspaces>,
    audit: Audit,
    large_files: Arc<Semaphore>,
}

/// A function that shows output. It never waits.
pub(crate) type ShowOutput = Box<dyn Fn(&[u8]) + Send + Sync>;

/// Where the output of a call goes while the call runs.
pub(crate) enum Output {
    /// Nowhere: all of it is in the answer.
    InAnswer,
    /// To a receiver, as fast as it reads. The answer holds none.
    Streamed(mpsc::Sender<Piece>),
    /// To a function. The answer holds it, too.
    Shown(ShowOutput),
}

/// A piece of output on its way to a receiver.
#[derive(Debug)]
pub(crate) enum Piece {
    /// The agent has the call. Sent first, so that the receiver of a silent command knows.
    Started,
    Stdout(Bytes),
    Stderr(Bytes),
}

impl Tools {
    pub(crate) fn new(table: Vec<Arc<ToolEntry>>, workspaces: Arc<Workspaces>, audit: Audit) -> Self {
        let large_files = Arc::new(Semaphore::new(LARGE_FILES));
        Self { table: table.into(), workspaces, audit, large_files }
    }

    pub(crate) fn table(&self) -> &[Arc<ToolEntry>] {
        &self.table
    }

    pub(crate) fn find(&self, name: &str) -> Option<&Arc<ToolEntry>> {
        self.table.iter().find(|tool| tool.name == name)
    }

    /// Whether a principal may use a tool in this workspace.
    pub(crate) fn allows(&self, principal: &Principal, id: WorkspaceId, _tool: &ToolEntry) -> bool {
        match &principal.scope {
            TokenScope::Admin => true,
            TokenScope::Workspace { workspace_id } => *workspace_id == id,
            // They get access with the sessions.
            TokenScope::Project { .. } | TokenScope::Session { .. } => false,
        }
    }

    /// Waits until one more large file may be in memory.
    pub(crate) async fn large_file(&self) -> Result<OwnedSemaphorePermit, ToolError> {
        let permit = self.large_files.clone().acquire_owned();
        match tokio::time::timeout(WAIT_FOR_LARGE_FILE, permit).await {
            Ok(Ok(permit)) => Ok(permit),
            _ => Err(ToolError::TooManyLargeFiles),
        }
    }

    /// Authorises a call and reads its request. A call that is refused here is in the audit log, too.
    pub(crate) async fn prepare(
        &self,
        caller: &Caller,
        id: WorkspaceId,
        tool: &ToolEntry,
        arguments: Arguments<'_>,
    ) -> Result<PreparedCall, ToolError> {
        let mut record = CallRecord::begin(self.audit.clone(), caller.clone(), id, tool.name);
        match self.read(&mut record, tool, arguments) {
            Ok(request) => {
                let tools = self.clone();
                Ok(PreparedCall { tools, request, record, max_raw_bytes: None })
            }
            Err(error) => {
                record.end(Some(&error)).await;
                Err(error)
            }
        }
    }

    fn read(
        &self,
        record: &mut CallRecord,
        tool: &ToolEntry,
        arguments: Arguments<'_>,
    ) -> Result<Box<dyn AnyRequest>, ToolError> {
        if !self.allows(&record.caller.principal, record.workspace_id, tool) {
            return Err(ToolError::NotAllowed { tool: tool.name, workspace: record.workspace_id });
        }
        let request = tool.parse(arguments)?;
        record.summary = request.summary();
        request.validate()?;
        Ok(request)
    }
}

/// A call that may run.
pub(crate) struct PreparedCall {
    tools: Tools,
    request: Box<dyn AnyRequest>,
    record: CallRecord,
    max_raw_bytes: Option<u64>,
}

impl PreparedCall {
    /// The output that the call can send while it runs.
    pub(crate) fn streaming(&self) -> Streaming {
        self.request.streaming()
    }

    /// Limits the bytes of a file in the answer.
    pub(crate) fn with_max_raw_bytes(self, max_raw_bytes: u64) -> Self {
        Self { max_raw_bytes: Some(max_raw_bytes), ..self }
    }

    /// Runs the tool. Dropping the future cancels the call.
    pub(crate) async fn run(self, output: Output) -> Result<ToolAnswer, ToolError> {
        let Self { tools, request, record, max_raw_bytes } = self;
        let (caller, id) = (&record.caller, record.workspace_id);
        let context = ToolContext { tools: &tools, caller, id, output, max_raw_bytes };
        let result = request.run(&context).await;
        drop(context);
        record.end(result.as_ref().err()).await;
        result
    }
}

/// What a tool gets to run with.
pub(crate) struct ToolContext<'a> {
    tools: &'a Tools,
    caller: &'a Caller,
    id: WorkspaceId,
    pub(super) output: Output,
    pub(super) max_raw_bytes: Option<u64>,
}

impl ToolContext<'_> {
    /// Refuses to write so many bytes on a host whose disk would be full then.
    pub(super) fn refuse_without_room_for(&self, bytes: u64) -> Result<(), ToolError> {
        Ok(self.tools.workspaces.disk_space.refuse_without_room_for(bytes)?)
    }

    pub(super) async fn large_file(&self) -> Result<OwnedSemaphorePermit, ToolError> {
        self.tools.large_file().await
    }

    /// Sends a call to the workspace's agent.
    pub(super) async fn start(&self, request: GuestRequest<'_>) -> Result<RunningCall, ToolError> {
        let running = self.tools.workspaces.calls.start(self.caller, self.id, request).await?;
        if let Output::Streamed(receiver) = &self.output {
            // A receiver that is gone drops the call.
            let _ = receiver.send(Piece::Started).await;
        }
        Ok(running)
    }

    /// Sends a call to the agent whose answer is all it gives.
    pub(super) async fn ask<T: DeserializeOwned>(&self, call: GuestCall) -> Result<T, ToolError> {
        self.ask_within(call, FILE_TOOL_TIME).await
    }

    pub(super) async fn ask_within<T: DeserializeOwned>(
        &self,
        call: GuestCall,
        limit: Duration,
    ) -> Result<T, ToolError> {
        self.ask_with_input(call, None, limit).await
    }

    pub(super) async fn write<T: DeserializeOwned>(
        &self,
        call: GuestCall,
        input: &[u8],
    ) -> Result<T, ToolError> {
        self.ask_with_input(call, Some(input), FILE_TOOL_TIME).await
    }

    async fn ask_with_input<T: DeserializeOwned>(
        &self,
        call: GuestCall,
        input: Option<&[u8]>,
        limit: Duration,
    ) -> Result<T, ToolError> {
        let request = GuestRequest { call, input, time_limit: TimeLimit::Total(limit) };
        let mut running = self.start(request).await?;
        Ok(running.answer(OutputLimit::NONE).await?.parse()?)
    }

    /// Sends the output of a call to its receiver until the answer comes.
    pub(super) async fn forward(
        &self,
        running: &mut RunningCall,
        limit: OutputLimit,
    ) -> Result<crate::workspace::GuestAnswer, ToolError> {
        loop {
            let event = match &self.output {
                Output::InAnswer => return Ok(running.answer(limit).await?),
                Output::Streamed(_) | Output::Shown(_) => running.next().await?,
            };
            match (&self.output, event) {
                (_, Event::Answer(json)) => return Ok(crate::workspace::GuestAnswer::of(json)),
                (Output::Shown(show), Event::Stdout(bytes) | Event::Stderr(bytes)) => show(&bytes),
                (Output::Streamed(receiver), event) => {
                    let piece = match event {
                        Event::Stderr(bytes) => Piece::Stderr(bytes),
                        Event::Stdout(bytes) | Event::Answer(bytes) => Piece::Stdout(bytes),
                    };
                    receiver.send(piece).await.map_err(|_| ToolError::ClientGone)?;
                }
                (Output::InAnswer, _) => {}
            }
        }
    }
}

/// The entry of a call in the audit log and in the metrics. A record that is dropped says that the call was cancelled.
struct CallRecord {
    audit: Audit,
    caller: Caller,
    workspace_id: WorkspaceId,
    tool: &'static str,
    at: DateTime<Utc>,
    begun: Instant,
    summary: Value,
    is_written: bool,
}

impl CallRecord {
    fn begin(audit: Audit, caller: Caller, workspace_id: WorkspaceId, tool: &'static str) -> Self {
        let (at, begun) = (Utc::now(), Instant::now());
        Self { audit, caller, workspace_id, tool, at, begun, summary: Value::Null, is_written: false }
    }

    /// Writes the entry. The caller gets its answer only after that.
    async fn end(mut self, failed: Option<&ToolError>) {
        let entry = self.entry(failed.map(code_of_tool));
        let audit = self.audit.clone();
        drop(self);
        audit.record(entry).await;
    }

    fn entry(&mut self, failed: Option<ErrorCode>) -> AuditEntry {
        self.is_written = true;
        let duration = self.begun.elapsed();
        let outcome = match failed {
            None => AuditOutcome::Success,
            Some(ErrorCode::Unauthorized | ErrorCode::Forbidden) => AuditOutcome::Denied,
            Some(_) => AuditOutcome::Failure,
        };
        metrics::histogram!("emergent_call_seconds", "action" => self.tool).record(duration.as_secs_f64());
        metrics::counter!("emergent_calls_total", "action" => self.tool, "outcome" => outcome.as_str())
            .increment(1);
        AuditEntry {
            at: self.at,
            actor_token_id: Some(self.caller.principal.token_id),
            actor_name: Some(self.caller.principal.name.clone()),
            workspace_id: Some(self.workspace_id),
            session_id: None,
            tool: self.tool.to_owned(),
            outcome,
            error_code: failed.map(|code| code.as_str().to_owned()),
            duration_ms: u64::try_from(duration.as_millis()).unwrap_or(u64::MAX),
            request: std::mem::take(&mut self.summary),
            request_id: self.caller.request_id.clone(),
        }
    }
}

impl Drop for CallRecord {
    fn drop(&mut self) {
        if self.is_written {
            return;
        }
        let entry = self.entry(Some(ErrorCode::Cancelled));
        if let Ok(runtime) = Handle::try_current() {
            let audit = self.audit.clone();
            runtime.spawn(async move { audit.record_soon(entry).await });
        }
    }
}
