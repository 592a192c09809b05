//! The initrd of every microVM: the guest agent, and nothing else.
//!
//! So each start runs the agent of this manager's version, whatever the microVM's disk contains.

use std::fs;
use std::io;
use std::path::Path;

use emergent_guest_protocol::AGENT_PATH;
use emergent_host::files::write_atomically;
use emergent_wire::tools::AGENT_DIR;

/// Writes the file unless its bytes are right. It is checked before each start, because every microVM runs its agent.
pub(crate) fn ensure(path: &Path) -> io::Result<()> {
    let archive = archive();
    let found = fs::symlink_metadata(path).is_ok_and(|found| found.is_file()).then(|| fs::read(path));
    match found {
        Some(Ok(bytes)) if bytes == archive => return Ok(()),
        Some(_) => tracing::warn!(
            file = %path.display(),
            "the initrd is not of this version and is written again"
        ),
        None => {}
    }
    // Jails have links to it, and their processes run as other users.
    write_atomically(path, &archive, 0o444)
}

/// A cpio archive in the kernel's format (`newc`).
fn archive() -> Vec<u8> {
    const DIRECTORY: u32 = 0o040_755;
    const PROGRAM: u32 = 0o100_755;
    const LINK: u32 = 0o120_777;
    const CHARACTER_DEVICE: u32 = 0o020_600;
    let mut archive = Archive::default();
    archive.add("dev", DIRECTORY, (0, 0), b"");
    // The console of the kernel, and of the agent until it has mounted `/dev`.
    archive.add("dev/console", CHARACTER_DEVICE, (5, 1), b"");
    let agent_directory = relative(AGENT_DIR);
    archive.add(agent_directory, DIRECTORY, (0, 0), b"");
    for (name, bytes) in emergent_guest_binary::FILES {
        archive.add(&format!("{agent_directory}/{name}"), PROGRAM, (0, 0), bytes);
    }
    archive.add("init", LINK, (0, 0), relative(AGENT_PATH).as_bytes());
    archive.finish()
}

/// A path from the root of the archive.
fn relative(path: &str) -> &str {
    path.trim_start_matches('/')
}

#[derive(Default)]
struct Archive {
    bytes: Vec<u8>,
    files: u32,
}

impl Archive {
    fn add(&mut self, name: &str, mode: u32, device: (u32, u32), content: &[u8]) {
        self.files += 1;
        let length = |bytes: usize| u32::try_from(bytes).unwrap_or(u32::MAX);
        let fields = [
            self.files,
            mode,
            0,
            0,
            1,
            0,
            length(content.len()),
            0,
            0,
            device.0,
            device.1,
            length(name.len() + 1),
            0,
        ];
        self.bytes.extend_from_slice(b"070701");
        for field in fields {
            self.bytes.extend_from_slice(format!("{field:08x}").as_bytes());
        }
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend_from_slice(content);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }

    fn finish(mut self) -> Vec<u8> {
        self.add("TRAILER!!!", 0, (0, 0), b"");
        self.bytes.resize(self.bytes.len().next_multiple_of(512), 0);
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn an_altered_initrd_is_written_again_and_a_link_is_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let (path, victim) = (directory.path().join("initrd"), directory.path().join("victim"));
        ensure(&path).unwrap();
        let mut bytes = fs::read(&path).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        fs::remove_file(&path).unwrap();
        fs::write(&path, &bytes).unwrap();
        ensure(&path).unwrap();
        assert_eq!(fs::read(&path).unwrap(), archive());
        fs::write(&victim, "untouched").unwrap();
        fs::remove_file(&path).unwrap();
        symlink(&victim, &path).unwrap();
        ensure(&path).unwrap();
        assert_eq!(fs::read_to_string(&victim).unwrap(), "untouched");
        assert_eq!(fs::read(&path).unwrap(), archive());
    }
}
