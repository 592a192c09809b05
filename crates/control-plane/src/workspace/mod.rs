//! Workspaces: placement, lifecycle, calls to guest agents, snapshots, the warm pool, and recovery after a crash.
//!
//! ```text
//!  create ─┬─▶ placement (pure)                    calls ──▶ connections ──▶ providers
//!          └─▶ pool                                lifecycle ──▶ connections
//!
//!  in the background: health, recovery ──▶ lifecycle, snapshots, quarantine; sweep ──▶ lifecycle; pool; usage;
//!                     disk_guard ──▶ lifecycle; cpu_fairness
//!
//!  all of them: context (store, settings, providers, and the live state of each workspace)
//! ```

#[cfg(test)]
mod added_provider_tests;
mod calls;
mod clock;
mod connections;
mod context;
pub(crate) mod cpu_fairness;
mod create;
mod disk_guard;
mod disk_space;
pub(crate) mod error;
#[cfg(test)]
mod fallback_tests;
mod health;
mod lifecycle;
mod live;
mod memory;
mod old_clones;
mod operations;
pub(crate) mod placement;
pub(crate) mod pool;
mod quarantine;
pub(crate) mod recovery;
pub(crate) mod servers;
mod snapshots;
pub(crate) mod sweep;
#[cfg(test)]
pub(crate) mod test_support;
pub(crate) mod usage;

use std::sync::Arc;

use chrono::{DateTime, SubsecRound, TimeDelta, Utc};
use emergent_providers::Providers;
use emergent_store::{SealingKey, Store, StoreError};
use emergent_wire::WorkspaceId;
use emergent_wire::workspace::{Usage, Workspace, WorkspaceStatus, check_holder};
use serde::Deserialize as _;

use crate::config::Settings;
pub(crate) use calls::{Calls, GuestAnswer, GuestRequest, OutputLimit, RunningCall, TimeLimit};
pub(crate) use connections::{OpenError, Opened, open_or_restart};
pub(crate) use context::Context;
use cpu_fairness::CpuFairness;
pub(crate) use create::{Creation, Creator};
use disk_guard::DiskGuard;
use disk_space::DiskSpace;
pub(crate) use disk_space::{Level as DiskLevel, make_room_for_database};
use error::Result;
pub(crate) use error::{WorkspaceError, damaged_setting, damaged_workspace};
pub(crate) use health::{CHECK_EVERY as HEALTH_EVERY, ProviderHealth};
use lifecycle::Lifecycle;
pub(crate) use live::SandboxConnection;
pub(crate) use operations::{FollowedOperation, OperationEvent};
use pool::Pool;
use quarantine::Quarantine;
use recovery::Recovery;
use snapshots::Snapshots;
use sweep::Sweeper;
use usage::UsageMonitor;

/// The parts of this server that manage workspaces.
pub(crate) struct Workspaces {
    pub(crate) context: Arc<Context>,
    pub(crate) health: Arc<ProviderHealth>,
    pub(crate) disk_space: Arc<DiskSpace>,
    pub(crate) disk_guard: Arc<DiskGuard>,
    pub(crate) pool: Arc<Pool>,
    pub(crate) create: Arc<Creator>,
    pub(crate) lifecycle: Arc<Lifecycle>,
    pub(crate) calls: Arc<Calls>,
    pub(crate) snapshots: Arc<Snapshots>,
    pub(crate) quarantine: Arc<Quarantine>,
    pub(crate) recovery: Arc<Recovery>,
    pub(crate) sweeper: Arc<Sweeper>,
    pub(crate) usage: Arc<UsageMonitor>,
    pub(crate) cpu_fairness: Arc<CpuFairness>,
}

impl Workspaces {
    pub(crate) fn new(store: Store, key: SealingKey, settings: Settings, providers: Providers) -> Arc<Self> {
        let context = Context::new(store, key, settings, providers);
        let health = ProviderHealth::new(&context);
        let disk_space = DiskSpace::new(&context);
        let connections = connections::Connections::new(&context);
        let lifecycle = Lifecycle::new(&context, &disk_space, &connections);
        let snapshots = Snapshots::new(&context, &disk_space);
        let quarantine = Quarantine::new(&context, &disk_space, &snapshots);
        let pool = Pool::new(&context, &health);
        Arc::new(Self {
            disk_guard: DiskGuard::new(&context, &disk_space, &lifecycle),
            create: Creator::new(&context, &health, &disk_space, &pool),
            calls: Calls::new(&context, &disk_space, &connections),
            recovery: Recovery::new(&context, &connections, &lifecycle, &snapshots, &quarantine),
            sweeper: Sweeper::new(&context, &connections, &lifecycle),
            usage: UsageMonitor::new(&context),
            cpu_fairness: CpuFairness::new(&context),
            context,
            health,
            disk_space,
            pool,
            lifecycle,
            snapshots,
            quarantine,
        })
    }

    /// A workspace with its usage.
    pub(crate) async fn get(&self, id: WorkspaceId) -> Result<Workspace> {
        let live = self.context.known_live(id);
        if let Some(live) = &live {
            self.context.write_use(id, live.unwritten_use(self.context.clock.now())).await;
        }
        let mut workspace = self.context.store.workspace(id).await?;
        if let Some(used) = live.as_ref().and_then(|live| live.last_use()) {
            show_use(&mut workspace, used);
        }
        if let Some(live) = live.filter(|_| workspace.status == WorkspaceStatus::Ready) {
            workspace.usage = self.usage.measure(&live, &workspace.resource_limits).await;
        }
        Ok(workspace)
    }

    /// The usage of a sandbox. None if this process has no channel to it.
    pub(crate) async fn usage_of(&self, workspace: &Workspace) -> Option<Usage> {
        let live = self.context.known_live(workspace.id)?;
        self.usage.measure(&live, &workspace.resource_limits).await
    }

    /// Attaches a holder to a workspace.
    pub(crate) async fn attach(&self, id: WorkspaceId, holder: &str) -> Result<Workspace> {
        check_holder(holder)?;
        let attached = self.context.store.attach(id, holder, self.context.clock.now()).await?;
        attached.map_err(|holder| WorkspaceError::Held { id, holder })
    }

    /// Detaches the holder of a workspace: only this one, or any if None.
    pub(crate) async fn detach(&self, id: WorkspaceId, holder: Option<&str>) -> Result<Workspace> {
        holder.map_or(Ok(()), check_holder)?;
        let detached = self.context.store.detach(id, holder).await?;
        detached.map_err(|holder| WorkspaceError::Held { id, holder })
    }
}

/// The warnings in a workspace's metadata.
pub(crate) fn warnings_of(workspace: &Workspace) -> Result<Vec<String>, StoreError> {
    let Some(warnings) = workspace.metadata.get("warnings") else { return Ok(Vec::new()) };
    Vec::deserialize(warnings)
        .map_err(|error| damaged_workspace(workspace.id, "metadata", format!("warnings: {error}")))
}

/// Shows a use whose write is still in progress.
fn show_use(workspace: &mut Workspace, used: DateTime<Utc>) {
    // The precision of the database.
    let used = used.trunc_subsecs(6);
    let since = used - workspace.last_used_at;
    if since > TimeDelta::zero() && workspace.status != WorkspaceStatus::Destroying {
        workspace.last_used_at = used;
        workspace.expires_at = workspace.expires_at.map(|at| at + since);
    }
}
