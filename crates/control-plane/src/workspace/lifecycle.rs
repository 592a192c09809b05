//! Stop, resume, destroy, and how a workspace's sandbox is connected to.

use std::sync::Arc;
use std::time::Duration;

use chrono::Utc;
use emergent_failpoint::failpoint;
use emergent_guest_client::GuestClient;
use emergent_guest_protocol::{GuestCall, ShutdownCall};
use emergent_providers::{ProviderError, Sandbox, SandboxSpec, SharedProvider};
use emergent_store::{StoreError, WorkspaceRecord};
use emergent_wire::event::EventKind;
use emergent_wire::workspace::{ProviderName, Workspace, WorkspaceStatus};
use emergent_wire::{ErrorCode, ErrorDetail, WorkspaceId};
use serde_json::{Map, json};

use super::live::{Busy, Live, SandboxConnection};
use super::{Workspaces, error_of};

/// How long the commands of a busy workspace have before it is removed.
const DESTROY_GRACE: Duration = Duration::from_secs(10);
/// How long the agent may take beyond that to say that they have ended.
const DESTROY_MARGIN: Duration = Duration::from_secs(2);
/// How long it may take to open a channel that is not needed at all costs.
const OPEN_WITHIN: Duration = Duration::from_secs(5);

impl Workspaces {
    /// Stops a workspace; its files are kept. Stopping a stopped one is success.
    pub(crate) async fn stop(&self, id: WorkspaceId) -> Result<Workspace, ErrorDetail> {
        use WorkspaceStatus::{Error, Ready, Stopped, Stopping};
        self.disk_space.make_room_for_database();
        match self.store.transition(id, &[Ready, Error], Stopping).await {
            Ok(_) => {}
            Err(StoreError::WrongState { status: Stopped, .. }) => {
                return self.store.workspace(id).await.map_err(error_of);
            }
            // Another request or a server that died is at it: joining is safe.
            Err(StoreError::WrongState { status: Stopping, .. }) => {}
            Err(error) => return Err(error_of(error)),
        }
        failpoint!("stop.row_written");
        self.write_use(id, Some(self.clock.now())).await;
        self.finish_stop(id).await
    }

    /// Carries out a stop that was written down.
    pub(super) async fn finish_stop(&self, id: WorkspaceId) -> Result<Workspace, ErrorDetail> {
        use WorkspaceStatus::{Stopped, Stopping};
        let live = self.live(id);
        let _changing = live.changing.lock().await;
        let record = self.store.workspace_record(id).await.map_err(error_of)?;
        if record.workspace.status != Stopping {
            return Ok(record.workspace);
        }
        let provider = self.provider_of(&record)?;
        // Kept until the end: calls in progress get their answers while their commands are ended.
        let _reached = live.close_to_calls();
        // When this fails the intent stays: recovery tries again.
        provider.stop(id).await?;
        failpoint!("stop.sandbox_stopped");
        let workspace = self.store.transition(id, &[Stopping], Stopped).await.map_err(error_of)?;
        failpoint!("stop.done");
        self.events.workspace(EventKind::WorkspaceStopped, id, "it is stopped; its files are kept");
        Ok(workspace)
    }

    /// Resumes a stopped workspace. Resuming a ready one is success.
    pub(crate) async fn resume(self: &Arc<Self>, id: WorkspaceId) -> Result<Workspace, ErrorDetail> {
        let live = self.live(id);
        let _changing = live.changing.lock().await;
        let record = self.store.workspace_record(id).await.map_err(error_of)?;
        match record.workspace.status {
            WorkspaceStatus::Ready => return Ok(record.workspace),
            WorkspaceStatus::Stopped | WorkspaceStatus::Error => {}
            status => return Err(super::wrong_state(id, status)),
        }
        // The row says 'stopped' until it is resumed: others must not stop what is being started.
        self.take_over(&record).await?;
        failpoint!("resume.taken");
        let resumed = self.start_again(&record).await;
        let connection = match resumed {
            Ok(connection) => connection,
            Err(error) => {
                let _ = self.store.release(id).await;
                return Err(error);
            }
        };
        failpoint!("resume.sandbox_started");
        let from = [WorkspaceStatus::Stopped, WorkspaceStatus::Error];
        self.store.transition(id, &from, WorkspaceStatus::Ready).await.map_err(error_of)?;
        let _ = self.store.touch(id, self.clock.now()).await;
        failpoint!("resume.ready");
        live.set_connection(connection);
        self.events.workspace(EventKind::WorkspaceReady, id, "it is resumed");
        self.store.workspace(id).await.map_err(error_of)
    }

    /// Starts the sandbox of a stopped workspace.
    async fn start_again(&self, record: &WorkspaceRecord) -> Result<SandboxConnection, ErrorDetail> {
        let spec = self.spec_of(record).await?;
        let provider = self.provider_of(record)?;
        let sandbox = provider.resume(&spec).await?;
        self.tell_if_mended(record.workspace.id, &sandbox).await;
        self.clean_old_clone(record, &sandbox.channel).await;
        Ok(SandboxConnection { channel: sandbox.channel, provider: provider.name() })
    }

    /// Makes this server the one that changes a workspace, unless another is at it.
    pub(crate) async fn take_over(&self, record: &WorkspaceRecord) -> Result<(), ErrorDetail> {
        let id = record.workspace.id;
        self.servers.look_for([record.owner], &self.store).await.map_err(error_of)?;
        let is_free = record.owner.is_none_or(|owner| !self.servers.is_alive(owner));
        if is_free && self.store.take_over(id, record.owner).await.map_err(error_of)? {
            return Ok(());
        }
        let message = format!("workspace {id} is being changed by another server: retry in a moment");
        Err(ErrorDetail::new(ErrorCode::Conflict, message))
    }

    /// Removes a workspace and everything that belongs to it.
    pub(crate) async fn destroy(self: &Arc<Self>, id: WorkspaceId) -> Result<(), ErrorDetail> {
        self.disk_space.make_room_for_database();
        let all = WorkspaceStatus::ALL;
        match self.store.transition(id, all, WorkspaceStatus::Destroying).await {
            Ok(_) => {}
            Err(StoreError::Unwritable(_)) if self.disk_space.has_no_room_for_database() => {
                self.free_disk_of(id).await?;
                self.store.transition(id, all, WorkspaceStatus::Destroying).await.map_err(error_of)?;
            }
            Err(error) => return Err(error_of(error)),
        }
        failpoint!("destroy.row_written");
        self.finish_destroy(id).await
    }

    /// Removes the sandbox of a workspace whose removal can't be written down: on a full disk its own files may be what is in
    /// the way. A crash before the row is gone leaves a workspace that says that its files were removed.
    async fn free_disk_of(&self, id: WorkspaceId) -> Result<(), ErrorDetail> {
        tracing::warn!(workspace = %id, "the database can't be written: the sandbox is removed first");
        let live = self.live(id);
        let _changing = live.changing.lock().await;
        let record = self.store.workspace_record(id).await.map_err(error_of)?;
        live.close_to_calls();
        Ok(self.provider_of(&record)?.destroy(id).await?)
    }

    /// Carries out a removal that was written down.
    pub(crate) async fn finish_destroy(&self, id: WorkspaceId) -> Result<(), ErrorDetail> {
        let live = self.live(id);
        let channel = match live.close_to_calls() {
            Some(connection) => Some(connection.channel),
            None => self.open_channel_of(id).await,
        };
        if let Some(channel) = channel {
            end_commands(&channel, live.calls()).await;
        }
        failpoint!("destroy.commands_ended");
        let _changing = live.changing.lock().await;
        live.close_to_calls();
        let record = match self.store.workspace_record(id).await {
            Ok(record) => record,
            // Another request has finished it.
            Err(StoreError::NotFound { .. }) => {
                self.forget(id);
                return Ok(());
            }
            Err(error) => return Err(error_of(error)),
        };
        if record.workspace.provider.is_some() {
            self.provider_of(&record)?.destroy(id).await?;
        }
        failpoint!("destroy.sandbox_removed");
        self.store.delete_workspace(id).await.map_err(error_of)?;
        failpoint!("destroy.row_deleted");
        self.forget(id);
        tracing::info!(workspace = %id, "destroyed");
        self.events.workspace(EventKind::WorkspaceDestroyed, id, "it is gone");
        Ok(())
    }

    /// A channel to a sandbox that this process has none to, if it runs.
    pub(super) async fn open_channel_of(&self, id: WorkspaceId) -> Option<GuestClient> {
        let opened = async {
            let record = self.store.workspace_record(id).await.ok()?;
            let spec = SandboxSpec { configuration: None, ..self.spec_of(&record).await.ok()? };
            self.provider_of(&record).ok()?.open_channel(&spec).await.ok()
        };
        tokio::time::timeout(OPEN_WITHIN, opened).await.ok().flatten()
    }

    /// Begins a call to a ready workspace; its channel is opened again, and its sandbox started again, where needed.
    pub(super) async fn connect(
        self: &Arc<Self>,
        id: WorkspaceId,
    ) -> Result<(Arc<Live>, SandboxConnection, Busy), ErrorDetail> {
        let known = self.live_map().get(&id).cloned();
        if let Some(live) = known
            && let Some((connection, busy)) = live.begin_call()
        {
            return Ok((live, connection, busy));
        }
        // Before anything is remembered of an id that may be nobody's.
        self.ready_record(id).await?;
        let live = self.live(id);
        let _changing = live.changing.lock().await;
        self.end_if_damaged(id, &live).await;
        if let Some((connection, busy)) = live.begin_call() {
            return Ok((Arc::clone(&live), connection, busy));
        }
        // Looked up again: its state may have changed while the call waited.
        let record = self.ready_record(id).await?;
        live.set_connection(self.reconnect(&record).await?);
        match live.begin_call() {
            Some((connection, busy)) => Ok((Arc::clone(&live), connection, busy)),
            None => Err(ErrorDetail::new(
                ErrorCode::SandboxLost,
                "the sandbox ended as soon as it was started: try again",
            )),
        }
    }

    /// Reaches a workspace that nobody calls, as a sign that it can be used.
    pub(super) async fn examine(self: &Arc<Self>, id: WorkspaceId) -> Result<(), ErrorDetail> {
        self.connect(id).await.map(drop)
    }

    /// Opens a channel to the sandbox of a workspace, and starts the sandbox again where it has ended.
    async fn reconnect(&self, record: &WorkspaceRecord) -> Result<SandboxConnection, ErrorDetail> {
        let id = record.workspace.id;
        let spec = self.spec_of(record).await?;
        let provider = self.provider_of(record)?;
        let channel = match open_or_restart(provider, &spec).await {
            Ok(Opened::Running(channel)) => channel,
            Ok(Opened::Restarted { sandbox, reason }) => {
                self.tell_if_mended(id, &sandbox).await;
                let note = json!({ "at": Utc::now(), "reason": reason });
                let _ =
                    self.store.merge_metadata(id, Map::from_iter([("last_restart".to_owned(), note)])).await;
                self.events.workspace(
                    EventKind::WorkspaceRestarted,
                    id,
                    format!("its sandbox had ended: {reason}"),
                );
                sandbox.channel
            }
            Err(OpenError::NotOpened(error)) => return Err(error.into()),
            Err(OpenError::NotRestarted { reason, error }) => {
                return Err(self.give_up(id, &reason, error).await);
            }
        };
        if record.workspace.status == WorkspaceStatus::Error {
            self.store
                .transition(id, &[WorkspaceStatus::Error], WorkspaceStatus::Ready)
                .await
                .map_err(error_of)?;
        }
        self.clean_old_clone(record, &channel).await;
        Ok(SandboxConnection { channel, provider: provider.name() })
    }

    /// A sandbox that can't be started again: the row says why. It is looked at again with the next call.
    async fn give_up(&self, id: WorkspaceId, why: &str, error: ProviderError) -> ErrorDetail {
        let message = format!("the sandbox has ended ({why}) and can't be started again: {error}");
        if !matches!(error, ProviderError::Unavailable(_) | ProviderError::TimedOut { .. }) {
            let _ = self.store.set_error(id, &message).await;
            self.events.workspace(EventKind::WorkspaceError, id, message.as_str());
        }
        let mut detail = ErrorDetail::from(error);
        detail.message = message;
        detail
    }

    /// What became of a call whose channel broke.
    pub(super) async fn explain_loss(
        &self,
        id: WorkspaceId,
        provider: ProviderName,
        error: ErrorDetail,
    ) -> ErrorDetail {
        if error.code != ErrorCode::SandboxLost {
            return error;
        }
        let Ok(provider) = self.provider(provider) else {
            return error;
        };
        let known = self.live_map().get(&id).and_then(|live| live.last_end());
        if let Some(why) = known {
            let message = format!("the sandbox was ended while the call ran: {why}");
            return ErrorDetail::new(ErrorCode::SandboxLost, message).with_details(json!({ "reason": why }));
        }
        match provider.explain_end(id).await {
            Some(why) => ErrorDetail::new(
                ErrorCode::SandboxLost,
                format!("the sandbox ended while the call ran: {why}. Its files are kept, and the next call starts it again"),
            )
            .with_details(json!({ "reason": why, "oom_killed": why.contains("out of memory") })),
            None => error,
        }
    }
}

/// A channel to a sandbox.
pub(crate) enum Opened {
    /// The sandbox was running.
    Running(GuestClient),
    /// It had ended for this reason, and was started again.
    Restarted { sandbox: Sandbox, reason: String },
}

/// The sandbox can't be connected to.
pub(crate) enum OpenError {
    NotOpened(ProviderError),
    /// It had ended for this reason, and can't be started again.
    NotRestarted {
        reason: String,
        error: ProviderError,
    },
}

impl From<ProviderError> for OpenError {
    fn from(error: ProviderError) -> Self {
        Self::NotOpened(error)
    }
}

/// Opens a channel to a sandbox. One that has ended is started again; one that does not respond is killed first.
pub(crate) async fn open_or_restart(
    provider: &SharedProvider,
    spec: &SandboxSpec,
) -> Result<Opened, OpenError> {
    let reason = match provider.open_channel(spec).await {
        Ok(channel) => return Ok(Opened::Running(channel)),
        Err(ProviderError::NotRunning(reason) | ProviderError::Gone(reason)) => reason,
        Err(error @ ProviderError::Unresponsive(_)) => {
            provider.kill(spec.id).await?;
            error.to_string()
        }
        Err(error) => return Err(error.into()),
    };
    tracing::warn!(workspace = %spec.id, reason, "the sandbox had ended and is started again");
    metrics::counter!("emergent_sandbox_restarts_total").increment(1);
    match provider.resume(spec).await {
        Ok(sandbox) => Ok(Opened::Restarted { sandbox, reason }),
        Err(error) => Err(OpenError::NotRestarted { reason, error }),
    }
}

/// Tells running commands to end: SIGTERM, up to the grace, SIGKILL.
async fn end_commands(channel: &GuestClient, calls: usize) {
    let shutdown = async {
        let message = ShutdownCall { grace_ms: u64::try_from(DESTROY_GRACE.as_millis()).unwrap_or(10_000) };
        let call = channel.start(&GuestCall::Shutdown(message)).await.ok()?;
        call.answer::<serde_json::Value>().await.ok()
    };
    if tokio::time::timeout(DESTROY_GRACE + DESTROY_MARGIN, shutdown).await.is_err() {
        tracing::warn!(calls, "commands did not end in time; the sandbox is removed all the same");
    }
}
