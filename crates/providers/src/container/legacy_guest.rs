//! Repair of the directories that older versions shared with all sandboxes: the guest agent's files on the host. A gVisor
//! sandbox could write to them, although they were mounted read-only (see [`guest_image`](super::guest_image)).
//!
//! Containers of older versions mount those directories until they are destroyed. So a directory stays while a container uses
//! it. Its files are compared with the hash in its name, replaced if they differ, and made immutable, which no process of a
//! sandbox can undo.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use emergent_guest_binary::FILES;
use emergent_host::files::{ensure_private_directory, write_atomically};
use rustix::fs::{IFlags, Mode, OFlags, ioctl_getflags, ioctl_setflags, open};
use sha2::{Digest, Sha256};

/// A directory that an older version shared.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SharedDirectory {
    pub(crate) path: PathBuf,
    /// Its files differed from those that the older version wrote.
    pub(crate) was_altered: bool,
    /// Sandboxes can't write to it any more.
    pub(crate) is_protected: bool,
}

/// Checks, repairs and protects each directory that older versions shared.
pub(crate) fn repair(parent: &Path) -> io::Result<Vec<SharedDirectory>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(parent)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let is_shared = name.len() == 16 && name.bytes().all(|byte| byte.is_ascii_hexdigit());
        if is_shared && entry.file_type()?.is_dir() {
            let path = entry.path();
            let was_altered = repair_directory(&path, &name)?;
            let is_protected = set_immutable(&path, true).is_ok();
            found.push(SharedDirectory { path, was_altered, is_protected });
        }
    }
    Ok(found)
}

/// Removes a shared directory that no container uses any more.
pub(crate) fn remove(path: &Path) -> io::Result<()> {
    // If the flag can't be cleared, the removal reports the error.
    let _ = set_immutable(path, false);
    fs::remove_dir_all(path)
}

/// Restores the files. True: they had been altered.
fn repair_directory(path: &Path, name: &str) -> io::Result<bool> {
    let bytes: Vec<Option<Vec<u8>>> = FILES.iter().map(|(file, _)| read(&path.join(file))).collect();
    let mut hash = Sha256::new();
    bytes.iter().flatten().for_each(|bytes| hash.update(bytes));
    let is_original = hex::encode(hash.finalize()).starts_with(name);
    // A directory that was repaired before.
    let is_current = FILES.iter().zip(&bytes).all(|((_, own), found)| found.as_deref() == Some(*own));
    let is_expected = |entry: &fs::DirEntry| FILES.iter().any(|(file, _)| entry.file_name() == *file);
    let unexpected: Vec<fs::DirEntry> =
        fs::read_dir(path)?.flatten().filter(|entry| !is_expected(entry)).collect();
    let is_unaltered = (is_original || is_current) && unexpected.iter().all(is_interrupted_install);
    if is_unaltered && unexpected.is_empty() && is_immutable(path) {
        return Ok(false);
    }
    let _ = set_immutable(path, false);
    for entry in unexpected {
        let path = entry.path();
        if entry.file_type()?.is_dir() { fs::remove_dir_all(path)? } else { fs::remove_file(path)? }
    }
    // New files replace the old ones in any case, because a sandbox may hold the old ones open.
    for ((file, own), found) in FILES.iter().zip(&bytes) {
        let good = found.as_deref().filter(|_| is_original).unwrap_or(own);
        write_atomically(&path.join(file), good, 0o755)?;
    }
    ensure_private_directory(path.parent().unwrap_or(path))?;
    Ok(!is_unaltered)
}

/// Whether a file may be a partial write of an older version that was killed: `.guest-PID`, `.search-PID`.
fn is_interrupted_install(entry: &fs::DirEntry) -> bool {
    let name = entry.file_name().to_string_lossy().into_owned();
    let is_temporary = FILES.iter().any(|(file, _)| name.starts_with(&format!(".{file}-")));
    is_temporary && entry.file_type().is_ok_and(|kind| kind.is_file())
}

/// A file's bytes. None: it is no regular file, or too large.
fn read(path: &Path) -> Option<Vec<u8>> {
    const MAX_FILE_BYTES: u64 = 256 << 20;
    let metadata = fs::symlink_metadata(path).ok()?;
    if !metadata.is_file() || metadata.len() > MAX_FILE_BYTES {
        return None;
    }
    fs::read(path).ok()
}

fn is_immutable(directory: &Path) -> bool {
    let flags = |path: &Path| open_plain(path).and_then(|file| Ok(ioctl_getflags(file)?));
    let is_set = |path: &Path| flags(path).is_ok_and(|flags| flags.contains(IFlags::IMMUTABLE));
    is_set(directory) && FILES.iter().all(|(name, _)| is_set(&directory.join(name)))
}

/// Sets or clears the flag on the directory and its files. Clearing begins with the directory, setting ends with it.
fn set_immutable(directory: &Path, immutable: bool) -> io::Result<()> {
    let set = |path: &Path| -> io::Result<()> {
        let file = open_plain(path)?;
        let mut flags = ioctl_getflags(&file)?;
        flags.set(IFlags::IMMUTABLE, immutable);
        Ok(ioctl_setflags(&file, flags)?)
    };
    if !immutable {
        set(directory)?;
    }
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        if entry.file_type()?.is_file() {
            set(&entry.path())?;
        }
    }
    if immutable { set(directory) } else { Ok(()) }
}

fn open_plain(path: &Path) -> io::Result<File> {
    Ok(File::from(open(path, OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use std::os::unix::fs::symlink;

    use super::*;

    /// The directory as an older version made it, with an agent that this version does not have.
    fn older(parent: &Path) -> PathBuf {
        let hash = Sha256::new().chain_update("old agent").chain_update("old search").finalize();
        let path = parent.join(&hex::encode(hash)[..16]);
        fs::create_dir_all(&path).unwrap();
        fs::write(path.join("guest"), "old agent").unwrap();
        fs::write(path.join("search"), "old search").unwrap();
        path
    }

    #[test]
    fn an_intact_directory_keeps_its_files_and_an_altered_one_gets_the_current_binaries() {
        let parent = tempfile::tempdir().unwrap();
        let path = older(parent.path());
        let intact = repair(parent.path()).unwrap().remove(0);
        assert!(!intact.was_altered);
        assert_eq!(fs::read(path.join("guest")).unwrap(), b"old agent");
        if intact.is_protected {
            // Root itself must clear the flag first, for which a sandbox lacks the capability.
            assert!(fs::write(path.join("guest"), "trojan").is_err());
        }
        set_immutable(&path, false).unwrap();
        fs::write(path.join(".guest-123"), "old ag").unwrap();
        assert!(!repair(parent.path()).unwrap()[0].was_altered, "an interrupted write is not an alteration");
        assert!(!path.join(".guest-123").exists());
        set_immutable(&path, false).unwrap();
        // Same length.
        fs::write(path.join("guest"), "evilagent").unwrap();
        let altered = repair(parent.path()).unwrap().remove(0);
        assert!(altered.was_altered);
        assert_eq!(fs::read(path.join("guest")).unwrap(), FILES[0].1);
        assert!(!repair(parent.path()).unwrap()[0].was_altered, "an alteration is reported once");
        remove(&path).unwrap();
        assert!(repair(parent.path()).unwrap().is_empty());
    }

    #[test]
    fn planted_links_are_removed_and_not_followed() {
        let parent = tempfile::tempdir().unwrap();
        let victim = parent.path().join("victim");
        fs::write(&victim, "untouched").unwrap();
        let path = older(parent.path());
        symlink(&victim, path.join(".guest-1")).unwrap();
        fs::remove_file(path.join("search")).unwrap();
        symlink(&victim, path.join("search")).unwrap();
        assert!(repair(parent.path()).unwrap()[0].was_altered);
        assert_eq!(fs::read_to_string(&victim).unwrap(), "untouched");
        assert!(!path.join(".guest-1").exists());
        assert!(fs::symlink_metadata(path.join("search")).unwrap().is_file());
        remove(&path).unwrap();
    }
}
