//! The one path of a tool call: authorise, parse, run, audit, measure.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
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
use tokio::sync::mpsc;
use tracing::Instrument as _;

use super::error::ToolError;
use super::large_files::{LargeFile, LargeFiles};
use super::table::{AnyRequest, Arguments, Streaming, ToolAnswer, ToolEntry};
use crate::audit::Audit;
use crate::caller::{Caller, Principal};
use crate::workspace::{GuestRequest, OutputLimit, RunningCall, TimeLimit, Workspaces};

/// The time limit of tools that only read or change files.
pub(super) const FILE_TOOL_TIMEOUT: Duration = Duration::from_secs(120);

/// The tools, and the parts of the server that their calls use.
#[derive(Clone)]
pub(crate) struct Tools {
    table: Arc<[Arc<ToolEntry>]>,
    workspaces: Arc<Workspaces>,
    audit: Audit,
    large_files: Arc<LargeFiles>,
}

/// A function that shows output. It does not block.
pub(crate) type ShowOutput = Box<dyn Fn(&[u8]) + Send + Sync>;

/// The destination of a call's output while the call runs.
pub(crate) enum Output {
    /// Only the answer.
    InAnswer,
    /// A receiver, which limits the speed. The answer has no output.
    Streamed(mpsc::Sender<Piece>),
    /// A function. The answer has the output, too.
    Shown(ShowOutput),
}

/// A piece of output for a receiver.
#[derive(Debug)]
pub(crate) enum Piece {
    /// The agent has the call. It is the first piece, also of a command without output.
    Started,
    Stdout(Bytes),
    Stderr(Bytes),
}

impl Tools {
    pub(crate) fn new(table: Vec<Arc<ToolEntry>>, workspaces: Arc<Workspaces>, audit: Audit) -> Self {
        Self { table: table.into(), workspaces, audit, large_files: Arc::default() }
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
            // No front accepts these tokens yet.
            TokenScope::Project { .. } | TokenScope::Session { .. } => false,
        }
    }

    /// Waits for a place to hold one more large file of this workspace in memory.
    pub(crate) async fn large_file(&self, id: WorkspaceId) -> Result<LargeFile, ToolError> {
        self.large_files.place(id).await
    }

    /// Authorises a call and parses its request. A call that is refused here is audited, too.
    pub(crate) async fn prepare(
        &self,
        caller: &Caller,
        id: WorkspaceId,
        tool: &ToolEntry,
        arguments: Arguments<'_>,
    ) -> Result<PreparedCall, ToolError> {
        let mut record = CallRecord::begin(self.audit.clone(), caller.clone(), id, tool.name);
        match self.authorise_and_parse(&mut record, tool, arguments) {
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

    fn authorise_and_parse(
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

/// A call that is authorised, parsed and valid.
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
        let context = ToolContext { tools: &tools, record: &record, output, max_raw_bytes };
        let result = request.run(&context).await;
        drop(context);
        record.end(result.as_ref().err()).await;
        result
    }
}

/// The context in which a tool runs.
pub(crate) struct ToolContext<'a> {
    tools: &'a Tools,
    record: &'a CallRecord,
    pub(super) output: Output,
    pub(super) max_raw_bytes: Option<u64>,
}

impl ToolContext<'_> {
    /// Fails if the host's disk would be full after so many more bytes.
    pub(super) fn refuse_without_room_for(&self, bytes: u64) -> Result<(), ToolError> {
        Ok(self.tools.workspaces.disk_space.refuse_without_room_for(bytes)?)
    }

    pub(super) async fn large_file(&self) -> Result<LargeFile, ToolError> {
        self.tools.large_file(self.record.workspace_id).await
    }

    /// Sends a call to the workspace's agent.
    pub(super) async fn start(&self, request: GuestRequest<'_>) -> Result<RunningCall, ToolError> {
        let CallRecord { caller, workspace_id, .. } = self.record;
        let running = self.tools.workspaces.calls.start(caller, *workspace_id, request).await?;
        if let Output::Streamed(receiver) = &self.output {
            self.record.start().await;
            // A receiver that is closed drops the call.
            let _ = receiver.send(Piece::Started).await;
        }
        Ok(running)
    }

    /// Sends a call without output to the agent and waits for the answer.
    pub(super) async fn request<T: DeserializeOwned>(&self, call: GuestCall) -> Result<T, ToolError> {
        self.request_within(call, FILE_TOOL_TIMEOUT).await
    }

    /// The same with a time limit of its own.
    pub(super) async fn request_within<T: DeserializeOwned>(
        &self,
        call: GuestCall,
        time_limit: Duration,
    ) -> Result<T, ToolError> {
        self.request_with_input(call, None, time_limit).await
    }

    /// The same with input after the call.
    pub(super) async fn write<T: DeserializeOwned>(
        &self,
        call: GuestCall,
        input: &[u8],
    ) -> Result<T, ToolError> {
        self.request_with_input(call, Some(input), FILE_TOOL_TIMEOUT).await
    }

    async fn request_with_input<T: DeserializeOwned>(
        &self,
        call: GuestCall,
        input: Option<&[u8]>,
        time_limit: Duration,
    ) -> Result<T, ToolError> {
        let request = GuestRequest { call, input, time_limit: TimeLimit::Total(time_limit) };
        let mut running = self.start(request).await?;
        Ok(running.answer(OutputLimit::NONE).await?.parse()?)
    }

    /// Passes the output of a call to its destination until the answer comes.
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
                (Output::Shown(show), Event::Stdout(bytes) | Event::Stderr(bytes)) => {
                    self.record.start().await;
                    show(&bytes);
                }
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

/// Records a call in the audit log and the metrics. A record that is dropped before its end records a cancelled call.
struct CallRecord {
    audit: Audit,
    caller: Caller,
    workspace_id: WorkspaceId,
    tool: &'static str,
    at: DateTime<Utc>,
    begun: Instant,
    summary: Value,
    is_started: AtomicBool,
    is_written: bool,
}

impl CallRecord {
    fn begin(audit: Audit, caller: Caller, workspace_id: WorkspaceId, tool: &'static str) -> Self {
        let (at, begun) = (Utc::now(), Instant::now());
        let (is_started, is_written) = (AtomicBool::new(false), false);
        Self { audit, caller, workspace_id, tool, at, begun, summary: Value::Null, is_started, is_written }
    }

    /// Writes the entry `started`, unless it is written. Output is sent to the client only after that.
    async fn start(&self) {
        if !self.is_started.swap(true, Ordering::Relaxed) {
            let entry = self.entry(AuditOutcome::Started, None, self.begun.elapsed(), self.summary.clone());
            self.audit.record(entry).await;
        }
    }

    /// Writes the entry. Calls are answered only after that.
    async fn end(mut self, failed: Option<&ToolError>) {
        let entry = self.end_entry(failed.map(ToolError::code));
        let audit = self.audit.clone();
        drop(self);
        audit.record(entry).await;
    }

    /// Measures the call and makes its last entry.
    fn end_entry(&mut self, failed: Option<ErrorCode>) -> AuditEntry {
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
        let summary = std::mem::take(&mut self.summary);
        self.entry(outcome, failed, duration, summary)
    }

    fn entry(
        &self,
        outcome: AuditOutcome,
        failed: Option<ErrorCode>,
        duration: Duration,
        request: Value,
    ) -> AuditEntry {
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
            request,
            request_id: self.caller.request_id.clone(),
        }
    }
}

impl Drop for CallRecord {
    fn drop(&mut self) {
        if self.is_written {
            return;
        }
        let entry = self.end_entry(Some(ErrorCode::Cancelled));
        if let Ok(runtime) = Handle::try_current() {
            let audit = self.audit.clone();
            let record = async move { audit.record_soon(entry).await };
            runtime.spawn(record.in_current_span());
        }
    }
}
