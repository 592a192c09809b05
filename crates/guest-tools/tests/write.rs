//! write: atomic replacement of whole files.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use emergent_guest_tools::Context;
use emergent_guest_tools::write::{FileWriter, write};
use emergent_wire::ErrorCode;
use emergent_wire::tools::MAX_FILE_BYTES;

fn workspace() -> (tempfile::TempDir, PathBuf, Context) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().canonicalize().unwrap();
    let context = Context::new(&path);
    (directory, path, context)
}

fn names(directory: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(directory)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn files_are_made_with_their_directories() {
    let (_guard, path, context) = workspace();
    let answer = write(&context, "a/b/../c.txt", b"abc").unwrap();
    assert_eq!(answer.file_path, path.join("a/c.txt").display().to_string());
    let answer = write(&context, "x/y/c.txt", b"abc").unwrap();
    assert!(answer.success && answer.created);
    assert_eq!(answer.bytes_written, 3);
    assert_eq!(answer.file_path, path.join("x/y/c.txt").display().to_string());
    assert_eq!(answer.sha256, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    assert_eq!(fs::read(path.join("x/y/c.txt")).unwrap(), b"abc");
    assert_eq!(fs::metadata(path.join("x/y/c.txt")).unwrap().mode() & 0o777, 0o644);
    let answer = write(&context, "x/y/../d", b"").unwrap();
    assert_eq!(answer.file_path, path.join("x/d").display().to_string());
    assert_eq!(names(&path.join("x/y")), ["c.txt"]);
}

#[test]
fn mode_and_owner_are_kept() {
    let (_guard, path, context) = workspace();
    let file = path.join("run.sh");
    fs::write(&file, "old").unwrap();
    let is_root = std::os::unix::fs::chown(&file, Some(1234), Some(4321)).is_ok();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o4751)).unwrap();
    let answer = write(&context, "run.sh", b"new").unwrap();
    assert!(!answer.created);
    let metadata = fs::metadata(&file).unwrap();
    assert_eq!(metadata.mode() & 0o7777, 0o4751);
    if is_root {
        assert_eq!((metadata.uid(), metadata.gid()), (1234, 4321));
    }
    assert_eq!(fs::read(&file).unwrap(), b"new");
}

#[test]
fn links_stay_links() {
    let (_guard, path, context) = workspace();
    fs::create_dir(path.join("dir")).unwrap();
    fs::write(path.join("dir/target"), "old").unwrap();
    symlink("dir/target", path.join("first")).unwrap();
    symlink(path.join("first"), path.join("second")).unwrap();
    write(&context, "second", b"new").unwrap();
    assert!(fs::symlink_metadata(path.join("second")).unwrap().is_symlink());
    assert!(fs::symlink_metadata(path.join("first")).unwrap().is_symlink());
    assert_eq!(fs::read(path.join("dir/target")).unwrap(), b"new");
    symlink("dir/fresh", path.join("dangling")).unwrap();
    assert!(write(&context, "dangling", b"x").unwrap().created);
    assert_eq!(fs::read(path.join("dir/fresh")).unwrap(), b"x");
    symlink("loop", path.join("loop")).unwrap();
    assert_eq!(write(&context, "loop", b"x").unwrap_err().code, ErrorCode::InvalidPath);
    assert_eq!(names(&path.join("dir")), ["fresh", "target"]);
}

#[test]
fn hard_links_keep_the_old_content() {
    let (_guard, path, context) = workspace();
    fs::write(path.join("a"), "old").unwrap();
    fs::hard_link(path.join("a"), path.join("b")).unwrap();
    write(&context, "a", b"new").unwrap();
    assert_eq!(fs::read(path.join("b")).unwrap(), b"old");
}

#[test]
fn a_failed_write_names_the_cause_and_leaves_no_file() {
    let (_guard, path, context) = workspace();
    fs::create_dir(path.join("dir")).unwrap();
    fs::write(path.join("file"), "x").unwrap();
    let code = |name: &str| write(&context, name, b"x").unwrap_err().code;
    assert_eq!(code("dir"), ErrorCode::WrongFileType);
    assert_eq!(code("dir/"), ErrorCode::WrongFileType);
    assert_eq!(code("new/"), ErrorCode::WrongFileType);
    assert_eq!(code("."), ErrorCode::WrongFileType);
    assert_eq!(code("file/below"), ErrorCode::WrongFileType);
    assert_eq!(code("file/below/deeper"), ErrorCode::WrongFileType);
    assert_eq!(code(&"n".repeat(256)), ErrorCode::InvalidPath);
    assert_eq!(code("/dev/null"), ErrorCode::WrongFileType);
    assert_eq!(code(""), ErrorCode::InvalidPath);
    assert_eq!(names(&path), ["dir", "file"]);
}

#[test]
fn a_writer_that_is_dropped_changes_nothing() {
    let (_guard, path, context) = workspace();
    fs::write(path.join("file"), "old").unwrap();
    let mut writer = FileWriter::create(&context, "file").unwrap();
    writer.push(b"half").unwrap();
    assert_eq!(names(&path).len(), 2);
    assert_eq!(fs::read(path.join("file")).unwrap(), b"old");
    drop(writer);
    assert_eq!(names(&path), ["file"]);
    assert_eq!(fs::read(path.join("file")).unwrap(), b"old");
}

#[test]
fn files_over_the_limit_are_refused() {
    let (_guard, path, context) = workspace();
    let chunk = vec![b'x'; 1 << 20];
    let mut writer = FileWriter::create(&context, "file").unwrap();
    for _ in 0..MAX_FILE_BYTES >> 20 {
        writer.push(&chunk).unwrap();
    }
    assert_eq!(writer.push(b"x").unwrap_err().code, ErrorCode::TooLarge);
    drop(writer);
    assert!(names(&path).is_empty());
}

/// A mount for a test; unmounted on drop, also when the test fails.
struct Mount(PathBuf);

impl Mount {
    fn new(arguments: &[&str], at: &Path) -> Option<Self> {
        let status =
            Command::new("mount").args(arguments).arg(at).stderr(std::process::Stdio::null()).status();
        status.is_ok_and(|status| status.success()).then(|| Self(at.to_owned()))
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

#[test]
fn a_full_disk_fails_with_disk_full_and_keeps_the_old_file() {
    let (_guard, path, context) = workspace();
    fs::create_dir(path.join("small")).unwrap();
    let options = ["-t", "tmpfs", "-o", "size=1m", "tmpfs"];
    let Some(_mount) = Mount::new(&options, &path.join("small")) else {
        return; // Not root.
    };
    write(&context, "small/file", b"old").unwrap();
    let error = write(&context, "small/file", &vec![b'x'; 2 << 20]).unwrap_err();
    assert_eq!(error.code, ErrorCode::DiskFull);
    assert!(error.message.contains("the workspace's disk is full"), "{}", error.message);
    assert!(error.message.contains("small/file"));
    assert_eq!(fs::read(path.join("small/file")).unwrap(), b"old");
    assert_eq!(names(&path.join("small")), ["file"]);
}

#[test]
fn a_write_to_a_read_only_file_system_is_denied() {
    let (_guard, path, context) = workspace();
    fs::create_dir(path.join("fixed")).unwrap();
    let Some(_mount) = Mount::new(&["-t", "tmpfs", "-o", "ro", "tmpfs"], &path.join("fixed")) else {
        return; // Not root.
    };
    let error = write(&context, "fixed/file", b"x").unwrap_err();
    assert_eq!(error.code, ErrorCode::PermissionDenied);
    assert!(error.message.contains("read-only"));
}

#[test]
fn a_file_that_is_a_mount_point_is_overwritten_in_place() {
    let (_guard, path, context) = workspace();
    fs::write(path.join("source"), "a long old content").unwrap();
    fs::write(path.join("point"), "").unwrap();
    let source = path.join("source").display().to_string();
    let Some(_mount) = Mount::new(&["--bind", &source], &path.join("point")) else {
        return; // Not root.
    };
    write(&context, "point", b"new").unwrap();
    assert_eq!(fs::read(path.join("source")).unwrap(), b"new");
    assert_eq!(names(&path), ["point", "source"]);
}

#[test]
fn readers_see_only_the_old_or_the_new_file() {
    let (_guard, path, context) = workspace();
    let contents = [vec![b'a'; 300_000], vec![b'b'; 200_000]];
    write(&context, "file", &contents[0]).unwrap();
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            for round in 0..100 {
                write(&context, "file", &contents[round % 2]).unwrap();
            }
        });
        while !writer.is_finished() {
            let seen = fs::read(path.join("file")).unwrap();
            assert!(contents.contains(&seen));
        }
    });
    assert_eq!(names(&path), ["file"]);
}
