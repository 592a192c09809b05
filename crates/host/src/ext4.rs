//! ext4 file systems in files: made, and checked by their superblock and by the kernel's counters while they are mounted.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::files::{create_private, remove_if_there};
use crate::program::{command, failure, run};

/// The offset of the superblock, and in it those of the magic number, the state, and the incompatible features.
const SUPERBLOCK_AT: u64 = 1024;
const MAGIC_AT: usize = 0x38;
const STATE_AT: usize = 0x3A;
const FEATURES_AT: usize = 0x60;
const MAGIC: u16 = 0xEF53;
/// The state's bit for "errors were found".
const HAS_ERRORS: u16 = 0x0002;
/// The feature's bit for "the journal has to be replayed". An aborted journal does not set the error bit, but this one.
const NEEDS_RECOVERY: u16 = 0x0004;

/// Makes a file system of `bytes` in a private file, which replaces an existing one. The kernel writes the inode tables and the
/// journal after the first mount. `arguments` are further ones of `mke2fs`.
pub fn make(image: &Path, bytes: u64, arguments: &[&OsStr]) -> io::Result<()> {
    remove_if_there(image)?;
    create_private(image)?.set_len(bytes)?;
    let options = "lazy_itable_init=1,lazy_journal_init=1,nodiscard";
    let own = ["-q", "-F", "-t", "ext4", "-m", "0", "-E", options].map(OsStr::new);
    run("mke2fs", &[&own, arguments, &[image.as_os_str()]].concat()).map(drop)
}

/// Whether the file system in an image may have errors: its error bit is set, or it was not unmounted cleanly.
pub fn may_have_errors(image: &Path) -> io::Result<bool> {
    let mut block = [0_u8; FEATURES_AT + 4];
    File::open(image)?.read_exact_at(&mut block, SUPERBLOCK_AT)?;
    let number = |at: usize| u16::from_le_bytes([block[at], block[at + 1]]);
    if number(MAGIC_AT) != MAGIC {
        let message = format!("{} contains no ext4 file system", image.display());
        return Err(io::Error::new(io::ErrorKind::InvalidData, message));
    }
    Ok(number(STATE_AT) & HAS_ERRORS != 0 || number(FEATURES_AT) & NEEDS_RECOVERY != 0)
}

/// The number of errors that the kernel has found on a mounted file system. `None` if the device is not mounted.
pub fn errors_while_mounted(device: &Path) -> Option<u64> {
    let name = fs::canonicalize(device).ok()?;
    let file = Path::new("/sys/fs/ext4").join(name.file_name()?).join("errors_count");
    fs::read_to_string(file).ok()?.trim().parse().ok()
}

/// Checks a file system that is not mounted and repairs it. Its journal is replayed first.
pub fn check(image: &Path) -> io::Result<()> {
    // First only the repairs that are always safe, then all of them.
    match run_e2fsck(image, "-p")? {
        Ok(()) => Ok(()),
        Err(_) => run_e2fsck(image, "-y")?,
    }
}

fn run_e2fsck(image: &Path, how: &str) -> io::Result<io::Result<()>> {
    let arguments = [OsStr::new("-f"), OsStr::new(how), image.as_os_str()];
    let output = command("e2fsck").args(arguments).output()?;
    // Status 1: something was repaired. A replayed journal counts as a repair.
    Ok(match output.status.code() {
        Some(0 | 1) => Ok(()),
        _ => Err(failure("e2fsck", &output)),
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use super::*;

    #[test]
    fn a_file_system_with_errors_is_detected_and_repaired() {
        let directory = tempfile::tempdir().unwrap();
        let image = directory.path().join("disk.img");
        File::create(&image).unwrap().set_len(16 << 20).unwrap();
        assert!(may_have_errors(&image).is_err(), "there is none yet");
        make(&image, 16 << 20, &[]).unwrap();
        assert!(!may_have_errors(&image).unwrap());
        let file = fs::OpenOptions::new().write(true).open(&image).unwrap();
        file.write_all_at(&HAS_ERRORS.to_le_bytes(), SUPERBLOCK_AT + STATE_AT as u64).unwrap();
        assert!(may_have_errors(&image).unwrap());
        check(&image).unwrap();
        assert!(!may_have_errors(&image).unwrap());
        assert_eq!(errors_while_mounted(Path::new("/dev/null")), None);
    }
}
