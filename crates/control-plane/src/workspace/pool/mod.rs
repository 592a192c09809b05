//! The warm pool: sandboxes that are started before anybody asks for them.
//!
//! ```text
//! maintain: what is wanted ─┬─▶ spares that are not (surplus, stale image, dead) ─▶ 'leaving' ─▶ gone
//!                           └─▶ spares that lack ─▶ 'filling' ─▶ sandbox ─▶ 'ready'
//! claim:    'ready' spare ─▶ a workspace's row with its id, in one transaction ─▶ bound to it ─▶ 'ready' workspace
//! ```
//!
//! [`maintain`](Pool::maintain) takes no input and converges, so it runs at start, after each claim, after
//! each change of the target, and from time to time. A spare is only handed out over a channel that this process has
//! open, after its agent has answered.

mod claim;
mod plan;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use emergent_failpoint::failpoint;
use emergent_guest_protocol::Configuration;
use emergent_providers::{ProviderError, SandboxId, SandboxSpec};
use emergent_store::{Shape, Spare};
use emergent_wire::event::{Event, EventKind};
use emergent_wire::pool::{PoolStatus, PoolTarget, ShapeStatus, SpareStatus};
use emergent_wire::workspace::{
    ContainerType, NetworkMode, ProviderChoice, ProviderName, ResourceLimits, SecurityLevel,
};
use emergent_wire::{Valid, WorkspaceId};
use futures_util::StreamExt;
use tokio::sync::{Notify, RwLock};

use super::context::Context;
use super::error::Result;
use super::health::ProviderHealth;
use super::live::SandboxConnection;
use super::placement::{self, PlacementRequest};

use plan::Wanted;

pub(crate) use claim::{Claimed, Miss};

/// How often the pool is looked after when nothing happens.
pub(crate) const MAINTAIN_EVERY: Duration = Duration::from_secs(15);
/// Who has just got a spare has a first command: it comes before the next spare, whose start needs a CPU.
pub(crate) const AFTER_A_CLAIM: Duration = Duration::from_millis(400);
/// A new sandbox is busy with itself for a moment (it starts shells ahead): a claim would have to wait for it.
const SETTLE: Duration = Duration::from_millis(300);
/// Spares that are made or removed at once.
const AT_ONCE: usize = 2;
/// After a failure nothing is made for this long; doubled with each further one …
const FIRST_PAUSE: Duration = Duration::from_secs(5);
/// … up to this.
const LONGEST_PAUSE: Duration = Duration::from_secs(120);
/// Where a target that was set at run time is kept.
const SETTING: &str = "pool";

/// The warm pool.
pub(crate) struct Pool {
    context: Arc<Context>,
    health: Arc<ProviderHealth>,
    /// Spares that can be handed out.
    open: Mutex<HashMap<WorkspaceId, OpenSpare>>,
    /// Shapes that can't be made now.
    failing: Mutex<HashMap<Shape, Failing>>,
    /// Something changed: the pool is looked after at once.
    pub(crate) changed: Notify,
    /// Whether any spares are wanted.
    is_on: AtomicBool,
    /// One pass at a time.
    passing: tokio::sync::Mutex<()>,
    /// How often this server has set the target. It is read-locked while the row of a new spare is inserted, so that once a
    /// target is set, no spare is begun for the one before.
    target_revision: RwLock<u64>,
}

/// A spare with its channel.
struct OpenSpare {
    spare: Spare,
    /// The provider's own id of its sandbox.
    sandbox: SandboxId,
    connection: SandboxConnection,
    /// What the workspace that it becomes should know.
    warnings: Vec<String>,
}

#[derive(Clone)]
struct Failing {
    problem: String,
    pause: Duration,
    until: Instant,
}

/// A kind of spare with everything filled in; no provider: none can be used now.
struct Resolved {
    shape: Result<Shape, String>,
    image: String,
    network: NetworkMode,
    limits: ResourceLimits,
    size: u32,
}

impl Pool {
    pub(super) fn new(context: &Arc<Context>, health: &Arc<ProviderHealth>) -> Arc<Self> {
        Arc::new(Self {
            context: Arc::clone(context),
            health: Arc::clone(health),
            open: Mutex::default(),
            failing: Mutex::default(),
            changed: Notify::new(),
            is_on: AtomicBool::default(),
            passing: tokio::sync::Mutex::default(),
            target_revision: RwLock::default(),
        })
    }

    fn open(&self) -> MutexGuard<'_, HashMap<WorkspaceId, OpenSpare>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn failing(&self) -> MutexGuard<'_, HashMap<Shape, Failing>> {
        self.failing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_paused(&self, shape: &Shape) -> bool {
        self.failing().get(shape).is_some_and(|failing| failing.until > Instant::now())
    }

    /// Whether this process has an open channel to a spare.
    fn has_channel(&self, id: WorkspaceId) -> bool {
        self.open().get(&id).is_some_and(|open| !open.connection.channel.is_closed())
    }

    /// What the pool shall hold, and whether that was set at run time.
    async fn target(&self) -> Result<(PoolTarget, bool)> {
        let text = self.context.store.setting(SETTING).await?.unwrap_or_default();
        if text.is_empty() {
            return Ok((self.configured_target(), false));
        }
        let target = serde_json::from_str(&text).unwrap_or_else(|error| {
            tracing::error!(%error, "the pool's setting can't be read: the configuration holds");
            self.configured_target()
        });
        Ok((target, true))
    }

    /// What this server's configuration asks for, and those of the providers' hosts.
    fn configured_target(&self) -> PoolTarget {
        let mut target = self.context.settings.pool.target();
        target.shapes.extend(self.health.wanted_spares());
        target
    }

    /// Sets what the pool shall hold, until it is set again or reset (none: the configuration holds again).
    pub(crate) async fn set_target(&self, target: Option<Valid<PoolTarget>>) -> Result<()> {
        let text = match target {
            None => String::new(),
            Some(target) => serde_json::to_string(&*target).unwrap_or_default(),
        };
        let mut revision = self.target_revision.write().await;
        self.context.store.put_setting(SETTING, &text).await?;
        *revision += 1;
        drop(revision);
        self.failing().clear();
        self.changed.notify_one();
        Ok(())
    }

    /// Fills in what the target leaves open. Two kinds that come out the same are one.
    fn resolve(&self, target: &PoolTarget) -> Vec<Resolved> {
        let settings = &self.context.settings.workspaces;
        let mut all: Vec<Resolved> = Vec::new();
        for wanted in &target.shapes {
            let image = wanted.image.clone().unwrap_or_else(|| settings.default_image.clone());
            let network = wanted.network.unwrap_or(NetworkMode::Nat);
            let limits = wanted.resource_limits.unwrap_or_default().or(settings.default_limits());
            let provider = self.provider_for(wanted.provider.unwrap_or(ProviderChoice::Auto));
            let shape = provider.map(|provider| Shape { provider, image: image.clone(), network, limits });
            match all.iter_mut().find(|known| known.shape.is_ok() && known.shape == shape) {
                Some(known) => known.size += wanted.size,
                None => all.push(Resolved { shape, image, network, limits, size: wanted.size }),
            }
        }
        all
    }

    /// The provider that a request without further wishes would get.
    fn provider_for(&self, provider: ProviderChoice) -> Result<ProviderName, String> {
        let wish = PlacementRequest {
            container_type: ContainerType::AgentWorkspace,
            provider,
            deployment: self.context.settings.workspaces.deployment_mode,
            security: SecurityLevel::Standard,
        };
        let plan = placement::plan(wish, &self.health.known()).map_err(|error| error.to_string())?;
        let first = plan.candidates.first().ok_or("no provider can be used")?;
        Ok(first.provider)
    }

    /// One pass: makes the pool what it shall be. What fails is logged and tried again by the next.
    pub(crate) async fn maintain(&self) {
        let _one = self.passing.lock().await;
        if let Err(error) = self.try_maintain().await {
            tracing::warn!(%error, "the pool can't be looked after; it will be tried again");
        }
    }

    async fn try_maintain(&self) -> Result<()> {
        let revision = *self.target_revision.read().await;
        let (target, _) = self.target().await?;
        let is_on = target.shapes.iter().any(|shape| shape.size > 0);
        self.is_on.store(is_on, Ordering::Relaxed);
        let wanted = self.wanted(&target).await;
        let spares = self.context.store.spares().await?.readable;
        let owners = spares.iter().map(|spare| spare.owner);
        self.context.servers.look_for(owners, &self.context.store).await?;
        self.forget_spares(&spares);
        let dead = self.adopt_spares(&spares).await;
        let steps = {
            // Passes don't overlap: what this server was making or removing before this one, it is not any more.
            let is_free = |spare: &Spare| self.context.is_mine_to_change(spare.owner);
            plan::plan(&wanted, &spares, |id| dead.contains(&id), is_free)
        };
        tokio::join!(self.withdraw_all(steps.withdraw), self.fill_all(steps.fill, revision));
        self.count_spares().await;
        Ok(())
    }

    /// What is wanted, as far as it can be had now.
    async fn wanted(&self, target: &PoolTarget) -> Vec<Wanted> {
        let mut all = Vec::new();
        for resolved in self.resolve(target) {
            let Ok(shape) = resolved.shape else {
                continue;
            };
            let digest = match self.context.provider(shape.provider) {
                Ok(provider) => provider.image_digest(&shape.image).await.map_err(|error| error.to_string()),
                Err(error) => Err(error.to_string()),
            };
            match digest {
                Ok(digest) => all.push(Wanted { shape, digest, size: resolved.size }),
                Err(problem) => self.note_failure(&shape, &problem),
            }
        }
        all
    }

    /// Drops the channels to spares that are none any more.
    fn forget_spares(&self, spares: &[Spare]) {
        let is_ready = |id| spares.iter().any(|spare| spare.id == id && spare.status == SpareStatus::Ready);
        self.open().retain(|id, _| is_ready(*id));
    }

    /// Opens channels to the ready spares that this process has none to. Gives those that are dead.
    async fn adopt_spares(&self, spares: &[Spare]) -> Vec<WorkspaceId> {
        let mut dead = Vec::new();
        for spare in spares.iter().filter(|spare| spare.status == SpareStatus::Ready) {
            if self.has_channel(spare.id) {
                continue;
            }
            let Ok(provider) = self.context.provider(spare.shape.provider) else {
                continue;
            };
            // It has been told before; and by now it may be a workspace's, which must not be told anything else.
            let spec = SandboxSpec { configuration: None, ..self.spare_spec(spare.id, &spare.shape) };
            let opened = async {
                let sandbox = provider.sandbox_id(spare.id).await?;
                Ok((sandbox, provider.open_channel(&spec).await?))
            };
            match opened.await {
                Ok((sandbox, channel)) => {
                    let warnings = provider.warnings(&spec).await;
                    let connection = SandboxConnection { channel, provider: provider.name() };
                    let open = OpenSpare { spare: spare.clone(), sandbox, connection, warnings };
                    self.open().insert(spare.id, open);
                    tracing::info!(spare = %spare.id, "a spare was adopted");
                }
                Err(ProviderError::Unavailable(problem)) => {
                    tracing::debug!(spare = %spare.id, problem, "the spare can't be connected to now");
                }
                Err(error) => {
                    tracing::info!(spare = %spare.id, %error, "a spare is dead");
                    dead.push(spare.id);
                }
            }
        }
        dead
    }

    async fn withdraw_all(&self, spares: Vec<Spare>) {
        futures_util::stream::iter(spares)
            .for_each_concurrent(AT_ONCE, |spare| async move {
                if let Err(error) = self.withdraw(&spare).await {
                    tracing::warn!(spare = %spare.id, %error, "a spare can't be removed; it will be tried again");
                }
            })
            .await;
    }

    async fn fill_all(&self, wanted: Vec<Wanted>, target_revision: u64) {
        futures_util::stream::iter(wanted)
            .for_each_concurrent(AT_ONCE, |wanted| async move { self.fill(wanted, target_revision).await })
            .await;
    }

    /// Removes a spare.
    async fn withdraw(&self, spare: &Spare) -> Result<()> {
        if !self.context.store.withdraw_spare(spare.id, spare.owner).await? {
            return Ok(());
        }
        failpoint!("withdraw.row_written");
        self.open().remove(&spare.id);
        self.context.provider(spare.shape.provider)?.destroy(spare.id).await?;
        failpoint!("withdraw.destroyed");
        self.context.store.delete_spare(spare.id).await?;
        failpoint!("withdraw.row_deleted");
        tracing::info!(spare = %spare.id, "a spare was removed");
        Ok(())
    }

    /// Makes a spare, unless there are enough.
    async fn fill(&self, wanted: Wanted, target_revision: u64) {
        if self.is_paused(&wanted.shape) {
            return;
        }
        match self.try_fill(&wanted, target_revision).await {
            Ok(()) => {
                self.failing().remove(&wanted.shape);
            }
            Err(error) => self.note_failure(&wanted.shape, &error.to_string()),
        }
    }

    async fn try_fill(&self, wanted: &Wanted, target_revision: u64) -> Result<()> {
        let id = WorkspaceId::generate();
        let Wanted { shape, digest, size } = wanted;
        let revision = self.target_revision.read().await;
        if *revision != target_revision || !self.context.store.insert_spare(id, shape, digest, *size).await? {
            return Ok(());
        }
        drop(revision);
        failpoint!("fill.row_written");
        let provider = self.context.provider(shape.provider)?;
        let sandbox = match provider.create(&self.spare_spec(id, shape)).await {
            Ok(sandbox) => sandbox,
            Err(error) => {
                provider.destroy(id).await?;
                self.context.store.delete_spare(id).await?;
                return Err(error.into());
            }
        };
        failpoint!("fill.made");
        tokio::time::sleep(SETTLE).await;
        let spare = Spare {
            id,
            shape: shape.clone(),
            image_digest: digest.clone(),
            status: SpareStatus::Ready,
            owner: None,
            created_at: self.context.clock.now(),
        };
        let connection = SandboxConnection { channel: sandbox.channel, provider: provider.name() };
        let open = OpenSpare { spare, sandbox: sandbox.id, connection, warnings: sandbox.warnings };
        self.context.store.spare_is_ready(id).await?;
        failpoint!("fill.ready");
        self.open().insert(id, open);
        tracing::info!(spare = %id, provider = %shape.provider, image = shape.image, "a spare is ready");
        Ok(())
    }

    /// Nothing more of this kind is made for a while.
    fn note_failure(&self, shape: &Shape, problem: &str) {
        let is_new = {
            let mut failing = self.failing();
            let before = failing.get(shape);
            let pause = before.map_or(FIRST_PAUSE, |before| (before.pause * 2).min(LONGEST_PAUSE));
            let is_new = before.is_none_or(|before| before.problem != problem);
            let until = Instant::now() + pause;
            failing.insert(shape.clone(), Failing { problem: problem.to_owned(), pause, until });
            is_new
        };
        metrics::counter!("emergent_pool_failures_total").increment(1);
        if is_new {
            tracing::warn!(provider = %shape.provider, image = shape.image, problem, "spares can't be made");
            self.context.events.tell(Event {
                at: chrono::Utc::now(),
                kind: EventKind::PoolProblem,
                workspace_id: None,
                provider: Some(shape.provider),
                message: format!("spares of {} can't be made: {problem}", shape.image),
            });
        }
    }

    async fn count_spares(&self) {
        if let Ok(spares) = self.context.store.spares().await.map(|spares| spares.readable) {
            for status in SpareStatus::ALL {
                let count = spares.iter().filter(|spare| spare.status == *status).count();
                #[allow(clippy::cast_precision_loss, reason = "a count of spares is small")]
                metrics::gauge!("emergent_pool_spares", "status" => status.as_str()).set(count as f64);
            }
        }
    }

    /// The pool as it stands.
    pub(crate) async fn status(&self) -> Result<PoolStatus> {
        let (target, set_at_run_time) = self.target().await?;
        let spares = self.context.store.spares().await?.readable;
        let failing = self.failing().clone();
        let mut matched = 0;
        let mut shapes = Vec::new();
        for resolved in self.resolve(&target) {
            let count = |status| {
                let of_shape = |spare: &&Spare| resolved.shape.as_ref() == Ok(&spare.shape);
                let found = spares.iter().filter(of_shape).filter(|spare| spare.status == status).count();
                u32::try_from(found).unwrap_or(u32::MAX)
            };
            let (ready, filling) = (count(SpareStatus::Ready), count(SpareStatus::Filling));
            matched += ready + filling;
            let problem = match &resolved.shape {
                Ok(shape) => failing.get(shape).map(|failing| failing.problem.clone()),
                Err(problem) => Some(problem.clone()),
            };
            shapes.push(ShapeStatus {
                provider: resolved.shape.ok().map(|shape| shape.provider),
                image: resolved.image,
                resource_limits: resolved.limits,
                network: resolved.network,
                size: resolved.size,
                ready,
                filling,
                problem,
            });
        }
        let all = u32::try_from(spares.len()).unwrap_or(u32::MAX);
        Ok(PoolStatus { set_at_run_time, shapes, leaving: all.saturating_sub(matched) })
    }

    /// The sandbox of a spare. It belongs to nobody: no variables.
    fn spare_spec(&self, id: WorkspaceId, shape: &Shape) -> SandboxSpec {
        let max_tasks = self.context.settings.workspaces.max_tasks;
        SandboxSpec {
            id,
            container_type: ContainerType::AgentWorkspace,
            image: shape.image.clone(),
            limits: shape.limits,
            max_tasks,
            network: shape.network,
            snapshot: None,
            volumes: Vec::new(),
            configuration: Some(Configuration { max_tasks: Some(max_tasks), ..Configuration::default() }),
        }
    }
}
