//! Keeps one server running.
//!
//! ```text
//!            ┌────────────────────────────────────────────────────────────────┐
//!            ▼                                                                │
//! sandbox connected ─▶ process started ─▶ initialized: ready ─▶ ended ─▶ pause (crash loop) ─┘
//!        │ failed: error, tried again            │ silent: unresponsive        └─▶ stopped (its policy)
//! ```

use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};

use chrono::{TimeDelta, Utc};
use emergent_failpoint::failpoint;
use emergent_mcp_bridge::crash_loop::CrashLoop;
use emergent_store::StoreError;
use emergent_wire::ErrorDetail;
use emergent_wire::event::EventKind;
use emergent_wire::mcp::{McpStatus, RestartPolicy};
use emergent_wire::workspace::WorkspaceStatus;
use tokio::sync::{mpsc, oneshot};

use super::McpHost;
use super::hosted::{Hosted, Order, Ordered};
use super::process::{self, End};
use super::run::Run;
use crate::errors::error_of;
use crate::workspace::SandboxConnection;

/// How long a process has after SIGTERM when it is restarted by hand.
pub(super) const RESTART_GRACE: Duration = Duration::from_secs(10);
/// The first pause after a sandbox could not be had, and the longest.
const SANDBOX_PAUSES: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));
/// How often a server is looked for that another runs.
const LOOK_FOR_OTHERS: Duration = Duration::from_secs(2);

/// What the supervisor does next.
enum Next {
    /// Starts the process.
    Start,
    /// Starts it after a pause.
    Pause(Duration),
    /// Nothing, until somebody says so.
    Wait,
    /// Ends.
    Leave,
}

/// Supervises a server until it is told to leave.
pub(super) async fn supervise(host: Arc<McpHost>, hosted: Arc<Hosted>, mut orders: mpsc::Receiver<Ordered>) {
    let mut supervisor = Supervisor { host, hosted, crashes: CrashLoop::default(), failures: 0 };
    let mut next = Next::Start;
    loop {
        let order = match next {
            Next::Leave => break,
            Next::Start => {
                let outcome = {
                    let mut run = std::pin::pin!(supervisor.run_once());
                    let outcome = until(&mut orders, &mut run).await;
                    if let Err(Some((order, _))) = &outcome {
                        // What it runs is let go only when it has ended, or has had its time.
                        supervisor.wind_down(*order, run).await;
                    }
                    outcome
                };
                match outcome {
                    Ok(ended) => {
                        next = supervisor.judge(ended).await;
                        continue;
                    }
                    Err(order) => order,
                }
            }
            Next::Pause(pause) => match until(&mut orders, tokio::time::sleep(pause)).await {
                Ok(()) => {
                    next = Next::Start;
                    continue;
                }
                Err(order) => order,
            },
            Next::Wait => orders.recv().await,
        };
        let Some((order, done)) = order else { break };
        next = supervisor.obey(order).await;
        let _ = done.send(());
    }
    let Supervisor { host, hosted, .. } = supervisor;
    hosted.bridge.close("the server was removed", false);
    hosted.endpoint.end_all();
    let mut servers = host.servers();
    if servers.get(&hosted.id).is_some_and(|known| Arc::ptr_eq(known, &hosted)) {
        servers.remove(&hosted.id);
    }
}

/// Waits for something, unless an order comes first.
async fn until<T>(
    orders: &mut mpsc::Receiver<Ordered>,
    work: impl Future<Output = T>,
) -> Result<T, Option<(Order, oneshot::Sender<()>)>> {
    tokio::select! {
        biased;
        order = orders.recv() => Err(order),
        done = work => Ok(done),
    }
}

pub(super) struct Supervisor {
    pub(super) host: Arc<McpHost>,
    pub(super) hosted: Arc<Hosted>,
    crashes: CrashLoop,
    /// Attempts in a row that had no sandbox.
    failures: u32,
}

impl Supervisor {
    /// What to do after a run.
    async fn judge(&mut self, run: Run) -> Next {
        let hosted = Arc::clone(&self.hosted);
        match run {
            Run::Gone => Next::Leave,
            Run::Elsewhere => {
                hosted.set_status(McpStatus::Elsewhere);
                hosted.bridge.close("another server of this installation runs it: ask that one", false);
                hosted.attempt_ended();
                Next::Pause(LOOK_FOR_OTHERS)
            }
            Run::NoSandbox(error) => {
                self.failures += 1;
                let (first, longest) = SANDBOX_PAUSES;
                let pause = first.saturating_mul(1 << self.failures.min(6)).min(longest);
                tracing::warn!(mcp_server = hosted.name, %error, "its sandbox can't be had; it is tried again");
                hosted.journal.note(format!("its sandbox can't be had: {error}"));
                hosted.bridge.close(&format!("the server's sandbox can't be had: {error}"), false);
                hosted.update(|state| {
                    state.status = McpStatus::Error;
                    state.error = Some(error.message.clone());
                    state.next_restart_at = Some(Utc::now() + TimeDelta::from_std(pause).unwrap_or_default());
                });
                hosted.attempt_ended();
                Next::Pause(pause)
            }
            Run::Ended(end, started) => self.ended(&end, started).await,
        }
    }

    /// The process has ended: start it again, or not.
    async fn ended(&mut self, end: &End, started: Instant) -> Next {
        self.failures = 0;
        let hosted = Arc::clone(&self.hosted);
        let still_wanted = self.host.workspaces.context.store.workspace(hosted.id).await;
        match still_wanted {
            Err(StoreError::NotFound { .. }) => return Next::Leave,
            Ok(workspace) if workspace.status == WorkspaceStatus::Destroying => return Next::Leave,
            _ => {}
        }
        let exit = end.exit(&hosted);
        let reason = exit.reason.clone();
        tracing::warn!(
            mcp_server = hosted.name, id = %hosted.id, reason, exit_code = exit.exit_code,
            stderr = exit.stderr_tail, "an MCP server has ended"
        );
        metrics::counter!("emergent_mcp_exits_total").increment(1);
        hosted.journal.note(reason.as_str());
        let message = format!("{}: {reason}", hosted.name);
        self.host.workspaces.context.events.workspace(EventKind::McpCrashed, hosted.id, message);
        let policy = hosted.config.restart_policy;
        let stays =
            policy == RestartPolicy::Never || (policy == RestartPolicy::OnFailure && end.is_success());
        if stays {
            hosted.update(|state| {
                state.status = McpStatus::Stopped;
                state.last_exit = Some(exit);
            });
            hosted.bridge.close(&format!("the MCP server is stopped: {reason}; restart it first"), false);
            hosted.attempt_ended();
            return Next::Wait;
        }
        let now = Instant::now();
        let verdict = self.crashes.crashed(started, now);
        let is_brief = verdict.pause.is_zero();
        hosted.update(|state| {
            state.status = McpStatus::Restarting;
            state.restarts += 1;
            state.recent_crashes = self.crashes.recent(now) as u64;
            state.last_exit = Some(exit);
            state.next_restart_at =
                (!is_brief).then(|| Utc::now() + TimeDelta::from_std(verdict.pause).unwrap_or_default());
        });
        let when = if is_brief {
            "it is being restarted".to_owned()
        } else {
            format!("it ends again and again, and is restarted in {} s", verdict.pause.as_secs())
        };
        hosted.bridge.close(&format!("the MCP server has ended ({reason}); {when}"), is_brief);
        if verdict.alert {
            tracing::error!(mcp_server = hosted.name, id = %hosted.id, "an MCP server ends again and again");
            metrics::counter!("emergent_mcp_crash_loops_total").increment(1);
            let message = format!("{} ends again and again: {reason}; {when}", hosted.name);
            self.host.workspaces.context.events.workspace(EventKind::McpCrashLoop, hosted.id, message);
        }
        hosted.attempt_ended();
        if is_brief { Next::Start } else { Next::Pause(verdict.pause) }
    }

    /// Ends the processes of a run that an order puts an end to. Clients are told first.
    async fn wind_down(&self, order: Order, run: std::pin::Pin<&mut impl Future<Output = Run>>) {
        let bridge = &self.hosted.bridge;
        let grace = match order {
            Order::Leave => {
                bridge.close("the MCP server is being removed", false);
                self.hosted.endpoint.end_all();
                RESTART_GRACE
            }
            Order::Restart => {
                bridge.close("the MCP server is being restarted", true);
                RESTART_GRACE
            }
            Order::Stop(grace) => {
                bridge.close("the MCP server is being stopped", false);
                self.hosted.endpoint.end_all();
                grace
            }
        };
        let Some(connection) = self.host.workspaces.context.live(self.hosted.id).connection() else {
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

    /// Carries out an order. What ran has been ended.
    async fn obey(&mut self, order: Order) -> Next {
        let hosted = Arc::clone(&self.hosted);
        match order {
            Order::Leave => {
                hosted.set_status(McpStatus::Removing);
                Next::Leave
            }
            Order::Stop(_) => {
                self.stop().await;
                hosted.set_status(McpStatus::Stopped);
                Next::Wait
            }
            Order::Restart => {
                hosted.journal.note("restarted by hand");
                self.crashes.reset();
                self.failures = 0;
                hosted.begin_anew();
                *hosted.modern.lock().await = None;
                if let Err(error) = self.renew().await {
                    tracing::warn!(mcp_server = hosted.name, %error, "its container could not be made anew");
                    hosted.journal.note(format!("its container could not be made anew: {error}"));
                }
                Next::Start
            }
        }
    }

    /// Stops the sandbox.
    pub(super) async fn stop(&self) {
        let (workspaces, id) = (&self.host.workspaces, self.hosted.id);
        let live = workspaces.context.live(id);
        let _changing = live.changing.lock().await;
        let Some(connection) = live.close_to_calls() else {
            return;
        };
        let Ok(provider) = workspaces.context.provider(connection.provider) else {
            return;
        };
        if let Err(error) = provider.stop(id).await {
            tracing::warn!(mcp_server = self.hosted.name, %error, "its sandbox could not be stopped");
        }
    }

    /// Makes the container anew on its files.
    async fn renew(&self) -> Result<(), ErrorDetail> {
        let (workspaces, id) = (&self.host.workspaces, self.hosted.id);
        let record = workspaces.context.store.workspace_record(id).await.map_err(error_of)?;
        let live = workspaces.context.live(id);
        let _changing = live.changing.lock().await;
        live.close_to_calls();
        let provider = workspaces.context.provider_of(&record)?;
        let sandbox = provider.recreate(&workspaces.context.spec_of(&record).await?).await?;
        failpoint!("mcp.renewed");
        live.set_connection(SandboxConnection { channel: sandbox.channel, provider: provider.name() });
        Ok(())
    }
}
