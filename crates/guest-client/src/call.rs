//! One call, as its caller sees it.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use emergent_guest_protocol::{AgentTooOld, Frame, Kind, data_cost};
use emergent_wire::{ErrorCode, ErrorDetail};
use serde::de::DeserializeOwned;
use tokio::sync::{OwnedSemaphorePermit, mpsc};
use tracing::Span;

use crate::channel::{Closed, Shared};
use crate::input::{CallInput, InputCredit, InputWriter};
use crate::table::Incoming;

/// Credit is given back in steps of this size, so that small outputs do not cost a frame each.
const CREDIT_STEP: u32 = 32 * 1024;

/// The longest message of the JSON parser.
const REASON_CHARS: usize = 200;

/// An event of a call.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// Bytes of the first output stream.
    Stdout(Bytes),
    /// Bytes of the second output stream.
    Stderr(Bytes),
    /// The answer, as JSON. Nothing comes after it.
    Answer(Bytes),
}

/// Why a call has no answer.
#[derive(Clone, Debug, thiserror::Error)]
pub enum CallError {
    /// The guest answered with an error.
    #[error(transparent)]
    Failed(ErrorDetail),
    /// The guest's agent does not know the call. It was not sent.
    #[error(transparent)]
    AgentTooOld(#[from] AgentTooOld),
    /// The channel ended first. The call may have had effects.
    #[error("the connection to the sandbox was lost: {0}")]
    Lost(Closed),
    /// The guest's answer is invalid.
    #[error("the sandbox gave an answer that can't be read: {0}")]
    Garbled(String),
}

/// The caller's end of a call, as the channel's reader sees it.
#[derive(Clone)]
pub(crate) struct Sink {
    pub(crate) events: mpsc::UnboundedSender<Incoming>,
    pub(crate) input: Arc<InputCredit>,
    /// The place of an ACCEPT call among those of the channel.
    pub(crate) _permit: Option<Arc<OwnedSemaphorePermit>>,
}

/// A call in progress. Dropping it cancels it.
pub struct Call {
    id: u32,
    shared: Arc<Shared>,
    events: mpsc::UnboundedReceiver<Incoming>,
    input: Arc<InputCredit>,
    /// Credit that was consumed and not yet given back.
    owed: u32,
    ended: bool,
    /// Open until the answer. A call that the host makes by itself (ACCEPT) has none.
    span: Span,
}

impl Call {
    pub(crate) fn new(
        id: u32,
        shared: Arc<Shared>,
        events: mpsc::UnboundedReceiver<Incoming>,
        input: Arc<InputCredit>,
    ) -> Self {
        Self { id, shared, events, input, owed: 0, ended: false, span: Span::none() }
    }

    /// The call, with a span that ends with it.
    pub(crate) fn within(mut self, span: Span) -> Self {
        self.span = span;
        self
    }

    pub(crate) fn id(&self) -> u32 {
        self.id
    }

    /// The next event. After an answer or an error there is none.
    pub async fn next(&mut self) -> Result<Event, CallError> {
        loop {
            return Ok(match poll_fn(|context| self.poll_incoming(context)).await? {
                Incoming::Data(Kind::Stderr, bytes) => Event::Stderr(bytes),
                Incoming::Data(_, bytes) => Event::Stdout(bytes),
                Incoming::Result(answer) => Event::Answer(answer),
                _ => continue,
            });
        }
    }

    /// The next event as the channel's reader delivered it.
    pub(crate) fn poll_incoming(&mut self, context: &mut Context<'_>) -> Poll<Result<Incoming, CallError>> {
        Poll::Ready(match ready!(self.events.poll_recv(context)) {
            Some(Incoming::Error(error)) => {
                let error = CallError::Failed(error);
                self.end(Some(&error));
                Err(error)
            }
            Some(event) => {
                match &event {
                    Incoming::Data(_, bytes) => self.give_back(data_cost(bytes.len())),
                    Incoming::Result(_) => self.end(None),
                    _ => {}
                }
                Ok(event)
            }
            // The sender is dropped after the last frame, or with the channel.
            None => {
                let error = CallError::Lost(self.shared.closed_reason());
                self.end(Some(&error));
                Err(error)
            }
        })
    }

    fn end(&mut self, error: Option<&CallError>) {
        self.ended = true;
        let span = std::mem::replace(&mut self.span, Span::none());
        if let Some(error) = error {
            error.record_in(&span);
        }
    }

    /// Gives consumed credit back to the guest, in steps.
    fn give_back(&mut self, cost: u32) {
        self.owed += cost;
        if self.owed >= CREDIT_STEP {
            self.shared.give_back(self.id, std::mem::take(&mut self.owed));
        }
    }

    /// Waits for the answer of a call without output.
    pub async fn answer<T: DeserializeOwned>(mut self) -> Result<T, CallError> {
        loop {
            if let Event::Answer(answer) = self.next().await? {
                return parse(&answer);
            }
        }
    }

    /// Waits for the answer and collects the output, at most `most` bytes of each stream.
    pub async fn answer_with_output<T: DeserializeOwned>(
        mut self,
        most: usize,
    ) -> Result<(T, Vec<u8>, Vec<u8>), CallError> {
        let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
        loop {
            let (buffer, bytes) = match self.next().await? {
                Event::Stdout(bytes) => (&mut stdout, bytes),
                Event::Stderr(bytes) => (&mut stderr, bytes),
                Event::Answer(answer) => return Ok((parse(&answer)?, stdout, stderr)),
            };
            if buffer.len() + bytes.len() > most {
                return Err(CallError::Garbled(format!("more than {most} bytes of output")));
            }
            buffer.extend_from_slice(&bytes);
        }
    }

    /// Sends input, as fast as the guest takes it.
    pub async fn send_input(&self, bytes: &[u8]) -> Result<(), CallError> {
        self.input().send(bytes).await
    }

    /// No more input.
    pub async fn end_input(&self) -> Result<(), CallError> {
        self.input().end().await
    }

    /// The call's input, for a task that writes it while another reads the events.
    pub fn input(&self) -> CallInput {
        CallInput::new(self.id, Arc::clone(&self.shared), Arc::clone(&self.input))
    }

    pub(crate) fn input_writer(&self) -> InputWriter {
        InputWriter::new(self.id, Arc::clone(&self.shared), Arc::clone(&self.input))
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        if !self.ended && self.shared.table.lock().abandon(self.id) {
            self.shared.queue(Frame::new(Kind::Cancel, self.id, []));
        }
        self.input.end();
    }
}

pub(crate) fn parse<T: DeserializeOwned>(answer: &[u8]) -> Result<T, CallError> {
    parse_json(answer).map_err(CallError::Garbled)
}

/// Parses JSON of the guest. The parser's message can quote a string of it, so it is cut.
pub(crate) fn parse_json<T: DeserializeOwned>(json: &[u8]) -> Result<T, String> {
    serde_json::from_slice(json).map_err(|error| error.to_string().chars().take(REASON_CHARS).collect())
}

impl CallError {
    /// The code that callers of the server get.
    pub fn code(&self) -> ErrorCode {
        match self {
            Self::Failed(detail) => detail.code,
            Self::AgentTooOld(_) => ErrorCode::WrongState,
            Self::Lost(_) | Self::Garbled(_) => ErrorCode::SandboxLost,
        }
    }

    /// Notes the code in the span of the call. The message is left out, because the guest can write anything into it.
    pub(crate) fn record_in(&self, span: &Span) {
        span.record("error_code", self.code().as_str());
    }
}
