//! One run of a server: connects to its sandbox, starts its process, and watches it until it ends.

use std::time::{Duration, Instant};

use chrono::Utc;
use emergent_failpoint::failpoint;
use emergent_guest_client::GuestClient;
use emergent_guest_protocol::{ConnectCall, GuestCall, ServeCall};
use emergent_mcp_bridge::BridgeError;
use emergent_providers::ProviderError;
use emergent_store::WorkspaceRecord;
use emergent_wire::event::EventKind;
use emergent_wire::mcp::McpStatus;
use emergent_wire::workspace::WorkspaceStatus;

use super::error::{McpError, Result};
use super::hosted::Transport;
use super::process::{self, Process, ProcessEnd};
use super::supervise::{RESTART_GRACE, Supervisor};
use crate::workspace::{OpenError, Opened, SandboxConnection, WorkspaceError, open_or_restart};

/// The time after SIGTERM for processes that a lost server has left in the sandbox.
const LEFTOVER_GRACE: Duration = Duration::from_secs(3);
/// A process without output for this time is checked with a `ping`.
const CHECK_AFTER_SILENCE: Duration = Duration::from_secs(30);
/// The time to answer the `ping`.
const PING_TIMEOUT: Duration = Duration::from_secs(10);
/// A process that is not initialized, or does not listen, after this time is `unresponsive`. It may still become ready.
const INITIALIZE_TIME: Duration = Duration::from_secs(30);
/// The time of one wait for a server that does not listen yet.
const LISTEN_TIME: Duration = Duration::from_secs(600);
/// The time that the agent has to report it.
const LISTEN_MARGIN: Duration = Duration::from_secs(10);
/// `initialize` has no time limit of its own.
const NO_LIMIT: Duration = Duration::from_secs(365 * 24 * 3600);

/// The outcome of a run.
pub(super) enum RunOutcome {
    /// The process, which was started at this time, has ended.
    Ended(ProcessEnd, Instant),
    /// The sandbox or the program could not be had.
    NotStarted(McpError),
    /// Another server runs it.
    Elsewhere,
    /// It is being removed, or was removed.
    Removed,
}

/// A sandbox and the program to start in it, or the reason why there is nothing to start.
enum Prepared {
    Ready(SandboxConnection, ServeCall),
    Elsewhere,
    Removed,
}

impl Supervisor {
    /// Runs the process once.
    pub(super) async fn run_once(&self) -> RunOutcome {
        let server = &self.server;
        server.set_status(McpStatus::Starting);
        let prepared = {
            // Starting a sandbox loads the host.
            let _permit = self.host.starts.acquire().await;
            self.prepare().await
        };
        let (connection, program) = match prepared {
            Ok(Prepared::Ready(connection, program)) => (connection, program),
            Ok(Prepared::Elsewhere) => return RunOutcome::Elsewhere,
            Ok(Prepared::Removed) => return RunOutcome::Removed,
            Err(error) if error.is_row_missing() => return RunOutcome::Removed,
            Err(error) => return RunOutcome::NotStarted(error),
        };
        failpoint!("mcp.sandbox_reached");
        server.set_program(&program);
        let started = Instant::now();
        let kills_before = self.oom_kills(&connection);
        server.update(|state| {
            state.started_at = Some(Utc::now());
            state.next_restart_at = None;
        });
        let end = match &server.transport {
            Transport::Http { port, .. } => self.run_http(&connection.channel, &program, *port).await,
            Transport::Stdio if server.is_per_session() => {
                // The processes start on demand. Their bridges are their own.
                let _unused = server.bridge.open();
                self.note_ready();
                ProcessEnd::SandboxLost(connection.channel.closed().await.to_string())
            }
            Transport::Stdio => self.run_bridged(&connection.channel, &program).await,
        };
        failpoint!("mcp.process_ended");
        let mut end = self.explain(&connection, end).await;
        if self.oom_kills(&connection) > kills_before {
            if let ProcessEnd::Exited(answer) = &mut end {
                // The agent does not see kills by the host.
                answer.oom_killed |= answer.exit_code != Some(0);
            }
            // After a kill by the host, new processes in a gVisor sandbox may end at once, or never.
            self.stop().await;
        }
        RunOutcome::Ended(end, started)
    }

    fn oom_kills(&self, connection: &SandboxConnection) -> u64 {
        let provider = self.host.workspaces.context.provider(connection.provider);
        provider.map_or(0, |provider| provider.oom_kills(self.server.id))
    }

    /// Connects to the sandbox and finds out which program is to run.
    async fn prepare(&self) -> Result<Prepared> {
        let (context, id) = (&self.host.workspaces.context, self.server.id);
        let record = context.store.workspace_record(id).await?;
        if record.workspace.status == WorkspaceStatus::Destroying {
            return Ok(Prepared::Removed);
        }
        if record.workspace.status == WorkspaceStatus::Error {
            // The supervisor retries by itself, so the row need not say `error`.
            context.store.transition(id, &[WorkspaceStatus::Error], WorkspaceStatus::Ready).await?;
        }
        if record.owner != Some(context.store.server()) {
            match context.take_over(&record).await {
                Ok(()) => {}
                Err(WorkspaceError::ChangedElsewhere(_)) => return Ok(Prepared::Elsewhere),
                Err(error) => return Err(error.into()),
            }
        }
        let live = context.live(id);
        live.note_mcp_server();
        let _changing = live.change_lock.lock().await;
        let connection = match live.connection() {
            Some(connection) => connection,
            None => {
                let connection = self.connect(&record).await?;
                // A server that was killed may have left processes.
                process::end_all(&connection.channel, LEFTOVER_GRACE).await;
                live.set_connection(connection.clone());
                connection
            }
        };
        let image = context.provider_of(&record)?.image_program(&record.image).await?;
        Ok(Prepared::Ready(connection, process::program(&self.server.config, image)?))
    }

    /// Opens a channel to the sandbox. A sandbox whose files are lost is recreated.
    async fn connect(&self, record: &WorkspaceRecord) -> Result<SandboxConnection> {
        let context = &self.host.workspaces.context;
        let provider = context.provider_of(record)?;
        let spec = context.spec_of(record).await?;
        let channel = match open_or_restart(provider, &spec).await {
            Ok(Opened::Running(channel)) => channel,
            Ok(Opened::Restarted { sandbox, .. }) => sandbox.channel,
            Err(OpenError::NotRestarted { error: ProviderError::Gone(reason), .. }) => {
                tracing::error!(
                    reason,
                    "the container of an MCP server and its files were removed: both are recreated"
                );
                self.server.journal.note("the container and its files were removed: both are recreated");
                provider.create(&spec).await?.channel
            }
            Err(OpenError::NotOpened(error) | OpenError::NotRestarted { error, .. }) => {
                return Err(error.into());
            }
        };
        Ok(SandboxConnection { channel, provider: provider.name() })
    }

    /// Runs a process on stdio that all clients share.
    async fn run_bridged(&self, channel: &GuestClient, program: &ServeCall) -> ProcessEnd {
        let bridge = &self.server.bridge;
        let outgoing = bridge.open();
        let process = match Process::start(channel, program, outgoing).await {
            Ok(process) => process,
            Err(error) => return ProcessEnd::SandboxLost(error.to_string()),
        };
        failpoint!("mcp.process_started");
        tokio::select! {
            end = process.follow(&self.server, Some(bridge)) => end,
            refused = self.initialize_and_check() => {
                // No client can use a process that is not initialized.
                process::end_all(channel, RESTART_GRACE).await;
                ProcessEnd::NotStarted(refused.to_string())
            }
        }
    }

    /// Initializes the process, then checks now and then whether it answers. Returns only when it can't be
    /// initialized.
    async fn initialize_and_check(&self) -> BridgeError {
        let bridge = &self.server.bridge;
        let mut initialized = std::pin::pin!(bridge.initialize(env!("CARGO_PKG_VERSION"), NO_LIMIT));
        let result = match tokio::time::timeout(INITIALIZE_TIME, &mut initialized).await {
            Ok(result) => result,
            Err(_) => {
                self.note_unresponsive("it has not answered initialize");
                initialized.await
            }
        };
        match result {
            Ok(_) => self.note_ready(),
            // The process has ended. The task that follows its output knows the reason.
            Err(BridgeError::Down(_)) => std::future::pending().await,
            Err(error) => return error,
        }
        loop {
            let silence = bridge.silence();
            tokio::select! {
                () = self.server.check_requested.notified() => {}
                () = tokio::time::sleep(CHECK_AFTER_SILENCE.saturating_sub(silence)) => {
                    if bridge.silence() < CHECK_AFTER_SILENCE {
                        continue;
                    }
                }
            }
            if !bridge.answers(PING_TIMEOUT).await {
                self.note_unresponsive("it does not answer");
            } else if self.server.state().status == McpStatus::Unresponsive {
                self.note_ready();
            }
        }
    }

    /// Runs a process that speaks HTTP.
    async fn run_http(&self, channel: &GuestClient, program: &ServeCall, port: u16) -> ProcessEnd {
        let process = match Process::start_without_input(channel, program).await {
            Ok(process) => process,
            Err(error) => return ProcessEnd::SandboxLost(error.to_string()),
        };
        let _unused = self.server.bridge.open();
        let wait_until_ready = async {
            let mut wait = INITIALIZE_TIME;
            while !listens(channel, port, wait).await {
                self.note_unresponsive(&format!("nothing listens on port {port}"));
                wait = LISTEN_TIME;
            }
            self.note_ready();
            std::future::pending::<std::convert::Infallible>().await
        };
        tokio::select! {
            end = process.follow(&self.server, None) => end,
            never = wait_until_ready => match never {},
        }
    }

    fn note_ready(&self) {
        let server = &self.server;
        server.bridge.let_in();
        let before = server.set_status(McpStatus::Ready);
        server.update(|state| state.error = None);
        if before != McpStatus::Ready {
            tracing::info!("an MCP server is ready");
            let message = format!("{} is ready", server.name);
            self.host.workspaces.context.events.workspace(EventKind::McpReady, server.id, message);
        }
        server.note_attempt();
    }

    fn note_unresponsive(&self, reason: &str) {
        let server = &self.server;
        if server.set_status(McpStatus::Unresponsive) != McpStatus::Unresponsive {
            tracing::warn!(reason, "an MCP server does not answer");
            metrics::counter!("emergent_mcp_unresponsive_total").increment(1);
            server.journal.note(format!("unresponsive: {reason}"));
            let message = format!("{}: {reason}", server.name);
            self.host.workspaces.context.events.workspace(EventKind::McpUnresponsive, server.id, message);
        }
        server.note_attempt();
    }

    /// Replaces the reason of a loss by the one that the provider knows.
    async fn explain(&self, connection: &SandboxConnection, end: ProcessEnd) -> ProcessEnd {
        let ProcessEnd::SandboxLost(reason) = end else {
            return end;
        };
        let known = match self.host.workspaces.context.provider(connection.provider) {
            Ok(provider) => provider.exit_reason(self.server.id).await,
            Err(_) => None,
        };
        ProcessEnd::SandboxLost(known.map_or(reason, |exit| exit.reason))
    }
}

/// Whether a process listens on a port of the sandbox, within this time.
async fn listens(channel: &GuestClient, port: u16, within: Duration) -> bool {
    let wait_ms = u64::try_from(within.as_millis()).unwrap_or(u64::MAX);
    let connected = async {
        match channel.start(&GuestCall::Connect(ConnectCall { port, wait_ms, probe: true })).await {
            Ok(call) => call.answer::<serde_json::Value>().await.is_ok(),
            // The channel is lost, and the process with it. The task that follows its output reports that.
            Err(_) => std::future::pending().await,
        }
    };
    tokio::time::timeout(within + LISTEN_MARGIN, connected).await.unwrap_or(false)
}
