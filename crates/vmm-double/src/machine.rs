//! The machine behind the API: QEMU, and beside it the process that carries vsock.

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

/// How long a helper may take to listen.
const LISTENS_WITHIN: Duration = Duration::from_secs(20);

/// What was told before the start, under the path it was put to.
#[derive(Default, Serialize, Deserialize)]
pub(crate) struct Plan {
    pub(crate) machine: Value,
    pub(crate) boot: Value,
    pub(crate) drives: Vec<Value>,
    pub(crate) interfaces: Vec<Value>,
    pub(crate) vsock: Option<Value>,
    pub(crate) has_entropy: bool,
}

/// A machine that runs.
pub(crate) struct Machine {
    pub(crate) qmp: Qmp,
    pub(crate) qemu: Child,
    settings: Settings,
    root: PathBuf,
    /// Where vsock's connections come in, if there is to be one.
    uds: Option<PathBuf>,
    /// What carries it, while it is plugged in.
    vsock: Option<Child>,
}

impl Machine {
    /// Starts a machine: from its kernel, or as it was when its memory was copied to a file.
    pub(crate) async fn start(
        settings: &Settings,
        root: &Path,
        plan: &Plan,
        memory_file: Option<&Path>,
    ) -> anyhow::Result<Self> {
        let inside = |path: &Value| -> anyhow::Result<PathBuf> {
            let path = path.as_str().context("a path is a text")?;
            Ok(root.join(path.trim_start_matches('/')))
        };
        let kernel = inside(&plan.boot["kernel_image_path"])?;
        check_kernel(&kernel)?;
        let memory = plan.machine["mem_size_mib"].as_u64().context("mem_size_mib is needed")?;
        let cpus = plan.machine["vcpu_count"].as_u64().context("vcpu_count is needed")?;
        let uds = plan.vsock.as_ref().map(|vsock| inside(&vsock["uds_path"])).transpose()?;
        let initrd = root.join("double-initrd");
        add_archive(&inside(&plan.boot["initrd_path"])?, &settings.modules, &initrd)?;
        let append = plan.boot["boot_args"].as_str().unwrap_or_default();
        // Devices are on PCI here, and on a busy host the timer may not tick while the kernel looks whether it does.
        let append = append.replace("pci=off", "") + " no_timer_check rdinit=/double/init";
        let mut qemu = child(&settings.qemu);
        qemu.current_dir(root);
        qemu.args(["-accel", "tcg", "-M", "q35,memory-backend=memory", "-nodefaults", "-no-user-config"])
            .args(["-display", "none", "-no-reboot", "-serial", "stdio", "-S"])
            .args(["-qmp", "unix:qmp.sock,server=on,wait=off"])
            .args(["-m", &format!("{memory}M"), "-smp", &cpus.to_string()])
            .args(["-object", &format!("memory-backend-memfd,id=memory,size={memory}M,share=on")])
            .arg("-kernel")
            .arg(&kernel)
            .arg("-initrd")
            .arg(&initrd)
            .args(["-append", append.trim()]);
        for (number, drive) in plan.drives.iter().enumerate() {
            let path = inside(&drive["path_on_host"])?;
            let read_only = if drive["is_read_only"] == true { ",readonly=on" } else { "" };
            let options =
                format!("file={},if=none,id=d{number},format=raw,cache=writeback{read_only}", path.display());
            qemu.args(["-drive", &options, "-device", &format!("virtio-blk-pci,drive=d{number}")]);
        }
        for (number, interface) in plan.interfaces.iter().enumerate() {
            let tap = interface["host_dev_name"].as_str().context("host_dev_name is needed")?;
            let mac = interface["guest_mac"].as_str().context("guest_mac is needed")?;
            let net = format!("tap,id=n{number},ifname={tap},script=no,downscript=no,vhost=off");
            qemu.args([
                "-netdev",
                &net,
                "-device",
                &format!("virtio-net-pci,netdev=n{number},mac={mac},romfile="),
            ]);
        }
        // Where vsock is plugged in.
        qemu.args(["-device", "pcie-root-port,id=plug,chassis=1,slot=1"]);
        if plan.has_entropy {
            qemu.args([
                "-object",
                "rng-random,id=rng,filename=/dev/urandom",
                "-device",
                "virtio-rng-pci,rng=rng",
            ]);
        }
        if let Some(file) = memory_file {
            qemu.args(["-incoming", &format!("exec:cat '{}'", file.display())]);
        }
        let mut qemu = qemu.stdin(Stdio::null()).spawn().context("QEMU can't be started")?;
        let socket = root.join("qmp.sock");
        let control = wait_for("QEMU", &mut qemu, || UnixStream::connect(&socket).ok()).await?;
        control.set_nonblocking(true)?;
        let qmp = Qmp::greet(tokio::net::UnixStream::from_std(control)?).await?;
        let (settings, root) = (settings.clone(), root.to_owned());
        let mut machine = Self { qmp, qemu, settings, root, uds, vsock: None };
        match memory_file {
            Some(_) => {
                let is_over = |status: &Value| status["status"] != "inmigrate";
                machine.qmp.wait_until("query-status", json!({}), is_over).await?;
            }
            None => {
                machine.plug_in_vsock().await?;
                machine.qmp.run("cont", json!({})).await?;
            }
        }
        Ok(machine)
    }

    async fn plug_in_vsock(&mut self) -> anyhow::Result<()> {
        let Some(uds) = &self.uds else {
            return Ok(());
        };
        self.vsock = Some(start_vsock(&self.settings, &self.root, uds).await?);
        let address = json!({ "type": "unix", "data": { "path": "vhost.sock" } });
        let backend = json!({ "type": "socket", "data": { "addr": address, "server": false } });
        self.qmp.run("chardev-add", json!({ "id": "vsock", "backend": backend })).await?;
        let device =
            json!({ "driver": "vhost-user-vsock-pci", "id": "vsock", "chardev": "vsock", "bus": "plug" });
        self.qmp.run("device_add", device).await.map(drop)
    }

    /// Takes vsock away from a machine that is paused. For that it runs for a moment.
    async fn unplug_vsock(&mut self) -> anyhow::Result<()> {
        if self.vsock.is_none() {
            return Ok(());
        }
        self.qmp.run("cont", json!({})).await?;
        self.qmp.run("device_del", json!({ "id": "vsock" })).await?;
        let is_gone = |list: &Value| list.as_array().into_iter().flatten().all(|one| one["name"] != "vsock");
        self.qmp.wait_until("qom-list", json!({ "path": "/machine/peripheral" }), is_gone).await?;
        self.qmp.run("stop", json!({})).await?;
        self.qmp.run("chardev-remove", json!({ "id": "vsock" })).await?;
        if let Some(mut vsock) = self.vsock.take() {
            vsock.kill().await?;
        }
        Ok(())
    }

    /// Stops all CPUs, or lets them go on.
    pub(crate) async fn set_paused(&mut self, paused: bool) -> anyhow::Result<()> {
        if paused {
            return self.qmp.run("stop", json!({})).await.map(drop);
        }
        let unplugged = self.vsock.is_none() && self.uds.is_some();
        self.qmp.run("cont", json!({})).await?;
        if unplugged {
            self.plug_in_vsock().await?;
            let path = json!({ "path": "/machine/peripheral/vsock/virtio-backend" });
            let is_used = |found: &Value| found["status"].to_string().contains("DRIVER_OK");
            self.qmp.wait_until("x-query-virtio-status", path, is_used).await?;
        }
        Ok(())
    }

    /// Copies the memory of a machine that is paused.
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

    /// Presses the keys that restart a machine.
    pub(crate) async fn press_restart_keys(&mut self) -> anyhow::Result<()> {
        let keys: Vec<Value> =
            ["ctrl", "alt", "delete"].iter().map(|key| json!({ "type": "qcode", "data": key })).collect();
        self.qmp.run("send-key", json!({ "keys": keys })).await.map(drop)
    }
}

async fn start_vsock(settings: &Settings, root: &Path, uds: &Path) -> anyhow::Result<Child> {
    let socket = root.join("vhost.sock");
    for used in [&socket, uds] {
        let _ = fs::remove_file(used);
    }
    let option = format!("guest-cid=3,socket={},uds-path={}", socket.display(), uds.display());
    let mut vsock = child(&settings.vhost_device_vsock)
        .args(["--vm", &option])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .context("vhost-device-vsock can't be started")?;
    // It takes one connection, which is QEMU's.
    wait_for("vhost-device-vsock", &mut vsock, || socket.exists().then_some(())).await?;
    Ok(vsock)
}

/// A program that ends when this one does, however that ends.
fn child(program: &Path) -> Command {
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

/// Waits until a helper listens; there is no other sign of it than its socket.
async fn wait_for<T>(name: &str, helper: &mut Child, listens: impl Fn() -> Option<T>) -> anyhow::Result<T> {
    let begun = Instant::now();
    loop {
        if let Some(there) = listens() {
            return Ok(there);
        }
        if let Some(status) = helper.try_wait()? {
            bail!("{name} has ended: {status}");
        }
        if begun.elapsed() > LISTENS_WITHIN {
            bail!("{name} does not listen");
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// A kernel that QEMU can start, by the mark that such files have. Firecracker says this of what it can't start.
fn check_kernel(path: &Path) -> anyhow::Result<()> {
    let bytes = fs::read(path).with_context(|| path.display().to_string())?;
    if bytes.get(0x202..0x206) != Some(b"HdrS".as_slice()) {
        bail!(
            "Cannot load kernel due to invalid memory configuration or invalid kernel image: Kernel Loader: invalid magic number"
        );
    }
    Ok(())
}

/// Memory disks may be put behind each other: what is in the later ones is added.
fn add_archive(given: &Path, added: &Path, to: &Path) -> anyhow::Result<()> {
    let mut file = fs::File::create(to)?;
    for path in [given, added] {
        let bytes = fs::read(path).with_context(|| path.display().to_string())?;
        file.write_all(&bytes)?;
        file.write_all(&vec![0; bytes.len().next_multiple_of(512) - bytes.len()])?;
    }
    Ok(())
}
