//! The directory with the disks of workspaces.
//!
//! Servers that share a database use the same disks. So the data directory of the first server is stored in the database, and the other
//! servers on the same machine use it instead of their own. A file with a random id distinguishes it from a directory with the same
//! path on another machine.

use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use emergent_store::{Store, StoreError};
use uuid::Uuid;

use crate::server::write_private;
use crate::workspace::damaged_setting;
use crate::workspace::servers::another_is_running;

/// The setting in the database with the id and the path of the directory.
const SETTING: &str = "storage";
/// The file with the directory's id.
const ID_FILE: &str = "storage-id";

/// The directory can't be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StorageError {
    #[error("{}: {source}", path.display())]
    File { path: PathBuf, source: io::Error },
    #[error(
        "another server on this database keeps the disks of its workspaces in {}, and that directory is not on this machine: \
         servers that share a database must run on one machine. Give this one a database of its own",
        .0.display()
    )]
    Elsewhere(PathBuf),
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// A directory and its id.
#[derive(Debug, PartialEq, Eq)]
struct Storage {
    id: String,
    path: PathBuf,
}

impl Storage {
    /// The directory with this path. It gets an id if it has none.
    fn of(path: &Path) -> Result<Self, StorageError> {
        let file = path.join(ID_FILE);
        let failed = |source| StorageError::File { path: file.clone(), source };
        let id = match std::fs::read_to_string(&file) {
            Ok(id) => id,
            Err(error) if error.kind() == ErrorKind::NotFound => {
                let id = Uuid::new_v4().to_string();
                write_private(&file, &id).map_err(failed)?;
                id
            }
            Err(error) => return Err(failed(error)),
        };
        Ok(Self { id: id.trim().to_owned(), path: path.to_owned() })
    }

    fn to_setting(&self) -> String {
        format!("{} {}", self.id, self.path.display())
    }

    fn from_setting(text: &str) -> Result<Self, StoreError> {
        let damaged = || damaged_setting(SETTING, "it has no id and path");
        let (id, path) = text.split_once(' ').ok_or_else(damaged)?;
        Ok(Self { id: id.to_owned(), path: path.into() })
    }

    /// Whether the directory is on this machine.
    fn is_local(&self) -> bool {
        std::fs::read_to_string(self.path.join(ID_FILE)).is_ok_and(|id| id.trim() == self.id)
    }
}

/// The directory for disks, snapshots, the guest agent and the key. A server that does not share its database uses its own.
pub(crate) async fn directory(store: &Store, data_dir: &Path) -> Result<PathBuf, StorageError> {
    if !store.is_shared() {
        return Ok(data_dir.to_owned());
    }
    let own = Storage::of(data_dir)?;
    let known = Storage::from_setting(&store.setting_or_insert(SETTING, &own.to_setting()).await?)?;
    if known == own {
        return Ok(own.path);
    }
    if known.is_local() {
        tracing::info!(
            directory = %known.path.display(),
            "disks are kept in the directory of the other servers on this database"
        );
        return Ok(known.path);
    }
    if another_is_running(store).await? {
        return Err(StorageError::Elsewhere(known.path));
    }
    // The directory was moved or lost. Each workspace finds its disk, or reports that it is gone.
    if known.id != own.id {
        tracing::warn!(
            before = %known.path.display(), now = %own.path.display(),
            "the directory with the disks of workspaces is gone: this server keeps disks in its own data directory"
        );
    }
    store.put_setting(SETTING, &own.to_setting()).await?;
    Ok(own.path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_setting_without_an_id_and_a_path_is_damaged() {
        let storage = Storage { id: "1".to_owned(), path: "/a b".into() };
        assert_eq!(Storage::from_setting(&storage.to_setting()).unwrap(), storage);
        assert!(matches!(Storage::from_setting("/a"), Err(StoreError::Corrupt { table: "settings", .. })));
    }
}
