//! Requests for a workspace with all defaults filled in.

use std::collections::BTreeMap;

use chrono::{DateTime, Utc};
use emergent_store::NewWorkspace;
use emergent_wire::mcp::{self, McpConfig, RegisterMcpServer};
use emergent_wire::snapshot::{FromSnapshot, Snapshot, SnapshotStatus};
use emergent_wire::workspace::{
    ContainerType, CreateWorkspace, Lifecycle, NetworkMode, ProviderChoice, SecurityLevel,
};
use emergent_wire::{Validate as _, WorkspaceId};

use crate::config::WorkspaceSettings;
use crate::workspace::error::{Result, SnapshotError, WorkspaceError};
use crate::workspace::placement::PlacementRequest;

/// A request with all defaults filled in.
pub(super) struct ResolvedRequest {
    pub(super) new: NewWorkspace,
    pub(super) environment: BTreeMap<String, String>,
    pub(super) placement: PlacementRequest,
    /// Whether a spare of the warm pool can be its sandbox.
    pub(super) may_use_spare: bool,
}

impl ResolvedRequest {
    /// An agent's workspace.
    pub(super) fn workspace(
        request: CreateWorkspace,
        settings: &WorkspaceSettings,
        now: DateTime<Utc>,
    ) -> Result<Self> {
        let limits = request.resource_limits.unwrap_or_default().or(settings.default_limits());
        limits.validate()?;
        let container_type = request.container_type.unwrap_or(ContainerType::AgentWorkspace);
        if container_type == ContainerType::McpServer {
            return Err(WorkspaceError::CreatesMcpServer);
        }
        let deployment = request.deployment_mode.unwrap_or(settings.deployment_mode);
        let placement = PlacementRequest {
            container_type,
            provider: request.provider.unwrap_or(ProviderChoice::Auto),
            deployment,
            security: request.security_level.unwrap_or(SecurityLevel::Standard),
        };
        let image = request.image.unwrap_or_else(|| settings.default_image.clone());
        let new = NewWorkspace {
            container_type,
            repository_url: request.repository_url,
            branch: request.branch,
            deployment_mode: deployment,
            lifecycle: Lifecycle::Ephemeral,
            created_at: now,
            ttl_seconds: Some(request.ttl_seconds.unwrap_or(settings.default_ttl_seconds)),
            resource_limits: limits,
            network: request.network.unwrap_or(NetworkMode::Nat),
            ..NewWorkspace::agent(WorkspaceId::generate(), image)
        };
        let may_use_spare = request.warm_start.unwrap_or(true);
        Ok(Self { new, environment: request.environment, placement, may_use_spare })
    }

    /// The sandbox of a hosted MCP server.
    pub(super) fn mcp_server(
        request: RegisterMcpServer,
        settings: &WorkspaceSettings,
        now: DateTime<Utc>,
    ) -> Result<Self> {
        let limits = request.resource_limits.unwrap_or_default().or(mcp::DEFAULT_LIMITS);
        limits.validate()?;
        let config = McpConfig::from(&request);
        let placement = PlacementRequest {
            container_type: ContainerType::McpServer,
            provider: request.provider.unwrap_or(ProviderChoice::Auto),
            deployment: settings.deployment_mode,
            security: SecurityLevel::Standard,
        };
        let image = request.image.unwrap_or_else(|| settings.default_image.clone());
        let new = NewWorkspace {
            container_type: ContainerType::McpServer,
            lifecycle: Lifecycle::Persistent,
            deployment_mode: settings.deployment_mode,
            created_at: now,
            resource_limits: limits,
            network: request.network.unwrap_or(NetworkMode::Nat),
            name: Some(request.name),
            mcp_config: Some(config),
            ..NewWorkspace::agent(WorkspaceId::generate(), image)
        };
        Ok(Self { new, environment: request.environment, placement, may_use_spare: false })
    }

    /// A workspace with the files of a snapshot.
    pub(super) fn from_snapshot(
        request: FromSnapshot,
        snapshot: Snapshot,
        settings: &WorkspaceSettings,
        now: DateTime<Utc>,
    ) -> Result<Self> {
        if snapshot.status != SnapshotStatus::Ready {
            return Err(SnapshotError::NotReady { id: snapshot.id, status: snapshot.status }.into());
        }
        let limits = request.resource_limits.unwrap_or_default().or(snapshot.resource_limits);
        limits.validate()?;
        if snapshot.memory && limits != snapshot.resource_limits {
            return Err(SnapshotError::FixedLimits(snapshot.id).into());
        }
        let (requested, actual) = (limits.disk, snapshot.resource_limits.disk);
        if requested < actual {
            return Err(SnapshotError::SmallerDisk { requested, actual }.into());
        }
        let placement = PlacementRequest {
            container_type: ContainerType::AgentWorkspace,
            provider: snapshot.provider.into(),
            deployment: settings.deployment_mode,
            security: SecurityLevel::Standard,
        };
        let new = NewWorkspace {
            deployment_mode: settings.deployment_mode,
            created_at: now,
            ttl_seconds: Some(request.ttl_seconds.unwrap_or(settings.default_ttl_seconds)),
            resource_limits: limits,
            network: request.network.unwrap_or(snapshot.network),
            snapshot_id: Some(snapshot.id),
            ..NewWorkspace::agent(WorkspaceId::generate(), snapshot.image)
        };
        Ok(Self { new, environment: request.environment, placement, may_use_spare: false })
    }
}
