//! The MCP server of one workspace.

use std::collections::HashSet;
use std::fmt;
use std::fmt::Display;
use std::sync::Arc;

use async_trait::async_trait;
use emergent_mcp_http::{
    Caller, Endpoint, Initialized, Limits, Peer, PeerError, Refusal, ResponseBody, Server,
};
use emergent_mcp_protocol::envelope::{Message, error_line, result_line};
use emergent_mcp_protocol::{codes, meta, version};
use http::{Request, Response};
use http_body::Body;
use serde_json::{Value, json};
use tokio::sync::Semaphore;
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::Tools;
use crate::peer::{Era, WorkspacePeer};

/// The server's name.
const NAME: &str = "emergent-workspace";
/// Instructions for a model: the workspace as a whole.
const INSTRUCTIONS: &str = "\
These tools work in one workspace: an isolated Linux machine with a disk of its own. Files live under /workspace, where \
relative paths start and where they stay from call to call; commands can change everything there and nothing outside. \
Use read, write, edit, glob and grep for files, git for repositories, and bash for all else: building, testing, \
installing, running programs. Output and answers are bounded; whatever was cut says so and says how to get the rest.";

/// The limits of one workspace's server.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// The limits of its HTTP side.
    pub http: Limits,
    /// Calls at once.
    pub calls: usize,
}

impl Default for Config {
    fn default() -> Self {
        // As many calls as a sandbox takes.
        Self { http: Limits::default(), calls: 64 }
    }
}

/// The tools and limits that all peers of a server share.
pub(crate) struct Shared<C> {
    pub(crate) tools: Arc<dyn Tools<C>>,
    /// One permit for each call that may run.
    pub(crate) calls: Semaphore,
    /// Is cancelled when the server is dropped.
    pub(crate) ended: CancellationToken,
}

/// The MCP server of one workspace, with its sessions. Dropping it ends the sessions and cancels the calls.
pub struct WorkspaceMcp<C: Caller> {
    endpoint: Endpoint<C>,
    handler: Handler<C>,
    max_calls: usize,
    _ended: DropGuard,
}

impl<C: Caller> WorkspaceMcp<C> {
    /// A server for a workspace's tools. Needs a Tokio runtime when it is used.
    pub fn new(tools: Arc<dyn Tools<C>>, config: Config) -> Self {
        let ended = CancellationToken::new();
        let calls = Semaphore::new(config.calls);
        let shared = Arc::new(Shared { tools, calls, ended: ended.clone() });
        let stateless = Arc::new(WorkspacePeer::new(Arc::clone(&shared), Era::Modern));
        Self {
            endpoint: Endpoint::new(config.http),
            handler: Handler { shared, stateless },
            max_calls: config.calls,
            _ended: ended.drop_guard(),
        }
    }

    /// Answers a request of an authenticated caller. See [`Endpoint::handle`].
    pub async fn handle<B>(&self, caller: &C, request: Request<B>) -> Result<Response<ResponseBody>, Refusal>
    where
        B: Body + Send,
        B::Data: Send,
        B::Error: Into<Box<dyn std::error::Error + Send + Sync>> + Display,
    {
        self.endpoint.handle(&self.handler, caller, request).await
    }

    /// Ends the sessions that were idle for too long.
    pub fn sweep(&self) {
        self.endpoint.sweep();
    }

    /// Ends the sessions of an owner. See [`Endpoint::end_of_owner`].
    pub fn end_of_owner(&self, owner: &C::Owner) {
        self.endpoint.end_of_owner(owner);
    }

    /// The owners that have sessions.
    pub fn owners(&self) -> HashSet<C::Owner> {
        self.endpoint.owners()
    }

    /// Whether there is neither a session nor a call, so that dropping the server affects no client.
    pub fn is_idle(&self) -> bool {
        self.endpoint.session_count() == 0 && self.handler.shared.calls.available_permits() == self.max_calls
    }
}

impl<C: Caller> fmt::Debug for WorkspaceMcp<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sessions = self.endpoint.session_count();
        f.debug_struct("WorkspaceMcp").field("sessions", &sessions).finish_non_exhaustive()
    }
}

/// The server behind the HTTP stack.
struct Handler<C> {
    shared: Arc<Shared<C>>,
    stateless: Arc<WorkspacePeer<C>>,
}

#[async_trait]
impl<C: Caller> Server<C> for Handler<C> {
    async fn initialize(&self, message: &Message<'_>, _: &C) -> Result<Initialized<C>, PeerError> {
        let id = message.raw_id().unwrap_or("null");
        match initialize_result(message) {
            Some(result) => {
                let peer = Arc::new(WorkspacePeer::new(Arc::clone(&self.shared), Era::Legacy));
                let answer = result_line(id, &result.to_string());
                Ok(Initialized::Session { answer, peer, notifications: None })
            }
            None => {
                let text = "initialize needs `protocolVersion`, a text";
                Ok(Initialized::Refused(error_line(id, codes::INVALID_PARAMS, text)))
            }
        }
    }

    async fn stateless(&self) -> Result<Option<Arc<dyn Peer<C>>>, PeerError> {
        Ok(Some(Arc::clone(&self.stateless) as Arc<dyn Peer<C>>))
    }
}

/// The result of `initialize`; none when the client names no version.
pub(crate) fn initialize_result(message: &Message<'_>) -> Option<Value> {
    let wanted: String = serde_json::from_str(message.param("protocolVersion")?).ok()?;
    // A client that wants another version decides by the answer whether it can continue.
    let agreed = version::LEGACY.iter().find(|known| **known == wanted).unwrap_or(&version::NEWEST_LEGACY);
    Some(json!({
        "protocolVersion": agreed,
        "capabilities": { "tools": {} },
        "serverInfo": server_info(),
        "instructions": INSTRUCTIONS,
    }))
}

/// The result of `server/discover`.
pub(crate) fn discover_result() -> Value {
    json!({
        "supportedVersions": version::ALL,
        "capabilities": { "tools": {} },
        "instructions": INSTRUCTIONS,
        "_meta": { meta::SERVER_INFO: server_info() },
    })
}

fn server_info() -> Value {
    json!({ "name": NAME, "title": "Emergent workspace", "version": env!("CARGO_PKG_VERSION") })
}
