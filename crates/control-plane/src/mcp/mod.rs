//! Hosted MCP servers: registered once, kept running, and reached through a bridge.
//!
//! ```text
//! supervise  one task for each server: starts its process, restarts it, carries out commands
//! run        one run: connect to the sandbox, start the process, watch it until it ends
//! process    one process in the sandbox, and its output
//! on_demand  further processes in the sandbox: of sessions, of single calls, of modern clients
//! call       single calls without a session
//! peer       bridges as peers of the HTTP stack
//! tunnel     connections to servers that speak HTTP themselves
//! hosted     the state of one server in this process
//! report     one server as its row and its supervisor describe it
//! ```
//!
//! A server has a row and a sandbox like a workspace, with the same providers and the same guest agent. The row says which servers
//! are to run, so nothing here is needed after a crash. The guest agent ends a process when its channel breaks, so no process runs
//! twice.

mod call;
mod error;
mod hosted;
mod on_demand;
mod peer;
mod process;
mod report;
mod run;
mod supervise;
#[cfg(test)]
mod tests;
mod tunnel;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use emergent_failpoint::failpoint;
use emergent_store::{StoreError, WorkspaceRecord};
use emergent_wire::mcp::{McpStatus, RegisterMcpServer};
use emergent_wire::workspace::{ContainerType, WorkspaceStatus};
use emergent_wire::{TokenId, Valid, WorkspaceId};
use futures_util::future::join_all;
use parking_lot::Mutex;
use tokio::sync::Semaphore;
use tracing::Instrument as _;

pub(crate) use error::McpError;
use error::Result;
use hosted::SupervisorCommand;
pub(crate) use hosted::{HostedServer, Transport};
pub(crate) use peer::StdioServer;
pub(crate) use report::McpReport;

use crate::workspace::Workspaces;

/// The time that processes have after SIGTERM when this server shuts down.
const SHUTDOWN_GRACE: Duration = Duration::from_secs(30);
/// The limit on servers that start at the same time.
const MAX_STARTS: usize = 8;
/// The time for which a registration or a restart waits for the first attempt to start the process. The supervisor tries on after
/// it.
const FIRST_START_TIME: Duration = Duration::from_secs(60);
/// The characters of an unknown name that an error repeats.
const MAX_NAME_CHARS: usize = 80;

/// All hosted servers.
pub(crate) struct McpHost {
    pub(crate) workspaces: Arc<Workspaces>,
    /// The servers that this process supervises.
    servers: Mutex<HashMap<WorkspaceId, Arc<HostedServer>>>,
    starts: Semaphore,
}

impl McpHost {
    pub(crate) fn new(workspaces: Arc<Workspaces>) -> Arc<Self> {
        Arc::new(Self { workspaces, servers: Mutex::default(), starts: Semaphore::new(MAX_STARTS) })
    }

    /// Whether this process supervises the server.
    pub(crate) fn supervises(&self, id: WorkspaceId) -> bool {
        self.servers.lock().contains_key(&id)
    }

    /// Starts a supervisor for each server that has a row and no supervisor.
    pub(crate) async fn adopt_all(self: &Arc<Self>) {
        match self.workspaces.context.store.mcp_servers().await {
            // Recovery logs damaged rows.
            Ok(records) => records.readable.iter().for_each(|record| self.adopt(record)),
            Err(error) => tracing::warn!(%error, "MCP servers can't be read; it will be tried again"),
        }
    }

    /// Starts the supervisor of a server, unless it has one.
    fn adopt(self: &Arc<Self>, record: &WorkspaceRecord) {
        let id = record.workspace.id;
        let is_complete = matches!(record.workspace.status, WorkspaceStatus::Ready | WorkspaceStatus::Error);
        if !is_complete || record.workspace.container_type != ContainerType::McpServer {
            return;
        }
        let mut servers = self.servers.lock();
        if servers.contains_key(&id) {
            return;
        }
        match HostedServer::new(record) {
            Ok((server, commands)) => {
                servers.insert(id, Arc::clone(&server));
                // The supervisor outlives the request that registered the server, so its span has no parent.
                let span = server.span();
                tokio::spawn(supervise::supervise(Arc::clone(self), server, commands).instrument(span));
            }
            Err(error) => tracing::error!(workspace = %id, %error, "an MCP server can't be started"),
        }
    }

    /// Registers a server and starts it. Returns after the first attempt to start its process.
    pub(crate) async fn register(self: &Arc<Self>, request: Valid<RegisterMcpServer>) -> Result<McpReport> {
        let creation = self.workspaces.create.begin_mcp_server(request).await?;
        let workspace = self.workspaces.create.provision(creation).await?;
        failpoint!("mcp.registered");
        let record = self.workspaces.context.store.workspace_record(workspace.id).await?;
        self.adopt(&record);
        if let Ok(server) = self.supervised(workspace.id).await {
            server.first_start(FIRST_START_TIME).await;
        }
        self.report(workspace.id).await
    }

    /// A server that this process supervises.
    pub(crate) async fn supervised(self: &Arc<Self>, id: WorkspaceId) -> Result<Arc<HostedServer>> {
        if let Some(server) = self.servers.lock().get(&id).cloned() {
            return Ok(server);
        }
        // Another server of this installation may have registered it a moment ago.
        let record = self.workspaces.context.store.workspace_record(id).await?;
        self.adopt(&record);
        let server = self.servers.lock().get(&id).cloned();
        server.ok_or(McpError::NotSupervised(record.workspace.status))
    }

    /// The row of a server, by the server's id or name.
    pub(crate) async fn find(&self, id_or_name: &str) -> Result<WorkspaceRecord> {
        let store = &self.workspaces.context.store;
        let found = match id_or_name.parse() {
            Ok(id) => store.workspace_record(id).await,
            Err(_) => store.mcp_server_named(id_or_name).await,
        };
        match found {
            Ok(record) if record.workspace.container_type == ContainerType::McpServer => Ok(record),
            Ok(_) | Err(StoreError::NotFound { .. }) => {
                Err(McpError::NotFound(id_or_name.escape_debug().take(MAX_NAME_CHARS).collect()))
            }
            Err(error) => Err(error.into()),
        }
    }

    /// The id of a server that this process supervises, by the server's id or name.
    pub(crate) fn supervised_id(&self, id_or_name: &str) -> Option<WorkspaceId> {
        let servers = self.servers.lock();
        match id_or_name.parse() {
            Ok(id) => servers.contains_key(&id).then_some(id),
            Err(_) => servers.values().find(|server| server.name == id_or_name).map(|server| server.id),
        }
    }

    /// The id of a server. The store is read only for servers that this process does not supervise.
    pub(crate) async fn id_of(&self, id_or_name: &str) -> Result<WorkspaceId> {
        match self.supervised_id(id_or_name) {
            Some(id) => Ok(id),
            None => Ok(self.find(id_or_name).await?.workspace.id),
        }
    }

    /// Restarts a server in a new container: SIGTERM, 10 s, SIGKILL. Its counters are reset.
    pub(crate) async fn restart(self: &Arc<Self>, id: WorkspaceId) -> Result<McpReport> {
        let server = self.supervised(id).await?;
        if server.state().status == McpStatus::Elsewhere {
            return Err(McpError::Elsewhere);
        }
        server.send_command(SupervisorCommand::Restart).await?;
        server.first_start(FIRST_START_TIME).await;
        self.report(id).await
    }

    /// Removes a server, its sandbox and its files.
    pub(crate) async fn remove(&self, id: WorkspaceId) -> Result<()> {
        // The row is written first, so that no supervisor starts the server again.
        let all = WorkspaceStatus::ALL;
        self.workspaces.context.store.transition(id, all, WorkspaceStatus::Destroying).await?;
        failpoint!("mcp.remove_written");
        let server = self.servers.lock().get(&id).cloned();
        if let Some(server) = server {
            // An error means that the supervisor has ended already.
            let _ = server.send_command(SupervisorCommand::Leave).await;
        }
        self.workspaces.lifecycle.finish_destroy(id).await?;
        self.servers.lock().remove(&id);
        Ok(())
    }

    /// The tokens that have sessions with servers of this process.
    pub(crate) fn session_owners(&self) -> HashSet<TokenId> {
        self.servers.lock().values().flat_map(|server| server.endpoint.owners()).collect()
    }

    /// Ends the sessions of a token, and cancels their calls.
    pub(crate) fn end_sessions_of(&self, owner: TokenId) {
        let all: Vec<Arc<HostedServer>> = self.servers.lock().values().cloned().collect();
        all.iter().for_each(|server| server.endpoint.end_of_owner(&owner));
    }

    /// Shuts all servers down at once: ends their processes and stops their sandboxes. Their rows stay.
    pub(crate) async fn shut_down(&self) {
        let all: Vec<Arc<HostedServer>> = self.servers.lock().values().cloned().collect();
        let stop = SupervisorCommand::Stop(SHUTDOWN_GRACE);
        join_all(all.iter().map(|server| server.send_command(stop))).await;
    }
}
