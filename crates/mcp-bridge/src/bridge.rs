//! The bridge itself: one writer, one reader, any number of clients.
//!
//! ```text
//! down ──open──▶ starting ──initialize answered──▶ ready ──close──▶ down ──open──▶ …
//! ```
//! It outlives its process: clients stay joined while the next one is started, `initialize` is done again by the bridge,
//! and what clients have subscribed to is subscribed again.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde_json::value::RawValue;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, watch};

use crate::envelope::{BadMessage, Members, Message, codes, error_line};
use crate::lines::{Line, Lines};
use crate::routes::{ClientId, Item, Role, Routes, Sent, Taken};

/// The newest version of the protocol with `initialize`.
pub const NEWEST_LEGACY: &str = "2025-11-25";
/// The longest line of a process that is taken.
pub const MAX_LINE_BYTES: usize = 8 << 20;
/// What may wait to be written to a process.
const MAX_QUEUED_BYTES: usize = 16 << 20;
/// Messages that may wait; together they may be no larger than the above.
const MAX_QUEUED: usize = 256;
/// Messages that wait for a client that does not read; more are dropped, but never the answer.
const CLIENT_QUEUE: usize = 64;
/// Requests that wait for answers at most.
const MAX_PENDING: usize = 4096;

/// Where a bridge stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Phase {
    /// There is no process; why, and whether one will come.
    Down {
        /// In words.
        why: Arc<str>,
        /// Whether it is worth to wait a moment.
        is_brief: bool,
    },
    /// A process is being started.
    Starting,
    /// It takes requests.
    Ready,
}

/// Why a request did not reach the process.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BridgeError {
    /// There is no process.
    #[error("{0}")]
    Down(Arc<str>),
    /// Too much waits for it already.
    #[error("too many requests wait for this server: try again later")]
    Busy,
    /// The client uses an id for two requests at once.
    #[error("this client has a request under this id already")]
    DoubleId,
    /// `initialize` was refused or not understood.
    #[error("the server refused to initialize: {0}")]
    Refused(String),
    /// No answer in time.
    #[error("no answer within {0} ms")]
    TimedOut(u128),
}

/// What a process says of itself, as it said it.
#[derive(Clone, Debug)]
pub struct Initialized {
    /// The result of `initialize`.
    pub result: Arc<RawValue>,
    /// The version that was agreed on.
    pub protocol_version: String,
}

/// A line for the process, and its share of the queue.
struct Queued {
    line: String,
    _room: Option<OwnedSemaphorePermit>,
}

/// The lines that are to be written to a process.
pub struct Outgoing(mpsc::Receiver<Queued>);

impl Outgoing {
    /// All lines that wait, up to about this many bytes, in one piece; none when the bridge is closed.
    pub async fn next(&mut self, about: usize) -> Option<Vec<u8>> {
        let mut batch = self.0.recv().await?.line.into_bytes();
        batch.push(b'\n');
        // Others that are about to ask go first: what is written in one piece is passed on in one piece by every process
        // on the way.
        tokio::task::yield_now().await;
        while batch.len() < about
            && let Ok(more) = self.0.try_recv()
        {
            batch.extend_from_slice(more.line.as_bytes());
            batch.push(b'\n');
        }
        Some(batch)
    }
}

struct State {
    routes: Routes,
    writer: Option<mpsc::Sender<Queued>>,
    initialized: Option<Initialized>,
    lines: Lines,
    heard: Instant,
    /// Lines that belonged nowhere.
    dropped: u64,
}

struct Shared {
    name: String,
    role: Role,
    state: Mutex<State>,
    phase: watch::Sender<Phase>,
    room: Arc<Semaphore>,
}

/// A bridge; copies are the same bridge.
#[derive(Clone)]
pub struct Bridge(Arc<Shared>);

impl Bridge {
    /// A bridge without a process. The name is for the log.
    pub fn new(name: impl Into<String>, role: Role) -> Self {
        let state = State {
            routes: Routes::default(),
            writer: None,
            initialized: None,
            lines: Lines::new(MAX_LINE_BYTES),
            heard: Instant::now(),
            dropped: 0,
        };
        let down = Phase::Down { why: "the server has not been started yet".into(), is_brief: true };
        Self(Arc::new(Shared {
            name: name.into(),
            role,
            state: Mutex::new(state),
            phase: watch::Sender::new(down),
            room: Arc::new(Semaphore::new(MAX_QUEUED_BYTES)),
        }))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether there is a process, or will be in a moment.
    pub fn is_open(&self) -> bool {
        !matches!(&*self.0.phase.borrow(), Phase::Down { is_brief: false, .. })
    }

    /// Where it stands.
    pub fn phase(&self) -> Phase {
        self.0.phase.borrow().clone()
    }

    /// What the process said of itself when it was initialized by the bridge.
    pub fn initialized(&self) -> Option<Initialized> {
        self.state().initialized.clone()
    }

    /// Requests without an answer, and clients that are joined.
    pub fn load(&self) -> (usize, usize) {
        let state = self.state();
        (state.routes.pending(), state.routes.clients())
    }

    /// Whether a client waits for an answer.
    pub fn waits(&self, client: ClientId) -> bool {
        self.state().routes.waits(client)
    }

    /// How long the process has said nothing.
    pub fn silence(&self) -> Duration {
        self.state().heard.elapsed()
    }

    /// A process is there: what is to be written to it.
    pub fn open(&self) -> Outgoing {
        let (sender, receiver) = mpsc::channel(MAX_QUEUED);
        let mut state = self.state();
        state.writer = Some(sender);
        state.lines = Lines::new(MAX_LINE_BYTES);
        state.heard = Instant::now();
        drop(state);
        self.0.phase.send_replace(Phase::Starting);
        Outgoing(receiver)
    }

    /// The process has ended: whoever waits is told at once.
    pub fn close(&self, why: &str, is_brief: bool) {
        let mut state = self.state();
        state.writer = None;
        state.routes.fail_all(why);
        drop(state);
        self.0.phase.send_replace(Phase::Down { why: why.into(), is_brief });
    }

    /// Initializes the process, and lets clients in.
    pub async fn initialize(&self, version: &str, within: Duration) -> Result<Initialized, BridgeError> {
        let client = self.state().routes.new_client();
        let text = format!(
            "{{\"jsonrpc\":\"2.0\",\"id\":0,\"method\":\"initialize\",\"params\":{{\"protocolVersion\":\"{NEWEST_LEGACY}\",\
             \"capabilities\":{{}},\"clientInfo\":{{\"name\":\"emergent\",\"version\":\"{version}\"}}}}}}"
        );
        let mut exchange = self.send(client, &text, within).await?;
        let answer = loop {
            match exchange.next().await {
                Some(Item::Answer(answer)) => break answer,
                Some(_) => {}
                None => return Err(BridgeError::TimedOut(within.as_millis())),
            }
        };
        let initialized = read_initialized(&answer)?;
        let lines = {
            let mut state = self.state();
            let is_first = state.initialized.is_none();
            state.initialized = Some(initialized.clone());
            let mut lines = vec!["{\"jsonrpc\":\"2.0\",\"method\":\"notifications/initialized\"}".to_owned()];
            lines.extend(state.routes.subscription_lines());
            if !is_first {
                tell_of_changes(&state.routes, initialized.result.get());
            }
            lines
        };
        for line in lines {
            self.queue(line).await?;
        }
        self.0.phase.send_replace(Phase::Ready);
        Ok(initialized)
    }

    /// Lets clients in without `initialize`: they do that themselves, or there is none.
    pub fn let_in(&self) {
        self.0.phase.send_replace(Phase::Ready);
    }

    /// Takes output of the process.
    pub fn receive(&self, bytes: &[u8]) {
        let mut replies = Vec::new();
        let mut state = self.state();
        state.heard = Instant::now();
        let State { routes, lines, dropped, .. } = &mut *state;
        lines.take(bytes, |line| {
            let taken = match line {
                Line::Whole(line) => take_line(routes, self.0.role, &line),
                Line::TooLong { head, tail, bytes } => fail_long(routes, &head, &tail, bytes),
            };
            match taken {
                Taken::Routed => {}
                Taken::Late => tracing::debug!(mcp_server = self.0.name, "an answer that nobody waits for"),
                Taken::Reply(reply) => replies.push(reply),
                Taken::Dropped(why) => {
                    *dropped += 1;
                    // A server that floods its output must not flood the log too.
                    if dropped.is_power_of_two() {
                        tracing::warn!(mcp_server = self.0.name, why, count = *dropped, "output is ignored");
                    }
                }
            }
        });
        if let Some(writer) = state.writer.clone() {
            for line in replies {
                // A process that asks without reading the answers does not get them.
                let _ = writer.try_send(Queued { line, _room: None });
            }
        }
    }

    /// A client that stays: it is told what it has not asked for.
    pub fn join(&self) -> (ClientId, mpsc::Receiver<String>) {
        let (sender, receiver) = mpsc::channel(CLIENT_QUEUE);
        (self.state().routes.join(sender), receiver)
    }

    /// A client that only asks.
    pub fn visitor(&self) -> ClientId {
        self.state().routes.new_client()
    }

    /// A client is gone; what it has asked for is cancelled.
    pub fn leave(&self, client: ClientId) {
        let mut state = self.state();
        let lines = state.routes.leave(client);
        let writer = state.writer.clone();
        drop(state);
        if let Some(writer) = writer {
            for line in lines {
                let _ = writer.try_send(Queued { line, _room: None });
            }
        }
    }

    /// Waits until the process takes requests, if that is a matter of a moment.
    pub async fn ready(&self, within: Duration) -> Result<(), BridgeError> {
        let mut phase = self.0.phase.subscribe();
        let ready = async {
            loop {
                match &*phase.borrow_and_update() {
                    Phase::Ready => return Ok(()),
                    Phase::Down { why, is_brief: false } => return Err(BridgeError::Down(Arc::clone(why))),
                    Phase::Down { .. } | Phase::Starting => {}
                }
                if phase.changed().await.is_err() {
                    return Err(BridgeError::Down("the server is gone".into()));
                }
            }
        };
        match tokio::time::timeout(within, ready).await {
            Ok(ready) => ready,
            Err(_) => Err(match self.phase() {
                Phase::Down { why, .. } => BridgeError::Down(why),
                _ => BridgeError::Down("the server is being started and takes its time".into()),
            }),
        }
    }

    /// Asks the process something. Its answer comes within this time, or an error does.
    pub async fn request(
        &self,
        client: ClientId,
        message: &Message<'_>,
        within: Duration,
    ) -> Result<Exchange, BridgeError> {
        let (sender, receiver) = mpsc::channel(CLIENT_QUEUE);
        let sent = {
            let mut state = self.state();
            if state.routes.pending() >= MAX_PENDING {
                return Err(BridgeError::Busy);
            }
            state.routes.request(client, message, self.0.role, sender.clone())
        };
        let raw_id = message.raw_id().unwrap_or("null").to_owned();
        let own = match sent {
            Sent::DoubleId => return Err(BridgeError::DoubleId),
            Sent::Answered(line) => {
                let _ = sender.try_send(Item::Answer(line));
                None
            }
            Sent::Line(own, line) => {
                // Dropped while it waits for room in the queue, it must not stay pending.
                let forget = Forget { bridge: self, own: Some(own) };
                self.queue(line).await?;
                forget.keep()
            }
        };
        let deadline = tokio::time::Instant::now() + within;
        Ok(Exchange { bridge: self.clone(), own, raw_id, receiver, within, deadline })
    }

    /// The same for a message of the bridge's own.
    async fn send(&self, client: ClientId, text: &str, within: Duration) -> Result<Exchange, BridgeError> {
        let message = Message::parse(text).map_err(|error| BridgeError::Refused(error.to_string()))?;
        self.request(client, &message, within).await
    }

    /// Whether the process answers: anything it says within this time counts.
    pub async fn answers(&self, within: Duration) -> bool {
        let begun = Instant::now();
        let client = self.visitor();
        let ping = "{\"jsonrpc\":\"2.0\",\"id\":0,\"method\":\"ping\"}";
        let Ok(mut exchange) = self.send(client, ping, within).await else {
            return false;
        };
        let _ = exchange.next().await;
        self.state().heard > begun
    }

    /// Passes a notification on.
    pub async fn notify(&self, client: ClientId, message: &Message<'_>) -> Result<(), BridgeError> {
        let line = self.state().routes.notification(client, message, self.0.role);
        match line {
            Some(line) => self.queue(line).await,
            None => Ok(()),
        }
    }

    /// Passes a client's answer on to the process that asked. False when it has not.
    pub async fn answer(&self, message: &Message<'_>) -> Result<bool, BridgeError> {
        let line = self.state().routes.answer(message);
        match line {
            Some(line) => self.queue(line).await.map(|()| true),
            None => Ok(false),
        }
    }

    /// Puts a line where the writer takes it, when there is room.
    async fn queue(&self, line: String) -> Result<(), BridgeError> {
        let down = || match self.phase() {
            Phase::Down { why, .. } => BridgeError::Down(why),
            _ => BridgeError::Down("the server has just ended".into()),
        };
        let writer = self.state().writer.clone().ok_or_else(down)?;
        let size = u32::try_from(line.len().min(MAX_QUEUED_BYTES)).unwrap_or(u32::MAX);
        let room = tokio::select! {
            room = Arc::clone(&self.0.room).acquire_many_owned(size) => room.ok(),
            () = writer.closed() => return Err(down()),
        };
        writer.send(Queued { line, _room: room }).await.map_err(|_| down())
    }

    fn cancel(&self, own: u64) {
        let mut state = self.state();
        if let (Some(line), Some(writer)) = (state.routes.cancel(own), state.writer.clone()) {
            let _ = writer.try_send(Queued { line, _room: None });
        }
    }
}

/// Takes back a request that did not get as far as the queue.
struct Forget<'a> {
    bridge: &'a Bridge,
    own: Option<u64>,
}

impl Forget<'_> {
    fn keep(mut self) -> Option<u64> {
        self.own.take()
    }
}

impl Drop for Forget<'_> {
    fn drop(&mut self) {
        if let Some(own) = self.own {
            let _ = self.bridge.state().routes.cancel(own);
        }
    }
}

/// A request and what comes back. Dropping it before the answer cancels the request.
pub struct Exchange {
    bridge: Bridge,
    own: Option<u64>,
    raw_id: String,
    receiver: mpsc::Receiver<Item>,
    within: Duration,
    deadline: tokio::time::Instant,
}

impl Exchange {
    /// The next thing that comes; none after the answer. A time-out is an answer too, and cancels the request; progress
    /// gives it its time again.
    pub async fn next(&mut self) -> Option<Item> {
        let item = match tokio::time::timeout_at(self.deadline, self.receiver.recv()).await {
            Ok(item) => item?,
            Err(_) => {
                let own = self.own.take()?;
                self.bridge.cancel(own);
                let message = format!(
                    "the MCP server has not answered within {} ms; the request was cancelled",
                    self.within.as_millis()
                );
                return Some(Item::Answer(error_line(&self.raw_id, codes::TIMED_OUT, &message)));
            }
        };
        match &item {
            Item::Progress(_) => self.deadline = tokio::time::Instant::now() + self.within,
            Item::Answer(_) | Item::Cancelled => self.own = None,
            Item::Message(_) => {}
        }
        Some(item)
    }
}

impl Drop for Exchange {
    fn drop(&mut self) {
        if let Some(own) = self.own.take() {
            self.bridge.cancel(own);
        }
    }
}

fn take_line(routes: &mut Routes, role: Role, line: &[u8]) -> Taken {
    let Ok(text) = std::str::from_utf8(line) else {
        return Taken::Dropped("a line that is not UTF-8");
    };
    match Message::parse(text) {
        Ok(message) => routes.take(&message, role),
        Err(BadMessage::NotJson) => Taken::Dropped("a line that is not JSON"),
        Err(BadMessage::NotRpc) => Taken::Dropped("JSON that is no message"),
    }
}

/// A line that is too long was somebody's answer: who waits for it is told, if it can be seen who does.
fn fail_long(routes: &mut Routes, head: &[u8], tail: &[u8], bytes: u64) -> Taken {
    let number_after = |text: &str| -> Option<u64> {
        let rest = text.rsplit_once("\"id\":").map(|(_, rest)| rest.trim_start())?;
        rest[..rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len())].parse().ok()
    };
    // The id comes before the result, or after it; what is in between is the server's to choose.
    let (head, tail) = (String::from_utf8_lossy(head), String::from_utf8_lossy(tail));
    let before = head.split_once("\"result\"").map(|(before, _)| before).unwrap_or_default();
    let after = tail.rsplit_once('}').map(|_| tail.rsplit_once("},").map_or("", |(_, after)| after));
    let own = number_after(before).or_else(|| number_after(after.unwrap_or_default()));
    let message = format!("the answer has {bytes} bytes, more than the {MAX_LINE_BYTES} that are taken");
    match own {
        Some(own) if routes.fail(own, codes::INTERNAL_ERROR, &message) => Taken::Routed,
        _ => Taken::Dropped("a line that is too long"),
    }
}

fn read_initialized(answer: &str) -> Result<Initialized, BridgeError> {
    let members =
        Members::of(answer).ok_or_else(|| BridgeError::Refused("its answer can't be read".to_owned()))?;
    if let Some(error) = members.get("error") {
        let message = Members::of(error).and_then(|error| error.text("message"));
        return Err(BridgeError::Refused(message.unwrap_or_else(|| error.to_owned())));
    }
    let result = members.get("result").unwrap_or("null");
    let version = Members::of(result).and_then(|result| result.text("protocolVersion"));
    let protocol_version =
        version.ok_or_else(|| BridgeError::Refused("its answer names no protocol version".to_owned()))?;
    let result =
        RawValue::from_string(result.to_owned()).map_err(|error| BridgeError::Refused(error.to_string()))?;
    Ok(Initialized { result: result.into(), protocol_version })
}

/// A new process may offer other things than the one before it.
fn tell_of_changes(routes: &Routes, result: &str) {
    let capabilities = Members::of(result).and_then(|result| Members::of(result.get("capabilities")?));
    for kind in ["tools", "resources", "prompts"] {
        let declared = capabilities.as_ref().and_then(|all| Members::of(all.get(kind)?));
        if declared.is_some_and(|declared| declared.get("listChanged") == Some("true")) {
            let line = format!("{{\"jsonrpc\":\"2.0\",\"method\":\"notifications/{kind}/list_changed\"}}");
            routes.tell_all(&line);
        }
    }
}
