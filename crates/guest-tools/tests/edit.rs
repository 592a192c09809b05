//! edit: matches, replacements, and refusals.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use std::fs;
use std::ops::Range;
use std::os::unix::fs::{PermissionsExt, symlink};

use emergent_guest_tools::edit;
use emergent_wire::tools::{EditAnswer, EditRequest};
use emergent_wire::{ErrorCode, ErrorDetail};
use proptest::prelude::*;
use support::{NEVER, Workspace, config};

impl Workspace {
    fn with(content: impl AsRef<[u8]>) -> Self {
        let workspace = Self::empty();
        workspace.file("file", content);
        workspace
    }

    fn request(old: &str, new: &str) -> EditRequest {
        EditRequest {
            file_path: "file".into(),
            old_string: old.into(),
            new_string: new.into(),
            ..EditRequest::default()
        }
    }

    fn edit(&self, old: &str, new: &str) -> Result<EditAnswer, ErrorDetail> {
        edit::edit(&self.context, &Self::request(old, new), &NEVER)
    }

    fn edit_all(&self, old: &str, new: &str) -> Result<EditAnswer, ErrorDetail> {
        let request = EditRequest { replace_all: true, ..Self::request(old, new) };
        edit::edit(&self.context, &request, &NEVER)
    }

    fn content(&self) -> Vec<u8> {
        fs::read(self.path.join("file")).unwrap()
    }
}

/// Edits a file and checks which matcher found the text and what the file holds then.
#[track_caller]
fn check(content: &str, old: &str, new: &str, matched_by: &str, expected: &str) {
    let workspace = Workspace::with(content);
    let answer = workspace.edit(old, new).unwrap();
    assert_eq!(String::from_utf8_lossy(&workspace.content()), expected);
    assert_eq!(answer.matched_by, matched_by);
    assert_eq!(answer.replacements, 1);
}

#[test]
fn the_exact_text_is_replaced() {
    check("a b c\n", "b", "x", "exact", "a x c\n");
    check("a\nb\nc", "b\nc", "x", "exact", "a\nx");
    check("äöü", "ö", "", "exact", "äü");
}

#[test]
fn an_answer_tells_what_changed() {
    let workspace = Workspace::with("one\ntwo\nthree\n");
    let answer = workspace.edit("two", "2\n2.5").unwrap();
    assert_eq!((answer.lines_changed, answer.replacements), (2, 1));
    let path = workspace.path.join("file").display().to_string();
    assert_eq!(
        answer.diff,
        format!("--- {path}\n+++ {path}\n@@ -1,3 +1,4 @@\n one\n-two\n+2\n+2.5\n three\n")
    );
    assert_eq!(answer.sha256.len(), 64);
    // The hash fits the next edit.
    let request =
        EditRequest { expected_sha256: Some(answer.sha256.to_uppercase()), ..Workspace::request("one", "1") };
    edit::edit(&workspace.context, &request, &NEVER).unwrap();
    let error = edit::edit(&workspace.context, &request, &NEVER).unwrap_err();
    assert_eq!(error.code, ErrorCode::StaleFile);
}

#[test]
fn line_ends_and_byte_order_mark_are_kept() {
    check("a\r\nb\r\nc\r\n", "a\nb\n", "x\ny\nz\n", "exact", "x\r\ny\r\nz\r\nc\r\n");
    check("a\r\nb\r\n", "a", "x\ny", "exact", "x\r\ny\r\nb\r\n");
    check("a\nb\n", "a\r\nb", "x\r\ny", "exact", "x\ny\n");
    check("a\r\nfoo\r\n", "\nfoo", "\nbar", "exact", "a\r\nbar\r\n");
    // Written on purpose: the caller names the `\r` that is there.
    check("a\r\nb\r\n", "a\r\n", "a\n", "exact", "a\nb\r\n");
    // A file with both keeps each where it is.
    check("a\r\nb\nc\n", "b", "b\nb", "exact", "a\r\nb\nb\nc\n");
    check("\u{FEFF}a\nb", "a", "x", "exact", "\u{FEFF}x\nb");
    check("\u{FEFF}  a\nb", "\ta\nb", "x\ny", "line_trimmed", "\u{FEFF}x\ny");
    check("\u{FEFF}a", "\u{FEFF}a", "a", "exact", "a");
    check(" a\r\n b\r\n", "a\nb\n", "x\ny\n", "line_trimmed", "x\r\ny\r\n");
    check("  a \r\nb", "a\n  b\n", "x\ny\n", "line_trimmed", "x\r\ny");
}

#[test]
fn each_tolerant_matcher_finds_its_text() {
    check(
        "fn f() {\n    let a = 1;\n    a\n}\n",
        "let a = 1;  \n  a",
        "    2",
        "line_trimmed",
        "fn f() {\n    2\n}\n",
    );
    check(
        "function calculate(a, b) {\n  const temp = a + b\n  const result = temp * 2\n  return result\n}",
        "function calculate(a, b) {\n  // different middle content\n  return result\n}",
        "function calculate(a, b) {\n  return a * b * 2\n}",
        "block_anchor",
        "function calculate(a, b) {\n  return a * b * 2\n}",
    );
    check("if (x  ==\t1) { y(); }\n", "(x == 1) {", "(z) {", "whitespace_normalized", "if (z) { y(); }\n");
    check("call(a,\n     b)\n", "call(a, b)", "call(c)", "whitespace_normalized", "call(c)\n");
    check(
        "a\n  x\n    y\nb\n x\n y\n",
        "    x\n      y",
        "  z",
        "indentation_flexible",
        "a\n  z\nb\n x\n y\n",
    );
    check("say(\"a\")\n", "say(\\\"a\\\")", "say(\\\"b\\\")", "escape_normalized", "say(\"b\")\n");
    check("one\ntwo three", "one\\ntwo", "1\\n2", "escape_normalized", "1\n2 three");
}

#[test]
fn white_space_around_the_text_is_not_doubled() {
    check(
        "  foo(a);\n  bar();\n",
        "\n  foo(a);\n\n",
        "\n  foo(b);\n\n",
        "whitespace_normalized",
        "  foo(b);\n  bar();\n",
    );
    check("\tif a {}  else {}\n", "    if a {} else {}\n", "    x\n", "whitespace_normalized", "\tx\n");
    check("\tif a  {}\nb\n", "    if a {}\n", "", "whitespace_normalized", "b\n");
    // Inside of a word is not where white space was.
    let workspace = Workspace::with("xfoobar\n");
    assert_eq!(workspace.edit(" foo ", "y").unwrap_err().code, ErrorCode::OldStringNotFound);
}

#[test]
fn a_missing_and_an_ambiguous_old_string_are_refused() {
    let workspace = Workspace::with("a\nb\na\n");
    let error = workspace.edit("zzz", "y").unwrap_err();
    assert_eq!(error.code, ErrorCode::OldStringNotFound);
    assert!(error.message.starts_with("oldString not found in content"));
    let error = workspace.edit("a", "y").unwrap_err();
    assert_eq!(error.code, ErrorCode::MultipleMatches);
    assert!(error.message.starts_with("Found multiple matches for oldString"));
    assert!(error.message.contains("lines 1, 3"), "{}", error.message);
    assert_eq!(Workspace::with("aaa").edit("aa", "b").unwrap_err().code, ErrorCode::MultipleMatches);
    let error = Workspace::with(" x\n y\n-\n  x\n  y\n").edit("x \ny", "z").unwrap_err();
    assert_eq!(error.code, ErrorCode::MultipleMatches);
    assert_eq!(workspace.edit("a", "a").unwrap_err().code, ErrorCode::BadRequest);
    assert_eq!(workspace.edit("  ", "x").unwrap_err().code, ErrorCode::OldStringNotFound);
    assert_eq!(workspace.content(), b"a\nb\na\n");
}

#[test]
fn all_occurrences_are_replaced_when_asked_for() {
    let workspace = Workspace::with("a\r\nb a\r\naa");
    let answer = workspace.edit_all("a", "x\ny").unwrap();
    assert_eq!(workspace.content(), b"x\r\ny\r\nb x\r\ny\r\nx\r\nyx\r\ny");
    assert_eq!(answer.replacements, 4);
    let workspace = Workspace::with(" a\n b\n\n  a\n  b\n");
    let answer = workspace.edit_all("a \nb", "c").unwrap();
    assert_eq!((answer.replacements, answer.matched_by.as_str()), (2, "line_trimmed"));
    assert_eq!(workspace.content(), b"c\n\nc\n");
}

#[test]
fn line_numbers_of_read_are_recognised() {
    let workspace = Workspace::with("fn main() {\n}\n");
    for old in ["1: fn main() {\n2: }", "1: fn main() {", "  9: a\n 10:\n 11: b\n"] {
        let error = workspace.edit(old, "x").unwrap_err();
        assert_eq!(error.code, ErrorCode::OldStringNotFound);
        assert!(error.message.contains("line numbers"), "{}", error.message);
    }
    // What really is in the file can be replaced.
    check("1: a\n2: b\n", "1: a\n2: b", "1: c", "exact", "1: c\n");
}

#[test]
fn an_empty_old_string_makes_new_files_only() {
    let workspace = Workspace::with("");
    let answer = workspace.edit("", "a\nb\n").unwrap();
    assert_eq!((answer.matched_by.as_str(), answer.lines_changed), ("new_file", 2));
    assert_eq!(workspace.content(), b"a\nb\n");
    assert_eq!(workspace.edit("", "x").unwrap_err().code, ErrorCode::Conflict);
    let request = EditRequest { file_path: "deep/new".into(), ..Workspace::request("", "x") };
    edit::edit(&workspace.context, &request, &NEVER).unwrap();
    assert_eq!(fs::read(workspace.path.join("deep/new")).unwrap(), b"x");
}

#[test]
fn only_files_are_edited_and_missing_ones_make_no_directories() {
    let workspace = Workspace::with("x");
    let edit = |path: &str| {
        let request = EditRequest { file_path: path.into(), ..Workspace::request("x", "y") };
        edit::edit(&workspace.context, &request, &NEVER).unwrap_err()
    };
    assert_eq!(edit("no/such").code, ErrorCode::FileNotFound);
    assert!(!workspace.path.join("no").exists());
    let error = edit("fil");
    assert_eq!(error.code, ErrorCode::FileNotFound);
    assert!(error.message.contains("/file"));
    fs::create_dir(workspace.path.join("dir")).unwrap();
    assert_eq!(edit("dir").code, ErrorCode::WrongFileType);
    assert_eq!(edit("/dev/null").code, ErrorCode::WrongFileType);
}

#[test]
fn mode_and_links_are_kept() {
    let workspace = Workspace::with("x");
    let file = workspace.path.join("file");
    fs::set_permissions(&file, fs::Permissions::from_mode(0o750)).unwrap();
    symlink("file", workspace.path.join("link")).unwrap();
    let request = EditRequest { file_path: "link".into(), ..Workspace::request("x", "y") };
    edit::edit(&workspace.context, &request, &NEVER).unwrap();
    assert!(fs::symlink_metadata(workspace.path.join("link")).unwrap().is_symlink());
    assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o750);
    assert_eq!(workspace.content(), b"y");
}

#[test]
fn bytes_that_are_not_text_stay() {
    let workspace = Workspace::with(b"\xFF\xFE caf\xE9 \0 old \x80");
    workspace.edit("old", "new").unwrap();
    assert_eq!(workspace.content(), b"\xFF\xFE caf\xE9 \0 new \x80");
    // With NUL bytes only the exact text is looked for.
    assert_eq!(workspace.edit("new ", "x").unwrap().matched_by, "exact");
    assert_eq!(workspace.edit("  x", "y").unwrap_err().code, ErrorCode::OldStringNotFound);
}

#[test]
fn the_largest_file_is_edited() {
    let mut content = b"0123456789abcde\n".repeat(4 << 20);
    content[20_000_000..20_000_006].copy_from_slice(b"needle");
    let workspace = Workspace::with(&content);
    let answer = workspace.edit("needle", "NEEDLE").unwrap();
    content[20_000_000..20_000_006].copy_from_slice(b"NEEDLE");
    assert!(workspace.content() == content);
    assert_eq!(answer.lines_changed, 1);
    assert!(answer.diff.contains("@@ -1249998,"), "{}", answer.diff);
    assert_eq!(workspace.edit("NEEDLE", "NEEDLE!").unwrap_err().code, ErrorCode::TooLarge);
    assert_eq!(workspace.edit_all("0", "1").unwrap_err().code, ErrorCode::Unacceptable);
    assert_eq!(workspace.edit("  nothing\n like this", "x").unwrap_err().code, ErrorCode::OldStringNotFound);
}

#[test]
fn the_matchers_end_on_inputs_with_many_candidates() {
    let lines = "}\n".repeat(200_000);
    let old = format!("{{\n{}", " }\n".repeat(60_000));
    let error = Workspace::with(&lines).edit(&old, "x").unwrap_err();
    assert_eq!(error.code, ErrorCode::OldStringNotFound);
    let old = format!("}}\n{}x\n}}", " }\n".repeat(30_000));
    let _ = Workspace::with(&lines).edit(&old, "y").unwrap_err();
    let words = "a ".repeat(200_000);
    let _ = Workspace::with(&words).edit(&"a  ".repeat(60_000), "y").unwrap_err();
}

#[test]
fn concurrent_edits_of_a_file_all_take_effect() {
    let content: String = (0..16).map(|n| format!("<{n}>\n")).collect();
    let workspace = Workspace::with(&content);
    symlink("file", workspace.path.join("alias")).unwrap();
    std::thread::scope(|scope| {
        for n in 0..16 {
            let workspace = &workspace;
            scope.spawn(move || {
                let request = EditRequest {
                    file_path: if n % 2 == 0 { "file" } else { "alias" }.into(),
                    ..Workspace::request(&format!("<{n}>"), &format!("[{n}]"))
                };
                edit::edit(&workspace.context, &request, &NEVER).unwrap();
            });
        }
    });
    let expected: String = (0..16).map(|n| format!("[{n}]\n")).collect();
    assert_eq!(String::from_utf8(workspace.content()).unwrap(), expected);
}

/// The only place of a text, by brute force: as it is (with the `\r` before its first `\n`), or with `\r\n` for `\n`.
fn only_place(content: &[u8], old: &str) -> Option<Range<usize>> {
    let crlf = old.replace('\n', "\r\n");
    let mut places = Vec::new();
    for at in 0..content.len() {
        if content[at..].starts_with(old.as_bytes()) {
            let has_return = old.starts_with('\n') && at > 0 && content[at - 1] == b'\r';
            places.push(at - usize::from(has_return)..at + old.len());
        }
        if content[at..].starts_with(crlf.as_bytes()) {
            places.push(at..at + crlf.len());
        }
    }
    places.sort_by_key(|place| place.start);
    places.dedup();
    (places.len() == 1).then(|| places.remove(0))
}

proptest! {
    #![proptest_config(config(256))]

    /// Whatever the bytes: what is before and behind the match stays as it is.
    #[test]
    fn no_byte_outside_the_match_changes(
        has_mark in any::<bool>(),
        before in prop::collection::vec(prop_oneof![Just(b'\n'), Just(b'\r'), Just(b' '), any::<u8>()], 0..200),
        after in prop::collection::vec(prop_oneof![Just(b'\n'), Just(b'\r'), Just(b' '), any::<u8>()], 0..200),
        old in "[a-c@\n ]{1,12}",
        new in "[x-z\n ]{0,12}",
    ) {
        let mut content = if has_mark { b"\xEF\xBB\xBF".to_vec() } else { Vec::new() };
        content.extend_from_slice(&before);
        content.extend_from_slice(old.as_bytes());
        content.extend_from_slice(&after);
        let workspace = Workspace::with(&content);
        let result = workspace.edit(&old, &new);
        let now = workspace.content();
        match result {
            // Line ends of both kinds inside the match.
            Ok(answer) if answer.matched_by != "exact" => {
                prop_assert!(old.contains('\n') && content.contains(&b'\r'));
            }
            Ok(_) => {
                let place = only_place(&content, &old).unwrap();
                prop_assert_eq!(&now[..place.start], &content[..place.start]);
                let at = place.start;
                let behind = content.len() - place.end;
                prop_assert_eq!(&now[now.len() - behind..], &content[place.end..]);
                let inserted = &now[at..now.len() - behind];
                let is_new = inserted == new.as_bytes() || inserted == new.replace('\n', "\r\n").as_bytes();
                prop_assert!(is_new, "{:?}", inserted);
            }
            Err(_) => prop_assert_eq!(now, content),
        }
    }

    /// A tolerant match changes whole lines of the block and nothing around it.
    #[test]
    fn no_line_outside_a_tolerant_match_changes(
        before in prop::collection::vec("[a-z]{0,8}", 0..20),
        block in prop::collection::vec("[A-Z]{3,8}", 1..6),
        after in prop::collection::vec("[a-z]{0,8}", 0..20),
        crlf in any::<bool>(),
        indent in 1_usize..5,
    ) {
        let end = if crlf { "\r\n" } else { "\n" };
        let mut lines = before.clone();
        lines.extend(block.iter().map(|line| format!("{}{line}", " ".repeat(indent))));
        lines.extend(after.clone());
        let content = lines.join(end);
        let workspace = Workspace::with(&content);
        let old = block.iter().map(|line| format!("\t{line} ")).collect::<Vec<_>>().join("\n");
        let result = workspace.edit(&old, "1\n2");
        let mut expected = before;
        expected.extend(["1".to_owned(), "2".to_owned()]);
        expected.extend(after);
        prop_assert_eq!(result.unwrap().matched_by, "line_trimmed");
        prop_assert_eq!(String::from_utf8(workspace.content()).unwrap(), {
            let has_line_end = lines.len() > 1;
            expected.join(if has_line_end { end } else { "\n" })
        });
    }
}
