//! The Firecracker provider: each method of the trait is a request to the manager.

use std::sync::Arc;
use std::time::Instant;

use async_trait::async_trait;
use emergent_failpoint::failpoint;
use emergent_guest_client::GuestClient;
use emergent_wire::id::InstallationId;
use emergent_wire::manager::{
    Machine, MachineList, MachinePhase, MachineRequest, MachineSnapshot, MachineSnapshotList,
    MachineSnapshotRequest,
};
use emergent_wire::workspace::{Capabilities, DiskQuota, IsolationLevel, ProviderName};
use emergent_wire::{SnapshotId, WorkspaceId};

use super::client::Client;
use super::images::MachineImages;
use crate::error::ProviderError;
use crate::image::{ImageProgram, ImageSource};
use crate::provider::{Health, WorkspaceProvider, configure_agent};
use crate::sandbox::{Observed, ObservedState, Sandbox, SandboxExit, SandboxId, SandboxSpec, SnapshotInfo};
use crate::settings::ManagerAddress;
use crate::start_history::StartHistory;
use crate::table::{Absence, ProviderEntry, ProviderFacts, Ranks};

const FACTS: ProviderFacts = ProviderFacts {
    name: ProviderName::Firecracker,
    isolation: IsolationLevel::Microvm,
    ranks: Ranks { mcp_server: Some(20), self_hosted: Some(10), managed: Some(20) },
    requires: &["kvm", "firecracker"],
    sandbox_scope: "firecracker",
    absence: Absence::NotConfigured("not installed on this server"),
};

/// The table's entry of the Firecracker provider.
pub(crate) fn entry() -> ProviderEntry {
    ProviderEntry {
        facts: FACTS,
        open: Arc::new(|context| {
            let Some(manager) = &context.firecracker else {
                return Ok(None);
            };
            let images = Arc::new(context.images()?);
            Ok(Some(Arc::new(FirecrackerProvider::new(context.installation, manager, images)?)))
        }),
    }
}

/// MicroVMs of a Firecracker manager.
struct FirecrackerProvider {
    installation: InstallationId,
    client: Client,
    images: MachineImages,
    starts: StartHistory,
}

/// The id that is shown for a microVM. The manager itself names it by the workspace.
fn machine_name(id: WorkspaceId) -> SandboxId {
    SandboxId::new(format!("microvm-{id}"))
}

fn machine(id: WorkspaceId) -> String {
    format!("/v1/machines/{id}")
}

fn snapshot(id: SnapshotId) -> String {
    format!("/v1/snapshots/{id}")
}

impl FirecrackerProvider {
    /// A provider on a manager. Does not connect to it yet.
    fn new(
        installation: InstallationId,
        manager: &ManagerAddress,
        images: Arc<dyn ImageSource>,
    ) -> Result<Self, ProviderError> {
        let client = Client::new(&manager.url, manager.token.clone(), manager.ca_certificate.as_deref())
            .map_err(|error| ProviderError::failed("the address of the Firecracker manager", error))?;
        let images = MachineImages { source: images };
        Ok(Self { installation, client, images, starts: StartHistory::default() })
    }

    /// Opens a channel to a running microVM and configures its agent.
    async fn greet(&self, spec: &SandboxSpec) -> Result<GuestClient, ProviderError> {
        let stream = self.client.channel(&format!("{}/channel", machine(spec.id))).await?;
        let (reader, writer) = tokio::io::split(stream);
        let channel = GuestClient::connect(reader, writer)
            .await
            .map_err(|error| ProviderError::failed("greeting the guest agent", error))?;
        failpoint!("sandbox.greeted");
        self.configure(spec, &channel).await?;
        Ok(channel)
    }

    async fn sandbox(&self, spec: &SandboxSpec) -> Result<Sandbox, ProviderError> {
        let channel = self.greet(spec).await?;
        let warnings = self.warnings(spec).await;
        Ok(Sandbox {
            id: machine_name(spec.id),
            channel,
            disk_quota: DiskQuota::Enforced,
            warnings,
            // The host never reads a microVM's disk: the guest's kernel repairs it.
            disk_was_repaired: false,
        })
    }

    async fn machine(&self, id: WorkspaceId) -> Result<Machine, ProviderError> {
        self.client.get(&machine(id)).await
    }
}

#[async_trait]
impl WorkspaceProvider for FirecrackerProvider {
    fn name(&self) -> ProviderName {
        FACTS.name
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            isolation: FACTS.isolation,
            persistence: true,
            snapshots: true,
            memory_snapshots: true,
            warm_pool: true,
            requires: FACTS.requires(),
            disk_quota: DiskQuota::Enforced,
            startup_latency_ms: self.starts.median_ms(),
        }
    }

    async fn sandbox_id(&self, id: WorkspaceId) -> Result<SandboxId, ProviderError> {
        Ok(machine_name(id))
    }

    async fn health(&self) -> Health {
        match self.client.health().await {
            Ok(health) => Health {
                problem: (!health.healthy).then(|| health.errors.join("; ")),
                note: (!health.notes.is_empty()).then(|| health.notes.join("; ")),
                available: Some(health.available),
                spares: if health.healthy { health.warm_pool_size } else { 0 },
            },
            Err(error) => Health::unhealthy(error.to_string()),
        }
    }

    async fn create(&self, spec: &SandboxSpec) -> Result<Sandbox, ProviderError> {
        let image = self.images.ensure(&self.client, &spec.image).await?;
        let begun = Instant::now();
        let request = MachineRequest {
            installation: self.installation,
            image,
            limits: spec.limits,
            network: spec.network,
            snapshot: spec.snapshot,
        };
        let _: Machine = self.client.put(&machine(spec.id), &request).await?;
        failpoint!("sandbox.made");
        let sandbox = self.sandbox(spec).await?;
        self.starts.record_cold_start(begun.elapsed());
        Ok(sandbox)
    }

    async fn destroy(&self, id: WorkspaceId) -> Result<(), ProviderError> {
        self.client.delete(&machine(id)).await
    }

    async fn stop(&self, id: WorkspaceId) -> Result<(), ProviderError> {
        let stopped: Result<Machine, _> = self.client.end(&format!("{}/stop", machine(id))).await;
        stopped.map(drop)
    }

    async fn resume(&self, spec: &SandboxSpec) -> Result<Sandbox, ProviderError> {
        let _: Machine = self.client.start(&format!("{}/start", machine(spec.id))).await?;
        failpoint!("sandbox.started");
        self.sandbox(spec).await
    }

    async fn recreate(&self, spec: &SandboxSpec) -> Result<Sandbox, ProviderError> {
        self.stop(spec.id).await?;
        self.resume(spec).await
    }

    async fn open_channel(&self, spec: &SandboxSpec) -> Result<GuestClient, ProviderError> {
        self.greet(spec).await
    }

    async fn warnings(&self, _spec: &SandboxSpec) -> Vec<String> {
        Vec::new()
    }

    async fn configure(&self, spec: &SandboxSpec, channel: &GuestClient) -> Result<(), ProviderError> {
        let Some(mut configuration) = spec.configuration.clone() else {
            return Ok(());
        };
        configuration.memory_bytes = Some(spec.limits.memory.bytes());
        configure_agent(channel, configuration).await
    }

    async fn image_digest(&self, image: &str) -> Result<String, ProviderError> {
        self.images.source.digest(image).await
    }

    async fn image_program(&self, image: &str) -> Result<ImageProgram, ProviderError> {
        Ok(self.images.source.config(image).await?.program)
    }

    async fn snapshot(
        &self,
        id: WorkspaceId,
        to: SnapshotId,
        with_memory: bool,
    ) -> Result<u64, ProviderError> {
        let request = MachineSnapshotRequest { machine: id, memory: with_memory };
        let copied: MachineSnapshot = self.client.put(&snapshot(to), &request).await?;
        Ok(copied.bytes)
    }

    async fn quarantine(&self, id: WorkspaceId, to: SnapshotId) -> Result<(), ProviderError> {
        if self.inspect_snapshot(to).await?.is_none() {
            match self.snapshot(id, to, false).await {
                Ok(_) | Err(ProviderError::Gone(_)) => {}
                Err(error) => return Err(error),
            }
        }
        self.destroy(id).await
    }

    async fn inspect_snapshot(&self, id: SnapshotId) -> Result<Option<SnapshotInfo>, ProviderError> {
        let list: MachineSnapshotList = self.client.get("/v1/snapshots").await?;
        let found = list.snapshots.iter().find(|each| each.id == id);
        Ok(found.map(|each| SnapshotInfo {
            bytes: each.bytes,
            disk: each.disk,
            memory_limits: each.memory_limits,
        }))
    }

    async fn remove_snapshot(&self, id: SnapshotId) -> Result<(), ProviderError> {
        self.client.delete(&snapshot(id)).await
    }

    async fn unpause(&self, id: WorkspaceId) -> Result<(), ProviderError> {
        let unpaused: Result<Machine, _> = self.client.end(&format!("{}/go-on", machine(id))).await;
        unpaused.map(drop)
    }

    async fn snapshots(&self) -> Result<Vec<SnapshotId>, ProviderError> {
        let list: MachineSnapshotList = self.client.get("/v1/snapshots").await?;
        let own = list.snapshots.into_iter().filter(|each| each.installation == self.installation);
        Ok(own.map(|each| each.id).collect())
    }

    async fn exit_reason(&self, id: WorkspaceId) -> Option<SandboxExit> {
        match self.machine(id).await {
            Ok(machine) => match machine.phase {
                MachinePhase::Running => None,
                // Without a reason it was stopped by a request.
                MachinePhase::Ending => machine.ended.map(SandboxExit::new),
                phase => Some(SandboxExit::new(machine.ended.unwrap_or_else(|| format!("it is {phase}")))),
            },
            Err(ProviderError::Gone(_)) => Some(SandboxExit::new("its microVM was removed")),
            Err(_) => None,
        }
    }

    async fn list(&self) -> Result<Vec<Observed>, ProviderError> {
        self.images.source.remove_abandoned_exports().await?;
        let path = format!("/v1/machines?installation={}", self.installation);
        let list: MachineList = self.client.get(&path).await?;
        let observed = list.machines.into_iter().map(|machine| {
            let state = match machine.phase {
                MachinePhase::Running | MachinePhase::Paused | MachinePhase::Configured => {
                    ObservedState::Running
                }
                MachinePhase::Ending | MachinePhase::Stopped => ObservedState::Stopped,
                MachinePhase::Reserved | MachinePhase::Removing => ObservedState::Leftover,
            };
            Observed { id: machine.id, state }
        });
        Ok(observed.collect())
    }

    async fn remove_shared_resources(&self) -> Result<(), ProviderError> {
        self.client.end("/v1/retire").await
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use std::path::Path;
    use std::process::Command;

    use emergent_host::room::RoomRules;

    use super::*;
    use crate::settings::ProviderConfig;
    use crate::table::ProviderTable;

    fn settings(directory: &Path) -> ProviderConfig {
        ProviderConfig {
            installation: InstallationId::generate(),
            data_dir: directory.to_owned(),
            docker_host: None,
            nameservers: Vec::new(),
            probe_image: String::new(),
            room: RoomRules::default(),
            gvisor: false,
            plain_docker: false,
            firecracker: Some(ManagerAddress {
                url: "https://vm.example".to_owned(),
                token: Some("secret".into()),
                ca_certificate: None,
            }),
        }
    }

    /// Runs in a process of its own, because the certificates that the host trusts are found by variables.
    #[tokio::test]
    async fn a_host_without_ca_certificates_has_an_unhealthy_provider() {
        const ALONE: &str = "EMERGENT_TEST_ALONE";
        let directory = tempfile::tempdir().unwrap();
        if std::env::var_os(ALONE).is_none() {
            let name =
                "firecracker::provider::tests::a_host_without_ca_certificates_has_an_unhealthy_provider";
            let mut alone = Command::new(std::env::current_exe().unwrap());
            alone.env("SSL_CERT_FILE", "/dev/null").env("SSL_CERT_DIR", directory.path());
            assert!(alone.args(["--exact", name]).env(ALONE, "1").status().unwrap().success());
            return;
        }
        let providers = ProviderTable::standard().open(settings(directory.path())).unwrap();
        let problem = providers.get(ProviderName::Firecracker).unwrap().health().await.problem.unwrap();
        assert!(problem.contains("vm.example") && problem.contains("CA certificates"), "{problem}");
        assert!(problem.contains("FIRECRACKER_MANAGER_CA"), "{problem}");
    }
}
