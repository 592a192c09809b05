//! Recovery after crashes: compares the rows with the sandboxes of the providers, and finishes or undoes interrupted changes.
//!
//! The same pass runs at the start and then periodically. It is idempotent. [`plan`] is a pure function. Its steps are carried out by
//! the same code as ordinary requests.

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

/// The interval of passes.
pub(crate) const RUN_EVERY: Duration = Duration::from_secs(60);
/// The limit on steps that run at the same time.
const MAX_STEPS: usize = 8;

/// One step of recovery.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Step {
    /// Remove the row and the sandbox of an interrupted creation.
    Abandon(WorkspaceId),
    /// Finish an interrupted stop, or stop a sandbox that runs although its row says `stopped`.
    Stop(WorkspaceId),
    /// Finish an interrupted removal.
    Destroy(WorkspaceId),
    /// Connect to a workspace whose row says `error`, or to which this process has no channel.
    Check(WorkspaceId),
    /// Remove a sandbox whose workspace was made on another provider.
    RemoveLeftover(ProviderName, WorkspaceId),
    /// Quarantine a sandbox without a row. No crash leaves one: the database was restored from a backup or changed by hand.
    Quarantine(ProviderName, WorkspaceId),
}

/// The columns of a workspace's row that recovery decides by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Row {
    id: WorkspaceId,
    status: WorkspaceStatus,
    /// The provider of its sandbox.
    provider: Option<ProviderName>,
    /// A request of this process, or another running server, is changing it.
    in_progress: bool,
    /// This process has a channel to it, or needs none.
    is_connected: bool,
}

/// The steps of one pass. `observed` must be read before `spares` and `rows`, because the row of a sandbox is written before the
/// sandbox is made. `spares` must be read before `rows`, because a spare can become a workspace, but a workspace never becomes a spare.
fn plan(
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
        // A sandbox that has ended is restarted by its next call.
        WorkspaceStatus::Ready => {
            (running.contains(&row.id) && !row.is_connected).then_some(Step::Check(row.id))
        }
        WorkspaceStatus::Error => there.contains(&row.id).then_some(Step::Check(row.id)),
    });
    let mut orphans = HashSet::new();
    let mut found: Vec<(ProviderName, WorkspaceId)> = observed
        .iter()
        .flat_map(|(provider, found)| found.iter().map(|found| (*provider, found.id)))
        .collect();
    found.sort_unstable();
    let for_sandboxes = found.into_iter().filter_map(|(provider, id)| match known.get(&id) {
        Some(row) => is_elsewhere(row, provider, table).then_some(Step::RemoveLeftover(provider, id)),
        // Two providers can list the same sandbox.
        None => (!spares.contains(&id) && orphans.insert(id)).then_some(Step::Quarantine(provider, id)),
    });
    for_rows.chain(for_sandboxes).collect()
}

/// Whether the creation of a workspace has ended, and its sandbox is not among those of this provider.
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

    /// Runs one pass. Failures are logged, and the next pass tries again.
    pub(crate) async fn run(&self) {
        let mut observed = HashMap::new();
        let mut copies = HashMap::new();
        // All providers at once, so that one that hangs does not add to the time of the others.
        let observe = async |provider: &SharedProvider| {
            (provider.name(), tokio::join!(provider.list(), provider.snapshots()))
        };
        for (name, (sandboxes, snapshots)) in join_all(self.context.providers.iter().map(observe)).await {
            // A provider that does not answer fails twice, and is logged once.
            match (&sandboxes, &snapshots) {
                (Err(error), _) => tracing::warn!(provider = %name, %error, "sandboxes can't be listed"),
                (_, Err(error)) => tracing::warn!(provider = %name, %error, "snapshots can't be listed"),
                (Ok(_), Ok(_)) => {}
            }
            observed.extend(sandboxes.ok().map(|found| (name, found)));
            copies.extend(snapshots.ok().map(|found| (name, found)));
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
        // The grace period of an orphan is the time to replace a database that was restored by mistake.
        steps.retain(|step| match step {
            Step::Quarantine(provider, id) => self.quarantine.is_due(*provider, id.0),
            _ => true,
        });
        futures_util::stream::iter(steps)
            .for_each_concurrent(MAX_STEPS, |step| async move {
                if let Err(error) = self.carry_out(step).await {
                    tracing::warn!(?step, %error, "recovery failed; it will be tried again");
                }
            })
            .await;
        for provider in &self.context.providers {
            if let Err(error) = provider.remove_unused_resources().await {
                tracing::warn!(provider = %provider.name(), %error, "unused resources could not be removed; it will be tried again");
            }
        }
    }

    async fn rows_for_recovery(&self) -> Result<(HashSet<WorkspaceId>, Vec<Row>)> {
        let spares = self.context.store.spares().await?;
        let records = self.context.store.workspaces_in(WorkspaceStatus::ALL).await?;
        let damaged = [damaged_ids(&spares.unreadable), damaged_ids(&records.unreadable)].concat();
        let owners = records.readable.iter().map(|record| record.owner);
        self.context.servers.refresh_for(owners, &self.context.store).await?;
        let rows = records.readable.iter().map(|record| {
            let id = record.workspace.id;
            let in_progress =
                is_supervised(record) || self.is_changing(id) || !self.context.may_change(record.owner);
            // A server that shares the database opens channels only to workspaces that it is called for.
            let is_connected = self.context.store.is_shared() || self.is_connected(id);
            let (status, provider) = (record.workspace.status, record.workspace.provider);
            Row { id, status, provider, in_progress, is_connected }
        });
        // Recovery leaves the sandboxes of damaged rows alone, like those of spares.
        let spares = spares.readable.iter().map(|spare| spare.id);
        Ok((spares.chain(damaged.into_iter().map(WorkspaceId)).collect(), rows.collect()))
    }

    /// Removes snapshots whose creation or removal was interrupted, and quarantines copies without a row.
    async fn recover_snapshots(&self, copies: HashMap<ProviderName, Vec<SnapshotId>>) -> Result<()> {
        let snapshots = self.context.store.all_snapshots().await?;
        let records = snapshots.readable;
        let owners = records.iter().map(|record| record.owner);
        self.context.servers.refresh_for(owners, &self.context.store).await?;
        for record in &records {
            let is_unfinished =
                matches!(record.snapshot.status, SnapshotStatus::Creating | SnapshotStatus::Destroying);
            let in_progress =
                !self.context.may_change(record.owner) || self.is_changing(record.snapshot.workspace_id);
            if is_unfinished && !in_progress {
                tracing::info!(snapshot = %record.snapshot.id, "an interrupted snapshot is removed");
                self.snapshots.discard(record).await?;
            }
            // A quarantine without a size was interrupted.
            let snapshot = &record.snapshot;
            if snapshot.status == SnapshotStatus::Quarantined
                && snapshot.size_bytes.is_none()
                && let Err(error) =
                    self.quarantine.add_sandbox(snapshot.provider, WorkspaceId(snapshot.id.0)).await
            {
                tracing::warn!(snapshot = %snapshot.id, %error, "files can't be quarantined; it will be tried again");
            }
        }
        let mut known: HashSet<SnapshotId> = records.iter().map(|record| record.snapshot.id).collect();
        known.extend(damaged_ids(&snapshots.unreadable).into_iter().map(SnapshotId));
        // Two providers can list the same copy. It is attributed to the first one.
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
                tracing::warn!(snapshot = %id, %error, "a copy can't be quarantined; it will be tried again");
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
                // The row is changed first, so that a server that is slow, and not dead, fails to finish the creation.
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
            Step::Check(id) => self.connections.check(id).await,
            Step::RemoveLeftover(provider, id) => Ok(self.context.provider(provider)?.destroy(id).await?),
            Step::Quarantine(provider, id) => self.quarantine.add_sandbox(provider, id).await,
        }
    }

    /// Whether a request of this process is changing the workspace.
    fn is_changing(&self, id: WorkspaceId) -> bool {
        let live = self.context.known_live(id);
        live.is_some_and(|live| live.change_lock.try_lock().is_err())
    }

    /// Whether this process has a channel to the workspace.
    fn is_connected(&self, id: WorkspaceId) -> bool {
        let live = self.context.known_live(id);
        live.is_some_and(|live| live.connection().is_some())
    }
}

/// Logs damaged rows and returns their ids.
fn damaged_ids(rows: &[Unreadable]) -> Vec<Uuid> {
    for row in rows {
        tracing::error!(id = %row.id, error = %row.error, "a damaged row: its sandbox is left alone until the row is repaired");
    }
    rows.iter().map(|row| row.id).collect()
}

/// Whether a supervisor manages the sandbox: that of an MCP server whose creation has ended.
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

    /// The plan for the standard providers.
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
    fn interrupted_changes_are_finished_or_undone() {
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
        let mut observed = seen(stray, ObservedState::Leftover);
        observed.insert(ProviderName::Docker, observed[&ProviderName::Gvisor].clone());
        let steps = plan(&[row], &HashSet::new(), &observed);
        assert!(matches!(steps.as_slice(), [Step::Quarantine(_, id)] if *id == stray), "{steps:?}");
        let spares = HashSet::from([stray]);
        assert!(plan(&[row], &spares, &seen(stray, ObservedState::Running)).is_empty());
    }

    /// A provider failed during an attempt, could not remove the sandbox, and the next provider made the workspace.
    #[test]
    fn a_sandbox_that_an_attempt_left_on_another_provider_is_removed() {
        for (own, status, is_left) in [
            (ProviderName::Firecracker, WorkspaceStatus::Ready, true),
            (ProviderName::Firecracker, WorkspaceStatus::Stopped, true),
            // The creation may still choose that provider.
            (ProviderName::Firecracker, WorkspaceStatus::Creating, false),
            // Both see the same containers.
            (ProviderName::Docker, WorkspaceStatus::Ready, false),
        ] {
            let row = Row { provider: Some(own), in_progress: true, ..row(status) };
            let steps = plan(&[row], &HashSet::new(), &seen(row.id, ObservedState::Running));
            let expected = is_left.then_some(Step::RemoveLeftover(ProviderName::Gvisor, row.id));
            assert_eq!(steps, expected.into_iter().collect::<Vec<_>>(), "{own} {status}");
        }
    }

    #[test]
    fn failed_workspaces_and_ready_ones_without_a_channel_are_checked() {
        let failed = row(WorkspaceStatus::Error);
        for state in [ObservedState::Running, ObservedState::Stopped] {
            assert_eq!(plan(&[failed], &HashSet::new(), &seen(failed.id, state)), [Step::Check(failed.id)]);
        }
        assert!(plan(&[failed], &HashSet::new(), &seen(failed.id, ObservedState::Leftover)).is_empty());
        let ready = Row { is_connected: false, ..row(WorkspaceStatus::Ready) };
        let seen = seen(ready.id, ObservedState::Running);
        assert_eq!(plan(&[ready], &HashSet::new(), &seen), [Step::Check(ready.id)]);
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
        /// Recovery does not touch workspaces that a request is changing, and plans no step twice.
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
                let touches = |step: &Step| matches!(step, Step::Abandon(id) | Step::Stop(id) | Step::Destroy(id) | Step::Check(id) if *id == row.id);
                prop_assert!(!steps.iter().any(touches));
            }
        }
    }
}
