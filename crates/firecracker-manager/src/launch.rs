//! Starts a microVM: from a disk and a slot to an agent that answers.
//!
//! ```text
//!  interface, jail ─▶ firewall rules ─▶ jailer's process ─▶ boot.rs: Firecracker configured, guest started, agent ready
//! ```
//!
//! A launch that fails does not clean up. Its caller does (`shutdown::undo`).

use std::io;
use std::os::unix::process::CommandExt;
use std::sync::Arc;
use std::time::Duration;

use emergent_failpoint::failpoint;
use emergent_wire::manager::MachinePhase;
use emergent_wire::workspace::NetworkMode;
use tokio::net::UnixListener;

use crate::admission::StartFrom;
use crate::boot::Boot;
use crate::error::{HostError, ManagerError, on_host};
use crate::jail::Parts;
use crate::machine::{LockedMachine, StateError};
use crate::process::{self, Process};
use crate::record::Record;
use crate::resources::Resources;
use crate::slot::Slot;
use crate::{cgroup, console, initrd, socket, watch};

/// Why a microVM's process did not get ready.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// The jailer or Firecracker ended.
    #[error("{step}: {console}")]
    Ended {
        /// The step that it ended in.
        step: &'static str,
        /// The last lines of its console.
        console: String,
    },
    /// A step took too long.
    #[error("{step} did not end within {seconds} s{}", console.as_deref().map(|text| format!(": its console says: {text}")).unwrap_or_default())]
    TimedOut {
        /// The step.
        step: &'static str,
        /// The time limit.
        seconds: u64,
        /// The last lines of its console.
        console: Option<String>,
    },
}

impl LaunchError {
    pub(crate) fn ended(step: &'static str, console: Option<String>) -> Self {
        Self::Ended { step, console: console.unwrap_or_else(|| "its console says nothing".to_owned()) }
    }

    pub(crate) fn timed_out(step: &'static str, within: Duration, console: Option<String>) -> Self {
        Self::TimedOut { step, seconds: within.as_secs(), console }
    }
}

/// Starts a microVM that has a disk and a slot.
pub(crate) async fn launch(
    resources: &Arc<Resources>,
    machine: &LockedMachine,
    start_from: StartFrom,
) -> Result<(), ManagerError> {
    failpoint!("manager.configured");
    let record = machine.record();
    let index = record.slot.ok_or(StateError::NoSlot)?;
    let slot = resources.naming.slot(index);
    let launch = Launch { resources, machine, record: &record, slot: &slot };
    launch.make_interface_and_jail(start_from).await?;
    launch.set_rules().await?;
    let _start = resources.starts.acquire().await;
    let ready = launch.listen_for_agent()?;
    let process = launch.start_process().await?;
    let boot = Boot::new(resources, machine, &record, &slot);
    boot.run(process, start_from, &ready).await?;
    machine.update(|record| record.phase = MachinePhase::Running).await?;
    resources.slots.has_started(index);
    failpoint!("manager.running");
    watch::watch(resources, machine, process);
    Ok(())
}

struct Launch<'a> {
    resources: &'a Arc<Resources>,
    machine: &'a LockedMachine,
    record: &'a Record,
    slot: &'a Slot,
}

impl Launch<'_> {
    async fn make_interface_and_jail(&self, start_from: StartFrom) -> Result<(), ManagerError> {
        let kernel = self.resources.kernel.get().await?;
        let (resources, slot, id) = (Arc::clone(self.resources), self.slot.clone(), self.machine.id);
        let memory = match start_from {
            StartFrom::Kernel => None,
            StartFrom::Memory(snapshot) => Some(resources.snapshots.memory(snapshot)),
        };
        on_host("preparing the microVM's interface and jail", move || {
            resources.interfaces.ensure(&slot)?;
            initrd::ensure(&resources.initrd)?;
            let memory = memory.as_ref().map(|(state, memory)| (state.as_path(), memory.as_path()));
            let (initrd, disk) = (&resources.initrd, &resources.records.disk(id));
            resources.jails.make(id, &slot, &Parts { kernel: &kernel, initrd, disk, memory })
        })
        .await?;
        failpoint!("manager.jail_made");
        Ok(())
    }

    async fn set_rules(&self) -> Result<(), HostError> {
        let (firewall, slot) = (&self.resources.firewall, self.slot);
        match self.record.request.network {
            NetworkMode::Nat => firewall.admit(&slot.interface, slot.guest).await?,
            NetworkMode::Isolated => firewall.dismiss(&slot.interface).await?,
        }
        failpoint!("manager.rules_set");
        Ok(())
    }

    /// The socket that the agent connects to when it is ready.
    fn listen_for_agent(&self) -> Result<UnixListener, HostError> {
        let path = self.resources.jails.ready_socket(self.machine.id);
        let failed = |error| HostError::io("listening for the guest agent", error);
        let listener = socket::listen(&path).map_err(failed)?;
        std::os::unix::fs::chown(&path, Some(self.slot.uid), Some(self.slot.uid)).map_err(failed)?;
        Ok(listener)
    }

    /// Starts the jailer, which becomes Firecracker, and saves its process in the record.
    async fn start_process(&self) -> Result<Process, ManagerError> {
        let failed = |error| HostError::io("starting the jailer", error);
        let mut child = self.spawn_jailer().map_err(failed)?;
        failpoint!("manager.process_started");
        let process = child.id().map_or(Ok(None), |pid| Process::of(pid.cast_signed()));
        tokio::spawn(async move { child.wait().await });
        let ended = || LaunchError::ended("the jailer ended at once", self.machine.console_tail());
        let process = process.map_err(failed)?.ok_or_else(ended)?;
        self.machine
            .update(|record| {
                record.process = Some(process);
                record.boot = Some(self.resources.boot_id.clone());
            })
            .await?;
        failpoint!("manager.process_noted");
        Ok(process)
    }

    fn spawn_jailer(&self) -> io::Result<tokio::process::Child> {
        let console = console::make(&self.machine.console_path())?;
        self.machine.set_console(console.try_clone().ok());
        let limits = &self.record.request.limits;
        let mut command = self.resources.jails.command(self.machine.id, self.slot, limits, console)?;
        // A microVM outlives its manager, so it leaves the manager's session and all its control groups. The jailer moves it
        // only in the hierarchies that have limits.
        let root_groups = cgroup::root_group_files();
        // SAFETY: only system calls, between fork and exec.
        unsafe {
            command.pre_exec(move || {
                for file in &root_groups {
                    let _ = rustix::io::write(file, cgroup::WRITING_PROCESS);
                }
                process::raise_oom_score();
                rustix::process::setsid().map(drop).map_err(Into::into)
            });
        }
        tokio::process::Command::from(command).kill_on_drop(false).spawn()
    }
}
