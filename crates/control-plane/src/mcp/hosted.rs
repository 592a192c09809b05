//! One server, as this process knows it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use chrono::{DateTime, Utc};
use emergent_guest_protocol::ServeCall;
use emergent_mcp_bridge::journal::Journal;
use emergent_mcp_bridge::{Bridge, Role};
use emergent_mcp_http::Endpoint;
use emergent_store::WorkspaceRecord;
use emergent_wire::mcp::{McpConfig, McpExit, McpMode, McpStatus};
use emergent_wire::{ErrorCode, ErrorDetail, WorkspaceId};
use tokio::sync::{Notify, mpsc, oneshot, watch};

use super::peer;
use super::side::Modern;
use crate::caller::Caller;

/// Orders that may wait in the supervisor's queue.
const MAX_ORDERS: usize = 16;

/// An order to the supervisor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// End the process, make its container anew, begin again.
    Restart,
    /// End the process and the sandbox, with this grace; the row stays.
    Stop(Duration),
    /// Stop supervising it, because it is being removed.
    Leave,
}

/// An order, and the channel that reports that it was carried out.
pub(crate) type Ordered = (Order, oneshot::Sender<()>);

/// The state of a server.
#[derive(Clone, Debug)]
pub(crate) struct McpState {
    pub(crate) status: McpStatus,
    pub(crate) started_at: Option<DateTime<Utc>>,
    pub(crate) restarts: u64,
    pub(crate) recent_crashes: u64,
    pub(crate) next_restart_at: Option<DateTime<Utc>>,
    pub(crate) last_exit: Option<McpExit>,
    pub(crate) error: Option<String>,
}

/// One server.
pub(crate) struct Hosted {
    pub(crate) id: WorkspaceId,
    pub(crate) name: String,
    pub(crate) config: McpConfig,
    /// The bridge to the process that all clients share. Without such a process, its phase says whether the server can be used.
    pub(crate) bridge: Bridge,
    /// The sessions of MCP clients.
    pub(crate) endpoint: Endpoint<Caller>,
    pub(crate) modern: tokio::sync::Mutex<Option<Arc<Modern>>>,
    /// The program that is run, once it is known.
    program: Mutex<Option<ServeCall>>,
    pub(crate) journal: Journal,
    state: Mutex<McpState>,
    /// Counts the attempts to start it that have ended, well or not.
    attempts: watch::Sender<u64>,
    orders: mpsc::Sender<Ordered>,
    /// Notified when a call had no answer in time, so that the supervisor checks whether the process answers at all.
    pub(crate) doubted: Arc<Notify>,
}

impl Hosted {
    /// A server that is not running yet.
    pub(crate) fn new(record: &WorkspaceRecord) -> Result<(Arc<Self>, mpsc::Receiver<Ordered>), ErrorDetail> {
        let config = config_of(record)?;
        let name = record.name.clone().unwrap_or_default();
        let (orders, receiver) = mpsc::channel(MAX_ORDERS);
        let state = McpState {
            status: McpStatus::Starting,
            started_at: None,
            restarts: 0,
            recent_crashes: 0,
            next_restart_at: None,
            last_exit: None,
            error: None,
        };
        let hosted = Self {
            id: record.workspace.id,
            bridge: Bridge::new(name.clone(), Role::Shared),
            name,
            endpoint: Endpoint::new(peer::limits(config.mode)),
            config,
            modern: tokio::sync::Mutex::default(),
            program: Mutex::default(),
            journal: Journal::default(),
            state: Mutex::new(state),
            attempts: watch::Sender::new(0),
            orders,
            doubted: Arc::default(),
        };
        Ok((Arc::new(hosted), receiver))
    }

    fn lock(&self) -> MutexGuard<'_, McpState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The program that is run.
    pub(super) fn program(&self) -> Option<ServeCall> {
        self.program.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn set_program(&self, program: &ServeCall) {
        *self.program.lock().unwrap_or_else(PoisonError::into_inner) = Some(program.clone());
    }

    /// The current state.
    pub(crate) fn state(&self) -> McpState {
        self.lock().clone()
    }

    /// Changes the state.
    pub(super) fn update(&self, change: impl FnOnce(&mut McpState)) {
        change(&mut self.lock());
    }

    /// Sets a status; gives the one before.
    pub(super) fn set_status(&self, status: McpStatus) -> McpStatus {
        std::mem::replace(&mut self.lock().status, status)
    }

    /// An attempt to start it has ended.
    pub(super) fn attempt_ended(&self) {
        self.attempts.send_modify(|count| *count += 1);
    }

    /// Waits until the current attempt to start it has ended, at most this long.
    pub(crate) async fn first_start(&self, within: Duration) {
        let mut attempts = self.attempts.subscribe();
        let ended = attempts.wait_for(|count| *count > 0);
        let _ = tokio::time::timeout(within, ended).await;
    }

    /// Resets the state to that of a server that was never started.
    pub(super) fn begin_anew(&self) {
        self.attempts.send_replace(0);
        self.update(|state| {
            state.restarts = 0;
            state.recent_crashes = 0;
            state.next_restart_at = None;
            state.error = None;
            state.status = McpStatus::Starting;
        });
    }

    /// Sends an order to the supervisor and waits until it is carried out.
    pub(crate) async fn order(&self, order: Order) -> Result<(), ErrorDetail> {
        let gone = || ErrorDetail::new(ErrorCode::Unavailable, "the server ends: try again in a moment");
        let (done, is_done) = oneshot::channel();
        self.orders.send((order, done)).await.map_err(|_| gone())?;
        is_done.await.map_err(|_| gone())
    }

    /// Waits until its supervisor ends.
    pub(crate) async fn gone(&self) {
        self.orders.closed().await;
    }

    /// Whether each session has a process of its own.
    pub(crate) fn is_per_session(&self) -> bool {
        self.config.mode == McpMode::PerSession
    }

    /// Requests without an answer.
    pub(crate) fn pending_calls(&self) -> usize {
        if self.is_per_session() { self.endpoint.requests_in_progress() } else { self.bridge.load().0 }
    }

    /// The time that a call has unless it names another.
    pub(crate) fn timeout(&self) -> Duration {
        Duration::from_millis(self.config.timeout_ms)
    }
}

/// The configuration in a server's row.
pub(crate) fn config_of(record: &WorkspaceRecord) -> Result<McpConfig, ErrorDetail> {
    record.workspace.mcp_config.clone().ok_or_else(|| {
        let message = format!("{} is a workspace, not an MCP server", record.workspace.id);
        ErrorDetail::new(ErrorCode::Internal, message)
    })
}
