//! glob: the files that are found, and their order.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use std::fs::File;
use std::os::unix::fs::symlink;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, SystemTime};

use emergent_guest_tools::{Context, glob};
use emergent_wire::tools::{GlobAnswer, GlobRequest};
use emergent_wire::{ErrorCode, ErrorDetail};
use support::{NEVER, Workspace};

impl Workspace {
    /// Files in the order of their age, the oldest first; a name after ` < ` holds what follows.
    fn new(files: &[&str]) -> Self {
        let workspace = Self::empty();
        for (age, file) in files.iter().enumerate() {
            let (name, content) = file.split_once(" < ").unwrap_or((file, ""));
            workspace.file(name, content);
            let time = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000 + age as u64);
            File::options().append(true).open(workspace.path.join(name)).unwrap().set_modified(time).unwrap();
        }
        workspace
    }

    fn request(
        &self,
        pattern: &str,
        path: Option<&str>,
        limit: Option<u32>,
    ) -> Result<GlobAnswer, ErrorDetail> {
        let request = GlobRequest { pattern: pattern.into(), path: path.map(str::to_owned), limit };
        glob::glob(&self.context, &request, &NEVER)
    }

    /// The names found, relative to the workspace.
    fn find(&self, pattern: &str) -> Vec<String> {
        self.names(&self.request(pattern, None, None).unwrap())
    }

    fn names(&self, answer: &GlobAnswer) -> Vec<String> {
        assert_eq!(answer.count, answer.matches.len() as u64);
        let prefix = format!("{}/", self.path.display());
        answer.matches.iter().map(|path| path.strip_prefix(&prefix).unwrap().to_owned()).collect()
    }
}

#[test]
fn patterns_find_their_files_newest_first() {
    let workspace =
        Workspace::new(&["a.ts", "src/b.ts", "src/deep/c.ts", "src/d.rs", "src/a/x.rs", "src/b/y.rs"]);
    assert_eq!(workspace.find("**/*.ts"), ["src/deep/c.ts", "src/b.ts", "a.ts"]);
    assert_eq!(workspace.find("*.ts"), ["src/deep/c.ts", "src/b.ts", "a.ts"]);
    assert_eq!(workspace.find("src/*.ts"), ["src/b.ts"]);
    assert_eq!(workspace.find("src/**/*.ts"), ["src/deep/c.ts", "src/b.ts"]);
    assert_eq!(workspace.find("src/{a,b}/*.rs"), ["src/b/y.rs", "src/a/x.rs"]);
    assert_eq!(workspace.find("src/{a/x,d}.rs"), ["src/a/x.rs", "src/d.rs"]);
    assert_eq!(workspace.find("./a.ts"), ["a.ts"]);
    assert_eq!(workspace.find("src/d.rs"), ["src/d.rs"]);
    assert_eq!(workspace.find("src/deep/"), ["src/deep/c.ts"]);
    assert_eq!(workspace.find("nothing/*.ts"), Vec::<String>::new());
    assert_eq!(workspace.find("?.ts").len(), 3);
    assert_eq!(workspace.find("**").len(), 6);
    assert_eq!(workspace.find("!*.rs").len(), 3);
}

#[test]
fn patterns_may_be_absolute_and_roots_may_be_given() {
    let workspace = Workspace::new(&["a.ts", "src/b.ts", "other/c.ts"]);
    let base = workspace.path.display().to_string();
    let find =
        |pattern: &str, path: Option<&str>| workspace.names(&workspace.request(pattern, path, None).unwrap());
    assert_eq!(find("*.ts", Some("src")), ["src/b.ts"]);
    assert_eq!(find("*.ts", Some("src/../other")), ["other/c.ts"]);
    assert_eq!(find("../other/*.ts", Some("src")), ["other/c.ts"]);
    assert_eq!(find(&format!("{base}/**/*.ts"), None), ["other/c.ts", "src/b.ts", "a.ts"]);
    assert_eq!(find(&format!("{base}/*.ts"), None), ["a.ts"]);
    assert_eq!(find(&format!("{base}/src/*.ts"), Some(&base)), ["src/b.ts"]);
    assert_eq!(find(&format!("{base}/*.ts"), Some(&base)), ["a.ts"]);
    let code = |pattern: &str, path: Option<&str>| workspace.request(pattern, path, None).unwrap_err().code;
    assert_eq!(code("/etc/*.conf", Some("src")), ErrorCode::InvalidPattern);
    assert_eq!(code("*/../*.ts", None), ErrorCode::InvalidPattern);
    assert_eq!(code("[a", None), ErrorCode::InvalidPattern);
    assert_eq!(code("*", Some("missing")), ErrorCode::FileNotFound);
    assert_eq!(code("*", Some("a.ts")), ErrorCode::WrongFileType);
    assert_eq!(code("/missing/*.ts", None), ErrorCode::FileNotFound);
}

#[test]
fn ignored_files_are_excluded_and_hidden_files_are_found() {
    let workspace = Workspace::new(&[
        ".gitignore < *.log\n/build/\n",
        "a.log",
        "keep",
        ".env",
        "build/out",
        ".git/config",
        "sub/.git < gitdir: x",
        "sub/.gitignore < !a.log\nsecret\n",
        "sub/a.log",
        "sub/secret",
        "sub/.emergent-0123456789abcdef.tmp",
        ".emergent/output/x",
        "sub/.emergent/y",
    ]);
    let mut found = workspace.find("**");
    found.sort();
    assert_eq!(found, [".env", ".gitignore", "keep", "sub/.emergent/y", "sub/.gitignore", "sub/a.log"]);
    // What is named is searched; the rules of the directories above hold.
    assert_eq!(workspace.find(".emergent/output/*"), [".emergent/output/x"]);
    assert_eq!(workspace.find("build/*"), ["build/out"]);
    let answer = workspace.request("*.log", Some("sub"), None).unwrap();
    assert_eq!(workspace.names(&answer), ["sub/a.log"]);
}

#[test]
fn only_the_newest_are_given_when_there_are_many() {
    let names: Vec<String> = (0..50).map(|n| format!("f{n:02}")).collect();
    let workspace = Workspace::new(&names.iter().map(String::as_str).collect::<Vec<_>>());
    let answer = workspace.request("f*", None, Some(3)).unwrap();
    assert!(answer.truncated);
    assert_eq!(workspace.names(&answer), ["f49", "f48", "f47"]);
    assert!(!workspace.request("f*", None, Some(50)).unwrap().truncated);
    // The same age: by path.
    let time = SystemTime::UNIX_EPOCH + Duration::from_secs(5);
    for name in &names {
        File::options().append(true).open(workspace.path.join(name)).unwrap().set_modified(time).unwrap();
    }
    let answer = workspace.request("f*", None, Some(2)).unwrap();
    assert_eq!(workspace.names(&answer), ["f00", "f01"]);
}

#[test]
fn links_to_files_are_listed_and_not_entered() {
    let workspace = Workspace::new(&["dir/file"]);
    symlink("dir/file", workspace.path.join("to_file")).unwrap();
    symlink("dir", workspace.path.join("to_dir")).unwrap();
    symlink("none", workspace.path.join("to_none")).unwrap();
    assert_eq!(workspace.find("**"), ["dir/file", "to_file"]);
    // As a root a link is entered.
    let answer = workspace.request("*", Some("to_dir"), None).unwrap();
    assert_eq!(workspace.names(&answer), ["to_dir/file"]);
    assert_eq!(workspace.find("to_dir/*"), ["to_dir/file"]);
}

#[test]
fn a_glob_stays_confined_and_can_be_cancelled() {
    let workspace = Workspace::new(&["in/a", "out/b"]);
    let inside = workspace.path.join("in");
    symlink("../out/b", inside.join("leak")).unwrap();
    symlink("../out", inside.join("leak_dir")).unwrap();
    let context = Context::confined(&inside, vec![inside.clone()]);
    let find = |pattern: &str, cancel: bool| {
        let request = GlobRequest { pattern: pattern.into(), ..GlobRequest::default() };
        glob::glob(&context, &request, &AtomicBool::new(cancel))
    };
    assert_eq!(find("**", false).unwrap().matches, [inside.join("a").display().to_string()]);
    for pattern in ["../out/*", "leak_dir/*", "/etc/*"] {
        assert_eq!(find(pattern, false).unwrap_err().code, ErrorCode::Forbidden, "{pattern}");
    }
    assert_eq!(find("**", true).unwrap_err().code, ErrorCode::Cancelled);
}
