//! grep: the lines that are found, and their order; compared with ripgrep.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use std::os::unix::fs::symlink;

use std::process::Command;
use std::sync::atomic::AtomicBool;

use emergent_guest_tools::grep;
use emergent_wire::tools::{GrepAnswer, GrepRequest, MAX_LINE_CHARS};
use emergent_wire::{ErrorCode, ErrorDetail};
use proptest::prelude::*;
use support::{NEVER, Workspace, config};

impl Workspace {
    fn new<C: AsRef<[u8]>>(files: &[(&str, C)]) -> Self {
        let workspace = Self::empty();
        for (name, content) in files {
            workspace.file(name, content);
        }
        workspace
    }

    fn request(&self, request: &GrepRequest) -> Result<GrepAnswer, ErrorDetail> {
        grep::grep(&self.context, request, &NEVER)
    }

    fn grep(&self, pattern: &str) -> Result<GrepAnswer, ErrorDetail> {
        self.request(&GrepRequest { pattern: pattern.into(), ..GrepRequest::default() })
    }

    /// Matches as `name:line:text`.
    fn lines(&self, answer: &GrepAnswer) -> Vec<String> {
        let prefix = format!("{}/", self.path.display());
        answer
            .matches
            .iter()
            .map(|m| format!("{}:{}:{}", m.file_path.strip_prefix(&prefix).unwrap(), m.line_number, m.line))
            .collect()
    }

    fn find(&self, pattern: &str) -> Vec<String> {
        self.lines(&self.grep(pattern).unwrap())
    }
}

#[test]
fn lines_are_found_in_order() {
    let workspace = Workspace::new(&[
        ("b.txt", "foo\nbar\nfoo bar\n"),
        ("a/x.rs", "let foo = 1;\r\nFOO\r\n"),
        ("a-b", "foo"),
        ("none", "nothing"),
    ]);
    assert_eq!(
        workspace.find("foo"),
        ["a-b:1:foo", "a/x.rs:1:let foo = 1;", "b.txt:1:foo", "b.txt:3:foo bar"]
    );
    assert_eq!(workspace.find("1;$"), ["a/x.rs:1:let foo = 1;"]);
    assert_eq!(workspace.find("^FOO$"), ["a/x.rs:2:FOO"]);
    let request = GrepRequest {
        pattern: "foo".into(),
        ignore_case: true,
        include: Some("*.rs".into()),
        ..GrepRequest::default()
    };
    assert_eq!(workspace.lines(&workspace.request(&request).unwrap()).len(), 2);
    let request = GrepRequest { include: Some("a/**".into()), path: Some("a/x.rs".into()), ..request };
    assert_eq!(workspace.lines(&workspace.request(&request).unwrap()).len(), 2);
    assert_eq!(workspace.find("no such text"), Vec::<String>::new());
}

#[test]
fn a_failed_search_is_an_error_and_not_an_empty_answer() {
    let workspace = Workspace::new(&[("file", "x")]);
    let error = workspace.grep("(").unwrap_err();
    assert_eq!(error.code, ErrorCode::InvalidPattern);
    assert!(error.message.contains("unclosed group"), "{}", error.message);
    assert_eq!(workspace.grep("a\nb").unwrap_err().code, ErrorCode::InvalidPattern);
    assert_eq!(workspace.grep(r"(?:\w{1000}){1000}").unwrap_err().code, ErrorCode::InvalidPattern);
    let at = |path: &str| {
        let request = GrepRequest { pattern: "x".into(), path: Some(path.into()), ..GrepRequest::default() };
        workspace.request(&request).map(|answer| answer.matches.len()).map_err(|error| error.code)
    };
    assert_eq!(at("missing"), Err(ErrorCode::FileNotFound));
    assert_eq!(at("/dev/null"), Err(ErrorCode::WrongFileType));
    assert_eq!(at("file"), Ok(1));
    let request = GrepRequest { pattern: "x".into(), include: Some("[".into()), ..GrepRequest::default() };
    assert_eq!(workspace.request(&request).unwrap_err().code, ErrorCode::InvalidPattern);
    let cancelled = grep::grep(
        &workspace.context,
        &GrepRequest { pattern: "x".into(), ..GrepRequest::default() },
        &AtomicBool::new(true),
    );
    assert_eq!(cancelled.unwrap_err().code, ErrorCode::Cancelled);
}

#[test]
fn the_first_matches_are_given_whatever_thread_finds_them() {
    let files: Vec<(String, String)> =
        (0..200).map(|n| (format!("d{:02}/f{n:03}", n % 20), "hit\n".repeat(n % 7))).collect();
    let files: Vec<(&str, &str)> = files.iter().map(|(a, b)| (a.as_str(), b.as_str())).collect();
    let workspace = Workspace::new(&files);
    let all = {
        let request = GrepRequest { pattern: "hit".into(), limit: Some(10_000), ..GrepRequest::default() };
        let answer = workspace.request(&request).unwrap();
        assert!(!answer.truncated);
        workspace.lines(&answer)
    };
    for limit in [1, 2, 10, 99, 100, 101, all.len() - 1, all.len()] {
        let request = GrepRequest {
            pattern: "hit".into(),
            limit: Some(u32::try_from(limit).unwrap()),
            ..GrepRequest::default()
        };
        let answer = workspace.request(&request).unwrap();
        assert_eq!(workspace.lines(&answer), all[..limit]);
        assert_eq!(answer.truncated, limit < all.len());
    }
}

#[test]
fn context_is_given_around_each_match() {
    let workspace = Workspace::new(&[("f", "1\n2\nhit\nhit\n5\n6\n7\n8\nhit")]);
    let answer = |limit| {
        let request =
            GrepRequest { pattern: "hit".into(), context: Some(2), limit, ..GrepRequest::default() };
        workspace.request(&request).unwrap()
    };
    let all = answer(None);
    let around: Vec<_> = all.matches.iter().map(|m| (m.before.join(" "), m.after.join(" "))).collect();
    assert_eq!(
        around,
        [("1 2".into(), "hit 5".into()), ("2 hit".into(), "5 6".into()), ("7 8".into(), String::new())]
    );
    for limit in 1..3 {
        let cut = answer(Some(limit));
        assert!(cut.truncated);
        assert_eq!(cut.matches, all.matches[..limit as usize]);
    }
}

#[test]
fn ignored_binary_and_special_files_are_not_searched() {
    let workspace = Workspace::new(&[
        (".gitignore", b"ignored\n".to_vec()),
        ("ignored", b"hit".to_vec()),
        (".hidden", b"hit".to_vec()),
        (".git/config", b"hit".to_vec()),
        (".emergent/output/1", b"hit".to_vec()),
        ("binary", b"a\0hit\n".to_vec()),
        ("late", b"hit\nx\0hit\n".to_vec()),
        ("latin", b"caf\xE9 hit\n".to_vec()),
        ("utf16", b"\xFF\xFEh\0i\0t\0\n\0".to_vec()),
        ("bom", b"\xEF\xBB\xBFhit\n".to_vec()),
        ("long", format!("{}hit", "é".repeat(5000)).into_bytes()),
    ]);
    symlink("latin", workspace.path.join("link")).unwrap();
    let fifo = workspace.path.join("fifo");
    rustix::fs::mknodat(
        rustix::fs::CWD,
        &fifo,
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::from_raw_mode(0o600),
        0,
    )
    .unwrap();
    let found = workspace.find("hit");
    let names: Vec<&str> = found.iter().map(|line| line.split(':').next().unwrap()).collect();
    assert_eq!(names, [".hidden", "bom", "latin", "long", "utf16"]);
    assert!(found.contains(&"latin:1:caf\u{FFFD} hit".to_owned()));
    assert!(found.contains(&"utf16:1:hit".to_owned()));
    assert_eq!(workspace.find("^hit").len(), 3);
    let long =
        workspace.grep("hit").unwrap().matches.into_iter().find(|m| m.file_path.ends_with("long")).unwrap();
    assert_eq!(long.line.chars().count(), MAX_LINE_CHARS);
    let explicit = |path: &str| {
        let request =
            GrepRequest { pattern: "hit".into(), path: Some(path.into()), ..GrepRequest::default() };
        workspace.request(&request).unwrap()
    };
    assert_eq!(explicit("ignored").matches.len(), 1);
    assert_eq!(explicit(".git").matches.len(), 1);
    assert_eq!(explicit(".emergent/output").matches.len(), 1);
    let binary = explicit("binary");
    assert!(binary.matches.is_empty());
    assert!(binary.skipped[0].contains("binary"));
}

#[test]
fn an_answer_has_a_size_limit() {
    let line = format!("hit{}\n", "x".repeat(1500));
    let workspace = Workspace::new(&[("a", line.repeat(4000)), ("b", line.repeat(10))]);
    let request = GrepRequest { pattern: "hit".into(), limit: Some(10_000), ..GrepRequest::default() };
    let answer = workspace.request(&request).unwrap();
    assert!(answer.truncated);
    assert!((250..400).contains(&answer.matches.len()), "{}", answer.matches.len());
    assert!(answer.matches.iter().enumerate().all(|(n, m)| m.line_number == n as u64 + 1));
}

/// What `rg` finds, as `name:line:text`, sorted by the bytes of the path.
fn ripgrep(workspace: &Workspace, arguments: &[&str]) -> Option<Vec<String>> {
    let output = Command::new("rg")
        .current_dir(&workspace.path)
        .args([
            "--hidden",
            "--crlf",
            "--no-heading",
            "-nH",
            "--no-config",
            "--no-require-git",
            "--no-ignore-global",
        ])
        .args(["--color=never", "--glob=!.git", "--null"])
        .args(arguments)
        .output()
        .ok()?;
    let mut found: Vec<(Vec<u8>, u64, String)> = output
        .stdout
        .split(|&byte| byte == b'\n')
        .filter_map(|line| {
            let nul = line.iter().position(|&byte| byte == 0)?;
            let rest = String::from_utf8_lossy(&line[nul + 1..]).into_owned();
            let (number, text) = rest.split_once(':')?;
            let text = text.strip_suffix('\r').unwrap_or(text).to_owned();
            let name = line[..nul].strip_prefix(b"./").unwrap_or(&line[..nul]).to_vec();
            Some((name, number.parse().ok()?, text))
        })
        .collect();
    found.sort();
    Some(
        found
            .into_iter()
            .map(|(name, number, text)| format!("{}:{number}:{text}", String::from_utf8_lossy(&name)))
            .collect(),
    )
}

proptest! {
    #![proptest_config(config(40))]

    /// The same lines as ripgrep, where it is installed. (No carriage return on its own: versions of ripgrep differ on
    /// whether it ends a line for `^` and `$`.)
    #[test]
    fn ripgrep_finds_the_same(
        files in prop::collection::btree_map(
            prop::sample::select(vec!["a", "b.rs", "c/d.rs", "c/e", ".h", "c/.gitignore", ".gitignore", "x-y/z", "x/z", ".ignore"]),
            prop::collection::vec("([abc]{0,4} ?[abc]{0,3}|\\*\\.rs|c/|é+|b\\.rs)", 0..12),
            1..8,
        ),
        end in prop::sample::select(vec!["\n", "\r\n"]),
        pattern in prop::sample::select(vec!["a", "^b", "c$", "a.*b", "(?i)B", "é", "[ab]{2,}", "\\bc\\b", "^$", "a|b c"]),
        include in prop::sample::select(vec![None, Some("*.rs"), Some("c/**"), Some("!*.rs")]),
    ) {
        let files: Vec<(&str, String)> = files.into_iter().map(|(name, lines)| (name, lines.join(end))).collect();
        let workspace = Workspace::new(&files);
        let mut arguments = vec!["-e", pattern];
        // rg's `--glob` overrides ignore files and the tool's does not: compared without ignore files.
        let has_ignore_files = files.iter().any(|(name, _)| name.ends_with("ignore"));
        let include = include.filter(|_| !has_ignore_files);
        if let Some(include) = include {
            arguments.extend(["--glob", include]);
        }
        arguments.push("./");
        if let Some(expected) = ripgrep(&workspace, &arguments) {
            let request = GrepRequest {
                pattern: pattern.into(),
                include: include.map(str::to_owned),
                limit: Some(10_000),
                ..GrepRequest::default()
            };
            let answer = workspace.request(&request).unwrap();
            prop_assert_eq!(workspace.lines(&answer), expected);
        }
    }
}
