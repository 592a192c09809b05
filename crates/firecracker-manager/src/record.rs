//! What is written down of a microVM: enough to find, use, end and remove it after any crash.
//!
//! ```text
//!             create                  start                    agent answers
//!  (nothing) ───────▶ reserved ──────────────▶ configured ───────────────────▶ running ◀──▶ paused
//!                        │                      │   ▲                             │
//!                        │ undone               │   │ start                       │ stop, or it ended
//!                        ▼                      ▼   │                             ▼
//!                    (nothing) ◀── removing ◀── stopped ◀──────────────────────────
//! ```
//!
//! A phase is written before what it stands for is begun: what is found under it after a crash may be there in part.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use emergent_wire::WorkspaceId;
use emergent_wire::manager::{MachinePhase, MachineRequest};
use serde::{Deserialize, Serialize};

use crate::process::Process;

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
    /// Why it ended, when it was not told to.
    pub(crate) ended: Option<String>,
}

impl Record {
    pub(crate) fn new(id: WorkspaceId, request: MachineRequest) -> Self {
        Self { id, request, phase: MachinePhase::Reserved, slot: None, process: None, ended: None }
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

    pub(crate) fn save(&self, record: &Record) -> io::Result<()> {
        let directory = self.of(record.id);
        fs::create_dir_all(&directory)?;
        write_whole(&directory.join("machine.json"), &serde_json::to_vec_pretty(record)?)
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
    use std::os::unix::fs::OpenOptionsExt;
    let unfinished = path.with_extension("new");
    let mut file =
        fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&unfinished)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    fs::rename(unfinished, path)
}

/// What jails link to is read by the users of all microVMs.
pub(crate) fn make_readable(path: &Path) -> std::io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(path, fs::Permissions::from_mode(0o444))
}
