//! Disks with a real quota: a sparse file with a file system in it, behind a loop device.
//!
//! The volume names a link that points to the device, not the device itself, whose number may change when the host
//! is restarted. Everything about a disk is found by its file's name, so nothing has to be remembered.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::str::FromStr;

use emergent_wire::{ByteSize, WorkspaceId};

/// Room that must be left on the host after a disk was promised.
const HOST_RESERVE_BYTES: u64 = 512 << 20;

/// The directory of an installation's disks.
#[derive(Clone, Debug)]
pub(crate) struct Disks {
    directory: PathBuf,
}

impl Disks {
    /// Disks in this directory, if this host can have them: they need root, loop devices and mke2fs.
    pub(crate) fn open(directory: &Path) -> Result<Self, String> {
        if !rustix::process::geteuid().is_root() {
            return Err("loop devices need root".to_owned());
        }
        if !Path::new("/dev/loop-control").exists() {
            return Err("this host has no loop devices".to_owned());
        }
        for program in ["mke2fs", "losetup"] {
            run(program, &[OsStr::new("--version")])
                .or_else(|_| run(program, &[OsStr::new("-V")]))
                .map_err(|_| format!("{program} is not installed (packages e2fsprogs and mount)"))?;
        }
        fs::create_dir_all(directory).map_err(|error| format!("{}: {error}", directory.display()))?;
        let directory =
            directory.canonicalize().map_err(|error| format!("{}: {error}", directory.display()))?;
        Ok(Self { directory })
    }

    fn image(&self, id: WorkspaceId) -> PathBuf {
        self.directory.join(format!("{id}.img"))
    }

    /// The link to the device of a workspace's disk.
    pub(crate) fn device(&self, id: WorkspaceId) -> PathBuf {
        self.directory.join(format!("{id}.dev"))
    }

    /// Whether a workspace has a disk.
    pub(crate) fn exists(&self, id: WorkspaceId) -> bool {
        self.image(id).exists()
    }

    /// Makes a workspace's disk, unless it is there, and attaches it.
    pub(crate) fn ensure(&self, id: WorkspaceId, size: ByteSize) -> io::Result<()> {
        let image = self.image(id);
        if !image.exists() {
            self.format(&image, size)?;
        }
        self.attach(id)
    }

    /// A disk appears under its name only when it is whole.
    fn format(&self, image: &Path, size: ByteSize) -> io::Result<()> {
        let free = rustix::fs::statvfs(&self.directory).map(|stat| stat.f_bavail * stat.f_frsize)?;
        if free < HOST_RESERVE_BYTES {
            let message = format!("only {} MiB are left on the host's disk", free >> 20);
            return Err(io::Error::new(io::ErrorKind::StorageFull, message));
        }
        let unfinished = image.with_extension("new");
        let file = fs::File::create(&unfinished)?;
        file.set_len(size.bytes())?;
        drop(file);
        let options = "lazy_itable_init=1,lazy_journal_init=1,nodiscard";
        let arguments = ["-q", "-F", "-t", "ext4", "-m", "0", "-E", options].map(OsStr::new);
        let made = run("mke2fs", &[&arguments[..], &[unfinished.as_os_str()]].concat())
            .and_then(|_| fs::rename(&unfinished, image));
        if made.is_err() {
            let _ = fs::remove_file(&unfinished);
        }
        made
    }

    /// Attaches a disk that is not attached (after a restart of the host), and points its link to the device.
    fn attach(&self, id: WorkspaceId) -> io::Result<()> {
        let image = self.image(id);
        let device = match attached_device(&image)? {
            Some(device) => device,
            None => {
                let arguments = [OsStr::new("--find"), OsStr::new("--show"), image.as_os_str()];
                PathBuf::from(run("losetup", &arguments)?.trim())
            }
        };
        let (link, unfinished) = (self.device(id), self.device(id).with_extension("newdev"));
        if fs::read_link(&link).is_ok_and(|target| target == device) {
            return Ok(());
        }
        let _ = fs::remove_file(&unfinished);
        symlink(&device, &unfinished)?;
        fs::rename(&unfinished, &link)
    }

    /// Detaches and removes a workspace's disk, and whatever an interrupted step left of it.
    pub(crate) fn remove(&self, id: WorkspaceId) -> io::Result<()> {
        let image = self.image(id);
        if let Some(device) = attached_device(&image)? {
            run("losetup", &[OsStr::new("--detach"), device.as_os_str()])?;
        }
        for path in
            [self.device(id), self.device(id).with_extension("newdev"), image.with_extension("new"), image]
        {
            match fs::remove_file(path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }

    /// All workspaces that have a disk or a part of one.
    pub(crate) fn list(&self) -> io::Result<Vec<WorkspaceId>> {
        let mut ids: Vec<WorkspaceId> = fs::read_dir(&self.directory)?
            .filter_map(|entry| WorkspaceId::from_str(entry.ok()?.path().file_stem()?.to_str()?).ok())
            .collect();
        ids.sort_unstable();
        ids.dedup();
        Ok(ids)
    }
}

/// The loop device that a file is attached to.
fn attached_device(image: &Path) -> io::Result<Option<PathBuf>> {
    for entry in fs::read_dir("/sys/block")? {
        let entry = entry?;
        let name = entry.file_name();
        if !name.as_encoded_bytes().starts_with(b"loop") {
            continue;
        }
        let Ok(backing) = fs::read_to_string(entry.path().join("loop/backing_file")) else {
            continue;
        };
        // A file that was removed while attached is shown with this ending.
        let backing = backing.trim_end_matches('\n').trim_end_matches(" (deleted)");
        if Path::new(backing) == image {
            return Ok(Some(Path::new("/dev").join(name)));
        }
    }
    Ok(None)
}

/// Runs a program of the host and returns what it printed.
fn run(program: &str, arguments: &[&OsStr]) -> io::Result<String> {
    let output = Command::new(program)
        .args(arguments)
        .env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
        .stdin(Stdio::null())
        .output()?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(io::Error::other(format!("{program} failed ({}): {}", output.status, said.trim())))
}
