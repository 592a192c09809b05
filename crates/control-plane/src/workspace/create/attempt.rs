//! Attempts to make a workspace's sandbox, one for each candidate. An attempt that fails removes its sandbox.

use chrono::Utc;
use emergent_failpoint::failpoint;
use emergent_guest_client::CallError;
use emergent_providers::{ProviderError, Sandbox, SharedProvider};
use emergent_store::{StoreError, WorkspaceRecord};
use emergent_wire::event::{Event, EventKind};
use emergent_wire::workspace::{Placement, ProviderName, RejectedCandidate, Workspace};
use emergent_wire::{ErrorCode, WorkspaceId};
use serde_json::{Map, json};

use super::Creator;
use super::checkout::checkout;
use crate::workspace::error::{CheckoutError, Result, WorkspaceError};
use crate::workspace::live::SandboxConnection;
use crate::workspace::placement::Candidate;
use crate::workspace::warnings_of;

/// The attempts of one creation.
pub(super) struct Attempts<'a> {
    creator: &'a Creator,
    id: WorkspaceId,
    /// The candidates that were rejected or failed, for the placement of the next attempt.
    rejected: Vec<RejectedCandidate>,
    failures: Vec<(RejectedCandidate, WorkspaceError)>,
    /// The provider on which an attempt may have left a sandbox that can't be removed now. The sandbox has the workspace's id, so
    /// no other is made there. Recovery removes it when the workspace is on another provider or gone.
    leftover: Option<(ProviderName, ProviderError)>,
}

/// The outcome of an attempt.
pub(super) enum Outcome {
    Ready {
        workspace: Box<Workspace>,
        is_warm: bool,
    },
    /// The spare was removed. The same candidate can make a sandbox.
    SpareUnusable,
    TryNext,
    /// No other candidate would succeed.
    GiveUp,
}

impl<'a> Attempts<'a> {
    pub(super) fn new(creator: &'a Creator, id: WorkspaceId, rejected: Vec<RejectedCandidate>) -> Self {
        Self { creator, id, rejected, failures: Vec::new(), leftover: None }
    }

    /// Whether a failed attempt may have left a sandbox that this provider shares.
    pub(super) fn has_leftover_on(&self, provider: ProviderName) -> bool {
        self.leftover.as_ref().is_some_and(|(other, _)| {
            self.creator.context.providers.table().share_sandboxes(provider, *other)
        })
    }

    /// Binds a claimed spare to the workspace.
    pub(super) async fn bind_spare(
        &mut self,
        candidate: &Candidate,
        connection: SandboxConnection,
    ) -> Result<Outcome> {
        let provider = self.creator.context.provider(candidate.provider)?;
        let error = match self.try_bind(provider, connection).await {
            Ok(workspace) => return Ok(Outcome::Ready { workspace: Box::new(workspace), is_warm: true }),
            Err(error) => error,
        };
        tracing::warn!(workspace = %self.id, %error, "a spare can't be used; another sandbox is made for the workspace");
        metrics::counter!("emergent_pool_misses_total", "reason" => "dead").increment(1);
        if let Err(problem) = provider.destroy(self.id).await {
            self.leftover = Some((candidate.provider, problem));
            self.failures.push((candidate.rejected(&error), error));
            return Ok(Outcome::TryNext);
        }
        if is_final(&error) {
            self.failures.push((candidate.rejected(&error), error));
            return Ok(Outcome::GiveUp);
        }
        Ok(Outcome::SpareUnusable)
    }

    /// Makes a sandbox on a candidate.
    pub(super) async fn create(&mut self, candidate: &Candidate) -> Result<Outcome> {
        let context = &self.creator.context;
        let provider = context.provider(candidate.provider)?;
        let error = match self.try_create(provider, &candidate.placement(&self.rejected)).await {
            Ok(workspace) => return Ok(Outcome::Ready { workspace: Box::new(workspace), is_warm: false }),
            Err(error) => error,
        };
        self.report_fallback(candidate.provider, &error);
        let removed = provider.destroy(self.id).await;
        failpoint!("create.undone");
        self.creator.health.recheck(provider).await;
        if let Err(problem) = removed {
            self.leftover = Some((candidate.provider, problem));
        }
        let outcome = if is_final(&error) { Outcome::GiveUp } else { Outcome::TryNext };
        let rejected = candidate.rejected(&error);
        self.rejected.push(rejected.clone());
        self.failures.push((rejected, error));
        Ok(outcome)
    }

    /// The error of all attempts, and the error of removing a sandbox that one has left.
    pub(super) fn into_error(self) -> (WorkspaceError, Option<ProviderError>) {
        let mut failures = self.failures;
        let error = match (failures.len(), failures.pop()) {
            (1, Some((candidate, error))) => {
                WorkspaceError::ProviderFailed { provider: candidate.provider, error: Box::new(error) }
            }
            (_, last) => {
                failures.extend(last);
                WorkspaceError::AllProvidersFailed(failures)
            }
        };
        (error, self.leftover.map(|(_, problem)| problem))
    }

    fn report_fallback(&self, provider: ProviderName, error: &WorkspaceError) {
        tracing::warn!(workspace = %self.id, %provider, %error, "a provider could not create a workspace");
        metrics::counter!("emergent_fallbacks_total", "provider" => provider.as_str()).increment(1);
        self.creator.context.events.publish(Event {
            at: Utc::now(),
            kind: EventKind::PlacementFallback,
            workspace_id: Some(self.id),
            provider: Some(provider),
            message: error.to_string(),
        });
    }

    /// Gives a claimed spare its variables and its repository.
    async fn try_bind(&self, provider: &SharedProvider, connection: SandboxConnection) -> Result<Workspace> {
        let (context, id) = (&self.creator.context, self.id);
        let record = context.store.workspace_record(id).await?;
        let spec = context.spec_of(&record).await?;
        provider.configure(&spec, &connection.channel).await?;
        failpoint!("claim.configured");
        let warnings = checkout(&connection.channel, &record.workspace).await?;
        if !warnings.is_empty() {
            self.add_warnings(&record, warnings).await?;
        }
        let workspace = context.store.set_ready(id, context.clock.now()).await?;
        failpoint!("claim.ready");
        context.live(id).set_connection(connection);
        Ok(workspace)
    }

    /// Adds warnings to those that the workspace has.
    async fn add_warnings(&self, record: &WorkspaceRecord, new: Vec<String>) -> Result<()> {
        let mut all = warnings_of(&record.workspace)?;
        all.extend(new);
        let fields = Map::from_iter([("warnings".to_owned(), json!(all))]);
        self.creator.context.store.merge_metadata(self.id, fields).await?;
        Ok(())
    }

    async fn try_create(&self, provider: &SharedProvider, placement: &Placement) -> Result<Workspace> {
        let (context, id) = (&self.creator.context, self.id);
        // The provider's id of the sandbox is not known yet. Until it is stored, the sandbox is found by its label.
        context.store.set_placed(id, provider.name(), "", placement).await?;
        failpoint!("create.placed");
        let record = context.store.workspace_record(id).await?;
        let sandbox = provider.create(&context.spec_of(&record).await?).await?;
        failpoint!("create.sandbox_made");
        context.store.set_placed(id, provider.name(), sandbox.id.as_str(), placement).await?;
        let mut warnings = sandbox.warnings.clone();
        warnings.extend(checkout(&sandbox.channel, &record.workspace).await?);
        self.store_properties(&sandbox, warnings).await?;
        failpoint!("create.metadata_written");
        let workspace = context.store.set_ready(id, context.clock.now()).await?;
        failpoint!("create.ready");
        let connection = SandboxConnection { channel: sandbox.channel, provider: provider.name() };
        context.live(id).set_connection(connection);
        Ok(workspace)
    }

    /// Stores the properties of a new sandbox in the workspace's metadata. Logs its warnings.
    async fn store_properties(&self, sandbox: &Sandbox, warnings: Vec<String>) -> Result<()> {
        for warning in &warnings {
            tracing::warn!(workspace = %self.id, warning, "a workspace was created with a warning");
        }
        let mut fields = Map::new();
        fields.insert("disk_quota".to_owned(), json!(sandbox.disk_quota));
        fields.insert("agent_version".to_owned(), json!(sandbox.channel.hello().version));
        if !warnings.is_empty() {
            fields.insert("warnings".to_owned(), json!(warnings));
        }
        self.creator.context.store.merge_metadata(self.id, fields).await?;
        Ok(())
    }
}

/// Whether another provider would fail for the same reason: the workspace was changed meanwhile, or git refused the clone.
fn is_final(error: &WorkspaceError) -> bool {
    match error {
        WorkspaceError::Store(StoreError::NotFound { .. } | StoreError::WrongState { .. })
        | WorkspaceError::WrongState { .. } => true,
        WorkspaceError::Checkout(CheckoutError(CallError::Failed(detail))) => {
            detail.code == ErrorCode::GitFailed
        }
        _ => false,
    }
}
