//! The state of one server in this process.

use std::sync::Arc;
use std::time::Duration;

use chrono::{DateTime, Utc};
use emergent_guest_protocol::ServeCall;
use emergent_mcp_bridge::journal::Journal;
use emergent_mcp_bridge::{Bridge, Role};
use emergent_mcp_http::Endpoint;
use emergent_store::{StoreError, WorkspaceRecord};
use emergent_wire::WorkspaceId;
use emergent_wire::mcp::{DEFAULT_PATH, McpConfig, McpExit, McpMode, McpStatus};
use parking_lot::Mutex;
use tokio::sync::{Notify, mpsc, oneshot, watch};
use tracing::Span;

use super::error::{McpError, Result};
use super::on_demand::ModernEra;
use super::peer;
use crate::caller::Caller;
use crate::workspace::damaged_workspace;

/// The limit on commands that wait for the supervisor.
const MAX_COMMANDS: usize = 16;

/// A command to the supervisor of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SupervisorCommand {
    /// End the process, recreate its container, start the process again.
    Restart,
    /// End the process after this grace period and stop the sandbox. The row stays.
    Stop(Duration),
    /// Stop supervising the server, because it is being removed.
    Leave,
}

/// A command, and the channel that reports that it was carried out.
pub(super) type QueuedCommand = (SupervisorCommand, oneshot::Sender<()>);

/// The state of a server, as its supervisor sets it.
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

/// The transport of clients' messages to the server's process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Transport {
    /// Through a bridge, over standard input and output.
    Stdio,
    /// As HTTP requests to this port and path in its sandbox.
    Http { port: u16, path: String },
}

/// One server.
pub(crate) struct HostedServer {
    pub(crate) id: WorkspaceId,
    pub(crate) name: String,
    pub(crate) config: McpConfig,
    pub(crate) transport: Transport,
    /// The bridge to the process that all clients share. Without such a process, its phase says whether the server can be used.
    pub(crate) bridge: Bridge,
    /// The sessions of MCP clients.
    pub(crate) endpoint: Endpoint<Caller>,
    pub(super) modern: tokio::sync::Mutex<Option<Arc<ModernEra>>>,
    /// The program that is run, once it is known.
    program: Mutex<Option<ServeCall>>,
    pub(crate) journal: Journal,
    state: Mutex<McpState>,
    /// Counts the finished attempts to start it, whether they succeeded or failed.
    attempts: watch::Sender<u64>,
    commands: mpsc::Sender<QueuedCommand>,
    /// Notified after a call without an answer: the supervisor then checks whether the process answers at all.
    pub(super) check_requested: Arc<Notify>,
}

impl HostedServer {
    /// A server that is not running yet, and the queue of its supervisor.
    pub(super) fn new(
        record: &WorkspaceRecord,
    ) -> Result<(Arc<Self>, mpsc::Receiver<QueuedCommand>), StoreError> {
        let (name, config) = (name_of(record)?.to_owned(), config_of(record)?.clone());
        let (commands, receiver) = mpsc::channel(MAX_COMMANDS);
        let state = McpState {
            status: McpStatus::Starting,
            started_at: None,
            restarts: 0,
            recent_crashes: 0,
            next_restart_at: None,
            last_exit: None,
            error: None,
        };
        let server = Self {
            id: record.workspace.id,
            transport: transport_of(record.workspace.id, &config)?,
            bridge: Bridge::new(name.clone(), Role::Shared),
            name,
            endpoint: Endpoint::new(peer::limits(config.mode)),
            config,
            modern: tokio::sync::Mutex::default(),
            program: Mutex::default(),
            journal: Journal::default(),
            state: Mutex::new(state),
            attempts: watch::Sender::new(0),
            commands,
            check_requested: Arc::default(),
        };
        Ok((Arc::new(server), receiver))
    }

    /// The span of work in the background for this server.
    pub(super) fn span(&self) -> Span {
        tracing::info_span!(parent: None, "mcp_server", mcp_server = self.name, workspace = %self.id)
    }

    /// The program that is run.
    pub(super) fn program(&self) -> Option<ServeCall> {
        self.program.lock().clone()
    }

    pub(super) fn set_program(&self, program: &ServeCall) {
        *self.program.lock() = Some(program.clone());
    }

    /// The current state.
    pub(crate) fn state(&self) -> McpState {
        self.state.lock().clone()
    }

    /// Changes the state.
    pub(super) fn update(&self, change: impl FnOnce(&mut McpState)) {
        change(&mut self.state.lock());
    }

    /// Sets the status. Returns the one before.
    pub(super) fn set_status(&self, status: McpStatus) -> McpStatus {
        std::mem::replace(&mut self.state.lock().status, status)
    }

    /// Notes that an attempt to start it has ended.
    pub(super) fn note_attempt(&self) {
        self.attempts.send_modify(|count| *count += 1);
    }

    /// Waits until the first attempt to start it has ended, at most this long.
    pub(super) async fn first_start(&self, within: Duration) {
        let mut attempts = self.attempts.subscribe();
        let ended = attempts.wait_for(|count| *count > 0);
        let _ = tokio::time::timeout(within, ended).await;
    }

    /// Resets the state to that of a server that was never started.
    pub(super) fn reset_state(&self) {
        self.attempts.send_replace(0);
        self.update(|state| {
            state.restarts = 0;
            state.recent_crashes = 0;
            state.next_restart_at = None;
            state.error = None;
            state.status = McpStatus::Starting;
        });
    }

    /// Sends a command to the supervisor and waits until it is carried out.
    pub(super) async fn send_command(&self, command: SupervisorCommand) -> Result<()> {
        let (done, is_done) = oneshot::channel();
        self.commands.send((command, done)).await.map_err(|_| McpError::SupervisorEnded)?;
        is_done.await.map_err(|_| McpError::SupervisorEnded)
    }

    /// Waits until its supervisor ends.
    pub(crate) async fn supervisor_ended(&self) {
        self.commands.closed().await;
    }

    /// Whether each session has a process of its own.
    pub(super) fn is_per_session(&self) -> bool {
        self.config.mode == McpMode::PerSession
    }

    /// The number of requests without an answer.
    pub(crate) fn pending_calls(&self) -> usize {
        if self.is_per_session() { self.endpoint.requests_in_progress() } else { self.bridge.load().0 }
    }

    /// The time limit of a call that names none.
    pub(super) fn timeout(&self) -> Duration {
        Duration::from_millis(self.config.timeout_ms)
    }
}

/// The configuration in a server's row.
pub(super) fn config_of(record: &WorkspaceRecord) -> Result<&McpConfig, StoreError> {
    let missing = || damaged_workspace(record.workspace.id, "mcp_config", "it is NULL");
    record.workspace.mcp_config.as_ref().ok_or_else(missing)
}

/// The name in a server's row.
pub(super) fn name_of(record: &WorkspaceRecord) -> Result<&str, StoreError> {
    let missing = || damaged_workspace(record.workspace.id, "name", "it is NULL");
    record.name.as_deref().ok_or_else(missing)
}

fn transport_of(id: WorkspaceId, config: &McpConfig) -> Result<Transport, StoreError> {
    if config.stdio_bridge {
        return Ok(Transport::Stdio);
    }
    let missing = || damaged_workspace(id, "mcp_config", "a server that speaks HTTP needs a port");
    let port = config.port.ok_or_else(missing)?;
    Ok(Transport::Http { port, path: config.path.clone().unwrap_or_else(|| DEFAULT_PATH.to_owned()) })
}
