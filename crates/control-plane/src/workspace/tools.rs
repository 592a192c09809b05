//! Tool calls: from a request to the guest agent and back.

use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use bytes::Bytes;
use emergent_guest_client::{Call, Event};
use emergent_guest_protocol::{AttachCall, BashCall, GuestCall, OperationCall, WriteCall};
use emergent_wire::git::{GitAnswer, GitRequest};
use emergent_wire::tools::{
    BashAnswer, BashRequest, ContentEncoding, EditAnswer, EditRequest, GlobAnswer, GlobRequest, GrepAnswer,
    GrepRequest, MAX_FILE_BYTES, MAX_STREAM_BYTES, MAX_TIMEOUT_MS, OperationAnswer, ReadAnswer, ReadRequest,
    TERMINATE_GRACE_MS, WriteAnswer, WriteRequest,
};
use emergent_wire::workspace::ProviderName;
use emergent_wire::{ErrorCode, ErrorDetail, OperationId, WorkspaceId};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::Workspaces;
use super::live::Busy;
use crate::caller::Caller;

/// For tools that only look at or change files.
const FILE_TOOL_TIME: Duration = Duration::from_secs(120);
/// What a call may take beyond the command's own time: to be ended, and to be answered.
const MARGIN: Duration = Duration::from_millis(TERMINATE_GRACE_MS + 15_000);
/// What an answer may hold besides the two streams at their limit: the note between head and tail.
const OUTPUT_BYTES: usize = 3 * MAX_STREAM_BYTES;

/// A call in progress.
struct ToolCall {
    call: Call,
    to: Called,
    busy: Busy,
}

/// Where a call went, to say what became of it when its channel breaks.
#[derive(Clone, Copy)]
pub(super) struct Called {
    pub(super) id: WorkspaceId,
    pub(super) provider: ProviderName,
}

/// Output as it comes, for as long as the caller listens.
pub(crate) struct OutputStream {
    call: Call,
    to: Called,
    workspaces: Arc<Workspaces>,
    busy: Busy,
    of: StreamOf,
}

/// Whose output a stream is.
#[derive(Clone, Copy)]
enum StreamOf {
    /// A command of this call, which ends by then.
    Command { deadline: tokio::time::Instant, kills_before: u64 },
    /// A command in the background.
    Operation,
}

/// A file's bytes as they come.
pub(crate) struct FileStream {
    /// What comes next: the first piece has been read, so that an error is known before the answer starts.
    first: Option<Bytes>,
    call: Call,
    _busy: Busy,
    done: bool,
}

impl Workspaces {
    /// Starts a call, and notes the use if it is one.
    async fn start(
        self: &Arc<Self>,
        caller: &Caller,
        id: WorkspaceId,
        message: &GuestCall,
    ) -> Result<ToolCall, ErrorDetail> {
        let (live, reached, mut busy) = self.reach(id).await?;
        if caller.counts_as_use
            && let Some(used) = live.note_use(self.clock.now())
        {
            let workspaces = Arc::clone(self);
            tokio::spawn(async move { workspaces.write_use(id, Some(used)).await });
        }
        let to = Called { id, provider: reached.provider };
        let call = reached.channel.start(message).await.map_err(ErrorDetail::from);
        let call = match call {
            // The channel broke unnoticed: the call was not sent, so it can be sent again.
            Err(error) if error.code == ErrorCode::SandboxLost => {
                let (_, reached, again) = self.reach(id).await?;
                busy = again;
                reached.channel.start(message).await.map_err(ErrorDetail::from)?
            }
            call => call?,
        };
        Ok(ToolCall { call, to, busy })
    }

    /// Waits for an answer, within a time.
    async fn within<T>(
        &self,
        to: Called,
        limit: Duration,
        answer: impl Future<Output = Result<T, emergent_guest_client::CallError>>,
    ) -> Result<T, ErrorDetail> {
        match tokio::time::timeout(limit, answer).await {
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(error)) => Err(self.explain_loss(to.id, to.provider, error.into()).await),
            Err(_) => {
                self.give_up_if_silent(to.id).await;
                let message = format!(
                    "the sandbox did not answer within {} s; the call was cancelled",
                    limit.as_secs()
                );
                Err(ErrorDetail::new(ErrorCode::DeadlineExceeded, message))
            }
        }
    }

    /// The agent ends commands in time by itself. One that did not, and does not say how it is doing either, has stopped: its
    /// channel is closed, and the next call starts the sandbox again.
    async fn give_up_if_silent(&self, id: WorkspaceId) {
        let Some(reached) = self.live(id).reached() else {
            return;
        };
        if super::usage::ask(&reached.channel).await.is_none() {
            tracing::warn!(workspace = %id, "the agent does not answer: its channel is closed");
            reached.channel.close();
        }
    }

    /// A call whose answer is all there is.
    async fn ask<T: DeserializeOwned>(
        self: &Arc<Self>,
        caller: &Caller,
        id: WorkspaceId,
        message: &GuestCall,
        limit: Duration,
    ) -> Result<T, ErrorDetail> {
        let ToolCall { call, to, busy: _busy } = self.start(caller, id, message).await?;
        self.within(to, limit, call.answer()).await
    }

    /// Runs a command and waits for its end.
    pub(crate) async fn bash(
        self: &Arc<Self>,
        caller: &Caller,
        id: WorkspaceId,
        request: BashRequest,
    ) -> Result<BashAnswer, ErrorDetail> {
        request.validate()?;
        let limit = time_of(&request);
        let message =
            BashCall { operation_id: OperationId::generate(), request, stream: false, collect: false };
        let ToolCall { call, to, busy } = self.start(caller, id, &GuestCall::Bash(message)).await?;
        let kills_before = self.oom_kills(to);
        let answer = call.answer_with_output::<BashAnswer>(OUTPUT_BYTES);
        let (mut answer, stdout, stderr) = self.within(to, limit, answer).await?;
        self.judge_command(to, busy.live(), kills_before, &mut answer);
        answer.stdout = text(stdout);
        answer.stderr = text(stderr);
        Ok(answer)
    }

    /// Runs a command and hands its output on as it comes.
    pub(crate) async fn bash_stream(
        self: &Arc<Self>,
        caller: &Caller,
        id: WorkspaceId,
        request: BashRequest,
    ) -> Result<OutputStream, ErrorDetail> {
        self.start_stream(caller, id, request, false).await
    }

    /// Runs a command and waits for its end; its output is shown as it comes, and is in the answer all the same.
    pub(crate) async fn bash_watched(
        self: &Arc<Self>,
        caller: &Caller,
        id: WorkspaceId,
        request: BashRequest,
        show: impl Fn(&[u8]) + Send,
    ) -> Result<BashAnswer, ErrorDetail> {
        let mut output = self.start_stream(caller, id, request, true).await?;
        loop {
            match output.next().await? {
                Event::Stdout(bytes) | Event::Stderr(bytes) => show(&bytes),
                Event::Answer(answer) => {
                    return serde_json::from_slice(&answer)
                        .map_err(|error| ErrorDetail::new(ErrorCode::SandboxLost, error.to_string()));
                }
            }
        }
    }

    async fn start_stream(
        self: &Arc<Self>,
        caller: &Caller,
        id: WorkspaceId,
        request: BashRequest,
        collect: bool,
    ) -> Result<OutputStream, ErrorDetail> {
        request.validate()?;
        let deadline = tokio::time::Instant::now() + time_of(&request);
        let message = BashCall { operation_id: OperationId::generate(), request, stream: true, collect };
        let ToolCall { call, to, busy } = self.start(caller, id, &GuestCall::Bash(message)).await?;
        let of = StreamOf::Command { deadline, kills_before: self.oom_kills(to) };
        Ok(OutputStream { call, to, workspaces: Arc::clone(self), busy, of })
    }

    /// Starts a command in the background.
    pub(crate) async fn bash_background(
        self: &Arc<Self>,
        caller: &Caller,
        id: WorkspaceId,
        request: BashRequest,
    ) -> Result<OperationAnswer, ErrorDetail> {
        request.validate()?;
        let message =
            BashCall { operation_id: OperationId::generate(), request, stream: false, collect: false };
        let ToolCall { call, to, busy } = self.start(caller, id, &GuestCall::Bash(message)).await?;
        let kills_before = self.oom_kills(to);
        let answer: OperationAnswer = self.within(to, FILE_TOOL_TIME, call.answer()).await?;
        busy.live().remember_operation(answer.operation_id, kills_before);
        Ok(answer)
    }

    /// How a command in the background stands, and its output from an offset on.
    pub(crate) async fn operation(
        self: &Arc<Self>,
        caller: &Caller,
        id: WorkspaceId,
        operation_id: OperationId,
        offset: u64,
    ) -> Result<OperationAnswer, ErrorDetail> {
        let message = GuestCall::Attach(AttachCall { operation_id, offset, follow: false });
        let ToolCall { call, to, busy } = self.start(caller, id, &message).await?;
        let answer = call.answer_with_output::<OperationAnswer>(OUTPUT_BYTES);
        let (mut answer, stdout, stderr) = self.within(to, FILE_TOOL_TIME, answer).await?;
        self.judge_operation(to, busy.live(), &mut answer);
        answer.stdout = text(stdout);
        answer.stderr = text(stderr);
        Ok(answer)
    }

    /// Follows a command in the background until it ends.
    pub(crate) async fn operation_stream(
        self: &Arc<Self>,
        caller: &Caller,
        id: WorkspaceId,
        operation_id: OperationId,
        offset: u64,
    ) -> Result<OutputStream, ErrorDetail> {
        let message = GuestCall::Attach(AttachCall { operation_id, offset, follow: true });
        let ToolCall { call, to, busy } = self.start(caller, id, &message).await?;
        Ok(OutputStream { call, to, workspaces: Arc::clone(self), busy, of: StreamOf::Operation })
    }

    /// Ends a command in the background.
    pub(crate) async fn kill_operation(
        self: &Arc<Self>,
        caller: &Caller,
        id: WorkspaceId,
        operation_id: OperationId,
    ) -> Result<OperationAnswer, ErrorDetail> {
        self.ask(caller, id, &GuestCall::KillOperation(OperationCall { operation_id }), MARGIN * 2).await
    }

    /// Reads numbered lines or a directory.
    pub(crate) async fn read(
        self: &Arc<Self>,
        caller: &Caller,
        id: WorkspaceId,
        request: ReadRequest,
    ) -> Result<ReadAnswer, ErrorDetail> {
        request.validate()?;
        self.ask(caller, id, &GuestCall::Read(request), FILE_TOOL_TIME).await
    }

    /// Opens a file for its exact bytes.
    pub(crate) async fn read_raw(
        self: &Arc<Self>,
        caller: &Caller,
        id: WorkspaceId,
        request: ReadRequest,
    ) -> Result<FileStream, ErrorDetail> {
        request.validate()?;
        let ToolCall { mut call, to, busy } = self.start(caller, id, &GuestCall::Read(request)).await?;
        let (first, done) = match self.within(to, FILE_TOOL_TIME, call.next()).await? {
            Event::Stdout(bytes) | Event::Stderr(bytes) => (Some(bytes), false),
            Event::Answer(_) => (None, true),
        };
        Ok(FileStream { first, call, _busy: busy, done })
    }

    /// Writes a file.
    pub(crate) async fn write(
        self: &Arc<Self>,
        caller: &Caller,
        id: WorkspaceId,
        request: WriteRequest,
    ) -> Result<WriteAnswer, ErrorDetail> {
        request.validate()?;
        let content = decode(request.content, request.encoding)?;
        self.refuse_without_room_for(content.len() as u64)?;
        let message = GuestCall::Write(WriteCall { file_path: request.file_path });
        let ToolCall { call, to, busy: _busy } = self.start(caller, id, &message).await?;
        let written = async {
            call.send_input(&content).await?;
            call.end_input().await?;
            call.answer().await
        };
        self.within(to, FILE_TOOL_TIME, written).await
    }

    /// Edits a file.
    pub(crate) async fn edit(
        self: &Arc<Self>,
        caller: &Caller,
        id: WorkspaceId,
        request: EditRequest,
    ) -> Result<EditAnswer, ErrorDetail> {
        request.validate()?;
        self.refuse_if_disk_is_full()?;
        self.ask(caller, id, &GuestCall::Edit(request), FILE_TOOL_TIME).await
    }

    /// Finds files by name.
    pub(crate) async fn glob(
        self: &Arc<Self>,
        caller: &Caller,
        id: WorkspaceId,
        request: GlobRequest,
    ) -> Result<GlobAnswer, ErrorDetail> {
        request.validate()?;
        self.ask(caller, id, &GuestCall::Glob(request), FILE_TOOL_TIME).await
    }

    /// Searches file contents.
    pub(crate) async fn grep(
        self: &Arc<Self>,
        caller: &Caller,
        id: WorkspaceId,
        request: GrepRequest,
    ) -> Result<GrepAnswer, ErrorDetail> {
        request.validate()?;
        self.ask(caller, id, &GuestCall::Grep(request), FILE_TOOL_TIME).await
    }

    /// Runs git.
    pub(crate) async fn git(
        self: &Arc<Self>,
        caller: &Caller,
        id: WorkspaceId,
        request: GitRequest,
    ) -> Result<GitAnswer, ErrorDetail> {
        request.validate()?;
        let limit = Duration::from_millis(MAX_TIMEOUT_MS) + MARGIN;
        self.ask(caller, id, &GuestCall::Git(request), limit).await
    }
}

fn time_of(request: &BashRequest) -> Duration {
    Duration::from_millis(request.effective_timeout_ms().unwrap_or(MAX_TIMEOUT_MS)) + MARGIN
}

/// Output as text; what is not UTF-8 is shown with replacement characters.
fn text(bytes: Vec<u8>) -> String {
    String::from_utf8(bytes).unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned())
}

fn decode(content: String, encoding: ContentEncoding) -> Result<Vec<u8>, ErrorDetail> {
    let bytes = match encoding {
        ContentEncoding::Utf8 => content.into_bytes(),
        ContentEncoding::Base64 => {
            base64::engine::general_purpose::STANDARD.decode(content).map_err(|error| {
                ErrorDetail::new(ErrorCode::BadRequest, format!("content is not base64: {error}"))
            })?
        }
    };
    if bytes.len() as u64 > MAX_FILE_BYTES {
        let message = format!("content has {} bytes: at most {MAX_FILE_BYTES} can be written", bytes.len());
        return Err(ErrorDetail::new(ErrorCode::TooLarge, message));
    }
    Ok(bytes)
}

impl OutputStream {
    /// The next piece, or the answer.
    pub(crate) async fn next(&mut self) -> Result<Event, ErrorDetail> {
        let next = match self.of {
            StreamOf::Command { deadline, .. } => tokio::time::timeout_at(deadline, self.call.next()).await,
            StreamOf::Operation => Ok(self.call.next().await),
        };
        match next {
            Ok(Ok(Event::Answer(answer))) => Ok(Event::Answer(self.judged(answer))),
            Ok(Ok(event)) => Ok(event),
            Ok(Err(error)) => {
                Err(self.workspaces.explain_loss(self.to.id, self.to.provider, error.into()).await)
            }
            Err(_) => {
                Err(ErrorDetail::new(ErrorCode::DeadlineExceeded, "the sandbox did not answer in time"))
            }
        }
    }

    /// The answer with what only the host knows.
    fn judged(&self, answer: Bytes) -> Bytes {
        match self.of {
            StreamOf::Command { kills_before, .. } => {
                let live = self.busy.live();
                change(answer, |answer| self.workspaces.judge_command(self.to, live, kills_before, answer))
            }
            StreamOf::Operation => {
                change(answer, |answer| self.workspaces.judge_operation(self.to, self.busy.live(), answer))
            }
        }
    }
}

/// Changes an answer that is to be handed on. One that is not what it should be is left to the reader.
fn change<T: Serialize + DeserializeOwned>(answer: Bytes, with: impl FnOnce(&mut T)) -> Bytes {
    let Ok(mut parsed) = serde_json::from_slice(&answer) else { return answer };
    with(&mut parsed);
    serde_json::to_vec(&parsed).map_or(answer, Bytes::from)
}

impl FileStream {
    /// The next piece; none at the end of the file.
    pub(crate) async fn next(&mut self) -> Result<Option<Bytes>, ErrorDetail> {
        if let Some(first) = self.first.take() {
            return Ok(Some(first));
        }
        if self.done {
            return Ok(None);
        }
        match tokio::time::timeout(FILE_TOOL_TIME, self.call.next()).await {
            Ok(Ok(Event::Stdout(bytes) | Event::Stderr(bytes))) => Ok(Some(bytes)),
            Ok(Ok(Event::Answer(_))) => {
                self.done = true;
                Ok(None)
            }
            Ok(Err(error)) => Err(error.into()),
            Err(_) => {
                Err(ErrorDetail::new(ErrorCode::DeadlineExceeded, "the sandbox did not answer in time"))
            }
        }
    }

    /// All of it.
    pub(crate) async fn collect(mut self) -> Result<Vec<u8>, ErrorDetail> {
        let mut all = Vec::new();
        while let Some(bytes) = self.next().await? {
            if (all.len() + bytes.len()) as u64 > MAX_FILE_BYTES {
                return Err(ErrorDetail::new(ErrorCode::TooLarge, "the file is larger than 64 MiB"));
            }
            all.extend_from_slice(&bytes);
        }
        Ok(all)
    }
}
