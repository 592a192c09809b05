//! Disks with a real quota: a sparse file with a file system in it, behind a loop device.
//!
//! A workspace has one disk, named after its id, and one more for each named volume (`{id}.{volume}`).
//!
//! The engine's volume names a link to the loop device, because the device's number may change when the host restarts.
//! Everything about a disk is found by its file's name.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use emergent_failpoint::failpoint;
use emergent_host::copy::{copy_sparse, growth, reserve_all, taken_bytes};
use emergent_host::ext4;
use emergent_host::files::{ensure_private_directory, make_files_private, remove_if_there};
use emergent_host::loop_device::{self, Access};
use emergent_host::program::run;
use emergent_host::room::{Room, RoomRules};
use emergent_wire::{ByteSize, SnapshotId, WorkspaceId};

use crate::sandbox::SnapshotInfo;

/// The result of the check of a disk before it is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DiskCheck {
    /// The disk is new or has no errors.
    Clean,
    /// The disk had errors, which were repaired.
    Repaired,
}

/// The directories of an installation's disks, and of copies of them.
#[derive(Clone, Debug)]
pub(crate) struct Disks {
    directory: PathBuf,
    snapshots: PathBuf,
    room: Room,
}

impl Disks {
    /// Opens the disks under a directory. They need root, loop devices and mke2fs; the error names the missing one.
    pub(crate) fn open(data_dir: &Path, rules: RoomRules) -> Result<Self, String> {
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
            // Disks of older versions were readable by all users.
            ensure_private_directory(&path)
                .and_then(|()| make_files_private(&path))
                .and_then(|()| path.canonicalize())
                .map_err(|error| format!("{}: {error}", path.display()))
        };
        let directory = make("disks")?;
        Ok(Self { room: Room::new(&directory, rules), snapshots: make("snapshots")?, directory })
    }

    fn image(&self, disk: &str) -> PathBuf {
        self.directory.join(format!("{disk}.img"))
    }

    /// The path of the link to a disk's device.
    pub(crate) fn device(&self, disk: &str) -> PathBuf {
        self.directory.join(format!("{disk}.dev"))
    }

    /// Whether a workspace has a disk.
    pub(crate) fn exists(&self, id: WorkspaceId) -> bool {
        self.image(&disk_of(id, None)).exists()
    }

    /// Creates a disk, empty or from a snapshot, unless it exists, and attaches it. An existing disk with errors is repaired
    /// before it is attached.
    pub(crate) fn ensure(
        &self,
        disk: &str,
        size: ByteSize,
        from: Option<SnapshotId>,
    ) -> io::Result<DiskCheck> {
        let image = self.image(disk);
        let mut ensured = DiskCheck::Clean;
        if image.exists() {
            // The engine mounts the disk with the container's start. It may be mounted already, if the engine did not notice
            // the container's end.
            let is_mounted = ext4::errors_while_mounted(&self.device(disk)).is_some();
            if !is_mounted && ext4::may_have_errors(&image)? {
                ext4::check(&image)?;
                ensured = DiskCheck::Repaired;
            }
        } else {
            self.make(&image, size, from)?;
            failpoint!("disk.made");
        }
        self.attach(disk)?;
        Ok(ensured)
    }

    fn make(&self, image: &Path, size: ByteSize, from: Option<SnapshotId>) -> io::Result<()> {
        // A disk gets its name only when it is complete.
        let unfinished = image.with_extension("new");
        let copied = from.map(|snapshot| self.snapshot_image(snapshot));
        let written = copied.as_deref().map(taken_bytes).transpose()?.unwrap_or(0);
        let _part = self.room.promise(written, size.bytes().saturating_sub(written), self.growth()?)?;
        let made = match &copied {
            None => ext4::make(&unfinished, size.bytes(), &[]),
            Some(copied) => grow_copy(copied, &unfinished, size),
        };
        let made =
            made.and_then(|()| self.reserve(&unfinished)).and_then(|()| fs::rename(&unfinished, image));
        if made.is_err() {
            let _ = fs::remove_file(&unfinished);
        }
        made
    }

    /// Reserves all bytes of a disk, where the host does not overcommit its disk.
    fn reserve(&self, image: &Path) -> io::Result<()> {
        if !self.room.rules().reserves_all() {
            return Ok(());
        }
        let file = fs::OpenOptions::new().write(true).open(image)?;
        reserve_all(&file, file.metadata()?.len())
    }

    /// Whether disks have all their bytes reserved.
    pub(crate) fn are_reserved(&self) -> bool {
        self.room.rules().reserves_all()
    }

    /// The directory of the disks.
    pub(crate) fn directory(&self) -> &Path {
        &self.directory
    }

    /// The bytes that the existing disks may still grow by.
    fn growth(&self) -> io::Result<u64> {
        let images = fs::read_dir(&self.directory)?.filter_map(|entry| Some(entry.ok()?.path()));
        Ok(images
            .filter(|path| path.extension() == Some(OsStr::new("img")))
            .filter_map(|path| growth(&path).ok())
            .sum())
    }

    /// Whether the kernel has reported errors of a workspace's disk since it was mounted.
    pub(crate) fn has_errors(&self, id: WorkspaceId) -> bool {
        ext4::errors_while_mounted(&self.device(&disk_of(id, None))).is_some_and(|errors| errors > 0)
    }

    fn snapshot_image(&self, id: SnapshotId) -> PathBuf {
        self.snapshots.join(format!("{id}.img"))
    }

    /// Copies a workspace's disk, which must not be written to meanwhile. Returns the bytes that the copy takes.
    pub(crate) fn snapshot(&self, id: WorkspaceId, to: SnapshotId) -> io::Result<u64> {
        let own = self.image(&disk_of(id, None));
        let _part = self.room.take(taken_bytes(&own)?)?;
        let image = self.snapshot_image(to);
        let unfinished = image.with_extension("new");
        let made = copy_sparse(&own, &unfinished)
            .and_then(|()| ext4::check(&unfinished))
            .and_then(|()| fs::rename(&unfinished, &image));
        if made.is_err() {
            let _ = fs::remove_file(&unfinished);
        }
        made?;
        taken_bytes(&image)
    }

    /// Removes a snapshot, complete or not, with the volumes that were quarantined with it.
    pub(crate) fn remove_snapshot(&self, id: SnapshotId) -> io::Result<()> {
        for volume in stems_in(&self.snapshots)?.iter().filter(|stem| stem.starts_with(&format!("{id}."))) {
            remove_if_there(&self.snapshots.join(format!("{volume}.img")))?;
        }
        let image = self.snapshot_image(id);
        remove_files(&[image.with_extension("new"), image])
    }

    /// Detaches a workspace's disks and keeps them as a snapshot; named volumes beside it, as `{snapshot}.{volume}.img`.
    pub(crate) fn quarantine(&self, id: WorkspaceId, to: SnapshotId) -> io::Result<()> {
        for disk in self.disks_of(id)? {
            let image = self.image(&disk);
            loop_device::detach(&image)?;
            if image.exists() {
                let volume = disk.strip_prefix(&id.to_string()).unwrap_or_default();
                fs::rename(&image, self.snapshots.join(format!("{to}{volume}.img")))?;
                failpoint!("quarantine.disk_moved");
            }
            self.remove_disk(&disk)?;
        }
        let kept = self.snapshot_image(to);
        // The journal is replayed. Files with errors are kept as well.
        if kept.exists()
            && let Err(error) = ext4::check(&kept)
        {
            tracing::warn!(disk = %kept.display(), %error, "a disk in quarantine has errors");
        }
        Ok(())
    }

    /// Describes a complete snapshot.
    pub(crate) fn inspect_snapshot(&self, id: SnapshotId) -> io::Result<Option<SnapshotInfo>> {
        let image = self.snapshot_image(id);
        match fs::metadata(&image) {
            Ok(found) => {
                let disk = Some(ByteSize::from_bytes(found.len()));
                Ok(Some(SnapshotInfo { bytes: taken_bytes(&image)?, disk, memory_limits: None }))
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// All snapshots, complete or not.
    pub(crate) fn snapshots(&self) -> io::Result<Vec<SnapshotId>> {
        ids_in(&self.snapshots)
    }

    /// Attaches a disk, unless it is attached, and points its link to the device. A restart of the host detaches all disks.
    fn attach(&self, disk: &str) -> io::Result<()> {
        loop_device::attach(&self.image(disk), &self.device(disk), Access::ReadWrite)
    }

    /// Detaches and removes a workspace's disks, and the leftovers of interrupted steps.
    pub(crate) fn remove(&self, id: WorkspaceId) -> io::Result<()> {
        self.disks_of(id)?.iter().try_for_each(|disk| self.remove_disk(disk))
    }

    /// The names of a workspace's disk, whether it exists or not, and of its named volumes.
    fn disks_of(&self, id: WorkspaceId) -> io::Result<Vec<String>> {
        let volumes = format!("{id}.");
        let mut disks: Vec<String> = stems_in(&self.directory)?;
        disks.retain(|disk| disk.starts_with(&volumes));
        disks.push(disk_of(id, None));
        disks.sort_unstable();
        disks.dedup();
        Ok(disks)
    }

    fn remove_disk(&self, disk: &str) -> io::Result<()> {
        let image = self.image(disk);
        loop_device::detach(&image)?;
        failpoint!("disk.detached");
        loop_device::remove_link(&self.device(disk))?;
        remove_files(&[image.with_extension("new"), image])
    }

    /// All workspaces with a disk or leftovers of one.
    pub(crate) fn list(&self) -> io::Result<Vec<WorkspaceId>> {
        ids_in(&self.directory)
    }
}

/// The name of a workspace's disk, or of one of its named volumes.
pub(crate) fn disk_of(id: WorkspaceId, volume: Option<&str>) -> String {
    volume.map_or_else(|| id.to_string(), |volume| format!("{id}.{volume}"))
}

/// The ids in the names of a directory's files.
fn ids_in<T: FromStr + Ord>(directory: &Path) -> io::Result<Vec<T>> {
    let stems = stems_in(directory)?;
    let own = |stem: &String| T::from_str(stem.split_once('.').map_or(stem.as_str(), |(id, _)| id)).ok();
    let mut ids: Vec<T> = stems.iter().filter_map(own).collect();
    ids.sort_unstable();
    ids.dedup();
    Ok(ids)
}

/// The names of a directory's files, without their extensions.
fn stems_in(directory: &Path) -> io::Result<Vec<String>> {
    let stem = |entry: io::Result<fs::DirEntry>| Some(entry.ok()?.path().file_stem()?.to_str()?.to_owned());
    Ok(fs::read_dir(directory)?.filter_map(stem).collect())
}

fn remove_files(paths: &[PathBuf]) -> io::Result<()> {
    paths.iter().try_for_each(|path| remove_if_there(path))
}

/// Copies a clean file system and grows the copy to `size`.
fn grow_copy(from: &Path, to: &Path, size: ByteSize) -> io::Result<()> {
    copy_sparse(from, to)?;
    let has = fs::metadata(to)?.len();
    if size.bytes() > has {
        fs::OpenOptions::new().write(true).open(to)?.set_len(size.bytes())?;
        run("resize2fs", &[to.as_os_str()])?;
    }
    Ok(())
}
