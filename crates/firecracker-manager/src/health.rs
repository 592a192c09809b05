//! Whether microVMs can be made on this host, and how many more.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use emergent_wire::manager::{MachinePhase, MachineRequest, ManagerHealth};
use emergent_wire::workspace::AvailableResources;

use crate::cgroup::Groups;
use crate::error::{ManagerError, on_host};
use crate::kvm;
use crate::manager::{Manager, cpus, make_readable};
use crate::record::Record;

/// How long a program may take to say its version.
const VERSION_TIME: Duration = Duration::from_secs(10);

impl Manager {
    /// How the manager is doing.
    pub async fn health(&self) -> ManagerHealth {
        let mut errors = Vec::new();
        let (device, required) = (self.options.kvm_device.clone(), self.options.require_kvm);
        let kvm = on_host("trying KVM", move || Ok::<_, std::io::Error>(kvm::check(&device))).await;
        let kvm = kvm.map_err(|error| error.to_string()).and_then(|checked| checked);
        let kvm_available = kvm.is_ok();
        errors.extend(kvm.err().filter(|_| required));
        let mut version = async |program: &Path, setting: &str| match version_of(program).await {
            Ok(version) => Some(version),
            Err(error) => {
                errors.push(format!(
                    "{} can't be used: {error}; `emergent firecracker install` gets it, or name another with {setting}",
                    program.display()
                ));
                None
            }
        };
        let firecracker = version(&self.options.firecracker, "FIRECRACKER_BIN").await;
        let jailer = version(&self.options.jailer, "JAILER_BIN").await;
        if let Err(error) = self.kernel() {
            errors.push(error.to_string());
        }
        if !Path::new("/dev/net/tun").exists() {
            errors.push("/dev/net/tun does not exist: load the module tun".to_owned());
        }
        if !rustix::process::geteuid().is_root() {
            errors.push("the manager needs root for jails, interfaces and firewall rules".to_owned());
        }
        let mut notes = Vec::new();
        if self.jails.groups == Groups::None {
            notes.push("no control groups can be used: CPU and memory of microVMs' processes are not limited by them".to_owned());
        }
        let running =
            |record: &Record| record.phase == MachinePhase::Running || record.phase == MachinePhase::Paused;
        let active = self.machines().values().filter(|machine| running(&machine.record())).count();
        ManagerHealth {
            healthy: errors.is_empty(),
            kvm_available,
            firecracker,
            jailer,
            kernel: Some(self.options.kernel.display().to_string()),
            active_vms: u32::try_from(active).unwrap_or(u32::MAX),
            max_vms: self.slots.most(),
            warm_pool_size: self.options.warm_pool_size,
            available: self.available(),
            errors,
            notes,
        }
    }

    fn available(&self) -> AvailableResources {
        AvailableResources {
            cpus: u32::try_from(cpus()).unwrap_or(u32::MAX),
            memory_bytes: free_memory().unwrap_or(0),
            disk_bytes: rustix::fs::statvfs(&self.data_dir).map_or(0, |stat| stat.f_bavail * stat.f_frsize),
        }
    }

    /// Refuses to make a microVM where that can't work, with the words that say so.
    pub(crate) async fn check_usable(&self) -> Result<(), ManagerError> {
        if self.options.require_kvm {
            let device = self.options.kvm_device.clone();
            let checked = on_host("trying KVM", move || Ok::<_, std::io::Error>(kvm::check(&device))).await?;
            checked.map_err(ManagerError::Unavailable)?;
        }
        self.kernel().map(drop)
    }

    /// The kernel, where jails can link to it.
    pub(crate) fn kernel(&self) -> Result<PathBuf, ManagerError> {
        let own = self.data_dir.join("kernel");
        let given = &self.options.kernel;
        let missing = |error: std::io::Error| {
            ManagerError::Unavailable(format!(
                "the kernel {} can't be used: {error}; `emergent firecracker install` gets one, or name another with \
                 FIRECRACKER_KERNEL",
                given.display()
            ))
        };
        let found = fs::metadata(given).map_err(missing)?;
        let is_same =
            |kept: fs::Metadata| kept.len() == found.len() && kept.modified().ok() >= found.modified().ok();
        if !fs::metadata(&own).is_ok_and(is_same) {
            let unfinished = own.with_extension("new");
            fs::copy(given, &unfinished)
                .and_then(|_| make_readable(&unfinished))
                .and_then(|()| fs::rename(&unfinished, &own))
                .map_err(missing)?;
        }
        Ok(own)
    }

    /// Checks what can be known before anything is made, and gives the file that the disk is copied from.
    pub(crate) fn check_request(&self, request: &MachineRequest) -> Result<PathBuf, ManagerError> {
        self.images.get(&request.image)?;
        let source = match request.snapshot {
            None => self.images.file(&request.image),
            Some(id) => {
                self.snapshots.get(id).map_err(|_| ManagerError::NotFound(format!("copy {id}")))?;
                self.snapshots.file(id)
            }
        };
        let smallest = fs::metadata(&source).map_or(0, |found| found.len());
        if request.limits.disk.bytes() < smallest {
            return Err(ManagerError::Unacceptable(format!(
                "the disk must have at least {}M for this image",
                smallest.div_ceil(1 << 20)
            )));
        }
        Ok(source)
    }

    /// Refuses a microVM that the host has no memory for, before it is started.
    pub(crate) fn check_memory(&self, record: &Record) -> Result<(), ManagerError> {
        let wanted = record.request.limits.memory;
        match free_memory() {
            Some(free) if free < wanted.bytes() => Err(ManagerError::Full(format!(
                "the host has {} MiB of memory left, the microVM wants {} MiB: stop others, or ask for less",
                free >> 20,
                wanted.bytes() >> 20
            ))),
            _ => Ok(()),
        }
    }
}

fn free_memory() -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.split_ascii_whitespace().next()?.parse::<u64>().ok().map(|kib| kib * 1024)
}

/// What a program says its version is, such as `v1.16.1`.
async fn version_of(program: &Path) -> Result<String, String> {
    let mut command = tokio::process::Command::new(program);
    command.arg("--version").env_clear().stdin(Stdio::null()).kill_on_drop(true);
    let output = match tokio::time::timeout(VERSION_TIME, command.output()).await {
        Ok(output) => output.map_err(|error| error.to_string())?,
        Err(_) => return Err(format!("it does not say its version within {} s", VERSION_TIME.as_secs())),
    };
    let said = String::from_utf8_lossy(&output.stdout);
    let version = said.split_ascii_whitespace().find(|word| word.starts_with('v') && word.contains('.'));
    version.map(str::to_owned).ok_or_else(|| "it does not say its version".to_owned())
}
