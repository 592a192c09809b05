//! Sessions of clients that speak the legacy era (those with `initialize`).
//!
//! A session outlives its connections: what a client has asked goes on when it is cut off, and the client can come back
//! for the rest. It ends when its client says so, after a time without use, or with its server.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use emergent_mcp_bridge::{Bridge, ClientId, Exchange, Item};

use super::events::EventLog;
use super::side::EndOnDrop;

/// A session that is not used for so long is ended …
const IDLE_TIME: Duration = Duration::from_secs(30 * 60);
/// … and one that has a process of its own earlier.
const IDLE_TIME_WITH_PROCESS: Duration = Duration::from_secs(10 * 60);
/// How long the end of an answer is kept for a client that lost its connection.
const KEEP_ANSWERS: Duration = Duration::from_secs(60);
/// Answers that are kept at most.
const MAX_KEPT: usize = 16;

/// The stream that belongs to no request.
pub(crate) const STANDALONE: u64 = 0;

/// A session.
pub(crate) struct Session {
    pub(crate) id: String,
    pub(crate) bridge: Bridge,
    pub(crate) client: ClientId,
    streams: Mutex<HashMap<u64, Arc<EventLog>>>,
    newest: AtomicU64,
    used: Mutex<Instant>,
    /// What works for it: hands messages on, and runs its process.
    tasks: Mutex<Vec<EndOnDrop>>,
    has_process: bool,
}

impl Session {
    /// A client of a bridge that has just been initialized.
    pub(crate) fn open(bridge: Bridge, has_process: bool) -> Arc<Self> {
        let (client, mut told) = bridge.join();
        let standalone = Arc::new(EventLog::default());
        let session = Arc::new(Self {
            id: uuid::Uuid::new_v4().to_string(),
            bridge,
            client,
            streams: Mutex::new(HashMap::from([(STANDALONE, Arc::clone(&standalone))])),
            newest: AtomicU64::new(STANDALONE),
            used: Mutex::new(Instant::now()),
            tasks: Mutex::default(),
            has_process,
        });
        let hand_on = tokio::spawn(async move {
            while let Some(message) = told.recv().await {
                standalone.push(&message);
            }
            standalone.end();
        });
        session.works(EndOnDrop(hand_on.abort_handle()));
        session
    }

    fn streams(&self) -> MutexGuard<'_, HashMap<u64, Arc<EventLog>>> {
        self.streams.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A task that ends with the session.
    pub(super) fn works(&self, task: EndOnDrop) {
        self.tasks.lock().unwrap_or_else(PoisonError::into_inner).push(task);
    }

    /// It is used.
    pub(crate) fn touch(&self) {
        *self.used.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
    }

    /// How long it was not used.
    pub(crate) fn idle(&self) -> Duration {
        self.used.lock().unwrap_or_else(PoisonError::into_inner).elapsed()
    }

    /// Whether nobody has used it for too long, or its process has ended. Who waits for an answer uses it.
    pub(crate) fn is_forgotten(&self) -> bool {
        if self.has_process && !self.bridge.is_open() {
            return true;
        }
        let most = if self.has_process { IDLE_TIME_WITH_PROCESS } else { IDLE_TIME };
        self.idle() > most && !self.bridge.waits(self.client)
    }

    /// Ends it, whoever still holds it: its streams, what it has asked for, its process.
    fn close(&self) {
        self.bridge.leave(self.client);
        if self.has_process {
            self.bridge.close("the session has ended", false);
        }
        self.tasks.lock().unwrap_or_else(PoisonError::into_inner).clear();
        for log in self.streams().values() {
            log.end();
        }
    }

    /// One of its streams.
    pub(crate) fn stream(&self, number: u64) -> Option<Arc<EventLog>> {
        self.streams().get(&number).cloned()
    }

    /// Lets what comes back for a request go on by itself, beginning with this item. Gives the stream it goes to.
    pub(crate) fn pump(self: &Arc<Self>, first: Item, mut exchange: Exchange) -> (u64, Arc<EventLog>) {
        let number = self.newest.fetch_add(1, Ordering::Relaxed) + 1;
        let log = Arc::new(EventLog::default());
        {
            let mut streams = self.streams();
            let ended = streams.iter().filter(|(_, log)| log.is_ended()).map(|(number, _)| *number);
            let mut ended: Vec<u64> = ended.collect();
            ended.sort_unstable();
            for old in &ended[..ended.len().saturating_sub(MAX_KEPT)] {
                streams.remove(old);
            }
            streams.insert(number, Arc::clone(&log));
        }
        let (session, pumped) = (Arc::downgrade(self), Arc::clone(&log));
        tokio::spawn(async move {
            let mut next = Some(first);
            while let Some(item) = next {
                match item {
                    Item::Message(line) | Item::Progress(line) => pumped.push(&line),
                    Item::Answer(line) => {
                        pumped.push(&line);
                        break;
                    }
                    Item::Cancelled => break,
                }
                next = exchange.next().await;
            }
            pumped.end();
            // A client that was cut off may come back for it: what was sent need not have arrived.
            tokio::time::sleep(KEEP_ANSWERS).await;
            if let Some(session) = session.upgrade() {
                session.streams().remove(&number);
            }
        });
        (number, log)
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.close();
    }
}

/// The sessions of one server.
#[derive(Default)]
pub(crate) struct Sessions {
    open: Mutex<HashMap<String, Arc<Session>>>,
}

/// There are too many sessions.
pub(crate) struct TooMany;

impl Sessions {
    fn open(&self) -> MutexGuard<'_, HashMap<String, Arc<Session>>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A session that is open.
    pub(crate) fn get(&self, id: &str) -> Option<Arc<Session>> {
        let session = self.open().get(id).cloned()?;
        if session.is_forgotten() {
            self.end(id);
            return None;
        }
        session.touch();
        Some(session)
    }

    /// Makes room for one more, if there are fewer than this; the one that was not used for longest goes first, if
    /// nobody has used it for a while.
    pub(crate) fn make_room(&self, most: usize) -> Result<(), TooMany> {
        const A_WHILE: Duration = Duration::from_secs(60);
        self.sweep();
        let mut open = self.open();
        let mut idlest = None;
        if open.len() >= most {
            let unused = open.values().filter(|session| !session.bridge.waits(session.client));
            let found = unused.max_by_key(|session| session.idle()).filter(|found| found.idle() > A_WHILE);
            idlest = found.map(|found| found.id.clone()).and_then(|id| open.remove(&id));
        }
        let is_room = open.len() < most;
        drop(open);
        if let Some(session) = idlest {
            session.close();
        }
        if is_room { Ok(()) } else { Err(TooMany) }
    }

    /// Adds a session.
    pub(crate) fn add(&self, session: &Arc<Session>) {
        self.open().insert(session.id.clone(), Arc::clone(session));
    }

    /// Ends a session. False when there is none.
    pub(crate) fn end(&self, id: &str) -> bool {
        let ended = self.open().remove(id);
        ended.is_some_and(|session| {
            session.close();
            true
        })
    }

    /// Ends those that nobody has used for too long.
    pub(crate) fn sweep(&self) {
        let gone: Vec<_> =
            self.open().extract_if(|_, session| session.is_forgotten()).map(|(_, session)| session).collect();
        gone.iter().for_each(|session| session.close());
    }

    /// Ends all.
    pub(crate) fn end_all(&self) {
        let gone = std::mem::take(&mut *self.open());
        gone.values().for_each(|session| session.close());
    }

    /// Requests without an answer to processes of the sessions' own.
    pub(crate) fn pending(&self) -> usize {
        let open = self.open();
        let own = open.values().filter(|session| session.has_process);
        own.map(|session| session.bridge.load().0).sum()
    }

    pub(crate) fn count(&self) -> usize {
        self.open().len()
    }
}
