//! One call in progress: its input, its credit, and whether it was cancelled.
//!
//! The connection's reader thread adds input, the thread that runs the tool takes it. The reader never waits for the tool:
//! the queue is bounded by the credit that the tool granted.

use std::collections::VecDeque;
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError, Weak};

use emergent_guest_protocol::{Credit, Frame, Kind, MAX_DATA_BYTES, data_cost};
use emergent_wire::{ErrorCode, ErrorDetail};

use crate::connection::Connection;
use crate::listen::Parking;
use crate::wake::Wake;

/// Credit is given back in steps of this size, so that small inputs do not cost a frame each.
const CREDIT_STEP: u32 = 32 * 1024;

/// A call in progress.
pub(crate) struct Call {
    pub(crate) id: u32,
    connection: Weak<Connection>,
    /// Set when the host cancels the call, or the channel ends.
    pub(crate) cancelled: AtomicBool,
    state: Mutex<State>,
    changed: Condvar,
    wake: OnceLock<Arc<Wake>>,
    /// The socket of a CONNECT call. A thread that reads or writes it returns when the call is cancelled.
    socket: OnceLock<Arc<TcpStream>>,
    /// An ACCEPT call, which a listener's thread serves.
    is_accept: bool,
}

#[derive(Default)]
struct State {
    input: VecDeque<Vec<u8>>,
    input_ended: bool,
    /// Credit for input.
    input_credit: Credit,
    /// Credit of consumed input that was not given back yet.
    owed_credit: u32,
    /// Credit for output.
    output_credit: Credit,
}

impl State {
    /// A piece of input, and the credit to give back for it and earlier ones.
    fn take(&mut self) -> Option<(Vec<u8>, Option<u32>)> {
        let bytes = self.input.pop_front()?;
        self.owed_credit += data_cost(bytes.len());
        // When all input is here the host needs no more credit.
        if self.owed_credit < CREDIT_STEP || self.input_ended {
            return Some((bytes, None));
        }
        let owed = std::mem::take(&mut self.owed_credit);
        // It was spent from this credit, so giving it back can't go over the limit.
        let _ = self.input_credit.grant(owed);
        Some((bytes, Some(owed)))
    }
}

/// The input of a call at the moment.
pub(crate) enum NextInput {
    /// The next piece.
    Bytes(Vec<u8>),
    /// The host has sent no more so far.
    NotYet,
    /// The host sends no more.
    Ended,
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
            socket: OnceLock::new(),
            is_accept: false,
        }
    }

    /// An ACCEPT call. `wake` is set for its input, too.
    pub(crate) fn accept(id: u32, connection: &Arc<Connection>, wake: Arc<Wake>) -> Self {
        Self { wake: OnceLock::from(wake), is_accept: true, ..Self::new(id, connection) }
    }

    pub(crate) fn is_accept(&self) -> bool {
        self.is_accept
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The wake-up that is set when the call is cancelled or gets credit; an ACCEPT call's also when it gets input.
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

    /// Other calls have a thread that waits for input; setting the wake-up would only cost time.
    fn notify_of_input(&self) {
        self.changed.notify_all();
        if self.is_accept
            && let Some(wake) = self.wake.get()
        {
            wake.set();
        }
    }

    /// Called by the reader thread, and by a tool whose input thread shall end.
    pub(crate) fn cancel(&self) {
        self.cancelled.store(true, Ordering::SeqCst);
        // Taking the lock orders this after a waiter's check of the flag.
        drop(self.state());
        self.notify();
        self.shut_down_socket();
    }

    /// Shuts the socket down when the call is cancelled.
    pub(crate) fn shut_down_on_cancel(&self, socket: &Arc<TcpStream>) {
        let _ = self.socket.set(Arc::clone(socket));
        if self.is_cancelled() {
            self.shut_down_socket();
        }
    }

    fn shut_down_socket(&self) {
        if let Some(socket) = self.socket.get() {
            let _ = socket.shutdown(Shutdown::Both);
        }
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
        self.notify_of_input();
        Ok(())
    }

    /// Called by the reader thread.
    pub(crate) fn end_input(&self) -> Result<(), Violation> {
        let mut state = self.state();
        if std::mem::replace(&mut state.input_ended, true) {
            return Err(Violation);
        }
        drop(state);
        self.notify_of_input();
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
            if let Some((bytes, credit)) = state.take() {
                drop(state);
                self.give_back(credit)?;
                return Ok(Some(bytes));
            }
            if state.input_ended {
                return Ok(None);
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// The next piece of input, without waiting. A cancelled call's input can still be taken.
    pub(crate) fn take_input(&self) -> NextInput {
        let mut state = self.state();
        let Some((bytes, credit)) = state.take() else {
            return if state.input_ended { NextInput::Ended } else { NextInput::NotYet };
        };
        drop(state);
        // A host that is gone needs no credit.
        let _ = self.give_back(credit);
        NextInput::Bytes(bytes)
    }

    fn give_back(&self, credit: Option<u32>) -> Result<(), ErrorDetail> {
        credit.map_or(Ok(()), |credit| self.send(&Frame::credit(self.id, credit)))
    }

    /// Whether input, or its end, waits to be taken.
    pub(crate) fn has_input(&self) -> bool {
        let state = self.state();
        !state.input.is_empty() || state.input_ended
    }

    /// Whether the host has sent all its input.
    pub(crate) fn has_input_ended(&self) -> bool {
        self.state().input_ended
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

    /// Sends as much of `bytes` as the credit allows, and returns the length.
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
        self.output_room(1) > 0
    }

    /// The length of the data that can be sent now, at most `wanted`.
    pub(crate) fn output_room(&self, wanted: usize) -> usize {
        self.state().output_credit.sendable(wanted.min(MAX_DATA_BYTES))
    }

    /// Tells the host that the call's port is open, or that it has its connection.
    pub(crate) fn send_started(&self, message: &impl serde::Serialize) -> Result<(), ErrorDetail> {
        let frame = Frame::message(Kind::Started, self.id, message)
            .map_err(|error| ErrorDetail::new(ErrorCode::Internal, error.to_string()))?;
        self.send(&frame)
    }

    /// Makes this LISTEN call's listener known to ACCEPT calls.
    pub(crate) fn add_listener(&self, parking: Parking) -> Result<Arc<Parking>, ErrorDetail> {
        let connection = self.connection.upgrade().ok_or_else(cancelled)?;
        connection.add_listener(self.id, parking)
    }

    /// Undoes [`Call::add_listener`].
    pub(crate) fn remove_listener(&self) {
        if let Some(connection) = self.connection.upgrade() {
            connection.remove_listener(self.id);
        }
    }

    pub(crate) fn send(&self, frame: &Frame) -> Result<(), ErrorDetail> {
        let connection = self.connection.upgrade().ok_or_else(cancelled)?;
        connection.send(frame).map_err(|_| cancelled())
    }

    /// Sends the call's last frame and removes the call from the connection.
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

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// An ACCEPT call of a channel that has ended.
    pub(crate) fn accept(wake: Arc<Wake>) -> Call {
        Call {
            id: 1,
            connection: Weak::new(),
            cancelled: AtomicBool::new(false),
            state: Mutex::default(),
            changed: Condvar::new(),
            wake: OnceLock::from(wake),
            socket: OnceLock::new(),
            is_accept: true,
        }
    }
}
