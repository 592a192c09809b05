//! A session of a client of the legacy era.
//!
//! ```text
//!  initialize ──▶ idle ◀──▶ in use (a request is in progress, or a stream is open)
//!                  │
//!                  ├─ idle for too long ──────────────────────────────┐
//!                  ├─ longest idle when another session needs its place ─┼─▶ ended: its requests are cancelled, its streams
//!  any state ──────┴─ DELETE, end of the server or of its peer ───────┘    end, its id is unknown (404)
//! ```
//!
//! A session outlives its connections: a request continues when its client loses the connection, and the client can come back
//! for the rest of the stream.

use std::collections::HashMap;
use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use emergent_mcp_protocol::codes;
use emergent_mcp_protocol::envelope::error_line;
use parking_lot::Mutex;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::Instrument as _;

use crate::event_log::EventLog;
use crate::peer::{Caller, Exchange, Item, Peer};

/// The time for which the stream of an answered request is kept for a client that lost its connection.
const KEEP_ANSWERS: Duration = Duration::from_secs(60);
/// Streams of answered requests that are kept at most.
const MAX_KEPT: usize = 16;
/// The number of the stream that belongs to no request.
pub(crate) const STANDALONE: u64 = 0;
/// The error for a request whose server ended.
pub(crate) const LOST: &str = "the MCP server ended before it answered";

/// A session.
pub(crate) struct Session<C: Caller> {
    pub(crate) id: String,
    pub(crate) peer: Arc<dyn Peer<C>>,
    /// Whether its client accepts events without a message.
    pub(crate) accepts_empty_events: bool,
    streams: Mutex<Streams>,
    uses: Mutex<Uses>,
    ended: CancellationToken,
}

struct Streams {
    logs: HashMap<u64, Arc<EventLog>>,
    newest: u64,
}

/// The uses of a session at this moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Uses {
    pub(crate) requests: usize,
    pub(crate) streams: usize,
    /// The time at which the last use began or ended.
    pub(crate) last: Instant,
}

/// The kind of a use.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Use {
    Request,
    Stream,
}

impl<C: Caller> Session<C> {
    /// Begins a session. `notifications` go to the stream that belongs to no request.
    pub(crate) fn begin(
        id: String,
        peer: Arc<dyn Peer<C>>,
        notifications: Option<mpsc::Receiver<String>>,
        accepts_empty_events: bool,
    ) -> Arc<Self> {
        let standalone = Arc::new(EventLog::default());
        let ended = CancellationToken::new();
        if let Some(notifications) = notifications {
            let collect = collect(notifications, Arc::clone(&standalone), ended.clone());
            tokio::spawn(collect.in_current_span());
        }
        let logs = HashMap::from([(STANDALONE, standalone)]);
        Arc::new(Self {
            id,
            peer,
            accepts_empty_events,
            streams: Mutex::new(Streams { logs, newest: STANDALONE }),
            uses: Mutex::new(Uses { requests: 0, streams: 0, last: Instant::now() }),
            ended,
        })
    }

    pub(crate) fn uses(&self) -> Uses {
        *self.uses.lock()
    }

    /// Notes a use that lasts as long as the returned value.
    pub(crate) fn begin_use(self: &Arc<Self>, by: Use) -> InUse<C> {
        let mut uses = self.uses.lock();
        *uses.count(by) += 1;
        uses.last = Instant::now();
        drop(uses);
        InUse { session: Arc::clone(self), by }
    }

    /// Whether the session can be ended: its peer is closed, or nothing has used it for this time.
    pub(crate) fn is_over(&self, idle: Duration) -> bool {
        let is_idle = self.uses().idle_for().is_some_and(|time| time >= idle);
        is_idle || self.ended.is_cancelled() || self.peer.is_closed()
    }

    /// Is cancelled when the session ends.
    pub(crate) fn ended(&self) -> &CancellationToken {
        &self.ended
    }

    /// Ends the session, whoever still holds it.
    pub(crate) fn close(&self) {
        self.ended.cancel();
        self.peer.close();
        for log in self.streams.lock().logs.values() {
            log.end();
        }
    }

    /// The id of an event. It holds a part of the session's id, so that an event of another session is recognised.
    pub(crate) fn event_id(&self, stream: u64, event: u64) -> String {
        format!("{}-{stream}-{event}", self.event_prefix())
    }

    fn event_prefix(&self) -> &str {
        self.id.split('-').next().unwrap_or_default()
    }

    /// Stream and number of an event of this session.
    pub(crate) fn parse_event_id(&self, id: &str) -> Option<(u64, u64)> {
        let rest = id.strip_prefix(self.event_prefix())?.strip_prefix('-')?;
        let (stream, event) = rest.split_once('-')?;
        Some((stream.parse().ok()?, event.parse().ok()?))
    }

    /// A stream that is still kept.
    pub(crate) fn stream(&self, number: u64) -> Option<Arc<EventLog>> {
        self.streams.lock().logs.get(&number).cloned()
    }

    /// Adds a stream. The oldest streams of answered requests make room.
    fn add_stream(&self) -> (u64, Arc<EventLog>) {
        let log = Arc::new(EventLog::default());
        let mut streams = self.streams.lock();
        streams.newest += 1;
        let number = streams.newest;
        let ended = streams.logs.iter().filter(|(_, log)| log.is_ended()).map(|(number, _)| *number);
        let mut ended: Vec<u64> = ended.collect();
        ended.sort_unstable();
        for old in &ended[..ended.len().saturating_sub(MAX_KEPT)] {
            streams.logs.remove(old);
        }
        streams.logs.insert(number, Arc::clone(&log));
        (number, log)
    }
}

impl<C: Caller> Drop for Session<C> {
    fn drop(&mut self) {
        self.close();
    }
}

/// Collects notifications for the stream that belongs to no request.
async fn collect(mut from: mpsc::Receiver<String>, to: Arc<EventLog>, ended: CancellationToken) {
    while let Some(Some(message)) = ended.run_until_cancelled(from.recv()).await {
        to.push(&message);
    }
    to.end();
}

impl Uses {
    /// The time since the last use; none while a request is in progress. An open stream is a use at every moment.
    pub(crate) fn idle_for(&self) -> Option<Duration> {
        let time = if self.streams > 0 { Duration::ZERO } else { self.last.elapsed() };
        (self.requests == 0).then_some(time)
    }

    fn count(&mut self, by: Use) -> &mut usize {
        match by {
            Use::Request => &mut self.requests,
            Use::Stream => &mut self.streams,
        }
    }
}

/// A session is in use as long as this lives.
pub(crate) struct InUse<C: Caller> {
    session: Arc<Session<C>>,
    by: Use,
}

impl<C: Caller> InUse<C> {
    pub(crate) fn session(&self) -> &Arc<Session<C>> {
        &self.session
    }
}

impl<C: Caller> Deref for InUse<C> {
    type Target = Session<C>;

    fn deref(&self) -> &Session<C> {
        &self.session
    }
}

impl<C: Caller> Drop for InUse<C> {
    fn drop(&mut self) {
        let mut uses = self.session.uses.lock();
        *uses.count(self.by) -= 1;
        uses.last = Instant::now();
    }
}

/// A request of a session. When it is dropped without its answer it continues in the background, because a lost connection is
/// not a cancellation in this era.
pub(crate) struct RunningRequest<C: Caller> {
    /// None once the answer is there or the background task has taken over.
    exchange: Option<(Box<dyn Exchange>, InUse<C>)>,
    raw_id: String,
}

impl<C: Caller> RunningRequest<C> {
    pub(crate) fn new(exchange: Box<dyn Exchange>, session: InUse<C>, raw_id: &str) -> Self {
        Self { exchange: Some((exchange, session)), raw_id: raw_id.to_owned() }
    }

    /// The next item; none when the server or the session ended.
    pub(crate) async fn next(&mut self) -> Option<Item> {
        let (exchange, session) = self.exchange.as_mut()?;
        let item = session.ended().run_until_cancelled(exchange.next()).await.flatten();
        if !matches!(item, Some(Item::Message(_))) {
            self.exchange = None;
        }
        item
    }

    /// Moves the rest of the request to a background task, which fills a stream. Gives the number of the stream.
    pub(crate) fn continue_in_background(mut self, first: Option<Item>) -> Option<(u64, Arc<EventLog>)> {
        let (exchange, session) = self.exchange.take()?;
        let (number, log) = session.add_stream();
        let raw_id = std::mem::take(&mut self.raw_id);
        let filled = fill(first, exchange, session, raw_id, number, Arc::clone(&log));
        tokio::spawn(filled.in_current_span());
        Some((number, log))
    }
}

impl<C: Caller> Drop for RunningRequest<C> {
    fn drop(&mut self) {
        let Some((exchange, session)) = self.exchange.take() else { return };
        // Without a runtime the server ends, and its requests with it.
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        // No client has an id of an event of this request, so nobody can come back for its answer.
        runtime.spawn(discard(exchange, session).in_current_span());
    }
}

/// Waits for the end of a request without a client.
async fn discard<C: Caller>(mut exchange: Box<dyn Exchange>, session: InUse<C>) {
    let ended = session.ended().clone();
    while ended.run_until_cancelled(exchange.next()).await.flatten().is_some() {}
}

/// Fills a stream until the request is answered or the session ends, and keeps it for a while.
async fn fill<C: Caller>(
    mut first: Option<Item>,
    mut exchange: Box<dyn Exchange>,
    in_use: InUse<C>,
    raw_id: String,
    number: u64,
    log: Arc<EventLog>,
) {
    let ended = in_use.ended().clone();
    loop {
        let item = match first.take() {
            Some(item) => Some(item),
            None => match ended.run_until_cancelled(exchange.next()).await {
                Some(item) => item,
                None => break,
            },
        };
        match item {
            Some(Item::Message(line)) => log.push(&line),
            Some(Item::Answer(line)) => {
                log.push(&line);
                break;
            }
            Some(Item::Cancelled) => break,
            None => {
                if !ended.is_cancelled() {
                    log.push(&error_line(&raw_id, codes::SERVER_GONE, LOST));
                }
                break;
            }
        }
    }
    log.end();
    drop(exchange);
    let session = Arc::downgrade(in_use.session());
    drop(in_use);
    // A message that was sent need not have arrived: the client may come back for it.
    if ended.run_until_cancelled(tokio::time::sleep(KEEP_ANSWERS)).await.is_some()
        && let Some(session) = session.upgrade()
    {
        session.streams.lock().logs.remove(&number);
    }
}
