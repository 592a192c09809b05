//! One channel: a thread that reads frames, and a writer that all calls share.
//!
//! The thread that reads a call runs it, and another thread continues to read. On gVisor waking a thread costs more than most
//! calls, so it happens while the call runs and not before.
//!
//! A frame that the host may not send ends the connection. Commands in the background and other channels continue.

use std::collections::HashMap;
use std::io::{IoSlice, Write};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use emergent_guest_protocol::{
    AgentHello, Decoder, Frame, GuestCall, HostHello, Kind, MAX_ACCEPTS, MAX_CALLS, MAX_LISTENERS,
    PROTOCOL_VERSION, ProtocolError, Receiver, encode_header,
};
use emergent_wire::{ErrorCode, ErrorDetail};

use crate::agent::Agent;
use crate::call::Call;
use crate::listen::Parking;
use crate::workers::Refused;
use crate::{dispatch, log};

/// Channels that may be open at once.
pub(crate) const MAX_CONNECTIONS: usize = 8;
/// The size of the read buffer.
const READ_BYTES: usize = 64 * 1024;

static CONNECTIONS: AtomicUsize = AtomicUsize::new(0);

/// A channel.
pub(crate) struct Connection {
    writer: Mutex<std::fs::File>,
    calls: Mutex<Calls>,
}

#[derive(Default)]
struct Calls {
    open: HashMap<u32, Arc<Call>>,
    /// The ACCEPT calls among them.
    accepts: usize,
    /// The listeners of LISTEN calls, by the id of the call.
    listeners: HashMap<u32, Arc<Parking>>,
    newest: u32,
}

impl Calls {
    /// Takes the id of a new call.
    fn begin(&mut self, id: u32) -> Result<(), ProtocolError> {
        if id <= self.newest {
            return Err(ProtocolError::ReusedCallId(id));
        }
        self.newest = id;
        Ok(())
    }
}

/// The reading side of a channel. Threads pass it on.
struct Reader {
    connection: Arc<Connection>,
    input: OwnedFd,
    decoder: Decoder,
    buffer: Vec<u8>,
    greeted: bool,
    /// Dropped when the channel ends.
    _keep: Option<OwnedFd>,
}

/// A call that was read and not yet run.
type Pending = (Frame, Arc<Call>);

/// An ACCEPT call, and where it is parked.
type ParkedCall = (Arc<Parking>, Arc<Call>);

/// Serves a channel in the background, unless `most` channels are open. `keep` is dropped when the channel ends.
pub(crate) fn serve_in_background(
    agent: &Arc<Agent>,
    input: OwnedFd,
    output: OwnedFd,
    keep: Option<OwnedFd>,
    most: usize,
) {
    if CONNECTIONS.fetch_add(1, Ordering::SeqCst) >= most {
        CONNECTIONS.fetch_sub(1, Ordering::SeqCst);
        log("a channel was refused: too many are open");
        return;
    }
    let reader = Reader {
        connection: Arc::new(Connection { writer: Mutex::new(output.into()), calls: Mutex::default() }),
        input,
        decoder: Decoder::new(Receiver::Guest),
        buffer: vec![0; READ_BYTES],
        greeted: false,
        _keep: keep,
    };
    if let Err(Refused(_)) = continue_reading(agent, reader) {
        log("a channel was refused: no thread could be started for it");
    }
}

/// Lets another thread read. Gives the reader back when no thread can be started.
fn continue_reading(agent: &Arc<Agent>, reader: Reader) -> Result<(), Refused<Reader>> {
    let serving = Arc::clone(agent);
    agent.workers.run(reader, move |reader| reader.serve(&serving))
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.connection.close();
        CONNECTIONS.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Reader {
    /// Reads until there is a call to run, or the channel ends.
    fn serve(mut self, agent: &Arc<Agent>) {
        loop {
            let mut calls = match self.read(agent) {
                Ok(Some(calls)) => calls,
                Ok(None) => return,
                Err(error) => return log(&format!("a channel was closed: {error}")),
            };
            let Some((frame, call)) = calls.pop() else {
                continue;
            };
            for other in calls {
                let running = Arc::clone(agent);
                if let Err(Refused((_, call))) =
                    agent.workers.run(other, move |(frame, call)| run(&running, &frame, &call))
                {
                    call.finish(Err(no_thread()));
                }
            }
            match continue_reading(agent, self) {
                Ok(()) => return run(agent, &frame, &call),
                Err(Refused(reader)) => {
                    call.finish(Err(no_thread()));
                    self = reader;
                }
            }
        }
    }

    /// Reads once. Returns the new calls, or none at the end of the channel.
    fn read(&mut self, agent: &Agent) -> Result<Option<Vec<Pending>>, ProtocolError> {
        let length = loop {
            match rustix::io::read(&self.input, &mut self.buffer) {
                Ok(0) => return self.decoder.finish().map(|()| None),
                Ok(length) => break length,
                Err(rustix::io::Errno::INTR) => {}
                Err(_) => return Ok(None),
            }
        };
        let mut bytes = &self.buffer[..length];
        let mut calls = Vec::new();
        while let Some(frame) = self.decoder.decode(&mut bytes)? {
            if self.greeted {
                calls.extend(self.connection.take(frame)?);
            } else {
                self.connection.greet(agent, &frame)?;
                self.greeted = true;
            }
        }
        Ok(Some(calls))
    }
}

/// Runs a call to its end.
fn run(agent: &Arc<Agent>, frame: &Frame, call: &Arc<Call>) {
    // An unknown call of a newer host fails; the channel stays open.
    match frame.parse::<GuestCall>() {
        Ok(message) => dispatch::run(agent, call, message),
        Err(error) => call.finish(Err(ErrorDetail::new(ErrorCode::BadRequest, error.to_string()))),
    }
}

fn no_listener(id: u32) -> ErrorDetail {
    ErrorDetail::new(ErrorCode::NotFound, format!("call {id} is not an open listener"))
}

fn no_thread() -> ErrorDetail {
    let message = "the sandbox can't start another thread: end some of its processes";
    ErrorDetail::new(ErrorCode::LimitReached, message)
}

impl Connection {
    fn calls(&self) -> std::sync::MutexGuard<'_, Calls> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn greet(&self, agent: &Agent, frame: &Frame) -> Result<(), ProtocolError> {
        if frame.kind != Kind::Hello {
            return Err(ProtocolError::UnexpectedKind(frame.kind as u8));
        }
        // The host checks the range: it knows old agents, while an agent does not know newer hosts.
        let _: HostHello = frame.parse()?;
        let hello = AgentHello {
            protocol: PROTOCOL_VERSION,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            boot_id: agent.boot_id(),
        };
        let _ = self.send(&Frame::message(Kind::Hello, 0, &hello)?);
        Ok(())
    }

    /// Takes a frame; returns the call that it begins.
    fn take(self: &Arc<Self>, frame: Frame) -> Result<Option<Pending>, ProtocolError> {
        let (kind, id) = (frame.kind, frame.call);
        match kind {
            Kind::Call => return self.open(frame),
            Kind::Accept => return self.accept(&frame).map(|()| None),
            Kind::Ping => {
                let _ = self.send(&Frame::new(Kind::Pong, 0, frame.payload));
                return Ok(None);
            }
            Kind::Hello => return Err(ProtocolError::UnexpectedKind(kind as u8)),
            _ => {}
        }
        let Some(call) = self.calls().open.get(&id).cloned() else {
            // Frames for a call that just ended crossed its last frame on the way.
            return if id <= self.calls().newest {
                Ok(None)
            } else {
                Err(ProtocolError::UnknownCall(kind, id))
            };
        };
        match kind {
            Kind::Input => call.push_input(frame.payload).map_err(|_| ProtocolError::OverCredit(id))?,
            Kind::InputEnd => call.end_input().map_err(|_| ProtocolError::UnknownCall(kind, id))?,
            Kind::Credit => {
                call.grant_output(frame.credit_amount()).map_err(|_| ProtocolError::OverCredit(id))?;
            }
            _ => call.cancel(),
        }
        Ok(None)
    }

    fn open(self: &Arc<Self>, frame: Frame) -> Result<Option<Pending>, ProtocolError> {
        let id = frame.call;
        let call = Arc::new(Call::new(id, self));
        let mut calls = self.calls();
        calls.begin(id)?;
        if calls.open.len() - calls.accepts >= MAX_CALLS {
            drop(calls);
            let message = format!("{MAX_CALLS} calls run in this workspace already: wait for one to end");
            self.finish(id, Err(ErrorDetail::new(ErrorCode::LimitReached, message)));
            return Ok(None);
        }
        calls.open.insert(id, Arc::clone(&call));
        Ok(Some((frame, call)))
    }

    /// Parks an ACCEPT call. This needs no thread, so it works when the sandbox can't start another one.
    fn accept(self: &Arc<Self>, frame: &Frame) -> Result<(), ProtocolError> {
        let (id, listener) = (frame.call, frame.listener());
        let opened = self.open_accept(id, listener)?;
        let parked = opened.and_then(|(parking, call)| parking.park(call).map_err(|_| no_listener(listener)));
        if let Err(error) = parked {
            self.finish(id, Err(error));
        }
        Ok(())
    }

    fn open_accept(
        self: &Arc<Self>,
        id: u32,
        listener: u32,
    ) -> Result<Result<ParkedCall, ErrorDetail>, ProtocolError> {
        let mut calls = self.calls();
        calls.begin(id)?;
        let Some(parking) = calls.listeners.get(&listener).cloned() else {
            return Ok(Err(no_listener(listener)));
        };
        if calls.accepts >= MAX_ACCEPTS {
            let message = format!("{MAX_ACCEPTS} ACCEPT calls are open already: wait for one to end");
            return Ok(Err(ErrorDetail::new(ErrorCode::LimitReached, message)));
        }
        let call = Arc::new(Call::accept(id, self, parking.wake()));
        calls.open.insert(id, Arc::clone(&call));
        calls.accepts += 1;
        Ok(Ok((parking, call)))
    }

    /// Makes a listener known to ACCEPT calls.
    pub(crate) fn add_listener(&self, id: u32, parking: Parking) -> Result<Arc<Parking>, ErrorDetail> {
        let mut calls = self.calls();
        if calls.listeners.len() >= MAX_LISTENERS {
            let message = format!("{MAX_LISTENERS} listeners are open already: close one");
            return Err(ErrorDetail::new(ErrorCode::LimitReached, message));
        }
        let parking = Arc::new(parking);
        calls.listeners.insert(id, Arc::clone(&parking));
        Ok(parking)
    }

    /// Undoes [`Connection::add_listener`].
    pub(crate) fn remove_listener(&self, id: u32) {
        self.calls().listeners.remove(&id);
    }

    /// Writes a frame with one system call, if the channel takes all of it.
    pub(crate) fn send(&self, frame: &Frame) -> std::io::Result<()> {
        let header = encode_header(frame.kind, frame.call, frame.payload.len());
        let mut writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        let total = header.len() + frame.payload.len();
        let mut written = loop {
            match writer.write_vectored(&[IoSlice::new(&header), IoSlice::new(&frame.payload)]) {
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                result => break result?,
            }
        };
        if written < header.len() {
            writer.write_all(&header[written..])?;
            written = header.len();
        }
        if written < total {
            writer.write_all(&frame.payload[written - header.len()..])?;
        }
        Ok(())
    }

    /// Sends a call's last frame.
    pub(crate) fn finish(&self, id: u32, result: Result<Vec<u8>, ErrorDetail>) {
        {
            let mut calls = self.calls();
            if calls.open.remove(&id).is_some_and(|call| call.is_accept()) {
                calls.accepts -= 1;
            }
        }
        let frame = result.and_then(|payload| {
            Frame::checked(Kind::Result, id, payload).map_err(|_| {
                ErrorDetail::new(
                    ErrorCode::TooLarge,
                    "the answer is too large to send: ask for less, e.g. by a limit",
                )
            })
        });
        let frame = frame.or_else(|error| Frame::message(Kind::Error, id, &error)).unwrap_or_else(|_| {
            let plain = br#"{"code":"internal","message":"an error too large to send"}"#;
            Frame::new(Kind::Error, id, plain.as_slice())
        });
        if self.send(&frame).is_err() {
            self.close();
        }
    }

    /// Cancels all calls after the end of the channel.
    fn close(&self) {
        let open: Vec<_> = self.calls().open.values().cloned().collect();
        for call in open {
            call.cancel();
        }
    }
}
