//! One call, as its caller sees it.

use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use emergent_guest_protocol::{Credit, Frame, Kind, MAX_DATA_BYTES, data_cost};
use emergent_wire::{ErrorCode, ErrorDetail};
use serde::de::DeserializeOwned;
use tokio::sync::{Notify, mpsc};

use crate::channel::{Closed, Shared};
use crate::table::Incoming;

/// Credit is given back in pieces of this size, so that not every small output costs a frame.
const CREDIT_STEP: u32 = 32 * 1024;

/// Something that happened in a call.
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
    /// The guest says why.
    #[error(transparent)]
    Failed(ErrorDetail),
    /// The channel ended first. The call may have had effects.
    #[error("the connection to the sandbox was lost: {0}")]
    Lost(Closed),
    /// The guest's answer is not what it should be.
    #[error("the sandbox gave an answer that can't be read: {0}")]
    Garbled(String),
}

/// What the reader hands to a call.
pub(crate) struct Sink {
    pub(crate) events: mpsc::UnboundedSender<Incoming>,
    pub(crate) input: Arc<InputCredit>,
}

impl Clone for Sink {
    fn clone(&self) -> Self {
        Self { events: self.events.clone(), input: Arc::clone(&self.input) }
    }
}

/// What may still be sent to the guest for one call.
#[derive(Default)]
pub(crate) struct InputCredit {
    credit: Mutex<Credit>,
    granted: Notify,
}

impl InputCredit {
    /// The guest takes more. False when it grants more than allowed.
    pub(crate) fn grant(&self, amount: u32) -> bool {
        let granted = self.credit.lock().unwrap_or_else(PoisonError::into_inner).grant(amount).is_ok();
        self.granted.notify_one();
        granted
    }

    fn take(&self, wanted: usize) -> usize {
        let mut credit = self.credit.lock().unwrap_or_else(PoisonError::into_inner);
        let length = credit.sendable(wanted);
        if length > 0 {
            let _ = credit.spend(data_cost(length));
        }
        length
    }
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
}

impl Call {
    pub(crate) fn new(
        id: u32,
        shared: Arc<Shared>,
        events: mpsc::UnboundedReceiver<Incoming>,
        input: Arc<InputCredit>,
    ) -> Self {
        Self { id, shared, events, input, owed: 0, ended: false }
    }

    /// The next thing that happens. After an answer or an error there is nothing more.
    pub async fn next(&mut self) -> Result<Event, CallError> {
        match self.events.recv().await {
            Some(Incoming::Data(kind, bytes)) => {
                self.give_back(data_cost(bytes.len()));
                Ok(if kind == Kind::Stderr { Event::Stderr(bytes) } else { Event::Stdout(bytes) })
            }
            Some(Incoming::Result(answer)) => {
                self.ended = true;
                Ok(Event::Answer(answer))
            }
            Some(Incoming::Error(error)) => {
                self.ended = true;
                Err(CallError::Failed(error))
            }
            // The reader handles credit itself; the sender is dropped only with the channel.
            Some(Incoming::InputCredit(_)) | None => {
                self.ended = true;
                Err(CallError::Lost(self.shared.closed_reason()))
            }
        }
    }

    /// Lets the guest send as much as was consumed, in steps.
    fn give_back(&mut self, cost: u32) {
        self.owed += cost;
        if self.owed >= CREDIT_STEP && self.shared.table().grant(self.id, self.owed) {
            self.shared.queue(&Frame::credit(self.id, self.owed));
            self.owed = 0;
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

    /// The call's input, for one who writes it while another reads what comes back.
    pub fn input(&self) -> CallInput {
        CallInput { id: self.id, shared: Arc::clone(&self.shared), credit: Arc::clone(&self.input) }
    }
}

/// Where a call's input goes.
#[derive(Clone)]
pub struct CallInput {
    id: u32,
    shared: Arc<Shared>,
    credit: Arc<InputCredit>,
}

impl CallInput {
    /// Sends input, as fast as the guest takes it.
    pub async fn send(&self, mut bytes: &[u8]) -> Result<(), CallError> {
        while !bytes.is_empty() {
            let granted = self.credit.granted.notified();
            let length = self.credit.take(bytes.len().min(MAX_DATA_BYTES));
            if length > 0 {
                let frame = Frame::new(Kind::Input, self.id, &bytes[..length]);
                self.shared.send(&frame).await.map_err(CallError::Lost)?;
                bytes = &bytes[length..];
                continue;
            }
            tokio::select! {
                () = granted => {}
                () = self.shared.closed.cancelled() => return Err(CallError::Lost(self.shared.closed_reason())),
                // A call that ended early (disk full) takes no more input; its answer says why.
                () = self.shared.wait_for_end(self.id) => return Ok(()),
            }
        }
        Ok(())
    }

    /// No more input.
    pub async fn end(&self) -> Result<(), CallError> {
        self.shared.send(&Frame::new(Kind::InputEnd, self.id, [])).await.map_err(CallError::Lost)
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        if !self.ended && self.shared.table().abandon(self.id) {
            self.shared.queue(&Frame::new(Kind::Cancel, self.id, []));
        }
    }
}

fn parse<T: DeserializeOwned>(answer: &[u8]) -> Result<T, CallError> {
    serde_json::from_slice(answer).map_err(|error| CallError::Garbled(error.to_string()))
}

impl From<CallError> for ErrorDetail {
    fn from(error: CallError) -> Self {
        match error {
            CallError::Failed(detail) => detail,
            CallError::Lost(_) => ErrorDetail::new(
                ErrorCode::SandboxLost,
                format!("{error}; the call may have had effects: look before you repeat it"),
            ),
            CallError::Garbled(_) => ErrorDetail::new(ErrorCode::SandboxLost, error.to_string()),
        }
    }
}
