//! read: pages, kinds of files, and errors with advice.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use std::fs;
use std::io::Read;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::sync::atomic::AtomicBool;

use emergent_guest_tools::{Context, read};
use emergent_wire::tools::{MAX_READ_BYTES, ReadAnswer, ReadRequest};
use emergent_wire::{ErrorCode, ErrorDetail};
use proptest::prelude::*;
use support::{NEVER, Workspace, config};

impl Workspace {
    fn page(&self, name: &str, offset: Option<u64>, limit: Option<u64>) -> Result<ReadAnswer, ErrorDetail> {
        let request = ReadRequest { file_path: name.into(), offset, limit, raw: false };
        read::read(&self.context, &request, &NEVER)
    }

    fn read(&self, name: &str) -> Result<ReadAnswer, ErrorDetail> {
        self.page(name, None, None)
    }
}

#[test]
fn lines_are_numbered_and_line_ends_and_mark_are_not_shown() {
    let workspace = Workspace::empty();
    workspace.file("a", b"\xEF\xBB\xBFone\r\ntwo\rstill two\n\nl\xE9on");
    let answer = workspace.read("a").unwrap();
    assert_eq!(answer.content, "1: one\n2: two\rstill two\n3: \n4: l\u{FFFD}on");
    assert_eq!(answer.total_lines, Some(4));
    assert_eq!(answer.file_size, 27);
    assert!(!answer.truncated && !answer.is_binary && !answer.is_dir);
    assert_eq!(answer.next_offset, None);
    workspace.file("abc", "abc");
    assert_eq!(
        workspace.read("abc").unwrap().sha256.unwrap(),
        "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    );
}

#[test]
fn an_empty_file_has_no_lines_and_an_offset_behind_the_end_is_refused() {
    let workspace = Workspace::empty();
    workspace.file("empty", "");
    let answer = workspace.page("empty", Some(1), None).unwrap();
    assert_eq!((answer.content.as_str(), answer.total_lines), ("", Some(0)));
    assert_eq!(workspace.page("empty", Some(2), None).unwrap_err().code, ErrorCode::Unacceptable);
    workspace.file("two", "a\nb\n");
    let error = workspace.page("two", Some(3), None).unwrap_err();
    assert_eq!(error.code, ErrorCode::Unacceptable);
    assert!(error.message.contains("2 lines"), "{}", error.message);
    assert_eq!(workspace.page("two", Some(2), Some(5)).unwrap().content, "2: b");
    let page = workspace.page("two", Some(1), Some(1)).unwrap();
    assert_eq!((page.truncated, page.next_offset), (true, Some(2)));
    let page = workspace.page("two", Some(2), Some(1)).unwrap();
    assert_eq!((page.truncated, page.next_offset), (false, None));
}

#[test]
fn long_lines_and_large_pages_are_cut_with_a_note() {
    let workspace = Workspace::empty();
    workspace.file("long", format!("{}\r\nshort\n", "é".repeat(300_000)));
    let answer = workspace.read("long").unwrap();
    let first = answer.content.lines().next().unwrap();
    assert!(first.starts_with("1: éé"));
    assert!(first.ends_with(" … (line cut at 2000 of 300000 characters)"), "{}", &first[4000..]);
    assert!(answer.content.ends_with("\n2: short"));

    workspace.file("large", ("y".repeat(1500) + "\n").repeat(100));
    let answer = workspace.read("large").unwrap();
    assert!(answer.content.len() <= MAX_READ_BYTES);
    assert!(answer.truncated);
    assert_eq!(answer.total_lines, Some(100));
    let next = answer.next_offset.unwrap();
    assert!(answer.note.unwrap().contains(&format!("offset {next}")));
}

#[test]
fn binary_files_are_described() {
    let workspace = Workspace::empty();
    workspace.file("a.png", b"\x89PNG\r\n\x1A\n\0\0\0\rIHDR");
    let answer = workspace.read("a.png").unwrap();
    assert!(answer.is_binary);
    assert_eq!(answer.content, "");
    assert_eq!(answer.media_type.as_deref(), Some("image/png"));
    assert_eq!(answer.file_size, 16);
    assert!(answer.sha256.is_some());
    assert_eq!(answer.total_lines, None);
}

#[test]
fn directories_are_listed_in_order_and_in_pages() {
    let workspace = Workspace::empty();
    for name in ["b", "a", "Z", ".hidden"] {
        workspace.file(name, "");
    }
    fs::create_dir(workspace.path.join("dir")).unwrap();
    symlink("dir", workspace.path.join("link")).unwrap();
    symlink("nowhere", workspace.path.join("broken")).unwrap();
    let answer = workspace.read(".").unwrap();
    assert!(answer.is_dir);
    assert_eq!(answer.content, ".hidden\nZ\na\nb\nbroken\ndir/\nlink/");
    assert_eq!(answer.total_lines, Some(7));
    let page = workspace.page(".", Some(2), Some(2)).unwrap();
    assert_eq!((page.content.as_str(), page.next_offset), ("Z\na", Some(4)));
    assert_eq!(workspace.page(".", Some(8), None).unwrap_err().code, ErrorCode::Unacceptable);
    assert_eq!(workspace.read("dir/").unwrap().content, "");
}

#[test]
fn the_error_of_a_missing_file_suggests_similar_names() {
    let workspace = Workspace::empty();
    for name in ["main.rs", "main.test.rs", "Main.rs", "mian.rs", "unrelated.txt"] {
        workspace.file(name, "");
    }
    let error = workspace.read("man.rs").unwrap_err();
    assert_eq!(error.code, ErrorCode::FileNotFound);
    let similar = error.details.unwrap()["similar"].as_array().unwrap().clone();
    assert_eq!(similar.len(), 3);
    assert!(similar[0].as_str().unwrap().ends_with("/Main.rs"));
    assert!(error.message.contains("main.rs"));
    let error = workspace.read("no/such/file").unwrap_err();
    assert_eq!(error.code, ErrorCode::FileNotFound);
    assert_eq!(workspace.read("main.rs/x").unwrap_err().code, ErrorCode::WrongFileType);
    assert_eq!(workspace.read("main.rs/").unwrap_err().code, ErrorCode::WrongFileType);
    assert_eq!(workspace.read(&"x".repeat(300)).unwrap_err().code, ErrorCode::InvalidPath);
    assert_eq!(workspace.read("a\0b").unwrap_err().code, ErrorCode::InvalidPath);
    symlink("gone", workspace.path.join("dangling")).unwrap();
    assert!(workspace.read("dangling").unwrap_err().message.contains("link"));
}

#[test]
fn special_files_never_block() {
    let workspace = Workspace::empty();
    let fifo = workspace.path.join("fifo");
    rustix::fs::mknodat(
        rustix::fs::CWD,
        &fifo,
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::from_raw_mode(0o600),
        0,
    )
    .unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(workspace.path.join("socket")).unwrap();
    for name in ["fifo", "socket", "/dev/null", "/dev/zero"] {
        assert_eq!(workspace.read(name).unwrap_err().code, ErrorCode::WrongFileType, "{name}");
        assert_eq!(read::open_raw(&workspace.context, name).unwrap_err().code, ErrorCode::WrongFileType);
    }
}

#[test]
fn files_of_proc_have_content_although_their_size_is_zero() {
    let workspace = Workspace::empty();
    let answer = workspace.read("/proc/self/status").unwrap();
    assert!(answer.content.starts_with("1: Name:"));
    assert!(answer.file_size > 0 && answer.total_lines > Some(5));
}

#[test]
fn very_large_files_are_read_only_as_far_as_needed() {
    let workspace = Workspace::empty();
    workspace.file("sparse", "first\nsecond\n".repeat(1000));
    let file = fs::File::options().write(true).open(workspace.path.join("sparse")).unwrap();
    file.set_len(1 << 40).unwrap();
    let answer = workspace.page("sparse", Some(2), Some(1)).unwrap();
    assert_eq!(answer.content, "2: second");
    assert_eq!((answer.total_lines, answer.sha256), (None, None));
    assert_eq!((answer.file_size, answer.next_offset), (1 << 40, Some(3)));
    assert_eq!(read::open_raw(&workspace.context, "sparse").unwrap_err().code, ErrorCode::TooLarge);
}

#[test]
fn raw_gives_the_exact_bytes() {
    let workspace = Workspace::empty();
    workspace.file("a", b"\xEF\xBB\xBFa\r\n\0\xFF");
    let mut raw = read::open_raw(&workspace.context, "a").unwrap();
    let mut bytes = Vec::new();
    raw.file.read_to_end(&mut bytes).unwrap();
    assert_eq!(bytes, b"\xEF\xBB\xBFa\r\n\0\xFF");
    assert_eq!((raw.size, raw.media_type.as_str()), (8, "application/octet-stream"));
    assert_eq!(read::open_raw(&workspace.context, ".").unwrap_err().code, ErrorCode::WrongFileType);
}

#[test]
fn a_cancelled_read_fails_with_cancelled() {
    let workspace = Workspace::empty();
    workspace.file("a", "x\n".repeat(1_000_000));
    let request = ReadRequest { file_path: "a".into(), ..ReadRequest::default() };
    let error = read::read(&workspace.context, &request, &AtomicBool::new(true)).unwrap_err();
    assert_eq!(error.code, ErrorCode::Cancelled);
}

#[test]
fn confinement_holds_for_reading() {
    let workspace = Workspace::empty();
    let inside = workspace.path.join("in");
    fs::create_dir(&inside).unwrap();
    workspace.file("secret", "s");
    fs::write(inside.join("ok"), "fine").unwrap();
    symlink("../secret", inside.join("leak")).unwrap();
    let context = Context::confined(&inside, vec![inside.clone()]);
    let read = |path: &str| {
        let request = ReadRequest { file_path: path.into(), ..ReadRequest::default() };
        read::read(&context, &request, &NEVER).map(|answer| answer.content)
    };
    assert_eq!(read("ok").unwrap(), "1: fine");
    assert_eq!(read(".").unwrap(), "leak\nok");
    for path in ["leak", "../secret", "/etc/passwd"] {
        assert_eq!(read(path).unwrap_err().code, ErrorCode::Forbidden, "{path}");
    }
    let error = read("okk").unwrap_err();
    assert_eq!(error.details.unwrap()["similar"].as_array().unwrap().len(), 1);
}

#[test]
fn a_file_without_read_permission_is_denied_except_to_root() {
    // Root reads everything, so that only the mode can be looked at; the mapping has its own test.
    let workspace = Workspace::empty();
    workspace.file("a", "x");
    fs::set_permissions(workspace.path.join("a"), fs::Permissions::from_mode(0o000)).unwrap();
    match workspace.read("a") {
        Ok(answer) => assert_eq!(answer.content, "1: x"),
        Err(error) => assert_eq!(error.code, ErrorCode::PermissionDenied),
    }
}

proptest! {
    #![proptest_config(config(64))]

    #[test]
    fn pages_put_together_are_the_file(
        lines in prop::collection::vec("[a-zäß😀 \t]{0,120}", 0..600),
        ends_in_line_feed in any::<bool>(),
        limit in 1_u64..400,
    ) {
        let workspace = Workspace::empty();
        let mut content = lines.join("\n");
        if ends_in_line_feed && !content.is_empty() {
            content.push('\n');
        }
        workspace.file("file", &content);
        let mut offset = 1;
        let mut seen = Vec::new();
        loop {
            let page = workspace.page("file", Some(offset), Some(limit)).unwrap();
            prop_assert!(page.content.len() <= MAX_READ_BYTES);
            prop_assert_eq!(page.total_lines, Some(content.lines().count() as u64));
            if !page.content.is_empty() {
                for line in page.content.split('\n') {
                    let (number, text) = line.split_once(": ").unwrap();
                    prop_assert_eq!(number.parse::<usize>().unwrap(), seen.len() + 1);
                    seen.push(text.to_owned());
                }
            }
            prop_assert_eq!(page.truncated, page.next_offset.is_some());
            match page.next_offset {
                Some(next) => { prop_assert_eq!(next, seen.len() as u64 + 1); offset = next },
                None => break,
            }
        }
        let expected: Vec<String> = content.lines().map(str::to_owned).collect();
        prop_assert_eq!(seen, expected);
    }
}
