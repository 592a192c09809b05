//! The agent as the first process of a virtual machine.
//!
//! The initial memory disk holds the agent as `/init`; the machine's disk holds the image only. So the agent always has the
//! version of the manager that started the machine, and a workspace can't break the next start by changing files:
//!
//! ```text
//!  memory disk                 the machine's disk, mounted at /new-root, then moved to /
//!  /init ─▶ .emergent/guest    /.emergent ◀── bind ── /.emergent of the memory disk
//! ```
//!
//! Channels come over vsock: no port is open on any network. The manager sends the machine's name, address and time
//! ([`identity::apply`]).

pub(crate) mod identity;
mod interface;
mod vsock;

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use emergent_guest_protocol::{CHANNEL_PORT, READY_PORT};
use emergent_wire::tools::AGENT_DIR;
use emergent_wire::{ErrorCode, ErrorDetail};
use rustix::io::Errno;
use rustix::mount::{MountFlags, MountPropagationFlags};
use rustix::system::RebootCommand;

use crate::agent::Agent;
use crate::{connection, log, workers};

/// The agent's path on the memory disk.
pub(crate) const INIT: &str = "/init";
/// Whether this agent has started a machine.
static IS_MACHINE: AtomicBool = AtomicBool::new(false);

const NEW_ROOT: &str = "/new-root";
const DISK: &str = "/dev/vda";
/// The time limit for the disk to appear.
const DISK_TIME: Duration = Duration::from_secs(20);

/// Runs the machine until it gets a stop signal, and powers it off. Never returns.
pub(crate) fn run() -> Result<(), String> {
    IS_MACHINE.store(true, Ordering::Relaxed);
    let result = move_to_disk().and_then(|()| serve());
    if let Err(error) = &result {
        // The manager keeps the last lines of the console.
        log(&format!("emergent: the machine can't start: {error}"));
    }
    power_off()
}

/// Whether the sandbox is a virtual machine, whose kernel and interfaces the agent sets up.
pub(crate) fn is_machine() -> bool {
    IS_MACHINE.load(Ordering::Relaxed)
}

/// Fails outside a virtual machine.
pub(crate) fn must_be() -> Result<(), ErrorDetail> {
    let message = "this sandbox is a container: its host names, addresses and ends it";
    if is_machine() { Ok(()) } else { Err(ErrorDetail::new(ErrorCode::BadRequest, message)) }
}

/// Leaves the memory disk.
fn move_to_disk() -> Result<(), String> {
    make_mount("devtmpfs", "/dev", "devtmpfs", MountFlags::NOSUID, "mode=0755")?;
    make_directory(NEW_ROOT)?;
    mount_disk()?;
    let own = format!("{NEW_ROOT}{AGENT_DIR}");
    // The image may have a file of any kind there.
    if fs::symlink_metadata(&own).is_ok_and(|found| !found.is_dir()) {
        fs::remove_file(&own).map_err(|error| format!("{AGENT_DIR} on the disk: {error}"))?;
    }
    make_directory(&own)?;
    rustix::mount::mount_bind(AGENT_DIR, &own).map_err(|error| format!("binding {own}: {error}"))?;
    let read_only = MountFlags::BIND | MountFlags::RDONLY | MountFlags::NODEV;
    rustix::mount::mount_remount(&own, read_only, "")
        .map_err(|error| format!("protecting {own}: {error}"))?;
    let moved = rustix::process::chdir(NEW_ROOT)
        .and_then(|()| rustix::mount::mount_move(".", "/"))
        .and_then(|()| rustix::process::chroot("."))
        .and_then(|()| rustix::process::chdir("/"));
    moved.map_err(|error| format!("moving to the disk: {error}"))
}

fn mount_disk() -> Result<(), String> {
    let deadline = Instant::now() + DISK_TIME;
    while !Path::new(DISK).exists() {
        if Instant::now() >= deadline {
            return Err(format!("{DISK} did not appear within {} s", DISK_TIME.as_secs()));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let mounted = rustix::mount::mount(DISK, NEW_ROOT, "ext4", MountFlags::NOATIME, None);
    mounted.map_err(|error| format!("the root disk can't be mounted: {error}"))
}

/// Sets up mounts, devices and interfaces, then takes channels.
fn serve() -> Result<(), String> {
    prepare()?;
    grow_file_system();
    crate::set_usual_limits();
    crate::agent::block_stop_signals();
    // The key combination for a restart sends SIGINT to the agent, which ends the machine in order.
    let _ = rustix::system::reboot(RebootCommand::CadOff);
    let _ = fs::write("/proc/self/oom_score_adj", "-1000");
    let agent = Agent::start();
    let listener = vsock::Listener::open(CHANNEL_PORT)?;
    let accepting = Arc::clone(&agent);
    workers::spawn_thread("accept", move || accept_channels(&accepting, &listener));
    // The manager waits for this connection instead of polling the channel port.
    if let Err(error) = vsock::connect_to_host(READY_PORT) {
        log(&format!("nobody was told that the machine is ready: {error}"));
    }
    agent.run_until_signalled();
    Ok(())
}

fn accept_channels(agent: &Arc<Agent>, listener: &vsock::Listener) {
    loop {
        match listener.accept() {
            Ok((input, output)) => {
                connection::serve_in_background(agent, input, output, None, connection::MAX_CONNECTIONS);
            }
            Err(Errno::INTR) => {}
            Err(error) => {
                log(&format!("a channel could not be taken: {error}"));
                std::thread::sleep(Duration::from_millis(100));
            }
        }
    }
}

fn prepare() -> Result<(), String> {
    let safe = MountFlags::NOSUID | MountFlags::NODEV;
    let plain = safe | MountFlags::NOEXEC;
    make_mount("proc", "/proc", "proc", plain, "")?;
    make_mount("sysfs", "/sys", "sysfs", plain, "")?;
    make_mount("devtmpfs", "/dev", "devtmpfs", MountFlags::NOSUID, "mode=0755")?;
    make_mount(
        "devpts",
        "/dev/pts",
        "devpts",
        MountFlags::NOSUID | MountFlags::NOEXEC,
        "mode=0620,ptmxmode=0666",
    )?;
    make_mount("tmpfs", "/dev/shm", "tmpfs", safe, "mode=1777")?;
    make_mount("tmpfs", "/run", "tmpfs", safe, "mode=0755")?;
    // A kernel without control groups works too; then the number of tasks is watched and not limited.
    let _ = make_mount("cgroup2", "/sys/fs/cgroup", "cgroup2", plain, "");
    for (link, target) in [("fd", "/proc/self/fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")]
    {
        let _ = std::os::unix::fs::symlink(target, Path::new("/dev").join(link));
    }
    let _ = fs::remove_file("/dev/ptmx");
    let _ = std::os::unix::fs::symlink("pts/ptmx", "/dev/ptmx");
    let _ = rustix::mount::mount_change("/", MountPropagationFlags::SHARED | MountPropagationFlags::REC);
    make_directory("/tmp")?;
    let _ = rustix::fs::chmod("/tmp", rustix::fs::Mode::from_raw_mode(0o1777));
    interface::bring_up("lo").map_err(|error| format!("the loopback interface: {error}"))
}

fn make_directory(path: &str) -> Result<(), String> {
    fs::create_dir_all(path).map_err(|error| format!("{path}: {error}"))
}

fn make_mount(source: &str, path: &str, kind: &str, flags: MountFlags, data: &str) -> Result<(), String> {
    make_directory(path)?;
    let data = std::ffi::CString::new(data).unwrap_or_default();
    match rustix::mount::mount(source, path, kind, flags, data.as_c_str()) {
        // The kernel may have mounted it.
        Ok(()) | Err(Errno::BUSY) => Ok(()),
        Err(error) => Err(format!("mounting {path}: {error}")),
    }
}

/// Grows the file system to the size of the disk.
fn grow_file_system() {
    /// `EXT4_IOC_RESIZE_FS`.
    const RESIZE: libc::c_ulong = 0x4008_6610;
    let grow = || -> Result<(), String> {
        let sectors = fs::read_to_string("/sys/class/block/vda/size").map_err(|error| error.to_string())?;
        let sectors: u64 = sectors.trim().parse().map_err(|_| "its size is no number".to_owned())?;
        let root = fs::File::open("/").map_err(|error| error.to_string())?;
        let block_bytes = rustix::fs::fstatvfs(&root).map_err(|error| error.to_string())?.f_bsize;
        let blocks = sectors * 512 / block_bytes.max(512);
        // SAFETY: the descriptor is open, and the kernel only reads the number.
        let done = unsafe { libc::ioctl(std::os::fd::AsRawFd::as_raw_fd(&root), RESIZE, &raw const blocks) };
        if done == 0 { Ok(()) } else { Err(std::io::Error::last_os_error().to_string()) }
    };
    if let Err(error) = grow() {
        log(&format!("the file system can't be grown to the size of its disk: {error}"));
    }
}

/// Flushes the disk and ends the machine.
pub(crate) fn power_off() -> ! {
    rustix::fs::sync();
    let read_only = rustix::mount::mount_remount("/", MountFlags::RDONLY, "");
    if read_only.is_err() {
        // A process has a file open for writing; the journal keeps the file system consistent.
        rustix::fs::sync();
    }
    // A Firecracker machine has no power-off; a restart ends it.
    let _ = rustix::system::reboot(RebootCommand::Restart);
    std::process::exit(1)
}
