//! The console of a microVM: a pipe that is read only after a failure.
//!
//! The microVM's process holds both ends of the pipe and writes without blocking. So a guest that floods its console fills
//! 64 KiB and the rest is lost, whether a manager runs or not. The last lines tell why a microVM could not start.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use rustix::fs::{Mode, OFlags};

/// The bytes of the last lines that are returned.
const TAIL_BYTES: usize = 2000;

/// Makes the pipe. Returns the end that the microVM's process writes to.
pub(crate) fn make(path: &Path) -> io::Result<File> {
    let _ = std::fs::remove_file(path);
    rustix::fs::mknodat(rustix::fs::CWD, path, rustix::fs::FileType::Fifo, Mode::from_raw_mode(0o600), 0)?;
    open(path, OFlags::RDWR)
}

/// The last lines that were printed and not read yet. If they do not reach back to the kernel's last panic, its first line
/// is put before them, because it names the cause.
pub(crate) fn tail(path: &Path) -> Option<String> {
    let mut pipe = open(path, OFlags::RDONLY).ok()?;
    let mut text = Vec::new();
    let mut buffer = [0; 4096];
    while let Ok(length) = pipe.read(&mut buffer) {
        // The pipe is empty and has no writer, or the output is longer than any pipe.
        if length == 0 || text.len() > 1 << 20 {
            break;
        }
        text.extend_from_slice(&buffer[..length]);
    }
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<&str> = text.lines().map(str::trim_end).filter(|line| !line.is_empty()).collect();
    let mut tail = String::new();
    let panic = lines.iter().rposition(|line| is_kernel_panic(line));
    for (number, line) in lines.iter().enumerate().rev() {
        if tail.len() + line.len() > TAIL_BYTES {
            let first = panic.filter(|panic| *panic <= number).map(|panic| format!("{}\n", lines[panic]));
            tail.insert_str(0, &first.unwrap_or_default());
            break;
        }
        tail = if tail.is_empty() { (*line).to_owned() } else { format!("{line}\n{tail}") };
    }
    (!tail.is_empty()).then(|| tail.chars().filter(|each| *each == '\n' || !each.is_control()).collect())
}

/// Whether a line is the first one of a panic. The console is plain text: the kernel marks a panic by these words only, and
/// has done so since its first releases.
fn is_kernel_panic(line: &str) -> bool {
    line.contains("Kernel panic")
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
    fn a_full_console_does_not_block_its_writer_and_its_tail_has_the_panic() {
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
            told.starts_with("Kernel panic - not syncing\nat some") && told.len() < TAIL_BYTES + 100,
            "{told}"
        );
        let mut refused = false;
        for _ in 0..1000 {
            refused |= writer.write(&[b'x'; 4096]).is_err();
        }
        assert!(refused);
    }
}
