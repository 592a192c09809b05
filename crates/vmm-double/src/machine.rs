//! The machine behind the API: QEMU, and beside it the process that carries vsock.

use std::fs;
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use serde_json::{Value, json};
use tokio::process::{Child, Command};

use crate::Settings;
use crate::qmp::Qmp;

/// How long a helper may take to listen.
const LISTENS_WITHIN: Duration = Duration::from_secs(20);

/// What was told before the start, under the path it was put to.
#[derive(Default)]
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
    _vsock: Option<Child>,
}

impl Machine {
    pub(crate) async fn start(settings: &Settings, root: &Path, plan: &Plan) -> anyhow::Result<Self> {
        let inside = |path: &Value| -> anyhow::Result<PathBuf> {
            let path = path.as_str().context("a path is a text")?;
            Ok(root.join(path.trim_start_matches('/')))
        };
        let kernel = inside(&plan.boot["kernel_image_path"])?;
        check_kernel(&kernel)?;
        let memory = plan.machine["mem_size_mib"].as_u64().context("mem_size_mib is needed")?;
        let cpus = plan.machine["vcpu_count"].as_u64().context("vcpu_count is needed")?;
        let vsock = match &plan.vsock {
            Some(vsock) => Some(start_vsock(settings, root, &inside(&vsock["uds_path"])?).await?),
            None => None,
        };
        let initrd = root.join("double-initrd");
        add_archive(&inside(&plan.boot["initrd_path"])?, &settings.modules, &initrd)?;
        let append = plan.boot["boot_args"].as_str().unwrap_or_default();
        // Devices are on PCI here, and on a busy host the timer may not tick while the kernel looks whether it does.
        let append = append.replace("pci=off", "") + " no_timer_check rdinit=/double/init";
        let mut qemu = child(&settings.qemu);
        qemu.current_dir(root);
        qemu.args(["-accel", "tcg", "-M", "q35,memory-backend=memory", "-nodefaults", "-no-user-config"])
            .args(["-display", "none", "-no-reboot", "-serial", "stdio"])
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
        if vsock.is_some() {
            qemu.args(["-chardev", "socket,id=vsock,path=vhost.sock"]);
            qemu.args(["-device", "vhost-user-vsock-pci,chardev=vsock"]);
        }
        if plan.has_entropy {
            qemu.args([
                "-object",
                "rng-random,id=rng,filename=/dev/urandom",
                "-device",
                "virtio-rng-pci,rng=rng",
            ]);
        }
        let mut qemu = qemu.stdin(Stdio::null()).spawn().context("QEMU can't be started")?;
        let socket = root.join("qmp.sock");
        let control = wait_for("QEMU", &mut qemu, || UnixStream::connect(&socket).ok()).await?;
        control.set_nonblocking(true)?;
        Ok(Self { qmp: Qmp::greet(tokio::net::UnixStream::from_std(control)?).await?, qemu, _vsock: vsock })
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
