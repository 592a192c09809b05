//! Ends workspaces whose time is over, and stops those that nobody uses.
//!
//! A use always wins: it is written down before the store is asked, the channel is taken away only while no call has
//! it, and the store changes the row only if the time is over by what it knows itself.

use std::sync::Arc;
use std::time::Duration;

use chrono::{DateTime, TimeDelta, Utc};
use emergent_failpoint::failpoint;
use emergent_wire::WorkspaceId;
use emergent_wire::event::EventKind;
use futures_util::StreamExt;

use super::connections::Connections;
use super::context::Context;
use super::error::{Result, WorkspaceError};
use super::lifecycle::Lifecycle;
use super::live::{InUse, Live, SandboxConnection};
use super::usage;

/// How often uses are written down that were not yet.
pub(crate) const WRITE_USES_EVERY: Duration = Duration::from_secs(10);
/// Workspaces that one pass looks at.
const AT_MOST: u32 = 500;
/// Workspaces that are ended at once.
const AT_ONCE: usize = 4;
/// Another server may know of a use for this long before it writes it down.
const OTHERS_MAY_KNOW: TimeDelta = TimeDelta::seconds(15);

/// What the sweep does with a workspace.
#[derive(Clone, Copy, Debug)]
enum Action {
    /// Its time is over.
    Expire,
    /// It was not used since.
    StopUnusedSince(DateTime<Utc>),
}

/// Ends workspaces whose time is over.
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

    /// Writes down the uses that were not yet: of workspaces with calls in progress, that is now.
    pub(crate) async fn write_uses(&self) {
        let now = self.context.clock.now();
        for (id, live) in self.context.all_live() {
            self.context.write_use(id, live.unwritten_use(now)).await;
        }
    }

    /// One pass over the workspaces whose time is over.
    pub(crate) async fn sweep_expired(self: &Arc<Self>) {
        let now = self.latest_unknown_use();
        match self.context.store.expired(now, AT_MOST).await {
            Ok(ids) => self.sweep(ids, Action::Expire).await,
            Err(error) => tracing::warn!(error = %error, "expired workspaces can't be looked up"),
        }
    }

    /// One pass over the workspaces that nobody uses, where the settings want them stopped.
    pub(crate) async fn sweep_idle(self: &Arc<Self>) {
        let Some(seconds) = self.context.settings.workspaces.idle_stop_seconds else {
            return;
        };
        let Some(idle) = i64::try_from(seconds).ok().and_then(TimeDelta::try_seconds) else {
            return;
        };
        let before = self.latest_unknown_use() - idle;
        match self.context.store.unused_since(before, AT_MOST).await {
            Ok(ids) => self.sweep(ids, Action::StopUnusedSince(before)).await,
            Err(error) => tracing::warn!(error = %error, "idle workspaces can't be looked up"),
        }
    }

    /// Uses before this are all in the store.
    fn latest_unknown_use(&self) -> DateTime<Utc> {
        let now = self.context.clock.now();
        if self.context.store.is_shared() { now - OTHERS_MAY_KNOW } else { now }
    }

    async fn sweep(self: &Arc<Self>, ids: Vec<WorkspaceId>, action: Action) {
        futures_util::stream::iter(ids)
            .for_each_concurrent(AT_ONCE, |id| async move {
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
            // Somebody who is changing it is using it.
            let Ok(_changing) = live.changing.try_lock() else {
                return Ok(());
            };
            let now = self.context.clock.now();
            self.context.write_use(id, live.unwritten_use(now)).await;
            let connection = match live.close_if_idle() {
                Ok(connection) => connection,
                Err(InUse) => return Ok(()),
            };
            if self.runs_commands(id, connection.as_ref()).await {
                self.context.write_use(id, Some(now)).await;
                restore(&live, connection);
                return Ok(());
            }
            let begun = match action {
                Action::Expire => self.context.store.expire(id, self.latest_unknown_use()).await,
                Action::StopUnusedSince(before) => self.context.store.stop_if_unused(id, before).await,
            };
            match begun {
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
                    "its time is over: it is removed",
                );
                self.lifecycle.finish_destroy(id).await
            }
            Action::StopUnusedSince(_) => {
                tracing::info!(workspace = %id, "nobody uses the workspace: it is stopped");
                metrics::counter!("emergent_idle_stops_total").increment(1);
                self.context.events.workspace(EventKind::WorkspaceIdle, id, "nobody uses it: it is stopped");
                self.lifecycle.finish_stop(id).await.map(drop)
            }
        }
    }

    /// Whether commands run in the background. A sandbox that can't be asked has none.
    async fn runs_commands(&self, id: WorkspaceId, connection: Option<&SandboxConnection>) -> bool {
        let channel = match connection {
            Some(connection) => connection.channel.clone(),
            None => match self.connections.open_channel_of(id).await {
                Some(channel) => channel,
                None => return false,
            },
        };
        usage::ask(&channel).await.is_some_and(|usage| usage.running_operations > 0)
    }
}

fn restore(live: &Live, connection: Option<SandboxConnection>) {
    if let Some(connection) = connection {
        live.set_connection(connection);
    }
}
