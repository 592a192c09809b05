//! Heals what a crash left: compares what the rows say with what is there, and finishes or undoes.
//!
//! The same pass runs at start, with nothing in progress, and then from time to time. It takes no input, so running it
//! once more never hurts. [`plan`] is a pure function; carrying it out goes through the same code as ordinary requests.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use emergent_providers::{Observed, ObservedState};
use emergent_wire::workspace::{ProviderName, WorkspaceStatus};
use emergent_wire::{ErrorDetail, WorkspaceId};
use futures_util::StreamExt;

use super::{Workspaces, error_of};

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
    /// A sandbox that has no row.
    Reap(ProviderName, WorkspaceId),
}

/// A row, as far as recovery is concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Row {
    pub(crate) id: WorkspaceId,
    pub(crate) status: WorkspaceStatus,
    /// Some request of this process is changing it right now.
    pub(crate) in_progress: bool,
}

/// What there is to do. `observed` must be older than `rows`: a sandbox's row is written before the sandbox.
pub(crate) fn plan(rows: &[Row], observed: &HashMap<ProviderName, Vec<Observed>>) -> Vec<Step> {
    let running: HashSet<WorkspaceId> = observed
        .values()
        .flatten()
        .filter(|found| found.state == ObservedState::Running)
        .map(|found| found.id)
        .collect();
    let known: HashSet<WorkspaceId> = rows.iter().map(|row| row.id).collect();
    let for_rows = rows.iter().filter(|row| !row.in_progress).filter_map(|row| match row.status {
        WorkspaceStatus::Creating => Some(Step::Abandon(row.id)),
        WorkspaceStatus::Stopping => Some(Step::Stop(row.id)),
        WorkspaceStatus::Stopped => running.contains(&row.id).then_some(Step::Stop(row.id)),
        WorkspaceStatus::Destroying => Some(Step::Destroy(row.id)),
        // A ready workspace is reached, and started again where needed, by its next call; so is one in error.
        WorkspaceStatus::Ready | WorkspaceStatus::Error => None,
    });
    let orphans = observed.iter().flat_map(|(provider, found)| {
        found.iter().filter(|found| !known.contains(&found.id)).map(|found| Step::Reap(*provider, found.id))
    });
    for_rows.chain(orphans).collect()
}

impl Workspaces {
    /// One pass. What fails is logged and tried again by the next.
    pub(crate) async fn recover(self: &Arc<Self>) {
        let mut observed = HashMap::new();
        for provider in self.providers() {
            match provider.list().await {
                Ok(found) => {
                    observed.insert(provider.name(), found);
                }
                Err(error) => {
                    tracing::warn!(provider = %provider.name(), %error, "sandboxes can't be listed")
                }
            }
        }
        let rows = match self.store.workspaces_in(WorkspaceStatus::ALL).await {
            Ok(records) => records,
            Err(error) => {
                tracing::warn!(error = %error_of(error), "workspaces can't be read for recovery");
                return;
            }
        };
        let rows: Vec<Row> = rows
            .iter()
            .map(|record| {
                let id = record.workspace.id;
                let in_progress = self.is_changing(id);
                Row { id, status: record.workspace.status, in_progress }
            })
            .collect();
        let steps = plan(&rows, &observed);
        futures_util::stream::iter(steps)
            .for_each_concurrent(AT_ONCE, |step| async move {
                if let Err(error) = self.carry_out(step).await {
                    tracing::warn!(?step, %error, "recovery failed; it will be tried again");
                }
            })
            .await;
    }

    async fn carry_out(self: &Arc<Self>, step: Step) -> Result<(), ErrorDetail> {
        tracing::info!(?step, "recovering");
        metrics::counter!("emergent_recovery_steps_total").increment(1);
        match step {
            Step::Abandon(id) => self.abandon_creation(id).await,
            Step::Stop(id) => {
                use WorkspaceStatus::{Stopped, Stopping};
                self.store.transition(id, &[Stopping, Stopped], Stopping).await.map_err(error_of)?;
                self.finish_stop(id).await.map(drop)
            }
            Step::Destroy(id) => self.finish_destroy(id).await,
            Step::Reap(provider, id) => self.provider(provider)?.destroy(id).await.map_err(ErrorDetail::from),
        }
    }

    /// Whether a request of this process is changing the workspace.
    fn is_changing(&self, id: WorkspaceId) -> bool {
        let live = self.live_map().get(&id).cloned();
        live.is_some_and(|live| live.changing.try_lock().is_err())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use proptest::sample::select;

    use super::*;

    fn row(status: WorkspaceStatus) -> Row {
        Row { id: WorkspaceId::generate(), status, in_progress: false }
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
            assert_eq!(plan(&[row(status)], &none).len(), usize::from(is_step), "{status}");
        }
    }

    #[test]
    fn a_sandbox_without_a_row_is_reaped_and_one_with_a_row_is_not() {
        let row = row(WorkspaceStatus::Ready);
        assert!(plan(&[row], &seen(row.id, ObservedState::Running)).is_empty());
        let stray = WorkspaceId::generate();
        let steps = plan(&[row], &seen(stray, ObservedState::Remains));
        assert_eq!(steps, [Step::Reap(ProviderName::Gvisor, stray)]);
    }

    #[test]
    fn a_stopped_workspace_that_runs_is_stopped() {
        let row = row(WorkspaceStatus::Stopped);
        assert_eq!(plan(&[row], &seen(row.id, ObservedState::Running)), [Step::Stop(row.id)]);
        assert!(plan(&[row], &seen(row.id, ObservedState::Stopped)).is_empty());
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
            let steps = plan(&rows, &observed);
            let distinct: HashSet<Step> = steps.iter().copied().collect();
            prop_assert_eq!(distinct.len(), steps.len());
            for row in rows.iter().filter(|row| row.in_progress) {
                let touches = |step: &Step| matches!(step, Step::Abandon(id) | Step::Stop(id) | Step::Destroy(id) if *id == row.id);
                prop_assert!(!steps.iter().any(touches));
            }
        }
    }
}
