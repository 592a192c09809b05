//! A provider that is added by one entry of the table is placed, checked, reported and used for fallback.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use async_trait::async_trait;
use emergent_guest_client::GuestClient;
use emergent_guest_protocol::{AgentHello, Frame, Kind, PROTOCOL_VERSION};
use emergent_providers::{
    Absence, Health, ImageProgram, Observed, ObservedState, ProviderEntry, ProviderError, ProviderFacts,
    Ranks, Sandbox, SandboxExit, SandboxId, SandboxSpec, SharedProvider, SnapshotInfo, WorkspaceProvider,
};
use emergent_wire::pool::PoolTarget;
use emergent_wire::workspace::{
    Capabilities, CreateWorkspace, DiskQuota, IsolationLevel, ProviderChoice, ProviderName, ProviderStatus,
    SecurityLevel, WorkspaceStatus,
};
use emergent_wire::{ErrorCode, SnapshotId, Valid, WorkspaceId};
use parking_lot::Mutex;
use serde_json::json;
use tokio::io::{AsyncWriteExt as _, DuplexStream};
use tokio::sync::Notify;

use super::fallback_tests::{FailingProvider, TestWorkspaces};

/// The entry's facts. They differ from those of the standard entry with this name.
const FACTS: ProviderFacts = ProviderFacts {
    name: ProviderName::E2b,
    isolation: IsolationLevel::Container,
    ranks: Ranks { mcp_server: Some(1), self_hosted: Some(15), managed: Some(1) },
    requires: &["imagination"],
    sandbox_scope: "added",
    absence: Absence::NotConfigured("never absent"),
};

/// A sandbox: its id, and the guest's end of its channel.
struct FakeSandbox {
    id: SandboxId,
    _guest: DuplexStream,
}

/// A provider in memory, whose sandboxes have ids of its own.
#[derive(Default)]
struct InMemoryProvider {
    sandboxes: Mutex<HashMap<WorkspaceId, FakeSandbox>>,
    checks: AtomicUsize,
    creations: AtomicUsize,
    problem: Mutex<Option<String>>,
    /// The protocol of the agent to which a channel is opened again, and the number of such channels.
    older_protocol: Option<u16>,
    reopened: AtomicUsize,
    /// If set, a creation notifies the first and waits for the second.
    gate: Option<(Notify, Notify)>,
}

/// A channel to an agent with this protocol, and the guest's end of it.
async fn channel(protocol: u16) -> (GuestClient, DuplexStream) {
    let (host, mut guest) = tokio::io::duplex(1 << 16);
    let hello = AgentHello { protocol, version: "test".to_owned(), boot_id: "1".to_owned() };
    guest.write_all(&Frame::message(Kind::Hello, 0, &hello).unwrap().to_bytes()).await.unwrap();
    let (reader, writer) = tokio::io::split(host);
    (GuestClient::connect(reader, writer).await.unwrap(), guest)
}

/// The entry that adds the provider to the server.
fn entry(provider: &Arc<InMemoryProvider>) -> ProviderEntry {
    let provider = Arc::clone(provider) as SharedProvider;
    ProviderEntry { facts: FACTS, open: Arc::new(move |_| Ok(Some(Arc::clone(&provider)))) }
}

impl InMemoryProvider {
    fn find(&self, id: WorkspaceId) -> Result<SandboxId, ProviderError> {
        let sandboxes = self.sandboxes.lock();
        let found = sandboxes.get(&id).ok_or_else(|| ProviderError::Gone(id.to_string()))?;
        Ok(found.id.clone())
    }

    fn unsupported<T>(&self) -> Result<T, ProviderError> {
        Err(ProviderError::Unacceptable("not supported".to_owned()))
    }
}

#[async_trait]
impl WorkspaceProvider for InMemoryProvider {
    fn name(&self) -> ProviderName {
        FACTS.name
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            isolation: FACTS.isolation,
            persistence: false,
            memory_snapshots: false,
            snapshots: false,
            warm_pool: false,
            requires: FACTS.requires(),
            disk_quota: DiskQuota::Enforced,
            startup_latency_ms: None,
        }
    }

    async fn health(&self) -> Health {
        self.checks.fetch_add(1, Ordering::SeqCst);
        Health { problem: self.problem.lock().clone(), note: None, available: None, spares: 0 }
    }

    async fn create(&self, spec: &SandboxSpec) -> Result<Sandbox, ProviderError> {
        let number = self.creations.fetch_add(1, Ordering::SeqCst);
        if let Some((started, may_end)) = &self.gate {
            started.notify_one();
            may_end.notified().await;
        }
        let id = SandboxId::new(format!("sandbox-{number}"));
        let (channel, guest) = channel(PROTOCOL_VERSION).await;
        self.sandboxes.lock().insert(spec.id, FakeSandbox { id: id.clone(), _guest: guest });
        let disk_quota = DiskQuota::Enforced;
        Ok(Sandbox { id, channel, disk_quota, warnings: Vec::new(), disk_was_repaired: false })
    }

    async fn sandbox_id(&self, id: WorkspaceId) -> Result<SandboxId, ProviderError> {
        self.find(id)
    }

    async fn resume(&self, _spec: &SandboxSpec) -> Result<Sandbox, ProviderError> {
        self.unsupported()
    }

    async fn recreate(&self, _spec: &SandboxSpec) -> Result<Sandbox, ProviderError> {
        self.unsupported()
    }

    async fn stop(&self, _id: WorkspaceId) -> Result<(), ProviderError> {
        self.unsupported()
    }

    async fn destroy(&self, id: WorkspaceId) -> Result<(), ProviderError> {
        self.sandboxes.lock().remove(&id);
        Ok(())
    }

    async fn list(&self) -> Result<Vec<Observed>, ProviderError> {
        let sandboxes = self.sandboxes.lock();
        Ok(sandboxes.keys().map(|id| Observed { id: *id, state: ObservedState::Running }).collect())
    }

    async fn open_channel(&self, spec: &SandboxSpec) -> Result<GuestClient, ProviderError> {
        let id = self.find(spec.id)?;
        let (channel, guest) = channel(self.older_protocol.unwrap_or(PROTOCOL_VERSION)).await;
        self.sandboxes.lock().insert(spec.id, FakeSandbox { id, _guest: guest });
        self.reopened.fetch_add(1, Ordering::SeqCst);
        Ok(channel)
    }

    async fn configure(&self, _spec: &SandboxSpec, _channel: &GuestClient) -> Result<(), ProviderError> {
        Ok(())
    }

    async fn warnings(&self, _spec: &SandboxSpec) -> Vec<String> {
        Vec::new()
    }

    async fn exit_reason(&self, _id: WorkspaceId) -> Option<SandboxExit> {
        None
    }

    async fn image_digest(&self, image: &str) -> Result<String, ProviderError> {
        Ok(image.to_owned())
    }

    async fn image_program(&self, _image: &str) -> Result<ImageProgram, ProviderError> {
        Ok(ImageProgram::default())
    }

    async fn snapshot(&self, _: WorkspaceId, _: SnapshotId, _: bool) -> Result<u64, ProviderError> {
        self.unsupported()
    }

    async fn unpause(&self, _id: WorkspaceId) -> Result<(), ProviderError> {
        Ok(())
    }

    async fn quarantine(&self, _id: WorkspaceId, _to: SnapshotId) -> Result<(), ProviderError> {
        self.unsupported()
    }

    async fn inspect_snapshot(&self, _id: SnapshotId) -> Result<Option<SnapshotInfo>, ProviderError> {
        Ok(None)
    }

    async fn remove_snapshot(&self, _id: SnapshotId) -> Result<(), ProviderError> {
        Ok(())
    }

    async fn snapshots(&self) -> Result<Vec<SnapshotId>, ProviderError> {
        Ok(Vec::new())
    }

    async fn remove_shared_resources(&self) -> Result<(), ProviderError> {
        Ok(())
    }
}

#[tokio::test]
async fn an_added_provider_is_checked_reported_and_placed_by_its_facts() {
    let added = Arc::new(InMemoryProvider::default());
    let test = TestWorkspaces::with_entries([entry(&added)], false).await;
    assert_eq!(added.checks.load(Ordering::SeqCst), 1);
    let infos = test.workspaces.health.infos(&Default::default());
    let info = infos.iter().find(|info| info.name == FACTS.name).unwrap();
    assert_eq!((info.status, &info.capabilities.requires), (ProviderStatus::Healthy, &FACTS.requires()));
    let workspace = test.create(CreateWorkspace::default()).await.unwrap();
    assert_eq!(workspace.provider, Some(FACTS.name));
    // The standard entry of this name is a microVM, this one a container.
    let request = CreateWorkspace { security_level: Some(SecurityLevel::High), ..CreateWorkspace::default() };
    assert_eq!(test.create(request).await.unwrap_err().code, ErrorCode::Unacceptable);
    test.workspaces.lifecycle.destroy(workspace.id).await.unwrap();
    assert!(added.list().await.unwrap().is_empty());
}

#[tokio::test]
async fn an_added_provider_takes_over_when_a_better_one_fails() {
    let firecracker = FailingProvider::new(ProviderName::Firecracker, "KVM error");
    let added = Arc::new(InMemoryProvider::default());
    let test = TestWorkspaces::with_entries([firecracker.entry(), entry(&added)], false).await;
    let workspace = test.create(CreateWorkspace::default()).await.unwrap();
    let placement = workspace.placement.unwrap();
    assert_eq!(placement.provider, FACTS.name);
    let failed = placement.rejected.iter().find(|one| one.provider == ProviderName::Firecracker);
    assert!(failed.is_some_and(|one| one.reason.contains("KVM error")), "{placement:?}");
    test.workspaces.lifecycle.destroy(workspace.id).await.unwrap();
}

#[tokio::test]
async fn an_unhealthy_added_provider_is_not_placed() {
    let added = Arc::new(InMemoryProvider::default());
    *added.problem.lock() = Some("out of imagination".to_owned());
    let test = TestWorkspaces::with_entries([entry(&added)], false).await;
    assert_eq!(test.status_of(FACTS.name), ProviderStatus::Unhealthy);
    let request = CreateWorkspace { provider: Some(ProviderChoice::E2b), ..CreateWorkspace::default() };
    let error = test.create(request).await.unwrap_err();
    assert_eq!(error.code, ErrorCode::Unavailable);
    assert!(error.message.contains("out of imagination"), "{error:?}");
    assert_eq!(added.creations.load(Ordering::SeqCst), 0);
}

/// The row is written before the sandbox is created. The sandbox's id is stored when the provider has returned it.
#[tokio::test]
async fn the_row_gets_the_id_that_create_returns() {
    let added = Arc::new(InMemoryProvider { gate: Some(Default::default()), ..InMemoryProvider::default() });
    let test = TestWorkspaces::with_entries([entry(&added)], false).await;
    let request = Valid::new(CreateWorkspace::default()).unwrap();
    let creation = test.workspaces.create.begin(request, true).await.unwrap();
    let id = creation.workspace.id;
    let finishing = tokio::spawn({
        let workspaces = Arc::clone(&test.workspaces);
        async move { workspaces.create.provision(creation).await }
    });
    let (started, may_end) = added.gate.as_ref().unwrap();
    started.notified().await;
    let row = test.workspaces.context.store.workspace(id).await.unwrap();
    assert_eq!((row.status, row.provider), (WorkspaceStatus::Creating, Some(FACTS.name)));
    assert_eq!(row.provider_workspace_id, "");
    may_end.notify_one();
    let workspace = finishing.await.unwrap().unwrap();
    assert_eq!(workspace.provider_workspace_id, "sandbox-0");
    let row = test.workspaces.context.store.workspace(id).await.unwrap();
    assert_eq!(row.provider_workspace_id, added.sandbox_id(id).await.unwrap().as_str());
    test.workspaces.lifecycle.destroy(id).await.unwrap();
}

/// An agent keeps its protocol when the server is upgraded. Then the spare lacks what a new workspace may need.
#[tokio::test]
async fn a_spare_with_an_older_agent_is_replaced_after_a_restart() {
    for (older_protocol, creations) in [(None, 1), (Some(PROTOCOL_VERSION - 1), 2)] {
        let added = Arc::new(InMemoryProvider { older_protocol, ..InMemoryProvider::default() });
        let test = TestWorkspaces::with_entries([entry(&added)], false).await;
        let pool = &test.workspaces.pool;
        let shape = json!({ "size": 1, "provider": "e2b", "network": "isolated" });
        let target: PoolTarget = serde_json::from_value(json!({ "shapes": [shape] })).unwrap();
        pool.set_target(Some(Valid::new(target).unwrap())).await.unwrap();
        pool.maintain().await;
        let spare = *added.sandboxes.lock().keys().next().unwrap();
        // The channel ends as it does when the server ends.
        let id = added.find(spare).unwrap();
        let (_, guest) = channel(PROTOCOL_VERSION).await;
        added.sandboxes.lock().insert(spare, FakeSandbox { id, _guest: guest });
        while added.reopened.load(Ordering::SeqCst) == 0 {
            pool.maintain().await;
        }
        assert_eq!(added.creations.load(Ordering::SeqCst), creations);
        assert_eq!(added.sandboxes.lock().contains_key(&spare), creations == 1);
        let workspace = test.create(CreateWorkspace::default()).await.unwrap();
        assert!(workspace.placement.unwrap().warm_hit);
        assert_eq!(workspace.id == spare, creations == 1);
        pool.set_target(Some(Valid::new(PoolTarget::default()).unwrap())).await.unwrap();
        pool.maintain().await;
        test.workspaces.lifecycle.destroy(workspace.id).await.unwrap();
        assert!(added.list().await.unwrap().is_empty());
    }
}
