//! Workspaces: where they are placed, how they live, how tools reach them, and how a crash heals.

mod calls;
mod clock;
pub(crate) mod cpu_fairness;
mod create;
mod disk_space;
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
pub(crate) mod usage;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use chrono::{DateTime, SubsecRound, TimeDelta, Utc};
use emergent_guest_protocol::Configuration;
use emergent_providers::{SandboxSpec, SharedProvider, Volume};
use emergent_store::{SealingKey, Store, StoreError, WorkspaceRecord};
use emergent_wire::mcp::{McpConfig, McpVolume};
use emergent_wire::workspace::{
    ContainerType, ProviderName, Usage, Workspace, WorkspaceStatus, check_holder,
};
use emergent_wire::{ErrorCode, ErrorDetail, WorkspaceId};

use crate::config::{Existing, Settings};
use crate::events::Events;
pub(crate) use calls::{GuestAnswer, GuestRequest, OutputLimit, RunningCall, TimeLimit};
use clock::Clock;
use cpu_fairness::CpuFairness;
pub(crate) use create::Creation;
use disk_space::DiskSpace;
pub(crate) use disk_space::{Level as DiskLevel, make_room_for_database};
pub(crate) use health::{CHECK_EVERY as HEALTH_EVERY, HealthBoard};
pub(crate) use lifecycle::{OpenError, Opened, open_or_restart};
pub(crate) use live::{Live, SandboxConnection};
pub(crate) use operations::{FollowedOperation, OperationEvent};
use pool::Pool;
use quarantine::Quarantine;
use servers::Servers;

/// Shows a use whose write is still in progress.
fn show_use(workspace: &mut Workspace, used: DateTime<Utc>) {
    // As exact as the database.
    let used = used.trunc_subsecs(6);
    let since = used - workspace.last_used_at;
    if since > TimeDelta::zero() && workspace.status != WorkspaceStatus::Destroying {
        workspace.last_used_at = used;
        workspace.expires_at = workspace.expires_at.map(|at| at + since);
    }
}

/// Where file tools stay when the settings say so.
const CONFINED_TO: [&str; 2] = ["/workspace", "/tmp"];

/// All workspaces of this server.
pub(crate) struct Workspaces {
    pub(crate) store: Store,
    key: SealingKey,
    pub(crate) settings: Settings,
    /// In the order in which they are reported.
    providers: Vec<SharedProvider>,
    pub(crate) health: HealthBoard,
    live: Mutex<HashMap<WorkspaceId, Arc<Live>>>,
    pub(crate) pool: Pool,
    pub(crate) servers: Servers,
    pub(crate) events: Events,
    disk_space: DiskSpace,
    quarantine: Quarantine,
    cpu_fairness: CpuFairness,
    clock: Clock,
}

impl Workspaces {
    pub(crate) fn new(
        store: Store,
        key: SealingKey,
        settings: Settings,
        providers: Vec<SharedProvider>,
    ) -> Arc<Self> {
        // Adopted files are orphans on purpose: they need no grace period.
        let grace =
            if settings.existing == Existing::Adopt { 0 } else { settings.workspaces.orphan_grace_seconds };
        let quarantine = Quarantine::new(Duration::from_secs(grace));
        let disk_space = DiskSpace::new(&settings.data_dir, settings.workspaces.min_free_disk.bytes());
        Arc::new(Self {
            store,
            key,
            settings,
            providers,
            health: HealthBoard::default(),
            live: Mutex::default(),
            pool: Pool::default(),
            servers: Servers::default(),
            events: Events::default(),
            disk_space,
            quarantine,
            cpu_fairness: CpuFairness::default(),
            clock: Clock::start(),
        })
    }

    fn live_map(&self) -> MutexGuard<'_, HashMap<WorkspaceId, Arc<Live>>> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What this process knows of a workspace.
    pub(crate) fn live(&self, id: WorkspaceId) -> Arc<Live> {
        Arc::clone(self.live_map().entry(id).or_default())
    }

    /// Forgets a workspace that is gone.
    fn forget(&self, id: WorkspaceId) {
        self.live_map().remove(&id);
    }

    pub(crate) fn providers(&self) -> &[SharedProvider] {
        &self.providers
    }

    /// A provider by its name.
    pub(crate) fn provider(&self, name: ProviderName) -> Result<&SharedProvider, ErrorDetail> {
        self.providers.iter().find(|provider| provider.name() == name).ok_or_else(|| {
            let message =
                format!("the provider '{name}' is not enabled on this server; its workspaces can't be used");
            ErrorDetail::new(ErrorCode::Unavailable, message)
        })
    }

    /// The provider that a workspace is on.
    pub(crate) fn provider_of(&self, record: &WorkspaceRecord) -> Result<&SharedProvider, ErrorDetail> {
        let name = record.workspace.provider.ok_or_else(|| {
            ErrorDetail::new(
                ErrorCode::WrongState,
                "the workspace has no sandbox yet: wait until it is ready",
            )
        })?;
        self.provider(name)
    }

    /// The sandbox that a workspace has.
    pub(crate) async fn spec_of(&self, record: &WorkspaceRecord) -> Result<SandboxSpec, ErrorDetail> {
        let workspace = &record.workspace;
        let environment = self.store.environment(workspace.id, &self.key).await.map_err(error_of)?;
        let confined = self.settings.workspaces.confine_file_tools;
        let is_server = workspace.container_type == ContainerType::McpServer;
        Ok(SandboxSpec {
            id: workspace.id,
            container_type: workspace.container_type,
            image: record.image.clone(),
            limits: workspace.resource_limits,
            max_tasks: self.settings.workspaces.max_tasks,
            network: record.network,
            snapshot: workspace.snapshot_id.as_deref().and_then(|id| id.parse().ok()),
            volumes: volumes_of(workspace),
            configuration: Some(Configuration {
                environment,
                confined_to: if confined { CONFINED_TO.map(str::to_owned).to_vec() } else { Vec::new() },
                max_tasks: Some(self.settings.workspaces.max_tasks),
                without_shells: is_server,
                ..Configuration::default()
            }),
        })
    }

    /// A workspace as callers see it, with what it uses.
    pub(crate) async fn get(&self, id: WorkspaceId) -> Result<Workspace, ErrorDetail> {
        let live = self.live_map().get(&id).cloned();
        if let Some(live) = &live {
            self.write_use(id, live.unwritten_use(self.clock.now())).await;
        }
        let mut workspace = self.store.workspace(id).await.map_err(error_of)?;
        if let Some(used) = live.as_ref().and_then(|live| live.last_use()) {
            show_use(&mut workspace, used);
        }
        if let Some(live) = live.filter(|_| workspace.status == WorkspaceStatus::Ready) {
            workspace.usage = self.measure(&live, &workspace.resource_limits).await;
        }
        Ok(workspace)
    }

    /// What a sandbox uses, if this process has a channel to it.
    pub(crate) async fn usage_of(&self, workspace: &Workspace) -> Option<Usage> {
        let live = self.live_map().get(&workspace.id).cloned()?;
        self.measure(&live, &workspace.resource_limits).await
    }

    /// Lets somebody hold a workspace for itself.
    pub(crate) async fn attach(&self, id: WorkspaceId, holder: &str) -> Result<Workspace, ErrorDetail> {
        check_holder(holder)?;
        let attached = self.store.attach(id, holder, self.clock.now()).await.map_err(error_of)?;
        attached.map_err(|other| held_by(id, &other))
    }

    /// Ends that; whoever holds it, if no holder is given.
    pub(crate) async fn detach(
        &self,
        id: WorkspaceId,
        holder: Option<&str>,
    ) -> Result<Workspace, ErrorDetail> {
        holder.map_or(Ok(()), check_holder)?;
        let detached = self.store.detach(id, holder).await.map_err(error_of)?;
        detached.map_err(|other| held_by(id, &other))
    }

    /// A workspace that can be used with tools now.
    async fn ready_record(&self, id: WorkspaceId) -> Result<WorkspaceRecord, ErrorDetail> {
        let record = self.store.workspace_record(id).await.map_err(error_of)?;
        match record.workspace.status {
            _ if record.workspace.container_type == ContainerType::McpServer => Err(is_mcp_server(id)),
            // What failed once may work now: the call finds out.
            WorkspaceStatus::Ready | WorkspaceStatus::Error => Ok(record),
            status => Err(wrong_state(id, status)),
        }
    }
}

/// The named volumes of an MCP server.
fn volumes_of(workspace: &Workspace) -> Vec<Volume> {
    let config = workspace.mcp_config.clone().and_then(|config| serde_json::from_value(config).ok());
    let volumes = config.map(|config: McpConfig| config.volumes).unwrap_or_default();
    volumes.into_iter().map(|McpVolume { name, path }| Volume { name, path }).collect()
}

/// What the addresses of workspaces say of an MCP server.
pub(crate) fn is_mcp_server(id: WorkspaceId) -> ErrorDetail {
    let message = format!("{id} is an MCP server, not a workspace: use /api/v1/mcp/servers/{id}");
    ErrorDetail::new(ErrorCode::Unacceptable, message)
}

/// What the store's errors mean to a caller.
pub(crate) fn error_of(error: StoreError) -> ErrorDetail {
    let text = error.to_string();
    match error {
        StoreError::NotFound { kind, .. } => ErrorDetail::new(
            ErrorCode::NotFound,
            format!("{text}: list what there is with GET /api/v1/{}", path_of(kind)),
        ),
        StoreError::Conflict { .. } => ErrorDetail::new(ErrorCode::Conflict, text),
        StoreError::LimitReached { limit, current } => ErrorDetail::new(
            ErrorCode::LimitReached,
            format!("{text}: destroy workspaces that are not needed, or wait until one is"),
        )
        .with_details(serde_json::json!({ "limit": limit, "current": current })),
        StoreError::WrongState { id, status } => wrong_state(id, status),
        StoreError::LastAdminToken { .. } | StoreError::IdempotencyKeyReused => {
            ErrorDetail::new(ErrorCode::Conflict, text)
        }
        StoreError::BadIdempotencyKey => ErrorDetail::new(ErrorCode::BadRequest, text),
        StoreError::TooManyIdempotencyKeys { .. } => ErrorDetail::new(ErrorCode::LimitReached, text),
        StoreError::BadCursor => ErrorDetail::new(ErrorCode::BadRequest, text),
        StoreError::TokenRefused(_) => ErrorDetail::new(ErrorCode::Unauthorized, text),
        StoreError::Unavailable(source) => {
            tracing::warn!(error = %source, "the database does not answer");
            ErrorDetail::new(ErrorCode::Unavailable, format!("{text}: retry later"))
        }
        StoreError::Unwritable(source) => {
            tracing::error!(error = %source, "the database can't be written");
            let advice = "nothing was changed; make it writable or free space, then retry";
            ErrorDetail::new(ErrorCode::Unavailable, format!("{text}; {advice}"))
        }
        other => {
            tracing::error!(error = &other as &dyn std::error::Error, "the store failed");
            ErrorDetail::new(ErrorCode::Internal, format!("{text}; the server's log has more"))
        }
    }
}

fn held_by(id: WorkspaceId, holder: &str) -> ErrorDetail {
    let message =
        format!("workspace {id} is attached to '{holder}': wait until it detaches, or detach it with force");
    ErrorDetail::new(ErrorCode::Conflict, message).with_details(serde_json::json!({ "attached_to": holder }))
}

fn path_of(kind: &str) -> &'static str {
    match kind {
        "token" => "tokens",
        "snapshot" => "agent/workspaces/snapshots",
        "MCP server" => "mcp/servers",
        _ => "agent/workspaces",
    }
}

/// Says what state a workspace is in, and what to do about it.
fn wrong_state(id: WorkspaceId, status: WorkspaceStatus) -> ErrorDetail {
    let advice = match status {
        WorkspaceStatus::Creating => "wait until it is ready",
        WorkspaceStatus::Stopping => "wait until it is stopped, then resume it",
        WorkspaceStatus::Stopped => "resume it first (POST …/resume)",
        WorkspaceStatus::Destroying => "it is being removed; create a new one",
        WorkspaceStatus::Ready => "it is in use",
        WorkspaceStatus::Error => {
            "see metadata.error; destroy it, or try a tool call, which tries to revive it"
        }
    };
    ErrorDetail::new(ErrorCode::WrongState, format!("workspace {id} is {status}: {advice}"))
        .with_details(serde_json::json!({ "status": status }))
}
