//! One call in progress: its input, its credit, and whether it was cancelled.
//!
//! The connection's reader thread feeds it; the thread that runs the tool takes from it. The reader never
//! waits for the tool: what it may queue is bounded by the credit that the tool granted.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError, Weak};

use emergent_guest_protocol::{Credit, Frame, Kind, MAX_DATA_BYTES, data_cost};
use emergent_wire::{ErrorCode, ErrorDetail};

use crate::connection::Connection;
use crate::wake::Wake;

/// Credit is given back in pieces of this size, so that not every small input costs a frame.
const CREDIT_STEP: u32 = 32 * 1024;

/// A call in progress.
pub(crate) struct Call {
    pub(crate) id: u32,
    connection: Weak<Connection>,
    /// Set when the host cancelled the call or is gone.
    pub(crate) cancelled: AtomicBool,
    state: Mutex<State>,
    changed: Condvar,
    wake: OnceLock<Arc<Wake>>,
}

#[derive(Default)]
struct State {
    input: VecDeque<Vec<u8>>,
    input_ended: bool,
    /// What the host may still send.
    input_credit: Credit,
    /// Consumed, and not yet given back.
    owed_credit: u32,
    /// What we may still send.
    output_credit: Credit,
}

/// The host broke flow control.
pub(crate) struct Violation;

impl Call {
    pub(crate) fn new(id: u32, connection: &Arc<Connection>) -> Self {
        Self {
            id,
            connection: Arc::downgrade(connection),
            cancelled: AtomicBool::new(false),
            state: Mutex::default(),
            changed: Condvar::new(),
            wake: OnceLock::new(),
        }
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The wake-up that is set when the call is cancelled or gets credit.
    pub(crate) fn wake(&self) -> std::io::Result<Arc<Wake>> {
        if let Some(wake) = self.wake.get() {
            return Ok(Arc::clone(wake));
        }
        let wake = Arc::new(Wake::new()?);
        Ok(Arc::clone(self.wake.get_or_init(|| wake)))
    }

    fn notify(&self) {
        self.changed.notify_all();
        if let Some(wake) = self.wake.get() {
            wake.set();
        }
    }

    /// Called by the reader thread.
    pub(crate) fn cancel(&self) {
        self.cancelled.store(true, Ordering::SeqCst);
        // Taking the lock orders this after a waiter's check of the flag.
        drop(self.state());
        self.notify();
    }

    pub(crate) fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::SeqCst)
    }

    /// Called by the reader thread.
    pub(crate) fn push_input(&self, bytes: Vec<u8>) -> Result<(), Violation> {
        let mut state = self.state();
        if state.input_ended || state.input_credit.spend(data_cost(bytes.len())).is_err() {
            return Err(Violation);
        }
        state.input.push_back(bytes);
        drop(state);
        self.changed.notify_all();
        Ok(())
    }

    /// Called by the reader thread.
    pub(crate) fn end_input(&self) -> Result<(), Violation> {
        let mut state = self.state();
        if std::mem::replace(&mut state.input_ended, true) {
            return Err(Violation);
        }
        drop(state);
        self.changed.notify_all();
        Ok(())
    }

    /// Called by the reader thread.
    pub(crate) fn grant_output(&self, amount: u32) -> Result<(), Violation> {
        self.state().output_credit.grant(amount).map_err(|_| Violation)?;
        self.notify();
        Ok(())
    }

    /// The next piece of input; none at its end.
    pub(crate) fn next_input(&self) -> Result<Option<Vec<u8>>, ErrorDetail> {
        let mut state = self.state();
        loop {
            if self.is_cancelled() {
                return Err(cancelled());
            }
            if let Some(bytes) = state.input.pop_front() {
                let cost = data_cost(bytes.len());
                state.owed_credit += cost;
                // When all input is here the host needs no more credit.
                if state.owed_credit >= CREDIT_STEP && !state.input_ended {
                    let owed = std::mem::take(&mut state.owed_credit);
                    // It was spent from this credit, so giving it back can't go over the limit.
                    let _ = state.input_credit.grant(owed);
                    drop(state);
                    self.send(&Frame::credit(self.id, owed))?;
                }
                return Ok(Some(bytes));
            }
            if state.input_ended {
                return Ok(None);
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Sends all of `bytes`, waiting for credit as needed.
    pub(crate) fn send_data(&self, kind: Kind, mut bytes: &[u8]) -> Result<(), ErrorDetail> {
        while !bytes.is_empty() {
            let sent = self.send_some(kind, bytes)?;
            bytes = &bytes[sent..];
            if sent == 0 {
                let mut state = self.state();
                while state.output_credit.sendable(1) == 0 && !self.is_cancelled() {
                    state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                }
            }
        }
        Ok(())
    }

    /// Sends as much of `bytes` as there is credit for, and says how much that was.
    pub(crate) fn send_some(&self, kind: Kind, bytes: &[u8]) -> Result<usize, ErrorDetail> {
        if self.is_cancelled() {
            return Err(cancelled());
        }
        let mut state = self.state();
        let length = state.output_credit.sendable(bytes.len().min(MAX_DATA_BYTES));
        if length == 0 {
            return Ok(0);
        }
        let _ = state.output_credit.spend(data_cost(length));
        drop(state);
        self.send(&Frame::new(kind, self.id, &bytes[..length]))?;
        Ok(length)
    }

    /// Whether data can be sent now.
    pub(crate) fn has_output_credit(&self) -> bool {
        self.state().output_credit.sendable(1) > 0
    }

    fn send(&self, frame: &Frame) -> Result<(), ErrorDetail> {
        let connection = self.connection.upgrade().ok_or_else(cancelled)?;
        connection.send(frame).map_err(|_| cancelled())
    }

    /// Sends the call's last frame and takes it off the connection.
    pub(crate) fn finish(&self, result: Result<Vec<u8>, ErrorDetail>) {
        if let Some(connection) = self.connection.upgrade() {
            connection.finish(self.id, result);
        }
    }
}

/// The answer to a call that the host cancelled; it does not read it.
pub(crate) fn cancelled() -> ErrorDetail {
    ErrorDetail::new(ErrorCode::Cancelled, "the call was cancelled")
}
