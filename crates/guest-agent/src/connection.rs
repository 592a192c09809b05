//! One channel: a reader thread that decodes frames and starts calls, and a writer that all calls share.
//!
//! Whatever the host sends that it may not send ends the connection; commands in the background and other
//! channels go on.

use std::collections::HashMap;
use std::io::{IoSlice, Write};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use emergent_guest_protocol::{
    AgentHello, Decoder, Frame, GuestCall, HostHello, Kind, PROTOCOL_VERSION, ProtocolError, Receiver,
    encode_header,
};
use emergent_wire::{ErrorCode, ErrorDetail};

use crate::agent::Agent;
use crate::call::Call;
use crate::{dispatch, log, workers};

/// Calls that may run at once on one channel.
const MAX_CALLS: usize = 64;
/// Channels that may be open at once.
const MAX_CONNECTIONS: usize = 8;
/// How much is read from the channel at once.
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
    newest: u32,
}

/// Serves a channel on a thread of its own. `keep` is dropped when the channel ends.
pub(crate) fn serve_in_background(
    agent: &Arc<Agent>,
    input: OwnedFd,
    output: OwnedFd,
    keep: Option<OwnedFd>,
) {
    if CONNECTIONS.fetch_add(1, Ordering::SeqCst) >= MAX_CONNECTIONS {
        CONNECTIONS.fetch_sub(1, Ordering::SeqCst);
        log("a channel was refused: too many are open");
        return;
    }
    let agent = Arc::clone(agent);
    workers::spawn_thread("channel", move || {
        serve(&agent, &input, output);
        drop(keep);
        CONNECTIONS.fetch_sub(1, Ordering::SeqCst);
    });
}

/// Serves a channel until it ends.
pub(crate) fn serve(agent: &Arc<Agent>, input: &OwnedFd, output: OwnedFd) {
    let connection = Arc::new(Connection { writer: Mutex::new(output.into()), calls: Mutex::default() });
    let ended = read_frames(agent, &connection, input);
    connection.close();
    if let Err(error) = ended {
        log(&format!("a channel was closed: {error}"));
    }
}

fn read_frames(
    agent: &Arc<Agent>,
    connection: &Arc<Connection>,
    input: &OwnedFd,
) -> Result<(), ProtocolError> {
    let mut decoder = Decoder::new(Receiver::Guest);
    let mut buffer = vec![0_u8; READ_BYTES];
    let mut greeted = false;
    loop {
        let length = match rustix::io::read(input, &mut buffer) {
            Ok(0) => return decoder.finish(),
            Ok(length) => length,
            Err(rustix::io::Errno::INTR) => continue,
            Err(_) => return Ok(()),
        };
        let mut bytes = &buffer[..length];
        while let Some(frame) = decoder.decode(&mut bytes)? {
            if greeted {
                connection.take(agent, frame)?;
            } else {
                connection.greet(agent, &frame)?;
                greeted = true;
            }
        }
    }
}

impl Connection {
    fn calls(&self) -> std::sync::MutexGuard<'_, Calls> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn greet(&self, agent: &Agent, frame: &Frame) -> Result<(), ProtocolError> {
        if frame.kind != Kind::Hello {
            return Err(ProtocolError::UnexpectedKind(frame.kind as u8));
        }
        // The range is the host's to check: it knows old agents, we don't know new hosts.
        let _: HostHello = frame.parse()?;
        let hello = AgentHello {
            protocol: PROTOCOL_VERSION,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            boot_id: agent.boot_id.clone(),
        };
        let _ = self.send(&Frame::message(Kind::Hello, 0, &hello)?);
        Ok(())
    }

    fn take(self: &Arc<Self>, agent: &Arc<Agent>, frame: Frame) -> Result<(), ProtocolError> {
        let (kind, id) = (frame.kind, frame.call);
        match kind {
            Kind::Call => return self.open(agent, frame),
            Kind::Ping => {
                let _ = self.send(&Frame::new(Kind::Pong, 0, frame.payload));
                return Ok(());
            }
            Kind::Hello => return Err(ProtocolError::UnexpectedKind(kind as u8)),
            _ => {}
        }
        let Some(call) = self.calls().open.get(&id).cloned() else {
            // Frames for a call that just ended crossed its last frame on the way.
            return if id <= self.calls().newest {
                Ok(())
            } else {
                Err(ProtocolError::UnknownCall(kind, id))
            };
        };
        match kind {
            Kind::Input => call.push_input(frame.payload).map_err(|_| ProtocolError::OverCredit(id)),
            Kind::InputEnd => call.end_input().map_err(|_| ProtocolError::UnknownCall(kind, id)),
            Kind::Credit => {
                call.grant_output(frame.credit_amount()).map_err(|_| ProtocolError::OverCredit(id))
            }
            _ => {
                call.cancel();
                Ok(())
            }
        }
    }

    fn open(self: &Arc<Self>, agent: &Arc<Agent>, frame: Frame) -> Result<(), ProtocolError> {
        let id = frame.call;
        let call = Arc::new(Call::new(id, self));
        {
            let mut calls = self.calls();
            if id <= calls.newest {
                return Err(ProtocolError::ReusedCallId(id));
            }
            calls.newest = id;
            if calls.open.len() >= MAX_CALLS {
                drop(calls);
                let message = format!("{MAX_CALLS} calls run in this workspace already: wait for one to end");
                self.finish(id, Err(ErrorDetail::new(ErrorCode::LimitReached, message)));
                return Ok(());
            }
            calls.open.insert(id, Arc::clone(&call));
        }
        let running = Arc::clone(agent);
        let started = agent.workers.run(move || {
            // A newer host may send what this agent does not know: that is an answer, not a broken channel.
            match frame.parse::<GuestCall>() {
                Ok(message) => dispatch::run(&running, &call, message),
                Err(error) => call.finish(Err(ErrorDetail::new(ErrorCode::BadRequest, error.to_string()))),
            }
        });
        if !started {
            let message = "the sandbox can't start another thread: end some of its processes";
            self.finish(id, Err(ErrorDetail::new(ErrorCode::LimitReached, message)));
        }
        Ok(())
    }

    /// Writes a frame in one go.
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
        self.calls().open.remove(&id);
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

    /// The host is gone: nobody waits for the calls any more.
    fn close(&self) {
        let open: Vec<_> = self.calls().open.values().cloned().collect();
        for call in open {
            call.cancel();
        }
    }
}
