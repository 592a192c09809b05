//! Spans of provider calls. [`Traced`] wraps each provider that the table opens, so no provider and no caller has to begin them.

use std::path::PathBuf;

use async_trait::async_trait;
use emergent_guest_client::GuestClient;
use emergent_host::cpu_group::CpuGroup;
use emergent_wire::workspace::{Capabilities, ProviderName};
use emergent_wire::{SnapshotId, WorkspaceId};
use tracing::field::{self, Empty};
use tracing::{Instrument as _, Span};

use crate::error::ProviderError;
use crate::image::ImageProgram;
use crate::provider::{Health, SharedProvider, WorkspaceProvider};
use crate::sandbox::{DiskUse, Observed, Sandbox, SandboxExit, SandboxId, SandboxSpec, SnapshotInfo};

/// A provider whose calls have the span `provider_call`.
pub(crate) struct Traced(pub(crate) SharedProvider);

type Result<T> = std::result::Result<T, ProviderError>;

impl Traced {
    /// The span of a call for the whole host.
    fn span(&self, call: &'static str) -> Span {
        self.span_with(call, None, None)
    }

    /// The span of a call for one workspace.
    fn span_of(&self, call: &'static str, workspace: WorkspaceId) -> Span {
        self.span_with(call, Some(workspace), None)
    }

    fn span_with(
        &self,
        call: &'static str,
        workspace: Option<WorkspaceId>,
        snapshot: Option<SnapshotId>,
    ) -> Span {
        tracing::debug_span!(
            "provider_call",
            provider = %self.0.name(),
            call,
            workspace = workspace.map(field::display),
            snapshot = snapshot.map(field::display),
            error_code = Empty
        )
    }
}

/// Runs a call within its span, which gets the code of an error.
async fn within<T>(span: Span, call: impl Future<Output = Result<T>>) -> Result<T> {
    let result = call.instrument(span.clone()).await;
    if let Err(error) = &result {
        span.record("error_code", error.code().as_str());
    }
    result
}

// A default in place of the provider's own method would be wrong.
#[deny(clippy::missing_trait_methods)]
#[async_trait]
impl WorkspaceProvider for Traced {
    fn name(&self) -> ProviderName {
        self.0.name()
    }

    fn capabilities(&self) -> Capabilities {
        self.0.capabilities()
    }

    async fn health(&self) -> Health {
        self.0.health().instrument(self.span("health")).await
    }

    async fn verify_start(&self) -> Option<String> {
        self.0.verify_start().instrument(self.span("verify_start")).await
    }

    async fn create(&self, spec: &SandboxSpec) -> Result<Sandbox> {
        within(self.span_of("create", spec.id), self.0.create(spec)).await
    }

    async fn sandbox_id(&self, id: WorkspaceId) -> Result<SandboxId> {
        within(self.span_of("sandbox_id", id), self.0.sandbox_id(id)).await
    }

    async fn resume(&self, spec: &SandboxSpec) -> Result<Sandbox> {
        within(self.span_of("resume", spec.id), self.0.resume(spec)).await
    }

    async fn recreate(&self, spec: &SandboxSpec) -> Result<Sandbox> {
        within(self.span_of("recreate", spec.id), self.0.recreate(spec)).await
    }

    async fn stop(&self, id: WorkspaceId) -> Result<()> {
        within(self.span_of("stop", id), self.0.stop(id)).await
    }

    async fn kill(&self, id: WorkspaceId) -> Result<()> {
        within(self.span_of("kill", id), self.0.kill(id)).await
    }

    async fn destroy(&self, id: WorkspaceId) -> Result<()> {
        within(self.span_of("destroy", id), self.0.destroy(id)).await
    }

    async fn list(&self) -> Result<Vec<Observed>> {
        within(self.span("list"), self.0.list()).await
    }

    async fn open_channel(&self, spec: &SandboxSpec) -> Result<GuestClient> {
        within(self.span_of("open_channel", spec.id), self.0.open_channel(spec)).await
    }

    async fn configure(&self, spec: &SandboxSpec, channel: &GuestClient) -> Result<()> {
        within(self.span_of("configure", spec.id), self.0.configure(spec, channel)).await
    }

    async fn warnings(&self, spec: &SandboxSpec) -> Vec<String> {
        self.0.warnings(spec).instrument(self.span_of("warnings", spec.id)).await
    }

    async fn exit_reason(&self, id: WorkspaceId) -> Option<SandboxExit> {
        self.0.exit_reason(id).instrument(self.span_of("exit_reason", id)).await
    }

    fn oom_kills(&self, id: WorkspaceId) -> u64 {
        self.0.oom_kills(id)
    }

    async fn image_digest(&self, image: &str) -> Result<String> {
        within(self.span("image_digest"), self.0.image_digest(image)).await
    }

    async fn image_program(&self, image: &str) -> Result<ImageProgram> {
        within(self.span("image_program"), self.0.image_program(image)).await
    }

    async fn snapshot(&self, id: WorkspaceId, to: SnapshotId, with_memory: bool) -> Result<u64> {
        let span = self.span_with("snapshot", Some(id), Some(to));
        within(span, self.0.snapshot(id, to, with_memory)).await
    }

    async fn unpause(&self, id: WorkspaceId) -> Result<()> {
        within(self.span_of("unpause", id), self.0.unpause(id)).await
    }

    async fn quarantine(&self, id: WorkspaceId, to: SnapshotId) -> Result<()> {
        within(self.span_with("quarantine", Some(id), Some(to)), self.0.quarantine(id, to)).await
    }

    async fn inspect_snapshot(&self, id: SnapshotId) -> Result<Option<SnapshotInfo>> {
        let span = self.span_with("inspect_snapshot", None, Some(id));
        within(span, self.0.inspect_snapshot(id)).await
    }

    async fn remove_snapshot(&self, id: SnapshotId) -> Result<()> {
        let span = self.span_with("remove_snapshot", None, Some(id));
        within(span, self.0.remove_snapshot(id)).await
    }

    async fn snapshots(&self) -> Result<Vec<SnapshotId>> {
        within(self.span("snapshots"), self.0.snapshots()).await
    }

    fn storage_directories(&self) -> Vec<PathBuf> {
        self.0.storage_directories()
    }

    async fn disk_usage(&self, thorough: bool) -> Vec<DiskUse> {
        self.0.disk_usage(thorough).instrument(self.span("disk_usage")).await
    }

    fn cpu_groups(&self) -> Vec<(WorkspaceId, CpuGroup)> {
        self.0.cpu_groups()
    }

    async fn remove_unused_resources(&self) -> Result<()> {
        within(self.span("remove_unused_resources"), self.0.remove_unused_resources()).await
    }

    async fn remove_shared_resources(&self) -> Result<()> {
        within(self.span("remove_shared_resources"), self.0.remove_shared_resources()).await
    }
}
