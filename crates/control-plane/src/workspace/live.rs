//! The live state of a workspace in this process: its channel, its calls, its last use, and the lock of its changes.
//!
//! Nothing here is needed after a restart, because the store and the provider have the lasting state.
//!
//! Invariant: a call is counted in the same step in which it gets the channel. So when [`LiveWorkspace::close_if_idle`] finds no calls
//! and takes the channel away, no call can have begun.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use chrono::{DateTime, Utc};
use emergent_guest_client::GuestClient;
use emergent_wire::OperationId;
use emergent_wire::workspace::ProviderName;
use parking_lot::Mutex;

use super::usage::LastUsage;

/// The shortest time between two writes of a workspace's use.
const WRITE_EVERY: Duration = Duration::from_secs(10);
/// The limit on background commands that are remembered. The sandbox keeps the output of as many.
const MAX_OPERATIONS: usize = 100;
/// A call that fails within this time after its sandbox was ended failed for that reason.
const RECENT_END: Duration = Duration::from_secs(30);

/// The live state of a workspace.
#[derive(Default)]
pub(crate) struct LiveWorkspace {
    /// Held while the sandbox is created, stopped, resumed, copied, removed or reconnected: one change at a time.
    pub(crate) change_lock: Arc<tokio::sync::Mutex<()>>,
    state: Mutex<CallState>,
    pub(super) last_usage: Mutex<LastUsage>,
    operations: Mutex<VecDeque<Operation>>,
    /// The reason for which this server ended the sandbox, and the time.
    ended: Mutex<Option<(Instant, String)>>,
    /// The sandbox runs a hosted MCP server, whose requests are not counted as calls.
    hosts_mcp_server: AtomicBool,
}

/// A background command, remembered to find out whether it ran out of memory.
struct Operation {
    id: OperationId,
    /// The host's count of kills in the sandbox when the command began, or when this process first saw it.
    kills_before: u64,
    /// Whether it ran out of memory, once its end was seen. Later kills do not concern it.
    ran_out: Option<bool>,
}

#[derive(Default)]
struct CallState {
    /// None while the workspace is being stopped or removed.
    connection: Option<SandboxConnection>,
    /// Calls in progress.
    calls: usize,
    /// All calls that have begun.
    begun: u64,
    /// The host has killed a process of the sandbox. The next call checks whether to restart the sandbox.
    damaged: bool,
    /// A use that is not stored yet.
    used: Option<DateTime<Utc>>,
    last_use: Option<DateTime<Utc>>,
    written: Option<Instant>,
}

/// The open channel to a workspace's sandbox.
#[derive(Clone)]
pub(crate) struct SandboxConnection {
    pub(crate) channel: GuestClient,
    /// The provider of the sandbox.
    pub(crate) provider: ProviderName,
}

/// Counts a call in progress until it is dropped.
pub(crate) struct CallGuard(Arc<LiveWorkspace>);

impl Drop for CallGuard {
    fn drop(&mut self) {
        self.0.state.lock().calls -= 1;
    }
}

impl CallGuard {
    pub(super) fn live(&self) -> &LiveWorkspace {
        &self.0
    }
}

/// Calls are in progress.
pub(crate) struct CallsInProgress;

impl LiveWorkspace {
    /// Begins a call, if the sandbox's channel is open. Then the call need not read the store.
    pub(crate) fn begin_call(self: &Arc<Self>) -> Option<(SandboxConnection, CallGuard)> {
        let mut state = self.state.lock();
        if state.damaged {
            return None;
        }
        let connection = state.open_connection()?;
        state.calls += 1;
        state.begun += 1;
        drop(state);
        Some((connection, CallGuard(Arc::clone(self))))
    }

    /// The connection to the sandbox, if its channel is open.
    pub(crate) fn connection(&self) -> Option<SandboxConnection> {
        self.state.lock().open_connection()
    }

    pub(crate) fn set_connection(&self, new: SandboxConnection) {
        self.state.lock().connection = Some(new);
    }

    /// Takes the connection away, so that new calls read the store first. The channel stays open until the returned connection is
    /// dropped.
    pub(crate) fn close_to_calls(&self) -> Option<SandboxConnection> {
        self.state.lock().connection.take()
    }

    /// The same, unless calls are in progress.
    pub(crate) fn close_if_idle(&self) -> Result<Option<SandboxConnection>, CallsInProgress> {
        let mut state = self.state.lock();
        if state.calls > 0 { Err(CallsInProgress) } else { Ok(state.connection.take()) }
    }

    /// Notes that the host has killed a process of the sandbox.
    pub(super) fn note_damage(&self) {
        self.state.lock().damaged = true;
    }

    /// The connection to a damaged sandbox that can be restarted without loss: no calls are in progress, and no commands were
    /// started in the background. Returned once for each damage.
    pub(super) fn take_damaged(&self) -> Option<SandboxConnection> {
        let has_operations = !self.operations.lock().is_empty();
        let mut state = self.state.lock();
        let is_damaged = std::mem::take(&mut state.damaged);
        (is_damaged && state.calls == 0 && !has_operations).then(|| state.open_connection()).flatten()
    }

    /// Notes the reason for which this server ends the sandbox. Calls that fail with it report this reason.
    pub(super) fn note_end(&self, reason: &str) {
        *self.ended.lock() = Some((Instant::now(), reason.to_owned()));
    }

    /// The reason for which this server ended the sandbox a moment ago, if it did.
    pub(super) fn recent_end(&self) -> Option<String> {
        let ended = self.ended.lock();
        ended.as_ref().filter(|(at, _)| at.elapsed() < RECENT_END).map(|(_, reason)| reason.clone())
    }

    pub(crate) fn note_mcp_server(&self) {
        self.hosts_mcp_server.store(true, Ordering::Relaxed);
    }

    pub(crate) fn hosts_mcp_server(&self) -> bool {
        self.hosts_mcp_server.load(Ordering::Relaxed)
    }

    /// The number of all calls that have begun, and of calls in progress.
    pub(crate) fn call_counts(&self) -> (u64, usize) {
        let state = self.state.lock();
        (state.begun, state.calls)
    }

    /// The number of calls in progress.
    pub(crate) fn calls(&self) -> usize {
        self.state.lock().calls
    }

    /// Notes a use. Returns it when it is due to be stored, which the caller does.
    pub(crate) fn note_use(&self, now: DateTime<Utc>) -> Option<DateTime<Utc>> {
        let mut state = self.state.lock();
        state.used = Some(now);
        state.last_use = Some(now);
        state.written.is_none_or(|at| at.elapsed() >= WRITE_EVERY).then(|| state.take_use()).flatten()
    }

    /// The last use that this process knows, stored or not.
    pub(crate) fn last_use(&self) -> Option<DateTime<Utc>> {
        self.state.lock().last_use
    }

    /// The last use, if it is not stored yet. The caller stores it. Calls in progress count as a use now.
    pub(crate) fn unwritten_use(&self, now: DateTime<Utc>) -> Option<DateTime<Utc>> {
        let mut state = self.state.lock();
        if state.calls > 0 {
            state.used = Some(now);
        }
        state.take_use()
    }

    /// Remembers a background command, unless it is known.
    pub(super) fn note_operation(&self, id: OperationId, kills_now: u64) {
        let mut operations = self.operations.lock();
        if operations.iter().any(|known| known.id == id) {
            return;
        }
        if operations.len() >= MAX_OPERATIONS {
            operations.pop_front();
        }
        operations.push_back(Operation { id, kills_before: kills_now, ran_out: None });
    }

    /// Whether a background command that has ended ran out of memory, and whether this is the first call that finds its end.
    /// `ran_out` decides at the first call, with the count of kills when the command began.
    pub(super) fn ran_out_of_memory(
        &self,
        id: OperationId,
        ran_out: impl FnOnce(u64) -> bool,
    ) -> (bool, bool) {
        let mut operations = self.operations.lock();
        let Some(known) = operations.iter_mut().find(|known| known.id == id) else {
            return (false, false);
        };
        match known.ran_out {
            Some(ran_out) => (ran_out, false),
            None => (*known.ran_out.insert(ran_out(known.kills_before)), true),
        }
    }
}

impl CallState {
    /// The connection, unless its channel is closed.
    fn open_connection(&mut self) -> Option<SandboxConnection> {
        if self.connection.as_ref().is_some_and(|connection| connection.channel.is_closed()) {
            self.connection = None;
        }
        self.connection.clone()
    }

    fn take_use(&mut self) -> Option<DateTime<Utc>> {
        let used = self.used.take()?;
        self.written = Some(Instant::now());
        Some(used)
    }
}
