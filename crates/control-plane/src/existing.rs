//! The check that the database belongs to the files in the data directory.
//!
//! If the database was lost, or another one was configured, the disks and snapshots in the data directory are all that is left of the
//! workspaces. So a server whose database has another installation id than these files refuses to start, unless the operator
//! chooses to adopt or to discard them. The server never removes them.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use chrono::Utc;
use emergent_host::files::ensure_private_directory;
use emergent_wire::id::InstallationId;

use crate::config::Existing;

/// The directories with files of workspaces.
const FILE_DIRECTORIES: [&str; 4] = ["disks", "snapshots", "firecracker/machines", "firecracker/snapshots"];
/// The directory to which files of another installation are moved.
const SET_ASIDE: &str = "set-aside";

/// The data directory can't be used with this database.
#[derive(Debug, thiserror::Error)]
pub enum ExistingError {
    /// It has files of another installation than the database.
    #[error(
        "the data directory {} holds {files} files of workspaces of installation {}, but the database is of installation \
         {database}: the database is new, was restored from another server, or is the wrong one. Nothing was changed. Do one of these. \
         (1) Put the right database back (emergent.db of a backup, or DATABASE_URL). (2) If it is lost: start once with --adopt, which \
         keeps the disks as snapshots in quarantine (see `emergent quarantine list`). (3) Start once with --discard-existing, which \
         moves the files to {} and starts an empty installation; containers of the old installation keep running until they are removed",
        directory.display(), found.as_deref().unwrap_or("unknown"), directory.join(SET_ASIDE).display()
    )]
    OtherInstallation {
        /// The data directory.
        directory: PathBuf,
        /// The number of files.
        files: usize,
        /// The installation of the files, if it is known.
        found: Option<String>,
        /// The installation of the database.
        database: InstallationId,
    },
    /// A file can't be read, or a directory can't be moved.
    #[error("{}: {source}", path.display())]
    File {
        /// The file or directory.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
}

/// Checks that the files in the directory belong to the database. If they do not, moves them aside, returns the installation that the
/// database is to adopt, or fails, according to `existing`.
///
/// `has_workspaces` tells whether the database has rows of workspaces. Then a directory without the file `installation-id` belongs to
/// it, and the database can't adopt another installation.
pub(crate) fn check(
    directory: &Path,
    database: InstallationId,
    has_workspaces: bool,
    existing: Existing,
) -> Result<Option<InstallationId>, ExistingError> {
    let found = installation_of(directory)?;
    if found.as_deref().map_or(has_workspaces, |found| found == database.to_string()) {
        return Ok(None);
    }
    let directories: Vec<PathBuf> = FILE_DIRECTORIES.iter().map(|name| directory.join(name)).collect();
    let files = directories.iter().map(|path| count(path)).sum::<Result<usize, _>>()?;
    if files == 0 {
        return Ok(None);
    }
    match existing {
        Existing::Discard => {}
        Existing::Adopt if !has_workspaces => {
            // Without the file the old id is unknown. The disks are found by their names.
            return Ok(found.and_then(|found| found.parse().ok()));
        }
        Existing::Adopt | Existing::Refuse => {
            let directory = directory.to_owned();
            return Err(ExistingError::OtherInstallation { directory, files, found, database });
        }
    }
    let name = format!("{}-{}", Utc::now().format("%Y%m%d-%H%M%S"), found.as_deref().unwrap_or("unknown"));
    let aside = directory.join(SET_ASIDE).join(name);
    for path in directories.iter().filter(|path| path.exists()) {
        let to = aside.join(path.strip_prefix(directory).unwrap_or(path));
        let failed = |source| ExistingError::File { path: to.clone(), source };
        ensure_private_directory(to.parent().unwrap_or(&aside)).map_err(failed)?;
        fs::rename(path, &to).map_err(failed)?;
    }
    tracing::warn!(files, directory = %aside.display(), "files of another installation were moved aside");
    Ok(None)
}

/// The installation that the directory's files belong to. None if the directory has no file with its id.
fn installation_of(directory: &Path) -> Result<Option<String>, ExistingError> {
    let path = directory.join("installation-id");
    match fs::read_to_string(&path) {
        Ok(id) => Ok(Some(id.trim().to_owned())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(ExistingError::File { path, source }),
    }
}

fn count(directory: &Path) -> Result<usize, ExistingError> {
    match fs::read_dir(directory) {
        Ok(entries) => Ok(entries.count()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(0),
        Err(source) => Err(ExistingError::File { path: directory.to_owned(), source }),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use Existing::{Adopt, Discard, Refuse};

    use super::*;

    #[test]
    fn files_of_another_installation_are_always_kept() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        let (own, other) = (InstallationId::generate(), InstallationId::generate());
        fs::write(path.join("installation-id"), own.to_string()).unwrap();
        check(path, other, true, Refuse).unwrap();
        fs::create_dir_all(path.join("disks")).unwrap();
        fs::write(path.join("disks/a.img"), "precious").unwrap();
        check(path, own, false, Refuse).unwrap();
        assert!(matches!(
            check(path, other, true, Refuse),
            Err(ExistingError::OtherInstallation { files: 1, .. })
        ));
        // Only a new database can adopt the installation.
        assert_eq!(check(path, other, false, Adopt).unwrap(), Some(own));
        assert!(check(path, other, true, Adopt).is_err());
        fs::remove_file(path.join("installation-id")).unwrap();
        assert_eq!(check(path, other, false, Adopt).unwrap(), None);
        assert!(check(path, other, false, Refuse).is_err(), "their installation is unknown");
        check(path, other, true, Refuse).unwrap();
        assert_eq!(fs::read_to_string(path.join("disks/a.img")).unwrap(), "precious");
        check(path, other, false, Discard).unwrap();
        let aside = fs::read_dir(path.join(SET_ASIDE)).unwrap().next().unwrap().unwrap().path();
        assert_eq!(fs::read_to_string(aside.join("disks/a.img")).unwrap(), "precious");
        check(path, other, false, Refuse).unwrap();
    }
}
