//! Making a workspace: intent first, then the sandbox, each step with its undo.
//!
//! ```text
//! row 'creating' ─▶ placed on a candidate ─▶ sandbox ─▶ checkout ─▶ 'ready'
//!                          ▲        │ failed: sandbox removed
//!                          └────────┘ next candidate; none left: row removed (or 'error', when nobody waits)
//! ```

use std::sync::Arc;
use std::time::{Duration, Instant};

use chrono::Utc;
use emergent_guest_client::GuestClient;
use emergent_guest_protocol::GuestCall;
use emergent_providers::{ProviderError, Sandbox, SharedProvider};
use emergent_store::NewWorkspace;
use emergent_wire::git::{GitAction, GitAnswer, GitRequest};
use emergent_wire::workspace::{
    ContainerType, CreateWorkspace, Lifecycle, NetworkMode, Placement, ProviderChoice, RejectedCandidate,
    SecurityLevel, Workspace, WorkspaceStatus,
};
use emergent_wire::{ErrorCode, ErrorDetail, WorkspaceId};
use serde_json::{Map, json};

use super::live::Reached;
use super::placement::{self, Plan, Wish};
use super::{Workspaces, error_of};

/// Pauses between attempts to reach a repository.
const CHECKOUT_PAUSES: [Duration; 3] =
    [Duration::from_secs(2), Duration::from_secs(4), Duration::from_secs(8)];
/// What is said when a repository wants credentials that there are none for.
const AUTHENTICATION_FAILED: &str =
    "Repository authentication failed — connect GitHub in Settings > Integrations";

/// A workspace that is being made: its intent is written down.
pub(crate) struct Creation {
    /// As it stands before anything was done.
    pub(crate) workspace: Workspace,
    plan: Plan,
    /// Whether somebody waits for the result; else a failure stays visible as a row.
    waited_for: bool,
}

impl Workspaces {
    /// Checks a request, chooses where it goes, and writes the intent down.
    pub(crate) async fn begin_create(
        &self,
        request: CreateWorkspace,
        waited_for: bool,
    ) -> Result<Creation, ErrorDetail> {
        request.validate()?;
        let settings = &self.settings.workspaces;
        let limits = request.resource_limits.unwrap_or_default().or(settings.default_limits());
        limits.validate()?;
        let container_type = request.container_type.unwrap_or(ContainerType::AgentWorkspace);
        if container_type == ContainerType::McpServer {
            let message = "MCP servers are registered at /api/v1/mcp/servers, not created as workspaces";
            return Err(ErrorDetail::new(ErrorCode::Unacceptable, message));
        }
        let deployment = request.deployment_mode.unwrap_or(settings.deployment_mode);
        let wish = Wish {
            container_type,
            provider: request.provider.unwrap_or(ProviderChoice::Auto),
            deployment,
            security: request.security_level.unwrap_or(SecurityLevel::Standard),
        };
        let plan = match placement::plan(wish, &self.known_providers()) {
            Ok(plan) => plan,
            Err(_) => {
                self.recheck_unhealthy().await;
                placement::plan(wish, &self.known_providers())?
            }
        };
        let id = WorkspaceId::generate();
        let environment_sealed = self.key.seal_environment(id, &request.environment);
        let new = NewWorkspace {
            container_type,
            repository_url: request.repository_url,
            branch: request.branch,
            deployment_mode: deployment,
            lifecycle: Lifecycle::Ephemeral,
            ttl_seconds: Some(request.ttl_seconds.unwrap_or(settings.default_ttl_seconds)),
            resource_limits: limits,
            network: request.network.unwrap_or(NetworkMode::Nat),
            environment_sealed,
            ..NewWorkspace::agent(id, request.image.unwrap_or_else(|| settings.default_image.clone()))
        };
        let workspace =
            self.store.insert_creating(new, Some(settings.max_concurrent)).await.map_err(error_of)?;
        Ok(Creation { workspace, plan, waited_for })
    }

    /// Makes the workspace. Runs to its end whoever waits.
    pub(crate) async fn finish_create(
        self: &Arc<Self>,
        creation: Creation,
    ) -> Result<Workspace, ErrorDetail> {
        let id = creation.workspace.id;
        let live = self.live(id);
        let _changing = live.changing.lock().await;
        let begun = Instant::now();
        let mut rejected = creation.plan.rejected.clone();
        let mut failures: Vec<(RejectedCandidate, ErrorDetail)> = Vec::new();
        for candidate in &creation.plan.candidates {
            let placement = Placement {
                provider: candidate.provider,
                reason: candidate.reason.clone(),
                rejected: rejected.clone(),
                warm_hit: false,
            };
            let provider = self.provider(candidate.provider)?.clone();
            match self.create_on(&provider, id, &placement).await {
                Ok(workspace) => {
                    tracing::info!(workspace = %id, provider = %candidate.provider, took_ms = begun.elapsed().as_millis(), "created");
                    metrics::counter!("emergent_placements_total", "provider" => candidate.provider.as_str())
                        .increment(1);
                    metrics::histogram!("emergent_create_seconds", "provider" => candidate.provider.as_str())
                        .record(begun.elapsed().as_secs_f64());
                    return Ok(workspace);
                }
                Err(error) => {
                    tracing::warn!(workspace = %id, provider = %candidate.provider, error = %error, "create failed");
                    metrics::counter!("emergent_fallbacks_total", "provider" => candidate.provider.as_str())
                        .increment(1);
                    let failed =
                        RejectedCandidate { provider: candidate.provider, reason: error.message.clone() };
                    let removed = provider.destroy(id).await;
                    self.recheck(&provider).await;
                    if let Err(problem) = removed {
                        return Err(self.leave_to_recovery(id, error, &problem).await);
                    }
                    rejected.push(failed.clone());
                    let is_final = error.code == ErrorCode::WrongState || error.code == ErrorCode::GitFailed;
                    failures.push((failed, error));
                    if is_final {
                        break;
                    }
                }
            }
        }
        let error = all_failed(failures);
        if creation.waited_for {
            self.store.delete_workspace(id).await.map_err(error_of)?;
            self.forget(id);
        } else {
            let _ = self.store.set_error(id, &error.message).await;
        }
        Err(error)
    }

    async fn create_on(
        self: &Arc<Self>,
        provider: &SharedProvider,
        id: WorkspaceId,
        placement: &Placement,
    ) -> Result<Workspace, ErrorDetail> {
        let name = format!("agent-workspace-{id}");
        self.store.set_placed(id, provider.name(), &name, placement).await.map_err(error_of)?;
        let record = self.store.workspace_record(id).await.map_err(error_of)?;
        let spec = self.spec_of(&record).await?;
        let sandbox = provider.create(&spec).await?;
        let mut warnings = sandbox.warnings.clone();
        if let Some(url) = &record.workspace.repository_url {
            warnings.extend(checkout(&sandbox.channel, url, record.workspace.branch.as_deref()).await?);
        }
        self.write_down(id, &sandbox, warnings).await?;
        let workspace = self.store.set_ready(id, Utc::now()).await.map_err(error_of)?;
        let reached = Reached { channel: sandbox.channel, provider: provider.name() };
        self.live(id).set_reached(reached);
        Ok(workspace)
    }

    /// Puts what the user should know into the workspace's metadata, and into the log.
    async fn write_down(
        &self,
        id: WorkspaceId,
        sandbox: &Sandbox,
        warnings: Vec<String>,
    ) -> Result<(), ErrorDetail> {
        for warning in &warnings {
            tracing::warn!(workspace = %id, warning, "a workspace was created with a warning");
        }
        let mut fields = Map::new();
        fields.insert("disk_quota".to_owned(), json!(sandbox.disk_quota));
        fields.insert("agent_version".to_owned(), json!(sandbox.channel.hello().version));
        if !warnings.is_empty() {
            fields.insert("warnings".to_owned(), json!(warnings));
        }
        self.store.merge_metadata(id, fields).await.map_err(error_of).map(drop)
    }

    /// What a failed attempt made can't be removed now: the row stays, as a removal that was begun.
    async fn leave_to_recovery(
        &self,
        id: WorkspaceId,
        mut error: ErrorDetail,
        problem: &ProviderError,
    ) -> ErrorDetail {
        error.message = format!("{}; what was made so far can't be removed yet ({problem})", error.message);
        let all = WorkspaceStatus::ALL;
        if let Err(error) = self.store.transition(id, all, WorkspaceStatus::Destroying).await {
            tracing::error!(workspace = %id, %error, "the remains of a failed creation could not be marked");
        }
        let _ = self.store.set_error(id, &error.message).await;
        error
    }

    /// Recovers from a server that ended while it made a workspace: nobody waits for it any more.
    pub(super) async fn abandon_creation(&self, id: WorkspaceId) -> Result<(), ErrorDetail> {
        let record = self.store.workspace_record(id).await.map_err(error_of)?;
        if record.workspace.status == WorkspaceStatus::Creating {
            if record.workspace.provider.is_some() {
                self.provider_of(&record)?.destroy(id).await?;
            }
            self.store.delete_workspace(id).await.map_err(error_of)?;
            tracing::info!(workspace = %id, "a workspace whose creation was interrupted was removed");
        }
        self.forget(id);
        Ok(())
    }
}

/// One error out of all failures.
fn all_failed(mut failures: Vec<(RejectedCandidate, ErrorDetail)>) -> ErrorDetail {
    if failures.len() == 1
        && let Some((candidate, mut error)) = failures.pop()
    {
        if error.details.is_none() {
            error.details = Some(json!({ "provider": candidate.provider }));
        }
        return error;
    }
    let each: Vec<String> =
        failures.iter().map(|(failed, _)| format!("{}: {}", failed.provider, failed.reason)).collect();
    let candidates: Vec<&RejectedCandidate> = failures.iter().map(|(failed, _)| failed).collect();
    // All for the same reason (an image that is not there): then that is what the caller must know.
    let first = failures.first().map(|(_, error)| error.code);
    let same = failures.iter().all(|(_, error)| Some(error.code) == first);
    let code = first.filter(|_| same).unwrap_or(ErrorCode::ProviderFailed);
    ErrorDetail::new(code, format!("every provider failed: {}", each.join("; ")))
        .with_details(json!({ "candidates": candidates }))
}

/// Clones a repository into the workspace. A repository that wants credentials leaves it empty, with a warning.
async fn checkout(
    channel: &GuestClient,
    url: &str,
    branch: Option<&str>,
) -> Result<Vec<String>, ErrorDetail> {
    let request = GitRequest {
        repository_url: Some(url.to_owned()),
        branch: branch.map(str::to_owned),
        ..GitRequest::new(GitAction::Clone)
    };
    let mut pauses = CHECKOUT_PAUSES.iter();
    loop {
        let call = channel.start(&GuestCall::Git(request.clone())).await?;
        let error = match call.answer::<GitAnswer>().await {
            Ok(_) => return Ok(Vec::new()),
            Err(error) => ErrorDetail::from(error),
        };
        let says = |text: &str| error.message.contains(text);
        if says("could not read Username")
            || says("Authentication failed")
            || says("terminal prompts disabled")
        {
            return Ok(vec![AUTHENTICATION_FAILED.to_owned()]);
        }
        let network = ["Could not resolve host", "Failed to connect", "Connection", "timed out", "early EOF"];
        match pauses.next() {
            Some(pause) if network.iter().any(|text| says(text)) => tokio::time::sleep(*pause).await,
            _ => return Err(error),
        }
    }
}
