//! Confined glob and grep give the same answers as unconfined ones, and nothing from outside while a process swaps
//! directories with links.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use emergent_guest_tools::{Context, glob, grep, read};
use emergent_wire::ErrorCode;
use emergent_wire::tools::{GlobAnswer, GlobRequest, GrepAnswer, GrepRequest, ReadRequest};
use proptest::prelude::*;
use rustix::fs::{CWD, FileType, Mode, RenameFlags, mknodat, renameat_with};
use support::{NEVER, config};

struct Workspace {
    _directory: tempfile::TempDir,
    /// The directory around the workspace.
    outside: PathBuf,
    path: PathBuf,
}

impl Workspace {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let outside = directory.path().canonicalize().unwrap();
        let path = outside.join("inside");
        fs::create_dir(&path).unwrap();
        Self { _directory: directory, outside, path }
    }

    fn file(&self, name: &str, content: impl AsRef<[u8]>) -> &Self {
        write_file(&self.path.join(name), content.as_ref());
        self
    }

    fn open(&self) -> Context {
        Context::new(&self.path)
    }

    fn confined(&self) -> Context {
        Context::confined(&self.path, vec![self.path.clone()])
    }

    /// Checks that confined and unconfined searches give the same answers, and gives those of glob.
    fn compare(&self, pattern: &str, path: Option<&str>) -> Vec<String> {
        let (open, confined) = (self.open(), self.confined());
        let found = find(&open, pattern, path);
        assert_eq!(find(&confined, pattern, path), found, "glob {pattern} in {path:?}");
        for include in [None, Some(pattern)] {
            let expected = search(&open, "x", include, path);
            assert_eq!(search(&confined, "x", include, path), expected, "grep {include:?} in {path:?}");
        }
        let prefix = format!("{}/", self.path.display());
        let names = found.map(|answer| answer.matches).unwrap_or_default();
        names.iter().map(|name| name.strip_prefix(&prefix).unwrap().to_owned()).collect()
    }
}

fn write_file(path: &Path, content: &[u8]) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, content).unwrap();
}

fn find(context: &Context, pattern: &str, path: Option<&str>) -> Result<GlobAnswer, ErrorCode> {
    let request = GlobRequest { pattern: pattern.into(), path: path.map(str::to_owned), limit: Some(10_000) };
    glob::glob(context, &request, &NEVER).map_err(|error| error.code)
}

fn search(
    context: &Context,
    pattern: &str,
    include: Option<&str>,
    path: Option<&str>,
) -> Result<GrepAnswer, ErrorCode> {
    let request = GrepRequest {
        pattern: pattern.into(),
        include: include.map(str::to_owned),
        path: path.map(str::to_owned),
        limit: Some(10_000),
        ..GrepRequest::default()
    };
    grep::grep(context, &request, &NEVER).map_err(|error| error.code)
}

#[test]
fn ignore_rules_hidden_files_and_links_are_treated_alike() {
    let workspace = Workspace::new();
    workspace
        .file(".gitignore", "\u{feff}*.log\r\n/build/\r\n!keep.log\n# comment\n\\#literal\ntrailing\\ \n[z\n")
        .file(".ignore", "!build/\n*.tmp\n")
        .file(".rgignore", "*.secret\n")
        .file(".git/info/exclude", "excluded\n*.log2\n")
        .file(".git/config", "x")
        .file("a.log", "x")
        .file("keep.log", "x")
        .file("build/out", "x")
        .file("#literal", "x")
        .file(".hidden/.env", "x")
        .file("excluded", "x")
        .file("sub/excluded", "x")
        .file("sub/.gitignore", "!a.log\n/only_here\nnested/**\n!nested/keep\n**/deep/*.txt\n")
        .file("sub/a.log", "x")
        .file("sub/only_here", "x")
        .file("sub/other/only_here", "x")
        .file("sub/nested/gone", "x")
        .file("sub/nested/keep", "x")
        .file("sub/one/deep/a.txt", "x")
        .file("sub/one/deep/a.rs", "x")
        .file("sub/.ignore", "!a.tmp\n")
        .file("sub/a.tmp", "x")
        .file("sub/.rgignore", "!a.secret\n*.rs\n")
        .file("sub/a.secret", "x")
        .file("a.secret", "x")
        .file("repository/.git/info/exclude", "private\n")
        .file("repository/private", "x")
        .file("repository/.gitignore", b"{a,b\nbytes\n\xFF\nafter\n")
        .file("repository/bytes", "x")
        .file("repository/after", "x")
        .file(".emergent/output/1", "x")
        .file("sub/.emergent/1", "x")
        .file("sub/.emergent-0123456789abcdef.tmp", "x")
        .file("binary", b"x\0x");
    symlink("keep.log", workspace.path.join("to_file")).unwrap();
    symlink("sub", workspace.path.join("to_directory")).unwrap();
    symlink("nowhere", workspace.path.join("to_nothing")).unwrap();
    symlink(workspace.path.join("sub/a.tmp"), workspace.path.join("sub/absolute")).unwrap();
    mknodat(CWD, workspace.path.join("fifo"), FileType::Fifo, Mode::from_raw_mode(0o600), 0).unwrap();

    let all = workspace.compare("**", None);
    for name in ["keep.log", "build/out", ".hidden/.env", "sub/a.log", "sub/a.secret", "to_file"] {
        assert!(all.iter().any(|found| found == name), "{name}: {all:?}");
    }
    for name in ["a.log", "excluded", "sub/only_here", ".git/config", "a.secret", ".emergent/output/1"] {
        assert!(!all.iter().any(|found| found == name), "{name}: {all:?}");
    }
    for pattern in ["*", "**/*.log", "sub/*", "sub/*/*", "{sub,build}/**", "!*.log", "*.rs"] {
        workspace.compare(pattern, None);
    }
    for path in ["sub", "sub/one/deep", "build", ".git", "repository", "missing"] {
        workspace.compare("**", Some(path));
    }
}

#[test]
fn the_exclude_file_of_a_worktree_is_found() {
    let workspace = Workspace::new();
    let main = workspace.path.join("main/.git");
    workspace
        .file("main/.git/info/exclude", "private\n")
        .file("main/.git/worktrees/w/commondir", "../..\n")
        .file("tree/.git", format!("gitdir: {}\n", main.join("worktrees/w").display()))
        .file("tree/private", "x")
        .file("tree/public", "x");
    assert_eq!(workspace.compare("tree/p*", None), ["tree/public"]);
}

#[test]
fn ignore_files_that_are_links_are_followed_only_inside() {
    let workspace = Workspace::new();
    write_file(&workspace.outside.join("rules"), b"*.out\n");
    workspace
        .file("rules", "*.in\n")
        .file("a/x.in", "x")
        .file("a/x.out", "x")
        .file("b/x.in", "x")
        .file("b/x.out", "x");
    symlink("../rules", workspace.path.join("a/.gitignore")).unwrap();
    workspace.compare("a/*", None);
    symlink(workspace.outside.join("rules"), workspace.path.join("b/.gitignore")).unwrap();
    write_file(&workspace.outside.join(".gitignore"), b"x.in\n");
    let found = find(&workspace.confined(), "b/x*", None).unwrap();
    assert_eq!(found.count, 2, "{found:?}");
}

#[test]
fn hostile_ignore_files_neither_block_nor_crash() {
    let workspace = Workspace::new();
    let nested = format!("{}a{}\nignored\n", "{".repeat(50_000), "}".repeat(50_000));
    workspace.file("a/.gitignore", &nested).file("a/ignored", "x").file("a/kept", "x").file("b/kept", "x");
    workspace.file("c/.gitignore", "pattern\n".repeat(1_000_000)).file("c/kept", "x");
    mknodat(CWD, workspace.path.join("b/.gitignore"), FileType::Fifo, Mode::from_raw_mode(0o600), 0).unwrap();
    symlink("/dev/zero", workspace.path.join("b/.ignore")).unwrap();
    let found = find(&workspace.confined(), "{kept,ignored}", None).unwrap();
    let mut names: Vec<&str> = found.matches.iter().map(|path| &path[path.len() - 6..]).collect();
    names.sort_unstable();
    assert_eq!(names, ["a/kept", "b/kept", "c/kept"]);
}

#[test]
fn wide_and_deep_trees_give_the_same_answers() {
    let workspace = Workspace::new();
    for number in 0..1000 {
        workspace.file(&format!("wide/f{number}"), if number % 3 == 0 { "x" } else { "y" });
    }
    // Longer than a path may be at its end: made step by step.
    let mut directory = fs::File::open(&workspace.path).unwrap();
    for level in 0..360 {
        let name = format!("directory{:02}", level % 100);
        for name in [name.as_str(), "sibling"] {
            rustix::fs::mkdirat(&directory, name, Mode::from_raw_mode(0o755)).unwrap();
            let file = rustix::fs::openat(
                &directory,
                format!("{name}/file").as_str(),
                rustix::fs::OFlags::CREATE | rustix::fs::OFlags::WRONLY,
                Mode::from_raw_mode(0o644),
            );
            rustix::io::write(file.unwrap(), b"x").unwrap();
        }
        let flags = rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::DIRECTORY;
        directory = rustix::fs::openat(&directory, name.as_str(), flags, Mode::empty()).unwrap().into();
    }
    let found = workspace.compare("**", None);
    assert!(found.len() > 1500, "{}", found.len());
    workspace.compare("f1*", Some("wide"));
}

#[test]
fn limits_hold_and_a_confined_search_can_be_cancelled() {
    let workspace = Workspace::new();
    for number in 0..300 {
        workspace.file(&format!("d{}/f{number}", number % 7), "x\n".repeat(number % 4));
    }
    for limit in [1, 10, 100, 449] {
        let request = GrepRequest { pattern: "x".into(), limit: Some(limit), ..GrepRequest::default() };
        let expected = grep::grep(&workspace.open(), &request, &NEVER).unwrap();
        assert_eq!(grep::grep(&workspace.confined(), &request, &NEVER).unwrap(), expected);
        let request = GlobRequest { pattern: "f*".into(), limit: Some(limit), ..GlobRequest::default() };
        let expected = glob::glob(&workspace.open(), &request, &NEVER).unwrap();
        assert_eq!(glob::glob(&workspace.confined(), &request, &NEVER).unwrap(), expected);
    }
    let request = GrepRequest { pattern: "x".into(), ..GrepRequest::default() };
    let cancelled = grep::grep(&workspace.confined(), &request, &AtomicBool::new(true));
    assert_eq!(cancelled.unwrap_err().code, ErrorCode::Cancelled);
}

/// Swaps two entries: at once where the kernel can (gVisor can't), else one after the other.
fn swap(one: &Path, other: &Path) {
    if renameat_with(CWD, one, CWD, other, RenameFlags::EXCHANGE).is_err() {
        let aside = one.with_extension("aside");
        fs::rename(one, &aside).unwrap();
        fs::rename(other, one).unwrap();
        fs::rename(aside, other).unwrap();
    }
}

/// Ends the swapping thread, also when an assertion fails.
struct StopOnDrop<'a>(&'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn swapped_links_never_lead_a_confined_tool_outside() {
    const PAIRS: usize = 4;
    const SEARCHES: usize = 300;
    let workspace = Workspace::new();
    write_file(&workspace.outside.join("tree/sub/leaked"), b"needle outside\n");
    write_file(&workspace.outside.join("tree/leaked"), b"needle outside\n");
    for pair in 0..PAIRS {
        workspace
            .file(&format!("d{pair}/sub/plain"), "needle inside\n")
            .file(&format!("d{pair}/plain"), "needle inside\n");
        workspace.file(&format!("f{pair}"), "needle inside\n");
        symlink(workspace.outside.join("tree"), workspace.path.join(format!("to_d{pair}"))).unwrap();
        symlink(workspace.outside.join("tree/leaked"), workspace.path.join(format!("to_f{pair}"))).unwrap();
    }
    let context = workspace.confined();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _guard = StopOnDrop(&stop);
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                for pair in 0..PAIRS {
                    for name in ["d", "f"] {
                        let at = workspace.path.join(format!("{name}{pair}"));
                        let link = workspace.path.join(format!("to_{name}{pair}"));
                        swap(&at, &link);
                    }
                }
            }
        });
        for number in 0..SEARCHES {
            let path = (number % 3 == 0).then_some("d0");
            if let Ok(answer) = search(&context, "needle", None, path) {
                for found in answer.matches {
                    assert_eq!(found.line, "needle inside", "search {number}: {}", found.file_path);
                }
            }
            if let Ok(answer) = find(&context, "**/{leaked,plain}", path) {
                let leaked = answer.matches.iter().find(|path| path.ends_with("leaked"));
                assert_eq!(leaked, None, "search {number}");
            }
            for path in ["d0/leaked", "d1/sub/leaked", "f0", "to_f0"] {
                let request = ReadRequest { file_path: path.into(), ..ReadRequest::default() };
                if let Ok(answer) = read::read(&context, &request, &NEVER) {
                    assert_eq!(answer.content, "1: needle inside", "{path}");
                }
            }
        }
    });
}

proptest! {
    #![proptest_config(config(60))]

    #[test]
    fn any_tree_with_any_rules_gives_the_same_answers(
        files in prop::collection::btree_set("([ab.]{0,1}[abc]/){0,3}[ab.]{0,1}[abc](\\.rs|\\.log)?", 1..40),
        rules in prop::collection::vec(
            (
                "([ab]/){0,2}",
                prop::sample::select(vec![".gitignore", ".ignore", ".rgignore", ".git/info/exclude"]),
                prop::collection::vec("!?/?(\\*\\*/)?[ab.]{0,1}[abc*?](/[abc*])?(\\.rs|\\.log|\\*)?(/|/\\*\\*)?( |\\\\ )?", 1..6),
            ),
            0..8,
        ),
        links in prop::collection::vec(("([abc]/){0,2}", "l[abc]", "(\\.\\./){0,1}([abc]/){0,2}[abc]"), 0..4),
        pattern in prop::sample::select(vec!["**", "*.rs", "a/**", "*/*", "{a,b}/*", "!*.log"]),
        path in prop::sample::select(vec![None, Some("a"), Some("a/b"), Some("b")]),
    ) {
        let workspace = Workspace::new();
        // A name may be a file in one path and a directory in another: what can't be made is left out.
        let make = |name: &str, content: &str| {
            let path = workspace.path.join(name);
            let _ = fs::create_dir_all(path.parent().unwrap());
            let _ = fs::write(path, content);
        };
        for name in &files {
            make(name, "x\n");
        }
        for (directory, name, lines) in &rules {
            make(&format!("{directory}{name}"), &lines.join("\n"));
        }
        for (directory, name, target) in &links {
            // Links that lead out are treated differently on purpose.
            if !directory.is_empty() || !target.starts_with("..") {
                let _ = symlink(target, workspace.path.join(directory).join(name));
            }
        }
        workspace.compare(pattern, path);
    }
}
