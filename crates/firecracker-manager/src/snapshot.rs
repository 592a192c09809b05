//! Makes a snapshot: a copy of a microVM's disk, and of its memory if that is asked for.
//!
//! ```text
//!  reserve space ─▶ flush ─▶ pause ─▶ copy memory, disk ─▶ unpause ─▶ write the description
//! ```
//!
//! The description is written last: a snapshot without one is incomplete, and is removed at the next start.

use std::time::Duration;

use emergent_failpoint::failpoint;
use emergent_host::copy::taken_bytes;
use emergent_host::room::Part;
use emergent_wire::SnapshotId;
use emergent_wire::manager::{MachinePhase, MachineSnapshot};

use crate::admission::RequestError;
use crate::error::{HostError, ManagerError, on_host};
use crate::jail::{MEMORY, STATE};
use crate::machine::{LockedMachine, StateError};
use crate::resources::Resources;
use crate::{disks, guest, pause};

/// The time limit for a connection to the agent.
const CONNECT_TIME: Duration = Duration::from_secs(20);

/// Makes a snapshot of a microVM that runs or is stopped. A running one is paused meanwhile.
pub(crate) async fn create(
    resources: &Resources,
    machine: &LockedMachine,
    to: SnapshotId,
    with_memory: bool,
) -> Result<MachineSnapshot, ManagerError> {
    let runs = match machine.phase() {
        MachinePhase::Running => true,
        MachinePhase::Stopped if with_memory => return Err(RequestError::NoMemoryToCopy.into()),
        MachinePhase::Stopped => false,
        phase => return Err(StateError::Busy(phase).into()),
    };
    let copy = SnapshotCopy { resources, machine, to, with_memory };
    // The steps that can be slow come before the pause.
    let space = copy.reserve_space().await?;
    if runs {
        guest::flush(&resources.jails.vsock(machine.id), CONNECT_TIME).await?;
        copy.pause().await?;
    }
    let copied = copy.copy_files().await;
    drop(space);
    let mut unpaused = Ok(());
    if runs {
        unpaused = pause::unpause(resources, machine, copied.is_ok()).await;
        failpoint!("manager.unpaused");
    }
    let described = async {
        let bytes = copied?;
        unpaused?;
        copy.describe(bytes).await
    };
    let described = described.await;
    if described.is_err() {
        copy.remove().await;
    }
    described
}

struct SnapshotCopy<'a> {
    resources: &'a Resources,
    machine: &'a LockedMachine,
    to: SnapshotId,
    with_memory: bool,
}

impl SnapshotCopy<'_> {
    async fn reserve_space(&self) -> Result<Part, HostError> {
        let (room, disk) = (self.resources.room.clone(), self.resources.records.disk(self.machine.id));
        let limits = self.machine.record().request.limits;
        let memory = if self.with_memory { limits.memory.bytes() } else { 0 };
        on_host("copying the microVM", move || room.take(taken_bytes(&disk)? + memory)).await
    }

    async fn pause(&self) -> Result<(), ManagerError> {
        if let Err(error) = pause::pause(self.resources, self.machine, self.with_memory).await {
            if let Err(error) = pause::unpause(self.resources, self.machine, false).await {
                tracing::warn!(machine = %self.machine.id, %error, "a microVM could not be unpaused; it is tried again");
            }
            return Err(error);
        }
        failpoint!("manager.paused");
        Ok(())
    }

    /// Returns the bytes that the copies occupy.
    async fn copy_files(&self) -> Result<u64, ManagerError> {
        let (id, to) = (self.machine.id, self.to);
        let mut bytes = 0;
        if self.with_memory {
            pause::copy_memory(self.resources, id).await?;
            failpoint!("manager.memory_copied");
            let jails = &self.resources.jails;
            let (state, memory) = (jails.file(id, STATE), jails.file(id, MEMORY));
            let snapshots = self.resources.snapshots.clone();
            bytes +=
                on_host("copying the memory", move || snapshots.take_memory(to, &state, &memory)).await?;
        }
        let (disk, file) = (self.resources.records.disk(id), self.resources.snapshots.file(to));
        bytes += on_host("copying the disk", move || disks::copy_of(&disk, &file)).await?;
        Ok(bytes)
    }

    async fn describe(&self, bytes: u64) -> Result<MachineSnapshot, ManagerError> {
        let request = self.machine.record().request;
        let snapshot = MachineSnapshot {
            id: self.to,
            installation: request.installation,
            image: request.image,
            bytes,
            disk: Some(request.limits.disk),
            memory_limits: self.with_memory.then_some(request.limits),
        };
        let (snapshots, described) = (self.resources.snapshots.clone(), snapshot.clone());
        on_host("writing the snapshot's description", move || snapshots.describe(&described)).await?;
        Ok(snapshot)
    }

    async fn remove(&self) {
        let (snapshots, to) = (self.resources.snapshots.clone(), self.to);
        if let Err(error) = on_host("removing a snapshot", move || snapshots.remove(to)).await {
            tracing::warn!(snapshot = %to, %error, "an incomplete snapshot could not be removed; the next start removes it");
        }
    }
}
