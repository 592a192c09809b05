//! Globs as ripgrep's `--glob` has them.
//!
//! A glob without `/` matches a file's name at any depth; one with `/` matches the path from the search's root.
//! `*` and `?` don't cross `/`, `**` does. `!` in front means all files that don't match.
//!
//! Length and brace nesting are checked before the glob library sees a pattern: the library recurses once for each
//! level of braces. The compiled size is limited by the library, which reports it as an error through `GlobSet`
//! (a single `GlobMatcher` would panic).

use std::path::Path;

use emergent_wire::{ErrorCode, ErrorDetail};
use globset::{GlobBuilder, GlobSet, GlobSetBuilder};

/// The longest glob, in bytes. No path is longer.
const MAX_GLOB_BYTES: usize = 4096;
/// The deepest nesting of braces.
const MAX_BRACE_DEPTH: usize = 10;
/// The part of a refused glob that its error shows.
const SHOWN_CHARS: usize = 100;

/// A compiled glob.
#[derive(Debug)]
pub(crate) struct GlobPattern {
    matcher: GlobSet,
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
        check_limits(pattern)?;
        let relative = pattern.strip_prefix("./").unwrap_or(pattern).trim_start_matches('/');
        // A directory stands for all that is in it.
        let everything_in_it = relative.ends_with('/').then(|| format!("{relative}**"));
        let matcher = GlobBuilder::new(everything_in_it.as_deref().unwrap_or(relative))
            .literal_separator(true)
            .backslash_escape(true)
            .build()
            .and_then(|glob| GlobSetBuilder::new().add(glob).build())
            .map_err(|error| {
                let reason: String = error.kind().to_string().chars().take(SHOWN_CHARS).collect();
                invalid(pattern, &format!("{reason}; `\\` in front makes a character literal"))
            })?;
        Ok(Self { matcher, is_for_names, is_negated })
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

/// Whether a line of an ignore file can be given to the glob library.
pub(crate) fn is_within_limits(line: &str) -> bool {
    line.len() <= MAX_GLOB_BYTES && brace_depth(line) <= MAX_BRACE_DEPTH
}

fn check_limits(pattern: &str) -> Result<(), ErrorDetail> {
    if pattern.len() > MAX_GLOB_BYTES {
        let reason = format!("it has {} bytes, at most {MAX_GLOB_BYTES} are allowed", pattern.len());
        return Err(invalid(pattern, &reason));
    }
    if brace_depth(pattern) > MAX_BRACE_DEPTH {
        let reason = format!("braces can be nested {MAX_BRACE_DEPTH} deep at most; use several globs");
        return Err(invalid(pattern, &reason));
    }
    Ok(())
}

fn invalid(pattern: &str, reason: &str) -> ErrorDetail {
    let mut shown: String = pattern.chars().take(SHOWN_CHARS).collect();
    if shown.len() < pattern.len() {
        shown.push('…');
    }
    ErrorDetail::new(ErrorCode::InvalidPattern, format!("'{shown}' is not a valid glob: {reason}"))
}

/// The depth of nested braces; escaped braces and braces in a class (`[{]`) are literal.
fn brace_depth(pattern: &str) -> usize {
    let mut depth = 0_usize;
    let mut deepest = 0;
    let mut bytes = pattern.bytes().peekable();
    while let Some(byte) = bytes.next() {
        match byte {
            b'\\' => {
                bytes.next();
            }
            b'{' => {
                depth += 1;
                deepest = deepest.max(depth);
            }
            b'}' => depth = depth.saturating_sub(1),
            b'[' => {
                bytes.next_if(|next| matches!(next, b'!' | b'^'));
                // A `]` that comes first is a member of the class.
                bytes.next();
                bytes.by_ref().find(|&next| next == b']');
            }
            _ => {}
        }
    }
    deepest
}

/// Splits off the literal directories at the beginning of a glob, which need no search: `src/a/*.rs` is `*.rs` in `src/a`.
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

    #[test]
    fn brace_depth_skips_literal_braces() {
        for (pattern, depth) in [
            ("a", 0),
            ("{a,b}{c,d}", 1),
            ("{a,{b,{c}}}", 3),
            ("\\{\\{", 0),
            ("[{{{]{a}", 1),
            ("[]{{]{", 1),
            ("[!]{{]{", 1),
            ("}}}{", 1),
        ] {
            assert_eq!(brace_depth(pattern), depth, "{pattern}");
        }
    }
}
