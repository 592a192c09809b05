//! One run of a server: from its sandbox, which is connected to or made anew, to the end of its process.

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
use emergent_wire::{ErrorCode, ErrorDetail};

use super::process::{self, End, Process};
use super::supervise::{RESTART_GRACE, Supervisor};
use crate::errors::error_of;
use crate::workspace::{OpenError, Opened, SandboxConnection, open_or_restart};

/// How long what a lost server left in a sandbox has after SIGTERM.
const LEFTOVER_GRACE: Duration = Duration::from_secs(3);
/// A server that was not heard of for so long is asked whether it is there.
const ASK_AFTER: Duration = Duration::from_secs(30);
/// How long it may take to answer.
const ANSWERS_WITHIN: Duration = Duration::from_secs(10);
/// A process that has not been initialized by then is called unresponsive; it may still become ready.
const INITIALIZED_WITHIN: Duration = Duration::from_secs(30);
/// How long it is waited at once for a server that is late to listen.
const LISTENS_WITHIN: Duration = Duration::from_secs(600);
/// For those that take for ever.
const FOR_EVER: Duration = Duration::from_secs(365 * 24 * 3600);

/// Why a run has ended.
pub(super) enum Run {
    /// The process is no more; when it was started.
    Ended(End, Instant),
    /// The sandbox can't be had.
    NoSandbox(ErrorDetail),
    /// Another server runs it.
    Elsewhere,
    /// Its row is gone.
    Gone,
}

impl Supervisor {
    /// Runs the process once.
    pub(super) async fn run_once(&self) -> Run {
        let hosted = &self.hosted;
        hosted.set_status(McpStatus::Starting);
        let prepared = {
            // Not all at once: starting a sandbox takes the host a while.
            let _place = self.host.starts.acquire().await;
            self.prepare().await
        };
        let (connection, program) = match prepared {
            Ok(Some(prepared)) => prepared,
            Ok(None) => return Run::Elsewhere,
            Err(error) if error.code == ErrorCode::NotFound => return Run::Gone,
            Err(error) => return Run::NoSandbox(error),
        };
        failpoint!("mcp.sandbox_reached");
        hosted.set_program(&program);
        let started = Instant::now();
        let kills_before = self.oom_kills(&connection);
        hosted.update(|state| {
            state.started_at = Some(Utc::now());
            state.next_restart_at = None;
        });
        let end = if !hosted.config.stdio_bridge {
            self.run_http(&connection.channel, &program).await
        } else if hosted.is_per_session() {
            let _nobody_reads = hosted.bridge.open();
            self.ready();
            End::Lost(connection.channel.closed().await.to_string())
        } else {
            self.run_bridged(&connection.channel, &program).await
        };
        failpoint!("mcp.process_ended");
        let mut end = self.explain(end).await;
        if self.oom_kills(&connection) > kills_before {
            if let End::Exited(answer) = &mut end {
                // What the host has ended, only the host knows.
                answer.oom_killed |= answer.exit_code != Some(0);
            }
            // What gVisor starts in such a sandbox may end at once, or never.
            self.stop().await;
        }
        Run::Ended(end, started)
    }

    fn oom_kills(&self, connection: &SandboxConnection) -> u64 {
        let provider = self.host.workspaces.context.provider(connection.provider);
        provider.map_or(0, |provider| provider.oom_kills(self.hosted.id))
    }

    /// Reaches the sandbox, and says what is to be run in it. None when another server does that.
    async fn prepare(&self) -> Result<Option<(SandboxConnection, ServeCall)>, ErrorDetail> {
        let (host, id) = (&self.host, self.hosted.id);
        let workspaces = &host.workspaces;
        let record = workspaces.context.store.workspace_record(id).await.map_err(error_of)?;
        if record.workspace.status == WorkspaceStatus::Destroying {
            return Err(ErrorDetail::new(ErrorCode::NotFound, "it is being removed"));
        }
        if record.workspace.status == WorkspaceStatus::Error {
            // Only a row says so, and it is nobody's then.
            let (from, to) = (&[WorkspaceStatus::Error], WorkspaceStatus::Ready);
            workspaces.context.store.transition(id, from, to).await.map_err(error_of)?;
        }
        if record.owner != Some(workspaces.context.store.server())
            && workspaces.context.take_over(&record).await.is_err()
        {
            return Ok(None);
        }
        let live = workspaces.context.live(id);
        live.note_mcp_server();
        let _changing = live.changing.lock().await;
        let connection = match live.connection() {
            Some(connection) => connection,
            None => {
                let connection = self.connect(&record).await?;
                // What a server that was killed had started may still be ending.
                process::end_all(&connection.channel, LEFTOVER_GRACE).await;
                live.set_connection(connection.clone());
                connection
            }
        };
        let provider = workspaces.context.provider_of(&record)?;
        let image = provider.image_program(&record.image).await?;
        Ok(Some((connection, process::program(&self.hosted.config, image)?)))
    }

    /// Opens a channel to the sandbox. One whose files are lost is made anew.
    async fn connect(&self, record: &WorkspaceRecord) -> Result<SandboxConnection, ErrorDetail> {
        let workspaces = &self.host.workspaces;
        let provider = workspaces.context.provider_of(record)?;
        let spec = workspaces.context.spec_of(record).await?;
        let channel = match open_or_restart(provider, &spec).await {
            Ok(Opened::Running(channel)) => channel,
            Ok(Opened::Restarted { sandbox, .. }) => sandbox.channel,
            Err(OpenError::NotRestarted { error: ProviderError::Gone(reason), .. }) => {
                tracing::error!(
                    mcp_server = self.hosted.name,
                    reason,
                    "the container and its files were removed: both are made anew"
                );
                self.hosted.journal.note("the container and its files were removed: both are made anew");
                provider.create(&spec).await?.channel
            }
            Err(OpenError::NotOpened(error) | OpenError::NotRestarted { error, .. }) => {
                return Err(error.into());
            }
        };
        Ok(SandboxConnection { channel, provider: provider.name() })
    }

    /// A process on stdio that many clients share.
    async fn run_bridged(&self, channel: &GuestClient, program: &ServeCall) -> End {
        let bridge = &self.hosted.bridge;
        let outgoing = bridge.open();
        let process = match Process::start(channel, program, outgoing).await {
            Ok(process) => process,
            Err(error) => return End::Lost(error.to_string()),
        };
        failpoint!("mcp.process_started");
        tokio::select! {
            end = process.follow(&self.hosted, Some(bridge)) => end,
            refused = self.attend() => {
                // It would be of no use to anybody; the next one may be.
                process::end_all(channel, RESTART_GRACE).await;
                End::NotStarted(ErrorDetail::new(ErrorCode::Unacceptable, refused.to_string()))
            }
        }
    }

    /// Initializes a process, then looks now and then whether it answers. Ends only when it can't be initialized.
    async fn attend(&self) -> BridgeError {
        let bridge = &self.hosted.bridge;
        let initialized = bridge.initialize(env!("CARGO_PKG_VERSION"), FOR_EVER);
        let mut initialized = std::pin::pin!(initialized);
        let result = match tokio::time::timeout(INITIALIZED_WITHIN, &mut initialized).await {
            Ok(result) => result,
            Err(_) => {
                self.unresponsive("it has not answered initialize");
                initialized.await
            }
        };
        match result {
            Ok(_) => self.ready(),
            Err(refused @ BridgeError::Refused(_)) => return refused,
            // It has ended meanwhile, and whoever follows it knows why.
            Err(_) => std::future::pending().await,
        }
        loop {
            let silence = bridge.silence();
            tokio::select! {
                () = self.hosted.doubted.notified() => {}
                () = tokio::time::sleep(ASK_AFTER.saturating_sub(silence)) => {
                    if bridge.silence() < ASK_AFTER {
                        continue;
                    }
                }
            }
            if bridge.answers(ANSWERS_WITHIN).await {
                if self.hosted.state().status == McpStatus::Unresponsive {
                    self.ready();
                }
            } else {
                self.unresponsive("it does not answer");
            }
        }
    }

    /// A process that speaks HTTP by itself.
    async fn run_http(&self, channel: &GuestClient, program: &ServeCall) -> End {
        let process = match Process::start_alone(channel, program).await {
            Ok(process) => process,
            Err(error) => return End::Lost(error.to_string()),
        };
        let _nobody_reads = self.hosted.bridge.open();
        let attend = async {
            let port = self.hosted.config.port.unwrap_or_default();
            let mut waits = INITIALIZED_WITHIN;
            while !listens(channel, port, waits).await {
                self.unresponsive(&format!("nobody listens on port {port}"));
                waits = LISTENS_WITHIN;
            }
            self.ready();
            std::future::pending::<std::convert::Infallible>().await
        };
        tokio::select! {
            end = process.follow(&self.hosted, None) => end,
            never = attend => match never {},
        }
    }

    fn ready(&self) {
        let hosted = &self.hosted;
        hosted.bridge.let_in();
        let before = hosted.set_status(McpStatus::Ready);
        hosted.update(|state| state.error = None);
        if before != McpStatus::Ready {
            tracing::info!(mcp_server = hosted.name, id = %hosted.id, "an MCP server is ready");
            self.host.workspaces.context.events.workspace(
                EventKind::McpReady,
                hosted.id,
                format!("{} is ready", hosted.name),
            );
        }
        hosted.attempt_ended();
    }

    fn unresponsive(&self, why: &str) {
        let hosted = &self.hosted;
        if hosted.set_status(McpStatus::Unresponsive) != McpStatus::Unresponsive {
            tracing::warn!(mcp_server = hosted.name, id = %hosted.id, why, "an MCP server does not answer");
            metrics::counter!("emergent_mcp_unresponsive_total").increment(1);
            hosted.journal.note(format!("unresponsive: {why}"));
            let message = format!("{}: {why}", hosted.name);
            self.host.workspaces.context.events.workspace(EventKind::McpUnresponsive, hosted.id, message);
        }
        hosted.attempt_ended();
    }

    /// What the sandbox's provider knows of a loss.
    async fn explain(&self, end: End) -> End {
        let End::Lost(why) = end else {
            return end;
        };
        let workspaces = &self.host.workspaces;
        let explained = async {
            let record = workspaces.context.store.workspace_record(self.hosted.id).await.ok()?;
            workspaces.context.provider_of(&record).ok()?.exit_reason(self.hosted.id).await
        };
        End::Lost(explained.await.map_or(why, |exit| exit.reason))
    }
}

/// Whether somebody listens on a port of the sandbox, within this time.
async fn listens(channel: &GuestClient, port: u16, within: Duration) -> bool {
    let wait_ms = u64::try_from(within.as_millis()).unwrap_or(u64::MAX);
    match channel.start(&GuestCall::Connect(ConnectCall { port, wait_ms, probe: true })).await {
        Ok(call) => call.answer::<serde_json::Value>().await.is_ok(),
        // The channel is gone, and the process with it: that is for others to see.
        Err(_) => std::future::pending().await,
    }
}
