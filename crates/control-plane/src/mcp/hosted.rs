//! One server, as this process knows it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use chrono::{DateTime, Utc};
use emergent_guest_protocol::ServeCall;
use emergent_mcp_bridge::journal::Journal;
use emergent_mcp_bridge::{Bridge, Role};
use emergent_store::WorkspaceRecord;
use emergent_wire::mcp::{McpConfig, McpExit, McpMode, McpStatus};
use emergent_wire::{ErrorCode, ErrorDetail, WorkspaceId};
use tokio::sync::{Notify, mpsc, oneshot, watch};

use super::session::Sessions;
use super::side::Modern;

/// Orders that may wait: each is the last word of somebody who waits for it.
const MAX_ORDERS: usize = 16;

/// What somebody wants of the supervisor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// End the process, make its container anew, begin again.
    Restart,
    /// End the process and the sandbox, with this grace; the row stays.
    Stop(Duration),
    /// Look after it no longer: it is being removed.
    Leave,
}

/// An order, and who is to be told that it was carried out.
pub(crate) type Ordered = (Order, oneshot::Sender<()>);

/// How a server stands.
#[derive(Clone, Debug)]
pub(crate) struct Standing {
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
    /// To the process that all clients share. Where there is none, it only says whether the server can be used.
    pub(crate) bridge: Bridge,
    pub(crate) sessions: Sessions,
    pub(crate) modern: tokio::sync::Mutex<Option<Arc<Modern>>>,
    /// What is run, once it is known.
    program: Mutex<Option<ServeCall>>,
    pub(crate) journal: Journal,
    standing: Mutex<Standing>,
    /// Counts the attempts to start it that have ended, well or not.
    attempts: watch::Sender<u64>,
    orders: mpsc::Sender<Ordered>,
    /// A call had no answer in time: look whether the process answers at all.
    pub(crate) doubted: Notify,
}

impl Hosted {
    /// A server that is not running yet.
    pub(crate) fn new(record: &WorkspaceRecord) -> Result<(Arc<Self>, mpsc::Receiver<Ordered>), ErrorDetail> {
        let config = config_of(record)?;
        let name = record.name.clone().unwrap_or_default();
        let (orders, receiver) = mpsc::channel(MAX_ORDERS);
        let standing = Standing {
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
            config,
            sessions: Sessions::default(),
            modern: tokio::sync::Mutex::default(),
            program: Mutex::default(),
            journal: Journal::default(),
            standing: Mutex::new(standing),
            attempts: watch::Sender::new(0),
            orders,
            doubted: Notify::new(),
        };
        Ok((Arc::new(hosted), receiver))
    }

    fn lock(&self) -> MutexGuard<'_, Standing> {
        self.standing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What is run.
    pub(super) fn program(&self) -> Option<ServeCall> {
        self.program.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn set_program(&self, program: &ServeCall) {
        *self.program.lock().unwrap_or_else(PoisonError::into_inner) = Some(program.clone());
    }

    /// How it stands.
    pub(crate) fn standing(&self) -> Standing {
        self.lock().clone()
    }

    /// Changes how it stands.
    pub(super) fn stand(&self, change: impl FnOnce(&mut Standing)) {
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

    /// Waits until the current attempt to start it has ended, but not for ever.
    pub(crate) async fn first_start(&self, within: Duration) {
        let mut attempts = self.attempts.subscribe();
        let ended = attempts.wait_for(|count| *count > 0);
        let _ = tokio::time::timeout(within, ended).await;
    }

    /// Forgets that it was ever started.
    pub(super) fn begin_anew(&self) {
        self.attempts.send_replace(0);
        self.stand(|standing| {
            standing.restarts = 0;
            standing.recent_crashes = 0;
            standing.next_restart_at = None;
            standing.error = None;
            standing.status = McpStatus::Starting;
        });
    }

    /// Has an order carried out.
    pub(crate) async fn order(&self, order: Order) -> Result<(), ErrorDetail> {
        let gone = || ErrorDetail::new(ErrorCode::Unavailable, "the server ends: try again in a moment");
        let (done, is_done) = oneshot::channel();
        self.orders.send((order, done)).await.map_err(|_| gone())?;
        is_done.await.map_err(|_| gone())
    }

    /// Waits until nobody looks after it any more.
    pub(crate) async fn gone(&self) {
        self.orders.closed().await;
    }

    /// Whether each session has a process of its own.
    pub(crate) fn is_per_session(&self) -> bool {
        self.config.mode == McpMode::PerSession
    }

    /// How long a call may take unless it says so.
    pub(crate) fn timeout(&self) -> Duration {
        Duration::from_millis(self.config.timeout_ms)
    }
}

/// What is kept of a registration.
pub(crate) fn config_of(record: &WorkspaceRecord) -> Result<McpConfig, ErrorDetail> {
    let config = record.workspace.mcp_config.clone().unwrap_or_default();
    serde_json::from_value(config).map_err(|error| {
        let message =
            format!("the configuration of MCP server {} can't be read: {error}", record.workspace.id);
        ErrorDetail::new(ErrorCode::Internal, message)
    })
}
