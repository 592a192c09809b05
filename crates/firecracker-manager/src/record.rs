//! The record of a microVM: enough to find, use, end and remove it after any crash.
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
//! A phase is saved before its work begins. So after a crash, the work of the saved phase may be done in part.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use emergent_host::files::write_atomically;
use emergent_wire::WorkspaceId;
use emergent_wire::manager::{MachinePhase, MachineRequest};
use emergent_wire::workspace::NetworkMode;
use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::process::Process;
use crate::slot::MOST;

/// The size of a record's file. It is more than a record needs, also with the reason of its microVM's end.
const RECORD_BYTES: usize = 8 << 10;

/// The record of a microVM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Record {
    pub(crate) id: WorkspaceId,
    pub(crate) request: MachineRequest,
    pub(crate) phase: MachinePhase,
    /// Its slot: from before anything is made for it until all of that is removed.
    pub(crate) slot: Option<u32>,
    /// Its process, after it was started.
    pub(crate) process: Option<Process>,
    /// The boot id of the host when the process was started. After a restart of the host its id belongs to another process.
    pub(crate) boot: Option<String>,
    /// Why it ended, if it was not stopped.
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

/// A record that can't be parsed: a newer manager has written it, or the file was changed. Its microVM keeps everything that
/// it has, and can only be removed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the record of microVM {id} can't be parsed: {reason}: start the version of the manager that wrote it, or destroy its \
     workspace"
)]
pub struct DamagedRecord {
    pub(crate) id: WorkspaceId,
    /// Its slot, as far as the record can be read.
    pub(crate) slot: Option<u32>,
    /// Its network mode, as far as the record can be read.
    pub(crate) network: Option<NetworkMode>,
    pub(crate) reason: String,
}

impl DamagedRecord {
    fn new(id: WorkspaceId, text: &[u8], reason: &serde_json::Error) -> Self {
        let known: Value = serde_json::from_slice(text).unwrap_or_default();
        let slot = known["slot"].as_u64().and_then(|slot| u32::try_from(slot).ok());
        Self {
            id,
            slot: slot.filter(|slot| *slot < MOST),
            network: NetworkMode::deserialize(&known["request"]["network"]).ok(),
            reason: reason.to_string(),
        }
    }
}

/// All records of a manager.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct LoadedRecords {
    pub(crate) readable: Vec<Record>,
    pub(crate) damaged: Vec<DamagedRecord>,
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

    /// The directory of one microVM.
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

    /// Removes a microVM's directory. The record is removed last, so that recovery finds it after a crash.
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

    /// Loads all records. A directory without a record is left over from a removal, and is removed.
    pub(crate) fn load(&self) -> io::Result<LoadedRecords> {
        let mut loaded = LoadedRecords::default();
        for entry in fs::read_dir(&self.directory)? {
            let entry = entry?;
            let text = match fs::read(entry.path().join("machine.json")) {
                Ok(text) => text,
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    fs::remove_dir_all(entry.path())?;
                    continue;
                }
                Err(error) => return Err(error),
            };
            match (serde_json::from_slice(&text), entry.file_name().to_string_lossy().parse()) {
                (Ok(record), _) => loaded.readable.push(record),
                (Err(error), Ok(id)) => loaded.damaged.push(DamagedRecord::new(id, &text, &error)),
                (Err(error), Err(_)) => {
                    tracing::error!(path = %entry.path().display(), %error, "a directory is not a microVM's and is ignored");
                }
            }
        }
        Ok(loaded)
    }
}

/// Writes a private file atomically.
pub(crate) fn write_whole(path: &Path, bytes: &[u8]) -> io::Result<()> {
    write_atomically(path, bytes, 0o600)
}

/// Writes a file atomically, also on a full disk. Two files of full size exist from the first save. The new text overwrites
/// the second file, and then the two exchange their names. A full disk must not prevent this, because a removal is saved
/// before it frees space. On a copy-on-write file system this is no better than [`write_whole`].
fn rewrite(path: &Path, mut text: Vec<u8>) -> io::Result<()> {
    let other = path.with_extension("new");
    text.resize(text.len().max(RECORD_BYTES), b'\n');
    if !path.exists() {
        // Both files exist before the record does.
        let first = path.with_extension("first");
        write_over(&first, &text)?;
        write_over(&other, &text)?;
        fs::rename(first, path)?;
    } else {
        write_over(&other, &text)?;
        match renameat_with(CWD, &other, CWD, path, RenameFlags::EXCHANGE) {
            // The file system has no exchange.
            Err(Errno::INVAL | Errno::NOSYS) => fs::rename(&other, path)?,
            exchanged => exchanged?,
        }
    }
    // The exchange must be on the disk before the next save overwrites the second file.
    fs::File::open(path.parent().unwrap_or(path))?.sync_all()
}

fn write_over(path: &Path, bytes: &[u8]) -> io::Result<()> {
    use std::os::unix::fs::OpenOptionsExt;
    let mut file = fs::OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(path)?;
    file.write_all(bytes)?;
    file.set_len(bytes.len() as u64)?;
    file.sync_all()
}

/// Makes a file readable for the users of all microVMs. Jails have hard links to it.
pub(crate) fn make_readable(path: &Path) -> std::io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(path, fs::Permissions::from_mode(0o444))
}

#[cfg(test)]
pub(crate) mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use emergent_wire::id::InstallationId;
    use emergent_wire::workspace::ResourceLimits;
    use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

    use super::*;

    /// A small file system that is unmounted on drop.
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

    /// Fills a disk, except for some bytes.
    fn fill_except(disk: &Disk, bytes: u64) {
        let filler = disk.0.path().join("filler");
        let full = fs::write(&filler, vec![1; 1 << 20]).unwrap_err();
        assert_eq!(full.kind(), io::ErrorKind::StorageFull);
        let filler = fs::OpenOptions::new().write(true).open(filler).unwrap();
        filler.set_len(filler.metadata().unwrap().len() - bytes).unwrap();
    }

    pub(crate) fn record() -> Record {
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
    fn a_record_is_not_created_without_space_for_its_changes() {
        let disk = small_disk();
        let records = Records::open(disk.0.path()).unwrap();
        let record = record();
        // Enough for the record and its directory, not for the second file.
        fill_except(&disk, 3 << 12);
        assert_eq!(records.save(&record).unwrap_err().kind(), io::ErrorKind::StorageFull);
        assert!(records.of(record.id).exists());
        assert_eq!(records.load().unwrap().readable, []);
        assert!(!records.of(record.id).exists());
    }

    #[test]
    fn a_record_can_be_changed_on_a_full_disk() {
        let disk = small_disk();
        let records = Records::open(disk.0.path()).unwrap();
        let mut record = record();
        records.save(&record).unwrap();
        fill_except(&disk, 0);
        for phase in [MachinePhase::Running, MachinePhase::Ending, MachinePhase::Removing] {
            record.phase = phase;
            record.ended = Some("x".repeat(4000));
            records.save(&record).unwrap();
            assert_eq!(records.load().unwrap().readable, [record.clone()]);
        }
        records.remove(record.id).unwrap();
        assert_eq!(records.load().unwrap().readable, []);
    }
}
