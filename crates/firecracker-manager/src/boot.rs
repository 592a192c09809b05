//! Configures a Firecracker process that has just started, starts its guest, and waits for the guest agent.

use std::time::Duration;

use emergent_failpoint::failpoint;
use emergent_guest_protocol::MachineCall;
use emergent_wire::workspace::{NetworkMode, ResourceLimits};
use serde_json::json;
use tokio::net::UnixListener;

use crate::admission::StartFrom;
use crate::error::{HostError, ManagerError};
use crate::guest;
use crate::jail::{DISK, INITRD, KERNEL, MEMORY, STATE, VSOCK};
use crate::launch::LaunchError;
use crate::machine::Machine;
use crate::process::Process;
use crate::record::Record;
use crate::resources::Resources;
use crate::slot::{PREFIX, Slot};
use crate::vmm::{self, Vmm, VmmError};

/// The time limit for Firecracker to listen on its API socket.
const API_TIME: Duration = Duration::from_secs(20);
/// The kernel's arguments: it prints only emergencies, a panic ends the machine, and devices that Firecracker does not have
/// are not probed.
const KERNEL_ARGUMENTS: &str = "console=ttyS0 quiet loglevel=1 reboot=k panic=1 pci=off i8042.noaux i8042.nomux i8042.nopnp \
                                i8042.dumbkbd ipv6.disable=1";

/// The boot of one microVM.
pub(crate) struct Boot<'a> {
    resources: &'a Resources,
    machine: &'a Machine,
    record: &'a Record,
    slot: &'a Slot,
    vmm: Vmm,
}

impl<'a> Boot<'a> {
    pub(crate) fn new(
        resources: &'a Resources,
        machine: &'a Machine,
        record: &'a Record,
        slot: &'a Slot,
    ) -> Self {
        let vmm = Vmm::at(resources.jails.api(machine.id));
        Self { resources, machine, record, slot, vmm }
    }

    /// Runs the boot until the agent is ready, or until the process ends.
    pub(crate) async fn run(
        &self,
        process: Process,
        start_from: StartFrom,
        ready: &UnixListener,
    ) -> Result<(), ManagerError> {
        let booted = async {
            self.wait_for_api().await?;
            match start_from {
                StartFrom::Kernel => self.boot_kernel(ready).await?,
                StartFrom::Memory(_) => self.load_memory().await?,
            }
            failpoint!("manager.agent_ready");
            let vsock = self.resources.jails.vsock(self.machine.id);
            let within = self.resources.options.boot_timeout();
            Ok(guest::identify(&vsock, self.identity()?, within).await?)
        };
        tokio::select! {
            biased;
            booted = booted => booted,
            () = process.ended() => {
                let step = "the microVM ended before its agent was ready";
                Err(LaunchError::ended(step, self.machine.console_tail()).into())
            }
        }
    }

    async fn wait_for_api(&self) -> Result<(), ManagerError> {
        let api = self.resources.jails.api(self.machine.id);
        match tokio::time::timeout(API_TIME, vmm::listens(&api)).await {
            Ok(listens) => Ok(listens.map_err(|error| HostError::io("waiting for Firecracker", error))?),
            Err(_) => {
                let console = self.machine.console_tail();
                Err(LaunchError::timed_out("Firecracker's start", API_TIME, console).into())
            }
        }
    }

    async fn boot_kernel(&self, ready: &UnixListener) -> Result<(), ManagerError> {
        self.configure().await?;
        failpoint!("manager.vmm_configured");
        self.vmm.start().await?;
        failpoint!("manager.machine_started");
        wait_for_agent(ready, self.resources.options.boot_timeout(), || self.machine.console_tail()).await
    }

    async fn load_memory(&self) -> Result<(), ManagerError> {
        self.vmm.load_memory(STATE, MEMORY, &self.slot.interface).await?;
        failpoint!("manager.memory_loaded");
        Ok(())
    }

    async fn configure(&self) -> Result<(), VmmError> {
        let limits = &self.record.request.limits;
        let memory_mib = limits.memory.bytes().div_ceil(1 << 20);
        let arguments = format!("{KERNEL_ARGUMENTS} {}", self.resources.options.kernel_arguments);
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
                json!({ "iface_id": "eth0", "host_dev_name": self.slot.interface, "guest_mac": self.slot.mac }),
            ),
            ("/vsock", json!({ "guest_cid": 3, "uds_path": VSOCK })),
            ("/entropy", json!({})),
        ];
        for (path, setting) in &settings {
            self.vmm.put(path, setting).await?;
        }
        Ok(())
    }

    /// The identity that the agent gives its machine.
    fn identity(&self) -> Result<MachineCall, ManagerError> {
        let id = self.record.id.0.simple().to_string();
        let request = &self.record.request;
        let image = self.resources.images.get(&request.image)?;
        let has_network = request.network == NetworkMode::Nat;
        let nameservers = if has_network { self.resources.firewall.nameservers() } else { Vec::new() };
        Ok(MachineCall {
            // The last digits of an id are random; the first are a time.
            hostname: id[id.len() - 12..].to_owned(),
            machine_id: id,
            mac: Some(self.slot.mac.clone()),
            address: Some(self.slot.guest),
            prefix: PREFIX,
            gateway: has_network.then_some(self.slot.host),
            nameservers,
            environment: image.settings.environment,
            ..MachineCall::default()
        })
    }
}

/// The number of CPUs of a microVM: its CPU limit, rounded up.
pub(crate) fn vcpus(limits: &ResourceLimits) -> u32 {
    limits.cpu.millis().div_ceil(1000).clamp(1, 32)
}

/// Waits until the agent connects. Only an accepted connection means that the agent is ready.
async fn wait_for_agent(
    ready: &UnixListener,
    within: Duration,
    console_tail: impl FnOnce() -> Option<String>,
) -> Result<(), ManagerError> {
    match tokio::time::timeout(within, ready.accept()).await {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(error)) => Err(HostError::io("waiting for the guest agent", error).into()),
        Err(_) => Err(LaunchError::timed_out("the start of the guest agent", within, console_tail()).into()),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use std::os::unix::net::UnixListener as StdListener;

    use rustix::net::{AddressFamily, SocketFlags, SocketType};

    use super::*;
    use crate::socket;

    const WITHIN: Duration = Duration::from_secs(30);

    #[tokio::test]
    async fn a_failed_accept_does_not_count_as_a_ready_agent() {
        // The kernel refuses `accept` on a socket that does not listen.
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let deaf = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
        let ready = UnixListener::from_std(StdListener::from(deaf)).unwrap();
        let waited = wait_for_agent(&ready, WITHIN, || None).await;
        let error = waited.unwrap_err();
        assert!(matches!(error, ManagerError::Host(HostError::Failed { .. })), "{error:?}");
    }

    #[tokio::test]
    async fn an_agent_that_connects_is_ready() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("ready");
        let ready = socket::listen(&path).unwrap();
        let (waited, connected) =
            tokio::join!(wait_for_agent(&ready, WITHIN, || None), socket::connect(&path));
        waited.unwrap();
        connected.unwrap();
    }

    #[tokio::test]
    async fn an_agent_that_never_connects_is_reported_with_the_console() {
        let directory = tempfile::tempdir().unwrap();
        let ready = socket::listen(&directory.path().join("ready")).unwrap();
        let console = || Some("Kernel panic".to_owned());
        let error = wait_for_agent(&ready, Duration::ZERO, console).await.unwrap_err();
        assert_eq!(
            error.to_string(),
            "the start of the guest agent did not end within 0 s: its console says: Kernel panic"
        );
    }
}
