//! The health of the providers, checked in the background.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use chrono::{DateTime, TimeDelta, Utc};
use emergent_providers::{Health, ProviderFacts, SharedProvider};
use emergent_wire::event::EventKind;
use emergent_wire::pool::PoolShape;
use emergent_wire::workspace::{Capabilities, DiskQuota, ProviderInfo, ProviderName, ProviderStatus};
use parking_lot::Mutex;

use tokio::sync::Notify;

use super::context::Context;
use super::placement::{Availability, ProviderState};
use crate::events::Events;

/// The interval of checks.
pub(crate) const CHECK_EVERY: Duration = Duration::from_secs(30);
/// The time limit of a check.
const CHECK_TIMEOUT: Duration = Duration::from_secs(25);

/// A request that finds no provider repeats checks that are older than this.
const RECHECK_AFTER: TimeDelta = TimeDelta::milliseconds(50);

/// The health of the providers.
pub(crate) struct ProviderHealth {
    context: Arc<Context>,
    board: HealthBoard,
}

/// The last check of each provider.
#[derive(Default)]
struct HealthBoard {
    checks: Mutex<HashMap<ProviderName, (Health, DateTime<Utc>)>>,
    /// Notified when an unhealthy provider is healthy again.
    recovered: Notify,
}

impl HealthBoard {
    fn last(&self, name: ProviderName) -> Option<(Health, DateTime<Utc>)> {
        self.checks.lock().get(&name).cloned()
    }

    fn wanted_spares(&self) -> Vec<PoolShape> {
        let checks = self.checks.lock();
        let wanting = checks.iter().filter(|(_, (health, _))| health.spares > 0);
        let shape = |(name, (health, _)): (&ProviderName, &(Health, _))| PoolShape {
            size: health.spares,
            provider: Some((*name).into()),
            image: None,
            resource_limits: None,
            network: None,
        };
        wanting.map(shape).collect()
    }

    /// Records a check. Reports a change.
    fn record(&self, name: ProviderName, health: Health, events: &Events) {
        let problem = health.problem.clone();
        let before = {
            let mut checks = self.checks.lock();
            checks.insert(name, (health, Utc::now()))
        };
        let was_healthy = before.map(|(health, _)| health.problem.is_none());
        if was_healthy == Some(false) && problem.is_none() {
            self.recovered.notify_one();
        }
        if was_healthy != Some(problem.is_none()) {
            match &problem {
                None => {
                    tracing::info!(provider = %name, "the provider is healthy");
                    events.provider(EventKind::ProviderHealthy, name, "the provider is healthy");
                }
                Some(problem) => {
                    tracing::warn!(provider = %name, problem, "the provider is unhealthy");
                    events.provider(EventKind::ProviderUnhealthy, name, problem.as_str());
                }
            }
            let state = if problem.is_none() { "healthy" } else { "unhealthy" };
            metrics::counter!("emergent_provider_state_changes_total", "provider" => name.as_str(), "state" => state)
                .increment(1);
        }
        metrics::gauge!("emergent_provider_healthy", "provider" => name.as_str()).set(if problem.is_none() {
            1.0
        } else {
            0.0
        });
    }
}

/// Checks a provider. With `starts_sandbox` the check starts a sandbox, if none has shown that sandboxes start.
async fn check(provider: &SharedProvider, starts_sandbox: bool) -> Health {
    let checked = async {
        let mut health = provider.health().await;
        if starts_sandbox && health.problem.is_none() {
            health.problem = provider.verify_start().await;
        }
        health
    };
    tokio::time::timeout(CHECK_TIMEOUT, checked).await.unwrap_or_else(|_| {
        Health::unhealthy(format!("its check did not end within {} s", CHECK_TIMEOUT.as_secs()))
    })
}

impl ProviderHealth {
    pub(super) fn new(context: &Arc<Context>) -> Arc<Self> {
        Arc::new(Self { context: Arc::clone(context), board: HealthBoard::default() })
    }

    /// Waits until an unhealthy provider is healthy again.
    pub(crate) async fn provider_recovered(&self) {
        self.board.recovered.notified().await;
    }

    /// The spares that the providers' hosts are configured to hold.
    pub(super) fn wanted_spares(&self) -> Vec<PoolShape> {
        self.board.wanted_spares()
    }

    /// Checks all providers at once without starting a sandbox: the check before the server listens.
    pub(crate) async fn check_all_briefly(&self) {
        let checks = self.context.providers.iter().map(|provider| async {
            self.board.record(provider.name(), check(provider, false).await, &self.context.events);
        });
        futures_util::future::join_all(checks).await;
    }

    /// Checks all providers at once. Healthy means that a sandbox starts.
    pub(crate) async fn check_all(&self) {
        let checks = self.context.providers.iter().map(|provider| async {
            self.board.record(provider.name(), check(provider, true).await, &self.context.events);
        });
        futures_util::future::join_all(checks).await;
    }

    /// Checks a provider that has just failed.
    pub(super) async fn recheck(&self, provider: &SharedProvider) {
        self.board.record(provider.name(), check(provider, true).await, &self.context.events);
    }

    /// Repeats the checks of unhealthy providers, except those of a moment ago.
    pub(super) async fn recheck_unhealthy(&self) {
        let is_due = |provider: &&SharedProvider| match self.board.last(provider.name()) {
            Some((health, at)) => health.problem.is_some() && Utc::now() - at > RECHECK_AFTER,
            None => true,
        };
        futures_util::future::join_all(
            self.context.providers.iter().filter(is_due).map(|one| self.recheck(one)),
        )
        .await;
    }

    /// All providers of the table with their last state, for placement.
    pub(super) fn known(&self) -> Vec<ProviderState> {
        let providers = &self.context.providers;
        let state = |facts: &ProviderFacts| {
            let availability = match (providers.get(facts.name), self.board.last(facts.name)) {
                (None, _) => Availability::Absent,
                (Some(_), None) => Availability::Unhealthy("not checked yet; retry in a moment".to_owned()),
                (Some(_), Some((health, _))) => {
                    health.problem.map_or(Availability::Healthy, Availability::Unhealthy)
                }
            };
            ProviderState { facts: *facts, availability }
        };
        providers.table().facts().map(state).collect()
    }

    /// All providers of the table as clients see them. `active` has the number of workspaces on each.
    pub(crate) fn infos(&self, active: &std::collections::BTreeMap<ProviderName, u64>) -> Vec<ProviderInfo> {
        let providers = &self.context.providers;
        let info = |facts: &ProviderFacts| {
            let active_workspaces = active.get(&facts.name).copied().unwrap_or(0);
            match providers.get(facts.name) {
                Some(provider) => self.enabled_info(provider, active_workspaces),
                None => absent_info(facts, active_workspaces),
            }
        };
        providers.table().facts().map(info).collect()
    }

    fn enabled_info(&self, provider: &SharedProvider, active_workspaces: u64) -> ProviderInfo {
        let last = self.board.last(provider.name());
        let (status, message) = match &last {
            None => (ProviderStatus::Unhealthy, Some("not checked yet".to_owned())),
            Some((health, _)) => match &health.problem {
                Some(problem) => (ProviderStatus::Unhealthy, Some(problem.clone())),
                None => (ProviderStatus::Healthy, health.note.clone()),
            },
        };
        ProviderInfo {
            name: provider.name(),
            status,
            message,
            last_check: last.as_ref().map(|(_, at)| *at),
            active_workspaces,
            available_resources: last.and_then(|(health, _)| health.available),
            capabilities: provider.capabilities(),
        }
    }
}

/// A provider that is not configured, as clients see it.
fn absent_info(facts: &ProviderFacts, active_workspaces: u64) -> ProviderInfo {
    ProviderInfo {
        name: facts.name,
        status: ProviderStatus::Disabled,
        message: Some(facts.absence.reason().to_owned()),
        last_check: None,
        active_workspaces,
        available_resources: None,
        capabilities: Capabilities {
            isolation: facts.isolation,
            persistence: true,
            memory_snapshots: false,
            snapshots: false,
            warm_pool: false,
            requires: facts.requires(),
            disk_quota: DiskQuota::Enforced,
            startup_latency_ms: None,
        },
    }
}
