//! Stop, resume, destroy, and how a workspace's sandbox is reached.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use chrono::Utc;
use emergent_guest_client::GuestClient;
use emergent_guest_protocol::{GuestCall, ShutdownCall};
use emergent_providers::ProviderError;
use emergent_store::StoreError;
use emergent_wire::workspace::{ProviderName, Workspace, WorkspaceStatus};
use emergent_wire::{ErrorCode, ErrorDetail, WorkspaceId};
use serde_json::{Map, json};

use super::live::{Live, Reached};
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
        let provider = self.provider_of(&record)?;
        // Kept until the end: calls in progress get their answers while their commands are ended.
        let _reached = live.close_to_calls();
        // When this fails the intent stays: recovery tries again.
        provider.stop(id).await?;
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
        let provider = self.provider_of(&record)?;
        let sandbox = provider.resume(&spec).await?;
        let from = [WorkspaceStatus::Stopped, WorkspaceStatus::Error];
        let workspace = self.store.transition(id, &from, WorkspaceStatus::Ready).await.map_err(error_of)?;
        let _ = self.store.touch(id, Utc::now()).await;
        live.set_reached(Reached { channel: sandbox.channel, provider: provider.name() });
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
        if let Some(reached) = live.close_to_calls() {
            end_commands(&reached.channel, live.calls.load(Ordering::SeqCst)).await;
        }
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
        self.store.delete_workspace(id).await.map_err(error_of)?;
        self.forget(id);
        tracing::info!(workspace = %id, "destroyed");
        Ok(())
    }

    /// How a ready workspace is reached; its channel opened again, and its sandbox started again, where needed.
    pub(super) async fn reach(
        self: &Arc<Self>,
        id: WorkspaceId,
    ) -> Result<(Arc<Live>, Reached), ErrorDetail> {
        let known = self.live_map().get(&id).cloned();
        if let Some((live, reached)) = known.and_then(|live| live.reached().map(|reached| (live, reached))) {
            return Ok((live, reached));
        }
        // Before anything is remembered of an id that may be nobody's.
        self.ready_record(id).await?;
        let live = self.live(id);
        let _changing = live.changing.lock().await;
        if let Some(reached) = live.reached() {
            return Ok((Arc::clone(&live), reached));
        }
        let reached = self.reconnect(id).await?;
        live.set_reached(reached.clone());
        Ok((Arc::clone(&live), reached))
    }

    /// Opens a channel to a workspace, whose sandbox may have ended.
    async fn reconnect(&self, id: WorkspaceId) -> Result<Reached, ErrorDetail> {
        // Looked up again: its state may have changed while the call waited.
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
        Ok(Reached { channel, provider: provider.name() })
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
