//! The state that all parts of [`Workspaces`](super::Workspaces) share: the store, the settings, the providers, and the live state of
//! each workspace.

use std::collections::HashMap;
use std::sync::Arc;

use chrono::{DateTime, Utc};
use emergent_guest_protocol::Configuration;
use emergent_providers::{Providers, SandboxSpec, SharedProvider, Volume};
use emergent_store::{SealingKey, Store, WorkspaceRecord};
use emergent_wire::WorkspaceId;
use emergent_wire::event::EventKind;
use emergent_wire::id::ServerId;
use emergent_wire::mcp::McpVolume;
use emergent_wire::workspace::{ContainerType, ProviderName, Workspace, WorkspaceStatus};
use parking_lot::Mutex;
use serde_json::{Map, Value, json};

use super::clock::Clock;
use super::error::{Result, WorkspaceError};
use super::live::LiveWorkspace;
use super::servers::Servers;
use crate::config::Settings;
use crate::events::Events;

/// The directories to which the settings can confine file tools.
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
    pub(super) live: Mutex<HashMap<WorkspaceId, Arc<LiveWorkspace>>>,
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

    /// The live state of a workspace, which is created if there is none.
    pub(crate) fn live(&self, id: WorkspaceId) -> Arc<LiveWorkspace> {
        Arc::clone(self.live.lock().entry(id).or_default())
    }

    /// The live state of a workspace, if there is one.
    pub(super) fn known_live(&self, id: WorkspaceId) -> Option<Arc<LiveWorkspace>> {
        self.live.lock().get(&id).cloned()
    }

    /// All workspaces with live state.
    pub(super) fn all_live(&self) -> Vec<(WorkspaceId, Arc<LiveWorkspace>)> {
        self.live.lock().iter().map(|(id, live)| (*id, Arc::clone(live))).collect()
    }

    /// Drops the live state of a workspace that was removed.
    pub(super) fn forget(&self, id: WorkspaceId) {
        self.live.lock().remove(&id);
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
        let configuration = Configuration {
            environment,
            confined_to: if confined { CONFINED_TO.map(str::to_owned).to_vec() } else { Vec::new() },
            max_tasks: Some(self.settings.workspaces.max_tasks),
            without_shells: workspace.container_type == ContainerType::McpServer,
            ..Configuration::default()
        };
        Ok(SandboxSpec { configuration: Some(configuration), ..self.spec_without_configuration(record) })
    }

    /// The specification without the configuration of the agent, which has the variables: for a sandbox that is configured already.
    pub(super) fn spec_without_configuration(&self, record: &WorkspaceRecord) -> SandboxSpec {
        let workspace = &record.workspace;
        SandboxSpec {
            id: workspace.id,
            container_type: workspace.container_type,
            image: record.image.clone(),
            limits: workspace.resource_limits,
            max_tasks: self.settings.workspaces.max_tasks,
            network: record.network,
            snapshot: workspace.snapshot_id,
            volumes: volumes_of(workspace),
            configuration: None,
        }
    }

    /// The row of a workspace whose tools can be called now.
    pub(super) async fn ready_record(&self, id: WorkspaceId) -> Result<WorkspaceRecord> {
        let record = self.store.workspace_record(id).await?;
        match record.workspace.status {
            _ if record.workspace.container_type == ContainerType::McpServer => {
                Err(WorkspaceError::IsMcpServer(id))
            }
            // The cause of an error may be gone, so the call is tried.
            WorkspaceStatus::Ready | WorkspaceStatus::Error => Ok(record),
            status => Err(WorkspaceError::WrongState { id, status }),
        }
    }

    /// Makes this server the owner of a workspace. Fails if another running server owns it.
    pub(crate) async fn take_over(&self, record: &WorkspaceRecord) -> Result<()> {
        let id = record.workspace.id;
        self.servers.refresh_for([record.owner], &self.store).await?;
        let is_free = record.owner.is_none_or(|owner| !self.servers.is_alive(owner));
        if is_free && self.store.take_over(id, record.owner).await? {
            return Ok(());
        }
        Err(WorkspaceError::ChangedElsewhere(id))
    }

    /// Whether this server may change a row with this owner: no other running server owns it.
    pub(super) fn may_change(&self, owner: Option<ServerId>) -> bool {
        owner.is_none_or(|owner| owner == self.store.server() || !self.servers.is_alive(owner))
    }

    /// Stores the time of a use of a workspace. A failure is logged.
    pub(super) async fn write_use(&self, id: WorkspaceId, used: Option<DateTime<Utc>>) {
        if let Some(at) = used
            && let Err(error) = self.store.touch(id, at).await
        {
            tracing::debug!(workspace = %id, %error, "the use of a workspace could not be stored");
        }
    }

    /// Stores the error of a workspace. A failure to store it is logged.
    pub(super) async fn store_error(&self, id: WorkspaceId, message: &str) {
        if let Err(error) = self.store.set_error(id, message).await {
            tracing::warn!(workspace = %id, %error, problem = message, "the error of a workspace could not be stored");
        }
    }

    /// Stores the error of a workspace and publishes it as an event.
    pub(super) async fn report_error(&self, id: WorkspaceId, message: String) {
        self.store_error(id, &message).await;
        self.events.workspace(EventKind::WorkspaceError, id, message);
    }

    /// Gives up the ownership of a row. A failure is logged: the row stays owned until this server ends.
    pub(super) async fn release(&self, id: WorkspaceId) {
        if let Err(error) = self.store.release(id).await {
            tracing::warn!(workspace = %id, %error, "a workspace could not be released to other servers");
        }
    }

    /// Stores and reports that a sandbox was restarted.
    pub(super) async fn note_restart(&self, id: WorkspaceId, reason: String) {
        let note = json!({ "at": Utc::now(), "reason": reason });
        self.note_in_metadata(id, "last_restart", note).await;
        self.events.workspace(EventKind::WorkspaceRestarted, id, reason);
    }

    /// Puts a field into a workspace's metadata. A failure is logged.
    pub(super) async fn note_in_metadata(&self, id: WorkspaceId, field: &str, value: Value) {
        let fields = Map::from_iter([(field.to_owned(), value)]);
        if let Err(error) = self.store.merge_metadata(id, fields).await {
            tracing::warn!(workspace = %id, field, %error, "a field of a workspace's metadata could not be stored");
        }
    }
}

/// The named volumes of an MCP server.
fn volumes_of(workspace: &Workspace) -> Vec<Volume> {
    let volumes = workspace.mcp_config.iter().flat_map(|config| config.volumes.clone());
    volumes.map(|McpVolume { name, path }| Volume { name, path }).collect()
}
