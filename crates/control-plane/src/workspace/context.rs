//! The state that all parts of [`Workspaces`](super::Workspaces) share: the store, the settings, the providers, and what this process
//! knows of each workspace.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use chrono::{DateTime, Utc};
use emergent_guest_protocol::Configuration;
use emergent_providers::{Providers, SandboxSpec, SharedProvider, Volume};
use emergent_store::{SealingKey, Store, WorkspaceRecord};
use emergent_wire::WorkspaceId;
use emergent_wire::event::EventKind;
use emergent_wire::id::ServerId;
use emergent_wire::mcp::McpVolume;
use emergent_wire::workspace::{ContainerType, ProviderName, Workspace, WorkspaceStatus};
use serde_json::{Map, Value, json};

use super::clock::Clock;
use super::error::{Result, WorkspaceError};
use super::live::Live;
use super::servers::Servers;
use crate::config::Settings;
use crate::events::Events;

/// The directories of file tools when the settings confine them.
const CONFINED_TO: [&str; 2] = ["/workspace", "/tmp"];

/// The shared state.
pub(crate) struct Context {
    pub(crate) store: Store,
    pub(crate) key: SealingKey,
    pub(crate) settings: Settings,
    pub(crate) providers: Providers,
    pub(crate) servers: Servers,
    pub(crate) events: Events,
    pub(crate) clock: Clock,
    live: Mutex<HashMap<WorkspaceId, Arc<Live>>>,
}

impl Context {
    pub(super) fn new(store: Store, key: SealingKey, settings: Settings, providers: Providers) -> Arc<Self> {
        Arc::new(Self {
            store,
            key,
            settings,
            providers,
            servers: Servers::default(),
            events: Events::default(),
            clock: Clock::start(),
            live: Mutex::default(),
        })
    }

    pub(super) fn live_map(&self) -> MutexGuard<'_, HashMap<WorkspaceId, Arc<Live>>> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What this process knows of a workspace.
    pub(crate) fn live(&self, id: WorkspaceId) -> Arc<Live> {
        Arc::clone(self.live_map().entry(id).or_default())
    }

    /// The same, if this process knows anything of it.
    pub(super) fn known_live(&self, id: WorkspaceId) -> Option<Arc<Live>> {
        self.live_map().get(&id).cloned()
    }

    /// All workspaces that this process knows.
    pub(super) fn all_live(&self) -> Vec<(WorkspaceId, Arc<Live>)> {
        self.live_map().iter().map(|(id, live)| (*id, Arc::clone(live))).collect()
    }

    /// Forgets a workspace that is gone.
    pub(super) fn forget(&self, id: WorkspaceId) {
        self.live_map().remove(&id);
    }

    /// A provider by its name.
    pub(crate) fn provider(&self, name: ProviderName) -> Result<&SharedProvider> {
        self.providers.get(name).ok_or(WorkspaceError::ProviderDisabled(name))
    }

    /// The provider of a workspace's sandbox.
    pub(crate) fn provider_of(&self, record: &WorkspaceRecord) -> Result<&SharedProvider> {
        self.provider(record.workspace.provider.ok_or(WorkspaceError::NoSandbox)?)
    }

    /// The specification of a workspace's sandbox.
    pub(crate) async fn spec_of(&self, record: &WorkspaceRecord) -> Result<SandboxSpec> {
        let workspace = &record.workspace;
        let environment = self.store.environment(workspace.id, &self.key).await?;
        let confined = self.settings.workspaces.confine_file_tools;
        let is_server = workspace.container_type == ContainerType::McpServer;
        Ok(SandboxSpec {
            id: workspace.id,
            container_type: workspace.container_type,
            image: record.image.clone(),
            limits: workspace.resource_limits,
            max_tasks: self.settings.workspaces.max_tasks,
            network: record.network,
            snapshot: workspace.snapshot_id,
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

    /// The row of a workspace whose tools can be used now.
    pub(super) async fn ready_record(&self, id: WorkspaceId) -> Result<WorkspaceRecord> {
        let record = self.store.workspace_record(id).await?;
        match record.workspace.status {
            _ if record.workspace.container_type == ContainerType::McpServer => {
                Err(WorkspaceError::IsMcpServer(id))
            }
            // The cause of an error may be gone: the call tries.
            WorkspaceStatus::Ready | WorkspaceStatus::Error => Ok(record),
            status => Err(WorkspaceError::WrongState { id, status }),
        }
    }

    /// Makes this server the one that changes a workspace, unless another server does.
    pub(crate) async fn take_over(&self, record: &WorkspaceRecord) -> Result<()> {
        let id = record.workspace.id;
        self.servers.look_for([record.owner], &self.store).await?;
        let is_free = record.owner.is_none_or(|owner| !self.servers.is_alive(owner));
        if is_free && self.store.take_over(id, record.owner).await? {
            return Ok(());
        }
        Err(WorkspaceError::ChangedElsewhere(id))
    }

    /// Whether no other server that works is changing the things of `owner`.
    pub(super) fn is_mine_to_change(&self, owner: Option<ServerId>) -> bool {
        owner.is_none_or(|owner| owner == self.store.server() || !self.servers.is_alive(owner))
    }

    /// Writes down a use of a workspace.
    pub(super) async fn write_use(&self, id: WorkspaceId, used: Option<DateTime<Utc>>) {
        if let Some(at) = used
            && let Err(error) = self.store.touch(id, at).await
        {
            tracing::debug!(workspace = %id, %error, "a use could not be written down");
        }
    }

    /// Writes down and tells that a sandbox was started again.
    pub(super) async fn note_restart(&self, id: WorkspaceId, reason: String) {
        let note = json!({ "at": Utc::now(), "reason": reason });
        self.note_in_metadata(id, "last_restart", note).await;
        self.events.workspace(EventKind::WorkspaceRestarted, id, reason);
    }

    /// Puts a field into a workspace's metadata. A failure is logged.
    pub(super) async fn note_in_metadata(&self, id: WorkspaceId, field: &str, value: Value) {
        let fields = Map::from_iter([(field.to_owned(), value)]);
        if let Err(error) = self.store.merge_metadata(id, fields).await {
            tracing::warn!(workspace = %id, field, %error, "a field of the metadata could not be written");
        }
    }
}

/// The named volumes of an MCP server.
fn volumes_of(workspace: &Workspace) -> Vec<Volume> {
    let volumes = workspace.mcp_config.iter().flat_map(|config| config.volumes.clone());
    volumes.map(|McpVolume { name, path }| Volume { name, path }).collect()
}
