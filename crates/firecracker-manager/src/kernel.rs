//! The kernel that microVMs run: a copy of the one that was named, where jails can link to it.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use emergent_host::files::create_temporary;

use crate::error::{ManagerError, on_host};
use crate::needs;
use crate::record::make_readable;

/// The kernel of one manager.
#[derive(Debug)]
pub(crate) struct Kernel {
    named: PathBuf,
    copy: PathBuf,
    /// Held by whoever makes the copy: who comes meanwhile waits for it.
    copying: tokio::sync::Mutex<()>,
}

impl Kernel {
    pub(crate) fn new(named: PathBuf, data_dir: &Path) -> Self {
        Self { named, copy: data_dir.join("kernel"), copying: tokio::sync::Mutex::default() }
    }

    /// The copy, made anew when another kernel was named or put there.
    pub(crate) async fn get(&self) -> Result<PathBuf, ManagerError> {
        needs::kernel(&self.named).map_err(|lack| ManagerError::Unavailable(lack.to_string()))?;
        let _one = self.copying.lock().await;
        let (named, copy) = (self.named.clone(), self.copy.clone());
        on_host("taking over the kernel", move || refresh(&named, &copy)).await?;
        Ok(self.copy.clone())
    }
}

fn refresh(named: &Path, copy: &Path) -> io::Result<()> {
    let found = fs::metadata(named)?;
    let is_same =
        |kept: fs::Metadata| kept.len() == found.len() && kept.modified().ok() == found.modified().ok();
    if fs::metadata(copy).is_ok_and(is_same) {
        return Ok(());
    }
    let (unfinished, mut file) = create_temporary(copy)?;
    let copied = io::copy(&mut fs::File::open(named)?, &mut file)
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
    async fn many_at_once_get_one_copy_and_another_kernel_another() {
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
        assert!(matches!(kernel.get().await, Err(ManagerError::Unavailable(_))));
    }
}
