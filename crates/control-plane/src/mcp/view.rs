//! A server as callers see it: its row, and what its supervisor knows.

use emergent_mcp_bridge::journal::Entry;
use emergent_store::WorkspaceRecord;
use emergent_wire::ErrorDetail;
use emergent_wire::mcp::{McpConfig, McpLogLine, McpLogSource, McpServer, McpStatus};
use emergent_wire::workspace::WorkspaceStatus;

use super::McpHost;
use super::hosted::config_of;

impl McpHost {
    /// A server as callers see it.
    pub(super) fn view(&self, record: &WorkspaceRecord) -> Result<McpServer, ErrorDetail> {
        let McpConfig {
            command,
            args,
            stdio_bridge,
            port,
            path,
            mode,
            restart_policy,
            volumes,
            timeout_ms,
            environment,
        } = config_of(record)?;
        let workspace = &record.workspace;
        let hosted = self.servers().get(&workspace.id).cloned();
        let state = hosted.as_ref().map(|hosted| hosted.state());
        let status = match (workspace.status, &state) {
            (WorkspaceStatus::Destroying, _) => McpStatus::Removing,
            (_, Some(state)) => state.status,
            (_, None)
                if record.owner.is_some_and(|owner| owner != self.workspaces.context.store.server()) =>
            {
                McpStatus::Elsewhere
            }
            (_, None) => McpStatus::Starting,
        };
        let pending = hosted.as_ref().map(|hosted| hosted.pending_calls());
        let initialized = hosted.as_ref().and_then(|hosted| hosted.bridge.initialized());
        let warnings = workspace.metadata.get("warnings").cloned().unwrap_or_default();
        Ok(McpServer {
            id: workspace.id,
            name: record.name.clone().unwrap_or_default(),
            status,
            container_type: workspace.container_type,
            lifecycle: workspace.lifecycle,
            created_at: workspace.created_at,
            expires_at: workspace.expires_at,
            image: record.image.clone(),
            command,
            args,
            stdio_bridge,
            port,
            path,
            mode,
            restart_policy,
            environment,
            volumes,
            resource_limits: workspace.resource_limits,
            network: record.network,
            timeout_ms,
            provider: workspace.provider,
            provider_workspace_id: workspace.provider_workspace_id.clone(),
            placement: workspace.placement.clone(),
            warnings: serde_json::from_value(warnings).unwrap_or_default(),
            endpoint: format!("/api/v1/mcp/servers/{}/mcp", workspace.id),
            started_at: state.as_ref().and_then(|state| state.started_at),
            restarts: state.as_ref().map_or(0, |state| state.restarts),
            recent_crashes: state.as_ref().map_or(0, |state| state.recent_crashes),
            next_restart_at: state.as_ref().and_then(|state| state.next_restart_at),
            last_exit: state.as_ref().and_then(|state| state.last_exit.clone()),
            error: state.and_then(|state| state.error).or_else(|| record.error.clone()),
            pending_calls: pending.unwrap_or_default() as u64,
            sessions: hosted.as_ref().map_or(0, |hosted| hosted.endpoint.session_count()) as u64,
            initialize_result: initialized.and_then(|own| serde_json::from_str(own.result.get()).ok()),
            usage: None,
        })
    }
}

/// A line of a server's log.
pub(crate) fn log_line(entry: Entry) -> McpLogLine {
    let source = if entry.is_note { McpLogSource::Supervisor } else { McpLogSource::Stderr };
    McpLogLine { number: entry.number, source, text: entry.text }
}
