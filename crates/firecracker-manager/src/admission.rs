//! Checks that run before anything of a microVM is made, and the reservation of its slot.

use std::fs;
use std::path::PathBuf;

use emergent_host::memory::available_memory;
use emergent_wire::SnapshotId;
use emergent_wire::manager::{MachinePhase, MachineRequest};

use crate::error::{HostError, ManagerError, NotFound, on_host};
use crate::kvm;
use crate::machine::LockedMachine;
use crate::record::Record;
use crate::resources::Resources;

/// Why a request can't be met.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    /// The memory of a snapshot fits only a microVM of the same size.
    #[error(
        "a microVM that is made of a snapshot with memory must have the snapshot's limits: ask for the same limits or for \
         none"
    )]
    LimitsDifferFromSnapshot,
    /// The disk is smaller than the file system that is copied to it.
    #[error("the disk must have at least {mebibytes}M for this image")]
    DiskTooSmall {
        /// The smallest size.
        mebibytes: u64,
    },
    /// A stopped microVM has no memory.
    #[error("a microVM that does not run has no memory to copy: start it, or copy its disk alone")]
    NoMemoryToCopy,
}

/// The source that a microVM starts from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StartFrom {
    /// It boots its kernel.
    Kernel,
    /// It continues from the memory of a snapshot.
    Memory(SnapshotId),
}

/// The source of a new microVM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Source {
    /// The file system that is copied to its disk.
    pub(crate) disk: PathBuf,
    pub(crate) start_from: StartFrom,
}

/// Checks that this host can run microVMs.
pub(crate) async fn check_host(resources: &Resources) -> Result<(), ManagerError> {
    if resources.options.require_kvm {
        let device = resources.options.kvm_device.clone();
        let checked = on_host("checking KVM", move || Ok::<_, std::io::Error>(kvm::check(&device))).await?;
        checked?;
    }
    resources.kernel.get().await.map(drop)
}

/// Checks a request and finds its source.
pub(crate) fn check_request(resources: &Resources, request: &MachineRequest) -> Result<Source, ManagerError> {
    resources.images.get(&request.image)?;
    let source = match request.snapshot {
        None => Source { disk: resources.images.file(&request.image), start_from: StartFrom::Kernel },
        Some(id) => {
            let snapshot = resources.snapshots.get(id).map_err(|_| NotFound::Snapshot(id))?;
            let start_from = match snapshot.memory_limits {
                None => StartFrom::Kernel,
                Some(limits) if limits == request.limits => StartFrom::Memory(id),
                Some(_) => return Err(RequestError::LimitsDifferFromSnapshot.into()),
            };
            Source { disk: resources.snapshots.file(id), start_from }
        }
    };
    let smallest = fs::metadata(&source.disk).map_or(0, |found| found.len());
    check_disk_size(request.limits.disk.bytes(), smallest)?;
    Ok(source)
}

/// Checks that a file system of `smallest` bytes fits on a disk.
pub(crate) fn check_disk_size(bytes: u64, smallest: u64) -> Result<(), RequestError> {
    if bytes < smallest {
        return Err(RequestError::DiskTooSmall { mebibytes: smallest.div_ceil(1 << 20) });
    }
    Ok(())
}

/// Gives a microVM a slot and saves that in its record, with its new phase.
pub(crate) async fn reserve_slot(
    resources: &Resources,
    machine: &LockedMachine,
    phase: MachinePhase,
) -> Result<(), ManagerError> {
    let memory = machine.record().request.limits.memory.bytes();
    let index = resources.slots.take(memory, available_memory().unwrap_or(u64::MAX))?;
    let reserved = |record: &mut Record| {
        record.slot = Some(index);
        record.phase = phase;
        record.ended = None;
    };
    let saved: Result<Record, HostError> = machine.update(reserved).await;
    if saved.is_err() {
        // The file may have the slot in spite of the error. So the slot stays taken until a record without it is saved.
        let ending = |record: &mut Record| {
            record.slot = Some(index);
            record.phase = MachinePhase::Ending;
        };
        machine.update_even_unsaved(ending).await;
    }
    saved.map(drop).map_err(ManagerError::from)
}
