//! A microVM's jail: the directory that its process sees as its whole file system, with hard links to the files that it
//! needs.
//!
//! ```text
//!  jails/firecracker/{id}/root/  kernel  initrd  disk.ext4  [state  memory]  api.sock  v.sock  v.sock_1025
//! ```
//!
//! A jail is used once: a microVM that is started again gets a new one. Its disk is a hard link to the disk in the microVM's
//! directory, so removing the jail loses no data.

use std::fs;
use std::io;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use emergent_guest_protocol::READY_PORT;
use emergent_wire::WorkspaceId;
use emergent_wire::workspace::ResourceLimits;

use crate::cgroup::Groups;
use crate::slot::Slot;

/// The paths of files, as the process in the jail sees them.
pub(crate) const KERNEL: &str = "/kernel";
pub(crate) const INITRD: &str = "/initrd";
pub(crate) const DISK: &str = "/disk.ext4";
pub(crate) const VSOCK: &str = "/v.sock";
/// The files of a snapshot with memory.
pub(crate) const STATE: &str = "/state";
pub(crate) const MEMORY: &str = "/memory";
const API: &str = "/api.sock";
/// The limit of open files of a microVM's process.
const MOST_FILES: &str = "no-file=4096";

/// The settings of all jails.
#[derive(Clone, Debug)]
pub(crate) struct Jails {
    pub(crate) base: PathBuf,
    pub(crate) firecracker: PathBuf,
    pub(crate) jailer: PathBuf,
    pub(crate) groups: Groups,
    /// The parent of all microVMs' control groups.
    pub(crate) parent_group: String,
}

/// The files that a jail links to.
pub(crate) struct Parts<'a> {
    pub(crate) kernel: &'a Path,
    pub(crate) initrd: &'a Path,
    pub(crate) disk: &'a Path,
    /// State and memory of the snapshot that the microVM starts from.
    pub(crate) memory: Option<(&'a Path, &'a Path)>,
}

impl Jails {
    fn jails(&self) -> PathBuf {
        self.base.join(self.firecracker.file_name().unwrap_or_default())
    }

    fn jail(&self, id: WorkspaceId) -> PathBuf {
        self.jails().join(id.to_string())
    }

    /// The host's path of a file in a jail.
    pub(crate) fn file(&self, id: WorkspaceId, name: &str) -> PathBuf {
        self.jail(id).join("root").join(name.trim_start_matches('/'))
    }

    pub(crate) fn api(&self, id: WorkspaceId) -> PathBuf {
        self.file(id, API)
    }

    pub(crate) fn vsock(&self, id: WorkspaceId) -> PathBuf {
        self.file(id, VSOCK)
    }

    /// The socket that the agent connects to when it is ready.
    pub(crate) fn ready_socket(&self, id: WorkspaceId) -> PathBuf {
        self.file(id, &format!("{VSOCK}_{READY_PORT}"))
    }

    /// Makes a jail. One that was used before is removed.
    pub(crate) fn make(&self, id: WorkspaceId, slot: &Slot, parts: &Parts<'_>) -> io::Result<()> {
        self.remove_directory(id)?;
        let root = self.file(id, "");
        fs::create_dir_all(&root)?;
        for directory in [&self.base, &self.jails(), &self.jail(id)] {
            // Only root enters these directories. The process in the jail starts inside.
            fs::set_permissions(directory, fs::Permissions::from_mode(0o700))?;
        }
        chown(&root, Some(slot.uid), Some(slot.uid))?;
        fs::hard_link(parts.kernel, self.file(id, KERNEL))?;
        fs::hard_link(parts.initrd, self.file(id, INITRD))?;
        fs::hard_link(parts.disk, self.file(id, DISK))?;
        if let Some((state, memory)) = parts.memory {
            fs::hard_link(state, self.file(id, STATE))?;
            fs::hard_link(memory, self.file(id, MEMORY))?;
        }
        fs::set_permissions(parts.disk, fs::Permissions::from_mode(0o600))?;
        chown(parts.disk, Some(slot.uid), Some(slot.uid))
    }

    /// The command of the jailer, which becomes Firecracker.
    pub(crate) fn command(
        &self,
        id: WorkspaceId,
        slot: &Slot,
        limits: &ResourceLimits,
        console: fs::File,
    ) -> io::Result<Command> {
        let mut command = Command::new(&self.jailer);
        let owner = slot.uid.to_string();
        command
            .args(["--id", &id.to_string()])
            .arg("--exec-file")
            .arg(&self.firecracker)
            .args(["--uid", &owner, "--gid", &owner])
            .arg("--chroot-base-dir")
            .arg(&self.base)
            .args(["--resource-limit", MOST_FILES]);
        let groups = self.groups.arguments(limits);
        if !groups.is_empty() {
            command.args(["--parent-cgroup", &self.parent_group]).args(groups);
        }
        command.args(["--", "--api-sock", API, "--level", "Error"]);
        command.env_clear().stdin(Stdio::null()).stderr(console.try_clone()?).stdout(console);
        Ok(command)
    }

    fn remove_directory(&self, id: WorkspaceId) -> io::Result<()> {
        match fs::remove_dir_all(self.jail(id)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// Removes a jail in which no process runs, and its control groups.
    pub(crate) fn remove(&self, id: WorkspaceId) -> io::Result<()> {
        self.remove_directory(id)?;
        self.groups.remove(&self.parent_group, Some(&id.to_string()))
    }

    /// The ids of all jails and control groups.
    pub(crate) fn list(&self) -> Vec<WorkspaceId> {
        let jails = fs::read_dir(self.jails()).into_iter().flatten().flatten();
        let jails = jails.filter_map(|entry| entry.file_name().into_string().ok());
        let mut ids: Vec<WorkspaceId> =
            jails.chain(self.groups.list(&self.parent_group)).filter_map(|name| name.parse().ok()).collect();
        ids.sort_unstable();
        ids.dedup();
        ids
    }

    /// Removes the parent control group, when there is no jail.
    pub(crate) fn remove_parent_group(&self) -> io::Result<()> {
        self.groups.remove(&self.parent_group, None)
    }
}
