//! Probes: test containers that show whether containers start. An engine that answers may still fail to start one.
//!
//! A probe has a label of its own. A probe that is older than any probe lives was left by a crash and is removed.

use std::collections::HashMap;
use std::time::{Duration, SystemTime};

use emergent_guest_client::GuestClient;
use emergent_wire::workspace::{ContainerType, NetworkMode, ResourceLimits};
use emergent_wire::{ByteSize, CpuCount, WorkspaceId};

use super::engine_error::EngineError;
use super::provider::ContainerProvider;
use super::{LABEL_INSTALLATION, spec};
use crate::error::ProviderError;
use crate::provider::WorkspaceProvider;
use crate::sandbox::SandboxSpec;

/// Time limit of a probe.
const PROBE_TIME: Duration = Duration::from_secs(15);
/// The longest life of a probe. An older one was left by a crash.
const PROBE_LIFE: Duration = Duration::from_secs(120);
/// The label with the installation that a probe belongs to.
const LABEL_PROBE: &str = "emergent.probe";
/// Memory of a probe: enough for the guest agent.
const PROBE_MEMORY: ByteSize = ByteSize::mib(256);

impl ContainerProvider {
    /// Runs a probe, unless a recent start has succeeded. Returns the reason of a failure.
    pub(super) async fn probe_unless_recent(&self) -> Option<String> {
        let _one_at_a_time = self.probing.lock().await;
        if self.starts.succeeded_recently() {
            return None;
        }
        if let Err(EngineError::NotFound(_)) = self.engine.image_id(&self.probe_image).await {
            // Without the probe's image there is no result: workspaces with other images may work.
            return None;
        }
        match self.probe().await {
            Ok(()) => {
                self.starts.record_success();
                None
            }
            Err(reason) => Some(format!("the engine answers but containers do not start: {reason}")),
        }
    }

    /// Starts a container, receives its agent's greeting, and removes it.
    async fn probe(&self) -> Result<(), String> {
        let name = self.probe_name();
        let probed = tokio::time::timeout(PROBE_TIME, self.start_probe(&name)).await;
        let removed = self.engine.remove(&name).await;
        match probed {
            Err(_) => Err(format!("a container did not start within {} s", PROBE_TIME.as_secs())),
            Ok(Err(error)) => Err(error.to_string()),
            Ok(Ok(())) => removed.map_err(|error| format!("a container can't be removed: {error}")),
        }
    }

    /// A name that no other server of the installation uses.
    fn probe_name(&self) -> String {
        format!("{}-probe-{}-{}", self.network.name, self.name(), std::process::id())
    }

    /// Removes the probes of crashed servers. `all` removes every probe, for the last server of the installation.
    pub(super) async fn remove_probes(&self, all: bool) -> Result<(), EngineError> {
        let label = format!("{LABEL_PROBE}={}", self.installation);
        let oldest = SystemTime::now() - PROBE_LIFE;
        for container in self.engine.containers(&label).await? {
            if all || container.created < oldest {
                self.engine.remove(&container.name).await?;
            }
        }
        Ok(())
    }

    async fn start_probe(&self, name: &str) -> Result<(), ProviderError> {
        let failed = |error: EngineError| ProviderError::failed("starting a container", error);
        self.engine.remove(name).await.map_err(failed)?;
        let guest = self.guest_volume().await?;
        let context = self.context(guest.as_ref()).await.map_err(failed)?;
        let spec = SandboxSpec {
            id: WorkspaceId::generate(),
            container_type: ContainerType::AgentWorkspace,
            image: self.probe_image.clone(),
            limits: ResourceLimits {
                cpu: CpuCount::whole(1),
                memory: PROBE_MEMORY,
                ..ResourceLimits::default()
            },
            max_tasks: 16,
            network: NetworkMode::Isolated,
            snapshot: None,
            volumes: Vec::new(),
            configuration: None,
        };
        let labels = HashMap::from([
            (LABEL_INSTALLATION.to_owned(), self.installation.to_string()),
            (LABEL_PROBE.to_owned(), self.installation.to_string()),
        ]);
        let body = spec::without_disk(&spec, &context, labels);
        self.engine.create(name, body).await.map_err(failed)?;
        if guest.is_none() {
            self.copy_guest_into(name).await?;
        }
        let attached = self.engine.attach(name).await.map_err(failed)?;
        self.engine.start(name).await.map_err(failed)?;
        let greeted = GuestClient::connect(attached.reader, attached.writer).await;
        greeted.map(drop).map_err(|error| ProviderError::failed("greeting the guest agent", error))
    }
}
