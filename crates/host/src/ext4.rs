//! The state of an ext4 file system, read from its first block and from what the kernel says while it is mounted.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::program::{command, failure};

/// Where the superblock is, and in it the magic number, the state, and the features that all who mount it must know.
const SUPERBLOCK_AT: u64 = 1024;
const MAGIC_AT: usize = 0x38;
const STATE_AT: usize = 0x3A;
const FEATURES_AT: usize = 0x60;
const MAGIC: u16 = 0xEF53;
/// The bit of the state that says that errors were found.
const HAS_ERRORS: u16 = 0x0002;
/// The feature that says that the journal holds what is not yet in place. A journal that was given up keeps its error to itself.
const NEEDS_RECOVERY: u16 = 0x0004;

/// Whether the file system in an image may have errors: it says so itself, or it was not left in order.
pub fn may_have_errors(image: &Path) -> io::Result<bool> {
    let mut block = [0_u8; FEATURES_AT + 4];
    File::open(image)?.read_exact_at(&mut block, SUPERBLOCK_AT)?;
    let number = |at: usize| u16::from_le_bytes([block[at], block[at + 1]]);
    if number(MAGIC_AT) != MAGIC {
        let message = format!("{} holds no ext4 file system", image.display());
        return Err(io::Error::new(io::ErrorKind::InvalidData, message));
    }
    Ok(number(STATE_AT) & HAS_ERRORS != 0 || number(FEATURES_AT) & NEEDS_RECOVERY != 0)
}

/// Errors that the kernel has met on a file system since it was mounted or made; none if the device is not mounted.
pub fn errors_while_mounted(device: &Path) -> Option<u64> {
    let name = fs::canonicalize(device).ok()?;
    let file = Path::new("/sys/fs/ext4").join(name.file_name()?).join("errors_count");
    fs::read_to_string(file).ok()?.trim().parse().ok()
}

/// Checks a file system that nobody uses, and mends what it can. Replaying the journal is part of it.
pub fn check(image: &Path) -> io::Result<()> {
    // Once with what is safe to mend without being asked, then with all that can be mended.
    match run_e2fsck(image, "-p")? {
        Ok(()) => Ok(()),
        Err(_) => run_e2fsck(image, "-y")?,
    }
}

fn run_e2fsck(image: &Path, how: &str) -> io::Result<io::Result<()>> {
    let arguments = [OsStr::new("-f"), OsStr::new(how), image.as_os_str()];
    let output = command("e2fsck").args(arguments).output()?;
    // 1: something was mended, which the journal counts as.
    Ok(match output.status.code() {
        Some(0 | 1) => Ok(()),
        _ => Err(failure("e2fsck", &output)),
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use super::*;
    use crate::program::run;

    #[test]
    fn a_file_system_with_errors_is_known_and_mended() {
        let directory = tempfile::tempdir().unwrap();
        let image = directory.path().join("disk.img");
        File::create(&image).unwrap().set_len(16 << 20).unwrap();
        assert!(may_have_errors(&image).is_err(), "there is none yet");
        run(
            "mke2fs",
            &["-q", "-F", "-t", "ext4"]
                .map(OsStr::new)
                .iter()
                .copied()
                .chain([image.as_os_str()])
                .collect::<Vec<_>>(),
        )
        .unwrap();
        assert!(!may_have_errors(&image).unwrap());
        let file = fs::OpenOptions::new().write(true).open(&image).unwrap();
        file.write_all_at(&HAS_ERRORS.to_le_bytes(), SUPERBLOCK_AT + STATE_AT as u64).unwrap();
        assert!(may_have_errors(&image).unwrap());
        check(&image).unwrap();
        assert!(!may_have_errors(&image).unwrap());
        assert_eq!(errors_while_mounted(Path::new("/dev/null")), None);
    }
}
