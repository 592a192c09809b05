//! The kernel of microVMs: a copy of the configured file, on the file system of the jails, which link to it.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use emergent_host::files::create_temporary;

use crate::error::{ManagerError, on_host};
use crate::record::make_readable;
use crate::requirements;

/// The kernel of one manager.
#[derive(Debug)]
pub(crate) struct Kernel {
    configured: PathBuf,
    copy: PathBuf,
    /// One caller makes the copy, and concurrent callers wait for it.
    copying: tokio::sync::Mutex<()>,
}

impl Kernel {
    pub(crate) fn new(configured: PathBuf, data_dir: &Path) -> Self {
        Self { configured, copy: data_dir.join("kernel"), copying: tokio::sync::Mutex::default() }
    }

    /// The copy. It is made again when the configured file has changed.
    pub(crate) async fn get(&self) -> Result<PathBuf, ManagerError> {
        requirements::kernel(&self.configured)?;
        let _one = self.copying.lock().await;
        let (configured, copy) = (self.configured.clone(), self.copy.clone());
        on_host("copying the kernel", move || refresh(&configured, &copy)).await?;
        Ok(self.copy.clone())
    }
}

fn refresh(configured: &Path, copy: &Path) -> io::Result<()> {
    let found = fs::metadata(configured)?;
    let is_same =
        |kept: fs::Metadata| kept.len() == found.len() && kept.modified().ok() == found.modified().ok();
    if fs::metadata(copy).is_ok_and(is_same) {
        return Ok(());
    }
    let (unfinished, mut file) = create_temporary(copy)?;
    let copied = io::copy(&mut fs::File::open(configured)?, &mut file)
        .and_then(|_| file.set_modified(found.modified()?))
        .and_then(|()| make_readable(&unfinished))
        .and_then(|()| fs::rename(&unfinished, copy));
    if copied.is_err() {
        let _ = fs::remove_file(&unfinished);
    }
    copied
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use super::*;

    #[tokio::test]
    async fn concurrent_callers_share_a_copy_and_a_changed_kernel_is_copied_again() {
        let directory = tempfile::tempdir().unwrap();
        let named = directory.path().join("vmlinux");
        fs::write(&named, vec![1; 8 << 20]).unwrap();
        let kernel = Kernel::new(named.clone(), directory.path());
        let copies = futures_util::future::join_all((0..20).map(|_| kernel.get())).await;
        for copy in copies {
            assert_eq!(fs::read(copy.unwrap()).unwrap(), vec![1; 8 << 20]);
        }
        fs::write(&named, "another").unwrap();
        assert_eq!(fs::read(kernel.get().await.unwrap()).unwrap(), b"another");
        fs::remove_file(&named).unwrap();
        assert!(matches!(kernel.get().await, Err(ManagerError::UnmetRequirement(_))));
    }
}
