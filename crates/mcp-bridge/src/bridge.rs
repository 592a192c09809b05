//! The bridge itself: one writer, one reader, any number of clients.
//!
//! ```text
//! down ──open──▶ starting ──initialize answered──▶ ready ──close──▶ down ──open──▶ …
//! ```
//! A bridge outlives its process: clients stay joined while the next process is started. The bridge initializes it and renews the
//! clients' subscriptions.

use std::sync::Arc;
use std::time::{Duration, Instant};

use emergent_mcp_protocol::envelope::{Message, request_line};
use emergent_mcp_protocol::methods;
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::{Semaphore, mpsc, watch};

use crate::error::{BridgeError, Down};
use crate::exchange::{Exchange, ForgetOnDrop};
use crate::incoming;
use crate::initialize::Initialized;
use crate::limits::{CLIENT_QUEUE, MAX_LINE_BYTES, MAX_PENDING, MAX_QUEUED, MAX_QUEUED_BYTES};
use crate::lines::Lines;
use crate::outgoing::{Outgoing, Queued};
use crate::routes::{ClientId, Item, Role, Routes, Sent, Taken};

/// The phase of a bridge.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Phase {
    /// There is no process.
    Down {
        /// The reason.
        why: Down,
        /// Whether the next process is about to start.
        is_brief: bool,
    },
    /// A process is being started.
    Starting,
    /// The process takes requests.
    Ready,
}

pub(crate) struct State {
    pub(crate) routes: Routes,
    writer: Option<mpsc::Sender<Queued>>,
    pub(crate) initialized: Option<Initialized>,
    lines: Lines,
    /// The time of the last output.
    last_output: Instant,
    /// Lines that were ignored.
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
            last_output: Instant::now(),
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

    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock()
    }

    /// Whether there is a process, or will be in a moment.
    pub fn is_open(&self) -> bool {
        !matches!(&*self.0.phase.borrow(), Phase::Down { is_brief: false, .. })
    }

    /// The current phase.
    pub fn phase(&self) -> Phase {
        self.0.phase.borrow().clone()
    }

    /// The result of the bridge's last `initialize`.
    pub fn initialized(&self) -> Option<Initialized> {
        self.state().initialized.clone()
    }

    /// The number of requests without an answer, and of clients that are joined.
    pub fn load(&self) -> (usize, usize) {
        let state = self.state();
        (state.routes.pending(), state.routes.clients())
    }

    /// The time since the last output of the process.
    pub fn silence(&self) -> Duration {
        self.state().last_output.elapsed()
    }

    /// Connects a process. Gives the lines that are to be written to it.
    pub fn open(&self) -> Outgoing {
        let (sender, receiver) = mpsc::channel(MAX_QUEUED);
        let mut state = self.state();
        state.writer = Some(sender);
        state.lines = Lines::new(MAX_LINE_BYTES);
        state.last_output = Instant::now();
        drop(state);
        self.0.phase.send_replace(Phase::Starting);
        Outgoing(receiver)
    }

    /// Disconnects the process, which is stopped or lost. All requests fail at once.
    pub fn close(&self, why: &str, is_brief: bool) {
        self.disconnect(why.into(), is_brief);
    }

    /// Disconnects a process that ended by itself. All requests fail at once.
    pub fn exited(&self, why: &str, is_brief: bool) {
        self.disconnect(Down { why: why.into(), has_exited: true }, is_brief);
    }

    fn disconnect(&self, why: Down, is_brief: bool) {
        let mut state = self.state();
        state.writer = None;
        state.routes.fail_all(&why);
        drop(state);
        self.0.phase.send_replace(Phase::Down { why, is_brief });
    }

    /// Lets clients in without `initialize`: the clients send it themselves, or the server needs none.
    pub fn let_in(&self) {
        self.set_phase(Phase::Ready);
    }

    pub(crate) fn set_phase(&self, phase: Phase) {
        self.0.phase.send_replace(phase);
    }

    /// Takes output of the process.
    pub fn receive(&self, bytes: &[u8]) {
        let mut replies = Vec::new();
        let mut state = self.state();
        state.last_output = Instant::now();
        let State { routes, lines, dropped, .. } = &mut *state;
        lines.take(bytes, |line| {
            match incoming::route(routes, self.0.role, &line) {
                Taken::Routed => {}
                Taken::Late => tracing::debug!(mcp_server = self.0.name, "a late answer is ignored"),
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
                // A process that does not read its input misses the answers to its own requests.
                let _ = writer.try_send(Queued { line, _room: None });
            }
        }
    }

    /// Adds a client that also receives messages outside its requests.
    pub fn join(&self) -> (ClientId, mpsc::Receiver<String>) {
        let (sender, receiver) = mpsc::channel(CLIENT_QUEUE);
        (self.state().routes.join(sender), receiver)
    }

    /// Adds a client that receives only answers to its requests. It can't subscribe, and needs not leave.
    pub fn visitor(&self) -> ClientId {
        self.state().routes.new_client()
    }

    /// Removes a client; its requests are cancelled.
    pub fn leave(&self, client: ClientId) {
        self.tell_process(|routes| routes.leave(client));
    }

    /// Waits until the process takes requests. Fails at once when no process is about to start.
    pub async fn ready(&self, within: Duration) -> Result<(), BridgeError> {
        let mut phase = self.0.phase.subscribe();
        let ready = async {
            loop {
                match &*phase.borrow_and_update() {
                    Phase::Ready => return Ok(()),
                    Phase::Down { why, is_brief: false } => return Err(BridgeError::Down(why.clone())),
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

    /// Sends a request. It has this time for its answer.
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
            Sent::DuplicateId => return Err(BridgeError::DuplicateId),
            Sent::Answered(line) => {
                let _ = sender.try_send(Item::Answer(line));
                None
            }
            Sent::Line(own, line) => {
                // A request that is dropped while it waits for room in the queue must not stay pending.
                let forget = ForgetOnDrop::new(self, own);
                self.queue(line).await?;
                forget.keep()
            }
        };
        Ok(Exchange::new(self.clone(), own, raw_id, receiver, within))
    }

    /// Sends a request of the bridge itself.
    pub(crate) async fn send(
        &self,
        client: ClientId,
        text: &str,
        within: Duration,
    ) -> Result<Exchange, BridgeError> {
        let message = Message::parse(text).map_err(|error| BridgeError::Refused(error.to_string()))?;
        self.request(client, &message, within).await
    }

    /// Whether the process answers a `ping` within this time. Any other output counts as an answer.
    pub async fn answers(&self, within: Duration) -> bool {
        let begun = Instant::now();
        let client = self.visitor();
        let ping = request_line(0, methods::PING, None);
        let Ok(mut exchange) = self.send(client, &ping, within).await else {
            return false;
        };
        let _ = exchange.next().await;
        self.state().last_output > begun
    }

    /// Sends a client's notification to the process.
    pub async fn notify(&self, client: ClientId, message: &Message<'_>) -> Result<(), BridgeError> {
        let lines = self.state().routes.notification(client, message, self.0.role);
        for line in lines {
            self.queue(line).await?;
        }
        Ok(())
    }

    /// Sends a client's answer to a request of the process. False when the process has sent no such request.
    pub async fn answer(&self, message: &Message<'_>) -> Result<bool, BridgeError> {
        let line = self.state().routes.answer(message);
        match line {
            Some(line) => self.queue(line).await.map(|()| true),
            None => Ok(false),
        }
    }

    /// Puts a line into the queue of the process, when there is room.
    pub(crate) async fn queue(&self, line: String) -> Result<(), BridgeError> {
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

    /// Cancels a request and tells the process.
    pub(crate) fn cancel(&self, own: u64) {
        self.tell_process(|routes| routes.cancel(own));
    }

    /// Puts lines into the queue of the process as far as there is room.
    fn tell_process(&self, lines: impl FnOnce(&mut Routes) -> Vec<String>) {
        let mut state = self.state();
        let lines = lines(&mut state.routes);
        let Some(writer) = state.writer.clone() else { return };
        drop(state);
        for line in lines {
            let _ = writer.try_send(Queued { line, _room: None });
        }
    }

    /// Removes a request that the process has not seen.
    pub(crate) fn forget(&self, own: u64) {
        let _ = self.state().routes.cancel(own);
    }
}
