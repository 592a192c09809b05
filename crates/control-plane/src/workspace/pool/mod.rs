//! The warm pool: sandboxes that are started before they are requested, called spares.
//!
//! ```text
//! maintain: target ─┬─▶ spares that do not match it (surplus, stale image or agent, dead) ─▶ 'leaving' ─▶ removed
//!                   └─▶ missing spares ─▶ 'filling' ─▶ sandbox ─▶ 'ready'
//! claim:    'ready' spare ─▶ a workspace's row with its id, in one transaction ─▶ bound to it ─▶ 'ready' workspace
//! ```
//!
//! [`maintain`](Pool::maintain) is idempotent. It runs at the start, after each claim, after each change of the target, and
//! periodically. A claim takes only spares to which this process has an open channel, whose agent has answered.

mod claim;
mod plan;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use emergent_failpoint::failpoint;
use emergent_guest_protocol::{Configuration, PROTOCOL_VERSION};
use emergent_providers::{ProviderError, SandboxId, SandboxSpec};
use emergent_store::{Shape, Spare};
use emergent_wire::event::{Event, EventKind};
use emergent_wire::pool::{PoolStatus, PoolTarget, ShapeStatus, SpareStatus};
use emergent_wire::workspace::{
    ContainerType, NetworkMode, ProviderChoice, ProviderName, ResourceLimits, SecurityLevel,
};
use emergent_wire::{ErrorCode, Valid, WorkspaceId};
use futures_util::StreamExt;
use parking_lot::Mutex;
use tokio::sync::{Notify, RwLock};

use super::context::Context;
use super::error::{Result, WorkspaceError, damaged_setting};
use super::health::ProviderHealth;
use super::live::SandboxConnection;
use super::placement::{self, PlacementRequest};

use plan::Wanted;

pub(crate) use claim::{Claimed, Miss};

/// The interval of passes.
pub(crate) const MAINTAIN_EVERY: Duration = Duration::from_secs(15);
/// Refill is delayed by this time, so that the claimed workspace's first command gets the CPU.
pub(crate) const REFILL_DELAY: Duration = Duration::from_millis(400);
/// A new spare is `ready` after this time. Before, its agent is busy with starting shells, which would delay a claim.
const SETTLE_TIME: Duration = Duration::from_millis(300);
/// The limit on spares that are made or removed at the same time.
const MAX_CHANGES: usize = 2;
/// The pause after a failure to make a spare. It doubles with each further failure.
const FIRST_PAUSE: Duration = Duration::from_secs(5);
/// The longest pause.
const LONGEST_PAUSE: Duration = Duration::from_secs(120);
/// The setting in the database with the target that was set at run time.
const SETTING: &str = "pool";

/// The warm pool.
pub(crate) struct Pool {
    context: Arc<Context>,
    health: Arc<ProviderHealth>,
    /// Spares with an open channel. Claims take them from here.
    open: Mutex<HashMap<WorkspaceId, OpenSpare>>,
    /// Shapes of which no spare can be made now.
    failing: Mutex<HashMap<Shape, Backoff>>,
    /// Notified when the pool needs a pass.
    pub(crate) changed: Notify,
    /// Whether the target has any spares.
    is_on: AtomicBool,
    /// One pass at a time.
    passing: tokio::sync::Mutex<()>,
    /// Counts the changes of the target by this server. A read lock is held while the row of a new spare is inserted, so no spare is
    /// begun for an older target after a change.
    target_revision: RwLock<u64>,
}

/// A spare with its channel.
struct OpenSpare {
    spare: Spare,
    /// The provider's own id of its sandbox.
    sandbox: SandboxId,
    connection: SandboxConnection,
    /// Warnings for the workspace that claims it.
    warnings: Vec<String>,
}

/// The pause after failures to make spares of a shape.
#[derive(Clone)]
struct Backoff {
    problem: String,
    code: ErrorCode,
    pause: Duration,
    until: Instant,
}

/// A shape of the target with all defaults filled in.
struct ResolvedShape {
    /// The reason if no provider can be used now.
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

    fn is_paused(&self, shape: &Shape) -> bool {
        self.failing.lock().get(shape).is_some_and(|failing| failing.until > Instant::now())
    }

    /// Whether this process has an open channel to a spare.
    fn has_channel(&self, id: WorkspaceId) -> bool {
        self.open.lock().get(&id).is_some_and(|open| !open.connection.channel.is_closed())
    }

    /// The target, and whether it was set at run time.
    async fn target(&self) -> Result<(PoolTarget, bool)> {
        let text = self.context.store.setting(SETTING).await?.unwrap_or_default();
        if text.is_empty() {
            return Ok((self.configured_target(), false));
        }
        let target = serde_json::from_str(&text).map_err(|error| damaged_setting(SETTING, error))?;
        Ok((target, true))
    }

    /// The target of this server's configuration and of the providers' hosts.
    fn configured_target(&self) -> PoolTarget {
        let mut target = self.context.settings.pool.target();
        target.shapes.extend(self.health.wanted_spares());
        target
    }

    /// Sets the target. None resets it to that of the configuration.
    pub(crate) async fn set_target(&self, target: Option<Valid<PoolTarget>>) -> Result<()> {
        let text = match target {
            None => String::new(),
            Some(target) => serde_json::to_string(&*target).map_err(WorkspaceError::Unwritable)?,
        };
        let mut revision = self.target_revision.write().await;
        self.context.store.put_setting(SETTING, &text).await?;
        *revision += 1;
        drop(revision);
        self.failing.lock().clear();
        self.changed.notify_one();
        Ok(())
    }

    /// Fills in the defaults of the target. Equal shapes become one.
    fn resolve(&self, target: &PoolTarget) -> Vec<ResolvedShape> {
        let settings = &self.context.settings.workspaces;
        let mut all: Vec<ResolvedShape> = Vec::new();
        for wanted in &target.shapes {
            let image = wanted.image.clone().unwrap_or_else(|| settings.default_image.clone());
            let network = wanted.network.unwrap_or(NetworkMode::Nat);
            let limits = wanted.resource_limits.unwrap_or_default().or(settings.default_limits());
            let provider = self.provider_for(wanted.provider.unwrap_or(ProviderChoice::Auto));
            let shape = provider.map(|provider| Shape { provider, image: image.clone(), network, limits });
            match all.iter_mut().find(|known| known.shape.is_ok() && known.shape == shape) {
                Some(known) => known.size += wanted.size,
                None => all.push(ResolvedShape { shape, image, network, limits, size: wanted.size }),
            }
        }
        all
    }

    /// The provider that a request with default values would get.
    fn provider_for(&self, provider: ProviderChoice) -> Result<ProviderName, String> {
        let request = PlacementRequest {
            container_type: ContainerType::AgentWorkspace,
            provider,
            deployment: self.context.settings.workspaces.deployment_mode,
            security: SecurityLevel::Standard,
        };
        let plan = placement::plan(request, &self.health.known()).map_err(|error| error.to_string())?;
        let first = plan.candidates.first().ok_or("no provider can be used")?;
        Ok(first.provider)
    }

    /// Runs one pass: removes and makes spares until the pool matches the target. Failures are logged, and the next pass tries again.
    pub(crate) async fn maintain(&self) {
        let _pass = self.passing.lock().await;
        if let Err(error) = self.try_maintain().await {
            tracing::warn!(%error, "the pool can't be maintained; it will be tried again");
        }
    }

    async fn try_maintain(&self) -> Result<()> {
        let revision = *self.target_revision.read().await;
        let (target, _) = self.target().await?;
        let is_on = target.shapes.iter().any(|shape| shape.size > 0);
        self.is_on.store(is_on, Ordering::Relaxed);
        let wanted = self.wanted(&target).await;
        // Recovery logs damaged rows and leaves their sandboxes alone.
        let spares = self.context.store.spares().await?.readable;
        let owners = spares.iter().map(|spare| spare.owner);
        self.context.servers.refresh_for(owners, &self.context.store).await?;
        self.drop_channels(&spares);
        let unusable = self.adopt_spares(&spares).await;
        let steps = {
            // Passes don't overlap, so this server is not making or removing any spare now.
            let is_abandoned = |spare: &Spare| self.context.may_change(spare.owner);
            plan::plan(&wanted, &spares, |id| unusable.contains(&id), is_abandoned)
        };
        tokio::join!(self.withdraw_all(steps.withdraw), self.fill_all(steps.fill, revision));
        self.count_spares().await
    }

    /// The shapes of the target that can be made now.
    async fn wanted(&self, target: &PoolTarget) -> Vec<Wanted> {
        let mut all = Vec::new();
        for resolved in self.resolve(target) {
            let Ok(shape) = resolved.shape else {
                continue;
            };
            match self.image_digest(&shape).await {
                Ok(digest) => all.push(Wanted { shape, digest, size: resolved.size }),
                Err(error) => self.note_failure(&shape, &error),
            }
        }
        all
    }

    async fn image_digest(&self, shape: &Shape) -> Result<String> {
        Ok(self.context.provider(shape.provider)?.image_digest(&shape.image).await?)
    }

    /// Drops the channels to spares that were claimed or removed.
    fn drop_channels(&self, spares: &[Spare]) {
        let is_ready = |id| spares.iter().any(|spare| spare.id == id && spare.status == SpareStatus::Ready);
        self.open.lock().retain(|id, _| is_ready(*id));
    }

    /// Opens channels to the ready spares to which this process has none. Returns those that can't be used.
    async fn adopt_spares(&self, spares: &[Spare]) -> Vec<WorkspaceId> {
        let mut unusable = Vec::new();
        for spare in spares.iter().filter(|spare| spare.status == SpareStatus::Ready) {
            if self.has_channel(spare.id) {
                continue;
            }
            let Ok(provider) = self.context.provider(spare.shape.provider) else {
                continue;
            };
            // Without a configuration: the spare has one, and a workspace may have claimed it meanwhile.
            let spec = SandboxSpec { configuration: None, ..self.spare_spec(spare.id, &spare.shape) };
            let opened = async {
                let sandbox = provider.sandbox_id(spare.id).await?;
                Ok((sandbox, provider.open_channel(&spec).await?))
            };
            match opened.await {
                // A new workspace may need what its agent lacks, such as the reason of a git failure.
                Ok((_, channel)) if channel.protocol() < PROTOCOL_VERSION => {
                    let protocol = channel.protocol();
                    tracing::info!(spare = %spare.id, protocol, "a spare has the agent of an older server: it is replaced");
                    unusable.push(spare.id);
                }
                Ok((sandbox, channel)) => {
                    let warnings = provider.warnings(&spec).await;
                    let connection = SandboxConnection { channel, provider: provider.name() };
                    let open = OpenSpare { spare: spare.clone(), sandbox, connection, warnings };
                    self.open.lock().insert(spare.id, open);
                    tracing::info!(spare = %spare.id, "a spare was adopted");
                }
                Err(ProviderError::Unavailable(problem)) => {
                    tracing::debug!(spare = %spare.id, problem, "the spare can't be connected to now");
                }
                Err(error) => {
                    tracing::info!(spare = %spare.id, %error, "a spare is dead");
                    unusable.push(spare.id);
                }
            }
        }
        unusable
    }

    async fn withdraw_all(&self, spares: Vec<Spare>) {
        futures_util::stream::iter(spares)
            .for_each_concurrent(MAX_CHANGES, |spare| async move {
                if let Err(error) = self.withdraw(&spare).await {
                    tracing::warn!(spare = %spare.id, %error, "a spare can't be removed; it will be tried again");
                }
            })
            .await;
    }

    async fn fill_all(&self, wanted: Vec<Wanted>, target_revision: u64) {
        futures_util::stream::iter(wanted)
            .for_each_concurrent(
                MAX_CHANGES,
                |wanted| async move { self.fill(wanted, target_revision).await },
            )
            .await;
    }

    /// Removes a spare.
    async fn withdraw(&self, spare: &Spare) -> Result<()> {
        if !self.context.store.withdraw_spare(spare.id, spare.owner).await? {
            return Ok(());
        }
        failpoint!("withdraw.row_written");
        self.open.lock().remove(&spare.id);
        self.context.provider(spare.shape.provider)?.destroy(spare.id).await?;
        failpoint!("withdraw.destroyed");
        self.context.store.delete_spare(spare.id).await?;
        failpoint!("withdraw.row_deleted");
        tracing::info!(spare = %spare.id, "a spare was removed");
        Ok(())
    }

    /// Makes a spare, unless its shape has failed a moment ago.
    async fn fill(&self, wanted: Wanted, target_revision: u64) {
        if self.is_paused(&wanted.shape) {
            return;
        }
        match self.try_fill(&wanted, target_revision).await {
            Ok(()) => {
                self.failing.lock().remove(&wanted.shape);
            }
            Err(error) => self.note_failure(&wanted.shape, &error),
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
        tokio::time::sleep(SETTLE_TIME).await;
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
        self.open.lock().insert(id, open);
        tracing::info!(spare = %id, provider = %shape.provider, image = shape.image, "a spare is ready");
        Ok(())
    }

    /// Begins or prolongs the pause of a shape. Further failures with the same code are not reported again.
    fn note_failure(&self, shape: &Shape, error: &WorkspaceError) {
        let code = error.code();
        let is_new = {
            let mut failing = self.failing.lock();
            let before = failing.get(shape);
            let pause = before.map_or(FIRST_PAUSE, |before| (before.pause * 2).min(LONGEST_PAUSE));
            let is_new = before.is_none_or(|before| before.code != code);
            let until = Instant::now() + pause;
            failing.insert(shape.clone(), Backoff { problem: error.to_string(), code, pause, until });
            is_new
        };
        metrics::counter!("emergent_pool_failures_total").increment(1);
        if is_new {
            tracing::warn!(provider = %shape.provider, image = shape.image, %error, "spares can't be made");
            self.context.events.publish(Event {
                at: chrono::Utc::now(),
                kind: EventKind::PoolProblem,
                workspace_id: None,
                provider: Some(shape.provider),
                message: format!("spares of {} can't be made: {error}", shape.image),
            });
        }
    }

    /// Updates the metrics.
    async fn count_spares(&self) -> Result<()> {
        let spares = self.context.store.spares().await?.readable;
        for status in SpareStatus::ALL {
            let count = spares.iter().filter(|spare| spare.status == *status).count();
            #[allow(clippy::cast_precision_loss, reason = "a count of spares is small")]
            metrics::gauge!("emergent_pool_spares", "status" => status.as_str()).set(count as f64);
        }
        Ok(())
    }

    /// The target and the spares.
    pub(crate) async fn status(&self) -> Result<PoolStatus> {
        let (target, set_at_run_time) = self.target().await?;
        let rows = self.context.store.spares().await?;
        let (spares, unreadable) = (rows.readable, rows.unreadable.into_iter().map(Into::into).collect());
        let failing = self.failing.lock().clone();
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
        Ok(PoolStatus { set_at_run_time, shapes, leaving: all.saturating_sub(matched), unreadable })
    }

    /// The specification of a spare's sandbox. It has no variables, because it has no workspace yet.
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

#[cfg(test)]
mod tests {
    use emergent_store::StoreError;

    use super::*;
    use crate::workspace::test_support::without_providers;

    #[tokio::test]
    async fn a_damaged_target_is_an_error_until_it_is_set_again() {
        let directory = tempfile::tempdir().unwrap();
        let workspaces = without_providers(directory.path()).await;
        workspaces.context.store.put_setting(SETTING, "{").await.unwrap();
        let error = workspaces.pool.status().await.err().unwrap();
        assert!(
            matches!(error, WorkspaceError::Store(StoreError::Corrupt { table: "settings", .. })),
            "{error}"
        );
        workspaces.pool.set_target(None).await.unwrap();
        assert!(!workspaces.pool.status().await.unwrap().set_at_run_time);
    }
}
