//! The supervisor of one server: a task that keeps its process running and carries out commands.
//!
//! ```text
//!            ┌────────────────────────────────────────────────────────────────┐
//!            ▼                                                                │
//! sandbox connected ─▶ process started ─▶ initialized: ready ─▶ ended ─▶ pause (crash loop) ─┘
//!        │ failed: error, retried                │ silent: unresponsive        └─▶ stopped (restart policy)
//! ```

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use chrono::{TimeDelta, Utc};
use emergent_failpoint::failpoint;
use emergent_mcp_bridge::crash_loop::CrashLoop;
use emergent_store::StoreError;
use emergent_wire::event::EventKind;
use emergent_wire::mcp::{McpStatus, RestartPolicy};
use emergent_wire::workspace::WorkspaceStatus;
use tokio::sync::mpsc;

use super::McpHost;
use super::error::Result;
use super::hosted::{HostedServer, QueuedCommand, SupervisorCommand};
use super::process::{self, ProcessEnd};
use super::run::RunOutcome;
use crate::workspace::SandboxConnection;

/// The time after SIGTERM for a process that is restarted on request.
pub(super) const RESTART_GRACE: Duration = Duration::from_secs(10);
/// The first and the longest pause after a sandbox could not be started.
const SANDBOX_PAUSES: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));
/// The interval in which a server that another server runs is checked.
const CHECK_ELSEWHERE_EVERY: Duration = Duration::from_secs(2);

/// The next step of the supervisor.
enum Next {
    /// Start the process.
    Start,
    /// Start it after a pause.
    Pause(Duration),
    /// Wait for a command.
    Wait,
    /// End.
    Leave,
}

/// Supervises a server until the command to leave.
pub(super) async fn supervise(
    host: Arc<McpHost>,
    server: Arc<HostedServer>,
    mut commands: mpsc::Receiver<QueuedCommand>,
) {
    let mut supervisor = Supervisor { host, server, crashes: CrashLoop::default(), failures: 0 };
    let mut next = Next::Start;
    loop {
        let command = match next {
            Next::Leave => break,
            Next::Start => {
                let outcome = {
                    let mut run = std::pin::pin!(supervisor.run_once());
                    let outcome = unless_command(&mut commands, &mut run).await;
                    if let Err(Some((command, _))) = &outcome {
                        // The run is dropped only after its processes have ended, or their time is over.
                        supervisor.end_processes(*command, run).await;
                    }
                    outcome
                };
                match outcome {
                    Ok(outcome) => {
                        next = supervisor.after_run(outcome).await;
                        continue;
                    }
                    Err(command) => command,
                }
            }
            Next::Pause(pause) => match unless_command(&mut commands, tokio::time::sleep(pause)).await {
                Ok(()) => {
                    next = Next::Start;
                    continue;
                }
                Err(command) => command,
            },
            Next::Wait => commands.recv().await,
        };
        let Some((command, done)) = command else { break };
        next = supervisor.carry_out(command).await;
        let _ = done.send(());
    }
    let Supervisor { host, server, .. } = supervisor;
    server.bridge.close("the server was removed", false);
    server.endpoint.end_all();
    let mut servers = host.servers.lock();
    if servers.get(&server.id).is_some_and(|known| Arc::ptr_eq(known, &server)) {
        servers.remove(&server.id);
    }
}

/// Waits for work, or for a command that comes first. The command is None when no one can send one any more.
async fn unless_command<T>(
    commands: &mut mpsc::Receiver<QueuedCommand>,
    work: impl Future<Output = T>,
) -> Result<T, Option<QueuedCommand>> {
    tokio::select! {
        biased;
        command = commands.recv() => Err(command),
        done = work => Ok(done),
    }
}

pub(super) struct Supervisor {
    pub(super) host: Arc<McpHost>,
    pub(super) server: Arc<HostedServer>,
    crashes: CrashLoop,
    /// Attempts in a row that could not start the sandbox.
    failures: u32,
}

impl Supervisor {
    /// Decides the next step after a run.
    async fn after_run(&mut self, outcome: RunOutcome) -> Next {
        let server = Arc::clone(&self.server);
        match outcome {
            RunOutcome::Removed => Next::Leave,
            RunOutcome::Elsewhere => {
                server.set_status(McpStatus::Elsewhere);
                server.bridge.close(
                    "another server of this installation runs it: send the request to that server",
                    false,
                );
                server.note_attempt();
                Next::Pause(CHECK_ELSEWHERE_EVERY)
            }
            RunOutcome::NotStarted(error) => {
                self.failures += 1;
                let (first, longest) = SANDBOX_PAUSES;
                let pause = first.saturating_mul(1 << self.failures.min(6)).min(longest);
                tracing::warn!(%error, retry_s = pause.as_secs(), "the sandbox of an MCP server can't be started; it will be tried again");
                server.journal.note(format!("its sandbox can't be started: {error}"));
                server.bridge.close(&format!("the server's sandbox can't be started: {error}"), false);
                server.update(|state| {
                    state.status = McpStatus::Error;
                    state.error = Some(error.to_string());
                    state.next_restart_at = Some(Utc::now() + TimeDelta::from_std(pause).unwrap_or_default());
                });
                server.note_attempt();
                Next::Pause(pause)
            }
            RunOutcome::Ended(end, started) => self.after_end(&end, started).await,
        }
    }

    /// Decides whether and when an ended process is started again.
    async fn after_end(&mut self, end: &ProcessEnd, started: Instant) -> Next {
        self.failures = 0;
        let server = Arc::clone(&self.server);
        match self.host.workspaces.context.store.workspace(server.id).await {
            Err(StoreError::NotFound { .. }) => return Next::Leave,
            Ok(workspace) if workspace.status == WorkspaceStatus::Destroying => return Next::Leave,
            // Without the row the process is started again. The next run reads the row first.
            Ok(_) | Err(_) => {}
        }
        let exit = end.exit(&server);
        let reason = exit.reason.clone();
        tracing::warn!(
            reason,
            exit_code = exit.exit_code,
            stderr = exit.stderr_tail,
            "an MCP server has ended"
        );
        metrics::counter!("emergent_mcp_exits_total").increment(1);
        server.journal.note(reason.as_str());
        let message = format!("{}: {reason}", server.name);
        self.host.workspaces.context.events.workspace(EventKind::McpCrashed, server.id, message);
        let stays_stopped = match server.config.restart_policy {
            RestartPolicy::Always => false,
            RestartPolicy::OnFailure => end.is_success(),
            RestartPolicy::Never => true,
        };
        if stays_stopped {
            server.update(|state| {
                state.status = McpStatus::Stopped;
                state.last_exit = Some(exit);
            });
            server.bridge.close(&format!("the MCP server is stopped: {reason}; restart it first"), false);
            server.note_attempt();
            return Next::Wait;
        }
        let now = Instant::now();
        let verdict = self.crashes.crashed(started, now);
        let is_immediate = verdict.pause.is_zero();
        server.update(|state| {
            state.status = McpStatus::Restarting;
            state.restarts += 1;
            state.recent_crashes = self.crashes.recent(now) as u64;
            state.last_exit = Some(exit);
            state.next_restart_at =
                (!is_immediate).then(|| Utc::now() + TimeDelta::from_std(verdict.pause).unwrap_or_default());
        });
        let when = if is_immediate {
            "it is being restarted".to_owned()
        } else {
            format!("it ends again and again, and is restarted in {} s", verdict.pause.as_secs())
        };
        server.bridge.close(&format!("the MCP server has ended ({reason}); {when}"), is_immediate);
        if verdict.alert {
            tracing::error!("an MCP server ends again and again");
            metrics::counter!("emergent_mcp_crash_loops_total").increment(1);
            let message = format!("{} ends again and again: {reason}; {when}", server.name);
            self.host.workspaces.context.events.workspace(EventKind::McpCrashLoop, server.id, message);
        }
        server.note_attempt();
        if is_immediate { Next::Start } else { Next::Pause(verdict.pause) }
    }

    /// Ends the processes of a run that a command interrupts. Clients are told first.
    async fn end_processes(
        &self,
        command: SupervisorCommand,
        run: Pin<&mut impl Future<Output = RunOutcome>>,
    ) {
        let bridge = &self.server.bridge;
        let grace = match command {
            SupervisorCommand::Leave => {
                bridge.close("the MCP server is being removed", false);
                self.server.endpoint.end_all();
                RESTART_GRACE
            }
            SupervisorCommand::Restart => {
                bridge.close("the MCP server is being restarted", true);
                RESTART_GRACE
            }
            SupervisorCommand::Stop(grace) => {
                bridge.close("the MCP server is being stopped", false);
                self.server.endpoint.end_all();
                grace
            }
        };
        let Some(connection) = self.host.workspaces.context.live(self.server.id).connection() else {
            return;
        };
        let mut ending = std::pin::pin!(process::end_all(&connection.channel, grace));
        tokio::select! {
            _ = &mut ending => {}
            _ = run => {
                ending.await;
            }
        }
    }

    /// Carries out a command. The processes have ended.
    async fn carry_out(&mut self, command: SupervisorCommand) -> Next {
        let server = Arc::clone(&self.server);
        match command {
            SupervisorCommand::Leave => {
                server.set_status(McpStatus::Removing);
                Next::Leave
            }
            SupervisorCommand::Stop(_) => {
                self.stop().await;
                server.set_status(McpStatus::Stopped);
                Next::Wait
            }
            SupervisorCommand::Restart => {
                server.journal.note("restarted on request");
                self.crashes.reset();
                self.failures = 0;
                server.reset_state();
                *server.modern.lock().await = None;
                if let Err(error) = self.recreate_container().await {
                    tracing::warn!(%error, "the container of an MCP server could not be recreated");
                    server.journal.note(format!("its container could not be recreated: {error}"));
                }
                Next::Start
            }
        }
    }

    /// Stops the sandbox.
    pub(super) async fn stop(&self) {
        let (context, id) = (&self.host.workspaces.context, self.server.id);
        let live = context.live(id);
        let _changing = live.change_lock.lock().await;
        let Some(connection) = live.close_to_calls() else {
            return;
        };
        let Ok(provider) = context.provider(connection.provider) else {
            return;
        };
        if let Err(error) = provider.stop(id).await {
            tracing::warn!(%error, "the sandbox of an MCP server could not be stopped");
        }
    }

    /// Recreates the container. Its files are kept.
    async fn recreate_container(&self) -> Result<()> {
        let (context, id) = (&self.host.workspaces.context, self.server.id);
        let record = context.store.workspace_record(id).await?;
        let live = context.live(id);
        let _changing = live.change_lock.lock().await;
        live.close_to_calls();
        let provider = context.provider_of(&record)?;
        let sandbox = provider.recreate(&context.spec_of(&record).await?).await?;
        failpoint!("mcp.renewed");
        live.set_connection(SandboxConnection { channel: sandbox.channel, provider: provider.name() });
        Ok(())
    }
}
