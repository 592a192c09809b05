//! The sweep removes expired workspaces and stops idle ones.
//!
//! A use always wins against the sweep: it is stored before the row is read, the channel is taken away only while no call has it, and
//! the store changes the row only if the workspace is still expired or idle.

use std::sync::Arc;
use std::time::Duration;

use chrono::{DateTime, TimeDelta, Utc};
use emergent_failpoint::failpoint;
use emergent_store::StoreError;
use emergent_wire::WorkspaceId;
use emergent_wire::event::EventKind;
use futures_util::StreamExt;

use super::connections::Connections;
use super::context::Context;
use super::error::{Result, WorkspaceError};
use super::lifecycle::Lifecycle;
use super::live::{CallsInProgress, LiveWorkspace, SandboxConnection};
use super::usage;

/// The interval in which uses are stored.
pub(crate) const WRITE_USES_EVERY: Duration = Duration::from_secs(10);
/// The limit on workspaces of one pass.
const MAX_WORKSPACES: u32 = 500;
/// The limit on workspaces that are ended at the same time.
const MAX_ENDINGS: usize = 4;
/// Another server may store a use this much later.
const MAX_WRITE_DELAY: TimeDelta = TimeDelta::seconds(15);

/// The change that the sweep makes to a workspace.
#[derive(Clone, Copy, Debug)]
enum Action {
    /// Remove it, because it has expired.
    Expire,
    /// Stop it, if it was not used since this time.
    StopUnusedSince(DateTime<Utc>),
}

/// Removes expired workspaces and stops idle ones.
pub(crate) struct Sweeper {
    context: Arc<Context>,
    connections: Arc<Connections>,
    lifecycle: Arc<Lifecycle>,
}

impl Sweeper {
    pub(super) fn new(
        context: &Arc<Context>,
        connections: &Arc<Connections>,
        lifecycle: &Arc<Lifecycle>,
    ) -> Arc<Self> {
        Arc::new(Self {
            context: Arc::clone(context),
            connections: Arc::clone(connections),
            lifecycle: Arc::clone(lifecycle),
        })
    }

    /// Stores the uses that are not stored yet. Calls in progress count as a use now.
    pub(crate) async fn write_uses(&self) {
        let now = self.context.clock.now();
        for (id, live) in self.context.all_live() {
            self.context.write_use(id, live.unwritten_use(now)).await;
        }
    }

    /// Runs one pass over the expired workspaces.
    pub(crate) async fn sweep_expired(self: &Arc<Self>) {
        let now = self.all_uses_stored_before();
        match self.context.store.expired(now, MAX_WORKSPACES).await {
            Ok(ids) => self.sweep(ids, Action::Expire).await,
            Err(error) => tracing::warn!(%error, "expired workspaces can't be read; it will be tried again"),
        }
    }

    /// Runs one pass over the idle workspaces, if the settings have an idle time.
    pub(crate) async fn sweep_idle(self: &Arc<Self>) {
        let Some(seconds) = self.context.settings.workspaces.idle_stop_seconds else {
            return;
        };
        let Some(idle) = i64::try_from(seconds).ok().and_then(TimeDelta::try_seconds) else {
            return;
        };
        let before = self.all_uses_stored_before() - idle;
        match self.context.store.unused_since(before, MAX_WORKSPACES).await {
            Ok(ids) => self.sweep(ids, Action::StopUnusedSince(before)).await,
            Err(error) => tracing::warn!(%error, "idle workspaces can't be read; it will be tried again"),
        }
    }

    /// All uses before this time are in the store.
    fn all_uses_stored_before(&self) -> DateTime<Utc> {
        let now = self.context.clock.now();
        if self.context.store.is_shared() { now - MAX_WRITE_DELAY } else { now }
    }

    async fn sweep(self: &Arc<Self>, ids: Vec<WorkspaceId>, action: Action) {
        futures_util::stream::iter(ids)
            .for_each_concurrent(MAX_ENDINGS, |id| async move {
                if let Err(error) = self.sweep_one(id, action).await {
                    tracing::warn!(workspace = %id, ?action, %error, "the sweep failed; it will be tried again");
                }
            })
            .await;
    }

    async fn sweep_one(self: &Arc<Self>, id: WorkspaceId, action: Action) -> Result<()> {
        failpoint!("sweep.found");
        let live = self.context.live(id);
        {
            // A change in progress is a use.
            let Ok(_changing) = live.change_lock.try_lock() else {
                return Ok(());
            };
            let now = self.context.clock.now();
            self.context.write_use(id, live.unwritten_use(now)).await;
            let connection = match live.close_if_idle() {
                Ok(connection) => connection,
                Err(CallsInProgress) => return Ok(()),
            };
            let changed = match self.runs_commands(id, connection.as_ref()).await {
                Ok(true) => {
                    self.context.write_use(id, Some(now)).await;
                    Ok(false)
                }
                Ok(false) => self.change_row(id, action).await,
                Err(error) => Err(error),
            };
            match changed {
                Ok(true) => {}
                result => {
                    restore(&live, connection);
                    return result.map(drop).map_err(WorkspaceError::from);
                }
            }
        }
        failpoint!("sweep.row_written");
        match action {
            Action::Expire => {
                tracing::info!(workspace = %id, "the workspace's time is over: it is removed");
                metrics::counter!("emergent_expired_total").increment(1);
                self.context.events.workspace(
                    EventKind::WorkspaceExpired,
                    id,
                    "the workspace has expired: it is removed",
                );
                self.lifecycle.finish_destroy(id).await
            }
            Action::StopUnusedSince(_) => {
                tracing::info!(workspace = %id, "the workspace is idle: it is stopped");
                metrics::counter!("emergent_idle_stops_total").increment(1);
                self.context.events.workspace(
                    EventKind::WorkspaceIdle,
                    id,
                    "the workspace is idle: it is stopped",
                );
                self.lifecycle.finish_stop(id).await.map(drop)
            }
        }
    }

    /// Changes the row, unless the workspace was used meanwhile. Returns whether it was changed.
    async fn change_row(&self, id: WorkspaceId, action: Action) -> Result<bool, StoreError> {
        match action {
            Action::Expire => self.context.store.expire(id, self.all_uses_stored_before()).await,
            Action::StopUnusedSince(before) => self.context.store.stop_if_unused(id, before).await,
        }
    }

    /// Whether commands run in the background. A sandbox that does not respond has none.
    async fn runs_commands(
        &self,
        id: WorkspaceId,
        connection: Option<&SandboxConnection>,
    ) -> Result<bool, StoreError> {
        let channel = match connection {
            Some(connection) => Some(connection.channel.clone()),
            None => self.connections.open_channel_of(id).await?,
        };
        let Some(channel) = channel else { return Ok(false) };
        Ok(usage::read(&channel).await.is_some_and(|usage| usage.running_operations > 0))
    }
}

fn restore(live: &LiveWorkspace, connection: Option<SandboxConnection>) {
    if let Some(connection) = connection {
        live.set_connection(connection);
    }
}
