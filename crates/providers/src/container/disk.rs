//! Disks with a real quota: a sparse file with a file system in it, behind a loop device.
//!
//! A workspace has one disk, named after its id, and one more for each named volume (`{id}.{volume}`).
//!
//! The volume names a link that points to the device, not the device itself, whose number may change when the host
//! is restarted. Everything about a disk is found by its file's name, so nothing has to be remembered.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use emergent_failpoint::failpoint;
use emergent_host::copy::{copy_sparse, taken_bytes};
use emergent_host::files::remove_if_there;
use emergent_host::program::{command, failure, run};
use emergent_wire::{ByteSize, SnapshotId, WorkspaceId};

/// Room that must be left on the host after a disk was promised.
const HOST_RESERVE_BYTES: u64 = 512 << 20;

/// The directories of an installation's disks, and of copies of them.
#[derive(Clone, Debug)]
pub(crate) struct Disks {
    directory: PathBuf,
    snapshots: PathBuf,
}

impl Disks {
    /// Disks under this directory, if this host can have them: they need root, loop devices and mke2fs.
    pub(crate) fn open(data_dir: &Path) -> Result<Self, String> {
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
        let make = |name: &str| {
            let path = data_dir.join(name);
            fs::create_dir_all(&path)
                .and_then(|()| path.canonicalize())
                .map_err(|error| format!("{}: {error}", path.display()))
        };
        Ok(Self { directory: make("disks")?, snapshots: make("snapshots")? })
    }

    fn image(&self, disk: &str) -> PathBuf {
        self.directory.join(format!("{disk}.img"))
    }

    /// The link to the device of a disk.
    pub(crate) fn device(&self, disk: &str) -> PathBuf {
        self.directory.join(format!("{disk}.dev"))
    }

    /// Whether a workspace has a disk.
    pub(crate) fn exists(&self, id: WorkspaceId) -> bool {
        self.image(&disk_of(id, None)).exists()
    }

    /// Makes a disk, empty or out of a snapshot, unless it is there; and attaches it.
    pub(crate) fn ensure(&self, disk: &str, size: ByteSize, from: Option<SnapshotId>) -> io::Result<()> {
        let image = self.image(disk);
        if !image.exists() {
            // A disk appears under its name only when it is whole.
            let unfinished = image.with_extension("new");
            let copied = from.map(|snapshot| self.snapshot_image(snapshot));
            let made = self
                .check_room(copied.as_deref())
                .and_then(|()| match &copied {
                    None => format(&unfinished, size),
                    Some(copied) => grow_copy(copied, &unfinished, size),
                })
                .and_then(|()| fs::rename(&unfinished, &image));
            if made.is_err() {
                let _ = fs::remove_file(&unfinished);
            }
            made?;
            failpoint!("disk.made");
        }
        self.attach(disk)
    }

    /// Refuses a new disk, or a copy of one, that the host has no room for.
    fn check_room(&self, copied: Option<&Path>) -> io::Result<()> {
        let free = rustix::fs::statvfs(&self.directory).map(|stat| stat.f_bavail * stat.f_frsize)?;
        let needed = copied.map(taken_bytes).transpose()?.unwrap_or(0);
        if free < HOST_RESERVE_BYTES + needed {
            let message = format!(
                "only {} MiB are left on the host's disk, {} MiB are needed",
                free >> 20,
                (HOST_RESERVE_BYTES + needed) >> 20
            );
            return Err(io::Error::new(io::ErrorKind::StorageFull, message));
        }
        Ok(())
    }

    fn snapshot_image(&self, id: SnapshotId) -> PathBuf {
        self.snapshots.join(format!("{id}.img"))
    }

    /// Copies a workspace's disk, which nobody must be writing to. Gives the bytes that the copy takes.
    pub(crate) fn snapshot(&self, id: WorkspaceId, to: SnapshotId) -> io::Result<u64> {
        let own = self.image(&disk_of(id, None));
        self.check_room(Some(&own))?;
        let image = self.snapshot_image(to);
        let unfinished = image.with_extension("new");
        let made = copy_sparse(&own, &unfinished)
            .and_then(|()| check_file_system(&unfinished))
            .and_then(|()| fs::rename(&unfinished, &image));
        if made.is_err() {
            let _ = fs::remove_file(&unfinished);
        }
        made?;
        taken_bytes(&image)
    }

    /// Removes a snapshot, or the part of it that there is.
    pub(crate) fn remove_snapshot(&self, id: SnapshotId) -> io::Result<()> {
        let image = self.snapshot_image(id);
        remove_files(&[image.with_extension("new"), image])
    }

    /// All snapshots, also those of which only a part is there.
    pub(crate) fn snapshots(&self) -> io::Result<Vec<SnapshotId>> {
        ids_in(&self.snapshots)
    }

    /// Attaches a disk that is not attached (after a restart of the host), and points its link to the device.
    fn attach(&self, disk: &str) -> io::Result<()> {
        let image = self.image(disk);
        let device = match attached_device(&image)? {
            Some(device) => device,
            None => {
                let arguments = [OsStr::new("--find"), OsStr::new("--show"), image.as_os_str()];
                PathBuf::from(run("losetup", &arguments)?.trim())
            }
        };
        let (link, unfinished) = (self.device(disk), self.device(disk).with_extension("newdev"));
        if fs::read_link(&link).is_ok_and(|target| target == device) {
            return Ok(());
        }
        let _ = fs::remove_file(&unfinished);
        symlink(&device, &unfinished)?;
        fs::rename(&unfinished, &link)
    }

    /// Detaches and removes a workspace's disks, and whatever an interrupted step left of them.
    pub(crate) fn remove(&self, id: WorkspaceId) -> io::Result<()> {
        let own = disk_of(id, None);
        let volumes = format!("{id}.");
        let mut disks: Vec<String> = stems_in(&self.directory)?;
        disks.retain(|disk| disk.starts_with(&volumes));
        disks.push(own);
        disks.sort_unstable();
        disks.dedup();
        disks.iter().try_for_each(|disk| self.remove_disk(disk))
    }

    fn remove_disk(&self, disk: &str) -> io::Result<()> {
        let image = self.image(disk);
        if let Some(device) = attached_device(&image)? {
            run("losetup", &[OsStr::new("--detach"), device.as_os_str()])?;
        }
        failpoint!("disk.detached");
        let (link, unfinished) = (self.device(disk), image.with_extension("new"));
        remove_files(&[link.with_extension("newdev"), link, unfinished, image])
    }

    /// All workspaces that have a disk or a part of one.
    pub(crate) fn list(&self) -> io::Result<Vec<WorkspaceId>> {
        ids_in(&self.directory)
    }
}

/// The name of a workspace's disk, or of one of its named volumes.
pub(crate) fn disk_of(id: WorkspaceId, volume: Option<&str>) -> String {
    volume.map_or_else(|| id.to_string(), |volume| format!("{id}.{volume}"))
}

/// The ids that files in a directory are named after.
fn ids_in<T: FromStr + Ord>(directory: &Path) -> io::Result<Vec<T>> {
    let stems = stems_in(directory)?;
    let own = |stem: &String| T::from_str(stem.split_once('.').map_or(stem.as_str(), |(id, _)| id)).ok();
    let mut ids: Vec<T> = stems.iter().filter_map(own).collect();
    ids.sort_unstable();
    ids.dedup();
    Ok(ids)
}

/// The names of the files in a directory, without their endings.
fn stems_in(directory: &Path) -> io::Result<Vec<String>> {
    let stem = |entry: io::Result<fs::DirEntry>| Some(entry.ok()?.path().file_stem()?.to_str()?.to_owned());
    Ok(fs::read_dir(directory)?.filter_map(stem).collect())
}

fn remove_files(paths: &[PathBuf]) -> io::Result<()> {
    paths.iter().try_for_each(|path| remove_if_there(path))
}

/// Makes an empty file system.
fn format(image: &Path, size: ByteSize) -> io::Result<()> {
    let file = fs::File::create(image)?;
    file.set_len(size.bytes())?;
    drop(file);
    let options = "lazy_itable_init=1,lazy_journal_init=1,nodiscard";
    let arguments = ["-q", "-F", "-t", "ext4", "-m", "0", "-E", options].map(OsStr::new);
    run("mke2fs", &[&arguments[..], &[image.as_os_str()]].concat()).map(drop)
}

/// Copies a file system, which is clean, and grows the copy to `size`.
fn grow_copy(from: &Path, to: &Path, size: ByteSize) -> io::Result<()> {
    copy_sparse(from, to)?;
    let has = fs::metadata(to)?.len();
    if size.bytes() > has {
        fs::OpenOptions::new().write(true).open(to)?.set_len(size.bytes())?;
        run("resize2fs", &[to.as_os_str()])?;
    }
    Ok(())
}

/// Replays the journal of a file system that was copied while it was in use, and makes sure that it is whole.
fn check_file_system(image: &Path) -> io::Result<()> {
    let arguments = [OsStr::new("-f"), OsStr::new("-p"), image.as_os_str()];
    let output = command("e2fsck").args(arguments).output()?;
    // 1: something was mended, which the journal counts as.
    match output.status.code() {
        Some(0 | 1) => Ok(()),
        _ => Err(failure("e2fsck", &output)),
    }
}

/// The loop device that a file is attached to. Found by the file itself: the path that a device shows is that of the
/// server that attached it, and means nothing to one in another container.
fn attached_device(image: &Path) -> io::Result<Option<PathBuf>> {
    if !image.exists() {
        return device_of_path(image);
    }
    let options = ["--noheadings", "--output", "NAME", "--associated"].map(OsStr::new);
    let found = run("losetup", &[&options[..], &[image.as_os_str()]].concat())?;
    Ok(found.lines().next().map(|line| PathBuf::from(line.trim())))
}

/// The loop device of a file that is gone.
fn device_of_path(image: &Path) -> io::Result<Option<PathBuf>> {
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
