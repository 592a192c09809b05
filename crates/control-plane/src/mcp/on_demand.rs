//! Processes that are started on demand and never restarted: for each session or single call in the mode `per_session`, and one
//! for all clients of the modern era.

use std::sync::Arc;
use std::time::{Duration, Instant};

use emergent_mcp_bridge::{Bridge, BridgeError, Item, Role};
use emergent_mcp_protocol::envelope::{Members, Message};
use emergent_mcp_protocol::{meta, version};
use parking_lot::Mutex;
use tokio_util::task::AbortOnDropHandle;
use tracing::Instrument as _;

use super::McpHost;
use super::call::WAIT_FOR_START;
use super::error::{McpError, Result};
use super::hosted::HostedServer;
use super::process::Process;

/// The time that a server has to answer `server/discover`.
const DISCOVER_TIME: Duration = Duration::from_secs(15);
/// The process of the modern era ends when it was idle for this time.
const MODERN_IDLE_TIME: Duration = Duration::from_secs(10 * 60);
/// A server that did not answer `server/discover` counts as one of the legacy era for this time.
const SILENT_TIME: Duration = Duration::from_secs(60);

/// The result of asking a server whether it supports the modern era.
pub(super) struct ModernEra {
    support: ModernSupport,
    last_used: Mutex<Instant>,
}

enum ModernSupport {
    /// This process serves it.
    Yes { bridge: Bridge, _process: AbortOnDropHandle<()> },
    /// The server supports only the legacy era.
    No,
    /// The server did not answer, or was lost. It may be slow, or of the legacy era: many such servers answer nothing before
    /// `initialize`.
    Silent,
}

impl ModernEra {
    /// The bridge to the process of the modern era, if the server supports it.
    pub(super) fn bridge(&self) -> Option<&Bridge> {
        match &self.support {
            ModernSupport::Yes { bridge, .. } => Some(bridge),
            ModernSupport::No | ModernSupport::Silent => None,
        }
    }

    /// Whether the process has ended or is idle, or `server/discover` is due again.
    fn is_outdated(&self) -> bool {
        let idle = self.last_used.lock().elapsed();
        match &self.support {
            ModernSupport::Yes { bridge, .. } => {
                !bridge.is_open() || (idle > MODERN_IDLE_TIME && bridge.load().0 == 0)
            }
            ModernSupport::No => false,
            ModernSupport::Silent => idle > SILENT_TIME,
        }
    }
}

impl McpHost {
    /// Starts one more process of a server in its sandbox. It ends when the returned handle is dropped.
    pub(super) async fn start_process(
        &self,
        server: &Arc<HostedServer>,
        role: Role,
    ) -> Result<(Bridge, AbortOnDropHandle<()>)> {
        server.bridge.ready(WAIT_FOR_START).await.map_err(McpError::NotSent)?;
        let connection = self.workspaces.context.live(server.id).connection().ok_or(McpError::Starting)?;
        let program = server.program().ok_or(McpError::Starting)?;
        let bridge = Bridge::new(server.name.clone(), role);
        let process = Process::start(&connection.channel, &program, bridge.open()).await?;
        bridge.let_in();
        let (followed, server) = (bridge.clone(), Arc::clone(server));
        let span = server.span();
        let follow = async move {
            let end = process.follow(&server, Some(&followed)).await;
            let reason = end.reason();
            server.journal.note(format!("the process of a session: {reason}"));
            let why = format!("the MCP server has ended ({reason})");
            if end.is_exit() { followed.exited(&why, false) } else { followed.close(&why, false) }
        };
        Ok((bridge, AbortOnDropHandle::new(tokio::spawn(follow.instrument(span)))))
    }

    /// Starts and initializes a process for one call. It ends when the returned handle is dropped.
    pub(super) async fn start_for_call(
        &self,
        server: &Arc<HostedServer>,
    ) -> Result<(Bridge, AbortOnDropHandle<()>)> {
        let (bridge, task) = self.start_process(server, Role::Shared).await?;
        let initialized = bridge.initialize(env!("CARGO_PKG_VERSION"), server.timeout()).await;
        initialized.map_err(McpError::NotSent)?;
        Ok((bridge, task))
    }

    /// The server's support of the modern era. Clients of that era share a process, apart from other clients, because many servers
    /// choose their era by the first message.
    pub(super) async fn modern(&self, server: &Arc<HostedServer>) -> Result<Arc<ModernEra>> {
        let mut known = server.modern.lock().await;
        if let Some(modern) = known.as_ref().filter(|modern| !modern.is_outdated()) {
            if modern.bridge().is_some() {
                *modern.last_used.lock() = Instant::now();
            }
            return Ok(Arc::clone(modern));
        }
        let (bridge, task) = self.start_process(server, Role::Shared).await?;
        let support = match discover(&bridge).await {
            Some(true) => ModernSupport::Yes { bridge, _process: task },
            Some(false) => ModernSupport::No,
            None => ModernSupport::Silent,
        };
        let modern = Arc::new(ModernEra { support, last_used: Mutex::new(Instant::now()) });
        *known = Some(Arc::clone(&modern));
        Ok(modern)
    }

    /// Ends idle sessions and processes.
    pub(crate) async fn sweep_sessions(&self) {
        let all: Vec<Arc<HostedServer>> = self.servers.lock().values().cloned().collect();
        for server in all {
            server.endpoint.sweep();
            let mut modern = server.modern.lock().await;
            if modern.as_ref().is_some_and(|modern| modern.is_outdated()) {
                *modern = None;
            }
        }
    }
}

/// Whether a process answers `server/discover` and names the modern version. None when it does not answer.
async fn discover(bridge: &Bridge) -> Option<bool> {
    let text = format!(
        "{{\"jsonrpc\":\"2.0\",\"id\":0,\"method\":\"server/discover\",\"params\":{{\"_meta\":{{\
         \"{}\":\"{}\",\"{}\":{{\"name\":\"emergent\",\"version\":\"{}\"}},\"{}\":{{}}}}}}}}",
        meta::PROTOCOL_VERSION,
        version::MODERN,
        meta::CLIENT_INFO,
        env!("CARGO_PKG_VERSION"),
        meta::CLIENT_CAPABILITIES,
    );
    let message = Message::parse(&text).ok()?;
    let mut exchange = bridge.request(bridge.visitor(), &message, DISCOVER_TIME).await.ok()?;
    let line = loop {
        match exchange.next().await? {
            Item::Answer(line) => break line,
            Item::Failed { error: BridgeError::TimedOut(_), .. } => return None,
            // A process that was lost or killed says nothing about the server.
            Item::Failed { error: BridgeError::Down(down), .. } if !down.has_exited => return None,
            // A process that exits without `initialize` is one of the legacy era.
            Item::Failed { .. } => return Some(false),
            _ => {}
        }
    };
    let result = Members::of(&line).and_then(|line| Members::of(line.get("result")?));
    let versions =
        result.and_then(|result| serde_json::from_str::<Vec<String>>(result.get("supportedVersions")?).ok());
    Some(versions.is_some_and(|versions| versions.iter().any(|known| known == version::MODERN)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The result of asking a process that ends like this when it has the request.
    async fn discovered(end: impl FnOnce(&Bridge)) -> Option<bool> {
        let bridge = Bridge::new("test", Role::Shared);
        let mut outgoing = bridge.open();
        bridge.let_in();
        let ending = async {
            outgoing.next(1).await.unwrap();
            end(&bridge);
        };
        tokio::join!(discover(&bridge), ending).0
    }

    #[tokio::test]
    async fn a_server_that_was_lost_while_it_was_asked_is_not_taken_for_a_legacy_one() {
        assert_eq!(discovered(|bridge| bridge.close("its sandbox was lost", false)).await, None);
        assert_eq!(discovered(|bridge| bridge.exited("it ended with exit code 1", false)).await, Some(false));
    }
}
