//! Background tasks. A task takes no input: each run reads the present state and changes it towards the configured one. Runs are
//! idempotent, and after a crash the tasks start again. The log lines of a run carry the name of its task.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use chrono::Utc;
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval};
use tracing::Instrument as _;

use crate::audit::Audit;
use crate::audit_retention;
use crate::http::App;
use crate::workspace::{
    Context, HEALTH_EVERY, Workspaces, cpu_fairness, pool, recovery, servers, sweep, usage,
};

/// The longest interval of the sweep for idle workspaces.
const MAX_IDLE_SWEEP_EVERY: Duration = Duration::from_secs(30);

/// The interval in which measured times are aggregated. Without it the recorder keeps each until the next request for metrics.
const METRICS_UPKEEP_EVERY: Duration = Duration::from_secs(10);

/// The interval in which old idempotency keys, audit rows and files in quarantine are removed.
const PRUNE_EVERY: Duration = Duration::from_secs(600);

/// The interval in which the tokens of MCP sessions are checked.
const CHECK_SESSIONS_EVERY: Duration = Duration::from_millis(500);

/// Starts all tasks.
pub(crate) fn start(workspaces: &Arc<Workspaces>, app: &App) -> JoinSet<()> {
    let mut tasks = JoinSet::new();
    let all = || Arc::clone(workspaces);
    let settings = &workspaces.context.settings.workspaces;
    tasks.spawn(watch_health(all()));
    let metrics = app.metrics.clone();
    tasks.spawn(repeat("metrics", METRICS_UPKEEP_EVERY, all(), move |_| {
        metrics.run_upkeep();
        std::future::ready(())
    }));
    tasks.spawn(repeat("servers", servers::BEAT_EVERY, all(), |all| async move {
        if let Err(error) = all.context.servers.refresh(&all.context.store).await {
            tracing::warn!(%error, "the heartbeats of the servers on this database can't be exchanged");
        }
    }));
    tasks.spawn(repeat("audit_retention", PRUNE_EVERY, all(), {
        let audit = app.audit.clone();
        move |all| prune_audit(all, audit.clone())
    }));
    if !settings.enabled {
        // Existing workspaces are not changed.
        app.ready.store(true, Ordering::Relaxed);
        return tasks;
    }
    tasks.spawn(repeat("idempotency_keys", PRUNE_EVERY, all(), |all| async move {
        if let Err(error) = all.context.store.prune_idempotency_keys(Utc::now()).await {
            tracing::warn!(%error, "old idempotency keys could not be removed");
        }
    }));
    tasks.spawn(repeat("quarantine", PRUNE_EVERY, all(), |all| async move { all.quarantine.prune().await }));
    tasks.spawn(repeat("uses", sweep::WRITE_USES_EVERY, all(), |all| async move {
        all.sweeper.write_uses().await
    }));
    tasks.spawn(repeat(
        "usage",
        usage::MEASURE_EVERY,
        all(),
        |all| async move { all.usage.measure_all().await },
    ));
    let sweep_every = Duration::from_secs(settings.sweep_every_seconds);
    tasks.spawn(repeat("sweep", sweep_every, all(), |all| async move { all.sweeper.sweep_expired().await }));
    if let Some(seconds) = settings.idle_stop_seconds {
        let every = Duration::from_secs(seconds).div_f64(4.0).min(MAX_IDLE_SWEEP_EVERY);
        tasks.spawn(repeat("idle_sweep", every, all(), |all| async move { all.sweeper.sweep_idle().await }));
    }
    tasks.spawn(repeat("cpu_fairness", cpu_fairness::SAMPLE_EVERY, all(), |all| async move {
        all.cpu_fairness.share_cpus().await
    }));
    tasks.spawn(guard_disk(all()));
    tasks.spawn(recover(all(), app.clone()));
    tasks.spawn(host_mcp_servers(app.clone()));
    tasks.spawn(repeat("mcp_sessions", CHECK_SESSIONS_EVERY, all(), {
        let app = app.clone();
        move |_| end_sessions_without_token(app.clone())
    }));
    tasks.spawn(maintain_pool(all(), app.clone()));
    tasks
}

/// Checks the health of the providers periodically.
pub(crate) async fn watch_health(workspaces: Arc<Workspaces>) {
    repeat("health", HEALTH_EVERY, workspaces, |all| async move { all.health.check_all().await }).await;
}

/// Runs a task periodically. The first run begins after the first pause.
async fn repeat<F: Future<Output = ()>>(
    name: &'static str,
    every: Duration,
    workspaces: Arc<Workspaces>,
    work: impl Fn(Arc<Workspaces>) -> F,
) {
    let mut ticks = interval(every);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks.tick().await;
    loop {
        ticks.tick().await;
        work(Arc::clone(&workspaces)).instrument(span(name)).await;
    }
}

/// The span of one run of a task.
fn span(task: &'static str) -> tracing::Span {
    tracing::info_span!("background", task)
}

async fn recover(workspaces: Arc<Workspaces>, app: App) {
    let mut ticks = interval(recovery::RUN_EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = ticks.tick() => {}
            () = workspaces.health.provider_recovered() => {}
            () = workspaces.context.servers.died.notified() => {}
        }
        workspaces.recovery.run().instrument(span("recovery")).await;
        if !app.ready.swap(true, Ordering::Relaxed) {
            // The pool waits for the first pass.
            workspaces.pool.changed.notify_one();
        }
    }
}

/// Watches the host's disk, in short pauses while it is nearly full.
async fn guard_disk(workspaces: Arc<Workspaces>) {
    loop {
        let pause = workspaces.disk_guard.run().instrument(span("disk_guard")).await;
        tokio::time::sleep(pause).await;
    }
}

/// Starts supervisors for MCP servers without one, and ends idle sessions of MCP clients.
async fn host_mcp_servers(app: App) {
    let mut ticks = interval(recovery::RUN_EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let run = async {
            app.mcp.adopt_all().await;
            app.mcp.sweep_sessions().await;
            app.workspace_mcp.sweep();
        };
        run.instrument(span("mcp_servers")).await;
    }
}

/// Ends the MCP sessions of tokens that were revoked, by any server of the installation, or have expired. A session outlives its
/// requests, so access control does not end it.
async fn end_sessions_without_token(app: App) {
    for owner in app.mcp.session_owners().union(&app.workspace_mcp.session_owners()) {
        // While the database does not answer, the sessions continue, as requests with cached tokens do.
        if let Ok(false) = app.workspaces.context.store.is_token_usable(*owner, Utc::now()).await {
            tracing::info!(token_id = %owner, "the MCP sessions of a token that was revoked or expired are ended");
            app.mcp.end_sessions_of(*owner);
            app.workspace_mcp.end_sessions_of(*owner);
        }
    }
}

/// Maintains the pool after the first recovery pass.
async fn maintain_pool(workspaces: Arc<Workspaces>, app: App) {
    let mut ticks = interval(pool::MAINTAIN_EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = ticks.tick() => {}
            () = workspaces.pool.changed.notified() => tokio::time::sleep(pool::REFILL_DELAY).await,
        }
        if app.ready.load(Ordering::Relaxed) {
            workspaces.pool.maintain().instrument(span("pool")).await;
        }
    }
}

async fn prune_audit(workspaces: Arc<Workspaces>, audit: Audit) {
    let Context { store, settings, .. } = &*workspaces.context;
    let pruned =
        audit_retention::prune(store, &audit, &settings.data_dir, settings.audit.retention_days, Utc::now());
    if let Err(error) = pruned.await {
        tracing::error!(
            error = &error as &dyn std::error::Error,
            "old rows of the audit log can't be removed; it will be tried again"
        );
    }
}
