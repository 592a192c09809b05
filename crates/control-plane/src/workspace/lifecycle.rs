//! Stop, resume, destroy, and how a workspace's sandbox is reached.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use chrono::Utc;
use emergent_guest_client::GuestClient;
use emergent_guest_protocol::{GuestCall, ShutdownCall};
use emergent_providers::ProviderError;
use emergent_store::{StoreError, WorkspaceRecord};
use emergent_wire::workspace::{Workspace, WorkspaceStatus};
use emergent_wire::{ErrorCode, ErrorDetail, WorkspaceId};
use serde_json::{Map, json};

use super::{Workspaces, error_of};

/// How long the commands of a busy workspace have before it is removed.
const DESTROY_GRACE: Duration = Duration::from_secs(10);

impl Workspaces {
    /// Stops a workspace; its files are kept. Stopping a stopped one is success.
    pub(crate) async fn stop(&self, id: WorkspaceId) -> Result<Workspace, ErrorDetail> {
        use WorkspaceStatus::{Error, Ready, Stopped, Stopping};
        match self.store.transition(id, &[Ready, Error], Stopping).await {
            Ok(_) => {}
            Err(StoreError::WrongState { status: Stopped, .. }) => {
                return self.store.workspace(id).await.map_err(error_of);
            }
            // Another request or a server that died is at it: joining is safe.
            Err(StoreError::WrongState { status: Stopping, .. }) => {}
            Err(error) => return Err(error_of(error)),
        }
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
        if let Err(error) = self.provider_of(&record)?.stop(id).await {
            // The intent stays: recovery tries again.
            return Err(error.into());
        }
        live.set_channel(None);
        self.store.transition(id, &[Stopping], Stopped).await.map_err(error_of)
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
        let spec = self.spec_of(&record).await?;
        let sandbox = self.provider_of(&record)?.resume(&spec).await?;
        let from = [WorkspaceStatus::Stopped, WorkspaceStatus::Error];
        let workspace = self.store.transition(id, &from, WorkspaceStatus::Ready).await.map_err(error_of)?;
        let _ = self.store.touch(id, Utc::now()).await;
        self.adopt_channel(id, sandbox.channel);
        Ok(workspace)
    }

    /// Removes a workspace and everything that belongs to it.
    pub(crate) async fn destroy(self: &Arc<Self>, id: WorkspaceId) -> Result<(), ErrorDetail> {
        let all = WorkspaceStatus::ALL;
        self.store.transition(id, all, WorkspaceStatus::Destroying).await.map_err(error_of)?;
        self.finish_destroy(id).await
    }

    /// Carries out a removal that was written down.
    pub(super) async fn finish_destroy(&self, id: WorkspaceId) -> Result<(), ErrorDetail> {
        let live = self.live(id);
        if let Some(channel) = live.channel() {
            end_commands(&channel, live.calls.load(Ordering::SeqCst)).await;
        }
        let _changing = live.changing.lock().await;
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
        live.set_channel(None);
        self.store.delete_workspace(id).await.map_err(error_of)?;
        self.forget(id);
        tracing::info!(workspace = %id, "destroyed");
        Ok(())
    }

    /// The channel to a workspace that is ready; opened again, and its sandbox started again, where needed.
    pub(crate) async fn channel(
        self: &Arc<Self>,
        record: &WorkspaceRecord,
    ) -> Result<GuestClient, ErrorDetail> {
        let id = record.workspace.id;
        let live = self.live(id);
        if let Some(channel) = live.channel() {
            return Ok(channel);
        }
        let _changing = live.changing.lock().await;
        if let Some(channel) = live.channel() {
            return Ok(channel);
        }
        // The state may have changed while we waited.
        let record = self.ready_record(id).await?;
        let spec = self.spec_of(&record).await?;
        let provider = self.provider_of(&record)?;
        let channel = match provider.open_channel(&spec).await {
            Ok(channel) => channel,
            Err(ProviderError::NotRunning(why) | ProviderError::Gone(why)) => {
                tracing::warn!(workspace = %id, why, "the sandbox had ended and is started again");
                metrics::counter!("emergent_sandbox_restarts_total").increment(1);
                let sandbox = match provider.resume(&spec).await {
                    Ok(sandbox) => sandbox,
                    Err(error) => return Err(self.give_up(id, &why, error).await),
                };
                let note = json!({ "at": Utc::now(), "reason": why });
                let _ =
                    self.store.merge_metadata(id, Map::from_iter([("last_restart".to_owned(), note)])).await;
                sandbox.channel
            }
            Err(error) => return Err(error.into()),
        };
        if record.workspace.status == WorkspaceStatus::Error {
            self.store
                .transition(id, &[WorkspaceStatus::Error], WorkspaceStatus::Ready)
                .await
                .map_err(error_of)?;
        }
        self.adopt_channel(id, channel.clone());
        Ok(channel)
    }

    /// A sandbox that can't be started again: the row says why. It is looked at again with the next call.
    async fn give_up(&self, id: WorkspaceId, why: &str, error: ProviderError) -> ErrorDetail {
        let message = format!("the sandbox has ended ({why}) and can't be started again: {error}");
        if !matches!(error, ProviderError::Unavailable(_) | ProviderError::TimedOut { .. }) {
            let _ = self.store.set_error(id, &message).await;
        }
        let mut detail = ErrorDetail::from(error);
        detail.message = message;
        detail
    }

    /// Keeps a channel for the calls to come.
    pub(super) fn adopt_channel(&self, id: WorkspaceId, channel: GuestClient) {
        self.live(id).set_channel(Some(channel));
    }

    /// What became of a call whose channel broke.
    pub(super) async fn explain_loss(&self, record: &WorkspaceRecord, error: ErrorDetail) -> ErrorDetail {
        if error.code != ErrorCode::SandboxLost {
            return error;
        }
        let id = record.workspace.id;
        self.live(id).channel();
        let Ok(provider) = self.provider_of(record) else {
            return error;
        };
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

/// Tells running commands to end: SIGTERM, up to the grace, SIGKILL.
async fn end_commands(channel: &GuestClient, calls: usize) {
    let shutdown = async {
        let message = ShutdownCall { grace_ms: u64::try_from(DESTROY_GRACE.as_millis()).unwrap_or(10_000) };
        let call = channel.start(&GuestCall::Shutdown(message)).await.ok()?;
        call.answer::<serde_json::Value>().await.ok()
    };
    if tokio::time::timeout(DESTROY_GRACE + Duration::from_secs(3), shutdown).await.is_err() {
        tracing::warn!(calls, "commands did not end in time; the sandbox is removed all the same");
    }
}
