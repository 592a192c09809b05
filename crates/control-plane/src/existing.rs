//! A database that does not belong to the files beside it.
//!
//! Disks and snapshots without rows look like remains of a crash, which recovery removes. If the database itself was lost, or
//! another one was named, they are all there is left of the workspaces. So a server whose database is of another installation
//! than the data directory's files refuses to start, unless it is told what to do with them. It never removes them.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use chrono::Utc;
use emergent_host::files::ensure_private_directory;
use emergent_wire::id::InstallationId;

use crate::config::Existing;

/// Where files are that belong to workspaces.
const HOLDING_FILES: [&str; 4] = ["disks", "snapshots", "firecracker/machines", "firecracker/snapshots"];
/// Where files of another installation are set aside.
const SET_ASIDE: &str = "set-aside";

/// Why the data directory can't be used with this database.
#[derive(Debug, thiserror::Error)]
pub enum ExistingError {
    /// It holds files that the database knows nothing of.
    #[error(
        "the data directory {} holds {files} files of workspaces of installation {}, but the database is of installation \
         {database}: it is new, was restored from elsewhere, or is another one. Nothing was changed. Do one of these. \
         (1) Put the right database back (emergent.db of a backup, or DATABASE_URL). (2) If it is lost: start once with --adopt, which \
         keeps the disks as snapshots in quarantine (see `emergent quarantine list`). (3) Start once with --discard-existing, which \
         moves the files to {} and begins anew; containers of the old installation keep running until they are removed",
        directory.display(), found.as_deref().unwrap_or("unknown"), directory.join(SET_ASIDE).display()
    )]
    OtherInstallation {
        /// The data directory.
        directory: PathBuf,
        /// How many files.
        files: usize,
        /// The installation that they belong to, if that is known.
        found: Option<String>,
        /// The database's.
        database: InstallationId,
    },
    /// The directory can't be looked at, or its files can't be moved.
    #[error("{}: {source}", path.display())]
    File {
        /// Which one.
        path: PathBuf,
        /// What the operating system said.
        source: io::Error,
    },
}

/// Refuses a database that does not belong to the directory's files, sets those aside, or gives the installation that the
/// database is to adopt. `knows_workspaces` tells whether the database has rows of workspaces: then a directory that has lost
/// its `installation-id` file is its own, and the database can't become another installation's.
pub(crate) fn check(
    directory: &Path,
    database: InstallationId,
    knows_workspaces: bool,
    existing: Existing,
) -> Result<Option<InstallationId>, ExistingError> {
    let found = fs::read_to_string(directory.join("installation-id")).ok().map(|id| id.trim().to_owned());
    if found.as_deref().map_or(knows_workspaces, |found| found == database.to_string()) {
        return Ok(None);
    }
    let holding: Vec<PathBuf> = HOLDING_FILES.iter().map(|name| directory.join(name)).collect();
    let files = holding.iter().map(|path| count(path)).sum::<Result<usize, _>>()?;
    if files == 0 {
        return Ok(None);
    }
    match existing {
        Existing::Discard => {}
        Existing::Adopt if !knows_workspaces => {
            // Without the file nobody knows the old id. The disks are found by their names all the same.
            return Ok(found.and_then(|found| found.parse().ok()));
        }
        Existing::Adopt | Existing::Refuse => {
            let directory = directory.to_owned();
            return Err(ExistingError::OtherInstallation { directory, files, found, database });
        }
    }
    let name = format!("{}-{}", Utc::now().format("%Y%m%d-%H%M%S"), found.as_deref().unwrap_or("unknown"));
    let aside = directory.join(SET_ASIDE).join(name);
    for path in holding.iter().filter(|path| path.exists()) {
        let to = aside.join(path.strip_prefix(directory).unwrap_or(path));
        let failed = |source| ExistingError::File { path: to.clone(), source };
        ensure_private_directory(to.parent().unwrap_or(&aside)).map_err(failed)?;
        fs::rename(path, &to).map_err(failed)?;
    }
    tracing::warn!(files, directory = %aside.display(), "files of another installation were set aside");
    Ok(None)
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
    fn files_of_another_installation_are_kept_whatever_happens() {
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
        // Only a new database can take the files over.
        assert_eq!(check(path, other, false, Adopt).unwrap(), Some(own));
        assert!(check(path, other, true, Adopt).is_err());
        fs::remove_file(path.join("installation-id")).unwrap();
        assert_eq!(check(path, other, false, Adopt).unwrap(), None);
        assert!(check(path, other, false, Refuse).is_err(), "nobody knows whose they are");
        check(path, other, true, Refuse).unwrap();
        assert_eq!(fs::read_to_string(path.join("disks/a.img")).unwrap(), "precious");
        check(path, other, false, Discard).unwrap();
        let aside = fs::read_dir(path.join(SET_ASIDE)).unwrap().next().unwrap().unwrap().path();
        assert_eq!(fs::read_to_string(aside.join("disks/a.img")).unwrap(), "precious");
        check(path, other, false, Refuse).unwrap();
    }
}
