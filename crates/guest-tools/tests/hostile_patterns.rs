//! Patterns that are made to exhaust the pattern compilers: each one is refused or answered, and none ends the process.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use emergent_guest_tools::{glob, grep};
use emergent_wire::tools::{GlobRequest, GrepRequest};
use emergent_wire::{ErrorCode, ErrorDetail};
use support::{NEVER, Workspace};

impl Workspace {
    fn new() -> Self {
        let workspace = Self::empty();
        workspace.file(&format!("{}/{}", vec!["d"; 200].join("/"), "a".repeat(200)), "a".repeat(10_000));
        workspace.file("a", "a\n");
        workspace
    }

    fn glob(&self, pattern: &str) -> Result<usize, ErrorDetail> {
        let request = GlobRequest { pattern: pattern.into(), ..GlobRequest::default() };
        glob::glob(&self.context, &request, &NEVER).map(|answer| answer.matches.len())
    }

    fn include(&self, include: &str) -> Result<usize, ErrorDetail> {
        let request =
            GrepRequest { pattern: "a".into(), include: Some(include.into()), ..GrepRequest::default() };
        grep::grep(&self.context, &request, &NEVER).map(|answer| answer.matches.len())
    }

    fn grep(&self, pattern: &str) -> Result<usize, ErrorDetail> {
        let request = GrepRequest { pattern: pattern.into(), ..GrepRequest::default() };
        grep::grep(&self.context, &request, &NEVER).map(|answer| answer.matches.len())
    }
}

fn nested(depth: usize) -> String {
    format!("{}a{}", "{".repeat(depth), "}".repeat(depth))
}

#[test]
fn braces_nested_deeper_than_the_limit_are_refused_and_the_error_names_the_limit() {
    let workspace = Workspace::new();
    for depth in [300, 11, 249, 2000] {
        let pattern = nested(depth);
        for result in [
            workspace.glob(&pattern),
            workspace.glob(&format!("d/{pattern}")),
            workspace.glob(&format!("!{pattern}")),
            workspace.include(&pattern),
        ] {
            let error = result.unwrap_err();
            assert_eq!(error.code, ErrorCode::InvalidPattern, "{depth}");
            assert!(error.message.contains("10"), "{}", error.message);
            assert!(error.message.len() < 1000, "{}", error.message.len());
        }
    }
    assert_eq!(workspace.glob(&nested(10)).unwrap(), 1);
    // Braces that are literal don't nest.
    assert_eq!(workspace.glob(&"\\{".repeat(100)).unwrap(), 0);
    assert_eq!(workspace.glob(&"[{]".repeat(100)).unwrap(), 0);
    assert_eq!(workspace.glob(&"{a,b}".repeat(100)).unwrap(), 0);
}

#[test]
fn long_globs_are_refused_and_the_error_names_the_limit() {
    let workspace = Workspace::new();
    for unit in ["a", "?", "*a", "**/", "[a-z]", "{a,b}", "[^é]", "{"] {
        let pattern = unit.repeat(60_000 / unit.len());
        for result in [workspace.glob(&pattern), workspace.include(&pattern)] {
            let error = result.unwrap_err();
            assert_eq!(error.code, ErrorCode::InvalidPattern, "{unit}");
            assert!(error.message.contains("4096"), "{}", error.message);
            assert!(error.message.len() < 1000, "{}", error.message.len());
        }
    }
}

#[test]
fn globs_within_the_limits_are_answered_or_refused() {
    let workspace = Workspace::new();
    let alternatives: Vec<String> = (0..600).map(|number| format!("x{number}")).collect();
    let mut globs = vec![format!("{{{}}}", alternatives.join(",")), format!("{}x", "**/".repeat(500))];
    for unit in ["?", "*a", "*", "**/*/", "[a-z]", "[!é]", "{a,b}", "{a*,*b}", "{,{a,b}*}", "[^/]", "{*,?}/"]
    {
        globs.push(unit.repeat(4000 / unit.len()));
    }
    for pattern in globs {
        for result in [workspace.glob(&pattern), workspace.include(&pattern)] {
            if let Err(error) = result {
                assert_eq!(error.code, ErrorCode::InvalidPattern, "{pattern}: {}", error.message);
                assert!(error.message.len() < 1000, "{}", error.message.len());
            }
        }
    }
}

#[test]
fn regular_expressions_are_answered_or_refused() {
    let workspace = Workspace::new();
    let words: Vec<String> = (0..8000).map(|number| format!("x{number}")).collect();
    let patterns = [
        format!("{}a{}", "(".repeat(10_000), ")".repeat(10_000)),
        format!("{}a{}", "(?:".repeat(240), ")".repeat(240)),
        "(".repeat(60_000),
        "[".repeat(60_000),
        format!("a{}", "*".repeat(60_000)),
        "(a{1000}){1000}".to_owned(),
        "(?:(?:(?:a?){100}){100}){100}".to_owned(),
        "(?:(?:(?:){1000}){1000}){1000}".to_owned(),
        "\\pL{100}".to_owned(),
        "\\pL".repeat(20_000),
        "(a*)*".repeat(10_000),
        "(.*)".repeat(10_000),
        format!("(?i){}", "ſk".repeat(20_000)),
        words.join("|"),
        format!("(?i){}", words.join("|")),
        format!("({})+$", words.join("|")),
    ];
    for pattern in patterns {
        let head: String = pattern.chars().take(30).collect();
        if let Err(error) = workspace.grep(&pattern) {
            assert_eq!(error.code, ErrorCode::InvalidPattern, "{head}: {}", error.message);
            assert!(error.message.len() < 3000, "{head}: {}", error.message.len());
        }
    }
}
