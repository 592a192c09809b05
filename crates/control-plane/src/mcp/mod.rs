//! Hosted MCP servers: registered once, then kept running, and reached through a bridge.
//!
//! A server is a row like a workspace's, its sandbox made by the same providers with the same guest agent in it. What is
//! different is who looks after it: a task for each server ([`supervise`]), which starts its process, starts it again when
//! it ends, and takes the sandbox back when it is lost. Nothing here is needed after a crash: the rows say what is to run,
//! and a process whose server is gone has been ended by its guest agent, so that none runs twice.

mod front;
mod hosted;
mod peer;
mod process;
mod run;
mod side;
mod supervise;
mod tunnel;
mod view;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use emergent_failpoint::failpoint;
use emergent_store::WorkspaceRecord;
use emergent_wire::mcp::{McpServer, McpServerList, McpStatus, RegisterMcpServer};
use emergent_wire::workspace::{ContainerType, WorkspaceStatus};
use emergent_wire::{ErrorCode, ErrorDetail, Valid, WorkspaceId};
use futures_util::future::join_all;
use tokio::sync::Semaphore;

pub(crate) use hosted::Hosted;
use hosted::Order;
pub(crate) use peer::HostedServer;
pub(crate) use view::log_line;

use crate::errors::error_of;
use crate::workspace::Workspaces;

/// How long processes have after SIGTERM when the server ends.
const SHUTDOWN_GRACE: Duration = Duration::from_secs(30);
/// Servers that are started at once.
const STARTS_AT_ONCE: usize = 8;
/// How long a registration waits for the process to be ready; it goes on being started after that.
const REGISTER_WAITS: Duration = Duration::from_secs(60);

/// All hosted servers.
pub(crate) struct McpHost {
    pub(crate) workspaces: Arc<Workspaces>,
    servers: Mutex<HashMap<WorkspaceId, Arc<Hosted>>>,
    starts: Semaphore,
}

impl McpHost {
    pub(crate) fn new(workspaces: Arc<Workspaces>) -> Arc<Self> {
        Arc::new(Self { workspaces, servers: Mutex::default(), starts: Semaphore::new(STARTS_AT_ONCE) })
    }

    fn servers(&self) -> MutexGuard<'_, HashMap<WorkspaceId, Arc<Hosted>>> {
        self.servers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether an id is that of a server that this process looks after.
    pub(crate) fn hosts(&self, id: WorkspaceId) -> bool {
        self.servers().contains_key(&id)
    }

    /// Looks after every server there is: those with a row that are not looked after yet are started.
    pub(crate) async fn adopt_all(self: &Arc<Self>) {
        match self.workspaces.context.store.mcp_servers().await {
            Ok(records) => records.readable.iter().for_each(|record| self.adopt(record)),
            Err(error) => tracing::warn!(error = %error_of(error), "MCP servers can't be read"),
        }
    }

    /// Looks after a server from now on.
    fn adopt(self: &Arc<Self>, record: &WorkspaceRecord) {
        let id = record.workspace.id;
        let is_there = matches!(record.workspace.status, WorkspaceStatus::Ready | WorkspaceStatus::Error);
        if !is_there || record.workspace.container_type != ContainerType::McpServer {
            return;
        }
        let mut servers = self.servers();
        if servers.contains_key(&id) {
            return;
        }
        match Hosted::new(record) {
            Ok((hosted, orders)) => {
                servers.insert(id, Arc::clone(&hosted));
                tokio::spawn(supervise::supervise(Arc::clone(self), hosted, orders));
            }
            Err(error) => tracing::error!(mcp_server = %id, %error, "its configuration can't be read"),
        }
    }

    /// Registers a server and starts it. Answers when it is ready, or has shown that it is not.
    pub(crate) async fn register(
        self: &Arc<Self>,
        request: Valid<RegisterMcpServer>,
    ) -> Result<McpServer, ErrorDetail> {
        let creation = self.workspaces.create.begin_mcp_server(request).await?;
        let workspace = self.workspaces.create.finish(creation).await?;
        failpoint!("mcp.registered");
        let record = self.workspaces.context.store.workspace_record(workspace.id).await.map_err(error_of)?;
        self.adopt(&record);
        if let Ok(hosted) = self.hosted(workspace.id).await {
            hosted.first_start(REGISTER_WAITS).await;
        }
        self.get(workspace.id).await
    }

    /// A server that this process looks after.
    pub(crate) async fn hosted(self: &Arc<Self>, id: WorkspaceId) -> Result<Arc<Hosted>, ErrorDetail> {
        if let Some(hosted) = self.servers().get(&id).cloned() {
            return Ok(hosted);
        }
        // Another server of this installation may have registered it a moment ago.
        let record = self.workspaces.context.store.workspace_record(id).await.map_err(error_of)?;
        self.adopt(&record);
        self.servers().get(&id).cloned().ok_or_else(|| {
            let message = format!("the MCP server is {}: try again in a moment", record.workspace.status);
            ErrorDetail::new(ErrorCode::Unavailable, message)
        })
    }

    /// A server's row, by its id or name.
    pub(crate) async fn find(&self, id_or_name: &str) -> Result<WorkspaceRecord, ErrorDetail> {
        let store = &self.workspaces.context.store;
        let found = match id_or_name.parse() {
            Ok(id) => store.workspace_record(id).await,
            Err(_) => store.mcp_server_named(id_or_name).await,
        };
        match found.map_err(error_of) {
            Ok(record) if record.workspace.container_type == ContainerType::McpServer => Ok(record),
            Err(error) if error.code != ErrorCode::NotFound => Err(error),
            _ => {
                let message = format!(
                    "there is no MCP server '{}': list what there is with GET /api/v1/mcp/servers",
                    id_or_name.escape_debug().take(80).collect::<String>()
                );
                Err(ErrorDetail::new(ErrorCode::NotFound, message))
            }
        }
    }

    /// The id of a server that this process looks after.
    pub(crate) fn known(&self, id_or_name: &str) -> Option<WorkspaceId> {
        let servers = self.servers();
        match id_or_name.parse() {
            Ok(id) => servers.contains_key(&id).then_some(id),
            Err(_) => servers.values().find(|hosted| hosted.name == id_or_name).map(|hosted| hosted.id),
        }
    }

    /// The id of a server, without asking the store where that can be avoided.
    pub(crate) async fn id_of(&self, id_or_name: &str) -> Result<WorkspaceId, ErrorDetail> {
        match self.known(id_or_name) {
            Some(id) => Ok(id),
            None => Ok(self.find(id_or_name).await?.workspace.id),
        }
    }

    /// All servers.
    pub(crate) async fn list(&self) -> Result<McpServerList, ErrorDetail> {
        let records = self.workspaces.context.store.mcp_servers().await.map_err(error_of)?;
        let servers = records.readable.iter().map(|record| self.view(record)).collect::<Result<_, _>>()?;
        let unreadable = records.unreadable.into_iter().map(Into::into).collect();
        Ok(McpServerList { servers, unreadable })
    }

    /// One server, with what it uses.
    pub(crate) async fn get(&self, id: WorkspaceId) -> Result<McpServer, ErrorDetail> {
        let record = self.workspaces.context.store.workspace_record(id).await.map_err(error_of)?;
        let mut server = self.view(&record)?;
        server.usage = self.workspaces.usage_of(&record.workspace).await;
        Ok(server)
    }

    /// Restarts a server in a new container: SIGTERM, 10 s, SIGKILL. Its counters begin anew.
    pub(crate) async fn restart(self: &Arc<Self>, id: WorkspaceId) -> Result<McpServer, ErrorDetail> {
        let hosted = self.hosted(id).await?;
        if hosted.state().status == McpStatus::Elsewhere {
            let message = "another server of this installation runs this MCP server: ask that one";
            return Err(ErrorDetail::new(ErrorCode::Unavailable, message));
        }
        hosted.order(Order::Restart).await?;
        hosted.first_start(REGISTER_WAITS).await;
        self.get(id).await
    }

    /// Removes a server and everything that belongs to it.
    pub(crate) async fn remove(&self, id: WorkspaceId) -> Result<(), ErrorDetail> {
        // Written down first, so that nobody starts it again.
        let all = WorkspaceStatus::ALL;
        self.workspaces
            .context
            .store
            .transition(id, all, WorkspaceStatus::Destroying)
            .await
            .map_err(error_of)?;
        failpoint!("mcp.remove_written");
        let hosted = self.servers().get(&id).cloned();
        if let Some(hosted) = hosted {
            let _ = hosted.order(Order::Leave).await;
        }
        self.workspaces.lifecycle.finish_destroy(id).await?;
        self.servers().remove(&id);
        Ok(())
    }

    /// The server ends: every process is told to end, all at once; then their sandboxes are stopped.
    pub(crate) async fn shut_down(&self) {
        let all: Vec<Arc<Hosted>> = self.servers().values().cloned().collect();
        join_all(all.iter().map(|hosted| hosted.order(Order::Stop(SHUTDOWN_GRACE)))).await;
    }
}
