//! Collects a command's output within limits: head and tail of each stream in memory, a long stream in a file.

use std::collections::VecDeque;
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use emergent_wire::OperationId;
use emergent_wire::tools::{MAX_STREAM_BYTES, OUTPUT_DIR};

use crate::command::{Sink, Stream};

/// The size of the head and of the tail.
const HALF_BYTES: usize = MAX_STREAM_BYTES / 2;
/// The limit of a saved stream, so that one command does not fill the workspace's disk.
pub(crate) const MAX_SAVED_BYTES: u64 = 256 << 20;
/// The number of saved outputs. The oldest are removed first …
const KEPT_OUTPUTS: usize = 100;
/// … and those that were not written to for this time …
const KEPT_FOR: Duration = Duration::from_secs(7 * 24 * 3600);
/// … and those beyond this total size or this part of the disk, whichever is less.
const KEPT_BYTES: u64 = 1 << 30;
const KEPT_PART: u64 = 4;

/// The directory of an operation's output.
pub(crate) fn directory_of(operation: OperationId) -> PathBuf {
    Path::new(OUTPUT_DIR).join(operation.to_string())
}

/// Makes an operation's directory, and makes room by removing the oldest ones.
pub(crate) fn make_directory(operation: OperationId) -> std::io::Result<PathBuf> {
    let parent = Path::new(OUTPUT_DIR);
    let directory = directory_of(operation);
    std::fs::create_dir_all(&directory)?;
    if let Some(top) = parent.parent() {
        let ignore = top.join(".gitignore");
        if !ignore.exists() {
            std::fs::write(ignore, "*\n")?;
        }
    }
    let disk =
        rustix::fs::statvfs(parent).map_or(u64::MAX, |disk| disk.f_blocks.saturating_mul(disk.f_frsize));
    let limits = Limits { count: KEPT_OUTPUTS, bytes: KEPT_BYTES.min(disk / KEPT_PART), age: KEPT_FOR };
    for old in outputs_to_remove(parent, &limits)? {
        let _ = std::fs::remove_dir_all(old);
    }
    Ok(directory)
}

/// The limits of saved outputs.
struct Limits {
    count: usize,
    bytes: u64,
    age: Duration,
}

/// The directories of outputs over a limit. The newest is kept: its command is about to write to it.
fn outputs_to_remove(parent: &Path, limits: &Limits) -> std::io::Result<Vec<PathBuf>> {
    let mut directories: Vec<PathBuf> =
        std::fs::read_dir(parent)?.filter_map(|entry| Some(entry.ok()?.path())).collect();
    // Operation ids sort by time.
    directories.sort_unstable_by(|one, other| other.cmp(one));
    let (mut index, mut bytes) = (0, 0_u64);
    directories.retain(|directory| {
        let (size, age) = size_and_age(directory);
        bytes = bytes.saturating_add(size);
        index += 1;
        index > 1 && (index > limits.count || bytes > limits.bytes || age > limits.age)
    });
    Ok(directories)
}

/// The size of an output, and the time since the last write to it.
fn size_and_age(directory: &Path) -> (u64, Duration) {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    let (mut size, mut age) = (0_u64, Duration::MAX);
    for found in entries.filter_map(|entry| entry.metadata().ok()) {
        size = size.saturating_add(found.blocks() * 512);
        let written = found.modified().ok().and_then(|at| at.elapsed().ok()).unwrap_or_default();
        age = age.min(written);
    }
    // An output without a file is new.
    (size, if age == Duration::MAX { Duration::ZERO } else { age })
}

/// Collects both streams of a command.
pub(crate) struct Collected {
    operation: OperationId,
    pub(crate) stdout: Collector,
    pub(crate) stderr: Collector,
}

impl Collected {
    pub(crate) fn new(operation: OperationId) -> Self {
        Self { operation, stdout: Collector::default(), stderr: Collector::default() }
    }
}

impl Sink for Collected {
    fn take(&mut self, stream: Stream, bytes: &[u8]) -> bool {
        match stream {
            Stream::Stdout => self.stdout.take(self.operation, "stdout", bytes),
            Stream::Stderr => self.stderr.take(self.operation, "stderr", bytes),
        }
        true
    }
}

/// Collects one stream.
#[derive(Default)]
pub(crate) struct Collector {
    head: Vec<u8>,
    tail: VecDeque<u8>,
    pub(crate) total: u64,
    saved: Saved,
}

#[derive(Default)]
enum Saved {
    /// All of it is still in memory.
    #[default]
    NotNeeded,
    To(File, PathBuf, u64),
    Failed(String),
}

impl Collector {
    fn take(&mut self, operation: OperationId, name: &str, bytes: &[u8]) {
        self.total += bytes.len() as u64;
        if self.total > MAX_STREAM_BYTES as u64 {
            self.save(operation, name, bytes);
        }
        let for_head = bytes.len().min(HALF_BYTES - self.head.len());
        self.head.extend_from_slice(&bytes[..for_head]);
        let rest = &bytes[for_head..];
        // While the stream fits into both, the tail holds all bytes after the head.
        let rest = &rest[rest.len().saturating_sub(HALF_BYTES)..];
        let over = (self.tail.len() + rest.len()).saturating_sub(HALF_BYTES);
        self.tail.drain(..over);
        self.tail.extend(rest);
    }

    /// Appends to the file. The first call also writes the earlier bytes.
    fn save(&mut self, operation: OperationId, name: &str, bytes: &[u8]) {
        if matches!(self.saved, Saved::NotNeeded) {
            let begin = || -> std::io::Result<(File, PathBuf)> {
                let path = make_directory(operation)?.join(name);
                let mut file = File::create(&path)?;
                file.write_all(&self.head)?;
                let (front, back) = self.tail.as_slices();
                file.write_all(front)?;
                file.write_all(back)?;
                Ok((file, path))
            };
            self.saved = match begin() {
                Ok((file, path)) => Saved::To(file, path, (self.head.len() + self.tail.len()) as u64),
                Err(error) => Saved::Failed(error.to_string()),
            };
        }
        if let Saved::To(file, _, length) = &mut self.saved {
            let room = usize::try_from(MAX_SAVED_BYTES.saturating_sub(*length)).unwrap_or(usize::MAX);
            let part = &bytes[..bytes.len().min(room)];
            *length += part.len() as u64;
            if let Err(error) = file.write_all(part) {
                self.saved = Saved::Failed(error.to_string());
            }
        }
    }

    pub(crate) fn is_cut(&self) -> bool {
        self.total > MAX_STREAM_BYTES as u64
    }

    /// The file that holds all of the stream, if it was cut and could be saved.
    pub(crate) fn path(&self) -> Option<String> {
        match &self.saved {
            Saved::To(_, path, _) => Some(path.to_string_lossy().into_owned()),
            _ => None,
        }
    }

    /// The note about the saved output for the caller.
    pub(crate) fn note(&self, name: &str) -> Option<String> {
        match &self.saved {
            Saved::To(_, _, length) if *length < self.total => {
                Some(format!("only the first {length} of {} bytes of {name} were saved", self.total))
            }
            Saved::Failed(error) => Some(format!("all of {name} could not be saved: {error}")),
            _ => None,
        }
    }

    /// The text of the stream for the answer.
    pub(crate) fn shown(&self) -> Vec<u8> {
        let tail: Vec<u8> = self.tail.iter().copied().collect();
        if !self.is_cut() {
            return [self.head.as_slice(), &tail].concat();
        }
        let head = whole_start(&self.head);
        let tail = whole_end(&tail);
        let cut = self.total - (head.len() + tail.len()) as u64;
        let place = match self.path() {
            Some(path) => format!("; all of it is in {path}"),
            None => String::new(),
        };
        [head, format!("\n… [{cut} bytes cut{place}] …\n").as_bytes(), tail].concat()
    }
}

/// `bytes` without an incomplete character at the end.
fn whole_start(bytes: &[u8]) -> &[u8] {
    let start = bytes.len().saturating_sub(3);
    let lead = (start..bytes.len()).rev().find(|index| bytes[*index] & 0xC0 != 0x80);
    match lead {
        Some(index) if bytes.len() - index < width(bytes[index]) => &bytes[..index],
        _ => bytes,
    }
}

/// `bytes` without an incomplete character at the start.
fn whole_end(bytes: &[u8]) -> &[u8] {
    let rest = bytes.iter().take(3).take_while(|byte| *byte & 0xC0 == 0x80).count();
    &bytes[rest..]
}

/// The length of a character with the first byte `lead`.
fn width(lead: u8) -> usize {
    match lead {
        0xC0..0xE0 => 2,
        0xE0..0xF0 => 3,
        0xF0.. => 4,
        _ => 1,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn collect(pieces: &[Vec<u8>]) -> Collector {
        let mut collector =
            Collector { saved: Saved::Failed("not in this test".into()), ..Default::default() };
        for piece in pieces {
            collector.take(OperationId::generate(), "stdout", piece);
        }
        collector
    }

    #[test]
    fn old_large_and_many_outputs_are_removed_and_the_newest_is_kept() {
        let parent = tempfile::tempdir().unwrap();
        let make = |name: &str, bytes: usize, age: Duration| {
            let directory = parent.path().join(name);
            std::fs::create_dir(&directory).unwrap();
            let path = directory.join("stdout");
            std::fs::write(&path, vec![b'x'; bytes]).unwrap();
            let written = std::time::SystemTime::now() - age;
            File::options().write(true).open(&path).unwrap().set_modified(written).unwrap();
        };
        let day = Duration::from_secs(24 * 3600);
        let removed = |count: usize, bytes: u64, age: Duration| -> Vec<String> {
            let found = outputs_to_remove(parent.path(), &Limits { count, bytes, age }).unwrap();
            found.iter().map(|path| path.file_name().unwrap().to_str().unwrap().to_owned()).collect()
        };
        make("1", 4096, 9 * day);
        // It was created long ago and written to a moment ago.
        make("2", 4096, Duration::ZERO);
        make("3", 65536, day);
        make("4", 4096, 8 * day);
        assert_eq!(removed(100, u64::MAX, 10 * day), Vec::<String>::new());
        assert_eq!(removed(100, u64::MAX, 7 * day), ["1"], "the newest is kept");
        assert_eq!(removed(2, u64::MAX, 10 * day), ["2", "1"]);
        assert_eq!(removed(100, 16384, 10 * day), ["3", "2", "1"]);
        assert_eq!(removed(100, 0, Duration::ZERO), ["3", "2", "1"]);
    }

    proptest! {
        #[test]
        fn short_output_is_shown_as_it_is(pieces in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..9000), 0..5)) {
            let all = pieces.concat();
            prop_assert_eq!(collect(&pieces).shown(), all);
        }

        #[test]
        fn long_output_keeps_its_head_and_tail(sizes in prop::collection::vec(1_usize..70_000, 2..6)) {
            let mut counter = 0_usize;
            let pieces: Vec<Vec<u8>> = sizes
                .iter()
                .map(|size| (0..*size).map(|_| { counter += 1; b'a' + u8::try_from(counter % 23).unwrap() }).collect())
                .collect();
            let all = pieces.concat();
            let collector = collect(&pieces);
            let shown = collector.shown();
            prop_assert_eq!(collector.total, all.len() as u64);
            if all.len() <= MAX_STREAM_BYTES {
                prop_assert_eq!(shown, all);
            } else {
                prop_assert!(shown.starts_with(&all[..HALF_BYTES]));
                prop_assert!(shown.ends_with(&all[all.len() - HALF_BYTES..]));
                prop_assert!(shown.len() < MAX_STREAM_BYTES + 200);
            }
        }

        #[test]
        fn shown_output_has_only_whole_characters(text in "[aäß€😀]{20000,30000}") {
            let shown = collect(&[text.into_bytes()]).shown();
            prop_assert!(String::from_utf8(shown).is_ok());
        }
    }
}
