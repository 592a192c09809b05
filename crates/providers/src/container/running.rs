//! The processes of running containers: recorded at their start, killed without the engine.

use std::time::Duration;

use emergent_wire::WorkspaceId;

use super::agent_priority::prefer_agent_over_commands;
use super::disk_watch::RootLayer;
use super::host::run_blocking;
use super::name_of;
use super::oom::KillCounter;
use super::processes::ContainerProcesses;
use super::provider::{ContainerProvider, Runtime};
use crate::error::ProviderError;

/// Time limit of the engine for naming a container's processes, and for noticing that they have ended.
const NOTICE_TIME: Duration = Duration::from_secs(5);

impl ContainerProvider {
    /// Records a container's control group and root layer. Returns the process of gVisor.
    pub(super) async fn record_processes(&self, id: WorkspaceId) -> Option<i32> {
        let found = self.engine.inspect(&name_of(id)).await.ok()?;
        if let Some(layer) = RootLayer::of(&found) {
            self.running.root_layers.lock().insert(id, layer);
        }
        let pid = i32::try_from(found.state?.pid?).ok().filter(|pid| *pid > 0)?;
        if let Some(known) = ContainerProcesses::of(pid, &found.id?) {
            self.running.processes.lock().insert(id, known);
        }
        Some(pid).filter(|_| self.runtime == Runtime::Gvisor)
    }

    /// Gives gVisor and the agent priority over the commands that start later, and records the counter of OOM kills.
    pub(super) fn prioritize_agent(&self, id: WorkspaceId, pid: i32) {
        if let Err(error) = prefer_agent_over_commands(pid) {
            tracing::debug!(workspace = %id, %error, "the sandbox's commands compete with its agent for CPU and memory");
        }
        if let Some(counter) = KillCounter::of(pid) {
            self.running.kill_counters.lock().insert(id, counter);
        }
    }

    /// Kills all processes of a container by its control group, and waits until the engine notices. The engine itself may hang
    /// forever if it is asked to kill a container that has just ended: its helper process (the shim) does not answer then. A
    /// container without a control group of its own is left to the engine.
    pub(super) async fn kill_processes(&self, id: WorkspaceId) -> Result<(), ProviderError> {
        if !self.running.processes.lock().contains_key(&id) {
            let _ = tokio::time::timeout(NOTICE_TIME, self.record_processes(id)).await;
        }
        self.running.root_layers.lock().remove(&id);
        let Some(known) = self.running.processes.lock().remove(&id) else {
            return Ok(());
        };
        let shim = known.shim.clone();
        run_blocking("killing the sandbox's processes", move || known.kill()).await?;
        if self.engine.wait_until_ended(&name_of(id), NOTICE_TIME).await {
            return Ok(());
        }
        tracing::warn!(workspace = %id, "the engine does not notice that a container has ended; killing its shim");
        if let Some(shim) = shim {
            run_blocking("killing the container's shim", move || shim.kill()).await?;
        }
        Ok(())
    }
}
