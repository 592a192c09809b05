//! Creates workspaces: the row is written first, then the sandbox is made.
//!
//! ```text
//! row 'creating' ─▶ placed on a candidate ─▶ sandbox ─▶ checkout ─▶ 'ready'
//!     │                    ▲        │ failed: sandbox removed
//!     │                    └────────┘ next candidate; none left: row deleted (or 'error', when no caller waits)
//!     └─▶ a spare claimed ─▶ bound to the workspace ─▶ checkout ─▶ 'ready'
//!                                   │ failed: spare removed, then as without one
//! ```
//!
//! | step | undo |
//! |---|---|
//! | row `creating` ([`Creator::begin`]) | the row is deleted; when no caller waits, it says `error` ([`Creator::fail`]) |
//! | sandbox on a candidate, or a bound spare ([`attempt`]) | `destroy` of its provider; after a failure of that, the row says `destroying` and recovery tries again |
//! | checkout, metadata | removed with the sandbox and the row |
//! | row `ready` | none: it is the last step |

mod attempt;
mod checkout;
mod request;

use std::sync::Arc;
use std::time::Instant;

use emergent_failpoint::failpoint;
use emergent_providers::ProviderError;
use emergent_store::{NewWorkspace, Shape};
use emergent_wire::event::EventKind;
use emergent_wire::mcp::RegisterMcpServer;
use emergent_wire::snapshot::FromSnapshot;
use emergent_wire::workspace::{CreateWorkspace, Workspace, WorkspaceStatus};
use emergent_wire::{Valid, WorkspaceId};
use tokio::sync::OwnedMutexGuard;

use super::context::Context;
use super::disk_space::DiskSpace;
use super::error::{Result, WorkspaceError};
use super::health::ProviderHealth;
use super::live::SandboxConnection;
use super::placement::{self, Plan};
use super::pool::{Claimed, Miss, Pool};
use attempt::{Attempts, Outcome};
use request::ResolvedRequest;

/// Creates workspaces.
pub(crate) struct Creator {
    context: Arc<Context>,
    health: Arc<ProviderHealth>,
    disk_space: Arc<DiskSpace>,
    pool: Arc<Pool>,
}

/// A workspace whose row is written.
pub(crate) struct Creation {
    /// The row as it was written.
    pub(crate) workspace: Workspace,
    plan: Plan,
    /// The connection to the claimed spare, if one was claimed.
    spare: Option<SandboxConnection>,
    /// Whether a caller waits for the result. Otherwise a failure is reported by the row.
    waited_for: bool,
    /// The lock of its changes.
    _changing: OwnedMutexGuard<()>,
}

impl Creator {
    pub(super) fn new(
        context: &Arc<Context>,
        health: &Arc<ProviderHealth>,
        disk_space: &Arc<DiskSpace>,
        pool: &Arc<Pool>,
    ) -> Arc<Self> {
        Arc::new(Self {
            context: Arc::clone(context),
            health: Arc::clone(health),
            disk_space: Arc::clone(disk_space),
            pool: Arc::clone(pool),
        })
    }

    /// Places a request, and writes the row or claims a spare.
    pub(crate) async fn begin(&self, request: Valid<CreateWorkspace>, waited_for: bool) -> Result<Creation> {
        let settings = &self.context.settings.workspaces;
        let request = ResolvedRequest::workspace(request.into_inner(), settings, self.context.clock.now())?;
        self.begin_resolved(request, waited_for).await
    }

    /// The same for a hosted MCP server.
    pub(crate) async fn begin_mcp_server(&self, request: Valid<RegisterMcpServer>) -> Result<Creation> {
        let settings = &self.context.settings.workspaces;
        let request = ResolvedRequest::mcp_server(request.into_inner(), settings, self.context.clock.now())?;
        self.begin_resolved(request, true).await
    }

    /// The same for a workspace with the files of a snapshot.
    pub(crate) async fn begin_from_snapshot(
        &self,
        request: Valid<FromSnapshot>,
        waited_for: bool,
    ) -> Result<Creation> {
        let settings = &self.context.settings.workspaces;
        let snapshot = self.context.store.snapshot(request.snapshot_id).await?.snapshot;
        let now = self.context.clock.now();
        let request = ResolvedRequest::from_snapshot(request.into_inner(), snapshot, settings, now)?;
        self.begin_resolved(request, waited_for).await
    }

    async fn begin_resolved(&self, request: ResolvedRequest, waited_for: bool) -> Result<Creation> {
        self.disk_space.refuse_if_full()?;
        let plan = self.place(&request).await?;
        if let Some(Claimed { workspace, connection }) = self.claim_spare(&request, &plan).await? {
            let changing = self.lock(workspace.id).await;
            return Ok(Creation {
                workspace,
                plan,
                spare: Some(connection),
                waited_for,
                _changing: changing,
            });
        }
        let id = request.new.id;
        // Locked before the row exists, so that recovery does not take the row for an abandoned one.
        let changing = self.lock(id).await;
        let limit = Some(self.context.settings.workspaces.max_concurrent);
        let inserted = self.context.store.insert_creating(self.sealed(&request, id), limit).await;
        let workspace = inserted.inspect_err(|_| self.context.forget(id))?;
        failpoint!("create.row_written");
        Ok(Creation { workspace, plan, spare: None, waited_for, _changing: changing })
    }

    /// Chooses the providers to try. When none can be used, checks the unhealthy ones again and repeats the choice.
    async fn place(&self, request: &ResolvedRequest) -> Result<Plan> {
        if let Ok(plan) = placement::plan(request.placement, &self.health.known()) {
            return Ok(plan);
        }
        self.health.recheck_unhealthy().await;
        Ok(placement::plan(request.placement, &self.health.known())?)
    }

    async fn lock(&self, id: WorkspaceId) -> OwnedMutexGuard<()> {
        Arc::clone(&self.context.live(id).change_lock).lock_owned().await
    }

    /// The row of a new workspace, its variables sealed for its id.
    fn sealed(&self, request: &ResolvedRequest, id: WorkspaceId) -> NewWorkspace {
        let environment_sealed = self.context.key.seal_environment(id, &request.environment);
        NewWorkspace { id, environment_sealed, ..request.new.clone() }
    }

    /// Claims a spare on the plan's first candidate, if one matches.
    async fn claim_spare(&self, request: &ResolvedRequest, plan: &Plan) -> Result<Option<Claimed>> {
        let Some(first) = plan.candidates.first().filter(|_| request.may_use_spare) else {
            return Ok(None);
        };
        let shape = Shape {
            provider: first.provider,
            image: request.new.image.clone(),
            network: request.new.network,
            limits: request.new.resource_limits,
        };
        let provider = self.context.provider(first.provider)?;
        let placement = first.placement(&plan.rejected);
        match self.pool.claim(provider, &shape, &placement, |id| self.sealed(request, id)).await? {
            Ok(claimed) => {
                failpoint!("claim.row_written");
                Ok(Some(claimed))
            }
            Err(Miss::Off) => Ok(None),
            Err(miss) => {
                tracing::info!(reason = miss.reason(), provider = %shape.provider, image = shape.image, "no spare fits");
                metrics::counter!("emergent_pool_misses_total", "reason" => miss.reason()).increment(1);
                Ok(None)
            }
        }
    }

    /// Makes the sandbox: binds the spare, or tries the candidates in their order until one succeeds.
    pub(crate) async fn provision(&self, mut creation: Creation) -> Result<Workspace> {
        let begun = Instant::now();
        let id = creation.workspace.id;
        let mut spare = creation.spare.take();
        let mut attempts = Attempts::new(self, id, creation.plan.rejected.clone());
        for candidate in &creation.plan.candidates {
            if attempts.has_leftover_on(candidate.provider) {
                continue;
            }
            let outcome = match spare.take() {
                Some(connection) => attempts.bind_spare(candidate, connection).await?,
                None => attempts.create(candidate).await?,
            };
            let outcome = match outcome {
                Outcome::SpareUnusable => attempts.create(candidate).await?,
                other => other,
            };
            match outcome {
                Outcome::Ready { workspace, is_warm } => {
                    self.report_created(&workspace, begun, is_warm);
                    return Ok(*workspace);
                }
                Outcome::SpareUnusable | Outcome::TryNext => {}
                Outcome::GiveUp => break,
            }
        }
        let (error, leftover) = attempts.into_error();
        match leftover {
            Some(problem) => Err(self.leave_to_recovery(id, error, problem).await),
            None => self.fail(id, error, creation.waited_for).await,
        }
    }

    /// Ends a creation that failed and whose sandbox is removed.
    async fn fail(&self, id: WorkspaceId, error: WorkspaceError, waited_for: bool) -> Result<Workspace> {
        if waited_for {
            self.context.store.delete_workspace(id).await?;
            self.context.forget(id);
        } else {
            self.context.report_error(id, error.to_string()).await;
        }
        Err(error)
    }

    /// Marks the row of a failed creation whose sandbox can't be removed now. Recovery removes both.
    async fn leave_to_recovery(
        &self,
        id: WorkspaceId,
        error: WorkspaceError,
        problem: ProviderError,
    ) -> WorkspaceError {
        let error = WorkspaceError::NotUndone { error: Box::new(error), problem };
        let all = WorkspaceStatus::ALL;
        if let Err(error) = self.context.store.transition(id, all, WorkspaceStatus::Destroying).await {
            tracing::error!(workspace = %id, %error, "the row of a failed creation could not be marked for removal");
        }
        self.context.store_error(id, &error.to_string()).await;
        error
    }

    fn report_created(&self, workspace: &Workspace, begun: Instant, is_warm: bool) {
        let (id, duration) = (workspace.id, begun.elapsed());
        let provider = workspace.provider.map_or("", |provider| provider.as_str());
        tracing::info!(workspace = %id, provider, warm = is_warm, took_ms = duration.as_millis(), "a workspace was created");
        metrics::counter!("emergent_placements_total", "provider" => provider).increment(1);
        if is_warm {
            metrics::counter!("emergent_pool_hits_total").increment(1);
            metrics::histogram!("emergent_claim_seconds", "provider" => provider)
                .record(duration.as_secs_f64());
        } else {
            metrics::histogram!("emergent_create_seconds", "provider" => provider)
                .record(duration.as_secs_f64());
        }
        let source = if is_warm { "from the warm pool" } else { "from scratch" };
        self.context.events.workspace(
            EventKind::WorkspaceReady,
            id,
            format!("the workspace was made on {provider} {source}"),
        );
    }
}
