//! Hosted MCP servers as the REST API shows them.

use emergent_mcp_bridge::journal::Entry;
use emergent_wire::mcp::{McpConfig, McpLogLine, McpLogSource, McpServer};

use crate::mcp::McpReport;

/// A server as the REST API shows it.
pub(super) fn server(report: McpReport) -> McpServer {
    let McpReport { record, name, config, warnings, status, server, state, usage } = report;
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
    } = config;
    let workspace = record.workspace;
    let initialized = server.as_ref().and_then(|server| server.bridge.initialized());
    McpServer {
        id: workspace.id,
        name,
        status,
        container_type: workspace.container_type,
        lifecycle: workspace.lifecycle,
        created_at: workspace.created_at,
        expires_at: workspace.expires_at,
        image: record.image,
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
        provider_workspace_id: workspace.provider_workspace_id,
        placement: workspace.placement,
        warnings,
        endpoint: format!("/api/v1/mcp/servers/{}/mcp", workspace.id),
        started_at: state.as_ref().and_then(|state| state.started_at),
        restarts: state.as_ref().map_or(0, |state| state.restarts),
        recent_crashes: state.as_ref().map_or(0, |state| state.recent_crashes),
        next_restart_at: state.as_ref().and_then(|state| state.next_restart_at),
        last_exit: state.as_ref().and_then(|state| state.last_exit.clone()),
        error: state.and_then(|state| state.error).or(record.error),
        pending_calls: server.as_ref().map_or(0, |server| server.pending_calls()) as u64,
        sessions: server.as_ref().map_or(0, |server| server.endpoint.session_count()) as u64,
        initialize_result: initialized.and_then(|own| serde_json::from_str(own.result.get()).ok()),
        usage,
    }
}

/// A line of a server's log as the REST API shows it.
pub(super) fn log_line(entry: Entry) -> McpLogLine {
    let source = if entry.is_note { McpLogSource::Supervisor } else { McpLogSource::Stderr };
    McpLogLine { number: entry.number, source, text: entry.text }
}
