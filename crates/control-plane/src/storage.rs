//! Where the disks of workspaces are.
//!
//! Servers on one database work on the same workspaces, so they must find the same disks: the first one's data directory
//! is written down in the database, and the others on that machine use it, whatever their own is. A file in it with a
//! random id tells it from a directory of the same name on another machine.

use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use emergent_store::{Store, StoreError};
use uuid::Uuid;

use crate::server::write_private;
use crate::workspace::servers::another_works;

/// Where the database says which directory it is.
const SETTING: &str = "storage";
/// The file with the directory's id.
const ID_FILE: &str = "storage-id";

/// Why there is no directory to use.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StorageError {
    #[error("{}: {source}", path.display())]
    File { path: PathBuf, source: io::Error },
    #[error(
        "another server on this database keeps the disks of its workspaces in {}, and that directory is not here: \
         servers that share a database must run on one machine. Give this one a database of its own",
        .0.display()
    )]
    Elsewhere(PathBuf),
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// A directory, and what makes it that one.
#[derive(Debug, PartialEq, Eq)]
struct Storage {
    id: String,
    path: PathBuf,
}

impl Storage {
    /// This directory, which gets an id if it has none.
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

    fn from_setting(text: &str) -> Self {
        let (id, path) = text.split_once(' ').unwrap_or_default();
        Self { id: id.to_owned(), path: path.into() }
    }

    /// Whether the directory is on this machine.
    fn is_here(&self) -> bool {
        std::fs::read_to_string(self.path.join(ID_FILE)).is_ok_and(|id| id.trim() == self.id)
    }
}

/// The directory for disks, snapshots, the guest agent and the key; a server that is alone uses its own.
pub(crate) async fn directory(store: &Store, data_dir: &Path) -> Result<PathBuf, StorageError> {
    if !store.is_shared() {
        return Ok(data_dir.to_owned());
    }
    let own = Storage::of(data_dir)?;
    let known = Storage::from_setting(&store.setting_or_insert(SETTING, &own.to_setting()).await?);
    if known == own {
        return Ok(own.path);
    }
    if known.is_here() {
        tracing::info!(
            directory = %known.path.display(),
            "disks are kept where the other servers on this database keep them"
        );
        return Ok(known.path);
    }
    if another_works(store).await? {
        return Err(StorageError::Elsewhere(known.path));
    }
    // Moved with all that is in it, or lost: what it held is found, or said to be gone, workspace by workspace.
    if known.id != own.id {
        tracing::warn!(
            before = %known.path.display(), now = %own.path.display(),
            "the directory that workspaces' disks were in is gone: new ones are kept in this server's own"
        );
    }
    store.put_setting(SETTING, &own.to_setting()).await?;
    Ok(own.path)
}
