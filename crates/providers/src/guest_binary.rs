//! What goes into every sandbox, as files on the host, from where sandboxes get it.

use std::io::Write;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use emergent_guest_binary::{FILES, GUEST_SHA256};

/// A directory with the guest agent and its search engine.
#[derive(Clone, Debug)]
pub struct InstalledGuest {
    directory: PathBuf,
}

impl InstalledGuest {
    /// Writes the embedded files to a directory named after their hash, unless they are there.
    ///
    /// Sandboxes that run keep the files they were started with, so an older directory is never changed or removed.
    pub fn install(parent: &Path) -> std::io::Result<Self> {
        let directory = parent.join(&GUEST_SHA256[..16]);
        std::fs::create_dir_all(&directory)?;
        let directory = directory.canonicalize()?;
        for (name, bytes) in FILES {
            let path = directory.join(name);
            let is_whole =
                std::fs::metadata(&path).is_ok_and(|metadata| metadata.len() == bytes.len() as u64);
            if !is_whole {
                let temporary = directory.join(format!(".{name}-{}", std::process::id()));
                let mut options = std::fs::OpenOptions::new();
                let mut file =
                    options.write(true).create(true).truncate(true).mode(0o755).open(&temporary)?;
                file.write_all(bytes)?;
                file.set_permissions(std::fs::Permissions::from_mode(0o755))?;
                file.sync_all()?;
                std::fs::rename(&temporary, &path)?;
            }
        }
        Ok(Self { directory })
    }

    /// Where the files are.
    pub fn directory(&self) -> &Path {
        &self.directory
    }
}
