//! Private files and atomic writes.
//!
//! Invariant: a file is private from its first byte. It is written under a random name and opened with
//! `O_EXCL | O_NOFOLLOW`, so another user can't have prepared a file or a link under that name.

use std::fs::{self, File, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Mode, OFlags, openat};

/// Removes a file. A file that does not exist counts as removed.
pub fn remove_if_there(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Writes a whole file, or leaves the existing one unchanged: the bytes are on disk before the file gets its name.
pub fn write_atomically(path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    let (temporary, mut file) = create_temporary(path)?;
    let written = file
        .write_all(bytes)
        .and_then(|()| file.set_permissions(Permissions::from_mode(mode)))
        .and_then(|()| file.sync_all())
        .and_then(|()| fs::rename(&temporary, path));
    if written.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    written
}

/// Creates an empty private file beside `path`, under a random name that ends with `.new`.
pub fn create_temporary(path: &Path) -> io::Result<(PathBuf, File)> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let temporary = path.with_file_name(format!(".{name}-{}.new", random_name()?));
    let file = create_private(&temporary)?;
    Ok((temporary, file))
}

/// Creates an empty file that only its owner can use. Fails if the name is taken, also by a link.
pub fn create_private(path: &Path) -> io::Result<File> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(File::from(openat(CWD, path, flags, Mode::RUSR | Mode::WUSR)?))
}

/// Creates a directory that only its owner can enter. An existing one gets these rights.
pub fn ensure_private_directory(path: &Path) -> io::Result<()> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(path)?;
    make_private(path, 0o700)
}

/// Removes all rights of others from each file in a directory. Links are not followed.
pub fn make_files_private(directory: &Path) -> io::Result<()> {
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        if entry.file_type()?.is_file() {
            make_private(&entry.path(), 0o600)?;
        }
    }
    Ok(())
}

fn make_private(path: &Path, mode: u32) -> io::Result<()> {
    if fs::metadata(path)?.mode() & 0o077 == 0 {
        return Ok(());
    }
    fs::set_permissions(path, Permissions::from_mode(mode))
}

/// Sixteen random hexadecimal digits.
fn random_name() -> io::Result<String> {
    let mut bytes = [0_u8; 8];
    getrandom::fill(&mut bytes).map_err(|error| io::Error::other(error.to_string()))?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn a_file_is_replaced_whole_and_private_and_leaves_no_temporary() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("secret");
        for text in ["first", "second"] {
            write_atomically(&path, text.as_bytes(), 0o600).unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), text);
            assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        }
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_write_never_follows_a_planted_link() {
        let directory = tempfile::tempdir().unwrap();
        let (victim, planted) = (directory.path().join("victim"), directory.path().join("planted"));
        fs::write(&victim, "untouched").unwrap();
        symlink(&victim, &planted).unwrap();
        assert!(create_private(&planted).is_err());
        write_atomically(&planted, b"new", 0o600).unwrap();
        assert_eq!(fs::read_to_string(&victim).unwrap(), "untouched");
        assert!(fs::symlink_metadata(&planted).unwrap().is_file());
    }

    #[test]
    fn directories_and_files_become_private() {
        let directory = tempfile::tempdir().unwrap();
        let inner = directory.path().join("a/b");
        fs::create_dir_all(&inner).unwrap();
        fs::set_permissions(&inner, Permissions::from_mode(0o755)).unwrap();
        fs::write(inner.join("disk.img"), "").unwrap();
        fs::set_permissions(inner.join("disk.img"), Permissions::from_mode(0o644)).unwrap();
        ensure_private_directory(&inner).unwrap();
        make_files_private(&inner).unwrap();
        assert_eq!(fs::metadata(&inner).unwrap().mode() & 0o777, 0o700);
        assert_eq!(fs::metadata(inner.join("disk.img")).unwrap().mode() & 0o777, 0o600);
    }
}
