//! Everything that the operations on microVMs share: the data directory's parts, the host's resources, the registry.

use std::fs;
use std::io;
use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use emergent_host::network::host_nameservers;
use emergent_host::process_lock::{NoLock, ProcessLock};
use emergent_host::room::Room;
use tokio::sync::Semaphore;

use crate::cgroup::Groups;
use crate::error::{HostError, ManagerError, on_host};
use crate::firewall::Firewall;
use crate::identity::Identity;
use crate::images::Images;
use crate::initrd;
use crate::interfaces::Interfaces;
use crate::jail::Jails;
use crate::kernel::Kernel;
use crate::options::ManagerOptions;
use crate::record::Records;
use crate::registry::Registry;
use crate::slot::{MOST, Naming, Slots};
use crate::snapshots::Snapshots;

/// The microVMs that start at the same time, for each CPU of the host.
const STARTS_PER_CPU: usize = 2;

/// The interfaces that are made before a microVM needs them, at least. The warm pool can raise the number.
const MIN_SPARE_INTERFACES: u32 = 4;

const OPENING: &str = "opening the data directory";

/// The parts of one manager.
pub(crate) struct Resources {
    pub(crate) options: ManagerOptions,
    pub(crate) data_dir: PathBuf,
    pub(crate) machines: Registry,
    pub(crate) records: Records,
    pub(crate) snapshots: Snapshots,
    pub(crate) images: Images,
    pub(crate) jails: Jails,
    pub(crate) initrd: PathBuf,
    pub(crate) kernel: Kernel,
    pub(crate) room: Room,
    pub(crate) naming: Naming,
    pub(crate) slots: Slots,
    pub(crate) interfaces: Interfaces,
    pub(crate) firewall: Firewall,
    /// Limits the microVMs that start at the same time. With more starts than CPUs, every start would time out.
    pub(crate) starts: Semaphore,
    /// The id of this run of the host.
    pub(crate) boot_id: String,
    /// A directory has one manager at a time.
    _lock: ProcessLock,
}

impl Resources {
    /// Opens the data directory. Jails contain hard links to disks, so all of it is on one file system. Blocks.
    pub(crate) fn open(data_dir: &Path, options: ManagerOptions) -> Result<Self, ManagerError> {
        use std::os::unix::fs::DirBuilderExt;
        let failed = |error: io::Error| {
            let message = format!("{}: {error}", data_dir.display());
            HostError::io(OPENING, io::Error::new(error.kind(), message))
        };
        fs::DirBuilder::new().recursive(true).mode(0o700).create(data_dir).map_err(failed)?;
        let canonical = data_dir.canonicalize().map_err(failed)?;
        let lock = match ProcessLock::wait(&canonical.join("lock")) {
            Ok(lock) => lock,
            Err(NoLock::Taken(_)) => return Err(ManagerError::DirectoryInUse(data_dir.to_owned())),
            Err(NoLock::Io(error)) => return Err(failed(error).into()),
        };
        Ok(Self::open_locked(canonical, options, lock).map_err(failed)?)
    }

    fn open_locked(data_dir: PathBuf, options: ManagerOptions, lock: ProcessLock) -> io::Result<Self> {
        let identity = Identity::load_or_choose(&data_dir)?;
        let naming = Naming { manager: identity.manager, network: identity.network };
        let initrd = data_dir.join("initrd");
        // Nothing is written if the file is up to date, so a manager can start on a full disk.
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
            machines: Registry::default(),
            records: Records::open(&data_dir)?,
            snapshots: Snapshots::open(&data_dir)?,
            images: Images::open(&data_dir)?,
            jails,
            initrd,
            kernel: Kernel::new(options.kernel.clone(), &data_dir),
            room: Room::new(&data_dir, options.room_rules()),
            naming,
            slots: Slots::new(options.max_vms.min(MOST)),
            interfaces: Interfaces::new(naming),
            firewall: Firewall::new(naming.prefix(), nameservers),
            starts: Semaphore::new(STARTS_PER_CPU * cpus()),
            boot_id: procfs::sys::kernel::random::boot_id().map_err(io::Error::other)?,
            _lock: lock,
            data_dir,
            options,
        })
    }

    /// The number of interfaces that are kept for the next microVMs.
    pub(crate) fn spare_interfaces(&self) -> u32 {
        MIN_SPARE_INTERFACES.max(self.options.warm_pool_size).min(self.slots.most())
    }

    /// Removes the interfaces of free slots, except those of the first `kept` slots.
    pub(crate) async fn remove_interfaces(self: &Arc<Self>, kept: u32) -> Result<(), HostError> {
        let resources = Arc::clone(self);
        on_host("removing interfaces", move || resources.interfaces.remove_unused(&resources.slots, kept))
            .await
    }

    /// Makes the interfaces that are kept for the next microVMs.
    pub(crate) async fn make_spare_interfaces(self: &Arc<Self>) -> Result<(), HostError> {
        let resources = Arc::clone(self);
        on_host("making spare interfaces", move || {
            resources.interfaces.make_spares(&resources.slots, resources.spare_interfaces())
        })
        .await
    }

    /// Sets the firewall's rules again, in case another program has removed them, if there are microVMs.
    pub(crate) async fn repair_rules(&self) -> Result<(), HostError> {
        if self.slots.count() > 0 { self.firewall.repair().await } else { Ok(()) }
    }

    /// Removes the resources that microVMs share, if no microVM uses them: interfaces, rules, the parent control group.
    pub(crate) async fn remove_shared(self: &Arc<Self>, kept_interfaces: u32) -> Result<(), HostError> {
        self.remove_interfaces(kept_interfaces).await?;
        let is_unused = || self.slots.count() == 0;
        self.firewall.remove_if(is_unused).await?;
        if !is_unused() {
            return Ok(());
        }
        let jails = self.jails.clone();
        on_host("removing control groups", move || jails.remove_parent_group()).await
    }
}

/// The number of CPUs that this process can use.
pub(crate) fn cpus() -> usize {
    std::thread::available_parallelism().map_or(1, NonZero::get)
}
