//! The channel: its two tasks, and the state that they share with the calls.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use emergent_guest_protocol::{
    AgentHello, Decoder, Frame, GuestCall, HostHello, Kind, MAX_ACCEPTS, ProtocolError, Receiver,
    VersionMismatch, encode_header,
};
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tracing::field::Empty;

use crate::call::{Call, CallError, Sink};
use crate::input::InputCredit;
use crate::silence::Silence;
use crate::table::{CallKind, Incoming, Table};

/// The time limit for the agent's HELLO.
const GREETING_TIME: Duration = Duration::from_secs(20);
/// Frames of calls and their input that may wait to be written.
const QUEUED_FRAMES: usize = 64;
/// Frames that are written at once.
const FRAMES_AT_ONCE: usize = 8;
/// The time limit for the guest to take the next bytes, and for a call to get a place in the queue. It is longer than that of
/// [`Silence`], so that a sandbox that is paused counts as silent.
const STALL_TIME: Duration = Duration::from_secs(60);
/// The size of a channel's read buffer.
const READ_BYTES: usize = 32 * 1024;
/// Why a channel ended.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Closed {
    /// The stream ended or failed.
    #[error("the stream ended ({0})")]
    Ended(String),
    /// The guest broke the protocol.
    #[error("the guest broke the protocol: {0}")]
    Protocol(#[from] ProtocolError),
    /// The guest does not answer.
    #[error("the guest does not answer")]
    Silent,
    /// The guest does not read.
    #[error("the guest does not read")]
    Stalled,
    /// The host closed it.
    #[error("it was closed")]
    ByHost,
}

/// Why a stream did not become a channel.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// It ended, or broke the protocol.
    #[error("the guest agent did not answer: {0}")]
    Closed(#[from] Closed),
    /// Nothing came in time.
    #[error("the guest agent did not answer within {} s", GREETING_TIME.as_secs())]
    TimedOut,
    /// No common version.
    #[error(transparent)]
    Version(#[from] VersionMismatch),
}

/// A channel to a guest agent. Clones share it; it is closed when the last one is dropped.
#[derive(Clone)]
pub struct GuestClient {
    shared: Arc<Shared>,
    _close_on_drop: Arc<tokio_util::sync::DropGuard>,
    hello: Arc<AgentHello>,
    protocol: u16,
}

/// An entry of the queue to the guest.
enum Outgoing {
    /// A frame, and its place in the queue until it is written.
    Frame { frame: Frame, _place: Option<OwnedSemaphorePermit> },
    /// The CREDIT frame of a call. It grants all credit that its caller gives back until it is written.
    Credit(u32),
}

/// The state that tasks and calls share.
pub(crate) struct Shared {
    pub(crate) table: Mutex<Table<Sink>>,
    /// The queue to the guest. CALL, INPUT and INPUT_END hold a place in it. The senders of other frames can't wait. These frames
    /// are bounded too: each call has one CREDIT, one CANCEL and one ACCEPT at most, an ACCEPT call that was not sent can't end
    /// and holds its permit, and [`Silence`] limits the PINGs.
    outgoing: mpsc::UnboundedSender<Outgoing>,
    places: Arc<Semaphore>,
    /// Permits for ACCEPT calls.
    accepts: Arc<Semaphore>,
    closed: CancellationToken,
    reason: OnceLock<Closed>,
    pub(crate) call_started: Notify,
}

impl GuestClient {
    /// Greets the agent at the other end of the stream.
    pub async fn connect(
        reader: impl AsyncRead + Send + Unpin + 'static,
        writer: impl AsyncWrite + Send + Unpin + 'static,
    ) -> Result<Self, ConnectError> {
        timeout(GREETING_TIME, Self::greet(reader, writer)).await.map_err(|_| ConnectError::TimedOut)?
    }

    async fn greet(
        mut reader: impl AsyncRead + Send + Unpin + 'static,
        mut writer: impl AsyncWrite + Send + Unpin + 'static,
    ) -> Result<Self, ConnectError> {
        let ended = |error: std::io::Error| Closed::Ended(error.to_string());
        let host = HostHello::default();
        let hello = Frame::message(Kind::Hello, 0, &host).map_err(Closed::from)?;
        writer.write_all(&hello.to_bytes()).await.map_err(ended)?;
        writer.flush().await.map_err(ended)?;
        let mut input =
            Input { decoder: Decoder::new(Receiver::Host), buffer: vec![0; READ_BYTES], filled: 0..0 };
        let frame = input.next(&mut reader).await?;
        if frame.kind != Kind::Hello {
            return Err(Closed::from(ProtocolError::UnexpectedKind(frame.kind as u8)).into());
        }
        let hello: AgentHello = frame.parse().map_err(Closed::from)?;
        let protocol = host.agree(&hello)?;
        let (outgoing, queued) = mpsc::unbounded_channel();
        let shared = Arc::new(Shared {
            table: Mutex::default(),
            outgoing,
            places: Arc::new(Semaphore::new(QUEUED_FRAMES)),
            accepts: Arc::new(Semaphore::new(MAX_ACCEPTS)),
            closed: CancellationToken::new(),
            reason: OnceLock::new(),
            call_started: Notify::new(),
        });
        tokio::spawn(write_frames(Arc::clone(&shared), writer, queued));
        tokio::spawn(read_frames(Arc::clone(&shared), reader, input));
        let guard = shared.closed.clone().drop_guard();
        Ok(Self { shared, _close_on_drop: Arc::new(guard), hello: Arc::new(hello), protocol })
    }

    /// The agent's HELLO.
    pub fn hello(&self) -> &AgentHello {
        &self.hello
    }

    /// The protocol version that the channel uses.
    pub fn protocol(&self) -> u16 {
        self.protocol
    }

    /// Starts a call, in the form that the agent's version knows. Waits a limited time while the guest does not read.
    pub async fn start(&self, message: &GuestCall) -> Result<Call, CallError> {
        let span = tracing::debug_span!("agent_call", call = message.name(), error_code = Empty);
        let call = self.send(message).await.inspect_err(|error| error.record_in(&span))?;
        Ok(call.within(span))
    }

    async fn send(&self, message: &GuestCall) -> Result<Call, CallError> {
        let message = message.adapt(self.protocol)?;
        let kind = if matches!(*message, GuestCall::Listen(_)) { CallKind::Listen } else { CallKind::Work };
        let frame =
            Frame::message(Kind::Call, 1, &*message).map_err(|error| CallError::Lost(error.into()))?;
        let place = self.shared.place().await.map_err(CallError::Lost)?;
        self.shared.open_call(kind, frame, Some(place), None)
    }

    pub(crate) fn shared(&self) -> Arc<Shared> {
        Arc::clone(&self.shared)
    }

    /// Whether the channel has ended.
    pub fn is_closed(&self) -> bool {
        self.shared.closed.is_cancelled()
    }

    /// Waits until the channel has ended.
    pub async fn closed(&self) -> Closed {
        self.shared.closed.cancelled().await;
        self.shared.closed_reason()
    }

    /// Ends the channel; calls in progress fail.
    pub fn close(&self) {
        self.shared.close(Closed::ByHost);
    }

    /// Calls in progress.
    pub fn open_calls(&self) -> usize {
        self.shared.table.lock().len()
    }
}

impl Shared {
    pub(crate) fn closed_reason(&self) -> Closed {
        self.reason.get().cloned().unwrap_or(Closed::ByHost)
    }

    pub(crate) fn check_open(&self) -> Result<(), Closed> {
        if self.closed.is_cancelled() { Err(self.closed_reason()) } else { Ok(()) }
    }

    /// The places in the queue; closed with the channel.
    pub(crate) fn places(&self) -> Arc<Semaphore> {
        Arc::clone(&self.places)
    }

    /// The permits for ACCEPT calls; closed with the channel.
    pub(crate) fn accepts(&self) -> Arc<Semaphore> {
        Arc::clone(&self.accepts)
    }

    /// Waits for a place in the queue. Places are given in the order of the requests, so a guest that reads frees one in time.
    async fn place(&self) -> Result<OwnedSemaphorePermit, Closed> {
        if let Ok(place) = timeout(STALL_TIME, self.places().acquire_owned()).await {
            return place.map_err(|_| self.closed_reason());
        }
        self.close(Closed::Stalled);
        Err(self.closed_reason())
    }

    /// Parks an ACCEPT call for the listener of a LISTEN call.
    pub(crate) fn accept(
        self: &Arc<Self>,
        listener: u32,
        permit: OwnedSemaphorePermit,
    ) -> Result<Call, CallError> {
        self.open_call(CallKind::Accept, Frame::accept(1, listener), None, Some(permit))
    }

    /// Gives a call its id and queues its first frame.
    fn open_call(
        self: &Arc<Self>,
        kind: CallKind,
        frame: Frame,
        place: Option<OwnedSemaphorePermit>,
        permit: Option<OwnedSemaphorePermit>,
    ) -> Result<Call, CallError> {
        let (events, incoming) = mpsc::unbounded_channel();
        let input: Arc<InputCredit> = Arc::default();
        let sink = Sink { events, input: Arc::clone(&input), _permit: permit.map(Arc::new) };
        let id = {
            // Queued under the lock: ids must reach the guest in order, and before a cancel. Checked under the lock: a
            // channel that ends later ends this call too.
            let mut table = self.table.lock();
            self.check_open().map_err(CallError::Lost)?;
            let id = table
                .open(kind, sink)
                .ok_or_else(|| CallError::Lost(Closed::Ended("out of call ids".into())))?;
            self.enqueue(Outgoing::Frame { frame: Frame { call: id, ..frame }, _place: place });
            id
        };
        // The guest owes no frame for a parked call.
        if kind != CallKind::Accept {
            self.call_started.notify_one();
        }
        Ok(Call::new(id, Arc::clone(self), incoming, input))
    }

    /// Queues a frame that holds a place.
    pub(crate) fn put(&self, frame: Frame, place: OwnedSemaphorePermit) {
        self.enqueue(Outgoing::Frame { frame, _place: Some(place) });
    }

    /// Queues a frame that holds no place.
    pub(crate) fn queue(&self, frame: Frame) {
        self.enqueue(Outgoing::Frame { frame, _place: None });
    }

    /// Gives back the credit of output that was consumed.
    pub(crate) fn give_back(&self, id: u32, amount: u32) {
        if self.table.lock().give_back(id, amount) {
            self.enqueue(Outgoing::Credit(id));
        }
    }

    fn enqueue(&self, outgoing: Outgoing) {
        let _ = self.outgoing.send(outgoing);
    }

    /// The bytes of frames that are sent now. The guest may answer them from now on.
    fn send(&self, queued: &[Outgoing]) -> Vec<u8> {
        let mut bytes = Vec::new();
        for outgoing in queued {
            match outgoing {
                Outgoing::Frame { frame, .. } => {
                    if matches!(frame.kind, Kind::Call | Kind::Accept) {
                        self.table.lock().note_sent(frame.call);
                    }
                    bytes.extend_from_slice(&encode_header(frame.kind, frame.call, frame.payload.len()));
                    bytes.extend_from_slice(&frame.payload);
                }
                Outgoing::Credit(id) => {
                    let amount = self.table.lock().grant(*id);
                    bytes.extend(amount.into_iter().flat_map(|amount| Frame::credit(*id, amount).to_bytes()));
                }
            }
        }
        bytes
    }

    fn close(&self, reason: Closed) {
        let _ = self.reason.set(reason);
        self.closed.cancel();
        self.places.close();
        self.accepts.close();
        // Callers that read see their senders dropped; callers that write see the end of the input.
        self.table.lock().clear().for_each(|sink| sink.input.end());
    }

    fn dispatch(&self, frame: Frame) -> Result<(), ProtocolError> {
        let id = frame.call;
        let Some((sink, event)) = self.table.lock().take(frame)? else {
            return Ok(());
        };
        match event {
            Incoming::InputCredit(amount) => {
                if !sink.input.grant(amount) {
                    return Err(ProtocolError::OverCredit(id));
                }
            }
            event => {
                let last = matches!(event, Incoming::Result(_) | Incoming::Error(_));
                let _ = sink.events.send(event);
                if last {
                    sink.input.end();
                }
            }
        }
        Ok(())
    }
}

async fn write_frames(
    shared: Arc<Shared>,
    mut writer: impl AsyncWrite + Unpin,
    mut queued: mpsc::UnboundedReceiver<Outgoing>,
) {
    // Frames that wait are written at once: several processes on the way pass each write on.
    let mut frames = Vec::new();
    loop {
        tokio::select! {
            () = shared.closed.cancelled() => break,
            _ = queued.recv_many(&mut frames, FRAMES_AT_ONCE) => {}
        }
        let bytes = shared.send(&frames);
        let written = tokio::select! {
            () = shared.closed.cancelled() => break,
            written = write_all(&mut writer, &bytes) => written,
        };
        frames.clear();
        if let Err(reason) = written {
            shared.close(reason);
            break;
        }
    }
    let _ = timeout(STALL_TIME, writer.shutdown()).await;
}

/// Writes bytes. Fails when the guest takes none of them in time.
async fn write_all(writer: &mut (impl AsyncWrite + Unpin), mut bytes: &[u8]) -> Result<(), Closed> {
    while !bytes.is_empty() {
        let written = unless_stalled(writer.write(bytes)).await?;
        if written == 0 {
            return Err(Closed::Ended("it takes no more bytes".into()));
        }
        bytes = &bytes[written..];
    }
    unless_stalled(writer.flush()).await
}

async fn unless_stalled<T>(written: impl Future<Output = std::io::Result<T>>) -> Result<T, Closed> {
    match timeout(STALL_TIME, written).await {
        Ok(written) => written.map_err(|error| Closed::Ended(error.to_string())),
        Err(_) => Err(Closed::Stalled),
    }
}

async fn read_frames(shared: Arc<Shared>, mut reader: impl AsyncRead + Unpin, mut input: Input) {
    let mut silence = Silence::default();
    let reason = loop {
        let next = tokio::select! {
            biased;
            () = shared.closed.cancelled() => break shared.closed_reason(),
            next = input.next(&mut reader) => next,
            () = silence.wait(&shared) => {
                match silence.tick() {
                    Some(ping) => shared.queue(ping),
                    None => break Closed::Silent,
                }
                continue;
            }
        };
        let taken = next.and_then(|frame| {
            if frame.kind == Kind::Pong {
                return if silence.pong() { Ok(()) } else { Err(ProtocolError::UnexpectedKind(12).into()) };
            }
            silence.heard();
            shared.dispatch(frame).map_err(Closed::from)
        });
        if let Err(reason) = taken {
            break reason;
        }
    };
    shared.close(reason);
}

/// Frames out of a stream. Cancel-safe: no byte is lost when `next` is dropped.
struct Input {
    decoder: Decoder,
    buffer: Vec<u8>,
    filled: std::ops::Range<usize>,
}

impl Input {
    async fn next(&mut self, reader: &mut (impl AsyncRead + Unpin)) -> Result<Frame, Closed> {
        loop {
            let mut bytes = &self.buffer[self.filled.clone()];
            let before = bytes.len();
            let frame = self.decoder.decode(&mut bytes)?;
            self.filled.start += before - bytes.len();
            if let Some(frame) = frame {
                return Ok(frame);
            }
            let length =
                reader.read(&mut self.buffer).await.map_err(|error| Closed::Ended(error.to_string()))?;
            if length == 0 {
                self.decoder.finish()?;
                return Err(Closed::Ended("closed by the guest".into()));
            }
            self.filled = 0..length;
        }
    }
}
