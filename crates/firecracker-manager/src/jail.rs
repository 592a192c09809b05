//! A microVM's jail: the directory that its process sees as its whole file system, with links to what it needs.
//!
//! ```text
//!  jails/firecracker/{id}/root/  kernel  initrd  disk.ext4  [state  memory]  api.sock  v.sock  v.sock_1025
//! ```
//!
//! A jail is used once: a microVM that is started again gets another. The disk in it is the same file as in the microVM's
//! own directory, so nothing is lost with it.

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

/// The names of files in a jail, as its process says them.
pub(crate) const KERNEL: &str = "/kernel";
pub(crate) const INITRD: &str = "/initrd";
pub(crate) const DISK: &str = "/disk.ext4";
pub(crate) const VSOCK: &str = "/v.sock";
/// What a microVM is put back from, or copied to.
pub(crate) const STATE: &str = "/state";
pub(crate) const MEMORY: &str = "/memory";
const API: &str = "/api.sock";
/// Open files of one process.
const MOST_FILES: &str = "no-file=4096";

/// What all jails have in common.
#[derive(Clone, Debug)]
pub(crate) struct Jails {
    pub(crate) base: PathBuf,
    pub(crate) firecracker: PathBuf,
    pub(crate) jailer: PathBuf,
    pub(crate) groups: Groups,
    /// The group that those of all microVMs are in.
    pub(crate) parent_group: String,
}

/// What a microVM is made of, outside its jail.
pub(crate) struct Parts<'a> {
    pub(crate) kernel: &'a Path,
    pub(crate) initrd: &'a Path,
    pub(crate) disk: &'a Path,
    /// State and memory of one that it is a copy of.
    pub(crate) copy: Option<(&'a Path, &'a Path)>,
}

impl Jails {
    fn all(&self) -> PathBuf {
        self.base.join(self.firecracker.file_name().unwrap_or_default())
    }

    fn jail(&self, id: WorkspaceId) -> PathBuf {
        self.all().join(id.to_string())
    }

    /// A file of a jail, as the host sees it.
    pub(crate) fn file(&self, id: WorkspaceId, name: &str) -> PathBuf {
        self.jail(id).join("root").join(name.trim_start_matches('/'))
    }

    pub(crate) fn api(&self, id: WorkspaceId) -> PathBuf {
        self.file(id, API)
    }

    pub(crate) fn vsock(&self, id: WorkspaceId) -> PathBuf {
        self.file(id, VSOCK)
    }

    /// Where the agent connects to when it is ready.
    pub(crate) fn ready_socket(&self, id: WorkspaceId) -> PathBuf {
        self.file(id, &format!("{VSOCK}_{READY_PORT}"))
    }

    /// Makes a jail, instead of one that was used.
    pub(crate) fn make(&self, id: WorkspaceId, slot: &Slot, parts: &Parts<'_>) -> io::Result<()> {
        self.remove_directory(id)?;
        let root = self.file(id, "");
        fs::create_dir_all(&root)?;
        for directory in [&self.base, &self.all(), &self.jail(id)] {
            // Only root looks around; a jail's process is inside and needs no way in.
            fs::set_permissions(directory, fs::Permissions::from_mode(0o700))?;
        }
        chown(&root, Some(slot.uid), Some(slot.uid))?;
        fs::hard_link(parts.kernel, self.file(id, KERNEL))?;
        fs::hard_link(parts.initrd, self.file(id, INITRD))?;
        fs::hard_link(parts.disk, self.file(id, DISK))?;
        if let Some((state, memory)) = parts.copy {
            fs::hard_link(state, self.file(id, STATE))?;
            fs::hard_link(memory, self.file(id, MEMORY))?;
        }
        fs::set_permissions(parts.disk, fs::Permissions::from_mode(0o600))?;
        chown(parts.disk, Some(slot.uid), Some(slot.uid))
    }

    /// What starts a microVM's process.
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

    /// Removes a jail and its control groups, when nothing runs in it.
    pub(crate) fn remove(&self, id: WorkspaceId) -> io::Result<()> {
        self.remove_directory(id)?;
        self.groups.remove(&self.parent_group, Some(&id.to_string()))
    }

    /// The microVMs that have a jail or a control group.
    pub(crate) fn list(&self) -> Vec<WorkspaceId> {
        let jails = fs::read_dir(self.all()).into_iter().flatten().flatten();
        let jails = jails.filter_map(|entry| entry.file_name().into_string().ok());
        let mut ids: Vec<WorkspaceId> =
            jails.chain(self.groups.list(&self.parent_group)).filter_map(|name| name.parse().ok()).collect();
        ids.sort_unstable();
        ids.dedup();
        ids
    }

    /// Removes what held all jails together, when there is none.
    pub(crate) fn retire(&self) -> io::Result<()> {
        self.groups.remove(&self.parent_group, None)
    }
}
