//! The input of a call: credit, and the frames that spend it.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll, Waker, ready};

use emergent_guest_protocol::{Credit, Frame, Kind, MAX_DATA_BYTES, data_cost};
use parking_lot::Mutex;
use tokio_util::sync::PollSemaphore;

use crate::call::CallError;
use crate::channel::{Closed, Shared};

/// The credit for a call's input. The channel's reader grants it, writers take it.
#[derive(Default)]
pub(crate) struct InputCredit {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    credit: Credit,
    /// The call has had its last frame, or its caller has dropped it.
    is_over: bool,
    waiting: Vec<Waker>,
}

impl InputCredit {
    /// Adds a grant of the guest. False when the guest grants more than the protocol allows.
    pub(crate) fn grant(&self, amount: u32) -> bool {
        let mut state = self.state.lock();
        let granted = state.credit.grant(amount).is_ok();
        state.waiting.drain(..).for_each(Waker::wake);
        granted
    }

    /// The call takes no more input. Writers that wait for credit return.
    pub(crate) fn end(&self) {
        let mut state = self.state.lock();
        state.is_over = true;
        state.waiting.drain(..).for_each(Waker::wake);
    }

    /// Spends credit for one frame of at most `wanted` bytes and returns the length it may have. `None`: the call takes no
    /// more input.
    fn poll_take(&self, context: &Context<'_>, wanted: usize) -> Poll<Option<usize>> {
        let mut state = self.state.lock();
        if state.is_over {
            return Poll::Ready(None);
        }
        let length = state.credit.sendable(wanted);
        if length > 0 {
            let _ = state.credit.spend(data_cost(length));
            return Poll::Ready(Some(length));
        }
        if !state.waiting.iter().any(|waker| waker.will_wake(context.waker())) {
            state.waiting.push(context.waker().clone());
        }
        Poll::Pending
    }

    /// Returns credit that was taken and not used.
    fn refund(&self, amount: u32) {
        let mut state = self.state.lock();
        // It was spent from this credit, so returning it can't exceed the limit.
        let _ = state.credit.grant(amount);
        state.waiting.drain(..).for_each(Waker::wake);
    }
}

/// Why input was not sent.
pub(crate) enum InputError {
    /// The call takes no more input: it has ended, or its caller has dropped it.
    Over,
    /// The channel has ended.
    Lost(Closed),
}

/// Writes a call's input.
pub(crate) struct InputWriter {
    id: u32,
    shared: Arc<Shared>,
    credit: Arc<InputCredit>,
    places: PollSemaphore,
    /// The length of the next frame, once its credit is taken.
    reserved: usize,
}

impl InputWriter {
    pub(crate) fn new(id: u32, shared: Arc<Shared>, credit: Arc<InputCredit>) -> Self {
        let places = PollSemaphore::new(shared.places());
        Self { id, shared, credit, places, reserved: 0 }
    }

    /// Sends one frame from the front of `bytes`, which must not be empty, and returns its length.
    pub(crate) fn poll_send(
        &mut self,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<Result<usize, InputError>> {
        // Credit first: a writer without credit must not hold a place in the queue of the whole channel.
        if self.reserved == 0 {
            match ready!(self.credit.poll_take(context, bytes.len().min(MAX_DATA_BYTES))) {
                Some(length) => self.reserved = length,
                None => return Poll::Ready(Err(InputError::Over)),
            }
        }
        let Some(place) = ready!(self.places.poll_acquire(context)) else {
            return Poll::Ready(Err(InputError::Lost(self.shared.closed_reason())));
        };
        let length = self.reserved.min(bytes.len());
        if length < self.reserved {
            self.credit.refund(data_cost(self.reserved) - data_cost(length));
        }
        self.reserved = 0;
        self.shared.put(Frame::new(Kind::Input, self.id, &bytes[..length]), place);
        Poll::Ready(Ok(length))
    }

    /// Sends INPUT_END.
    pub(crate) fn poll_end(&mut self, context: &mut Context<'_>) -> Poll<Result<(), InputError>> {
        let Some(place) = ready!(self.places.poll_acquire(context)) else {
            return Poll::Ready(Err(InputError::Lost(self.shared.closed_reason())));
        };
        self.shared.put(Frame::new(Kind::InputEnd, self.id, []), place);
        Poll::Ready(Ok(()))
    }
}

impl Drop for InputWriter {
    fn drop(&mut self) {
        if self.reserved > 0 {
            self.credit.refund(data_cost(self.reserved));
        }
    }
}

/// The input of a call. It can be written while another task reads the call's events.
#[derive(Clone)]
pub struct CallInput {
    id: u32,
    shared: Arc<Shared>,
    credit: Arc<InputCredit>,
}

impl CallInput {
    pub(crate) fn new(id: u32, shared: Arc<Shared>, credit: Arc<InputCredit>) -> Self {
        Self { id, shared, credit }
    }

    fn writer(&self) -> InputWriter {
        InputWriter::new(self.id, Arc::clone(&self.shared), Arc::clone(&self.credit))
    }

    /// Sends input as the guest grants credit. Returns early, without an error, when the call has ended: its answer gives
    /// the reason (a full disk, for example).
    pub async fn send(&self, mut bytes: &[u8]) -> Result<(), CallError> {
        let mut writer = self.writer();
        while !bytes.is_empty() {
            match poll_fn(|context| writer.poll_send(context, bytes)).await {
                Ok(length) => bytes = &bytes[length..],
                Err(InputError::Over) => return self.shared.check_open().map_err(CallError::Lost),
                Err(InputError::Lost(reason)) => return Err(CallError::Lost(reason)),
            }
        }
        Ok(())
    }

    /// Ends the input.
    pub async fn end(&self) -> Result<(), CallError> {
        let mut writer = self.writer();
        match poll_fn(|context| writer.poll_end(context)).await {
            Err(InputError::Lost(reason)) => Err(CallError::Lost(reason)),
            _ => Ok(()),
        }
    }
}
