//! Opens channels to sandboxes: for the first call, and again after the sandbox or the server has ended.

use std::sync::Arc;
use std::time::Duration;

use emergent_guest_client::{CallError, GuestClient};
use emergent_providers::{ProviderError, Sandbox, SandboxExit, SandboxSpec, SharedProvider};
use emergent_store::{StoreError, WorkspaceRecord};
use emergent_wire::WorkspaceId;
use emergent_wire::workspace::{ProviderName, WorkspaceStatus};

use super::context::Context;
use super::disk_guard::report_disk_repair;
use super::error::{Result, SandboxLost, WorkspaceError};
use super::live::{CallGuard, LiveWorkspace, SandboxConnection};
use super::{old_clones, usage};

/// The time limit to open a channel that is not indispensable.
const OPEN_TIMEOUT: Duration = Duration::from_secs(5);

/// Opens channels to sandboxes.
pub(crate) struct Connections {
    context: Arc<Context>,
}

impl Connections {
    pub(super) fn new(context: &Arc<Context>) -> Arc<Self> {
        Arc::new(Self { context: Arc::clone(context) })
    }

    /// Opens a channel to a sandbox. None if the workspace has no row, or its sandbox does not respond.
    pub(super) async fn open_channel_of(&self, id: WorkspaceId) -> Result<Option<GuestClient>, StoreError> {
        let record = match self.context.store.workspace_record(id).await {
            Ok(record) => record,
            Err(StoreError::NotFound { .. }) => return Ok(None),
            Err(error) => return Err(error),
        };
        let Ok(provider) = self.context.provider_of(&record) else {
            return Ok(None);
        };
        let spec = self.context.spec_without_configuration(&record);
        let opened = tokio::time::timeout(OPEN_TIMEOUT, provider.open_channel(&spec)).await;
        Ok(opened.ok().and_then(Result::ok))
    }

    /// Begins a call to a ready workspace. Where needed, opens its channel and restarts its sandbox.
    pub(super) async fn connect(
        &self,
        id: WorkspaceId,
    ) -> Result<(Arc<LiveWorkspace>, SandboxConnection, CallGuard)> {
        if let Some(live) = self.context.known_live(id)
            && let Some((connection, guard)) = live.begin_call()
        {
            return Ok((live, connection, guard));
        }
        // The row is read first, because an id without a row must not get live state.
        self.context.ready_record(id).await?;
        let live = self.context.live(id);
        let _changing = live.change_lock.lock().await;
        self.stop_if_damaged(id, &live).await;
        if let Some((connection, guard)) = live.begin_call() {
            return Ok((Arc::clone(&live), connection, guard));
        }
        // The row is read again, because it may have changed while the call waited for the lock.
        let record = self.context.ready_record(id).await?;
        live.set_connection(self.reconnect(&record).await?);
        match live.begin_call() {
            Some((connection, guard)) => Ok((Arc::clone(&live), connection, guard)),
            None => Err(WorkspaceError::EndedAtStart),
        }
    }

    /// Connects to a workspace to find out whether it can be used.
    pub(super) async fn check(&self, id: WorkspaceId) -> Result<()> {
        self.connect(id).await.map(drop)
    }

    /// Opens a channel to the sandbox of a workspace. A sandbox that has ended is restarted.
    async fn reconnect(&self, record: &WorkspaceRecord) -> Result<SandboxConnection> {
        let id = record.workspace.id;
        let spec = self.context.spec_of(record).await?;
        let provider = self.context.provider_of(record)?;
        let channel = match open_or_restart(provider, &spec).await {
            Ok(Opened::Running(channel)) => channel,
            Ok(Opened::Restarted { sandbox, reason }) => {
                report_disk_repair(&self.context, id, &sandbox).await;
                self.context.note_restart(id, format!("its sandbox had ended: {reason}")).await;
                sandbox.channel
            }
            Err(OpenError::NotOpened(error)) => return Err(error.into()),
            Err(OpenError::NotRestarted { reason, error }) => {
                return Err(self.note_failure(id, reason, error).await);
            }
        };
        if record.workspace.status == WorkspaceStatus::Error {
            self.context.store.transition(id, &[WorkspaceStatus::Error], WorkspaceStatus::Ready).await?;
        }
        old_clones::clean(&self.context, record, &channel).await;
        Ok(SandboxConnection { channel, provider: provider.name() })
    }

    /// Stores that a sandbox can't be restarted. The next call tries again.
    async fn note_failure(&self, id: WorkspaceId, reason: String, error: ProviderError) -> WorkspaceError {
        let is_temporary = matches!(error, ProviderError::Unavailable(_) | ProviderError::TimedOut { .. });
        let error = WorkspaceError::NotRestarted { reason, error };
        if !is_temporary {
            self.context.report_error(id, error.to_string()).await;
        }
        error
    }

    /// Replaces the error of a call whose sandbox has ended by the reason that the server or the provider knows.
    pub(super) async fn explain_loss(
        &self,
        id: WorkspaceId,
        provider: ProviderName,
        error: CallError,
    ) -> WorkspaceError {
        let is_lost = matches!(error, CallError::Lost(_) | CallError::Garbled(_));
        let Some(provider) = self.context.provider(provider).ok().filter(|_| is_lost) else {
            return error.into();
        };
        if let Some(reason) = self.context.known_live(id).and_then(|live| live.recent_end()) {
            return SandboxLost::EndedByServer(reason).into();
        }
        match provider.exit_reason(id).await {
            Some(SandboxExit { reason, out_of_memory }) => {
                SandboxLost::Ended { reason, out_of_memory }.into()
            }
            None => error.into(),
        }
    }

    /// Stops a sandbox in which the host has killed a process, if no command runs in it. The caller holds the lock of its changes.
    async fn stop_if_damaged(&self, id: WorkspaceId, live: &LiveWorkspace) {
        let Some(connection) = live.take_damaged() else {
            return;
        };
        let is_empty = usage::read(&connection.channel).await.is_none_or(|usage| usage.processes == 0);
        if !is_empty {
            return;
        }
        let Ok(provider) = self.context.provider(connection.provider) else {
            return;
        };
        tracing::warn!(workspace = %id, "the host has killed a process of the sandbox: the sandbox is restarted");
        live.close_to_calls();
        if let Err(error) = provider.stop(id).await {
            tracing::warn!(workspace = %id, %error, "a damaged sandbox could not be stopped");
        }
    }
}

/// A channel to a sandbox.
pub(crate) enum Opened {
    /// The sandbox was running.
    Running(GuestClient),
    /// The sandbox had ended for this reason, and was restarted.
    Restarted { sandbox: Sandbox, reason: String },
}

/// The error of opening a channel to a sandbox.
pub(crate) enum OpenError {
    NotOpened(ProviderError),
    /// The sandbox had ended for this reason, and can't be restarted.
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

/// Opens a channel to a sandbox. A sandbox that has ended is restarted. A sandbox that does not respond is killed and restarted.
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
    tracing::warn!(workspace = %spec.id, reason, "the sandbox had ended: it is restarted");
    metrics::counter!("emergent_sandbox_restarts_total").increment(1);
    match provider.resume(spec).await {
        Ok(sandbox) => Ok(Opened::Restarted { sandbox, reason }),
        Err(error) => Err(OpenError::NotRestarted { reason, error }),
    }
}
