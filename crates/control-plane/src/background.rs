//! Background tasks. A task takes no input: it reads the present state and converges to the wanted one. So another run never
//! hurts, and after a crash the tasks simply start again. The log lines of a run carry the name of its task.

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

/// Idle workspaces are looked for at least this often.
const LOOK_FOR_IDLE_EVERY: Duration = Duration::from_secs(30);

/// Measured times are summed up this often: until then each is kept, whether or not anybody asks for metrics.
const TIDY_METRICS_EVERY: Duration = Duration::from_secs(10);

/// Idempotency keys, rows of the audit log and files in quarantine that are too old are removed this often.
const PRUNE_EVERY: Duration = Duration::from_secs(600);

/// Starts everything.
pub(crate) fn start(workspaces: &Arc<Workspaces>, app: &App) -> JoinSet<()> {
    let mut tasks = JoinSet::new();
    let all = || Arc::clone(workspaces);
    let settings = &workspaces.context.settings.workspaces;
    tasks.spawn(watch_health(all()));
    let metrics = app.metrics.clone();
    tasks.spawn(each("metrics", TIDY_METRICS_EVERY, all(), move |_| {
        metrics.run_upkeep();
        std::future::ready(())
    }));
    tasks.spawn(each("servers", servers::BEAT_EVERY, all(), |all| async move {
        if let Err(error) = all.context.servers.look(&all.context.store).await {
            tracing::warn!(%error, "the other servers can't be looked at");
        }
    }));
    tasks.spawn(each("audit_retention", PRUNE_EVERY, all(), {
        let audit = app.audit.clone();
        move |all| prune_audit(all, audit.clone())
    }));
    if !settings.enabled {
        // What there is stays as it is.
        app.ready.store(true, Ordering::Relaxed);
        return tasks;
    }
    tasks.spawn(each("idempotency_keys", PRUNE_EVERY, all(), |all| async move {
        if let Err(error) = all.context.store.prune_idempotency_keys(Utc::now()).await {
            tracing::warn!(%error, "old idempotency keys could not be removed");
        }
    }));
    tasks.spawn(each("quarantine", PRUNE_EVERY, all(), |all| async move { all.quarantine.prune().await }));
    tasks.spawn(each(
        "uses",
        sweep::WRITE_USES_EVERY,
        all(),
        |all| async move { all.sweeper.write_uses().await },
    ));
    tasks.spawn(each("usage", usage::LOOK_EVERY, all(), |all| async move { all.usage.measure_all().await }));
    let sweep_every = Duration::from_secs(settings.sweep_every_seconds);
    tasks.spawn(each("sweep", sweep_every, all(), |all| async move { all.sweeper.sweep_expired().await }));
    if let Some(seconds) = settings.idle_stop_seconds {
        let every = Duration::from_secs(seconds).div_f64(4.0).min(LOOK_FOR_IDLE_EVERY);
        tasks.spawn(each("idle_sweep", every, all(), |all| async move { all.sweeper.sweep_idle().await }));
    }
    tasks.spawn(each("cpu_fairness", cpu_fairness::SAMPLE_EVERY, all(), |all| async move {
        all.cpu_fairness.share_cpus().await
    }));
    tasks.spawn(Arc::clone(&workspaces.disk_guard).run().instrument(span("disk_guard")));
    tasks.spawn(recover(all(), app.clone()));
    tasks.spawn(host_mcp_servers(app.clone()));
    tasks.spawn(maintain_pool(all(), app.clone()));
    tasks
}

/// Checks the providers.
pub(crate) async fn watch_health(workspaces: Arc<Workspaces>) {
    each("health", HEALTH_EVERY, workspaces, |all| async move { all.health.check_all().await }).await;
}

/// Does something from time to time, first after the first pause.
async fn each<F: Future<Output = ()>>(
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
            // What waits for the first pass.
            workspaces.pool.changed.notify_one();
        }
    }
}

/// Looks after MCP servers that nobody looks after, at the start all of them; and ends sessions that nobody uses.
async fn host_mcp_servers(app: App) {
    let mut ticks = interval(recovery::RUN_EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        app.mcp.adopt_all().await;
        app.mcp.sweep_sessions().await;
        app.workspace_mcp.sweep();
    }
}

/// Looks after the pool, once the first recovery has ended.
async fn maintain_pool(workspaces: Arc<Workspaces>, app: App) {
    let mut ticks = interval(pool::MAINTAIN_EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = ticks.tick() => {}
            () = workspaces.pool.changed.notified() => tokio::time::sleep(pool::AFTER_A_CLAIM).await,
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
        tracing::error!(error = &error as &dyn std::error::Error, "old rows of the audit log are kept");
    }
}
