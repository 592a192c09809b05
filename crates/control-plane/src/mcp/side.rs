//! Processes beside the supervised one: of sessions with a process of their own, of single calls in that mode, and of clients of
//! the modern era. They are started on demand, and never restarted.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use emergent_mcp_bridge::{Bridge, BridgeError, Item, Role};
use emergent_mcp_protocol::envelope::{Members, Message};
use emergent_mcp_protocol::{meta, version};
use emergent_wire::{ErrorCode, ErrorDetail};
use tokio_util::task::AbortOnDropHandle;

use super::McpHost;
use super::front::{WAIT_FOR_START, refused};
use super::hosted::Hosted;
use super::process::Process;

/// The time that a server has to answer `server/discover`.
const DISCOVERED_WITHIN: Duration = Duration::from_secs(15);
/// A process of the modern era ends when it was idle for this time.
const MODERN_IDLE_TIME: Duration = Duration::from_secs(10 * 60);
/// The time for which a server that did not answer `server/discover` counts as one of the legacy era.
const SILENT_TIME: Duration = Duration::from_secs(60);

/// A server's support of the modern era, as far as it is known.
pub(crate) struct Modern {
    support: ModernSupport,
    used: Mutex<Instant>,
}

enum ModernSupport {
    /// This process serves it.
    Yes { bridge: Bridge, _process: AbortOnDropHandle<()> },
    /// The server supports only the legacy era.
    No,
    /// The server did not answer. Many servers of the legacy era don't before `initialize`, but it may also be slow.
    Silent,
}

impl Modern {
    /// The bridge to the process of the modern era, if the server supports it.
    pub(crate) fn bridge(&self) -> Option<&Bridge> {
        match &self.support {
            ModernSupport::Yes { bridge, .. } => Some(bridge),
            ModernSupport::No | ModernSupport::Silent => None,
        }
    }

    fn used(&self) -> MutexGuard<'_, Instant> {
        self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the process has ended or is idle, or `server/discover` is due again.
    fn is_over(&self) -> bool {
        let idle = self.used().elapsed();
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
    pub(super) async fn start_side(
        &self,
        hosted: &Arc<Hosted>,
        role: Role,
    ) -> Result<(Bridge, AbortOnDropHandle<()>), ErrorDetail> {
        hosted.bridge.ready(WAIT_FOR_START).await.map_err(|error| refused(&error))?;
        let lost =
            || ErrorDetail::new(ErrorCode::Unavailable, "the server is being started: try again in a moment");
        let connection = self.workspaces.context.live(hosted.id).connection().ok_or_else(lost)?;
        let program = hosted.program().ok_or_else(lost)?;
        let bridge = Bridge::new(hosted.name.clone(), role);
        let process = Process::start(&connection.channel, &program, bridge.open()).await?;
        bridge.let_in();
        let (followed, hosted) = (bridge.clone(), Arc::clone(hosted));
        let task = tokio::spawn(async move {
            let end = process.follow(&hosted, Some(&followed)).await;
            let reason = end.reason();
            hosted.journal.note(format!("the process of a session: {reason}"));
            followed.close(&format!("the MCP server has ended ({reason})"), false);
        });
        Ok((bridge, AbortOnDropHandle::new(task)))
    }

    /// Starts and initializes a process for one call. It ends when the returned handle is dropped.
    pub(super) async fn side_for_call(
        &self,
        hosted: &Arc<Hosted>,
    ) -> Result<(Bridge, AbortOnDropHandle<()>), ErrorDetail> {
        let (bridge, task) = self.start_side(hosted, Role::Shared).await?;
        let initialized = bridge.initialize(env!("CARGO_PKG_VERSION"), hosted.timeout()).await;
        initialized.map_err(|error| refused(&error))?;
        Ok((bridge, task))
    }

    /// The server's support of the modern era. Its clients have a process of their own, because many servers choose their era by
    /// the first message.
    pub(crate) async fn modern(&self, hosted: &Arc<Hosted>) -> Result<Arc<Modern>, ErrorDetail> {
        let mut known = hosted.modern.lock().await;
        if let Some(modern) = known.as_ref().filter(|modern| !modern.is_over()) {
            if modern.bridge().is_some() {
                *modern.used() = Instant::now();
            }
            return Ok(Arc::clone(modern));
        }
        let (bridge, task) = self.start_side(hosted, Role::Shared).await?;
        let support = match discover(&bridge).await {
            Some(true) => ModernSupport::Yes { bridge, _process: task },
            Some(false) => ModernSupport::No,
            None => ModernSupport::Silent,
        };
        let modern = Arc::new(Modern { support, used: Mutex::new(Instant::now()) });
        *known = Some(Arc::clone(&modern));
        Ok(modern)
    }

    /// Ends idle sessions and processes.
    pub(crate) async fn sweep_sessions(&self) {
        let all: Vec<Arc<Hosted>> = self.servers().values().cloned().collect();
        for hosted in all {
            hosted.endpoint.sweep();
            let mut modern = hosted.modern.lock().await;
            if modern.as_ref().is_some_and(|modern| modern.is_over()) {
                *modern = None;
            }
        }
    }
}

/// Whether a process answers `server/discover`, and names the modern version. None when it does not answer.
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
    let mut exchange = bridge.request(bridge.visitor(), &message, DISCOVERED_WITHIN).await.ok()?;
    let line = loop {
        match exchange.next().await? {
            Item::Answer(line) => break line,
            Item::Failed { error: BridgeError::TimedOut(_), .. } => return None,
            // A process that ends without `initialize` is one of the legacy era.
            Item::Failed { .. } => return Some(false),
            _ => {}
        }
    };
    let result = Members::of(&line).and_then(|line| Members::of(line.get("result")?));
    let versions =
        result.and_then(|result| serde_json::from_str::<Vec<String>>(result.get("supportedVersions")?).ok());
    Some(versions.is_some_and(|versions| versions.iter().any(|known| known == version::MODERN)))
}
