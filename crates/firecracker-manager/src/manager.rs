//! The manager: which microVMs there are, and what they share.

use std::collections::HashMap;
use std::fs;
use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use emergent_host::network::host_nameservers;
use emergent_host::process_lock::{NoLock, ProcessLock};
use emergent_host::room::Room;
use emergent_wire::id::InstallationId;
use emergent_wire::manager::{
    ImageSettings, Machine as MachineView, MachineImage, MachinePhase, MachineSnapshot,
};
use emergent_wire::{SnapshotId, WorkspaceId};
use futures_util::Stream;
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;

use crate::cgroup::Groups;
use crate::error::{ManagerError, on_host};
use crate::firewall::Firewall;
use crate::identity::Identity;
use crate::images::Images;
use crate::interfaces::Interfaces;
use crate::jail::Jails;
use crate::kernel::Kernel;
use crate::machine::Machine;
use crate::options::ManagerOptions;
use crate::record::{Record, Records};
use crate::slot::{MOST, Naming, Slots};
use crate::snapshots::Snapshots;
use crate::{initrd, process};

/// So many start at once for each CPU of the host.
const STARTS_PER_CPU: usize = 2;

/// So many interfaces are there before microVMs are; more if more spares are kept. The others stay once they were made.
const INTERFACES_AHEAD: u32 = 4;

/// Makes, keeps and removes microVMs on one host.
pub struct Manager {
    pub(crate) data_dir: PathBuf,
    pub(crate) room: Room,
    pub(crate) options: ManagerOptions,
    pub(crate) naming: Naming,
    pub(crate) slots: Slots,
    pub(crate) firewall: Firewall,
    pub(crate) images: Images,
    pub(crate) records: Records,
    pub(crate) snapshots: Snapshots,
    pub(crate) jails: Jails,
    pub(crate) initrd: PathBuf,
    pub(crate) kernel: Kernel,
    /// Held by each microVM that starts: on a host that has more of them to start than CPUs, all would take too long.
    pub(crate) starts: Semaphore,
    /// Which run of the host this is.
    pub(crate) boot: String,
    pub(crate) interfaces: Interfaces,
    /// Looks after what an earlier manager left.
    pub(crate) recovery: Mutex<Option<JoinHandle<()>>>,
    machines: Mutex<HashMap<WorkspaceId, Arc<Machine>>>,
    /// Held as long as this manager lives: a directory has one.
    _lock: ProcessLock,
}

impl Manager {
    /// A manager of a directory, where disks, images, jails and records are kept (jails hold links to disks, so all of it
    /// is one file system). Takes back the microVMs of an earlier one; what that had begun and not ended is finished or
    /// undone in the background, and whoever asks for such a microVM waits for that.
    pub async fn open(data_dir: &Path, options: ManagerOptions) -> Result<Arc<Self>, ManagerError> {
        let data_dir = data_dir.to_owned();
        let prepared = tokio::task::spawn_blocking(move || Self::prepare(&data_dir, options)).await;
        let manager =
            prepared.map_err(|error| ManagerError::failed("opening the data directory", error))??;
        let manager = Arc::new(manager);
        manager.recover().await?;
        Ok(manager)
    }

    fn prepare(data_dir: &Path, options: ManagerOptions) -> Result<Self, ManagerError> {
        use std::os::unix::fs::DirBuilderExt;
        let shown = data_dir.display();
        let failed = |error: std::io::Error| {
            ManagerError::failed("opening the data directory", format!("{shown}: {error}"))
        };
        fs::DirBuilder::new().recursive(true).mode(0o700).create(data_dir).map_err(failed)?;
        let data_dir = data_dir.canonicalize().map_err(failed)?;
        let lock = match ProcessLock::wait(&data_dir.join("lock")) {
            Ok(lock) => lock,
            Err(NoLock::Taken(_)) => return Err(ManagerError::Taken(shown.to_string())),
            Err(NoLock::Io(error)) => return Err(failed(error)),
        };
        Self::set_up(data_dir, options, lock).map_err(failed)
    }

    fn set_up(data_dir: PathBuf, options: ManagerOptions, lock: ProcessLock) -> std::io::Result<Self> {
        let identity = Identity::load_or_choose(&data_dir)?;
        let naming = Naming { manager: identity.manager, network: identity.network };
        let initrd = data_dir.join("initrd");
        // Nothing is written where it is as it should be: also on a full disk there must be a manager.
        initrd::ensure(&initrd)?;
        let nameservers =
            if options.nameservers.is_empty() { host_nameservers() } else { options.nameservers.clone() };
        let jails = Jails {
            base: data_dir.join("jails"),
            firecracker: options.firecracker.clone(),
            jailer: options.jailer.clone(),
            groups: Groups::find(),
            parent_group: format!("emergent-fc{:06x}", identity.manager),
        };
        Ok(Self {
            naming,
            slots: Slots::new(options.max_vms.min(MOST)),
            firewall: Firewall::new(naming.prefix(), nameservers),
            images: Images::open(&data_dir)?,
            records: Records::open(&data_dir)?,
            snapshots: Snapshots::open(&data_dir)?,
            jails,
            initrd,
            kernel: Kernel::new(options.kernel.clone(), &data_dir),
            starts: Semaphore::new(STARTS_PER_CPU * cpus()),
            boot: process::boot()?,
            interfaces: Interfaces::new(naming),
            recovery: Mutex::default(),
            machines: Mutex::default(),
            _lock: lock,
            room: Room::new(&data_dir, options.room_rules()),
            data_dir,
            options,
        })
    }

    pub(crate) fn machines(&self) -> MutexGuard<'_, HashMap<WorkspaceId, Arc<Machine>>> {
        self.machines.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn machine(&self, id: WorkspaceId) -> Result<Arc<Machine>, ManagerError> {
        self.machines().get(&id).cloned().ok_or_else(|| ManagerError::NotFound(format!("microVM {id}")))
    }

    /// Whether a microVM is one that there is. Who has waited for its turn must ask: it may have been removed.
    pub(crate) fn has(&self, machine: &Arc<Machine>) -> bool {
        self.machines().get(&machine.id).is_some_and(|known| Arc::ptr_eq(known, machine))
    }

    /// The same, as an answer.
    pub(crate) fn check_known(&self, machine: &Arc<Machine>) -> Result<(), ManagerError> {
        if self.has(machine) {
            Ok(())
        } else {
            Err(ManagerError::NotFound(format!("microVM {}", machine.id)))
        }
    }

    /// One microVM.
    pub fn get(&self, id: WorkspaceId) -> Result<MachineView, ManagerError> {
        Ok(self.view(&self.machine(id)?.record()))
    }

    /// All microVMs of an installation, or of all.
    pub fn list(&self, installation: Option<InstallationId>) -> Vec<MachineView> {
        let records: Vec<Record> = self.machines().values().map(|machine| machine.record()).collect();
        let mut views: Vec<MachineView> = records
            .iter()
            .filter(|record| installation.is_none_or(|wanted| wanted == record.request.installation))
            .map(|record| self.view(record))
            .collect();
        views.sort_by_key(|view| view.id);
        views
    }

    pub(crate) fn view(&self, record: &Record) -> MachineView {
        let slot = record.slot.map(|index| self.naming.slot(index));
        MachineView {
            id: record.id,
            installation: record.request.installation,
            phase: record.phase,
            image: record.request.image.clone(),
            limits: record.request.limits,
            vcpus: vcpus(&record.request.limits),
            network: record.request.network,
            interface: slot.as_ref().map(|slot| slot.interface.clone()),
            address: slot.map(|slot| slot.guest),
            pid: record.process.map(|process| process.pid),
            ended: record.ended.clone(),
        }
    }

    /// An image that microVMs can be made of.
    pub fn image(&self, id: &str) -> Result<MachineImage, ManagerError> {
        self.images.get(id)
    }

    /// Makes an image out of an archive, unless it is there.
    pub async fn put_image(
        &self,
        id: &str,
        settings: ImageSettings,
        archive: impl Stream<Item = Result<Bytes, impl std::fmt::Display>> + Send,
    ) -> Result<MachineImage, ManagerError> {
        self.images.put(id, settings, archive).await
    }

    /// All copies of disks.
    pub async fn snapshots(&self) -> Result<Vec<MachineSnapshot>, ManagerError> {
        let snapshots = self.snapshots.clone();
        on_host("listing copies", move || snapshots.list()).await
    }

    /// Removes a copy of a disk.
    pub async fn remove_snapshot(&self, id: SnapshotId) -> Result<(), ManagerError> {
        let snapshots = self.snapshots.clone();
        on_host("removing a copy", move || snapshots.remove(id)).await
    }

    /// Puts back rules that somebody has taken away, while there is a microVM that needs them; and ends what could not be
    /// ended when it should have been.
    pub async fn repair(&self) -> Result<(), ManagerError> {
        let machines: Vec<Arc<Machine>> = self.machines().values().cloned().collect();
        let repaired = self.repair_rules().await;
        for machine in machines {
            // Somebody may be at it.
            let Ok(_operation) = machine.operation.try_lock() else {
                continue;
            };
            let done = match machine.record().phase {
                MachinePhase::Removing if self.has(&machine) => self.remove_locked(&machine).await,
                MachinePhase::Paused => self.let_go_on(&machine, false).await,
                MachinePhase::Ending => self.end_run(&machine, None).await,
                _ => Ok(()),
            };
            if let Err(error) = done {
                tracing::warn!(machine = %machine.id, %error, "what was begun with a microVM could not be ended");
            }
        }
        repaired
    }

    pub(crate) async fn repair_rules(&self) -> Result<(), ManagerError> {
        if self.slots.count() > 0 { self.firewall.repair().await } else { Ok(()) }
    }

    /// Removes what no microVM needs any more: interfaces, rules, control groups. Interfaces that are kept ahead stay.
    pub async fn retire(self: &Arc<Self>) -> Result<(), ManagerError> {
        self.remove_unused(self.interfaces_ahead()).await
    }

    /// Ends what is done in the background, and removes what no microVM needs. Those that run go on; what was not done
    /// with others is done by the next manager.
    pub async fn close(self: &Arc<Self>) -> Result<(), ManagerError> {
        let recovery = self.recovery.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(recovery) = recovery {
            recovery.abort();
            let _ = recovery.await;
        }
        self.interfaces.close();
        self.remove_unused(0).await
    }

    async fn remove_unused(self: &Arc<Self>, interfaces_but: u32) -> Result<(), ManagerError> {
        self.remove_interfaces(interfaces_but).await?;
        let is_unused = || self.slots.count() == 0;
        self.firewall.remove_if(is_unused).await?;
        if !is_unused() {
            return Ok(());
        }
        let jails = self.jails.clone();
        on_host("removing control groups", move || jails.retire()).await
    }

    pub(crate) fn interfaces_ahead(&self) -> u32 {
        INTERFACES_AHEAD.max(self.options.warm_pool_size).min(self.slots.most())
    }

    /// Removes the interfaces that nobody uses, but for those of the first slots.
    pub(crate) async fn remove_interfaces(self: &Arc<Self>, but: u32) -> Result<(), ManagerError> {
        let manager = Arc::clone(self);
        on_host("removing interfaces", move || manager.interfaces.remove_unused(&manager.slots, but)).await
    }
}

/// How many CPUs a microVM sees: what it may use, rounded up.
pub(crate) fn vcpus(limits: &emergent_wire::workspace::ResourceLimits) -> u32 {
    limits.cpu.millis().div_ceil(1000).clamp(1, 32)
}

/// The CPUs of the host that this process may use.
pub(crate) fn cpus() -> usize {
    std::thread::available_parallelism().map_or(1, NonZero::get)
}
