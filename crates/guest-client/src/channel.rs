//! The channel: its two tasks, and what they share with the calls.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use emergent_guest_protocol::{
    AgentHello, Decoder, Frame, GuestCall, HostHello, Kind, ProtocolError, Receiver, VersionMismatch,
};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;

use crate::call::{Call, CallError, Sink};
use crate::table::{Incoming, Table};

/// How long an agent may take to greet.
const GREETING_TIME: Duration = Duration::from_secs(20);
/// Frames that may wait to be written.
const QUEUED_FRAMES: usize = 64;
/// Frames that are written at once.
const FRAMES_AT_ONCE: usize = 8;
/// How much is read from the stream at once; every channel has such a buffer.
const READ_BYTES: usize = 32 * 1024;
/// While calls wait, a guest that says nothing for this long is asked whether it is there.
const PING_AFTER: Duration = Duration::from_secs(10);
/// And given up when it does not answer within this time.
const PONG_WITHIN: Duration = Duration::from_secs(30);

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
}

/// A frame and the place in the queue that it holds until it is written.
type Queued = (Bytes, Option<OwnedSemaphorePermit>);

/// What tasks and calls share.
pub(crate) struct Shared {
    table: Mutex<Table<Sink>>,
    /// Frames to write, in order. Those that carry a request or data hold a place; credit and cancel, whose
    /// senders can't wait, are bounded by the open calls.
    outgoing: mpsc::UnboundedSender<Queued>,
    places: Arc<Semaphore>,
    pub(crate) closed: CancellationToken,
    reason: OnceLock<Closed>,
    call_ended: Notify,
    call_started: Notify,
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
        host.agree(&hello)?;
        let (outgoing, queued) = mpsc::unbounded_channel();
        let shared = Arc::new(Shared {
            table: Mutex::default(),
            outgoing,
            places: Arc::new(Semaphore::new(QUEUED_FRAMES)),
            closed: CancellationToken::new(),
            reason: OnceLock::new(),
            call_ended: Notify::new(),
            call_started: Notify::new(),
        });
        tokio::spawn(write_frames(Arc::clone(&shared), writer, queued));
        tokio::spawn(read_frames(Arc::clone(&shared), reader, input));
        let guard = shared.closed.clone().drop_guard();
        Ok(Self { shared, _close_on_drop: Arc::new(guard), hello: Arc::new(hello) })
    }

    /// What the agent said of itself.
    pub fn hello(&self) -> &AgentHello {
        &self.hello
    }

    /// Starts a call.
    pub async fn start(&self, message: &GuestCall) -> Result<Call, CallError> {
        let (events, incoming) = mpsc::unbounded_channel();
        let input = Arc::default();
        let sink = Sink { events, input: Arc::clone(&input) };
        if self.shared.closed.is_cancelled() {
            return Err(CallError::Lost(self.shared.closed_reason()));
        }
        let frame = Frame::message(Kind::Call, 1, message).map_err(|error| CallError::Lost(error.into()))?;
        let place = self.shared.place().await.map_err(CallError::Lost)?;
        let id = {
            // Queued under the lock: ids must reach the guest in order, and before a cancel.
            let mut table = self.shared.table();
            let id =
                table.open(sink).ok_or_else(|| CallError::Lost(Closed::Ended("out of call ids".into())))?;
            self.shared.put(&Frame { call: id, ..frame }, Some(place));
            id
        };
        self.shared.call_started.notify_one();
        Ok(Call::new(id, Arc::clone(&self.shared), incoming, input))
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
        self.shared.table().len()
    }
}

impl Shared {
    pub(crate) fn table(&self) -> MutexGuard<'_, Table<Sink>> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn closed_reason(&self) -> Closed {
        self.reason.get().cloned().unwrap_or(Closed::ByHost)
    }

    /// Waits for a place in the queue.
    async fn place(&self) -> Result<OwnedSemaphorePermit, Closed> {
        tokio::select! {
            place = Arc::clone(&self.places).acquire_owned() => place.map_err(|_| self.closed_reason()),
            () = self.closed.cancelled() => Err(self.closed_reason()),
        }
    }

    fn put(&self, frame: &Frame, place: Option<OwnedSemaphorePermit>) {
        let _ = self.outgoing.send((frame.to_bytes().into(), place));
    }

    pub(crate) async fn send(&self, frame: &Frame) -> Result<(), Closed> {
        let place = self.place().await?;
        self.put(frame, Some(place));
        Ok(())
    }

    pub(crate) fn queue(&self, frame: &Frame) {
        self.put(frame, None);
    }

    /// Waits until a call has had its last frame.
    pub(crate) async fn wait_for_end(&self, id: u32) {
        loop {
            let changed = self.call_ended.notified();
            if !self.table().is_open(id) {
                return;
            }
            changed.await;
        }
    }

    fn close(&self, reason: Closed) {
        let _ = self.reason.set(reason);
        self.closed.cancel();
        // Drops the senders of all calls, which is how they learn of it.
        self.table().clear();
        self.call_ended.notify_waiters();
    }

    fn dispatch(&self, frame: Frame) -> Result<(), ProtocolError> {
        let id = frame.call;
        let Some((sink, event)) = self.table().take(frame)? else {
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
                    self.call_ended.notify_waiters();
                }
            }
        }
        Ok(())
    }
}

async fn write_frames(
    shared: Arc<Shared>,
    mut writer: impl AsyncWrite + Unpin,
    mut queued: mpsc::UnboundedReceiver<Queued>,
) {
    // Frames that wait go out in one piece: every piece is passed on by several processes on its way.
    let (mut frames, mut bytes) = (Vec::new(), Vec::new());
    loop {
        tokio::select! {
            () = shared.closed.cancelled() => break,
            _ = queued.recv_many(&mut frames, FRAMES_AT_ONCE) => {}
        }
        let written = async {
            if let [(frame, _)] = frames.as_slice() {
                writer.write_all(frame).await?;
            } else {
                bytes.clear();
                frames.iter().for_each(|(frame, _)| bytes.extend_from_slice(frame));
                writer.write_all(&bytes).await?;
            }
            writer.flush().await
        };
        let written = tokio::select! {
            () = shared.closed.cancelled() => break,
            written = written => written,
        };
        frames.clear();
        if let Err(error) = written {
            shared.close(Closed::Ended(error.to_string()));
            break;
        }
    }
    let _ = writer.shutdown().await;
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
                    Some(ping) => shared.queue(&ping),
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

/// Notices a guest that has calls to answer and says nothing.
#[derive(Default)]
struct Silence {
    heard: Option<Instant>,
    /// The guest was asked and has said nothing since.
    asked: Option<Instant>,
    /// Pings whose pong has not come yet. What was on its way before may come first.
    pongs_due: u32,
}

impl Silence {
    fn heard(&mut self) {
        self.heard = Some(Instant::now());
        self.asked = None;
    }

    /// The guest answered a ping. False when all were answered.
    fn pong(&mut self) -> bool {
        self.heard();
        let left = self.pongs_due.checked_sub(1);
        self.pongs_due = left.unwrap_or(0);
        left.is_some()
    }

    /// Waits until the guest has been silent for too long while calls wait.
    async fn wait(&mut self, shared: &Shared) {
        if self.asked.is_none() && shared.table().len() == 0 {
            shared.call_started.notified().await;
            self.heard = Some(Instant::now());
        }
        let until = match self.asked {
            Some(asked) => asked + PONG_WITHIN,
            None => *self.heard.get_or_insert_with(Instant::now) + PING_AFTER,
        };
        tokio::time::sleep_until(until).await;
    }

    /// The time is up: a ping to send, or none when the guest must be given up.
    fn tick(&mut self) -> Option<Frame> {
        if self.asked.is_some() {
            return None;
        }
        self.asked = Some(Instant::now());
        self.pongs_due = self.pongs_due.saturating_add(1);
        Some(Frame::new(Kind::Ping, 0, 0_u64.to_be_bytes()))
    }
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
