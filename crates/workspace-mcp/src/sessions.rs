//! The sessions of clients that speak a version of the protocol which has them (up to 2025-11-25).
//!
//! ```text
//!  initialize ──▶ idle ◀──▶ in use (a call runs, or a stream is open)
//!                  │
//!                  ├─ nothing for the idle time ─────────────────┐
//!                  ├─ longest idle when another needs its place ─┼─▶ ended: its calls are dropped, its id means
//!  any state ──────┴─ DELETE, end of the workspace's server ─────┘    nothing any more (404)
//! ```
//!
//! There are never more than the limit. At the limit a new session takes the place of the one that was not used for
//! longest, since many clients come and never say goodbye; one in which a call runs is never ended for another.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::Stream;
use rmcp::model::{
    ClientJsonRpcMessage, JsonRpcMessage, ProtocolVersion, ServerJsonRpcMessage, ServerResult,
};
use rmcp::transport::WorkerTransport;
use rmcp::transport::streamable_http_server::SessionManager;
use rmcp::transport::streamable_http_server::session::local::{
    EventIdParseError, LocalSessionHandle, LocalSessionWorker, SessionConfig, SessionError,
    create_local_session,
};
use rmcp::transport::streamable_http_server::session::{ServerSseMessage, SessionId};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::forward::forward;

type Table = Mutex<HashMap<SessionId, Arc<Session>>>;

/// All sessions of one workspace.
pub(crate) struct Sessions {
    most: usize,
    idle: Duration,
    ended: CancellationToken,
    all: Arc<Table>,
}

/// One session.
pub(crate) struct Session {
    handle: LocalSessionHandle,
    ended: CancellationToken,
    uses: Mutex<Uses>,
}

struct Uses {
    calls: usize,
    streams: usize,
    /// When the last use began or ended.
    last: Instant,
    /// Whether the client knows events that only say where to resume from.
    takes_priming: bool,
}

/// What a session is used for.
#[derive(Clone, Copy)]
enum Use {
    Call,
    Stream,
}

/// A session is in use as long as this lives.
pub(crate) struct InUse {
    session: Arc<Session>,
    by: Use,
}

/// Why a session can't be had or used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SessionsError {
    #[error("all sessions are in use")]
    Full,
    #[error("there is no such session")]
    Unknown,
    #[error(transparent)]
    Session(#[from] SessionError),
    #[error(transparent)]
    EventId(#[from] EventIdParseError),
}

impl Sessions {
    pub(crate) fn new(most: usize, idle: Duration, ended: CancellationToken) -> Self {
        Self { most, idle, ended, all: Arc::default() }
    }

    pub(crate) fn count(&self) -> usize {
        lock(&self.all).len()
    }

    /// Whether a new session could be had.
    pub(crate) fn has_room(&self) -> bool {
        let all = lock(&self.all);
        all.len() < self.most || longest_idle(&all).is_some()
    }

    pub(crate) fn get(&self, id: &str) -> Option<Arc<Session>> {
        lock(&self.all).get(id).filter(|session| !session.ended.is_cancelled()).cloned()
    }

    fn used(&self, id: &SessionId) -> Result<(Arc<Session>, InUse), SessionsError> {
        let session = self.get(id).ok_or(SessionsError::Unknown)?;
        let using = session.uses(Use::Stream);
        Ok((session, using))
    }
}

/// The session that can be ended for another.
fn longest_idle(all: &HashMap<SessionId, Arc<Session>>) -> Option<SessionId> {
    let free = all.iter().filter_map(|(id, session)| {
        let uses = session.lock();
        (uses.calls == 0).then_some((uses.streams > 0, uses.last, id))
    });
    free.min().map(|(.., id)| id.clone())
}

impl Session {
    /// Is cancelled when the session ends.
    pub(crate) fn ended(&self) -> CancellationToken {
        self.ended.clone()
    }

    /// Notes a call that runs.
    pub(crate) fn calls(self: &Arc<Self>) -> InUse {
        self.uses(Use::Call)
    }

    fn uses(self: &Arc<Self>, by: Use) -> InUse {
        let mut uses = self.lock();
        *uses.of(by) += 1;
        uses.last = Instant::now();
        drop(uses);
        InUse { session: Arc::clone(self), by }
    }

    /// How long nothing has used it; none while something does.
    fn idle_for(&self) -> Option<Duration> {
        let uses = self.lock();
        (uses.calls == 0 && uses.streams == 0).then(|| uses.last.elapsed())
    }

    fn lock(&self) -> MutexGuard<'_, Uses> {
        self.uses.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Uses {
    fn of(&mut self, by: Use) -> &mut usize {
        match by {
            Use::Call => &mut self.calls,
            Use::Stream => &mut self.streams,
        }
    }
}

impl InUse {
    pub(crate) fn takes_priming(&self) -> bool {
        self.session.lock().takes_priming
    }
}

impl Drop for InUse {
    fn drop(&mut self) {
        let mut uses = self.session.lock();
        *uses.of(self.by) -= 1;
        uses.last = Instant::now();
    }
}

/// Takes a session out of the table when it ends, and ends it when it was idle for too long.
async fn watch(all: Arc<Table>, id: SessionId, session: Arc<Session>, idle: Duration) {
    loop {
        let left = session.idle_for().map_or(idle, |already| idle.saturating_sub(already));
        tokio::select! {
            () = session.ended.cancelled() => break,
            () = tokio::time::sleep(left) => {}
        }
        if session.idle_for().is_some_and(|already| already >= idle) {
            tracing::debug!(session = &*id, "an idle MCP session was ended");
            session.ended.cancel();
            break;
        }
    }
    lock(&all).remove(&id);
}

fn lock(all: &Table) -> MutexGuard<'_, HashMap<SessionId, Arc<Session>>> {
    all.lock().unwrap_or_else(PoisonError::into_inner)
}

impl SessionManager for Sessions {
    type Error = SessionsError;
    type Transport = WorkerTransport<LocalSessionWorker>;

    async fn create_session(&self) -> Result<(SessionId, Self::Transport), SessionsError> {
        let id: SessionId = Uuid::new_v4().to_string().into();
        let ended = self.ended.child_token();
        let mut config = SessionConfig::default();
        // `watch` does this, and knows of calls that say nothing for long.
        config.keep_alive = None;
        let (handle, worker) = create_local_session(Arc::clone(&id), config);
        let uses = Uses { calls: 0, streams: 0, last: Instant::now(), takes_priming: false };
        let session = Arc::new(Session { handle, ended: ended.clone(), uses: Mutex::new(uses) });
        {
            let mut all = lock(&self.all);
            if all.len() >= self.most {
                let oldest = longest_idle(&all).ok_or(SessionsError::Full)?;
                if let Some(oldest) = all.remove(&oldest) {
                    oldest.ended.cancel();
                }
            }
            all.insert(Arc::clone(&id), Arc::clone(&session));
        }
        tokio::spawn(watch(Arc::clone(&self.all), Arc::clone(&id), session, self.idle));
        Ok((id, WorkerTransport::spawn_with_ct(worker, ended)))
    }

    async fn initialize_session(
        &self,
        id: &SessionId,
        message: ClientJsonRpcMessage,
    ) -> Result<ServerJsonRpcMessage, SessionsError> {
        let (session, _using) = self.used(id)?;
        let answer = session.handle.initialize(message).await?;
        if let JsonRpcMessage::Response(response) = &answer
            && let ServerResult::InitializeResult(result) = &response.result
        {
            // Clients of earlier versions take an event without a message for a broken one.
            session.lock().takes_priming = result.protocol_version >= ProtocolVersion::V_2025_11_25;
        }
        Ok(answer)
    }

    async fn has_session(&self, id: &SessionId) -> Result<bool, SessionsError> {
        Ok(self.get(id).is_some())
    }

    async fn close_session(&self, id: &SessionId) -> Result<(), SessionsError> {
        let session = lock(&self.all).remove(id);
        if let Some(session) = session {
            session.ended.cancel();
        }
        Ok(())
    }

    async fn create_stream(
        &self,
        id: &SessionId,
        message: ClientJsonRpcMessage,
    ) -> Result<impl Stream<Item = ServerSseMessage> + Send + Sync + 'static, SessionsError> {
        let (session, using) = self.used(id)?;
        let stream = session.handle.establish_request_wise_channel().await?;
        session.handle.push_message(message, stream.http_request_id).await?;
        Ok(forward(stream.inner, using))
    }

    async fn accept_message(
        &self,
        id: &SessionId,
        message: ClientJsonRpcMessage,
    ) -> Result<(), SessionsError> {
        let (session, _using) = self.used(id)?;
        Ok(session.handle.push_message(message, None).await?)
    }

    async fn create_standalone_stream(
        &self,
        id: &SessionId,
    ) -> Result<impl Stream<Item = ServerSseMessage> + Send + Sync + 'static, SessionsError> {
        let (session, using) = self.used(id)?;
        Ok(forward(session.handle.establish_common_channel().await?.inner, using))
    }

    async fn resume(
        &self,
        id: &SessionId,
        last_event_id: String,
    ) -> Result<impl Stream<Item = ServerSseMessage> + Send + Sync + 'static, SessionsError> {
        let (session, using) = self.used(id)?;
        Ok(forward(session.handle.resume(last_event_id.parse()?).await?.inner, using))
    }
}
