//! Making a workspace: intent first, then the sandbox, each step with its undo.
//!
//! ```text
//! row 'creating' ─▶ placed on a candidate ─▶ sandbox ─▶ checkout ─▶ 'ready'
//!     │                    ▲        │ failed: sandbox removed
//!     │                    └────────┘ next candidate; none left: row removed (or 'error', when nobody waits)
//!     └─▶ a spare claimed ─▶ bound to the workspace ─▶ checkout ─▶ 'ready'
//!                                   │ failed: spare removed, then as without one
//! ```

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use chrono::Utc;
use emergent_failpoint::failpoint;
use emergent_guest_client::GuestClient;
use emergent_guest_protocol::GuestCall;
use emergent_providers::{ProviderError, Sandbox, SharedProvider};
use emergent_store::{NewWorkspace, Shape, WorkspaceRecord};
use emergent_wire::event::{Event, EventKind};
use emergent_wire::git::{GitAction, GitAnswer, GitRequest};
use emergent_wire::mcp::{self, McpConfig, RegisterMcpServer};
use emergent_wire::snapshot::{FromSnapshot, SnapshotStatus};
use emergent_wire::workspace::{
    ContainerType, CreateWorkspace, Lifecycle, NetworkMode, Placement, ProviderChoice, ProviderName,
    RejectedCandidate, SecurityLevel, Workspace, WorkspaceStatus,
};
use emergent_wire::{ErrorCode, ErrorDetail, Valid, Validate as _, WorkspaceId};
use serde_json::{Map, json};
use tokio::sync::OwnedMutexGuard;

use super::live::SandboxConnection;
use super::placement::{self, Plan, Wish};
use super::pool::{Claimed, Miss};
use super::{Workspaces, error_of};

/// Pauses between attempts to reach a repository.
const CHECKOUT_PAUSES: [Duration; 3] =
    [Duration::from_secs(2), Duration::from_secs(4), Duration::from_secs(8)];
/// What is said when a repository wants credentials that there are none for.
const AUTHENTICATION_FAILED: &str =
    "Repository authentication failed — connect GitHub in Settings > Integrations";

/// A workspace that is being made: its intent is written down.
pub(crate) struct Creation {
    /// As it stands before anything was done.
    pub(crate) workspace: Workspace,
    plan: Plan,
    /// A spare that is its sandbox, when there was one.
    spare: Option<SandboxConnection>,
    /// Whether somebody waits for the result; else a failure stays visible as a row.
    waited_for: bool,
    /// Nobody else changes it meanwhile.
    _changing: OwnedMutexGuard<()>,
}

/// What is asked for, with everything filled in.
struct Order {
    new: NewWorkspace,
    environment: BTreeMap<String, String>,
    wish: Wish,
    may_be_warm: bool,
}

impl Workspaces {
    /// Checks a request, chooses where it goes, and writes the intent down.
    pub(crate) async fn begin_create(
        &self,
        request: Valid<CreateWorkspace>,
        waited_for: bool,
    ) -> Result<Creation, ErrorDetail> {
        let request = request.into_inner();
        let settings = &self.settings.workspaces;
        let limits = request.resource_limits.unwrap_or_default().or(settings.default_limits());
        limits.validate()?;
        let container_type = request.container_type.unwrap_or(ContainerType::AgentWorkspace);
        if container_type == ContainerType::McpServer {
            let message = "MCP servers are registered at /api/v1/mcp/servers, not created as workspaces";
            return Err(ErrorDetail::new(ErrorCode::Unacceptable, message));
        }
        let deployment = request.deployment_mode.unwrap_or(settings.deployment_mode);
        let wish = Wish {
            container_type,
            provider: request.provider.unwrap_or(ProviderChoice::Auto),
            deployment,
            security: request.security_level.unwrap_or(SecurityLevel::Standard),
        };
        let new = NewWorkspace {
            container_type,
            repository_url: request.repository_url,
            branch: request.branch,
            deployment_mode: deployment,
            lifecycle: Lifecycle::Ephemeral,
            created_at: self.clock.now(),
            ttl_seconds: Some(request.ttl_seconds.unwrap_or(settings.default_ttl_seconds)),
            resource_limits: limits,
            network: request.network.unwrap_or(NetworkMode::Nat),
            ..NewWorkspace::agent(
                WorkspaceId::generate(),
                request.image.unwrap_or_else(|| settings.default_image.clone()),
            )
        };
        let may_be_warm = request.warm_start.unwrap_or(true);
        self.order(Order { new, environment: request.environment, wish, may_be_warm }, waited_for).await
    }

    /// The same for a hosted MCP server.
    pub(crate) async fn begin_register(
        &self,
        request: Valid<RegisterMcpServer>,
    ) -> Result<Creation, ErrorDetail> {
        let request = request.into_inner();
        let settings = &self.settings.workspaces;
        let limits = request.resource_limits.unwrap_or_default().or(mcp::DEFAULT_LIMITS);
        limits.validate()?;
        let config = serde_json::to_value(McpConfig::from(&request));
        let config = config.map_err(|error| ErrorDetail::new(ErrorCode::Internal, error.to_string()))?;
        let wish = Wish {
            container_type: ContainerType::McpServer,
            provider: request.provider.unwrap_or(ProviderChoice::Auto),
            deployment: settings.deployment_mode,
            security: SecurityLevel::Standard,
        };
        let new = NewWorkspace {
            container_type: ContainerType::McpServer,
            lifecycle: Lifecycle::Persistent,
            deployment_mode: settings.deployment_mode,
            created_at: self.clock.now(),
            resource_limits: limits,
            network: request.network.unwrap_or(NetworkMode::Nat),
            name: Some(request.name),
            mcp_config: Some(config),
            ..NewWorkspace::agent(
                WorkspaceId::generate(),
                request.image.unwrap_or_else(|| settings.default_image.clone()),
            )
        };
        self.order(Order { new, environment: request.environment, wish, may_be_warm: false }, true).await
    }

    /// The same for a workspace that begins with the files of another.
    pub(crate) async fn begin_from_snapshot(
        &self,
        request: Valid<FromSnapshot>,
        waited_for: bool,
    ) -> Result<Creation, ErrorDetail> {
        let request = request.into_inner();
        let settings = &self.settings.workspaces;
        let snapshot = self.store.snapshot(request.snapshot_id).await.map_err(error_of)?.snapshot;
        if snapshot.status != SnapshotStatus::Ready {
            let message =
                format!("snapshot {} is {}: only a ready one can be used", snapshot.id, snapshot.status);
            return Err(ErrorDetail::new(ErrorCode::WrongState, message));
        }
        let limits = request.resource_limits.unwrap_or_default().or(snapshot.resource_limits);
        limits.validate()?;
        if snapshot.memory && limits != snapshot.resource_limits {
            let message = format!(
                "snapshot {} holds memory: a workspace of it has the same resource_limits; leave them out",
                snapshot.id
            );
            return Err(ErrorDetail::new(ErrorCode::Unacceptable, message));
        }
        if limits.disk < snapshot.resource_limits.disk {
            let message = format!(
                "resource_limits.disk is {}: the snapshot's disk has {}, and a disk can only grow",
                limits.disk, snapshot.resource_limits.disk
            );
            return Err(ErrorDetail::new(ErrorCode::Unacceptable, message));
        }
        let wish = Wish {
            container_type: ContainerType::AgentWorkspace,
            provider: snapshot.provider.into(),
            deployment: settings.deployment_mode,
            security: SecurityLevel::Standard,
        };
        let new = NewWorkspace {
            deployment_mode: settings.deployment_mode,
            created_at: self.clock.now(),
            ttl_seconds: Some(request.ttl_seconds.unwrap_or(settings.default_ttl_seconds)),
            resource_limits: limits,
            network: request.network.unwrap_or(snapshot.network),
            snapshot_id: Some(snapshot.id.to_string()),
            ..NewWorkspace::agent(WorkspaceId::generate(), snapshot.image)
        };
        let order = Order { new, environment: request.environment, wish, may_be_warm: false };
        self.order(order, waited_for).await
    }

    async fn order(&self, order: Order, waited_for: bool) -> Result<Creation, ErrorDetail> {
        self.refuse_if_disk_is_full()?;
        let plan = match placement::plan(order.wish, &self.known_providers()) {
            Ok(plan) => plan,
            Err(_) => {
                self.recheck_unhealthy().await;
                placement::plan(order.wish, &self.known_providers())?
            }
        };
        if let Some(claimed) = self.claim_for(&order, &plan).await? {
            let changing = self.lock(claimed.workspace.id).await;
            let Claimed { workspace, connection } = claimed;
            return Ok(Creation {
                workspace,
                plan,
                spare: Some(connection),
                waited_for,
                _changing: changing,
            });
        }
        let id = order.new.id;
        // Before there is a row that recovery could take for one that nobody works on.
        let changing = self.lock(id).await;
        let new = self.sealed(&order, id);
        let limit = Some(self.settings.workspaces.max_concurrent);
        let inserted = self.store.insert_creating(new, limit).await;
        let workspace = inserted.map_err(|error| {
            self.forget(id);
            error_of(error)
        })?;
        failpoint!("create.row_written");
        Ok(Creation { workspace, plan, spare: None, waited_for, _changing: changing })
    }

    async fn lock(&self, id: WorkspaceId) -> OwnedMutexGuard<()> {
        Arc::clone(&self.live(id).changing).lock_owned().await
    }

    /// The row of a new workspace, its variables sealed for its id.
    fn sealed(&self, order: &Order, id: WorkspaceId) -> NewWorkspace {
        let environment_sealed = self.key.seal_environment(id, &order.environment);
        NewWorkspace { id, environment_sealed, ..order.new.clone() }
    }

    /// A spare for the first choice of the plan, if there is one.
    async fn claim_for(&self, order: &Order, plan: &Plan) -> Result<Option<Claimed>, ErrorDetail> {
        let Some(first) = plan.candidates.first().filter(|_| order.may_be_warm) else {
            return Ok(None);
        };
        let shape = Shape {
            provider: first.provider,
            image: order.new.image.clone(),
            network: order.new.network,
            limits: order.new.resource_limits,
        };
        let provider = self.provider(first.provider)?;
        let placement = first.placement(&plan.rejected);
        let claimed = self.claim(provider, &shape, &placement, |id| self.sealed(order, id)).await?;
        match claimed {
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

    /// Makes the workspace. Runs to its end whoever waits.
    pub(crate) async fn finish_create(
        self: &Arc<Self>,
        mut creation: Creation,
    ) -> Result<Workspace, ErrorDetail> {
        let id = creation.workspace.id;
        let begun = Instant::now();
        let mut rejected = creation.plan.rejected.clone();
        let mut failures: Vec<(RejectedCandidate, ErrorDetail)> = Vec::new();
        let mut spare = creation.spare.take();
        // Where something may be left of an attempt. It has the workspace's id, so nothing else is made there; recovery
        // removes it once the workspace is elsewhere or gone.
        let mut left_on: Option<(ProviderName, ProviderError)> = None;
        for candidate in &creation.plan.candidates {
            let on_same =
                |(other, _): &(ProviderName, _)| placement::share_sandboxes(candidate.provider, *other);
            if left_on.as_ref().is_some_and(on_same) {
                continue;
            }
            let provider = self.provider(candidate.provider)?.clone();
            if let Some(connection) = spare.take() {
                match self.bind(&provider, id, connection).await {
                    Ok(workspace) => {
                        self.created(&workspace, candidate.provider, begun, true);
                        return Ok(workspace);
                    }
                    Err(error) => {
                        tracing::warn!(workspace = %id, %error, "a spare can't be used; the workspace is made without");
                        metrics::counter!("emergent_pool_misses_total", "reason" => "dead").increment(1);
                        if let Err(problem) = provider.destroy(id).await {
                            failures.push((candidate.rejected(&error), error));
                            left_on = Some((candidate.provider, problem));
                            continue;
                        }
                        if is_final(&error) {
                            failures.push((candidate.rejected(&error), error));
                            break;
                        }
                    }
                }
            }
            match self.create_on(&provider, id, &candidate.placement(&rejected)).await {
                Ok(workspace) => {
                    self.created(&workspace, candidate.provider, begun, false);
                    return Ok(workspace);
                }
                Err(error) => {
                    self.fell_back(id, candidate.provider, &error);
                    let removed = provider.destroy(id).await;
                    failpoint!("create.undone");
                    self.recheck(&provider).await;
                    if let Err(problem) = removed {
                        left_on = Some((candidate.provider, problem));
                    }
                    rejected.push(candidate.rejected(&error));
                    let is_final = is_final(&error);
                    failures.push((candidate.rejected(&error), error));
                    if is_final {
                        break;
                    }
                }
            }
        }
        let error = all_failed(failures);
        if let Some((_, problem)) = left_on {
            return Err(self.leave_to_recovery(id, error, &problem).await);
        }
        if creation.waited_for {
            self.store.delete_workspace(id).await.map_err(error_of)?;
            self.forget(id);
        } else {
            let _ = self.store.set_error(id, &error.message).await;
            self.events.workspace(EventKind::WorkspaceError, id, error.message.as_str());
        }
        Err(error)
    }

    fn created(&self, workspace: &Workspace, provider: ProviderName, begun: Instant, is_warm: bool) {
        let (id, took) = (workspace.id, begun.elapsed());
        tracing::info!(workspace = %id, %provider, warm = is_warm, took_ms = took.as_millis(), "created");
        metrics::counter!("emergent_placements_total", "provider" => provider.as_str()).increment(1);
        if is_warm {
            metrics::counter!("emergent_pool_hits_total").increment(1);
            metrics::histogram!("emergent_claim_seconds", "provider" => provider.as_str())
                .record(took.as_secs_f64());
        } else {
            metrics::histogram!("emergent_create_seconds", "provider" => provider.as_str())
                .record(took.as_secs_f64());
        }
        let how = if is_warm { "from the warm pool" } else { "from scratch" };
        self.events.workspace(EventKind::WorkspaceReady, id, format!("it was made on {provider} {how}"));
    }

    fn fell_back(&self, id: WorkspaceId, provider: ProviderName, error: &ErrorDetail) {
        tracing::warn!(workspace = %id, %provider, %error, "create failed");
        metrics::counter!("emergent_fallbacks_total", "provider" => provider.as_str()).increment(1);
        self.events.tell(Event {
            at: Utc::now(),
            kind: EventKind::PlacementFallback,
            workspace_id: Some(id),
            provider: Some(provider),
            message: error.message.clone(),
        });
    }

    /// Makes a claimed spare the workspace's own: variables, files.
    async fn bind(
        self: &Arc<Self>,
        provider: &SharedProvider,
        id: WorkspaceId,
        connection: SandboxConnection,
    ) -> Result<Workspace, ErrorDetail> {
        let record = self.store.workspace_record(id).await.map_err(error_of)?;
        let spec = self.spec_of(&record).await?;
        provider.configure(&spec, &connection.channel).await?;
        failpoint!("claim.configured");
        if let Some(url) = &record.workspace.repository_url {
            let warnings = checkout(&connection.channel, url, record.workspace.branch.as_deref()).await?;
            if !warnings.is_empty() {
                self.add_warnings(&record, warnings).await?;
            }
        }
        let workspace = self.store.set_ready(id, self.clock.now()).await.map_err(error_of)?;
        failpoint!("claim.ready");
        self.live(id).set_connection(connection);
        Ok(workspace)
    }

    /// Puts warnings to those that the workspace has.
    async fn add_warnings(&self, record: &WorkspaceRecord, new: Vec<String>) -> Result<(), ErrorDetail> {
        let known = record.workspace.metadata.get("warnings").cloned().unwrap_or_default();
        let mut all: Vec<String> = serde_json::from_value(known).unwrap_or_default();
        all.extend(new);
        let fields = Map::from_iter([("warnings".to_owned(), json!(all))]);
        self.store.merge_metadata(record.workspace.id, fields).await.map_err(error_of).map(drop)
    }

    async fn create_on(
        self: &Arc<Self>,
        provider: &SharedProvider,
        id: WorkspaceId,
        placement: &Placement,
    ) -> Result<Workspace, ErrorDetail> {
        let name = provider.sandbox_name(id);
        self.store.set_placed(id, provider.name(), &name, placement).await.map_err(error_of)?;
        failpoint!("create.placed");
        let record = self.store.workspace_record(id).await.map_err(error_of)?;
        let spec = self.spec_of(&record).await?;
        let sandbox = provider.create(&spec).await?;
        failpoint!("create.sandbox_made");
        let mut warnings = sandbox.warnings.clone();
        if let Some(url) = &record.workspace.repository_url {
            warnings.extend(checkout(&sandbox.channel, url, record.workspace.branch.as_deref()).await?);
        }
        self.write_down(id, &sandbox, warnings).await?;
        failpoint!("create.written_down");
        let workspace = self.store.set_ready(id, self.clock.now()).await.map_err(error_of)?;
        failpoint!("create.ready");
        let connection = SandboxConnection { channel: sandbox.channel, provider: provider.name() };
        self.live(id).set_connection(connection);
        Ok(workspace)
    }

    /// Puts what the user should know into the workspace's metadata, and into the log.
    async fn write_down(
        &self,
        id: WorkspaceId,
        sandbox: &Sandbox,
        warnings: Vec<String>,
    ) -> Result<(), ErrorDetail> {
        for warning in &warnings {
            tracing::warn!(workspace = %id, warning, "a workspace was created with a warning");
        }
        let mut fields = Map::new();
        fields.insert("disk_quota".to_owned(), json!(sandbox.disk_quota));
        fields.insert("agent_version".to_owned(), json!(sandbox.channel.hello().version));
        if !warnings.is_empty() {
            fields.insert("warnings".to_owned(), json!(warnings));
        }
        self.store.merge_metadata(id, fields).await.map_err(error_of).map(drop)
    }

    /// What a failed attempt made can't be removed now: the row stays, as a removal that was begun.
    async fn leave_to_recovery(
        &self,
        id: WorkspaceId,
        mut error: ErrorDetail,
        problem: &ProviderError,
    ) -> ErrorDetail {
        error.message = format!("{}; what was made so far can't be removed yet ({problem})", error.message);
        let all = WorkspaceStatus::ALL;
        if let Err(error) = self.store.transition(id, all, WorkspaceStatus::Destroying).await {
            tracing::error!(workspace = %id, %error, "the remains of a failed creation could not be marked");
        }
        let _ = self.store.set_error(id, &error.message).await;
        error
    }
}

/// Whether no other provider would do better.
fn is_final(error: &ErrorDetail) -> bool {
    matches!(error.code, ErrorCode::WrongState | ErrorCode::NotFound | ErrorCode::GitFailed)
}

/// One error out of all failures.
fn all_failed(mut failures: Vec<(RejectedCandidate, ErrorDetail)>) -> ErrorDetail {
    if failures.len() == 1
        && let Some((candidate, mut error)) = failures.pop()
    {
        if error.details.is_none() {
            error.details = Some(json!({ "provider": candidate.provider }));
        }
        return error;
    }
    let candidates: Vec<&RejectedCandidate> = failures.iter().map(|(failed, _)| failed).collect();
    let details = json!({ "candidates": candidates });
    // All for the same reason (an image that is not there): then that is what the caller must know.
    let first = failures.first().map(|(_, error)| error.clone());
    let is_same = |same: fn(&ErrorDetail, &ErrorDetail) -> bool| {
        first.as_ref().filter(|first| failures.iter().all(|(_, error)| same(error, first)))
    };
    if let Some(error) = is_same(|one, other| one.message == other.message) {
        return error.clone().with_details(details);
    }
    let code =
        is_same(|one, other| one.code == other.code).map_or(ErrorCode::ProviderFailed, |error| error.code);
    let each: Vec<String> =
        failures.iter().map(|(failed, _)| format!("{}: {}", failed.provider, failed.reason)).collect();
    ErrorDetail::new(code, format!("every provider failed: {}", each.join("; "))).with_details(details)
}

/// Clones a repository into the workspace. A repository that wants credentials leaves it empty, with a warning.
async fn checkout(
    channel: &GuestClient,
    url: &str,
    branch: Option<&str>,
) -> Result<Vec<String>, ErrorDetail> {
    let request = GitRequest {
        repository_url: Some(url.to_owned()),
        branch: branch.map(str::to_owned),
        ..GitRequest::new(GitAction::Clone)
    };
    let mut pauses = CHECKOUT_PAUSES.iter();
    loop {
        let call = channel.start(&GuestCall::Git(request.clone())).await?;
        let error = match call.answer::<GitAnswer>().await {
            Ok(_) => return Ok(Vec::new()),
            Err(error) => ErrorDetail::from(error),
        };
        let says = |text: &str| error.message.contains(text);
        if says("could not read Username")
            || says("Authentication failed")
            || says("terminal prompts disabled")
        {
            return Ok(vec![AUTHENTICATION_FAILED.to_owned()]);
        }
        let network = ["Could not resolve host", "Failed to connect", "Connection", "timed out", "early EOF"];
        match pauses.next() {
            Some(pause) if network.iter().any(|text| says(text)) => tokio::time::sleep(*pause).await,
            _ => return Err(error),
        }
    }
}
