//! What this process knows of a workspace: its channel, its calls, its last use, who is changing it.
//!
//! Nothing here is needed after a restart: the store and the provider know everything that matters.
//!
//! Invariant: a call is counted in the same step in which it gets the channel, so whoever finds no calls and takes the
//! channel away ([`Live::close_if_idle`]) knows that none has begun.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex as StdMutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use chrono::{DateTime, Utc};
use emergent_guest_client::GuestClient;
use emergent_wire::OperationId;
use emergent_wire::workspace::ProviderName;
use tokio::sync::Mutex;

use super::usage::Measured;

/// A use is written down at most this often, unless somebody wants to know.
const WRITE_EVERY: Duration = Duration::from_secs(10);
/// Commands in the background that are remembered: as many as the sandbox keeps the output of.
const MAX_OPERATIONS: usize = 100;

/// A call that breaks within this time after its sandbox was ended broke for that reason.
const END_IS_NEWS: Duration = Duration::from_secs(30);

/// A workspace as this process knows it.
#[derive(Default)]
pub(crate) struct Live {
    /// Held while the sandbox is made, stopped, resumed, copied, removed or reconnected: one change at a time.
    pub(crate) changing: Arc<Mutex<()>>,
    traffic: StdMutex<Traffic>,
    pub(super) measured: StdMutex<Measured>,
    operations: StdMutex<VecDeque<Operation>>,
    /// Why this server ended the sandbox, and when.
    ended: StdMutex<Option<(Instant, String)>>,
    /// The sandbox runs a hosted MCP server, whose requests are not counted as calls.
    hosts_mcp_server: AtomicBool,
}

/// What is remembered of a command in the background, to say whether it ran out of memory.
struct Operation {
    id: OperationId,
    /// What the host had ended in the sandbox when it began, or when it was first heard of.
    kills_before: u64,
    /// Whether it ran out of memory, once its end was seen: what happens later is not its doing.
    ran_out: Option<bool>,
}

#[derive(Default)]
struct Traffic {
    /// None once the workspace is to be stopped or removed.
    connection: Option<SandboxConnection>,
    /// Calls in progress.
    calls: usize,
    /// Calls that were ever begun.
    begun: u64,
    /// The host has ended a process of the sandbox: calls look first whether it should be started again.
    damaged: bool,
    /// A use that was not yet written down.
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

/// A call in progress; it ends when this is dropped.
pub(crate) struct Busy(Arc<Live>);

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.traffic().calls -= 1;
    }
}

impl Busy {
    pub(super) fn live(&self) -> &Live {
        &self.0
    }
}

/// There are calls in progress.
pub(crate) struct InUse;

impl Live {
    fn traffic(&self) -> MutexGuard<'_, Traffic> {
        self.traffic.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins a call, if the sandbox's channel is open. While it is, no call needs to ask the store.
    pub(crate) fn begin_call(self: &Arc<Self>) -> Option<(SandboxConnection, Busy)> {
        let mut traffic = self.traffic();
        if traffic.damaged {
            return None;
        }
        let connection = traffic.open_channel()?;
        traffic.calls += 1;
        traffic.begun += 1;
        drop(traffic);
        Some((connection, Busy(Arc::clone(self))))
    }

    /// The connection to the sandbox, if its channel is open.
    pub(crate) fn connection(&self) -> Option<SandboxConnection> {
        self.traffic().open_channel()
    }

    pub(crate) fn set_connection(&self, new: SandboxConnection) {
        self.traffic().connection = Some(new);
    }

    /// From now on calls ask the store first. The channel lives as long as what is returned.
    pub(crate) fn close_to_calls(&self) -> Option<SandboxConnection> {
        self.traffic().connection.take()
    }

    /// The same, unless there are calls.
    pub(crate) fn close_if_idle(&self) -> Result<Option<SandboxConnection>, InUse> {
        let mut traffic = self.traffic();
        if traffic.calls > 0 { Err(InUse) } else { Ok(traffic.connection.take()) }
    }

    /// The host has ended a process of the sandbox.
    pub(super) fn note_damage(&self) {
        self.traffic().damaged = true;
    }

    /// The connection to a damaged sandbox that can be ended without loss: there are no calls, and no commands were started in
    /// the background. Given once for each damage.
    pub(super) fn take_damaged(&self) -> Option<SandboxConnection> {
        let has_operations = !self.operations().is_empty();
        let mut traffic = self.traffic();
        let is_damaged = std::mem::take(&mut traffic.damaged);
        (is_damaged && traffic.calls == 0 && !has_operations).then(|| traffic.open_channel()).flatten()
    }

    /// Remembers why the sandbox is ended, for calls that end with it.
    pub(super) fn note_end(&self, why: &str) {
        *self.ended.lock().unwrap_or_else(PoisonError::into_inner) = Some((Instant::now(), why.to_owned()));
    }

    /// Why this server ended the sandbox a moment ago, if it did.
    pub(super) fn last_end(&self) -> Option<String> {
        let ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        ended.as_ref().filter(|(at, _)| at.elapsed() < END_IS_NEWS).map(|(_, why)| why.clone())
    }

    pub(crate) fn note_mcp_server(&self) {
        self.hosts_mcp_server.store(true, Ordering::Relaxed);
    }

    pub(crate) fn hosts_mcp_server(&self) -> bool {
        self.hosts_mcp_server.load(Ordering::Relaxed)
    }

    /// Calls that were ever begun, and calls in progress.
    pub(crate) fn call_counts(&self) -> (u64, usize) {
        let traffic = self.traffic();
        (traffic.begun, traffic.calls)
    }

    /// Calls in progress.
    pub(crate) fn calls(&self) -> usize {
        self.traffic().calls
    }

    /// Notes a use. Gives it back when it is time to write it down.
    pub(crate) fn note_use(&self, now: DateTime<Utc>) -> Option<DateTime<Utc>> {
        let mut traffic = self.traffic();
        traffic.used = Some(now);
        traffic.last_use = Some(now);
        traffic.written.is_none_or(|at| at.elapsed() >= WRITE_EVERY).then(|| traffic.take_use()).flatten()
    }

    /// The last use that this process knows of; the write of it may be in progress.
    pub(crate) fn last_use(&self) -> Option<DateTime<Utc>> {
        self.traffic().last_use
    }

    /// The last use, if it is not yet written down; it is the caller's to write. A call in progress is a use now.
    pub(crate) fn unwritten_use(&self, now: DateTime<Utc>) -> Option<DateTime<Utc>> {
        let mut traffic = self.traffic();
        if traffic.calls > 0 {
            traffic.used = Some(now);
        }
        traffic.take_use()
    }

    fn operations(&self) -> MutexGuard<'_, VecDeque<Operation>> {
        self.operations.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Remembers a command in the background, unless it is known.
    pub(super) fn remember_operation(&self, id: OperationId, kills_now: u64) {
        let mut operations = self.operations();
        if operations.iter().any(|known| known.id == id) {
            return;
        }
        if operations.len() >= MAX_OPERATIONS {
            operations.pop_front();
        }
        operations.push_back(Operation { id, kills_before: kills_now, ran_out: None });
    }

    /// Settles whether a command that has ended ran out of memory: `judge` is asked once, with what the host had ended
    /// before. True besides for the first who asks.
    pub(super) fn settle_operation(&self, id: OperationId, judge: impl FnOnce(u64) -> bool) -> (bool, bool) {
        let mut operations = self.operations();
        let Some(known) = operations.iter_mut().find(|known| known.id == id) else {
            return (false, false);
        };
        match known.ran_out {
            Some(ran_out) => (ran_out, false),
            None => (*known.ran_out.insert(judge(known.kills_before)), true),
        }
    }
}

impl Traffic {
    fn open_channel(&mut self) -> Option<SandboxConnection> {
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
