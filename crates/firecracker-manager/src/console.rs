//! What a microVM's kernel prints: a pipe that nobody has to read.
//!
//! The microVM's process holds both ends and writes without waiting, so a guest that floods its console fills 64 KiB and
//! the rest is lost, whether the manager runs or not. The end of it tells why a microVM could not start.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use rustix::fs::{Mode, OFlags};

/// How much of the end is told.
const TOLD_BYTES: usize = 2000;

/// Makes the pipe, and gives the end that a microVM's process writes to.
pub(crate) fn make(path: &Path) -> io::Result<File> {
    let _ = std::fs::remove_file(path);
    rustix::fs::mknodat(rustix::fs::CWD, path, rustix::fs::FileType::Fifo, Mode::from_raw_mode(0o600), 0)?;
    open(path, OFlags::RDWR)
}

/// The last lines that were printed and not read yet.
pub(crate) fn tail(path: &Path) -> Option<String> {
    let mut pipe = open(path, OFlags::RDONLY).ok()?;
    let mut text = Vec::new();
    let mut buffer = [0; 4096];
    while let Ok(length) = pipe.read(&mut buffer) {
        // Empty, and nobody writes any more.
        if length == 0 || text.len() > 1 << 20 {
            break;
        }
        text.extend_from_slice(&buffer[..length]);
    }
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<&str> = text.lines().map(str::trim_end).filter(|line| !line.is_empty()).collect();
    let mut told = String::new();
    // What a kernel says when it gives up comes before all that it knows of why.
    let panic = lines.iter().rposition(|line| line.contains("Kernel panic"));
    for (number, line) in lines.iter().enumerate().rev() {
        if told.len() + line.len() > TOLD_BYTES {
            let first = panic.filter(|panic| *panic <= number).map(|panic| format!("{}\n", lines[panic]));
            told.insert_str(0, &first.unwrap_or_default());
            break;
        }
        told = if told.is_empty() { (*line).to_owned() } else { format!("{line}\n{told}") };
    }
    (!told.is_empty()).then(|| told.chars().filter(|each| *each == '\n' || !each.is_control()).collect())
}

fn open(path: &Path, flags: OFlags) -> io::Result<File> {
    let flags = flags | OFlags::NONBLOCK | OFlags::CLOEXEC;
    Ok(File::from(rustix::fs::open(path, flags, Mode::empty())?))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use std::io::Write;

    use super::*;

    #[test]
    fn a_flood_is_lost_and_nobody_waits_for_it() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("console");
        let mut writer = make(&path).unwrap();
        writer.write_all(b"first\r\n\x1b[0mKernel panic - not syncing\r\n").unwrap();
        assert_eq!(tail(&path).unwrap(), "first\n[0mKernel panic - not syncing");
        writer
            .write_all(
                format!("before\nKernel panic - not syncing\n{}", "at some address\n".repeat(200)).as_bytes(),
            )
            .unwrap();
        let told = tail(&path).unwrap();
        assert!(
            told.starts_with("Kernel panic - not syncing\nat some") && told.len() < TOLD_BYTES + 100,
            "{told}"
        );
        let mut refused = false;
        for _ in 0..1000 {
            refused |= writer.write(&[b'x'; 4096]).is_err();
        }
        assert!(refused);
    }
}
