//! Copies of microVMs' disks, and of the memory of some, which outlive them.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use emergent_host::copy::taken_bytes;
use emergent_wire::SnapshotId;
use emergent_wire::manager::MachineSnapshot;

use crate::record::{make_readable, write_whole};

/// The copies of one manager.
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

    /// State and memory of a copy that has them.
    pub(crate) fn memory(&self, id: SnapshotId) -> (PathBuf, PathBuf) {
        (self.directory.join(format!("{id}.state")), self.directory.join(format!("{id}.memory")))
    }

    /// Takes over what a microVM's process has written in its jail. Microvms that are made of it read it, nobody writes.
    pub(crate) fn take_memory(&self, id: SnapshotId, state: &Path, memory: &Path) -> io::Result<u64> {
        let (own_state, own_memory) = self.memory(id);
        let mut bytes = 0;
        for (from, to) in [(state, own_state), (memory, own_memory)] {
            std::os::unix::fs::chown(from, Some(0), Some(0))?;
            make_readable(from)?;
            fs::File::open(from)?.sync_all()?;
            fs::rename(from, &to)?;
            bytes += taken_bytes(&to)?;
        }
        Ok(bytes)
    }

    fn description(&self, id: SnapshotId) -> PathBuf {
        self.directory.join(format!("{id}.json"))
    }

    /// Writes down what a copy is, when it is whole.
    pub(crate) fn describe(&self, snapshot: &MachineSnapshot) -> io::Result<()> {
        write_whole(&self.description(snapshot.id), &serde_json::to_vec(snapshot)?)
    }

    pub(crate) fn get(&self, id: SnapshotId) -> io::Result<MachineSnapshot> {
        Ok(serde_json::from_slice(&fs::read(self.description(id))?)?)
    }

    /// Removes a copy, or the part of it that there is. Its description goes first: a copy without one is none.
    pub(crate) fn remove(&self, id: SnapshotId) -> io::Result<()> {
        let (state, memory) = self.memory(id);
        for path in [self.description(id), self.file(id), self.file(id).with_extension("new"), state, memory]
        {
            match fs::remove_file(path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }

    /// All copies that are whole.
    pub(crate) fn list(&self) -> io::Result<Vec<MachineSnapshot>> {
        let mut found: Vec<MachineSnapshot> =
            self.ids()?.into_iter().filter_map(|id| self.get(id).ok()).collect();
        found.sort_by_key(|snapshot| snapshot.id);
        Ok(found)
    }

    /// Removes parts of copies that were never finished.
    pub(crate) fn sweep(&self) -> io::Result<()> {
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
