//! The memory disk of every microVM: the guest agent, and nothing else.
//!
//! So each start has the agent that belongs to this manager, whatever is on the microVM's own disk.

/// An archive as the kernel unpacks it (`newc`).
pub(crate) fn archive() -> Vec<u8> {
    const DIRECTORY: u32 = 0o040_755;
    const PROGRAM: u32 = 0o100_755;
    const LINK: u32 = 0o120_777;
    const CHARACTER_DEVICE: u32 = 0o020_600;
    let mut archive = Archive::default();
    archive.add("dev", DIRECTORY, (0, 0), b"");
    // Where the kernel prints, and the agent too until it has mounted the rest.
    archive.add("dev/console", CHARACTER_DEVICE, (5, 1), b"");
    archive.add(".emergent", DIRECTORY, (0, 0), b"");
    for (name, bytes) in emergent_guest_binary::FILES {
        archive.add(&format!(".emergent/{name}"), PROGRAM, (0, 0), bytes);
    }
    archive.add("init", LINK, (0, 0), b".emergent/guest");
    archive.finish()
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
