//! The store of snapshots: copies of microVMs' disks, some with memory. A snapshot outlives its microVM.

use std::fs;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use emergent_host::copy::taken_bytes;
use emergent_host::files::remove_if_there;
use emergent_wire::SnapshotId;
use emergent_wire::manager::MachineSnapshot;
use rustix::fs::{AtFlags, Mode, OFlags};

use crate::record::write_whole;

/// The snapshots of one manager.
#[derive(Clone, Debug)]
pub(crate) struct Snapshots {
    directory: PathBuf,
}

impl Snapshots {
    pub(crate) fn open(data_dir: &Path) -> io::Result<Self> {
        let directory = data_dir.join("snapshots");
        fs::create_dir_all(&directory)?;
        Ok(Self { directory })
    }

    pub(crate) fn file(&self, id: SnapshotId) -> PathBuf {
        self.directory.join(format!("{id}.ext4"))
    }

    /// The files for state and memory of a snapshot that has them.
    pub(crate) fn memory(&self, id: SnapshotId) -> (PathBuf, PathBuf) {
        (self.directory.join(format!("{id}.state")), self.directory.join(format!("{id}.memory")))
    }

    /// Moves the state and the memory that a microVM's process has written in its jail. From then on they are read-only.
    /// Returns the bytes that they occupy.
    pub(crate) fn take_memory(&self, id: SnapshotId, state: &Path, memory: &Path) -> io::Result<u64> {
        let (own_state, own_memory) = self.memory(id);
        let mut bytes = 0;
        for (from, to) in [(state, own_state), (memory, own_memory)] {
            take_over(from, &to)?;
            bytes += taken_bytes(&to)?;
        }
        Ok(bytes)
    }

    fn description(&self, id: SnapshotId) -> PathBuf {
        self.directory.join(format!("{id}.json"))
    }

    /// Writes the description of a snapshot, which makes it complete.
    pub(crate) fn describe(&self, snapshot: &MachineSnapshot) -> io::Result<()> {
        write_whole(&self.description(snapshot.id), &serde_json::to_vec(snapshot)?)
    }

    pub(crate) fn get(&self, id: SnapshotId) -> io::Result<MachineSnapshot> {
        Ok(serde_json::from_slice(&fs::read(self.description(id))?)?)
    }

    /// Removes a snapshot, complete or not. The description is removed first, which makes it incomplete.
    pub(crate) fn remove(&self, id: SnapshotId) -> io::Result<()> {
        let (state, memory) = self.memory(id);
        for path in [self.description(id), self.file(id), self.file(id).with_extension("new"), state, memory]
        {
            remove_if_there(&path)?;
        }
        Ok(())
    }

    /// All complete snapshots.
    pub(crate) fn list(&self) -> io::Result<Vec<MachineSnapshot>> {
        let mut found: Vec<MachineSnapshot> =
            self.ids()?.into_iter().filter_map(|id| self.get(id).ok()).collect();
        found.sort_by_key(|snapshot| snapshot.id);
        Ok(found)
    }

    /// Removes incomplete snapshots.
    pub(crate) fn remove_incomplete(&self) -> io::Result<()> {
        self.ids()?.into_iter().filter(|id| self.get(*id).is_err()).try_for_each(|id| self.remove(id))
    }

    fn ids(&self) -> io::Result<Vec<SnapshotId>> {
        let id = |entry: io::Result<fs::DirEntry>| entry.ok()?.path().file_stem()?.to_str()?.parse().ok();
        let mut ids: Vec<SnapshotId> = fs::read_dir(&self.directory)?.filter_map(id).collect();
        ids.sort_unstable();
        ids.dedup();
        Ok(ids)
    }
}

/// Moves a file that a process in a jail has made. The process is not trusted: the file must be a regular file with one
/// name, it is checked and moved by one descriptor, and no process may have it open for writing.
fn take_over(from: &Path, to: &Path) -> io::Result<()> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = fs::File::from(rustix::fs::open(from, flags, Mode::empty())?);
    let found = file.metadata()?;
    if !found.is_file() || found.nlink() != 1 {
        let message = format!("{} is not a regular file with one name", from.display());
        return Err(io::Error::new(io::ErrorKind::InvalidData, message));
    }
    std::os::unix::fs::fchown(&file, Some(0), Some(0))?;
    file.set_permissions(fs::Permissions::from_mode(0o444))?;
    if is_open_for_writing(&file)? {
        let message = format!("{} is still being written", from.display());
        return Err(io::Error::new(io::ErrorKind::ResourceBusy, message));
    }
    file.sync_all()?;
    let itself = format!("/proc/self/fd/{}", file.as_raw_fd());
    rustix::fs::linkat(rustix::fs::CWD, itself, rustix::fs::CWD, to, AtFlags::SYMLINK_FOLLOW)?;
    fs::remove_file(from)
}

/// Whether a process has a file open or mapped for writing. The kernel gives no read lease for such a file.
fn is_open_for_writing(file: &fs::File) -> io::Result<bool> {
    // SAFETY: the descriptor is open, and both calls take a number.
    let lease = |kind: libc::c_int| match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, kind) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    };
    match lease(libc::F_RDLCK) {
        Ok(()) => lease(libc::F_UNLCK).map(|()| false),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(true),
        // The file system has no leases.
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => Ok(false),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use super::*;

    #[test]
    fn links_devices_and_files_that_are_written_are_not_taken_over() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        fs::write(path("hosts"), "host").unwrap();
        fs::set_permissions(path("hosts"), fs::Permissions::from_mode(0o640)).unwrap();
        std::os::unix::fs::symlink(path("hosts"), path("link")).unwrap();
        rustix::fs::mknodat(rustix::fs::CWD, path("fifo"), rustix::fs::FileType::Fifo, Mode::RWXU, 0)
            .unwrap();
        fs::write(path("twice"), "").unwrap();
        fs::hard_link(path("twice"), path("again")).unwrap();
        for name in ["link", "fifo", "twice"] {
            assert!(take_over(&path(name), &path("to")).is_err(), "{name}");
        }
        assert!(!path("to").exists());
        assert_eq!(fs::metadata(path("hosts")).unwrap().mode() & 0o777, 0o640);
        fs::write(path("own"), "text").unwrap();
        let writer = fs::OpenOptions::new().append(true).open(path("own")).unwrap();
        assert_eq!(take_over(&path("own"), &path("to")).unwrap_err().kind(), io::ErrorKind::ResourceBusy);
        drop(writer);
        take_over(&path("own"), &path("to")).unwrap();
        assert_eq!((fs::read_to_string(path("to")).unwrap().as_str(), path("own").exists()), ("text", false));
    }
}
