//! Writes whole files atomically: a reader sees the old or the new content.
//!
//! ```text
//! create ──push*──► commit     temporary file in the same directory, then rename
//!    └──────drop──► nothing    the temporary file is removed
//! ```
//!
//! A replaced file keeps its mode and owner. When the path is a link, the link stays and its target is replaced. Other hard links
//! to the file keep the old content, and extended attributes are lost.
//!
//! The rename is atomic against crashes of any process. A large file is on the disk when it is acknowledged, a small one a moment
//! later: until then, a power loss of the host or a full disk may bring the old content back. Where a rename is impossible (the
//! file is a mount point, as `/etc/resolv.conf` in containers, or its owner can't be kept), the file is overwritten in place.

use std::fs::File;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::{PermissionsExt, fchown};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use emergent_wire::tools::{MAX_FILE_BYTES, WriteAnswer};
use emergent_wire::{ErrorCode, ErrorDetail};
use rustix::fs::{AtFlags, FileType, Mode, OFlags, Stat, openat, renameat, statat, unlinkat};
use rustix::io::Errno;
use sha2::{Digest, Sha256};

use crate::error::{io_error, os_error, wrong_type};
use crate::location::Location;
use crate::read::special_file;
use crate::text::hex_digest;
use crate::{Context, flush};

/// The beginning and the end of temporary files' names. Glob and grep exclude them.
pub(crate) const TEMPORARY_PREFIX: &str = ".emergent-";
pub(crate) const TEMPORARY_SUFFIX: &str = ".tmp";
const BUFFER_BYTES: usize = 64 * 1024;
/// Files of at least this size are flushed to the disk before they are acknowledged.
const FLUSHED_FROM_BYTES: u64 = 1 << 20;

/// Held while a file is checked and replaced, so that two edits never overwrite each other's changes.
static COMMIT: Mutex<()> = Mutex::new(());

/// Identifies a version of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Version {
    inode: (u64, u64),
    size: i64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl Version {
    pub(crate) fn of(stat: &Stat) -> Self {
        #[allow(
            clippy::unnecessary_cast,
            clippy::cast_possible_wrap,
            reason = "the types differ between targets"
        )]
        Self {
            inode: (stat.st_dev as u64, stat.st_ino as u64),
            size: stat.st_size as i64,
            modified: (stat.st_mtime as i64, stat.st_mtime_nsec as i64),
            changed: (stat.st_ctime as i64, stat.st_ctime_nsec as i64),
        }
    }
}

/// A file that is being written. Without [`FileWriter::commit`] nothing changes.
#[derive(Debug)]
pub struct FileWriter {
    location: Location,
    existing: Option<Stat>,
    file: BufWriter<File>,
    /// The temporary file's name, and whether it still exists.
    temporary: PathBuf,
    has_temporary: bool,
    hasher: Sha256,
    written: u64,
}

/// Writes a whole file at once.
pub fn write(context: &Context, path: &str, content: &[u8]) -> Result<WriteAnswer, ErrorDetail> {
    let mut writer = FileWriter::create(context, path)?;
    writer.push(content)?;
    writer.commit()
}

impl FileWriter {
    /// Begins to write the file at `path`; missing parent directories are created.
    pub fn create(context: &Context, path: &str) -> Result<Self, ErrorDetail> {
        let path = context.request_path("file_path", path)?;
        let (location, existing) = context.locate_for_write(&path, true)?;
        Self::begin(location, existing)
    }

    pub(crate) fn begin(location: Location, existing: Option<Stat>) -> Result<Self, ErrorDetail> {
        if let Some(stat) = &existing {
            match FileType::from_raw_mode(stat.st_mode) {
                FileType::RegularFile => {}
                FileType::Directory => {
                    return Err(wrong_type(&location.path, "a directory", "give the path of a file"));
                }
                other => return Err(special_file(&location.path, other)),
            }
        }
        let (temporary, file) =
            create_temporary(&location, existing.is_some()).map_err(|errno| match (errno, &existing) {
                // The file exists, so its directory takes no new files, as those of `/proc`.
                (Errno::NOENT, Some(_)) => os_error("write", &location.path, Errno::PERM),
                _ => os_error("write", &location.path, errno),
            })?;
        Ok(Self {
            location,
            existing,
            file: BufWriter::with_capacity(BUFFER_BYTES, file),
            temporary,
            has_temporary: true,
            hasher: Sha256::new(),
            written: 0,
        })
    }

    /// The file's absolute path.
    pub fn path(&self) -> &Path {
        &self.location.path
    }

    /// Adds bytes to the end. Refuses to make a file over 64 MiB.
    pub fn push(&mut self, bytes: &[u8]) -> Result<(), ErrorDetail> {
        self.written += bytes.len() as u64;
        if self.written > MAX_FILE_BYTES {
            return Err(ErrorDetail::new(
                ErrorCode::TooLarge,
                format!(
                    "{} would have over {MAX_FILE_BYTES} bytes: write it in parts with bash; nothing was changed",
                    self.path().display()
                ),
            ));
        }
        self.hasher.update(bytes);
        self.file.write_all(bytes).map_err(|error| io_error("write", &self.location.path, &error))
    }

    /// Puts the file in its place.
    pub fn commit(mut self) -> Result<WriteAnswer, ErrorDetail> {
        self.place(None)?;
        self.answer()
    }

    /// Puts the file in its place if the existing file still has the version `expected` (none: no file). Otherwise nothing is
    /// changed, and the result is `None`.
    pub(crate) fn commit_over(
        mut self,
        expected: Option<Version>,
    ) -> Result<Option<WriteAnswer>, ErrorDetail> {
        if self.place(Some(expected))? { self.answer().map(Some) } else { Ok(None) }
    }

    /// Flushes the file's directory to the disk, and returns the answer.
    fn answer(&mut self) -> Result<WriteAnswer, ErrorDetail> {
        if self.written >= FLUSHED_FROM_BYTES {
            let synced = self.file.get_ref().sync_all();
            synced.map_err(|error| io_error("flush", &self.location.path, &error))?;
        } else if let Ok(file) = self.file.get_ref().try_clone() {
            flush::soon(file);
        }
        Ok(WriteAnswer {
            success: true,
            file_path: self.path().display().to_string(),
            bytes_written: self.written,
            created: self.existing.is_none(),
            sha256: hex_digest(std::mem::take(&mut self.hasher)),
        })
    }

    /// Replaces the existing file; false if it has another version than the expected one.
    fn place(&mut self, expected: Option<Option<Version>>) -> Result<bool, ErrorDetail> {
        let fail = |error: io::Error, path: &Path| io_error("write", path, &error);
        self.file.flush().map_err(|error| fail(error, &self.location.path))?;
        if self.written >= FLUSHED_FROM_BYTES {
            // Errors of the disk (full, broken) are found before the write is acknowledged.
            self.file.get_ref().sync_data().map_err(|error| fail(error, &self.location.path))?;
        }
        let keeps_owner = self.keep_mode_and_owner().map_err(|error| fail(error, &self.location.path))?;

        let _guard = COMMIT.lock().unwrap_or_else(PoisonError::into_inner);
        let directory = self.location.directory();
        if let Some(expected) = expected {
            let current = match statat(directory, &self.location.name, AtFlags::SYMLINK_NOFOLLOW) {
                Ok(stat) => Some(Version::of(&stat)),
                Err(Errno::NOENT) => None,
                Err(errno) => return Err(os_error("write", self.path(), errno)),
            };
            if current != expected {
                return Ok(false);
            }
        }
        if !keeps_owner {
            self.overwrite()?;
            return Ok(true);
        }
        match renameat(directory, &self.temporary, directory, &self.location.name) {
            Ok(()) => self.has_temporary = false,
            Err(Errno::BUSY | Errno::XDEV) => self.overwrite()?,
            Err(errno) => return Err(os_error("write", self.path(), errno)),
        }
        Ok(true)
    }

    /// Gives the temporary file the mode and owner of the one it replaces. False when the owner can't be kept.
    fn keep_mode_and_owner(&self) -> io::Result<bool> {
        let Some(stat) = &self.existing else {
            return Ok(true);
        };
        let file = self.file.get_ref();
        // The owner first: changing it clears the set-user-id bits of the mode.
        if fchown(file, Some(stat.st_uid), Some(stat.st_gid)).is_err() {
            return Ok(false);
        }
        file.set_permissions(std::fs::Permissions::from_mode(stat.st_mode & 0o7777))?;
        Ok(true)
    }

    /// Copies the temporary file over the existing one. If that fails half-way the new content is kept beside it.
    fn overwrite(&mut self) -> Result<(), ErrorDetail> {
        self.copy_in_place().map_err(|error| {
            self.has_temporary = false;
            let mut detail = io_error("write", &self.location.path, &error);
            detail.message.push_str(&format!(
                " (the file can only be overwritten in place and may be damaged; the new content is in {} beside it)",
                self.temporary.display()
            ));
            detail
        })
    }

    fn copy_in_place(&self) -> io::Result<()> {
        let mut from = File::from(openat(
            self.location.directory(),
            &self.temporary,
            OFlags::RDONLY | OFlags::CLOEXEC,
            Mode::empty(),
        )?);
        let mut to = self.location.open_with(OFlags::WRONLY | OFlags::NONBLOCK)?;
        let written = io::copy(&mut from, &mut to)?;
        to.set_len(written)
    }
}

impl Drop for FileWriter {
    fn drop(&mut self) {
        if self.has_temporary {
            // A failure is ignored: the file's name identifies it as a temporary one.
            let _ = unlinkat(self.location.directory(), &self.temporary, AtFlags::empty());
        }
    }
}

/// Makes a temporary file beside the place. It is private until it gets the mode of the file it replaces; a new
/// file gets the usual mode at once.
fn create_temporary(location: &Location, replaces: bool) -> Result<(PathBuf, File), Errno> {
    let mode = Mode::from_raw_mode(if replaces { 0o600 } else { 0o666 });
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    loop {
        let random = RandomState::new().build_hasher().finish();
        let name = PathBuf::from(format!("{TEMPORARY_PREFIX}{random:016x}{TEMPORARY_SUFFIX}"));
        match openat(location.directory(), &name, flags, mode) {
            Ok(fd) => return Ok((name, File::from(fd))),
            Err(Errno::EXIST) => {}
            Err(errno) => return Err(errno),
        }
    }
}
