//! The manager's operations, as its HTTP front calls them. Each one locks its microVM and leaves the work to the module of
//! the operation.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use emergent_failpoint::failpoint;
use emergent_wire::id::InstallationId;
use emergent_wire::manager::{
    ImageSettings, Machine as MachineView, MachineImage, MachinePhase, MachineRequest, MachineSnapshot,
    ManagerHealth,
};
use emergent_wire::{SnapshotId, WorkspaceId};
use futures_util::Stream;
use tokio::net::UnixStream;

use crate::admission::{self, Source, StartFrom};
use crate::boot::vcpus;
use crate::disks::{growth_of, make_disk};
use crate::error::{HostError, ManagerError, on_host};
use crate::machine::{LockedMachine, Machine, StateError};
use crate::options::ManagerOptions;
use crate::process::Process;
use crate::record::Record;
use crate::recover::Recovery;
use crate::resources::Resources;
use crate::{guest, health, launch, pause, shutdown, snapshot};

/// The time limit for a connection to the agent of a microVM that runs.
const CONNECT_TIME: Duration = Duration::from_secs(20);

/// Creates, keeps and removes microVMs on one host.
pub struct Manager {
    resources: Arc<Resources>,
    recovery: Recovery,
}

impl Manager {
    /// Opens the manager of a data directory: disks, images, jails and records. MicroVMs of an earlier manager that run are
    /// adopted. Operations that it had begun are finished or undone in the background, and calls for their microVMs wait
    /// for that.
    pub async fn open(data_dir: &Path, options: ManagerOptions) -> Result<Arc<Self>, ManagerError> {
        let data_dir = data_dir.to_owned();
        let opened = tokio::task::spawn_blocking(move || Resources::open(&data_dir, options)).await;
        let aborted = |reason| HostError::Aborted { step: "opening the data directory", reason };
        let resources = Arc::new(opened.map_err(aborted)??);
        let recovery = Recovery::start(&resources).await?;
        Ok(Arc::new(Self { resources, recovery }))
    }

    /// Ends the background work and removes the resources that no microVM uses. MicroVMs keep running. Unfinished work is
    /// left to the next manager.
    pub async fn close(&self) -> Result<(), ManagerError> {
        self.recovery.abort().await;
        self.resources.interfaces.close();
        Ok(self.resources.remove_shared(0).await?)
    }

    /// The state of the manager and its host.
    pub async fn health(&self) -> ManagerHealth {
        health::report(&self.resources, self.recovery.is_running()).await
    }

    /// One microVM.
    pub fn get(&self, id: WorkspaceId) -> Result<MachineView, ManagerError> {
        Ok(self.view(&*self.resources.machines.get(id)?))
    }

    /// All microVMs, or those of one installation.
    pub fn list(&self, installation: Option<InstallationId>) -> Vec<MachineView> {
        let machines = self.resources.machines.all();
        let mut views: Vec<MachineView> = machines
            .iter()
            .map(|machine| self.view(machine))
            .filter(|view| installation.is_none_or(|wanted| wanted == view.installation))
            .collect();
        views.sort_by_key(|view| view.id);
        views
    }

    fn view(&self, machine: &Machine) -> MachineView {
        let record = machine.record();
        let slot = record.slot.map(|index| self.resources.naming.slot(index));
        MachineView {
            id: record.id,
            installation: record.request.installation,
            phase: record.phase,
            vcpus: vcpus(&record.request.limits),
            image: record.request.image,
            limits: record.request.limits,
            network: record.request.network,
            interface: slot.as_ref().map(|slot| slot.interface.clone()),
            address: slot.map(|slot| slot.guest),
            pid: record.process.map(|process| process.pid),
            ended: record.ended,
        }
    }

    /// Creates a microVM and starts it. An existing one is started if it does not run.
    pub async fn create(
        &self,
        id: WorkspaceId,
        request: MachineRequest,
    ) -> Result<MachineView, ManagerError> {
        admission::check_host(&self.resources).await?;
        let source = admission::check_request(&self.resources, &request)?;
        let new = || Machine::new(Record::new(id, request.clone()), self.resources.records.clone());
        let machine = self.resources.machines.lock_or_insert(id, new).await?;
        if machine.phase() != MachinePhase::Reserved {
            self.start_locked(&machine).await?;
            return Ok(self.view(&machine));
        }
        // Of concurrent requests for a new microVM, the first that gets the lock decides.
        machine.replace_record(Record::new(id, request.clone()));
        if let Err(error) = self.create_locked(&machine, source, &request).await {
            shutdown::undo(&self.resources, &machine, false).await;
            return Err(error);
        }
        Ok(self.view(&machine))
    }

    async fn create_locked(
        &self,
        machine: &LockedMachine,
        source: Source,
        request: &MachineRequest,
    ) -> Result<(), ManagerError> {
        admission::reserve_slot(&self.resources, machine, MachinePhase::Reserved).await?;
        failpoint!("manager.reserved");
        let (records, room) = (self.resources.records.clone(), self.resources.room.clone());
        let (disk, bytes) = (records.disk(machine.id), request.limits.disk.bytes());
        let others = move || growth_of(records.disks());
        on_host("making the disk", move || make_disk(&room, &disk, &source.disk, bytes, others)).await?;
        failpoint!("manager.disk_made");
        machine.update(|record| record.phase = MachinePhase::Configured).await?;
        launch::launch(&self.resources, machine, source.start_from).await
    }

    /// Starts a microVM that is stopped.
    pub async fn start(&self, id: WorkspaceId) -> Result<MachineView, ManagerError> {
        admission::check_host(&self.resources).await?;
        let machine = self.resources.machines.lock(id).await?;
        self.start_locked(&machine).await?;
        Ok(self.view(&machine))
    }

    async fn start_locked(&self, machine: &LockedMachine) -> Result<(), ManagerError> {
        let is_alive = machine.live_process().is_some();
        if is_alive {
            // An earlier snapshot may have failed to unpause it.
            pause::unpause(&self.resources, machine, false).await?;
        }
        match machine.phase() {
            MachinePhase::Running if is_alive => return Ok(()),
            MachinePhase::Stopped => {}
            phase @ (MachinePhase::Reserved | MachinePhase::Removing) => {
                return Err(StateError::Busy(phase).into());
            }
            // Its process has just ended, or an earlier cleanup failed.
            _ => shutdown::end_run(&self.resources, machine, Some(machine.end_reason())).await?,
        }
        admission::reserve_slot(&self.resources, machine, MachinePhase::Configured).await?;
        if let Err(error) = launch::launch(&self.resources, machine, StartFrom::Kernel).await {
            shutdown::undo(&self.resources, machine, true).await;
            return Err(error);
        }
        Ok(())
    }

    /// Stops a microVM. Its disk is kept.
    pub async fn stop(&self, id: WorkspaceId) -> Result<MachineView, ManagerError> {
        let machine = self.resources.machines.lock(id).await?;
        match machine.phase() {
            MachinePhase::Stopped => {}
            phase @ (MachinePhase::Reserved | MachinePhase::Removing) => {
                return Err(StateError::Busy(phase).into());
            }
            _ => shutdown::stop(&self.resources, &machine).await?,
        }
        Ok(self.view(&machine))
    }

    /// Removes a microVM and everything that belongs to it. One that does not exist counts as removed.
    pub async fn destroy(&self, id: WorkspaceId) -> Result<(), ManagerError> {
        match self.resources.machines.lock(id).await {
            Ok(machine) => shutdown::destroy(&self.resources, &machine).await,
            Err(ManagerError::NotFound(_)) => Ok(()),
            Err(ManagerError::Damaged(_)) => Ok(shutdown::remove_damaged(&self.resources, id).await?),
            Err(error) => Err(error),
        }
    }

    /// Lets a microVM run again, if it is paused.
    pub async fn unpause(&self, id: WorkspaceId) -> Result<MachineView, ManagerError> {
        let machine = self.resources.machines.lock(id).await?;
        pause::unpause(&self.resources, &machine, false).await?;
        Ok(self.view(&machine))
    }

    /// A connection to the agent of a microVM that runs.
    pub async fn channel(&self, id: WorkspaceId) -> Result<UnixStream, ManagerError> {
        let machine = self.resources.machines.get(id)?;
        let runs = |record: &Record| {
            record.phase == MachinePhase::Running && record.process.is_some_and(Process::is_alive)
        };
        if !runs(&machine.record()) {
            // A snapshot is being made of it, or its end is being cleaned up.
            drop(machine.lock().await);
        }
        let record = machine.record();
        if !runs(&record) {
            let reason = record.ended.unwrap_or_else(|| match record.phase {
                MachinePhase::Running => "its process has ended".to_owned(),
                phase => format!("it is {phase}"),
            });
            return Err(StateError::NotRunning(reason).into());
        }
        Ok(guest::connect(&self.resources.jails.vsock(id), CONNECT_TIME).await?)
    }

    /// An image that microVMs can be made of.
    pub fn image(&self, id: &str) -> Result<MachineImage, ManagerError> {
        Ok(self.resources.images.get(id)?)
    }

    /// Makes an image of an archive, unless it exists.
    pub async fn put_image(
        &self,
        id: &str,
        settings: ImageSettings,
        archive: impl Stream<Item = Result<Bytes, impl std::fmt::Display>> + Send,
    ) -> Result<MachineImage, ManagerError> {
        self.resources.images.put(id, settings, archive).await
    }

    /// Makes a snapshot of a microVM's disk, and of its memory if that is asked for.
    pub async fn snapshot(
        &self,
        id: WorkspaceId,
        to: SnapshotId,
        with_memory: bool,
    ) -> Result<MachineSnapshot, ManagerError> {
        let machine = self.resources.machines.lock(id).await?;
        snapshot::create(&self.resources, &machine, to, with_memory).await
    }

    /// All complete snapshots.
    pub async fn snapshots(&self) -> Result<Vec<MachineSnapshot>, ManagerError> {
        let snapshots = self.resources.snapshots.clone();
        Ok(on_host("listing snapshots", move || snapshots.list()).await?)
    }

    /// Removes a snapshot, complete or not.
    pub async fn remove_snapshot(&self, id: SnapshotId) -> Result<(), ManagerError> {
        let snapshots = self.resources.snapshots.clone();
        Ok(on_host("removing a snapshot", move || snapshots.remove(id)).await?)
    }

    /// Sets the firewall's rules again, and finishes operations that failed halfway. MicroVMs with another operation are
    /// left out.
    pub async fn repair(&self) -> Result<(), ManagerError> {
        let repaired = self.resources.repair_rules().await;
        for machine in self.resources.machines.all() {
            let Some(machine) = machine.try_lock() else {
                continue;
            };
            if let Err(error) = self.finish(&machine).await {
                tracing::warn!(machine = %machine.id, %error, "an operation on a microVM could not be finished; it is tried again");
            }
        }
        Ok(repaired?)
    }

    /// Finishes the operation that a microVM's phase shows.
    async fn finish(&self, machine: &LockedMachine) -> Result<(), ManagerError> {
        match machine.phase() {
            MachinePhase::Removing if self.resources.machines.contains(machine) => {
                Ok(shutdown::remove(&self.resources, machine).await?)
            }
            MachinePhase::Paused => pause::unpause(&self.resources, machine, false).await,
            MachinePhase::Ending => shutdown::end_run(&self.resources, machine, None).await,
            _ => Ok(()),
        }
    }

    /// Removes the resources that microVMs share, if no microVM uses them. The spare interfaces stay.
    pub async fn remove_shared_resources(&self) -> Result<(), ManagerError> {
        Ok(self.resources.remove_shared(self.resources.spare_interfaces()).await?)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use std::fs;
    use std::panic::{AssertUnwindSafe, resume_unwind};
    use std::path::PathBuf;
    use std::process::{Child, Command, Stdio};

    use futures_util::FutureExt;
    use serde_json::json;

    use super::*;
    use crate::record::tests::record;

    /// The files and the process of a microVM whose record has a network mode of a newer version.
    struct NewerMachine {
        id: WorkspaceId,
        directory: PathBuf,
        jail: PathBuf,
        process: Child,
    }

    impl NewerMachine {
        const SLOT: u32 = 1;

        fn create(data_dir: &Path) -> Self {
            let record = Record { phase: MachinePhase::Running, slot: Some(Self::SLOT), ..record() };
            let id = record.id;
            let mut newer = serde_json::to_value(record).unwrap();
            newer["request"]["network"] = json!("mesh");
            let directory = data_dir.join("machines").join(id.to_string());
            let jail = data_dir.join("jails/firecracker").join(id.to_string());
            fs::create_dir_all(&directory).unwrap();
            fs::create_dir_all(jail.join("root")).unwrap();
            fs::write(directory.join("machine.json"), newer.to_string()).unwrap();
            fs::write(directory.join("disk.ext4"), "files").unwrap();
            // Like Firecracker, it has the id as an argument.
            let process = Command::new("sh")
                .args(["-c", "read x", "sh", "--id", &id.to_string()])
                .stdin(Stdio::piped())
                .spawn()
                .unwrap();
            Self { id, directory, jail, process }
        }

        fn is_alive(&mut self) -> bool {
            self.process.try_wait().unwrap().is_none()
        }
    }

    impl Drop for NewerMachine {
        fn drop(&mut self) {
            let _ = self.process.kill();
            let _ = self.process.wait();
        }
    }

    #[tokio::test]
    async fn a_machine_with_a_damaged_record_keeps_its_resources_until_it_is_destroyed() {
        let directory = tempfile::tempdir().unwrap();
        let mut newer = NewerMachine::create(directory.path());
        let manager = Manager::open(directory.path(), ManagerOptions::default()).await.unwrap();
        let test = async {
            while manager.recovery.is_running() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            assert!(newer.is_alive() && newer.jail.exists(), "it is not a stray");
            assert!(!manager.resources.slots.is_free(NewerMachine::SLOT));
            let refused = manager.get(newer.id).unwrap_err();
            assert!(matches!(refused, ManagerError::Damaged(_)), "{refused}");
            let notes = manager.health().await.notes;
            assert!(notes.iter().any(|note| note.contains("can't be parsed: 1;")), "{notes:?}");
            manager.destroy(newer.id).await.unwrap();
            assert!(!newer.is_alive() && !newer.jail.exists() && !newer.directory.exists());
            assert!(manager.resources.slots.is_free(NewerMachine::SLOT));
            assert!(matches!(manager.get(newer.id), Err(ManagerError::NotFound(_))));
            manager.destroy(newer.id).await.unwrap();
        };
        let tested = AssertUnwindSafe(test).catch_unwind().await;
        // Interfaces and rules of a failed test are removed, too.
        manager.resources.slots.release(NewerMachine::SLOT);
        manager.close().await.unwrap();
        tested.unwrap_or_else(|panic| resume_unwind(panic));
    }
}
