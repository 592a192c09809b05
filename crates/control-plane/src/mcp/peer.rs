//! Hosted servers behind the HTTP stack: bridges as its peers.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use emergent_mcp_bridge::{Bridge, BridgeError, ClientId, Role};
use emergent_mcp_http::{Exchange, Initialized, Item, Limits, Peer, PeerError, Server};
use emergent_mcp_protocol::envelope::{Members, Message, result_line};
use emergent_mcp_protocol::version;
use emergent_wire::TokenId;
use emergent_wire::mcp::McpMode;
use tokio::sync::{Notify, mpsc};
use tokio_util::task::AbortOnDropHandle;

use super::McpHost;
use super::front::note_failure;
use super::hosted::Hosted;
use crate::caller::Caller;

/// Sessions of a server whose clients share its process.
const MAX_SHARED_SESSIONS: usize = 1000;
/// Sessions of a server with a process for each: as many as its sandbox runs at once, and some that are ending.
const MAX_PROCESSES: usize = 40;
/// An idle session ends after this time,
const IDLE_TIME: Duration = Duration::from_secs(30 * 60);
/// and one with a process of its own earlier.
const IDLE_TIME_WITH_PROCESS: Duration = Duration::from_secs(10 * 60);
/// At the limit a new session may replace one that was idle for this time.
const REPLACEABLE_AFTER: Duration = Duration::from_secs(60);
/// A subscription lasts as long as its connection.
const SUBSCRIPTION_TIME: Duration = Duration::from_secs(365 * 24 * 3600);

/// The limits of the HTTP side of a server.
pub(super) fn limits(mode: McpMode) -> Limits {
    let (sessions, session_idle) = match mode {
        McpMode::Shared => (MAX_SHARED_SESSIONS, IDLE_TIME),
        McpMode::PerSession => (MAX_PROCESSES, IDLE_TIME_WITH_PROCESS),
    };
    Limits { sessions, session_idle, session_replaceable: REPLACEABLE_AFTER, ..Limits::default() }
}

/// A session belongs to the token that began it.
impl emergent_mcp_http::Caller for Caller {
    type Owner = TokenId;

    fn owner(&self) -> TokenId {
        self.principal.token_id
    }
}

/// A server on stdio, as the HTTP stack sees it.
pub(crate) struct HostedServer<'a> {
    pub(crate) host: &'a McpHost,
    pub(crate) hosted: &'a Arc<Hosted>,
}

#[async_trait]
impl Server<Caller> for HostedServer<'_> {
    async fn initialize(&self, message: &Message<'_>, _: &Caller) -> Result<Initialized<Caller>, PeerError> {
        let hosted = self.hosted;
        hosted.bridge.ready(hosted.timeout()).await.map_err(|error| peer_error(&error))?;
        if !hosted.is_per_session() {
            let answer = shared_answer(hosted, message);
            let answer =
                answer.ok_or_else(|| unavailable("the MCP server ended before it was initialized"))?;
            return Ok(BridgePeer::join(hosted, hosted.bridge.clone(), None).into_session(answer));
        }
        let started = self.host.start_side(hosted, Role::Exclusive).await;
        let (bridge, process) = started.map_err(|error| unavailable(&error.message))?;
        let joined = BridgePeer::join(hosted, bridge, Some(process));
        let peer = &joined.peer;
        let exchange = peer
            .bridge
            .request(peer.client, message, hosted.timeout())
            .await
            .map_err(|error| peer_error(&error))?;
        match answer_of(exchange).await? {
            answer if is_error(&answer) => Ok(Initialized::Refused(answer)),
            answer => Ok(joined.into_session(answer)),
        }
    }

    async fn stateless(&self) -> Result<Option<Arc<dyn Peer<Caller>>>, PeerError> {
        let modern = self.host.modern(self.hosted).await.map_err(|error| unavailable(&error.message))?;
        let bridge = modern.bridge().cloned();
        let (timeout, doubted) = (self.hosted.timeout(), Arc::clone(&self.hosted.doubted));
        let peer = |bridge| StatelessPeer { bridge, timeout, doubted };
        Ok(bridge.map(|bridge| Arc::new(peer(bridge)) as Arc<dyn Peer<Caller>>))
    }
}

fn unavailable(text: &str) -> PeerError {
    PeerError::Unavailable(text.to_owned())
}

fn peer_error(error: &BridgeError) -> PeerError {
    match error {
        BridgeError::DuplicateId => PeerError::DuplicateId,
        BridgeError::Busy => PeerError::Busy(error.to_string()),
        BridgeError::Down(_)
        | BridgeError::Refused(_)
        | BridgeError::TimedOut(_)
        | BridgeError::AnswerTooLong(_) => PeerError::Unavailable(error.to_string()),
    }
}

/// The answer to a request without the items before it.
async fn answer_of(mut exchange: emergent_mcp_bridge::Exchange) -> Result<String, PeerError> {
    while let Some(item) = exchange.next().await {
        match item {
            emergent_mcp_bridge::Item::Answer(line) => return Ok(line),
            emergent_mcp_bridge::Item::Failed { error, .. } => return Err(peer_error(&error)),
            _ => {}
        }
    }
    Err(unavailable("the MCP server ended before it was initialized"))
}

fn is_error(answer: &str) -> bool {
    Members::of(answer).is_some_and(|answer| answer.get("error").is_some())
}

/// The bridge's result of `initialize`, for one more client of a shared process.
fn shared_answer(hosted: &Hosted, message: &Message<'_>) -> Option<String> {
    let initialized = hosted.bridge.initialized()?;
    let wanted = message.param("protocolVersion").and_then(|raw| serde_json::from_str::<String>(raw).ok());
    // A later version of the legacy era only adds to an earlier one, so the client gets the one it asked for.
    let agreed = wanted
        .filter(|wanted| {
            version::LEGACY.contains(&wanted.as_str()) && *wanted <= initialized.protocol_version
        })
        .unwrap_or_else(|| initialized.protocol_version.clone());
    let agreed = serde_json::Value::from(agreed).to_string();
    let result = Members::of(initialized.result.get())?.with(&[("protocolVersion", &agreed)]);
    Some(result_line(message.raw_id()?, &result))
}

/// One client's session on a bridge. It does not hold its server, which holds the sessions.
struct BridgePeer {
    bridge: Bridge,
    client: ClientId,
    timeout: Duration,
    doubted: Arc<Notify>,
    has_process: bool,
    /// The task that follows the session's own process. The process ends with it.
    process: Mutex<Option<AbortOnDropHandle<()>>>,
}

/// A peer that has joined its bridge, and the messages for it.
struct Joined {
    peer: BridgePeer,
    notifications: mpsc::Receiver<String>,
}

impl BridgePeer {
    fn join(hosted: &Arc<Hosted>, bridge: Bridge, process: Option<AbortOnDropHandle<()>>) -> Joined {
        let (client, notifications) = bridge.join();
        let has_process = process.is_some();
        let (timeout, doubted) = (hosted.timeout(), Arc::clone(&hosted.doubted));
        let process = Mutex::new(process);
        let peer = Self { bridge, client, timeout, doubted, has_process, process };
        Joined { peer, notifications }
    }
}

impl Joined {
    fn into_session(self, answer: String) -> Initialized<Caller> {
        let Self { peer, notifications } = self;
        Initialized::Session { answer, peer: Arc::new(peer), notifications: Some(notifications) }
    }
}

#[async_trait]
impl Peer<Caller> for BridgePeer {
    async fn request(&self, message: &Message<'_>, _: &Caller) -> Result<Box<dyn Exchange>, PeerError> {
        let within = self.timeout;
        self.bridge.ready(within).await.map_err(|error| peer_error(&error))?;
        let exchange =
            self.bridge.request(self.client, message, within).await.map_err(|error| peer_error(&error))?;
        Ok(Box::new(BridgeExchange { exchange, doubted: Arc::clone(&self.doubted) }))
    }

    async fn notify(&self, message: &Message<'_>) {
        let _ = self.bridge.notify(self.client, message).await;
    }

    async fn answer(&self, message: &Message<'_>) {
        let _ = self.bridge.answer(message).await;
    }

    fn is_closed(&self) -> bool {
        self.has_process && !self.bridge.is_open()
    }

    fn close(&self) {
        self.bridge.leave(self.client);
        if self.has_process {
            self.bridge.close("the session has ended", false);
            self.process.lock().unwrap_or_else(PoisonError::into_inner).take();
        }
    }
}

/// The bridge of all clients of the modern era.
struct StatelessPeer {
    bridge: Bridge,
    timeout: Duration,
    doubted: Arc<Notify>,
}

#[async_trait]
impl Peer<Caller> for StatelessPeer {
    async fn request(&self, message: &Message<'_>, _: &Caller) -> Result<Box<dyn Exchange>, PeerError> {
        let is_subscription = message.method.as_deref() == Some("subscriptions/listen");
        let within = if is_subscription { SUBSCRIPTION_TIME } else { self.timeout };
        let client = self.bridge.visitor();
        let exchange =
            self.bridge.request(client, message, within).await.map_err(|error| peer_error(&error))?;
        Ok(Box::new(BridgeExchange { exchange, doubted: Arc::clone(&self.doubted) }))
    }

    async fn notify(&self, _: &Message<'_>) {}

    async fn answer(&self, _: &Message<'_>) {}

    fn is_closed(&self) -> bool {
        !self.bridge.is_open()
    }

    fn close(&self) {}
}

/// A request in progress on a bridge.
struct BridgeExchange {
    exchange: emergent_mcp_bridge::Exchange,
    doubted: Arc<Notify>,
}

#[async_trait]
impl Exchange for BridgeExchange {
    async fn next(&mut self) -> Option<Item> {
        Some(match self.exchange.next().await? {
            emergent_mcp_bridge::Item::Message(line) | emergent_mcp_bridge::Item::Progress(line) => {
                Item::Message(line)
            }
            emergent_mcp_bridge::Item::Answer(line) => Item::Answer(line),
            emergent_mcp_bridge::Item::Failed { error, line } => {
                note_failure(&self.doubted, &error);
                Item::Answer(line)
            }
            emergent_mcp_bridge::Item::Cancelled => Item::Cancelled,
        })
    }
}
