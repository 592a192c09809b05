//! Special files, files of the kernel, and files that change while they are read: no tool waits, fails with an internal
//! error, or reads without end.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use std::fs::{self, File};
use std::io::{Read, Write};
use std::sync::atomic::{AtomicBool, Ordering};

use emergent_guest_tools::read::{self, RawFile};
use emergent_guest_tools::{edit, grep, write};
use emergent_wire::tools::{EditRequest, GrepRequest, MAX_FILE_BYTES, ReadAnswer, ReadRequest};
use emergent_wire::{ErrorCode, ErrorDetail};
use support::{NEVER, Workspace};

impl Workspace {
    fn read(&self, path: &str) -> Result<ReadAnswer, ErrorDetail> {
        let request = ReadRequest { file_path: path.into(), ..ReadRequest::default() };
        read::read(&self.context, &request, &NEVER)
    }

    fn raw(&self, path: &str) -> Result<Vec<u8>, ErrorDetail> {
        read::open_raw(&self.context, path).map(bytes_of)
    }

    fn edit(&self, path: &str, old_string: &str) -> Result<(), ErrorDetail> {
        let request = EditRequest {
            file_path: path.into(),
            old_string: old_string.into(),
            new_string: "new".into(),
            ..EditRequest::default()
        };
        edit::edit(&self.context, &request, &NEVER).map(|_| ())
    }

    fn grep(&self, path: &str) -> Result<(), ErrorDetail> {
        let request = GrepRequest { pattern: "x".into(), path: Some(path.into()), ..GrepRequest::default() };
        grep::grep(&self.context, &request, &NEVER).map(|_| ())
    }

    /// The codes with which each tool refuses a path; none for a tool that takes it.
    fn codes(&self, path: &str) -> Vec<Option<ErrorCode>> {
        [
            self.read(path).map(|_| ()),
            self.raw(path).map(|_| ()),
            self.edit(path, "x"),
            self.edit(path, ""),
            write::write(&self.context, path, b"x").map(|_| ()),
            self.grep(path),
        ]
        .into_iter()
        .map(|result| result.err().map(|error| error.code))
        .collect()
    }
}

/// Reads as much as the file says it may have, as the guest agent does.
fn bytes_of(mut raw: RawFile) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut buffer = vec![0; 10_000];
    while (bytes.len() as u64) < raw.size {
        match raw.file.read(&mut buffer) {
            Ok(0) | Err(_) => break,
            Ok(read) => bytes.extend_from_slice(&buffer[..read]),
        }
    }
    bytes
}

#[test]
fn special_files_are_refused_by_every_tool() {
    let workspace = Workspace::empty();
    rustix::fs::mknodat(
        rustix::fs::CWD,
        workspace.path.join("fifo"),
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::from_raw_mode(0o600),
        0,
    )
    .unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(workspace.path.join("socket")).unwrap();
    for path in ["fifo", "socket", "/dev/null", "/dev/zero", "/dev/full", "/dev/tty"] {
        assert_eq!(workspace.codes(path), [Some(ErrorCode::WrongFileType); 6], "{path}");
    }
    assert_eq!(workspace.edit(".", "x").unwrap_err().code, ErrorCode::WrongFileType);
    assert_eq!(workspace.edit("/", "x").unwrap_err().code, ErrorCode::WrongFileType);
}

#[test]
fn files_of_the_kernel_give_no_internal_error() {
    let workspace = Workspace::empty();
    for path in [
        "/proc/self/mem",
        "/proc/self/fd/0",
        "/proc/self/fd/9999",
        "/proc/self/fd",
        "/proc/self/pagemap",
        "/proc/self/clear_refs",
        "/proc/self/attr/current",
        "/proc/self/environ",
        "/proc/1/mem",
        "/proc/sysrq-trigger",
        "/proc/kpagecount",
        "/sys/kernel/uevent_seqnum",
        "/sys/power/state",
        "/sys/bus/pci/rescan",
    ] {
        let results = [
            workspace.read(path).map(|_| ()),
            workspace.raw(path).map(|_| ()),
            workspace.edit(path, "no such text"),
            workspace.grep(path),
        ];
        for result in results {
            if let Err(error) = result {
                assert!(error.code.http_status() < 500, "{path}: {error:?}");
            }
        }
    }
    let error = workspace.read("/proc/self/mem").unwrap_err();
    assert_eq!(error.code, ErrorCode::Unacceptable);
    assert!(error.message.contains("/proc/self/mem"), "{}", error.message);
    // Neither can be replaced by a new file, and both stay as they are.
    for path in ["/proc/self/mem", "/proc/version"] {
        let error = write::write(&workspace.context, path, b"x").unwrap_err();
        assert_eq!(error.code, ErrorCode::PermissionDenied, "{}", error.message);
    }
}

#[test]
fn files_that_report_no_size_are_read_to_their_end() {
    let workspace = Workspace::empty();
    for path in ["/proc/version", "/proc/self/limits", "/proc/kallsyms"] {
        let Ok(expected) = fs::read(path) else {
            continue;
        };
        assert_eq!(fs::metadata(path).unwrap().len(), 0);
        assert_eq!(workspace.raw(path).unwrap(), expected, "{path}");
        let answer = workspace.read(path).unwrap();
        assert_eq!(answer.file_size, expected.len() as u64, "{path}");
        let lines = expected.iter().filter(|&&byte| byte == b'\n').count() as u64;
        assert_eq!(answer.total_lines, Some(lines), "{path}");
        assert!(answer.sha256.is_some(), "{path}");
    }
    // Larger than the largest file: refused at its end, never cut in silence.
    let Ok(mut raw) = read::open_raw(&workspace.context, "/proc/self/pagemap") else {
        return;
    };
    let read = std::io::copy(&mut raw.file, &mut std::io::sink());
    assert!(read.is_err(), "{read:?}");
    let answer = workspace.read("/proc/self/pagemap").unwrap();
    assert_eq!((answer.file_size, answer.sha256), (MAX_FILE_BYTES, None));
}

#[test]
fn files_of_sysfs_have_the_size_of_their_content() {
    let workspace = Workspace::empty();
    let path = "/sys/kernel/mm/transparent_hugepage/enabled";
    if let Ok(expected) = fs::read(path) {
        assert_eq!(workspace.raw(path).unwrap(), expected);
        assert_eq!(read::open_raw(&workspace.context, path).unwrap().size, expected.len() as u64);
        assert_eq!(workspace.read(path).unwrap().file_size, expected.len() as u64);
    }
}

#[test]
fn a_file_that_changes_after_it_was_opened_is_read_up_to_its_size() {
    let workspace = Workspace::empty();
    for (size, later) in [(100, 20_000), (20_000, 100), (20_000, 9000), (20_000, 500_000), (0, 20_000)] {
        let path = workspace.path.join("file");
        fs::write(&path, vec![b'a'; size]).unwrap();
        let raw = read::open_raw(&workspace.context, "file").unwrap();
        File::options().write(true).open(&path).unwrap().set_len(later).unwrap();
        let bytes = bytes_of(raw);
        assert!(bytes.len() <= size, "{size} {later}: {}", bytes.len());
        assert!(bytes.len() as u64 >= later.min(size as u64), "{size} {later}: {}", bytes.len());
    }
}

#[test]
fn reading_ends_while_the_file_grows_and_shrinks() {
    let workspace = Workspace::empty();
    let path = workspace.path.join("file");
    fs::write(&path, "line\n").unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut file = File::options().append(true).open(&path).unwrap();
            let chunk = b"line\n".repeat(10_000);
            let mut written = 0;
            while !stop.load(Ordering::Relaxed) {
                written += file.write(&chunk).unwrap();
                if written > 8 << 20 {
                    written = 0;
                    file.set_len(5).unwrap();
                }
            }
        });
        for _ in 0..30 {
            let answer = workspace.read("file");
            let raw = workspace.raw("file");
            if answer.is_err() || raw.is_err() {
                stop.store(true, Ordering::Relaxed);
            }
            let answer = answer.unwrap();
            assert!(answer.content.starts_with("1: line"));
            assert!(raw.unwrap().len() as u64 <= MAX_FILE_BYTES);
        }
        stop.store(true, Ordering::Relaxed);
    });
}
