//! Keeps one server running.
//!
//! ```text
//!            ┌────────────────────────────────────────────────────────────────┐
//!            ▼                                                                │
//! sandbox reached ─▶ process started ─▶ initialized: ready ─▶ ended ─▶ pause (crash loop) ─┘
//!        │ failed: error, tried again            │ silent: unresponsive        └─▶ stopped (its policy)
//! ```

use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};

use chrono::{TimeDelta, Utc};
use emergent_failpoint::failpoint;
use emergent_guest_client::GuestClient;
use emergent_guest_protocol::{ConnectCall, GuestCall, ServeCall};
use emergent_mcp_bridge::crash_loop::CrashLoop;
use emergent_providers::ProviderError;
use emergent_store::{StoreError, WorkspaceRecord};
use emergent_wire::event::EventKind;
use emergent_wire::mcp::{McpStatus, RestartPolicy};
use emergent_wire::workspace::WorkspaceStatus;
use emergent_wire::{ErrorCode, ErrorDetail};
use tokio::sync::{mpsc, oneshot};

use super::McpHost;
use super::hosted::{Hosted, Order, Ordered};
use super::process::{self, End, Process};
use crate::workspace::{Reached, error_of};

/// How long a process has after SIGTERM when it is restarted by hand.
const RESTART_GRACE: Duration = Duration::from_secs(10);
/// How long what a lost server left in a sandbox has after SIGTERM.
const LEFTOVER_GRACE: Duration = Duration::from_secs(3);
/// A server that was not heard of for so long is asked whether it is there.
const ASK_AFTER: Duration = Duration::from_secs(30);
/// How long it may take to answer.
const ANSWERS_WITHIN: Duration = Duration::from_secs(10);
/// The first pause after a sandbox could not be had, and the longest.
const SANDBOX_PAUSES: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));
/// How often a server is looked for that another runs.
const LOOK_FOR_OTHERS: Duration = Duration::from_secs(2);
/// A process that has not been initialized by then is called unresponsive; it may still become ready.
const INITIALIZED_WITHIN: Duration = Duration::from_secs(30);
/// How long it is waited at once for a server that is late to listen.
const LISTENS_WITHIN: Duration = Duration::from_secs(600);
/// For those that take for ever.
const FOR_EVER: Duration = Duration::from_secs(365 * 24 * 3600);

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

/// Why a run has ended.
enum Run {
    /// The process is no more; when it was started.
    Ended(End, Instant),
    /// The sandbox can't be had.
    NoSandbox(ErrorDetail),
    /// Another server runs it.
    Elsewhere,
    /// Its row is gone.
    Gone,
}

/// Supervises a server until it is told to leave.
pub(super) async fn run(host: Arc<McpHost>, hosted: Arc<Hosted>, mut orders: mpsc::Receiver<Ordered>) {
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

struct Supervisor {
    host: Arc<McpHost>,
    hosted: Arc<Hosted>,
    crashes: CrashLoop,
    /// Attempts in a row that had no sandbox.
    failures: u32,
}

impl Supervisor {
    /// Runs the process once.
    async fn run_once(&self) -> Run {
        let hosted = &self.hosted;
        hosted.set_status(McpStatus::Starting);
        let prepared = {
            // Not all at once: starting a sandbox takes the host a while.
            let _place = self.host.starts.acquire().await;
            self.prepare().await
        };
        let (reached, program) = match prepared {
            Ok(Some(prepared)) => prepared,
            Ok(None) => return Run::Elsewhere,
            Err(error) if error.code == ErrorCode::NotFound => return Run::Gone,
            Err(error) => return Run::NoSandbox(error),
        };
        failpoint!("mcp.sandbox_reached");
        hosted.set_program(&program);
        let started = Instant::now();
        let kills_before = self.oom_kills(&reached);
        hosted.stand(|standing| {
            standing.started_at = Some(Utc::now());
            standing.next_restart_at = None;
        });
        let end = if !hosted.config.stdio_bridge {
            self.run_http(&reached.channel, &program).await
        } else if hosted.is_per_session() {
            let _nobody_reads = hosted.bridge.open();
            self.ready();
            End::Lost(reached.channel.closed().await.to_string())
        } else {
            self.run_bridged(&reached.channel, &program).await
        };
        failpoint!("mcp.process_ended");
        let mut end = self.explain(end).await;
        if let End::Exited(answer) = &mut end {
            // What the host has ended, only the host knows.
            answer.oom_killed |= answer.exit_code != Some(0) && self.oom_kills(&reached) > kills_before;
        }
        Run::Ended(end, started)
    }

    fn oom_kills(&self, reached: &Reached) -> u64 {
        let provider = self.host.workspaces.provider(reached.provider);
        provider.map_or(0, |provider| provider.oom_kills(self.hosted.id))
    }

    /// Reaches the sandbox, and says what is to be run in it. None when another server does that.
    async fn prepare(&self) -> Result<Option<(Reached, ServeCall)>, ErrorDetail> {
        let (host, id) = (&self.host, self.hosted.id);
        let workspaces = &host.workspaces;
        let record = workspaces.store.workspace_record(id).await.map_err(error_of)?;
        if record.workspace.status == WorkspaceStatus::Destroying {
            return Err(ErrorDetail::new(ErrorCode::NotFound, "it is being removed"));
        }
        if record.workspace.status == WorkspaceStatus::Error {
            // Only a row says so, and it is nobody's then.
            let (from, to) = (&[WorkspaceStatus::Error], WorkspaceStatus::Ready);
            workspaces.store.transition(id, from, to).await.map_err(error_of)?;
        }
        if record.owner != Some(workspaces.store.server()) && workspaces.take_over(&record).await.is_err() {
            return Ok(None);
        }
        let live = workspaces.live(id);
        let _changing = live.changing.lock().await;
        let reached = match live.reached() {
            Some(reached) => reached,
            None => {
                let reached = self.reach(&record).await?;
                // What a server that was killed had started may still be ending.
                process::end_all(&reached.channel, LEFTOVER_GRACE).await;
                live.set_reached(reached.clone());
                reached
            }
        };
        let provider = workspaces.provider_of(&record)?;
        let image = provider.image_program(&record.image).await?;
        Ok(Some((reached, process::program(&self.hosted.config, image)?)))
    }

    /// A channel to the sandbox, which may have ended, or be gone.
    async fn reach(&self, record: &WorkspaceRecord) -> Result<Reached, ErrorDetail> {
        let workspaces = &self.host.workspaces;
        let provider = workspaces.provider_of(record)?;
        let spec = workspaces.spec_of(record).await?;
        let channel = match provider.open_channel(&spec).await {
            Ok(channel) => channel,
            Err(ProviderError::NotRunning(_) | ProviderError::Gone(_)) => {
                match provider.resume(&spec).await {
                    Ok(sandbox) => sandbox.channel,
                    Err(ProviderError::Gone(why)) => {
                        tracing::error!(
                            mcp_server = self.hosted.name,
                            why,
                            "its files are lost: it begins with none"
                        );
                        self.hosted
                            .journal
                            .note("its container and its files were removed: it begins with none");
                        provider.create(&spec).await?.channel
                    }
                    Err(error) => return Err(error.into()),
                }
            }
            Err(error) => return Err(error.into()),
        };
        Ok(Reached { channel, provider: provider.name() })
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
            never = self.attend() => match never {},
        }
    }

    /// Initializes a process, then looks now and then whether it answers.
    async fn attend(&self) -> std::convert::Infallible {
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
            Err(error) => {
                // It goes on running: what it wrote says why, and it may end by itself.
                let message = error.to_string();
                self.hosted.journal.note(message.as_str());
                self.hosted.stand(|standing| standing.error = Some(message));
                self.unresponsive("it could not be initialized");
                std::future::pending::<()>().await;
            }
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
                if self.hosted.standing().status == McpStatus::Unresponsive {
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
        hosted.stand(|standing| standing.error = None);
        if before != McpStatus::Ready {
            tracing::info!(mcp_server = hosted.name, id = %hosted.id, "an MCP server is ready");
            self.host.workspaces.events.workspace(
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
            self.host.workspaces.events.workspace(EventKind::McpUnresponsive, hosted.id, message);
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
            let record = workspaces.store.workspace_record(self.hosted.id).await.ok()?;
            workspaces.provider_of(&record).ok()?.explain_end(self.hosted.id).await
        };
        End::Lost(explained.await.unwrap_or(why))
    }

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
                hosted.stand(|standing| {
                    standing.status = McpStatus::Error;
                    standing.error = Some(error.message.clone());
                    standing.next_restart_at =
                        Some(Utc::now() + TimeDelta::from_std(pause).unwrap_or_default());
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
        let still_wanted = self.host.workspaces.store.workspace(hosted.id).await;
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
        self.host.workspaces.events.workspace(EventKind::McpCrashed, hosted.id, message);
        let policy = hosted.config.restart_policy;
        let stays =
            policy == RestartPolicy::Never || (policy == RestartPolicy::OnFailure && end.is_success());
        if stays {
            hosted.stand(|standing| {
                standing.status = McpStatus::Stopped;
                standing.last_exit = Some(exit);
            });
            hosted.bridge.close(&format!("the MCP server is stopped: {reason}; restart it first"), false);
            hosted.attempt_ended();
            return Next::Wait;
        }
        let now = Instant::now();
        let verdict = self.crashes.crashed(started, now);
        let is_brief = verdict.pause.is_zero();
        hosted.stand(|standing| {
            standing.status = McpStatus::Restarting;
            standing.restarts += 1;
            standing.recent_crashes = self.crashes.recent(now) as u64;
            standing.last_exit = Some(exit);
            standing.next_restart_at =
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
            self.host.workspaces.events.workspace(EventKind::McpCrashLoop, hosted.id, message);
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
                self.hosted.sessions.end_all();
                RESTART_GRACE
            }
            Order::Restart => {
                bridge.close("the MCP server is being restarted", true);
                RESTART_GRACE
            }
            Order::Stop(grace) => {
                bridge.close("the MCP server is being stopped", false);
                self.hosted.sessions.end_all();
                grace
            }
        };
        let Some(reached) = self.host.workspaces.live(self.hosted.id).reached() else {
            return;
        };
        let mut ending = std::pin::pin!(process::end_all(&reached.channel, grace));
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
    async fn stop(&self) {
        let (workspaces, id) = (&self.host.workspaces, self.hosted.id);
        let live = workspaces.live(id);
        let _changing = live.changing.lock().await;
        let Some(reached) = live.close_to_calls() else {
            return;
        };
        let Ok(provider) = workspaces.provider(reached.provider) else {
            return;
        };
        if let Err(error) = provider.stop(id).await {
            tracing::warn!(mcp_server = self.hosted.name, %error, "its sandbox could not be stopped");
        }
    }

    /// Makes the container anew on its files.
    async fn renew(&self) -> Result<(), ErrorDetail> {
        let (workspaces, id) = (&self.host.workspaces, self.hosted.id);
        let record = workspaces.store.workspace_record(id).await.map_err(error_of)?;
        let live = workspaces.live(id);
        let _changing = live.changing.lock().await;
        live.close_to_calls();
        let provider = workspaces.provider_of(&record)?;
        let sandbox = provider.renew(&workspaces.spec_of(&record).await?).await?;
        failpoint!("mcp.renewed");
        live.set_reached(Reached { channel: sandbox.channel, provider: provider.name() });
        Ok(())
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
