//! The ignore rules of a confined walk, the same as those of the unconfined one (see `walk`).
//!
//! Each directory with ignore files has a node that points to the node of the nearest directory above. For each kind
//! of file the rules of the deepest directory decide; of the kinds, `.rgignore` comes before `.ignore`, `.gitignore`
//! and `.git/info/exclude`.
//!
//! Ignore files are read through the descriptor of their directory. One that is a link, and the `info/exclude` of a
//! repository, are resolved by the confined resolution of paths. So no rule is read from outside the roots, and
//! directories above the roots have none.

use std::ffi::CStr;
use std::fs::File;
use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ignore::Match;
use ignore::gitignore::{Gitignore, GitignoreBuilder};
use rustix::fs::OFlags;
use rustix::io::Errno;

use super::{READ, open_at, regular};
use crate::Context;
use crate::glob_pattern::is_within_limits;

/// The part of an ignore file that is read.
const MAX_RULES_BYTES: usize = 1 << 20;
/// Ignore files by precedence.
const FILES: [&CStr; 3] = [c".rgignore", c".ignore", c".gitignore"];
const REPOSITORY: &CStr = c".git";

/// The rules of a directory and of those above it.
pub(super) struct Rules {
    parent: Option<Arc<Rules>>,
    /// In the order of precedence: those of `FILES`, then those of the repository.
    matchers: [Gitignore; FILES.len() + 1],
}

/// The ignore files that a directory may have.
#[derive(Clone, Copy)]
pub(super) struct Sources {
    files: [bool; FILES.len()],
    has_repository: bool,
}

impl Sources {
    pub(super) const NONE: Self = Self { files: [false; FILES.len()], has_repository: false };
    const ALL: Self = Self { files: [true; FILES.len()], has_repository: true };

    /// Notes an entry of the directory.
    pub(super) fn note(&mut self, name: &CStr) {
        for (is_there, file) in self.files.iter_mut().zip(FILES) {
            *is_there |= name == file;
        }
        self.has_repository |= name == REPOSITORY;
    }
}

impl Rules {
    /// The rules of the directories above `root`, as far as they are inside the roots of the context.
    pub(super) fn above(context: &Context, root: &Path) -> Arc<Self> {
        let mut rules =
            Arc::new(Self { parent: None, matchers: std::array::from_fn(|_| Gitignore::empty()) });
        let mut above: Vec<&Path> =
            root.ancestors().skip(1).take_while(|directory| context.permits(directory)).collect();
        let mut at: Option<File> = None;
        while let Some(path) = above.pop() {
            // The first is resolved, each next one is opened in the one before: a link is never followed.
            let opened = match (&at, path.file_name()) {
                (Some(directory), Some(name)) => open_at(directory.as_fd(), name, READ),
                _ => open_real(context, path, READ),
            };
            let Ok(directory) = opened else {
                break;
            };
            rules = rules.child(context, directory.as_fd(), path, Sources::ALL);
            at = Some(directory);
        }
        rules
    }

    /// The rules inside a directory.
    pub(super) fn child(
        self: &Arc<Self>,
        context: &Context,
        directory: BorrowedFd<'_>,
        path: &Path,
        sources: Sources,
    ) -> Arc<Self> {
        let mut matchers = std::array::from_fn(|_| Gitignore::empty());
        for (index, name) in FILES.into_iter().enumerate() {
            if sources.files[index]
                && let Some(content) = ignore_file(context, directory, path, name)
            {
                matchers[index] = matcher(path, &content);
            }
        }
        if sources.has_repository
            && let Some(content) = repository_exclude(context, path)
        {
            matchers[FILES.len()] = matcher(path, &content);
        }
        if matchers.iter().all(Gitignore::is_empty) {
            return Arc::clone(self);
        }
        Arc::new(Self { parent: Some(Arc::clone(self)), matchers })
    }

    /// Whether an entry of the directory is ignored.
    pub(super) fn ignores(&self, path: &Path, is_directory: bool) -> bool {
        let mut decided = [None; FILES.len() + 1];
        let mut node = Some(self);
        while let Some(rules) = node {
            for (decision, matcher) in decided.iter_mut().zip(&rules.matchers) {
                if decision.is_none() {
                    *decision = match matcher.matched(path, is_directory) {
                        Match::None => None,
                        Match::Ignore(_) => Some(true),
                        Match::Whitelist(_) => Some(false),
                    };
                }
            }
            if decided[0].is_some() {
                break;
            }
            node = rules.parent.as_deref();
        }
        decided.into_iter().flatten().next().unwrap_or(false)
    }
}

/// The matcher of an ignore file. A line that is no valid glob is left out, and so is all that follows a line that is
/// not UTF-8, as in the unconfined walk.
fn matcher(directory: &Path, content: &[u8]) -> Gitignore {
    let mut builder = GitignoreBuilder::new(directory);
    let content = content.strip_prefix(b"\xEF\xBB\xBF").unwrap_or(content);
    for line in content.split(|&byte| byte == b'\n') {
        let Ok(line) = str::from_utf8(line.strip_suffix(b"\r").unwrap_or(line)) else {
            break;
        };
        if is_within_limits(line) {
            let _ = builder.add_line(None, line);
        }
    }
    builder.build().unwrap_or_else(|_| Gitignore::empty())
}

/// The content of an ignore file; none when there is none, or none that may be read.
fn ignore_file(context: &Context, directory: BorrowedFd<'_>, path: &Path, name: &CStr) -> Option<Vec<u8>> {
    let file = match open_at(directory, name, READ) {
        Err(Errno::LOOP) => open_real(context, &path.join(name.to_str().ok()?), READ),
        other => other,
    };
    read_rules(file.ok()?)
}

/// The content of `info/exclude` of the repository that `directory` is the top of. A `.git` that is a file names the
/// directory of a worktree, whose file `commondir` names the repository.
fn repository_exclude(context: &Context, directory: &Path) -> Option<Vec<u8>> {
    let git = directory.join(".git");
    let repository = match open_real(context, &git, READ).and_then(regular) {
        Ok(Some(file)) => {
            let worktree = PathBuf::from(first_line(file)?.strip_prefix("gitdir: ")?);
            let common = first_line(open_real(context, &worktree.join("commondir"), READ).ok()?)?;
            if common.starts_with('.') { worktree.join(common) } else { PathBuf::from(common) }
        }
        _ => git,
    };
    read_rules(open_real(context, &repository.join("info/exclude"), READ).ok()?)
}

fn first_line(file: File) -> Option<String> {
    let content = read_rules(file)?;
    let line = content.split(|&byte| byte == b'\n').next()?;
    String::from_utf8(line.strip_suffix(b"\r").unwrap_or(line).to_vec()).ok()
}

/// Opens an absolute path by the confined resolution of paths.
fn open_real(context: &Context, path: &Path, flags: OFlags) -> Result<File, Errno> {
    if !path.is_absolute() {
        return Err(Errno::NOENT);
    }
    let location = context.locate(&context.absolute(path)).map_err(|_| Errno::ACCESS)?;
    location.open_with(flags)
}

/// Reads a regular file, whole lines up to a limit.
fn read_rules(file: File) -> Option<Vec<u8>> {
    let file = regular(file).ok()??;
    let mut content = Vec::new();
    file.take(MAX_RULES_BYTES as u64 + 1).read_to_end(&mut content).ok()?;
    if content.len() > MAX_RULES_BYTES {
        content.truncate(memchr::memrchr(b'\n', &content[..MAX_RULES_BYTES]).unwrap_or(0));
    }
    Some(content)
}
