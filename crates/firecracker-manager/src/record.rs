//! What is written down of a microVM: enough to find, use, end and remove it after any crash.
//!
//! ```text
//!             create            start                  agent answers
//!  (nothing) ───────▶ reserved ────────▶ configured ───────────────────▶ running ◀──▶ paused
//!                        │                ▲       │                        │
//!                        │ undone   start │       │ undone                 │ stop, or it ended
//!                        │                │       ▼                        ▼
//!                        ▼             stopped ◀─────────────── ending ◀───┘
//!                     removing ◀──────────┘ (as from every other)
//! ```
//!
//! A phase is written before what it stands for is begun: what is found under it after a crash may be there in part.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use emergent_host::files::write_atomically;
use emergent_wire::WorkspaceId;
use emergent_wire::manager::{MachinePhase, MachineRequest};
use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use crate::process::Process;

/// Room that a record has from the first: more than it ever needs, with all that is told of a microVM's end.
const RECORD_BYTES: usize = 8 << 10;

/// What is written down of a microVM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Record {
    pub(crate) id: WorkspaceId,
    pub(crate) request: MachineRequest,
    pub(crate) phase: MachinePhase,
    /// The slot it has, from before anything is made in it until all of that is gone.
    pub(crate) slot: Option<u32>,
    /// Its process, once it has one.
    pub(crate) process: Option<Process>,
    /// The run of the host that the process belongs to: another has other processes under the same numbers.
    pub(crate) boot: Option<String>,
    /// Why it ended, when it was not told to.
    pub(crate) ended: Option<String>,
}

impl Record {
    pub(crate) fn new(id: WorkspaceId, request: MachineRequest) -> Self {
        Self {
            id,
            request,
            phase: MachinePhase::Reserved,
            slot: None,
            process: None,
            boot: None,
            ended: None,
        }
    }
}

/// The directory of all microVMs.
#[derive(Clone, Debug)]
pub(crate) struct Records {
    directory: PathBuf,
}

impl Records {
    pub(crate) fn open(data_dir: &Path) -> io::Result<Self> {
        let directory = data_dir.join("machines");
        fs::create_dir_all(&directory)?;
        Ok(Self { directory })
    }

    /// The directory of one.
    pub(crate) fn of(&self, id: WorkspaceId) -> PathBuf {
        self.directory.join(id.to_string())
    }

    /// A microVM's disk.
    pub(crate) fn disk(&self, id: WorkspaceId) -> PathBuf {
        self.of(id).join("disk.ext4")
    }

    /// The disks of all microVMs.
    pub(crate) fn disks(&self) -> impl Iterator<Item = PathBuf> + use<> {
        let entries = fs::read_dir(&self.directory).into_iter().flatten().flatten();
        entries.map(|entry| entry.path().join("disk.ext4"))
    }

    pub(crate) fn save(&self, record: &Record) -> io::Result<()> {
        let directory = self.of(record.id);
        fs::create_dir_all(&directory)?;
        rewrite(&directory.join("machine.json"), serde_json::to_vec_pretty(record)?)
    }

    /// Removes a microVM's directory; its record goes last, so that a crash before leaves one that says what to do.
    pub(crate) fn remove(&self, id: WorkspaceId) -> io::Result<()> {
        let directory = self.of(id);
        let record = directory.join("machine.json");
        match fs::read_dir(&directory) {
            Ok(entries) => {
                for path in entries.flatten().map(|entry| entry.path()).filter(|path| *path != record) {
                    if path.is_dir() { fs::remove_dir_all(path)? } else { fs::remove_file(path)? }
                }
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(error),
        }
        fs::remove_dir_all(directory)
    }

    /// All that are written down. Directories without a record are remains of one whose removal had almost ended.
    pub(crate) fn load(&self) -> io::Result<Vec<Record>> {
        let mut records = Vec::new();
        for entry in fs::read_dir(&self.directory)? {
            let path = entry?.path();
            match fs::read(path.join("machine.json")) {
                Ok(bytes) => match serde_json::from_slice(&bytes) {
                    Ok(record) => records.push(record),
                    Err(error) => {
                        tracing::error!(path = %path.display(), %error, "a record can't be read and is left alone")
                    }
                },
                Err(error) if error.kind() == io::ErrorKind::NotFound => fs::remove_dir_all(path)?,
                Err(error) => return Err(error),
            }
        }
        Ok(records)
    }
}

/// Writes a file as a whole or not at all, and only for its owner.
pub(crate) fn write_whole(path: &Path, bytes: &[u8]) -> io::Result<()> {
    write_atomically(path, bytes, 0o600)
}

/// The same for a file that must be written also when the disk is full, since what frees the disk is written down first:
/// the text before stays beside it, and its place is used for the next. On a file system that never writes to the same
/// place twice this is no better than [`write_whole`].
fn rewrite(path: &Path, mut text: Vec<u8>) -> io::Result<()> {
    let other = path.with_extension("new");
    text.resize(text.len().max(RECORD_BYTES), b'\n');
    if !path.exists() {
        // Both places are there before there is a record.
        let first = path.with_extension("first");
        write_over(&first, &text)?;
        write_over(&other, &text)?;
        fs::rename(first, path)?;
    } else {
        write_over(&other, &text)?;
        match renameat_with(CWD, &other, CWD, path, RenameFlags::EXCHANGE) {
            // A file system that can't exchange two.
            Err(Errno::INVAL | Errno::NOSYS) => fs::rename(&other, path)?,
            exchanged => exchanged?,
        }
    }
    // The next is written to the place of this one's predecessor, which must not have its name any more.
    fs::File::open(path.parent().unwrap_or(path))?.sync_all()
}

fn write_over(path: &Path, bytes: &[u8]) -> io::Result<()> {
    use std::os::unix::fs::OpenOptionsExt;
    let mut file = fs::OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(path)?;
    file.write_all(bytes)?;
    file.set_len(bytes.len() as u64)?;
    file.sync_all()
}

/// What jails link to is read by the users of all microVMs.
pub(crate) fn make_readable(path: &Path) -> std::io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(path, fs::Permissions::from_mode(0o444))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use emergent_wire::id::InstallationId;
    use emergent_wire::workspace::{NetworkMode, ResourceLimits};
    use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

    use super::*;

    /// A small disk, until it is dropped.
    struct Disk(tempfile::TempDir);

    impl Drop for Disk {
        fn drop(&mut self) {
            let _ = unmount(self.0.path(), UnmountFlags::DETACH);
        }
    }

    fn small_disk() -> Disk {
        let disk = Disk(tempfile::tempdir().unwrap());
        mount("small", disk.0.path(), "tmpfs", MountFlags::empty(), Some(c"size=256k")).unwrap();
        disk
    }

    /// Leaves so many bytes on a disk.
    fn fill_but_for(disk: &Disk, bytes: u64) {
        let filler = disk.0.path().join("filler");
        let full = fs::write(&filler, vec![1; 1 << 20]).unwrap_err();
        assert_eq!(full.kind(), io::ErrorKind::StorageFull);
        let filler = fs::OpenOptions::new().write(true).open(filler).unwrap();
        filler.set_len(filler.metadata().unwrap().len() - bytes).unwrap();
    }

    fn record() -> Record {
        let request = MachineRequest {
            installation: InstallationId::generate(),
            image: "i".into(),
            limits: ResourceLimits::default(),
            network: NetworkMode::Nat,
            snapshot: None,
        };
        Record::new(WorkspaceId::generate(), request)
    }

    #[test]
    fn a_record_that_has_no_room_for_its_changes_is_not_begun() {
        let disk = small_disk();
        let records = Records::open(disk.0.path()).unwrap();
        let record = record();
        // For the record itself and its directory, and not for its other place.
        fill_but_for(&disk, 3 << 12);
        assert_eq!(records.save(&record).unwrap_err().kind(), io::ErrorKind::StorageFull);
        assert!(records.of(record.id).exists());
        assert_eq!(records.load().unwrap(), []);
        assert!(!records.of(record.id).exists());
    }

    #[test]
    fn a_record_is_changed_also_on_a_full_disk() {
        let disk = small_disk();
        let records = Records::open(disk.0.path()).unwrap();
        let mut record = record();
        records.save(&record).unwrap();
        fill_but_for(&disk, 0);
        for phase in [MachinePhase::Running, MachinePhase::Ending, MachinePhase::Removing] {
            record.phase = phase;
            record.ended = Some("x".repeat(4000));
            records.save(&record).unwrap();
            assert_eq!(records.load().unwrap(), [record.clone()]);
        }
        records.remove(record.id).unwrap();
        assert_eq!(records.load().unwrap(), []);
    }
}
