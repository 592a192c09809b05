//! One server as its row and its supervisor describe it. The fronts convert it for their clients.

use std::sync::Arc;

use emergent_store::{Rows, StoreError, Unreadable, WorkspaceRecord};
use emergent_wire::WorkspaceId;
use emergent_wire::mcp::{McpConfig, McpStatus};
use emergent_wire::workspace::{Usage, WorkspaceStatus};

use super::McpHost;
use super::error::Result;
use super::hosted::{HostedServer, McpState, config_of, name_of};
use crate::workspace::warnings_of;

/// A server's row, and its state if this process supervises it.
pub(crate) struct McpReport {
    pub(crate) record: WorkspaceRecord,
    pub(crate) name: String,
    pub(crate) config: McpConfig,
    pub(crate) warnings: Vec<String>,
    pub(crate) status: McpStatus,
    /// None when this process does not supervise it, like the state.
    pub(crate) server: Option<Arc<HostedServer>>,
    pub(crate) state: Option<McpState>,
    /// Measured for a report of one server only.
    pub(crate) usage: Option<Usage>,
}

impl McpHost {
    /// All servers, oldest first, and the rows that can't be read.
    pub(crate) async fn reports(&self) -> Result<Rows<McpReport>> {
        let records = self.workspaces.context.store.mcp_servers().await?;
        let mut reports = Rows { readable: Vec::new(), unreadable: records.unreadable };
        for record in records.readable {
            let id = record.workspace.id.0;
            match self.report_of(record) {
                Ok(report) => reports.readable.push(report),
                Err(error) => reports.unreadable.push(Unreadable { id, error }),
            }
        }
        Ok(reports)
    }

    /// One server with its usage.
    pub(crate) async fn report(&self, id: WorkspaceId) -> Result<McpReport> {
        let record = self.workspaces.context.store.workspace_record(id).await?;
        let mut report = self.report_of(record)?;
        report.usage = self.workspaces.usage_of(&report.record.workspace).await;
        Ok(report)
    }

    fn report_of(&self, record: WorkspaceRecord) -> Result<McpReport, StoreError> {
        let (name, config) = (name_of(&record)?.to_owned(), config_of(&record)?.clone());
        let warnings = warnings_of(&record.workspace)?;
        let server = self.servers.lock().get(&record.workspace.id).cloned();
        let this_server = self.workspaces.context.store.server();
        let state = server.as_ref().map(|server| server.state());
        let status = match (record.workspace.status, &state) {
            (WorkspaceStatus::Destroying, _) => McpStatus::Removing,
            (_, Some(state)) => state.status,
            (_, None) if record.owner.is_some_and(|owner| owner != this_server) => McpStatus::Elsewhere,
            (_, None) => McpStatus::Starting,
        };
        Ok(McpReport { record, name, config, warnings, status, server, state, usage: None })
    }
}
