//! Globs as ripgrep's `--glob` has them.
//!
//! A glob without `/` matches a file's name at any depth; one with `/` matches the path from the search's root.
//! `*` and `?` don't cross `/`, `**` does. `!` in front means all files that don't match.

use std::path::Path;

use emergent_wire::{ErrorCode, ErrorDetail};
use globset::{GlobBuilder, GlobMatcher};

/// A compiled glob.
#[derive(Debug)]
pub(crate) struct GlobPattern {
    matcher: GlobMatcher,
    is_for_names: bool,
    is_negated: bool,
}

impl GlobPattern {
    /// Compiles a glob; `/` or `./` in front anchors it to the root.
    pub(crate) fn new(pattern: &str) -> Result<Self, ErrorDetail> {
        let (is_negated, pattern) = match pattern.strip_prefix('!') {
            Some(rest) => (true, rest),
            None => (false, pattern),
        };
        Self::compile(pattern, !pattern.contains('/'), is_negated)
    }

    /// Compiles a glob that matches the path from the root even if it has no `/`.
    pub(crate) fn anchored(pattern: &str) -> Result<Self, ErrorDetail> {
        Self::compile(pattern, false, false)
    }

    fn compile(pattern: &str, is_for_names: bool, is_negated: bool) -> Result<Self, ErrorDetail> {
        let relative = pattern.strip_prefix("./").unwrap_or(pattern).trim_start_matches('/');
        // A directory stands for all that is in it.
        let everything_in_it = relative.ends_with('/').then(|| format!("{relative}**"));
        let glob = GlobBuilder::new(everything_in_it.as_deref().unwrap_or(relative))
            .literal_separator(true)
            .backslash_escape(true)
            .build()
            .map_err(|error| {
                ErrorDetail::new(
                    ErrorCode::InvalidPattern,
                    format!(
                        "'{pattern}' is not a valid glob: {}; `\\` in front makes a character literal",
                        error.kind()
                    ),
                )
            })?;
        Ok(Self { matcher: glob.compile_matcher(), is_for_names, is_negated })
    }

    /// Whether a file matches, given its path from the root.
    pub(crate) fn is_match(&self, relative: &Path) -> bool {
        let subject = match relative.file_name() {
            Some(name) if self.is_for_names => Path::new(name),
            _ => relative,
        };
        self.matcher.is_match(subject) != self.is_negated
    }
}

/// Cuts off the directories that a glob begins with and that are no globs themselves: `src/a/*.rs` is `*.rs` in
/// `src/a`. They needn't be searched for.
pub(crate) fn split_directories(pattern: &str) -> (&str, &str) {
    let mut split = 0;
    for (at, _) in pattern.match_indices('/') {
        if pattern[split..at].contains(['*', '?', '[', '{', '\\', '}', ']']) {
            break;
        }
        split = at + 1;
    }
    pattern.split_at(split)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn globs_match_names_or_paths() {
        let is_match =
            |pattern: &str, path: &str| GlobPattern::new(pattern).unwrap().is_match(Path::new(path));
        assert!(is_match("*.ts", "a/b/c.ts"));
        assert!(is_match("**/*.ts", "c.ts"));
        assert!(is_match("**/*.ts", "a/b/c.ts"));
        assert!(is_match("src/{a,b}/*.rs", "src/b/x.rs"));
        assert!(!is_match("src/*.rs", "src/b/x.rs"));
        assert!(!is_match("/*.rs", "src/x.rs"));
        assert!(is_match("./*.rs", "x.rs"));
        assert!(is_match("src/", "src/b/x.rs"));
        assert!(is_match("!*.min.js", "a.js"));
        assert!(!is_match("!*.min.js", "a.min.js"));
        assert!(is_match("\\!a", "!a"));
        assert_eq!(GlobPattern::new("[a").unwrap_err().code, ErrorCode::InvalidPattern);
    }

    #[test]
    fn literal_directories_are_split_off() {
        assert_eq!(split_directories("src/a/*.rs"), ("src/a/", "*.rs"));
        assert_eq!(split_directories("**/x"), ("", "**/x"));
        assert_eq!(split_directories("a/{b/c,d}/e"), ("a/", "{b/c,d}/e"));
        assert_eq!(split_directories("/etc/hosts"), ("/etc/", "hosts"));
        assert_eq!(split_directories("../x/*"), ("../x/", "*"));
    }
}
