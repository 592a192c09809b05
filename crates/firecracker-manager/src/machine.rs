//! One microVM: what is done to it, one thing at a time. Each step can be undone, and all of them are when one fails.

use std::fs::File;
use std::os::unix::process::CommandExt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use emergent_failpoint::failpoint;
use emergent_guest_protocol::MachineCall;
use emergent_host::copy::taken_bytes;
use emergent_host::files::remove_if_there;
use emergent_wire::manager::{Machine as MachineView, MachinePhase, MachineRequest, MachineSnapshot};
use emergent_wire::workspace::NetworkMode;
use emergent_wire::{SnapshotId, WorkspaceId};
use rustix::process::Signal;
use serde_json::json;
use tokio::net::{UnixListener, UnixStream};

use crate::disks::{growth_of, make_disk};
use crate::error::{ManagerError, on_host};
use crate::jail::{DISK, INITRD, KERNEL, MEMORY, Parts, STATE, VSOCK};
use crate::manager::{Manager, vcpus};
use crate::process::{self, Process};
use crate::record::Record;
use crate::slot::{NoSlot, PREFIX, Slot};
use crate::vmm::{self, Vmm};
use crate::{cgroup, console, disks, guest, health, initrd, socket};

/// How long Firecracker may take to listen.
const API_TIME: Duration = Duration::from_secs(20);
/// How long processes have between SIGTERM and SIGKILL when a microVM is stopped.
const STOP_GRACE: Duration = Duration::from_secs(8);
/// How long a microVM has to end by itself once it was asked to.
const END_TIME: Duration = Duration::from_secs(5);
/// How long a killed process may take to be gone.
const KILL_TIME: Duration = Duration::from_secs(10);
/// How long a connection to a microVM that runs may take.
const CONNECT_TIME: Duration = Duration::from_secs(20);
/// The kernel's arguments: messages only when it fails, and a failure ends the machine. Time is told by the agent's
/// manager, and what can't be there is not looked for.
const KERNEL_ARGUMENTS: &str = "console=ttyS0 quiet loglevel=1 reboot=k panic=1 pci=off i8042.noaux i8042.nomux i8042.nopnp \
                                i8042.dumbkbd ipv6.disable=1";

/// How a microVM begins to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Begin {
    /// With its kernel.
    Boot,
    /// Where the one was that its memory is a copy of.
    Copy(SnapshotId),
}

/// A microVM.
pub(crate) struct Machine {
    pub(crate) id: WorkspaceId,
    record: Mutex<Record>,
    /// Held by whoever changes it.
    pub(crate) operation: Arc<tokio::sync::Mutex<()>>,
    /// Kept open, so that what was printed is there when the process is not.
    console: Mutex<Option<File>>,
}

impl Machine {
    pub(crate) fn new(record: Record) -> Arc<Self> {
        let (operation, console) = (Arc::default(), Mutex::default());
        Arc::new(Self { id: record.id, record: Mutex::new(record), operation, console })
    }

    /// What is known of it now.
    pub(crate) fn record(&self) -> Record {
        self.record.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set_record(&self, record: Record) {
        *self.record.lock().unwrap_or_else(PoisonError::into_inner) = record;
    }

    fn set_console(&self, console: Option<File>) {
        *self.console.lock().unwrap_or_else(PoisonError::into_inner) = console;
    }
}

impl Manager {
    /// Changes what is written down of a microVM, before it is done.
    pub(crate) async fn note(
        &self,
        machine: &Machine,
        change: impl FnOnce(&mut Record),
    ) -> Result<Record, ManagerError> {
        let mut record = machine.record();
        change(&mut record);
        let (records, saved) = (self.records.clone(), record.clone());
        on_host("writing down what a microVM is", move || records.save(&saved)).await?;
        machine.set_record(record.clone());
        Ok(record)
    }

    /// Makes a microVM and starts it. One that is there is started, or left as it is when it runs.
    pub async fn create(
        self: &Arc<Self>,
        id: WorkspaceId,
        request: MachineRequest,
    ) -> Result<MachineView, ManagerError> {
        self.check_usable().await?;
        let (source, begin) = self.check_request(&request)?;
        let (machine, _operation) = loop {
            let new = || Machine::new(Record::new(id, request.clone()));
            let machine = Arc::clone(self.machines().entry(id).or_insert_with(new));
            let operation = Arc::clone(&machine.operation).lock_owned().await;
            // Else it was being removed, and is made anew.
            if self.has(&machine) {
                break (machine, operation);
            }
        };
        if machine.record().phase != MachinePhase::Reserved {
            return self.start_locked(&machine).await;
        }
        // Whoever is at it first makes it, and as he asks.
        machine.set_record(Record::new(id, request.clone()));
        let created = async {
            self.reserve(&machine, MachinePhase::Reserved).await?;
            failpoint!("manager.reserved");
            let (disk, bytes) = (self.records.disk(id), request.limits.disk.bytes());
            let (room, records) = (self.room.clone(), self.records.clone());
            let others = move || growth_of(records.disks());
            on_host("making the disk", move || make_disk(&room, &disk, &source, bytes, others)).await?;
            failpoint!("manager.disk_made");
            self.note(&machine, |record| record.phase = MachinePhase::Configured).await?;
            self.begin(&machine, begin).await
        };
        match created.await {
            Ok(()) => Ok(self.view(&machine.record())),
            Err(error) => {
                if let Err(problem) = self.remove_locked(&machine).await {
                    tracing::warn!(machine = %id, error = %problem, "what was made of a microVM could not be removed; it is tried again");
                }
                Err(error)
            }
        }
    }

    /// Gives a microVM a slot, in writing, and the phase that it has one in.
    async fn reserve(&self, machine: &Machine, phase: MachinePhase) -> Result<(), ManagerError> {
        let wanted = machine.record().request.limits.memory.bytes();
        let index = self.slots.take(wanted, health::free_memory().unwrap_or(u64::MAX)).map_err(|refused| {
            ManagerError::Full(match refused {
                NoSlot::Full => format!(
                    "all {} slots for microVMs are taken: stop or destroy some, or raise FIRECRACKER_MAX_VMS",
                    self.slots.most()
                ),
                NoSlot::Memory(left) => format!(
                    "the host has {} MiB of memory left, the microVM wants {} MiB: stop others, or ask for less",
                    left >> 20,
                    wanted >> 20
                ),
            })
        })?;
        let reserved = |record: &mut Record| {
            record.slot = Some(index);
            record.phase = phase;
            record.ended = None;
        };
        let noted = self.note(machine, reserved).await;
        if noted.is_err() {
            // It may be written all the same: the slot is this one's until it is written that it is not.
            let unused = |record: &mut Record| {
                record.slot = Some(index);
                record.phase = MachinePhase::Ending;
            };
            self.intend(machine, unused).await;
        }
        noted.map(drop)
    }

    /// Starts a microVM that was stopped.
    pub async fn start(self: &Arc<Self>, id: WorkspaceId) -> Result<MachineView, ManagerError> {
        self.check_usable().await?;
        let machine = self.machine(id)?;
        let _operation = machine.operation.lock().await;
        self.check_known(&machine)?;
        self.start_locked(&machine).await
    }

    async fn start_locked(self: &Arc<Self>, machine: &Arc<Machine>) -> Result<MachineView, ManagerError> {
        let lives = machine.record().process.is_some_and(Process::is_alive);
        if lives {
            // It could not go on after a copy.
            self.let_go_on(machine, false).await?;
        }
        let record = machine.record();
        match record.phase {
            MachinePhase::Running if lives => return Ok(self.view(&record)),
            MachinePhase::Stopped => {}
            phase @ (MachinePhase::Reserved | MachinePhase::Removing) => {
                return Err(ManagerError::WrongState(format!("the microVM is {phase}: try again")));
            }
            // It has just ended, and nobody has looked after it yet; or an earlier run could not be ended.
            _ => self.end_run(machine, Some(self.why_ended(machine))).await?,
        }
        self.reserve(machine, MachinePhase::Configured).await?;
        if let Err(error) = self.begin(machine, Begin::Boot).await {
            if let Err(problem) = self.end_run(machine, None).await {
                tracing::warn!(machine = %machine.id, error = %problem, "what was started could not be ended");
            }
            return Err(error);
        }
        Ok(self.view(&machine.record()))
    }

    /// From a disk and a slot to an agent that answers.
    async fn begin(self: &Arc<Self>, machine: &Arc<Machine>, begin: Begin) -> Result<(), ManagerError> {
        let (id, record) = (machine.id, machine.record());
        failpoint!("manager.configured");
        let index =
            record.slot.ok_or_else(|| ManagerError::WrongState("the microVM has no slot".to_owned()))?;
        let slot = self.naming.slot(index);
        let kernel = self.kernel.get().await?;
        let (manager, jailed) = (Arc::clone(self), slot.clone());
        let copy = match begin {
            Begin::Boot => None,
            Begin::Copy(snapshot) => Some(self.snapshots.memory(snapshot)),
        };
        on_host("preparing the microVM's interface and jail", move || {
            manager.interfaces.ensure(&jailed)?;
            initrd::ensure(&manager.initrd)?;
            let copy = copy.as_ref().map(|(state, memory)| (state.as_path(), memory.as_path()));
            let (initrd, disk) = (&manager.initrd, &manager.records.disk(id));
            manager.jails.make(id, &jailed, &Parts { kernel: &kernel, initrd, disk, copy })
        })
        .await?;
        failpoint!("manager.jail_made");
        match record.request.network {
            NetworkMode::Nat => self.firewall.admit(&slot.interface, slot.guest).await?,
            NetworkMode::Isolated => self.firewall.dismiss(&slot.interface).await?,
        }
        failpoint!("manager.rules_set");
        let _starting = self.starts.acquire().await;
        let ready = self.listen_for_ready(id, &slot)?;
        let process = self.spawn(machine, &slot, &record).await?;
        self.bring_up(machine, &record, &slot, process, begin, ready).await?;
        self.note(machine, |record| record.phase = MachinePhase::Running).await?;
        self.slots.has_started(index);
        failpoint!("manager.running");
        self.watch(machine, process);
        Ok(())
    }

    fn listen_for_ready(&self, id: WorkspaceId, slot: &Slot) -> Result<UnixListener, ManagerError> {
        let path = self.jails.ready_socket(id);
        let failed = |error: std::io::Error| ManagerError::failed("listening for the guest agent", error);
        let listener = socket::listen(&path).map_err(failed)?;
        std::os::unix::fs::chown(&path, Some(slot.uid), Some(slot.uid)).map_err(failed)?;
        Ok(listener)
    }

    async fn spawn(&self, machine: &Machine, slot: &Slot, record: &Record) -> Result<Process, ManagerError> {
        let console = console::make(&self.records.of(machine.id).join("console"));
        let failed = |error: std::io::Error| ManagerError::failed("starting the jailer", error);
        let console = console.map_err(failed)?;
        machine.set_console(console.try_clone().ok());
        let mut command =
            self.jails.command(machine.id, slot, &record.request.limits, console).map_err(failed)?;
        // A microVM outlives its manager, and what is typed at the manager's terminal is not for it. The jailer puts it into
        // groups of its own, but only in the trees that limit something.
        let ways_out = cgroup::ways_out();
        // SAFETY: only system calls, between fork and exec.
        unsafe {
            command.pre_exec(move || {
                for way in &ways_out {
                    let _ = rustix::io::write(way, cgroup::SELF);
                }
                process::offer_to_end();
                rustix::process::setsid().map(drop).map_err(Into::into)
            });
        }
        let mut child = tokio::process::Command::from(command).kill_on_drop(false).spawn().map_err(failed)?;
        failpoint!("manager.process_started");
        let process = child.id().map_or(Ok(None), |pid| Process::of(pid.cast_signed()));
        tokio::spawn(async move { child.wait().await });
        let process =
            process.map_err(failed)?.ok_or_else(|| self.told("the jailer ended at once", machine))?;
        self.note(machine, |record| {
            record.process = Some(process);
            record.boot = Some(self.boot.clone());
        })
        .await?;
        failpoint!("manager.process_noted");
        Ok(process)
    }

    /// Configures a microVM that waits for it, starts it, and waits for its agent.
    async fn bring_up(
        &self,
        machine: &Machine,
        record: &Record,
        slot: &Slot,
        process: Process,
        begin: Begin,
        ready: UnixListener,
    ) -> Result<(), ManagerError> {
        let within = self.options.boot_timeout();
        let api = self.jails.api(machine.id);
        let configured = async {
            match tokio::time::timeout(API_TIME, vmm::listens(&api)).await {
                Ok(appeared) => {
                    appeared.map_err(|error| ManagerError::failed("waiting for Firecracker", error))?;
                }
                Err(_) => return Err(self.late("Firecracker's start", API_TIME, machine)),
            }
            let vmm = Vmm::at(api.clone());
            match begin {
                Begin::Boot => {
                    self.configure(&vmm, record, slot).await?;
                    failpoint!("manager.vmm_configured");
                    vmm.start().await?;
                    failpoint!("manager.machine_started");
                    match tokio::time::timeout(within, ready.accept()).await {
                        Ok(accepted) => {
                            accepted.map_err(|error| {
                                ManagerError::failed("waiting for the guest agent", error)
                            })?;
                        }
                        Err(_) => return Err(self.late("the start of the guest agent", within, machine)),
                    }
                }
                Begin::Copy(_) => {
                    vmm.load_memory(STATE, MEMORY, &slot.interface).await?;
                    failpoint!("manager.memory_loaded");
                }
            }
            failpoint!("manager.agent_ready");
            let identity = self.identity(record, slot)?;
            guest::identify(&self.jails.vsock(machine.id), identity, within).await
        };
        tokio::select! {
            biased;
            configured = configured => configured,
            () = process.ended() => Err(self.told("the microVM ended before its agent was ready", machine)),
        }
    }

    async fn configure(&self, vmm: &Vmm, record: &Record, slot: &Slot) -> Result<(), ManagerError> {
        let limits = &record.request.limits;
        let memory_mib = limits.memory.bytes().div_ceil(1 << 20);
        let arguments = format!("{KERNEL_ARGUMENTS} {}", self.options.kernel_arguments);
        let settings = [
            ("/machine-config", json!({ "vcpu_count": vcpus(limits), "mem_size_mib": memory_mib })),
            (
                "/boot-source",
                json!({ "kernel_image_path": KERNEL, "initrd_path": INITRD, "boot_args": arguments.trim() }),
            ),
            (
                "/drives/root",
                json!({ "drive_id": "root", "path_on_host": DISK, "is_root_device": false, "is_read_only": false, "cache_type": "Writeback" }),
            ),
            (
                "/network-interfaces/eth0",
                json!({ "iface_id": "eth0", "host_dev_name": slot.interface, "guest_mac": slot.mac }),
            ),
            ("/vsock", json!({ "guest_cid": 3, "uds_path": VSOCK })),
            ("/entropy", json!({})),
        ];
        for (path, setting) in &settings {
            vmm.put(path, setting).await?;
        }
        Ok(())
    }

    fn identity(&self, record: &Record, slot: &Slot) -> Result<MachineCall, ManagerError> {
        let id = record.id.0.simple().to_string();
        let image = self.images.get(&record.request.image)?;
        let is_open = record.request.network == NetworkMode::Nat;
        Ok(MachineCall {
            // The end of an id is its random part.
            hostname: id[id.len() - 12..].to_owned(),
            machine_id: id,
            mac: Some(slot.mac.clone()),
            address: Some(slot.guest),
            prefix: PREFIX,
            gateway: is_open.then_some(slot.host),
            nameservers: if is_open { self.firewall.nameservers() } else { Vec::new() },
            environment: image.settings.environment,
            ..MachineCall::default()
        })
    }

    fn console_tail(&self, machine: &Machine) -> Option<String> {
        console::tail(&self.records.of(machine.id).join("console"))
    }

    /// Why a microVM does not run that was not told to end.
    fn why_ended(&self, machine: &Machine) -> String {
        let said = self.console_tail(machine).map_or_else(String::new, |text| format!(": {text}"));
        format!("its process has ended{said}")
    }

    fn told(&self, what: &'static str, machine: &Machine) -> ManagerError {
        let said = self.console_tail(machine);
        ManagerError::failed(what, said.unwrap_or_else(|| "its console says nothing".to_owned()))
    }

    fn late(&self, what: &'static str, within: Duration, machine: &Machine) -> ManagerError {
        let detail = self.console_tail(machine).map(|text| format!("its console says: {text}"));
        ManagerError::TimedOut { what, seconds: within.as_secs(), detail }
    }

    /// Looks after a microVM that ends without being told to.
    pub(crate) fn watch(self: &Arc<Self>, machine: &Arc<Machine>, process: Process) {
        let (manager, machine) = (Arc::downgrade(self), Arc::clone(machine));
        tokio::spawn(async move {
            process.ended().await;
            let Some(manager) = manager.upgrade() else {
                return;
            };
            let _operation = machine.operation.lock().await;
            if manager.has(&machine) && machine.record().process == Some(process) {
                let why = manager.why_ended(&machine);
                if matches!(machine.record().phase, MachinePhase::Running | MachinePhase::Paused) {
                    tracing::warn!(machine = %machine.id, why, "a microVM has ended");
                }
                if let Err(error) = manager.end_run(&machine, Some(why)).await {
                    tracing::warn!(machine = %machine.id, %error, "what is left of a microVM's run could not be removed");
                }
            }
        });
    }

    /// Ends a run, whatever is left of it: process, jail, control groups, rules, slot. The disk stays, unless the microVM is
    /// to be removed.
    pub(crate) async fn end_run(&self, machine: &Machine, why: Option<String>) -> Result<(), ManagerError> {
        if machine.record().phase == MachinePhase::Removing {
            return self.remove_locked(machine).await;
        }
        self.note_end(machine, why).await;
        self.remove_run(machine).await?;
        let slot = machine.record().slot;
        self.note(machine, |record| {
            record.process = None;
            record.slot = None;
            record.phase = MachinePhase::Stopped;
        })
        .await?;
        // Only now: as long as it is written that a slot is this one's, nobody else's may be in it.
        if let Some(index) = slot {
            self.slots.release(index);
        }
        Ok(())
    }

    /// Removes all that a run has made. What is written of it stays.
    async fn remove_run(&self, machine: &Machine) -> Result<(), ManagerError> {
        let record = machine.record();
        let id = machine.id;
        let mut processes: Vec<Process> = record.process.into_iter().collect();
        if record.process.is_none() {
            // It may have been started and not written down.
            processes =
                on_host("looking for processes", move || process::of_machine(&id.to_string())).await?;
        }
        for process in processes {
            kill(process).await?;
        }
        failpoint!("manager.process_killed");
        let jails = self.jails.clone();
        on_host("removing the jail", move || jails.remove(id)).await?;
        failpoint!("manager.jail_removed");
        if let Some(index) = record.slot {
            self.firewall.dismiss(&self.naming.slot(index).interface).await?;
            failpoint!("manager.rules_removed");
        }
        machine.set_console(None);
        Ok(())
    }

    /// Stops a microVM; its disk is kept.
    pub async fn stop(&self, id: WorkspaceId) -> Result<MachineView, ManagerError> {
        let machine = self.machine(id)?;
        let _operation = machine.operation.lock().await;
        self.check_known(&machine)?;
        match machine.record().phase {
            MachinePhase::Stopped => {}
            phase @ (MachinePhase::Reserved | MachinePhase::Removing) => {
                return Err(ManagerError::WrongState(format!("the microVM is {phase}: try again")));
            }
            _ => self.stop_locked(&machine).await?,
        }
        Ok(self.view(&machine.record()))
    }

    /// The same for one that is being stopped already, too.
    pub(crate) async fn stop_locked(&self, machine: &Machine) -> Result<(), ManagerError> {
        if let Some(process) = machine.record().process.filter(|process| process.is_alive()) {
            if let Err(error) = self.let_go_on(machine, false).await {
                tracing::warn!(machine = %machine.id, %error, "a microVM that was being copied does not go on");
            }
            self.note_end(machine, None).await;
            failpoint!("manager.end_noted");
            self.ask_to_end(machine.id, process, STOP_GRACE).await;
        }
        self.end_run(machine, None).await
    }

    /// Asks a microVM to end, and waits a while: its agent, or, where that does not listen, its kernel, by keys that not
    /// every kernel looks at.
    async fn ask_to_end(&self, id: WorkspaceId, process: Process, grace: Duration) {
        let vsock = self.jails.vsock(id);
        let ask = async {
            guest::power_off(&vsock, grace).await;
            if let Err(error) = Vmm::at(self.jails.api(id)).press_restart_keys().await {
                tracing::debug!(machine = %id, %error, "a microVM could not be asked to end");
            }
            std::future::pending::<()>().await;
        };
        let ended = async {
            tokio::select! {
                () = process.ended() => {}
                () = ask => {}
            }
        };
        if tokio::time::timeout(grace + END_TIME, ended).await.is_err() {
            tracing::info!(machine = %id, "a microVM did not end when it was asked to and is killed");
        }
    }

    /// Removes a microVM and everything that belongs to it. One that is not there is removed.
    pub async fn destroy(&self, id: WorkspaceId) -> Result<(), ManagerError> {
        let Ok(machine) = self.machine(id) else {
            return Ok(());
        };
        let _operation = machine.operation.lock().await;
        if !self.has(&machine) {
            return Ok(());
        }
        let record = machine.record();
        if record.phase == MachinePhase::Running
            && let Some(process) = record.process.filter(|process| process.is_alive())
        {
            self.intend(&machine, |record| record.phase = MachinePhase::Removing).await;
            failpoint!("manager.removal_noted");
            // Whoever wants it removed has given its commands their time.
            self.ask_to_end(id, process, Duration::ZERO).await;
        }
        self.remove_locked(&machine).await
    }

    pub(crate) async fn remove_locked(&self, machine: &Machine) -> Result<(), ManagerError> {
        let id = machine.id;
        self.intend(machine, |record| record.phase = MachinePhase::Removing).await;
        self.remove_run(machine).await?;
        let records = self.records.clone();
        on_host("removing the disk", move || records.remove(id)).await?;
        failpoint!("manager.files_removed");
        self.machines().remove(&id);
        if let Some(index) = machine.record().slot {
            self.slots.release(index);
        }
        Ok(())
    }

    /// Writes down that a microVM is to end, and why, unless that was known before.
    async fn note_end(&self, machine: &Machine, why: Option<String>) {
        if machine.record().phase == MachinePhase::Ending {
            return;
        }
        self.intend(machine, |record| {
            record.phase = MachinePhase::Ending;
            record.ended.clone_from(&why);
        })
        .await;
    }

    /// Writes down that a microVM is to end or to be removed. That is done also where it can't be written: a disk on which
    /// nothing can is no reason to keep what fills it.
    async fn intend(&self, machine: &Machine, change: impl Fn(&mut Record)) {
        if let Err(error) = self.note(machine, &change).await {
            let mut record = machine.record();
            change(&mut record);
            tracing::warn!(machine = %machine.id, phase = %record.phase, %error, "this could not be written down before it is done to a microVM");
            machine.set_record(record);
        }
    }

    /// Stops a microVM that is to be copied.
    ///
    /// Only a copy of memory needs Firecracker to know of it. For a disk its process is stopped instead: Firecracker 1.16
    /// gives the guest nothing from vsock after a pause until the guest has confirmed a reset, which only a copy of
    /// memory tells it of.
    async fn pause(&self, machine: &Machine, with_memory: bool) -> Result<(), ManagerError> {
        let record = self.note(machine, |record| record.phase = MachinePhase::Paused).await?;
        match record.process {
            Some(process) if !with_memory => on_host("stopping the microVM", move || process.freeze()).await,
            _ => Vmm::at(self.jails.api(machine.id)).set_paused(true).await,
        }
    }

    /// Lets a microVM go on that was being copied. If Firecracker has paused it, its memory must have been copied before:
    /// see [`Self::pause`].
    pub(crate) async fn let_go_on(
        &self,
        machine: &Machine,
        memory_was_copied: bool,
    ) -> Result<(), ManagerError> {
        let record = machine.record();
        if record.phase != MachinePhase::Paused {
            return Ok(());
        }
        if let Some(process) = record.process {
            process.thaw().map_err(|error| ManagerError::failed("letting the microVM go on", error))?;
        }
        let vmm = Vmm::at(self.jails.api(machine.id));
        if vmm.is_paused().await? {
            let copied = if memory_was_copied { Ok(()) } else { self.copy_memory(machine.id).await };
            self.forget_memory(machine.id).await?;
            vmm.set_paused(false).await?;
            if copied.is_err() && guest::connect(&self.jails.vsock(machine.id), CONNECT_TIME).await.is_err() {
                let why = "its vsock did not survive a pause".to_owned();
                return self.end_run(machine, Some(why)).await;
            }
        }
        self.note(machine, |record| record.phase = MachinePhase::Running).await.map(drop)
    }

    /// Lets a microVM go on that was being copied, if it was.
    pub async fn go_on(&self, id: WorkspaceId) -> Result<MachineView, ManagerError> {
        let machine = self.machine(id)?;
        let _operation = machine.operation.lock().await;
        self.check_known(&machine)?;
        self.let_go_on(&machine, false).await?;
        Ok(self.view(&machine.record()))
    }

    /// Copies a microVM's disk, and its memory if that is asked for. Nothing in it runs meanwhile.
    pub async fn snapshot(
        &self,
        id: WorkspaceId,
        to: SnapshotId,
        with_memory: bool,
    ) -> Result<MachineSnapshot, ManagerError> {
        let machine = self.machine(id)?;
        let _operation = machine.operation.lock().await;
        self.check_known(&machine)?;
        let record = machine.record();
        let runs = match record.phase {
            MachinePhase::Running => true,
            MachinePhase::Stopped if with_memory => {
                let message =
                    "a microVM that does not run has no memory to copy: start it, or copy its disk alone";
                return Err(ManagerError::Unacceptable(message.to_owned()));
            }
            MachinePhase::Stopped => false,
            phase => return Err(ManagerError::WrongState(format!("the microVM is {phase}: try again"))),
        };
        let (room, disk) = (self.room.clone(), self.records.disk(id));
        let memory = if with_memory { record.request.limits.memory.bytes() } else { 0 };
        // Before anything of it stands still.
        let part = on_host("copying the microVM", move || room.take(taken_bytes(&disk)? + memory)).await?;
        if runs {
            guest::flush(&self.jails.vsock(id), CONNECT_TIME).await?;
            if let Err(error) = self.pause(&machine, with_memory).await {
                if let Err(problem) = self.let_go_on(&machine, false).await {
                    tracing::warn!(machine = %id, error = %problem, "a microVM that was to be copied does not go on; it is tried again");
                }
                return Err(error);
            }
            failpoint!("manager.paused");
        }
        let copied = self.copy(id, to, with_memory).await;
        drop(part);
        let mut goes_on = Ok(());
        if runs {
            goes_on = self.let_go_on(&machine, copied.is_ok()).await;
            failpoint!("manager.goes_on");
        }
        let described = async {
            let bytes = copied?;
            goes_on?;
            let snapshot = MachineSnapshot {
                id: to,
                installation: record.request.installation,
                image: record.request.image,
                bytes,
                disk: Some(record.request.limits.disk),
                memory_limits: with_memory.then_some(record.request.limits),
            };
            let (snapshots, described) = (self.snapshots.clone(), snapshot.clone());
            on_host("writing down what a copy is", move || snapshots.describe(&described)).await?;
            Ok(snapshot)
        };
        let described = described.await;
        if described.is_err()
            && let Err(error) = self.remove_snapshot(to).await
        {
            tracing::warn!(copy = %to, %error, "a copy that failed could not be removed; the next start removes it");
        }
        described
    }

    /// Copies what belongs to a microVM that is paused or stopped. Gives the bytes that the copy takes.
    async fn copy(&self, id: WorkspaceId, to: SnapshotId, with_memory: bool) -> Result<u64, ManagerError> {
        let mut bytes = 0;
        if with_memory {
            self.copy_memory(id).await?;
            failpoint!("manager.memory_copied");
            let (state, memory) = (self.jails.file(id, STATE), self.jails.file(id, MEMORY));
            let snapshots = self.snapshots.clone();
            bytes +=
                on_host("copying the memory", move || snapshots.take_memory(to, &state, &memory)).await?;
        }
        let (disk, file) = (self.records.disk(id), self.snapshots.file(to));
        bytes += on_host("copying the disk", move || disks::copy_of(&disk, &file)).await?;
        Ok(bytes)
    }

    /// Copies the state and the memory of a microVM that is paused to files of its jail.
    async fn copy_memory(&self, id: WorkspaceId) -> Result<(), ManagerError> {
        self.forget_memory(id).await?;
        Vmm::at(self.jails.api(id)).copy_memory(STATE, MEMORY).await
    }

    /// Removes copies of memory from a jail. One that the microVM was made of is in use, and stays under its other name.
    async fn forget_memory(&self, id: WorkspaceId) -> Result<(), ManagerError> {
        let files = [self.jails.file(id, STATE), self.jails.file(id, MEMORY)];
        on_host("removing a copy of memory", move || files.iter().try_for_each(|file| remove_if_there(file)))
            .await
    }

    /// A connection to the agent of a microVM that runs.
    pub async fn channel(&self, id: WorkspaceId) -> Result<UnixStream, ManagerError> {
        let machine = self.machine(id)?;
        let goes_on = |record: &Record| {
            record.phase == MachinePhase::Running && record.process.is_some_and(Process::is_alive)
        };
        if !goes_on(&machine.record()) {
            // It is being copied and goes on in a moment, or has ended and is being looked after.
            drop(machine.operation.lock().await);
        }
        let record = machine.record();
        if !goes_on(&record) {
            let why = record.ended.unwrap_or_else(|| match record.phase {
                MachinePhase::Running => "its process has ended".to_owned(),
                phase => format!("it is {phase}"),
            });
            return Err(ManagerError::WrongState(format!("the microVM does not run: {why}")));
        }
        guest::connect(&self.jails.vsock(id), CONNECT_TIME).await
    }
}

/// Kills a process and waits until it is gone.
pub(crate) async fn kill(process: Process) -> Result<(), ManagerError> {
    process
        .signal(Signal::KILL)
        .map_err(|error| ManagerError::failed("ending the process of a microVM", error))?;
    match tokio::time::timeout(KILL_TIME, process.ended()).await {
        Ok(()) => Ok(()),
        Err(_) => Err(ManagerError::TimedOut {
            what: "the end of a killed microVM",
            seconds: KILL_TIME.as_secs(),
            detail: None,
        }),
    }
}
