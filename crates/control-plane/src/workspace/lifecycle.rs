//! Stops, resumes and destroys workspaces. The row is changed before the sandbox.

use std::sync::Arc;
use std::time::Duration;

use emergent_failpoint::failpoint;
use emergent_guest_client::GuestClient;
use emergent_guest_protocol::{GuestCall, ShutdownCall};
use emergent_store::{StoreError, WorkspaceRecord};
use emergent_wire::WorkspaceId;
use emergent_wire::event::EventKind;
use emergent_wire::workspace::{Workspace, WorkspaceStatus};

use super::connections::Connections;
use super::context::Context;
use super::disk_guard::report_disk_repair;
use super::disk_space::DiskSpace;
use super::error::{Result, WorkspaceError};
use super::live::SandboxConnection;
use super::old_clones;

/// The time that running commands have to end before their workspace is removed.
const DESTROY_GRACE: Duration = Duration::from_secs(10);
/// The additional time for the agent to report that they have ended.
const DESTROY_MARGIN: Duration = Duration::from_secs(2);

/// Stops, resumes and destroys workspaces.
pub(crate) struct Lifecycle {
    context: Arc<Context>,
    disk_space: Arc<DiskSpace>,
    connections: Arc<Connections>,
}

impl Lifecycle {
    pub(super) fn new(
        context: &Arc<Context>,
        disk_space: &Arc<DiskSpace>,
        connections: &Arc<Connections>,
    ) -> Arc<Self> {
        Arc::new(Self {
            context: Arc::clone(context),
            disk_space: Arc::clone(disk_space),
            connections: Arc::clone(connections),
        })
    }

    /// Stops a workspace. Its files are kept. Stopping a stopped workspace succeeds.
    pub(crate) async fn stop(&self, id: WorkspaceId) -> Result<Workspace> {
        use WorkspaceStatus::{Error, Ready, Stopped, Stopping};
        self.disk_space.make_room_for_database();
        match self.context.store.transition(id, &[Ready, Error], Stopping).await {
            Ok(_) => {}
            Err(StoreError::WrongState { status: Stopped, .. }) => {
                return self.context.store.workspace(id).await.map_err(WorkspaceError::from);
            }
            // Another request or a dead server has begun the stop. This request finishes it.
            Err(StoreError::WrongState { status: Stopping, .. }) => {}
            Err(error) => return Err(error.into()),
        }
        failpoint!("stop.row_written");
        self.context.write_use(id, Some(self.context.clock.now())).await;
        self.finish_stop(id).await
    }

    /// Finishes a stop whose row says `stopping`. Does nothing in another state.
    pub(super) async fn finish_stop(&self, id: WorkspaceId) -> Result<Workspace> {
        use WorkspaceStatus::{Stopped, Stopping};
        let live = self.context.live(id);
        let _changing = live.change_lock.lock().await;
        let record = self.context.store.workspace_record(id).await?;
        if record.workspace.status != Stopping {
            return Ok(record.workspace);
        }
        let provider = self.context.provider_of(&record)?;
        // The channel stays open until the end, so that calls get their answers while their commands are ended.
        let _connection = live.close_to_calls();
        // After a failure the row still says `stopping`, so recovery tries again.
        provider.stop(id).await?;
        failpoint!("stop.sandbox_stopped");
        let workspace = self.context.store.transition(id, &[Stopping], Stopped).await?;
        failpoint!("stop.done");
        self.context.events.workspace(
            EventKind::WorkspaceStopped,
            id,
            "the workspace is stopped; its files are kept",
        );
        Ok(workspace)
    }

    /// Resumes a stopped workspace. Resuming a ready workspace succeeds.
    pub(crate) async fn resume(&self, id: WorkspaceId) -> Result<Workspace> {
        let live = self.context.live(id);
        let _changing = live.change_lock.lock().await;
        let record = self.context.store.workspace_record(id).await?;
        match record.workspace.status {
            WorkspaceStatus::Ready => return Ok(record.workspace),
            WorkspaceStatus::Stopped | WorkspaceStatus::Error => {}
            status => return Err(WorkspaceError::WrongState { id, status }),
        }
        // The row says `stopped` until the end. The ownership keeps other servers from stopping the sandbox meanwhile.
        self.context.take_over(&record).await?;
        failpoint!("resume.ownership_taken");
        let connection = match self.start_sandbox(&record).await {
            Ok(connection) => connection,
            Err(error) => {
                self.context.release(id).await;
                return Err(error);
            }
        };
        failpoint!("resume.sandbox_started");
        let from = [WorkspaceStatus::Stopped, WorkspaceStatus::Error];
        self.context.store.transition(id, &from, WorkspaceStatus::Ready).await?;
        self.context.write_use(id, Some(self.context.clock.now())).await;
        failpoint!("resume.ready");
        live.set_connection(connection);
        self.context.events.workspace(EventKind::WorkspaceReady, id, "the workspace is resumed");
        self.context.store.workspace(id).await.map_err(WorkspaceError::from)
    }

    /// Starts the sandbox of a stopped workspace.
    async fn start_sandbox(&self, record: &WorkspaceRecord) -> Result<SandboxConnection> {
        let spec = self.context.spec_of(record).await?;
        let provider = self.context.provider_of(record)?;
        let sandbox = provider.resume(&spec).await?;
        report_disk_repair(&self.context, record.workspace.id, &sandbox).await;
        old_clones::clean(&self.context, record, &sandbox.channel).await;
        Ok(SandboxConnection { channel: sandbox.channel, provider: provider.name() })
    }

    /// Removes a workspace, its sandbox and its files.
    pub(crate) async fn destroy(&self, id: WorkspaceId) -> Result<()> {
        self.disk_space.make_room_for_database();
        let all = WorkspaceStatus::ALL;
        match self.context.store.transition(id, all, WorkspaceStatus::Destroying).await {
            Ok(_) => {}
            Err(StoreError::Unwritable(_)) if self.disk_space.has_no_room_for_database() => {
                self.remove_sandbox_first(id).await?;
                self.context.store.transition(id, all, WorkspaceStatus::Destroying).await?;
            }
            Err(error) => return Err(error.into()),
        }
        failpoint!("destroy.row_written");
        self.finish_destroy(id).await
    }

    /// Removes the sandbox before the row is changed. On a full disk the row can't be changed, and the sandbox's files may fill it.
    /// A crash before the row is deleted leaves a workspace whose calls report that its files were removed.
    async fn remove_sandbox_first(&self, id: WorkspaceId) -> Result<()> {
        tracing::warn!(workspace = %id, "the database can't be written: the sandbox is removed first");
        let live = self.context.live(id);
        let _changing = live.change_lock.lock().await;
        let record = self.context.store.workspace_record(id).await?;
        live.close_to_calls();
        Ok(self.context.provider_of(&record)?.destroy(id).await?)
    }

    /// Finishes a removal whose row says `destroying`.
    pub(crate) async fn finish_destroy(&self, id: WorkspaceId) -> Result<()> {
        let live = self.context.live(id);
        let channel = match live.close_to_calls() {
            Some(connection) => Some(connection.channel),
            None => self.connections.open_channel_of(id).await?,
        };
        if let Some(channel) = channel {
            end_commands(&channel, live.calls()).await;
        }
        failpoint!("destroy.commands_ended");
        let _changing = live.change_lock.lock().await;
        live.close_to_calls();
        let record = match self.context.store.workspace_record(id).await {
            Ok(record) => record,
            // Another request has finished the removal.
            Err(StoreError::NotFound { .. }) => {
                self.context.forget(id);
                return Ok(());
            }
            Err(error) => return Err(error.into()),
        };
        if record.workspace.provider.is_some() {
            self.context.provider_of(&record)?.destroy(id).await?;
        }
        failpoint!("destroy.sandbox_removed");
        self.context.store.delete_workspace(id).await?;
        failpoint!("destroy.row_deleted");
        self.context.forget(id);
        tracing::info!(workspace = %id, "a workspace was destroyed");
        self.context.events.workspace(EventKind::WorkspaceDestroyed, id, "the workspace is destroyed");
        Ok(())
    }
}

/// Ends running commands: SIGTERM, the grace period, SIGKILL.
async fn end_commands(channel: &GuestClient, calls: usize) {
    let shutdown = async {
        let message = ShutdownCall { grace_ms: u64::try_from(DESTROY_GRACE.as_millis()).unwrap_or(10_000) };
        let call = channel.start(&GuestCall::Shutdown(message)).await.ok()?;
        call.answer::<serde_json::Value>().await.ok()
    };
    if tokio::time::timeout(DESTROY_GRACE + DESTROY_MARGIN, shutdown).await.is_err() {
        tracing::warn!(calls, "commands did not end in time; the sandbox is removed with them");
    }
}
