//! Heals what a crash left: compares what the rows say with what is there, and finishes or undoes.
//!
//! The same pass runs at start, with nothing in progress, and then from time to time. It takes no input, so running it
//! once more never hurts. [`plan`] is a pure function; carrying it out goes through the same code as ordinary requests.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use emergent_providers::{Observed, ObservedState, ProviderTable, SharedProvider};
use emergent_store::{Unreadable, WorkspaceRecord};
use emergent_wire::snapshot::SnapshotStatus;
use emergent_wire::workspace::{ContainerType, ProviderName, WorkspaceStatus};
use emergent_wire::{SnapshotId, WorkspaceId};
use futures_util::StreamExt;
use futures_util::future::join_all;
use uuid::Uuid;

use super::connections::Connections;
use super::context::Context;
use super::error::Result;
use super::lifecycle::Lifecycle;
use super::quarantine::Quarantine;
use super::snapshots::Snapshots;

/// How often the pass runs.
pub(crate) const RUN_EVERY: Duration = Duration::from_secs(60);
/// Steps that run at once.
const AT_ONCE: usize = 8;

/// Something to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Step {
    /// A creation that nobody finishes: remove it, and its row.
    Abandon(WorkspaceId),
    /// A stop that was begun, or a sandbox that runs though its row says stopped.
    Stop(WorkspaceId),
    /// A removal that was begun.
    Destroy(WorkspaceId),
    /// A workspace that failed, or that this process has no channel to: look whether it can be used.
    Examine(WorkspaceId),
    /// A sandbox that could not be removed when its workspace was made elsewhere.
    Reap(ProviderName, WorkspaceId),
    /// A sandbox that has no row. No crash leaves one: the database was restored from a backup, or was changed by hand.
    Quarantine(ProviderName, WorkspaceId),
}

/// A row, as far as recovery is concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Row {
    pub(crate) id: WorkspaceId,
    pub(crate) status: WorkspaceStatus,
    /// Where its sandbox is.
    pub(crate) provider: Option<ProviderName>,
    /// Somebody is changing it right now: a request of this process, or another server that works.
    pub(crate) in_progress: bool,
    /// This process has a channel to it, or need not have one.
    pub(crate) is_connected: bool,
}

/// What there is to do. `observed` must be older than `rows` and `spares`: a sandbox's row is written before the
/// sandbox. And `spares` must be older than `rows`: what is a spare may become a workspace, but not the other way.
pub(crate) fn plan(
    rows: &[Row],
    spares: &HashSet<WorkspaceId>,
    observed: &HashMap<ProviderName, Vec<Observed>>,
    table: &ProviderTable,
) -> Vec<Step> {
    let in_state = |states: &[ObservedState]| -> HashSet<WorkspaceId> {
        let found = observed.values().flatten().filter(|found| states.contains(&found.state));
        found.map(|found| found.id).collect()
    };
    let running = in_state(&[ObservedState::Running]);
    let there = in_state(&[ObservedState::Running, ObservedState::Stopped]);
    let known: HashMap<WorkspaceId, &Row> = rows.iter().map(|row| (row.id, row)).collect();
    let for_rows = rows.iter().filter(|row| !row.in_progress).filter_map(|row| match row.status {
        WorkspaceStatus::Creating => Some(Step::Abandon(row.id)),
        WorkspaceStatus::Stopping => Some(Step::Stop(row.id)),
        WorkspaceStatus::Stopped => running.contains(&row.id).then_some(Step::Stop(row.id)),
        WorkspaceStatus::Destroying => Some(Step::Destroy(row.id)),
        // One that has ended is started again by its next call.
        WorkspaceStatus::Ready => {
            (running.contains(&row.id) && !row.is_connected).then_some(Step::Examine(row.id))
        }
        WorkspaceStatus::Error => there.contains(&row.id).then_some(Step::Examine(row.id)),
    });
    let mut orphans = HashSet::new();
    let mut found: Vec<(ProviderName, WorkspaceId)> = observed
        .iter()
        .flat_map(|(provider, found)| found.iter().map(|found| (*provider, found.id)))
        .collect();
    found.sort_unstable();
    let for_sandboxes = found.into_iter().filter_map(|(provider, id)| match known.get(&id) {
        Some(row) => is_elsewhere(row, provider, table).then_some(Step::Reap(provider, id)),
        // Two providers may list the same sandbox.
        None => (!spares.contains(&id) && orphans.insert(id)).then_some(Step::Quarantine(provider, id)),
    });
    for_rows.chain(for_sandboxes).collect()
}

/// Whether a workspace that has been made is not among the sandboxes of a provider.
fn is_elsewhere(row: &Row, provider: ProviderName, table: &ProviderTable) -> bool {
    let made = row.status != WorkspaceStatus::Creating;
    made && row.provider.is_some_and(|own| !table.share_sandboxes(own, provider))
}

/// Runs recovery passes.
pub(crate) struct Recovery {
    context: Arc<Context>,
    connections: Arc<Connections>,
    lifecycle: Arc<Lifecycle>,
    snapshots: Arc<Snapshots>,
    quarantine: Arc<Quarantine>,
}

impl Recovery {
    pub(super) fn new(
        context: &Arc<Context>,
        connections: &Arc<Connections>,
        lifecycle: &Arc<Lifecycle>,
        snapshots: &Arc<Snapshots>,
        quarantine: &Arc<Quarantine>,
    ) -> Arc<Self> {
        Arc::new(Self {
            context: Arc::clone(context),
            connections: Arc::clone(connections),
            lifecycle: Arc::clone(lifecycle),
            snapshots: Arc::clone(snapshots),
            quarantine: Arc::clone(quarantine),
        })
    }

    /// One pass. What fails is logged and tried again by the next.
    pub(crate) async fn run(&self) {
        let mut observed = HashMap::new();
        let mut copies = HashMap::new();
        // All at once: one that hangs keeps nobody waiting for longer than itself.
        let look = async |provider: &SharedProvider| {
            (provider.name(), tokio::join!(provider.list(), provider.snapshots()))
        };
        for (name, (sandboxes, snapshots)) in join_all(self.context.providers.iter().map(look)).await {
            match sandboxes {
                Ok(found) => {
                    observed.insert(name, found);
                }
                Err(error) => tracing::warn!(provider = %name, %error, "sandboxes can't be listed"),
            }
            if let Ok(found) = snapshots {
                copies.insert(name, found);
            }
        }
        if let Err(error) = self.recover_snapshots(copies).await {
            tracing::warn!(%error, "recovery of snapshots failed; it will be tried again");
        }
        let (spares, rows) = match self.rows_for_recovery().await {
            Ok(rows) => rows,
            Err(error) => {
                tracing::warn!(%error, "workspaces can't be read for recovery");
                return;
            }
        };
        let mut steps = plan(&rows, &spares, &observed, self.context.providers.table());
        // An orphan is left alone for a while: whoever put the wrong database back can put the right one back.
        steps.retain(|step| match step {
            Step::Quarantine(provider, id) => self.quarantine.is_due(*provider, id.0),
            _ => true,
        });
        futures_util::stream::iter(steps)
            .for_each_concurrent(AT_ONCE, |step| async move {
                if let Err(error) = self.carry_out(step).await {
                    tracing::warn!(?step, %error, "recovery failed; it will be tried again");
                }
            })
            .await;
        for provider in &self.context.providers {
            if let Err(error) = provider.remove_unused_resources().await {
                tracing::warn!(provider = %provider.name(), %error, "what no sandbox uses any more could not be removed");
            }
        }
    }

    async fn rows_for_recovery(&self) -> Result<(HashSet<WorkspaceId>, Vec<Row>)> {
        let spares = self.context.store.spares().await?;
        let records = self.context.store.workspaces_in(WorkspaceStatus::ALL).await?;
        let damaged = [damaged_ids(&spares.unreadable), damaged_ids(&records.unreadable)].concat();
        let owners = records.readable.iter().map(|record| record.owner);
        self.context.servers.look_for(owners, &self.context.store).await?;
        let rows = records.readable.iter().map(|record| {
            let id = record.workspace.id;
            let in_progress = is_supervised(record)
                || self.is_changing(id)
                || !self.context.is_mine_to_change(record.owner);
            // With others on the database, each opens channels only to what it is asked for.
            let is_connected = self.context.store.is_shared() || self.is_connected(id);
            let (status, provider) = (record.workspace.status, record.workspace.provider);
            Row { id, status, provider, in_progress, is_connected }
        });
        // Nothing is done to the sandbox of a damaged row, as nothing is done to a spare.
        let spares = spares.readable.iter().map(|spare| spare.id);
        Ok((spares.chain(damaged.into_iter().map(WorkspaceId)).collect(), rows.collect()))
    }

    /// Finishes or undoes what was begun with snapshots, and sets copies aside that have no row.
    async fn recover_snapshots(&self, copies: HashMap<ProviderName, Vec<SnapshotId>>) -> Result<()> {
        let snapshots = self.context.store.all_snapshots().await?;
        let records = snapshots.readable;
        let owners = records.iter().map(|record| record.owner);
        self.context.servers.look_for(owners, &self.context.store).await?;
        for record in &records {
            let is_begun =
                matches!(record.snapshot.status, SnapshotStatus::Creating | SnapshotStatus::Destroying);
            let in_progress = !self.context.is_mine_to_change(record.owner)
                || self.is_changing(record.snapshot.workspace_id);
            if is_begun && !in_progress {
                tracing::info!(snapshot = %record.snapshot.id, "a copy that was interrupted is removed");
                self.snapshots.discard(record).await?;
            }
            // A server was killed while it set this aside.
            let snapshot = &record.snapshot;
            if snapshot.status == SnapshotStatus::Quarantined
                && snapshot.size_bytes.is_none()
                && let Err(error) =
                    self.quarantine.add_sandbox(snapshot.provider, WorkspaceId(snapshot.id.0)).await
            {
                tracing::warn!(snapshot = %snapshot.id, %error, "files can't be set aside; it will be tried again");
            }
        }
        let mut known: HashSet<SnapshotId> = records.iter().map(|record| record.snapshot.id).collect();
        known.extend(damaged_ids(&snapshots.unreadable).into_iter().map(SnapshotId));
        // Two providers may list the same copy: the first one has it.
        let mut orphans: BTreeMap<SnapshotId, ProviderName> = BTreeMap::new();
        let mut copies: Vec<_> = copies.into_iter().collect();
        copies.sort_unstable_by_key(|(provider, _)| *provider);
        for (provider, found) in copies {
            for id in found.into_iter().filter(|id| !known.contains(id)) {
                orphans.entry(id).or_insert(provider);
            }
        }
        for (id, provider) in orphans {
            if let Err(error) = self.quarantine.add_copy(provider, id).await {
                tracing::warn!(snapshot = %id, %error, "a copy can't be set aside; it will be tried again");
            }
        }
        Ok(())
    }

    async fn carry_out(&self, step: Step) -> Result<()> {
        tracing::info!(?step, "recovering");
        metrics::counter!("emergent_recovery_steps_total").increment(1);
        match step {
            Step::Abandon(id) => {
                use WorkspaceStatus::{Creating, Destroying};
                // Written down first: a server that was only slow, and not dead, is then told so.
                self.context.store.transition(id, &[Creating], Destroying).await?;
                self.lifecycle.finish_destroy(id).await
            }
            Step::Stop(id) => {
                use WorkspaceStatus::{Stopped, Stopping};
                self.context.store.transition(id, &[Stopping, Stopped], Stopping).await?;
                self.lifecycle.finish_stop(id).await.map(drop)
            }
            Step::Destroy(id) => {
                let all = WorkspaceStatus::ALL;
                self.context.store.transition(id, all, WorkspaceStatus::Destroying).await?;
                self.lifecycle.finish_destroy(id).await
            }
            Step::Examine(id) => self.connections.examine(id).await,
            Step::Reap(provider, id) => Ok(self.context.provider(provider)?.destroy(id).await?),
            Step::Quarantine(provider, id) => self.quarantine.add_sandbox(provider, id).await,
        }
    }

    /// Whether a request of this process is changing the workspace.
    fn is_changing(&self, id: WorkspaceId) -> bool {
        let live = self.context.known_live(id);
        live.is_some_and(|live| live.changing.try_lock().is_err())
    }

    /// Whether this process has a channel to the workspace.
    fn is_connected(&self, id: WorkspaceId) -> bool {
        let live = self.context.known_live(id);
        live.is_some_and(|live| live.connection().is_some())
    }
}

/// Logs damaged rows and gives their ids.
fn damaged_ids(rows: &[Unreadable]) -> Vec<Uuid> {
    for row in rows {
        tracing::error!(id = %row.id, error = %row.error, "a damaged row: its sandbox is left alone until the row is repaired");
    }
    rows.iter().map(|row| row.id).collect()
}

/// An MCP server that is there: whoever supervises it looks after its sandbox too.
fn is_supervised(record: &WorkspaceRecord) -> bool {
    use WorkspaceStatus::{Error, Ready};
    let workspace = &record.workspace;
    workspace.container_type == ContainerType::McpServer && matches!(workspace.status, Ready | Error)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use proptest::sample::select;

    use super::*;

    /// The plan with the providers of this version.
    fn plan(
        rows: &[Row],
        spares: &HashSet<WorkspaceId>,
        observed: &HashMap<ProviderName, Vec<Observed>>,
    ) -> Vec<Step> {
        super::plan(rows, spares, observed, &ProviderTable::standard())
    }

    fn row(status: WorkspaceStatus) -> Row {
        let provider = Some(ProviderName::Gvisor);
        Row { id: WorkspaceId::generate(), status, provider, in_progress: false, is_connected: true }
    }

    fn seen(id: WorkspaceId, state: ObservedState) -> HashMap<ProviderName, Vec<Observed>> {
        HashMap::from([(ProviderName::Gvisor, vec![Observed { id, state }])])
    }

    #[test]
    fn what_was_begun_is_finished_or_undone() {
        let none = HashMap::new();
        for (status, is_step) in [
            (WorkspaceStatus::Creating, true),
            (WorkspaceStatus::Stopping, true),
            (WorkspaceStatus::Destroying, true),
            (WorkspaceStatus::Ready, false),
            (WorkspaceStatus::Stopped, false),
            (WorkspaceStatus::Error, false),
        ] {
            assert_eq!(plan(&[row(status)], &HashSet::new(), &none).len(), usize::from(is_step), "{status}");
        }
    }

    #[test]
    fn a_sandbox_without_a_row_is_quarantined_once_and_one_with_a_row_is_not() {
        let row = row(WorkspaceStatus::Ready);
        assert!(plan(&[row], &HashSet::new(), &seen(row.id, ObservedState::Running)).is_empty());
        let stray = WorkspaceId::generate();
        let mut observed = seen(stray, ObservedState::Remains);
        observed.insert(ProviderName::Docker, observed[&ProviderName::Gvisor].clone());
        let steps = plan(&[row], &HashSet::new(), &observed);
        assert!(matches!(steps.as_slice(), [Step::Quarantine(_, id)] if *id == stray), "{steps:?}");
        let spares = HashSet::from([stray]);
        assert!(plan(&[row], &spares, &seen(stray, ObservedState::Running)).is_empty());
    }

    /// A provider went away while a workspace was made on it; the next one took it.
    #[test]
    fn what_an_attempt_left_on_another_provider_is_reaped() {
        for (own, status, is_left) in [
            (ProviderName::Firecracker, WorkspaceStatus::Ready, true),
            (ProviderName::Firecracker, WorkspaceStatus::Stopped, true),
            // It may be on its way there.
            (ProviderName::Firecracker, WorkspaceStatus::Creating, false),
            // Both see the same containers.
            (ProviderName::Docker, WorkspaceStatus::Ready, false),
        ] {
            let row = Row { provider: Some(own), in_progress: true, ..row(status) };
            let steps = plan(&[row], &HashSet::new(), &seen(row.id, ObservedState::Running));
            let expected = is_left.then_some(Step::Reap(ProviderName::Gvisor, row.id));
            assert_eq!(steps, expected.into_iter().collect::<Vec<_>>(), "{own} {status}");
        }
    }

    #[test]
    fn an_error_is_looked_at_again_and_a_ready_workspace_is_adopted() {
        let failed = row(WorkspaceStatus::Error);
        for state in [ObservedState::Running, ObservedState::Stopped] {
            assert_eq!(plan(&[failed], &HashSet::new(), &seen(failed.id, state)), [Step::Examine(failed.id)]);
        }
        assert!(plan(&[failed], &HashSet::new(), &seen(failed.id, ObservedState::Remains)).is_empty());
        let ready = Row { is_connected: false, ..row(WorkspaceStatus::Ready) };
        let seen = seen(ready.id, ObservedState::Running);
        assert_eq!(plan(&[ready], &HashSet::new(), &seen), [Step::Examine(ready.id)]);
    }

    #[test]
    fn a_stopped_workspace_that_runs_is_stopped() {
        let row = row(WorkspaceStatus::Stopped);
        assert_eq!(
            plan(&[row], &HashSet::new(), &seen(row.id, ObservedState::Running)),
            [Step::Stop(row.id)]
        );
        assert!(plan(&[row], &HashSet::new(), &seen(row.id, ObservedState::Stopped)).is_empty());
    }

    proptest! {
        /// What a request is working on is left alone, and nothing is done twice.
        #[test]
        fn work_in_progress_is_left_alone(
            statuses in prop::collection::vec((select(WorkspaceStatus::ALL), any::<bool>()), 0..12),
        ) {
            let rows: Vec<Row> = statuses
                .into_iter()
                .map(|(status, in_progress)| Row { in_progress, ..row(status) })
                .collect();
            let observed = HashMap::from([(
                ProviderName::Gvisor,
                rows.iter().map(|row| Observed { id: row.id, state: ObservedState::Running }).collect(),
            )]);
            let steps = plan(&rows, &HashSet::new(), &observed);
            let distinct: HashSet<Step> = steps.iter().copied().collect();
            prop_assert_eq!(distinct.len(), steps.len());
            for row in rows.iter().filter(|row| row.in_progress) {
                let touches = |step: &Step| matches!(step, Step::Abandon(id) | Step::Stop(id) | Step::Destroy(id) | Step::Examine(id) if *id == row.id);
                prop_assert!(!steps.iter().any(touches));
            }
        }
    }
}
