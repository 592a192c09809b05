//! Processes beside the one that is supervised: those of sessions that have one of their own, of single calls in that
//! mode, and of clients of the modern era (without `initialize`). They are started when they are needed and never
//! started again by themselves.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use emergent_mcp_bridge::envelope::{Members, Message, codes, error_code};
use emergent_mcp_bridge::{Bridge, Item, Role};
use emergent_wire::{ErrorCode, ErrorDetail};
use tokio::task::AbortHandle;

use super::McpHost;
use super::front::{WAIT_FOR_START, refused};
use super::hosted::Hosted;
use super::process::Process;
use super::session::Session;

/// The version of the protocol without `initialize`.
pub(crate) const MODERN: &str = "2026-07-28";
/// How long a server has to say whether it speaks that.
const DISCOVERED_WITHIN: Duration = Duration::from_secs(15);
/// A process of the modern era that nobody used for so long is ended.
const MODERN_IDLE_TIME: Duration = Duration::from_secs(10 * 60);
/// Sessions of a server that all share a process.
const MAX_SHARED_SESSIONS: usize = 1000;
/// Sessions of a server that have a process each: as many as its sandbox runs at once, and room for others.
const MAX_PROCESSES: usize = 40;

/// How long a server that did not say whether it speaks that is taken for one that does not.
const SILENT_TIME: Duration = Duration::from_secs(60);

/// What is known of a server's modern era.
pub(crate) struct Modern {
    spoken: Spoken,
    used: Mutex<Instant>,
}

enum Spoken {
    /// It speaks it: this process does.
    Yes { bridge: Bridge, _process: EndOnDrop },
    /// It does not.
    No,
    /// It did not answer; many servers of the legacy era don't before they are initialized, but it may also be slow.
    Silent,
}

/// Ends a task when it is dropped.
pub(crate) struct EndOnDrop(pub(super) AbortHandle);

impl Drop for EndOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Modern {
    /// To the process that speaks it, if the server does.
    pub(crate) fn bridge(&self) -> Option<&Bridge> {
        match &self.spoken {
            Spoken::Yes { bridge, .. } => Some(bridge),
            Spoken::No | Spoken::Silent => None,
        }
    }

    fn used(&self) -> MutexGuard<'_, Instant> {
        self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether it can't be used any more, or nobody does, or it should be asked again.
    fn is_over(&self) -> bool {
        let idle = self.used().elapsed();
        match &self.spoken {
            Spoken::Yes { bridge, .. } => {
                !bridge.is_open() || (idle > MODERN_IDLE_TIME && bridge.load().0 == 0)
            }
            Spoken::No => false,
            Spoken::Silent => idle > SILENT_TIME,
        }
    }
}

impl McpHost {
    /// Starts one more process of a server in its sandbox; it ends with what is returned.
    async fn start_side(&self, hosted: &Arc<Hosted>, role: Role) -> Result<(Bridge, EndOnDrop), ErrorDetail> {
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
        Ok((bridge, EndOnDrop(task.abort_handle())))
    }

    /// A session of a client, on the process that all share, or on one of its own, which is not initialized yet.
    pub(crate) async fn open_session(&self, hosted: &Arc<Hosted>) -> Result<Arc<Session>, ErrorDetail> {
        let most = if hosted.is_per_session() { MAX_PROCESSES } else { MAX_SHARED_SESSIONS };
        hosted.sessions.make_room(most).map_err(|_| {
            let message = format!("this server has {most} sessions already: end one, or try again later");
            ErrorDetail::new(ErrorCode::LimitReached, message)
        })?;
        if !hosted.is_per_session() {
            return Ok(Session::open(hosted.bridge.clone(), false));
        }
        let (bridge, task) = self.start_side(hosted, Role::Exclusive).await?;
        let session = Session::open(bridge, true);
        session.works(task);
        Ok(session)
    }

    /// A process for one call, initialized; it ends with what is returned.
    pub(super) async fn side_for_call(
        &self,
        hosted: &Arc<Hosted>,
    ) -> Result<(Bridge, EndOnDrop), ErrorDetail> {
        let (bridge, task) = self.start_side(hosted, Role::Shared).await?;
        let initialized = bridge.initialize(env!("CARGO_PKG_VERSION"), hosted.timeout()).await;
        initialized.map_err(|error| refused(&error))?;
        Ok((bridge, task))
    }

    /// What serves clients of the modern era. A process of its own: many servers choose their era by what they are asked
    /// first.
    pub(crate) async fn modern(&self, hosted: &Arc<Hosted>) -> Result<Arc<Modern>, ErrorDetail> {
        let mut known = hosted.modern.lock().await;
        if let Some(modern) = known.as_ref().filter(|modern| !modern.is_over()) {
            if modern.bridge().is_some() {
                *modern.used() = Instant::now();
            }
            return Ok(Arc::clone(modern));
        }
        let (bridge, task) = self.start_side(hosted, Role::Shared).await?;
        let spoken = match discover(&bridge).await {
            Some(true) => Spoken::Yes { bridge, _process: task },
            Some(false) => Spoken::No,
            None => Spoken::Silent,
        };
        let modern = Arc::new(Modern { spoken, used: Mutex::new(Instant::now()) });
        *known = Some(Arc::clone(&modern));
        Ok(modern)
    }

    /// Ends what nobody has used for a while.
    pub(crate) async fn sweep_sessions(&self) {
        let all: Vec<Arc<Hosted>> = self.servers().values().cloned().collect();
        for hosted in all {
            hosted.sessions.sweep();
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
         \"io.modelcontextprotocol/protocolVersion\":\"{MODERN}\",\
         \"io.modelcontextprotocol/clientInfo\":{{\"name\":\"emergent\",\"version\":\"{}\"}},\
         \"io.modelcontextprotocol/clientCapabilities\":{{}}}}}}}}",
        env!("CARGO_PKG_VERSION")
    );
    let message = Message::parse(&text).ok()?;
    let mut exchange = bridge.request(bridge.visitor(), &message, DISCOVERED_WITHIN).await.ok()?;
    let line = loop {
        if let Item::Answer(line) = exchange.next().await? {
            break line;
        }
    };
    if error_code(&line) == Some(codes::TIMED_OUT) {
        return None;
    }
    let result = Members::of(&line).and_then(|line| Members::of(line.get("result")?));
    let versions =
        result.and_then(|result| serde_json::from_str::<Vec<String>>(result.get("supportedVersions")?).ok());
    Some(versions.is_some_and(|versions| versions.iter().any(|version| version == MODERN)))
}
