//! Tables of workspaces for the terminal.

use chrono::{DateTime, Utc};
use emergent_wire::workspace::Workspace;
use serde_json::Value;

use crate::output::{self, Table, one_line};
use crate::values::{age, size, timestamp};

/// The main fields of a workspace.
pub(super) fn summary(workspace: &Workspace) -> Table {
    let mut table = Table::default();
    table.field("id", Some(workspace.id));
    table.field("status", Some(workspace.status));
    table.field("provider", workspace.provider);
    table.field("placement", workspace.placement.as_ref().map(|placement| &placement.reason));
    table.field("error", text(&workspace.metadata, "error"));
    table
}

/// All fields of a workspace.
pub(super) fn details(workspace: &Workspace) -> Table {
    let mut table = summary(workspace);
    for rejected in workspace.placement.iter().flat_map(|placement| &placement.rejected) {
        table.field("rejected", Some(format!("{}: {}", rejected.provider, rejected.reason)));
    }
    table.field("image", text(&workspace.metadata, "image"));
    table.field("network", text(&workspace.metadata, "network"));
    let limits = workspace.resource_limits;
    table
        .field("limits", Some(format!("{} CPU, {} memory, {} disk", limits.cpu, limits.memory, limits.disk)));
    if let Some(usage) = &workspace.usage {
        let cpu = usage.cpu.map_or_else(|| "?".to_owned(), |cpu| format!("{cpu:.2}"));
        table.field(
            "uses",
            Some(format!(
                "{cpu} CPU, {} memory, {} disk, {} processes",
                size(usage.memory_bytes),
                size(usage.disk_bytes),
                usage.processes
            )),
        );
    }
    table.field("attached to", workspace.attached_to.as_ref());
    table.field("snapshot", workspace.snapshot_id.as_ref());
    table.field("repository", workspace.repository_url.as_ref());
    table.field("branch", workspace.branch.as_ref());
    table.field("session", workspace.agent_session_id);
    table.field("sandbox", Some(&workspace.provider_workspace_id).filter(|name| !name.is_empty()));
    table.field("created", Some(timestamp(workspace.created_at)));
    table.field("last used", Some(timestamp(workspace.last_used_at)));
    table.field("expires", workspace.expires_at.map(timestamp));
    table
}

/// A list of workspaces.
pub(super) fn list(workspaces: &[Workspace], now: DateTime<Utc>) -> Table {
    let mut table =
        Table::with_head(["ID", "STATUS", "PROVIDER", "CPU", "MEMORY", "DISK", "AGE", "USED", "DESCRIPTION"]);
    for workspace in workspaces {
        let limits = workspace.resource_limits;
        let about = text(&workspace.metadata, "error").or_else(|| workspace.repository_url.clone());
        table.row([
            workspace.id.to_string(),
            workspace.status.to_string(),
            workspace.provider.map_or_else(|| "-".to_owned(), |provider| provider.to_string()),
            limits.cpu.to_string(),
            limits.memory.to_string(),
            limits.disk.to_string(),
            age(workspace.created_at, now),
            format!("{} ago", age(workspace.last_used_at, now)),
            output::shorten(&about.unwrap_or_default(), 60),
        ]);
    }
    table
}

/// Prints the server's warnings about a workspace on stderr.
pub(super) fn warnings(workspace: &Workspace) {
    let warnings = workspace.metadata.get("warnings").and_then(Value::as_array);
    for warning in warnings.into_iter().flatten() {
        let warning = warning.as_str().map_or_else(|| warning.to_string(), str::to_owned);
        output::note(format_args!("warning: {}", one_line(&warning)));
    }
}

/// A field of the metadata as text.
fn text(metadata: &Value, key: &str) -> Option<String> {
    match metadata.get(key)? {
        Value::Null => None,
        Value::String(text) => Some(text.clone()),
        other => Some(other.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn workspace() -> Workspace {
        serde_json::from_value(serde_json::json!({
            "id": "01990000-aaaa-7000-8000-00000000beef", "agent_session_id": null,
            "container_type": "agent_workspace", "provider": "gvisor", "provider_workspace_id": "agent-workspace-x",
            "repository_url": null, "branch": null, "deployment_mode": "self-hosted", "lifecycle": "ephemeral",
            "status": "ready", "created_at": "2025-06-01T12:00:00Z", "last_used_at": "2025-06-01T12:30:00Z",
            "expires_at": null, "resource_limits": {"cpu": "2", "memory": "4G", "disk": "10G"},
            "snapshot_id": null, "mcp_config": null, "metadata": {"image": "i", "error": null},
            "placement": {"provider": "gvisor", "reason": "the best that is healthy", "warm_hit": false,
                          "rejected": [{"provider": "e2b", "reason": "no key"}]}
        }))
        .unwrap()
    }

    #[test]
    fn summary_shows_the_placement_and_details_show_limits_and_rejected_providers() {
        assert_eq!(
            summary(&workspace()).render(),
            "id         01990000-aaaa-7000-8000-00000000beef\n\
             status     ready\nprovider   gvisor\nplacement  the best that is healthy\n"
        );
        let details = details(&workspace()).render();
        for text in ["rejected   e2b: no key\n", "2 CPU, 4G memory, 10G disk", "2025-06-01 12:30:00 UTC"] {
            assert!(details.contains(text), "{details}");
        }
    }

    #[test]
    fn each_workspace_of_a_list_is_one_table_row() {
        let now = "2025-06-01T14:00:00Z".parse().unwrap();
        let text = list(&[workspace()], now).render();
        assert_eq!(
            text.lines().nth(1).unwrap(),
            "01990000-aaaa-7000-8000-00000000beef  ready   gvisor    2    4G      10G   2h   90m ago"
        );
        assert_eq!(list(&[], now).render(), "");
    }
}
