//! Channels to sandboxes: opened for the first call, and again after the sandbox or the server has ended.

use std::sync::Arc;
use std::time::Duration;

use emergent_guest_client::{CallError, GuestClient};
use emergent_providers::{ProviderError, Sandbox, SandboxExit, SandboxSpec, SharedProvider};
use emergent_store::WorkspaceRecord;
use emergent_wire::WorkspaceId;
use emergent_wire::event::EventKind;
use emergent_wire::workspace::{ProviderName, WorkspaceStatus};

use super::context::Context;
use super::disk_guard::tell_if_mended;
use super::error::{Result, SandboxLost, WorkspaceError};
use super::live::{Busy, Live, SandboxConnection};
use super::{old_clones, usage};

/// The time to open a channel that can be done without.
const OPEN_TIME: Duration = Duration::from_secs(5);

/// Opens channels to sandboxes.
pub(crate) struct Connections {
    context: Arc<Context>,
}

impl Connections {
    pub(super) fn new(context: &Arc<Context>) -> Arc<Self> {
        Arc::new(Self { context: Arc::clone(context) })
    }

    /// Opens a channel to a sandbox, if the sandbox runs.
    pub(super) async fn open_channel_of(&self, id: WorkspaceId) -> Option<GuestClient> {
        let opened = async {
            let record = self.context.store.workspace_record(id).await.ok()?;
            let spec = SandboxSpec { configuration: None, ..self.context.spec_of(&record).await.ok()? };
            self.context.provider_of(&record).ok()?.open_channel(&spec).await.ok()
        };
        tokio::time::timeout(OPEN_TIME, opened).await.ok().flatten()
    }

    /// Begins a call to a ready workspace. Opens its channel, and starts its sandbox again, where needed.
    pub(super) async fn connect(&self, id: WorkspaceId) -> Result<(Arc<Live>, SandboxConnection, Busy)> {
        if let Some(live) = self.context.known_live(id)
            && let Some((connection, busy)) = live.begin_call()
        {
            return Ok((live, connection, busy));
        }
        // Before anything is remembered of an id that may be nobody's.
        self.context.ready_record(id).await?;
        let live = self.context.live(id);
        let _changing = live.changing.lock().await;
        self.end_if_damaged(id, &live).await;
        if let Some((connection, busy)) = live.begin_call() {
            return Ok((Arc::clone(&live), connection, busy));
        }
        // Looked up again: its state may have changed while the call waited.
        let record = self.context.ready_record(id).await?;
        live.set_connection(self.reconnect(&record).await?);
        match live.begin_call() {
            Some((connection, busy)) => Ok((Arc::clone(&live), connection, busy)),
            None => Err(WorkspaceError::EndedAtStart),
        }
    }

    /// Connects to a workspace to find out whether it can be used.
    pub(super) async fn examine(&self, id: WorkspaceId) -> Result<()> {
        self.connect(id).await.map(drop)
    }

    /// Opens a channel to the sandbox of a workspace, and starts the sandbox again where it has ended.
    async fn reconnect(&self, record: &WorkspaceRecord) -> Result<SandboxConnection> {
        let id = record.workspace.id;
        let spec = self.context.spec_of(record).await?;
        let provider = self.context.provider_of(record)?;
        let channel = match open_or_restart(provider, &spec).await {
            Ok(Opened::Running(channel)) => channel,
            Ok(Opened::Restarted { sandbox, reason }) => {
                tell_if_mended(&self.context, id, &sandbox).await;
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

    /// Writes down that a sandbox can't be started again. The next call tries again.
    async fn note_failure(&self, id: WorkspaceId, reason: String, error: ProviderError) -> WorkspaceError {
        let is_temporary = matches!(error, ProviderError::Unavailable(_) | ProviderError::TimedOut { .. });
        let error = WorkspaceError::NotRestarted { reason, error };
        if !is_temporary {
            let message = error.to_string();
            let _ = self.context.store.set_error(id, &message).await;
            self.context.events.workspace(EventKind::WorkspaceError, id, message);
        }
        error
    }

    /// Adds to the error of a call what the server and the provider know of the end of its sandbox.
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
        if let Some(reason) = self.context.known_live(id).and_then(|live| live.last_end()) {
            return SandboxLost::EndedByServer(reason).into();
        }
        match provider.exit_reason(id).await {
            Some(SandboxExit { reason, out_of_memory }) => {
                SandboxLost::Ended { reason, out_of_memory }.into()
            }
            None => error.into(),
        }
    }

    /// Ends a sandbox in which the host has killed a process, if nothing runs in it. The caller holds the lock of its changes.
    async fn end_if_damaged(&self, id: WorkspaceId, live: &Live) {
        let Some(connection) = live.take_damaged() else {
            return;
        };
        let is_empty = usage::ask(&connection.channel).await.is_none_or(|usage| usage.processes == 0);
        if !is_empty {
            return;
        }
        let Ok(provider) = self.context.provider(connection.provider) else {
            return;
        };
        tracing::warn!(workspace = %id, "the host has killed a process of the sandbox: it is started again");
        live.close_to_calls();
        if let Err(error) = provider.stop(id).await {
            tracing::warn!(workspace = %id, %error, "a damaged sandbox could not be ended");
        }
    }
}

/// An opened channel to a sandbox.
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
