//! Hosted servers on stdio as servers of the HTTP stack, and bridges as its peers.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use emergent_mcp_bridge::{Bridge, BridgeError, ClientId, Role};
use emergent_mcp_http::{Exchange, Initialized, Item, Limits, Peer, PeerError, Server};
use emergent_mcp_protocol::envelope::{Members, Message, result_line};
use emergent_mcp_protocol::version;
use emergent_wire::TokenId;
use emergent_wire::mcp::McpMode;
use parking_lot::Mutex;
use tokio::sync::{Notify, mpsc};
use tokio_util::task::AbortOnDropHandle;

use super::McpHost;
use super::call::request_check_after_timeout;
use super::hosted::HostedServer;
use crate::caller::Caller;

/// The limit on sessions of a server whose clients share its process.
const MAX_SHARED_SESSIONS: usize = 1000;
/// The limit on sessions of a server with a process for each: those that its sandbox can run at once, and some that are ending.
const MAX_PROCESSES: usize = 40;
/// An idle session ends after this time.
const IDLE_TIME: Duration = Duration::from_secs(30 * 60);
/// An idle session with a process of its own ends after this time.
const IDLE_TIME_WITH_PROCESS: Duration = Duration::from_secs(10 * 60);
/// At the limit, a new session may replace one that was idle for this time.
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

/// A session belongs to the token that opened it.
impl emergent_mcp_http::Caller for Caller {
    type Owner = TokenId;

    fn owner(&self) -> TokenId {
        self.principal.token_id
    }
}

/// A server on stdio as the HTTP stack sees it.
pub(crate) struct StdioServer<'a> {
    pub(crate) host: &'a McpHost,
    pub(crate) server: &'a Arc<HostedServer>,
}

#[async_trait]
impl Server<Caller> for StdioServer<'_> {
    async fn initialize(&self, message: &Message<'_>, _: &Caller) -> Result<Initialized<Caller>, PeerError> {
        let server = self.server;
        server.bridge.ready(server.timeout()).await.map_err(|error| peer_error(&error))?;
        if !server.is_per_session() {
            let answer = shared_answer(server, message);
            let answer =
                answer.ok_or_else(|| unavailable("the MCP server ended before it was initialized"))?;
            return Ok(BridgePeer::join(server, server.bridge.clone(), None).into_session(answer));
        }
        let started = self.host.start_process(server, Role::Exclusive).await;
        let (bridge, process) = started.map_err(PeerError::failed)?;
        let joined = BridgePeer::join(server, bridge, Some(process));
        let peer = &joined.peer;
        let exchange = peer
            .bridge
            .request(peer.client, message, server.timeout())
            .await
            .map_err(|error| peer_error(&error))?;
        match answer_of(exchange).await? {
            answer if is_error(&answer) => Ok(Initialized::Refused(answer)),
            answer => Ok(joined.into_session(answer)),
        }
    }

    async fn stateless(&self) -> Result<Option<Arc<dyn Peer<Caller>>>, PeerError> {
        let modern = self.host.modern(self.server).await.map_err(PeerError::failed)?;
        let bridge = modern.bridge().cloned();
        let (timeout, check_requested) = (self.server.timeout(), Arc::clone(&self.server.check_requested));
        let peer = |bridge| StatelessPeer { bridge, timeout, check_requested };
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

/// The answer to a request. The items before it are dropped.
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

/// The answer to `initialize` of a client that shares the process: the bridge's own result.
fn shared_answer(server: &HostedServer, message: &Message<'_>) -> Option<String> {
    let initialized = server.bridge.initialized()?;
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

/// One client's session on a bridge. It must not hold the server, because the server holds the sessions.
struct BridgePeer {
    bridge: Bridge,
    client: ClientId,
    timeout: Duration,
    check_requested: Arc<Notify>,
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
    fn join(server: &Arc<HostedServer>, bridge: Bridge, process: Option<AbortOnDropHandle<()>>) -> Joined {
        let (client, notifications) = bridge.join();
        let has_process = process.is_some();
        let (timeout, check_requested) = (server.timeout(), Arc::clone(&server.check_requested));
        let process = Mutex::new(process);
        let peer = Self { bridge, client, timeout, check_requested, has_process, process };
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
        self.bridge.ready(self.timeout).await.map_err(|error| peer_error(&error))?;
        let sent = self.bridge.request(self.client, message, self.timeout).await;
        let exchange = sent.map_err(|error| peer_error(&error))?;
        tracing::debug!("the MCP server has the request");
        Ok(Box::new(BridgeExchange { exchange, check_requested: Arc::clone(&self.check_requested) }))
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
            self.process.lock().take();
        }
    }
}

/// The bridge of all clients of the modern era.
struct StatelessPeer {
    bridge: Bridge,
    timeout: Duration,
    check_requested: Arc<Notify>,
}

#[async_trait]
impl Peer<Caller> for StatelessPeer {
    async fn request(&self, message: &Message<'_>, _: &Caller) -> Result<Box<dyn Exchange>, PeerError> {
        let is_subscription = message.method.as_deref() == Some("subscriptions/listen");
        let time_limit = if is_subscription { SUBSCRIPTION_TIME } else { self.timeout };
        let sent = self.bridge.request(self.bridge.visitor(), message, time_limit).await;
        let exchange = sent.map_err(|error| peer_error(&error))?;
        tracing::debug!("the MCP server has the request");
        Ok(Box::new(BridgeExchange { exchange, check_requested: Arc::clone(&self.check_requested) }))
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
    check_requested: Arc<Notify>,
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
                request_check_after_timeout(&self.check_requested, &error);
                Item::Answer(line)
            }
            emergent_mcp_bridge::Item::Cancelled => Item::Cancelled,
        })
    }
}
