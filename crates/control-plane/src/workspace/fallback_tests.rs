//! The scenarios of the orchestrator's requirements about fallback and health. Each test has the title of its scenario as its name.
//!
//! gVisor is real: the real engine with the real runtime. Providers that a test host does not have, or that must fail, are replaced
//! by implementations of the same trait.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use async_trait::async_trait;
use emergent_guest_client::GuestClient;
use emergent_providers::{
    Health, ImageProgram, Observed, ProviderConfig, ProviderEntry, ProviderError, ProviderTable, Sandbox,
    SandboxExit, SandboxId, SandboxSpec, SharedProvider, SnapshotInfo, WorkspaceProvider,
};
use emergent_store::{SealingKey, Store, StoreConfig};
use emergent_wire::event::EventKind;
use emergent_wire::workspace::{
    Capabilities, CreateWorkspace, DeploymentMode, DiskQuota, IsolationLevel, NetworkMode, ProviderChoice,
    ProviderName, ProviderStatus, Workspace,
};
use emergent_wire::{ErrorCode, ErrorDetail, SnapshotId, Valid, WorkspaceId};
use parking_lot::Mutex;

use emergent_test_support::janitor::Janitor;

use super::placement::Availability;
use super::{HEALTH_EVERY, Workspaces};
use crate::config::Settings;

/// A provider whose creations fail.
pub(super) struct FailingProvider {
    name: ProviderName,
    reason: &'static str,
    problem: Mutex<Option<String>>,
    created: AtomicUsize,
    destroyed: AtomicUsize,
    checked: AtomicUsize,
}

impl FailingProvider {
    pub(super) fn new(name: ProviderName, reason: &'static str) -> Arc<Self> {
        let (created, destroyed, checked) = Default::default();
        Arc::new(Self { name, reason, problem: Mutex::default(), created, destroyed, checked })
    }

    /// An entry of the table with the facts of this name, which opens this provider.
    pub(super) fn entry(self: &Arc<Self>) -> ProviderEntry {
        let table = ProviderTable::standard();
        let facts = *table.facts().find(|facts| facts.name == self.name).unwrap();
        let provider = Arc::clone(self) as SharedProvider;
        ProviderEntry { facts, open: Arc::new(move |_| Ok(Some(Arc::clone(&provider)))) }
    }

    fn fails<T>(&self) -> Result<T, ProviderError> {
        Err(ProviderError::Failed { what: "starting", reason: self.reason.to_owned() })
    }
}

#[async_trait]
impl WorkspaceProvider for FailingProvider {
    fn name(&self) -> ProviderName {
        self.name
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            isolation: IsolationLevel::Microvm,
            persistence: true,
            memory_snapshots: false,
            snapshots: false,
            warm_pool: false,
            requires: vec!["kvm".to_owned()],
            disk_quota: DiskQuota::Enforced,
            startup_latency_ms: None,
        }
    }

    async fn sandbox_id(&self, _id: WorkspaceId) -> Result<SandboxId, ProviderError> {
        self.fails()
    }

    async fn health(&self) -> Health {
        self.checked.fetch_add(1, Ordering::SeqCst);
        Health { problem: self.problem.lock().clone(), note: None, available: None, spares: 0 }
    }

    async fn create(&self, _spec: &SandboxSpec) -> Result<Sandbox, ProviderError> {
        self.created.fetch_add(1, Ordering::SeqCst);
        self.fails()
    }

    async fn destroy(&self, _id: WorkspaceId) -> Result<(), ProviderError> {
        self.destroyed.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }

    async fn stop(&self, _id: WorkspaceId) -> Result<(), ProviderError> {
        self.fails()
    }

    async fn resume(&self, _spec: &SandboxSpec) -> Result<Sandbox, ProviderError> {
        self.fails()
    }

    async fn recreate(&self, spec: &SandboxSpec) -> Result<Sandbox, ProviderError> {
        self.resume(spec).await
    }

    async fn open_channel(&self, _spec: &SandboxSpec) -> Result<GuestClient, ProviderError> {
        self.fails()
    }

    async fn warnings(&self, _spec: &SandboxSpec) -> Vec<String> {
        Vec::new()
    }

    async fn configure(&self, _spec: &SandboxSpec, _channel: &GuestClient) -> Result<(), ProviderError> {
        self.fails()
    }

    async fn image_digest(&self, _image: &str) -> Result<String, ProviderError> {
        self.fails()
    }

    async fn image_program(&self, _image: &str) -> Result<ImageProgram, ProviderError> {
        Ok(ImageProgram::default())
    }

    async fn snapshot(
        &self,
        _id: WorkspaceId,
        _to: SnapshotId,
        _with_memory: bool,
    ) -> Result<u64, ProviderError> {
        self.fails()
    }

    async fn remove_snapshot(&self, _id: SnapshotId) -> Result<(), ProviderError> {
        self.fails()
    }

    async fn unpause(&self, _id: WorkspaceId) -> Result<(), ProviderError> {
        self.fails()
    }

    async fn quarantine(&self, _id: WorkspaceId, _to: SnapshotId) -> Result<(), ProviderError> {
        Ok(())
    }

    async fn inspect_snapshot(&self, _id: SnapshotId) -> Result<Option<SnapshotInfo>, ProviderError> {
        Ok(None)
    }

    async fn snapshots(&self) -> Result<Vec<SnapshotId>, ProviderError> {
        Ok(Vec::new())
    }

    async fn exit_reason(&self, _id: WorkspaceId) -> Option<SandboxExit> {
        None
    }

    async fn list(&self) -> Result<Vec<Observed>, ProviderError> {
        Ok(Vec::new())
    }

    async fn remove_shared_resources(&self) -> Result<(), ProviderError> {
        Ok(())
    }
}

/// Workspaces on the standard table of providers, some of whose entries are replaced.
pub(super) struct TestWorkspaces {
    pub(super) workspaces: Arc<Workspaces>,
    /// Cleans up, also when the test fails or is killed.
    _janitor: Janitor,
}

impl TestWorkspaces {
    async fn new(failing: &[&Arc<FailingProvider>], with_gvisor: bool) -> Self {
        let entries = failing.iter().map(|provider| provider.entry());
        Self::with_entries(entries, with_gvisor).await
    }

    pub(super) async fn with_entries(
        entries: impl IntoIterator<Item = ProviderEntry>,
        with_gvisor: bool,
    ) -> Self {
        let directory = tempfile::Builder::new().prefix("emergent-test-").tempdir().unwrap().keep();
        let janitor = Janitor::of(&directory);
        let store = Store::open(StoreConfig::Sqlite(directory.join("emergent.db"))).await.unwrap();
        let key = SealingKey::load_or_create(&directory.join("key")).unwrap();
        let installation = store.installation_id().await.unwrap();
        std::fs::write(directory.join("installation-id"), installation.to_string()).unwrap();
        let table = entries.into_iter().fold(ProviderTable::standard(), ProviderTable::with);
        let settings = Settings::default();
        let providers = table.open(ProviderConfig {
            installation,
            data_dir: directory,
            docker_host: None,
            nameservers: Vec::new(),
            probe_image: settings.workspaces.default_image.clone(),
            room: settings.workspaces.room_rules(),
            gvisor: with_gvisor,
            plain_docker: false,
            firecracker: None,
        });
        let workspaces = Workspaces::new(store, key, settings, providers.unwrap());
        workspaces.health.check_all().await;
        Self { workspaces, _janitor: janitor }
    }

    pub(super) async fn create(&self, request: CreateWorkspace) -> Result<Workspace, ErrorDetail> {
        // Without a network, because this test runs no server that would remove the network at its end.
        let request = CreateWorkspace { network: Some(NetworkMode::Isolated), ..request };
        let creation = self.workspaces.create.begin(Valid::new(request)?, true).await?;
        Ok(self.workspaces.create.provision(creation).await?)
    }

    pub(super) fn status_of(&self, name: ProviderName) -> ProviderStatus {
        let infos = self.workspaces.health.infos(&Default::default());
        infos.iter().find(|info| info.name == name).unwrap().status
    }
}

fn managed() -> CreateWorkspace {
    CreateWorkspace { deployment_mode: Some(DeploymentMode::Managed), ..CreateWorkspace::default() }
}

#[tokio::test]
async fn firecracker_fails_falls_back_to_gvisor() {
    let firecracker = FailingProvider::new(ProviderName::Firecracker, "KVM error");
    let test = TestWorkspaces::new(&[&firecracker], true).await;
    let mut events = test.workspaces.context.events.listen().unwrap();
    let workspace = test.create(CreateWorkspace::default()).await.unwrap();
    let placement = workspace.placement.clone().unwrap();
    assert_eq!((workspace.provider, placement.provider), (Some(ProviderName::Gvisor), ProviderName::Gvisor));
    let failed = placement.rejected.iter().find(|one| one.provider == ProviderName::Firecracker).unwrap();
    assert!(failed.reason.contains("KVM error"), "{failed:?}");
    // A sandbox that it may have made is removed before the next provider is tried.
    assert_eq!(firecracker.created.load(Ordering::SeqCst), 1);
    assert_eq!(firecracker.destroyed.load(Ordering::SeqCst), 1);
    let event = events.recv().await.unwrap();
    assert_eq!((event.kind, event.provider), (EventKind::PlacementFallback, Some(ProviderName::Firecracker)));
    let stored = test.workspaces.context.store.workspace(workspace.id).await.unwrap();
    assert_eq!(stored.placement, Some(placement));
    test.workspaces.lifecycle.destroy(workspace.id).await.unwrap();
}

#[tokio::test]
async fn e2b_fails_falls_back_to_firecracker_then_gvisor() {
    let e2b = FailingProvider::new(ProviderName::E2b, "quota exceeded");
    let firecracker = FailingProvider::new(ProviderName::Firecracker, "out of slots");
    let test = TestWorkspaces::new(&[&e2b, &firecracker], true).await;
    let workspace = test.create(managed()).await.unwrap();
    assert_eq!(workspace.provider, Some(ProviderName::Gvisor));
    let rejected = workspace.placement.unwrap().rejected;
    let failed: Vec<_> = rejected.iter().filter(|one| one.reason.starts_with("starting")).collect();
    assert_eq!(failed.len(), 2);
    assert_eq!((failed[0].provider, failed[1].provider), (ProviderName::E2b, ProviderName::Firecracker));
    test.workspaces.lifecycle.destroy(workspace.id).await.unwrap();
}

#[tokio::test]
async fn explicit_provider_request_does_not_fallback() {
    let firecracker = FailingProvider::new(ProviderName::Firecracker, "KVM error");
    let test = TestWorkspaces::new(&[&firecracker], true).await;
    let request =
        CreateWorkspace { provider: Some(ProviderChoice::Firecracker), ..CreateWorkspace::default() };
    let error = test.create(request).await.unwrap_err();
    assert!(error.message.contains("KVM error") && !error.message.contains("gvisor"), "{error:?}");
    assert_eq!(error.code, ErrorCode::ProviderFailed);
    // The caller has the error, so no row is left.
    assert_eq!(test.workspaces.context.store.active_counts().await.unwrap().len(), 0);
}

#[tokio::test]
async fn all_providers_fail() {
    let e2b = FailingProvider::new(ProviderName::E2b, "the API answered 500");
    let firecracker = FailingProvider::new(ProviderName::Firecracker, "out of memory");
    let test = TestWorkspaces::new(&[&e2b, &firecracker], false).await;
    let error = test.create(managed()).await.unwrap_err();
    for part in ["e2b: starting: the API answered 500", "firecracker: starting: out of memory"] {
        assert!(error.message.contains(part), "{}", error.message);
    }
    let candidates = error.details.unwrap()["candidates"].as_array().unwrap().len();
    assert_eq!(candidates, 2);
}

#[tokio::test]
async fn healthy_provider_is_preferred() {
    let firecracker = FailingProvider::new(ProviderName::Firecracker, "must not be tried");
    *firecracker.problem.lock() = Some("KVM not available".to_owned());
    let test = TestWorkspaces::new(&[&firecracker], true).await;
    let workspace = test.create(CreateWorkspace::default()).await.unwrap();
    assert_eq!(workspace.provider, Some(ProviderName::Gvisor));
    assert_eq!(firecracker.created.load(Ordering::SeqCst), 0);
    test.workspaces.lifecycle.destroy(workspace.id).await.unwrap();
}

#[tokio::test]
async fn provider_health_check_frequency() {
    let firecracker = FailingProvider::new(ProviderName::Firecracker, "");
    let test = TestWorkspaces::new(&[&firecracker], false).await;
    let checked = || firecracker.checked.load(Ordering::SeqCst);
    assert_eq!((checked(), HEALTH_EVERY.as_secs()), (1, 30));
    // Reading the state uses the last check.
    test.status_of(ProviderName::Firecracker);
    test.workspaces.health.known();
    assert_eq!(checked(), 1);
    tokio::time::pause();
    let all = Arc::clone(&test.workspaces);
    let watching = tokio::spawn(crate::background::watch_health(all));
    for round in 1..4 {
        tokio::time::sleep(HEALTH_EVERY).await;
        tokio::task::yield_now().await;
        assert_eq!(checked(), 1 + round);
    }
    watching.abort();
}

#[tokio::test]
async fn provider_becomes_unhealthy() {
    let firecracker = FailingProvider::new(ProviderName::Firecracker, "");
    let test = TestWorkspaces::new(&[&firecracker], false).await;
    let mut events = test.workspaces.context.events.listen().unwrap();
    let is_candidate = || test.workspaces.health.known()[0].availability == Availability::Healthy;
    assert!(is_candidate());
    *firecracker.problem.lock() = Some("the manager does not answer".to_owned());
    test.workspaces.health.check_all().await;
    assert!(!is_candidate());
    assert_eq!(test.status_of(ProviderName::Firecracker), ProviderStatus::Unhealthy);
    assert_eq!(events.recv().await.unwrap().kind, EventKind::ProviderUnhealthy);
    *firecracker.problem.lock() = None;
    test.workspaces.health.check_all().await;
    assert!(is_candidate());
    assert_eq!(events.recv().await.unwrap().kind, EventKind::ProviderHealthy);
}
