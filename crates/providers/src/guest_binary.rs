//! The guest agent's binary as a file on the host, from where sandboxes get it.

use std::io::Write;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use emergent_guest_binary::{GUEST_BINARY, GUEST_BINARY_SHA256};

/// The agent's binary, written to a directory of the server.
#[derive(Clone, Debug)]
pub struct InstalledGuest {
    path: PathBuf,
}

impl InstalledGuest {
    /// Writes the embedded binary under its hash, unless it is there.
    ///
    /// Sandboxes that run keep the file they were started with, so an older one is never changed or removed here.
    pub fn install(directory: &Path) -> std::io::Result<Self> {
        std::fs::create_dir_all(directory)?;
        let directory = directory.canonicalize()?;
        let path = directory.join(format!("emergent-guest-{}", &GUEST_BINARY_SHA256[..16]));
        let is_whole =
            std::fs::metadata(&path).is_ok_and(|metadata| metadata.len() == GUEST_BINARY.len() as u64);
        if !is_whole {
            let temporary = directory.join(format!(".emergent-guest-{}", std::process::id()));
            let mut options = std::fs::OpenOptions::new();
            let mut file = options.write(true).create(true).truncate(true).mode(0o755).open(&temporary)?;
            file.write_all(GUEST_BINARY)?;
            file.set_permissions(std::fs::Permissions::from_mode(0o755))?;
            file.sync_all()?;
            std::fs::rename(&temporary, &path)?;
        }
        Ok(Self { path })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }
}
