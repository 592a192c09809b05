//! Workspaces: where they are placed, how they live, how tools reach them, and how a crash heals.

mod busy;
mod create;
mod health;
mod lifecycle;
mod live;
pub(crate) mod placement;
pub(crate) mod recovery;
mod tools;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use emergent_guest_protocol::Configuration;
use emergent_providers::{SandboxSpec, SharedProvider};
use emergent_store::{SealingKey, Store, StoreError, WorkspaceRecord};
use emergent_wire::workspace::{ProviderName, WorkspaceStatus};
use emergent_wire::{ErrorCode, ErrorDetail, WorkspaceId};

use crate::config::Settings;
pub(crate) use health::{CHECK_EVERY as HEALTH_EVERY, HealthBoard};
use live::Live;
pub(crate) use tools::{FileStream, OutputStream};

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
}

impl Workspaces {
    pub(crate) fn new(
        store: Store,
        key: SealingKey,
        settings: Settings,
        providers: Vec<SharedProvider>,
    ) -> Arc<Self> {
        Arc::new(Self {
            store,
            key,
            settings,
            providers,
            health: HealthBoard::default(),
            live: Mutex::default(),
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
    fn provider_of(&self, record: &WorkspaceRecord) -> Result<&SharedProvider, ErrorDetail> {
        let name = record.workspace.provider.ok_or_else(|| {
            ErrorDetail::new(
                ErrorCode::WrongState,
                "the workspace has no sandbox yet: wait until it is ready",
            )
        })?;
        self.provider(name)
    }

    /// The sandbox that a workspace has.
    async fn spec_of(&self, record: &WorkspaceRecord) -> Result<SandboxSpec, ErrorDetail> {
        let workspace = &record.workspace;
        let environment = self.store.environment(workspace.id, &self.key).await.map_err(error_of)?;
        let confined = self.settings.workspaces.confine_file_tools;
        Ok(SandboxSpec {
            id: workspace.id,
            container_type: workspace.container_type,
            image: record.image.clone(),
            limits: workspace.resource_limits,
            network: record.network,
            configuration: Configuration {
                environment,
                confined_to: if confined { CONFINED_TO.map(str::to_owned).to_vec() } else { Vec::new() },
                ..Configuration::default()
            },
        })
    }

    /// A workspace that can be used with tools now.
    async fn ready_record(&self, id: WorkspaceId) -> Result<WorkspaceRecord, ErrorDetail> {
        let record = self.store.workspace_record(id).await.map_err(error_of)?;
        match record.workspace.status {
            // What failed once may work now: the call finds out.
            WorkspaceStatus::Ready | WorkspaceStatus::Error => Ok(record),
            status => Err(wrong_state(id, status)),
        }
    }
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
        StoreError::BadCursor => ErrorDetail::new(ErrorCode::BadRequest, text),
        StoreError::TokenRefused(_) => ErrorDetail::new(ErrorCode::Unauthorized, text),
        StoreError::Unavailable(source) => {
            tracing::warn!(error = %source, "the database does not answer");
            ErrorDetail::new(ErrorCode::Unavailable, format!("{text}: retry later"))
        }
        other => {
            tracing::error!(error = &other as &dyn std::error::Error, "the store failed");
            ErrorDetail::new(ErrorCode::Internal, format!("{text}; the server's log has more"))
        }
    }
}

fn path_of(kind: &str) -> &'static str {
    if kind == "token" { "tokens" } else { "agent/workspaces" }
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
