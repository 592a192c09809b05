//! The machine behind the API, which is a QEMU process.

use std::fs;
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::process::{Child, Command};

use crate::Settings;
use crate::qmp::Qmp;
use crate::vsock::{self, Vsock};

/// The time limit for a helper to listen.
const LISTEN_TIME: Duration = Duration::from_secs(20);

/// The configuration before the start, by the API's paths.
#[derive(Default, Serialize, Deserialize)]
pub(crate) struct Plan {
    pub(crate) machine: Value,
    pub(crate) boot: Value,
    pub(crate) drives: Vec<Value>,
    pub(crate) interfaces: Vec<Value>,
    pub(crate) vsock: Option<Value>,
    pub(crate) has_entropy: bool,
}

/// A running machine.
pub(crate) struct Machine {
    pub(crate) qmp: Qmp,
    pub(crate) qemu: Child,
    vsock: Option<Vsock>,
    /// The number of times that vsock was plugged in.
    plugged: u32,
}

impl Machine {
    /// Starts a machine: from its kernel, or from a memory file.
    pub(crate) async fn start(
        settings: &Settings,
        root: &Path,
        plan: &Plan,
        memory_file: Option<&Path>,
    ) -> anyhow::Result<Self> {
        let uds = plan.vsock.as_ref().map(|vsock| inside(root, &vsock["uds_path"])).transpose()?;
        let vsock = uds.map(|uds| Vsock::listen(settings, root, uds)).transpose()?;
        let mut qemu = qemu(settings, root, plan, memory_file)?;
        let mut qemu = qemu.stdin(Stdio::null()).spawn().context("QEMU can't be started")?;
        let socket = root.join("qmp.sock");
        let control = wait_for("QEMU", &mut qemu, || UnixStream::connect(&socket).ok()).await?;
        control.set_nonblocking(true)?;
        let qmp = Qmp::greet(tokio::net::UnixStream::from_std(control)?).await?;
        let mut machine = Self { qmp, qemu, vsock, plugged: 0 };
        match memory_file {
            Some(_) => {
                let is_over = |status: &Value| status["status"] != "inmigrate";
                machine.qmp.wait_until("query-status", json!({}), is_over).await?;
            }
            None => {
                machine.plug_in_vsock().await?;
                machine.open_vsock(true);
                machine.qmp.run("cont", json!({})).await?;
            }
        }
        Ok(machine)
    }

    async fn plug_in_vsock(&mut self) -> anyhow::Result<()> {
        let Some(vsock) = &mut self.vsock else {
            return Ok(());
        };
        vsock.start().await?;
        // QEMU releases the name of the last connection some time later, so each connection has a new name.
        self.plugged += 1;
        let connection = format!("vsock{}", self.plugged);
        let address = json!({ "type": "unix", "data": { "path": vsock::SOCKET } });
        let backend = json!({ "type": "socket", "data": { "addr": address, "server": false } });
        let add = json!({ "id": connection, "backend": backend });
        let begun = Instant::now();
        // The socket's name appears before its process listens. That process accepts one connection, which must be QEMU's.
        while let Err(error) = self.qmp.run("chardev-add", add.clone()).await {
            if begun.elapsed() > LISTEN_TIME || !is_connection_refused(&error) {
                return Err(error);
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let device =
            json!({ "driver": "vhost-user-vsock-pci", "id": "vsock", "chardev": connection, "bus": "plug" });
        self.qmp.run("device_add", device).await.map(drop)
    }

    /// Unplugs vsock from a paused machine. The machine runs for a moment, because its kernel takes part.
    async fn unplug_vsock(&mut self) -> anyhow::Result<()> {
        let Some(vsock) = self.vsock.as_mut().filter(|vsock| vsock.is_plugged_in()) else {
            return Ok(());
        };
        vsock.set_open(false);
        self.qmp.run("cont", json!({})).await?;
        self.qmp.run("device_del", json!({ "id": "vsock" })).await?;
        let is_gone = |list: &Value| list.as_array().into_iter().flatten().all(|one| one["name"] != "vsock");
        self.qmp.wait_until("qom-list", json!({ "path": "/machine/peripheral" }), is_gone).await?;
        self.qmp.run("stop", json!({})).await?;
        vsock.end().await
    }

    /// Opens or closes vsock for connections to the guest.
    pub(crate) fn open_vsock(&self, open: bool) {
        if let Some(vsock) = &self.vsock {
            vsock.set_open(open);
        }
    }

    /// Pauses all CPUs, or resumes them.
    pub(crate) async fn set_paused(&mut self, paused: bool) -> anyhow::Result<()> {
        self.qmp.run(if paused { "stop" } else { "cont" }, json!({})).await?;
        if !paused && self.vsock.as_ref().is_some_and(|vsock| !vsock.is_plugged_in()) {
            self.plug_in_vsock().await?;
            let device = json!({ "path": "/machine/peripheral/vsock/virtio-backend" });
            let is_ready = |status: &Value| status["status"].to_string().contains("DRIVER_OK");
            self.qmp.wait_until("x-query-virtio-status", device, is_ready).await?;
            self.open_vsock(true);
        }
        Ok(())
    }

    /// Writes the memory of a paused machine to a file.
    pub(crate) async fn copy_memory(&mut self, to: &Path) -> anyhow::Result<()> {
        self.unplug_vsock().await?;
        self.qmp.run("migrate", json!({ "uri": format!("exec:cat > '{}'", to.display()) })).await?;
        let is_over = |state: &Value| state["status"] == "completed" || state["status"] == "failed";
        let state = self.qmp.wait_until("query-migrate", json!({}), is_over).await?;
        if state["status"] == "failed" {
            bail!("the memory can't be copied: {state}");
        }
        Ok(())
    }

    /// Sends Ctrl+Alt+Del to the guest.
    pub(crate) async fn press_restart_keys(&mut self) -> anyhow::Result<()> {
        let keys: Vec<Value> =
            ["ctrl", "alt", "delete"].iter().map(|key| json!({ "type": "qcode", "data": key })).collect();
        self.qmp.run("send-key", json!({ "keys": keys })).await.map(drop)
    }
}

/// The command line of QEMU.
fn qemu(
    settings: &Settings,
    root: &Path,
    plan: &Plan,
    memory_file: Option<&Path>,
) -> anyhow::Result<Command> {
    let kernel = inside(root, &plan.boot["kernel_image_path"])?;
    check_kernel(&kernel)?;
    let initrd = root.join("double-initrd");
    add_archive(&inside(root, &plan.boot["initrd_path"])?, &settings.modules, &initrd)?;
    let memory = plan.machine["mem_size_mib"].as_u64().context("mem_size_mib is needed")?;
    let cpus = plan.machine["vcpu_count"].as_u64().context("vcpu_count is needed")?;
    let append = plan.boot["boot_args"].as_str().unwrap_or_default();
    // QEMU's devices are on PCI. On a busy host, the kernel's check of the timer can fail.
    let append = append.replace("pci=off", "") + " no_timer_check rdinit=/double/init";
    let mut qemu = child(&settings.qemu);
    qemu.current_dir(root);
    // A small cache of translated code: the control group has space for Firecracker, which has no such cache.
    qemu.args(["-accel", "tcg,tb-size=32", "-M", "q35,memory-backend=memory"])
        .args(["-nodefaults", "-no-user-config"])
        .args(["-display", "none", "-no-reboot", "-serial", "stdio", "-S"])
        .args(["-qmp", "unix:qmp.sock,server=on,wait=off"])
        .args(["-m", &format!("{memory}M"), "-smp", &cpus.to_string()])
        .args(["-object", &format!("memory-backend-memfd,id=memory,size={memory}M,share=on")])
        .arg("-kernel")
        .arg(&kernel)
        .arg("-initrd")
        .arg(&initrd)
        .args(["-append", append.trim()]);
    add_devices(&mut qemu, root, plan)?;
    if let Some(file) = memory_file {
        qemu.args(["-incoming", &format!("exec:cat '{}'", file.display())]);
    }
    Ok(qemu)
}

/// Adds drives, network cards, the port for vsock, and the source of random numbers.
fn add_devices(qemu: &mut Command, root: &Path, plan: &Plan) -> anyhow::Result<()> {
    for (number, drive) in plan.drives.iter().enumerate() {
        let path = inside(root, &drive["path_on_host"])?;
        let read_only = if drive["is_read_only"] == true { ",readonly=on" } else { "" };
        let options = format!(
            "file={},if=none,id=d{number},format=raw,cache=writeback,werror=report{read_only}",
            path.display()
        );
        qemu.args(["-drive", &options, "-device", &format!("virtio-blk-pci,drive=d{number}")]);
    }
    for (number, interface) in plan.interfaces.iter().enumerate() {
        let tap = interface["host_dev_name"].as_str().context("host_dev_name is needed")?;
        let mac = interface["guest_mac"].as_str().context("guest_mac is needed")?;
        let net = format!("tap,id=n{number},ifname={tap},script=no,downscript=no,vhost=off");
        let device = format!("virtio-net-pci,netdev=n{number},mac={mac},romfile=");
        qemu.args(["-netdev", &net, "-device", &device]);
    }
    qemu.args(["-device", "pcie-root-port,id=plug,chassis=1,slot=1"]);
    if plan.has_entropy {
        qemu.args(["-object", "rng-random,id=rng,filename=/dev/urandom"]);
        qemu.args(["-device", "virtio-rng-pci,rng=rng"]);
    }
    Ok(())
}

/// The host's path of a file in the jail.
fn inside(root: &Path, path: &Value) -> anyhow::Result<PathBuf> {
    let path = path.as_str().context("a path is a text")?;
    Ok(root.join(path.trim_start_matches('/')))
}

/// Whether QEMU could not connect because no process listens yet. QMP has one error class for everything
/// (`GenericError`), so the text is the only difference.
fn is_connection_refused(error: &anyhow::Error) -> bool {
    error.to_string().contains("refused")
}

/// A program that the kernel kills when this process ends.
pub(crate) fn child(program: &Path) -> Command {
    let mut command = std::process::Command::new(program);
    // SAFETY: only a system call, between fork and exec.
    unsafe {
        command.pre_exec(|| {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
            Ok(())
        });
    }
    Command::from(command)
}

/// Waits until a helper listens. Its socket is the only sign of that.
pub(crate) async fn wait_for<T>(
    name: &str,
    helper: &mut Child,
    listens: impl Fn() -> Option<T>,
) -> anyhow::Result<T> {
    let begun = Instant::now();
    loop {
        if let Some(there) = listens() {
            return Ok(there);
        }
        if let Some(status) = helper.try_wait()? {
            bail!("{name} has ended: {status}");
        }
        if begun.elapsed() > LISTEN_TIME {
            bail!("{name} does not listen");
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Checks that a file is a kernel, by its magic number. The error is Firecracker's.
fn check_kernel(path: &Path) -> anyhow::Result<()> {
    let bytes = fs::read(path).with_context(|| path.display().to_string())?;
    if bytes.get(0x202..0x206) != Some(b"HdrS".as_slice()) {
        bail!(
            "Cannot load kernel due to invalid memory configuration or invalid kernel image: Kernel Loader: invalid magic number"
        );
    }
    Ok(())
}

/// Concatenates two initrds. The kernel unpacks both, one after the other.
fn add_archive(given: &Path, added: &Path, to: &Path) -> anyhow::Result<()> {
    let mut file = fs::File::create(to)?;
    for path in [given, added] {
        let bytes = fs::read(path).with_context(|| path.display().to_string())?;
        file.write_all(&bytes)?;
        file.write_all(&vec![0; bytes.len().next_multiple_of(512) - bytes.len()])?;
    }
    Ok(())
}
