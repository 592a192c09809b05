//! Finds files by name, newest first.
//!
//! A pattern without `/` matches names at any depth, one with `/` the path from the root (see `glob_pattern`).
//! An absolute pattern needs no `path`, or one that it begins with. Directories that a pattern begins with are
//! entered directly, also when they are ignored. Only files are listed, and links to files; only the newest
//! `limit` are kept in memory.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use emergent_wire::tools::{DEFAULT_MATCHES, GlobAnswer, GlobRequest};
use emergent_wire::{ErrorCode, ErrorDetail, Validate as _};
use ignore::{DirEntry, WalkState};
use rustix::fs::{FileType, Stat};
use rustix::io::Errno;

use crate::Context;
use crate::confined_walk::{self, Entry, Visitor};
use crate::error::{check_cancel, wrong_type};
use crate::glob_pattern::{GlobPattern, split_directories};
use crate::walk::{self, Root, open_root};

/// Finds files.
pub fn glob(
    context: &Context,
    request: &GlobRequest,
    cancel: &AtomicBool,
) -> Result<GlobAnswer, ErrorDetail> {
    request.validate()?;
    check_cancel(cancel)?;
    let limit = request.limit.unwrap_or(DEFAULT_MATCHES) as usize;
    let Some((root, pattern, max_depth)) = plan(context, request)? else {
        return Ok(GlobAnswer::default());
    };
    let search = Search { context, root: &root.path, pattern, newest: Mutex::new(Newest::new(limit)) };
    if context.confined_to.is_some() {
        confined_walk::walk(context, &root, max_depth, cancel, || &search);
    } else {
        search.tree(max_depth, cancel);
    }
    check_cancel(cancel)?;
    Ok(search.newest.into_inner().unwrap_or_else(PoisonError::into_inner).answer())
}

struct Search<'a> {
    context: &'a Context,
    root: &'a Path,
    pattern: GlobPattern,
    newest: Mutex<Newest>,
}

impl Search<'_> {
    fn tree(&self, max_depth: Option<usize>, cancel: &AtomicBool) {
        walk::builder(self.context, self.root).max_depth(max_depth).build_parallel().run(|| {
            Box::new(|entry| {
                if cancel.load(Ordering::Relaxed) {
                    return WalkState::Quit;
                }
                // A directory that can't be read, or a file that is gone, is left out.
                if let Ok(entry) = entry
                    && is_candidate(&entry)
                    && self.is_match(entry.path())
                    && let Some(modified) = modified(self.context, &entry)
                {
                    self.add(modified, entry.into_path());
                }
                WalkState::Continue
            })
        });
    }

    fn is_match(&self, path: &Path) -> bool {
        path.strip_prefix(self.root).is_ok_and(|relative| self.pattern.is_match(relative))
    }

    fn add(&self, modified: (i64, i64), path: PathBuf) {
        self.newest.lock().unwrap_or_else(PoisonError::into_inner).add(modified, path);
    }
}

impl Visitor for &Search<'_> {
    fn enters(&mut self, _: &Path) -> bool {
        true
    }

    fn entry(&mut self, entry: &Entry<'_>) {
        if !matches!(entry.file_type, FileType::RegularFile | FileType::Symlink) || !self.is_match(entry.path)
        {
            return;
        }
        let modified = match entry.stat() {
            Ok(stat) if FileType::from_raw_mode(stat.st_mode).is_symlink() => {
                modified_target(self.context, entry.path)
            }
            Ok(stat) => modified_file(&stat),
            Err(_) => None,
        };
        if let Some(modified) = modified {
            self.add(modified, entry.path.to_owned());
        }
    }

    fn failure(&mut self, _: &Path, _: Errno) {}
}

/// The root of the walk, the pattern and the depth. `None` if the directory that the pattern names does not exist.
fn plan(
    context: &Context,
    request: &GlobRequest,
) -> Result<Option<(Root, GlobPattern, Option<usize>)>, ErrorDetail> {
    let base = request.path.as_deref();
    let pattern = request.pattern.as_str();
    if let Some((relative, is_anchored)) = relative_pattern(context, base, pattern)? {
        let root = open_directory(context, base.map_or(&context.workspace_dir, Path::new))?;
        if !is_anchored {
            return Ok(Some((root, GlobPattern::new(relative)?, None)));
        }
        let (directories, rest) = split_directories(relative);
        let (rest, depth) = anchored_rest(rest)?;
        if directories.is_empty() {
            return Ok(Some((root, rest, depth)));
        }
        return match open_directory(context, &root.path.join(directories)) {
            Ok(root) => Ok(Some((root, rest, depth))),
            Err(error) if matches!(error.code, ErrorCode::FileNotFound | ErrorCode::WrongFileType) => {
                Ok(None)
            }
            Err(error) => Err(error),
        };
    }
    let (directories, rest) = split_directories(pattern);
    let (rest, depth) = anchored_rest(rest)?;
    Ok(Some((open_directory(context, Path::new(directories))?, rest, depth)))
}

/// The pattern relative to the root, and whether it names paths rather than names; none for an absolute one when
/// no root was given.
fn relative_pattern<'a>(
    context: &Context,
    base: Option<&str>,
    pattern: &'a str,
) -> Result<Option<(&'a str, bool)>, ErrorDetail> {
    if let Some(relative) = pattern.strip_prefix("./") {
        return Ok(Some((relative, true)));
    }
    if !pattern.starts_with('/') {
        return Ok(Some((pattern, pattern.contains('/') && !pattern.starts_with('!'))));
    }
    let Some(base) = base else {
        return Ok(None);
    };
    let shown = context.absolute(Path::new(base)).shown;
    let inside = shown
        .to_str()
        .and_then(|base| pattern.strip_prefix(base.trim_end_matches('/')))
        .and_then(|rest| rest.strip_prefix('/'));
    match inside {
        Some(rest) => Ok(Some((rest, true))),
        None => Err(ErrorDetail::new(
            ErrorCode::InvalidPattern,
            format!(
                "the pattern {pattern} is absolute but not inside {}: make it relative to path, or leave path out",
                shown.display()
            ),
        )),
    }
}

fn anchored_rest(rest: &str) -> Result<(GlobPattern, Option<usize>), ErrorDetail> {
    if rest.split('/').any(|component| component == "..") {
        return Err(ErrorDetail::new(
            ErrorCode::InvalidPattern,
            "`..` can't follow a wildcard: give the directory in `path` instead",
        ));
    }
    let is_deep = rest.is_empty() || rest.ends_with('/') || rest.contains("**") || rest.contains('{');
    let depth = (!is_deep).then(|| rest.matches('/').count() + 1);
    let pattern = if rest.is_empty() { "**" } else { rest };
    Ok((GlobPattern::anchored(pattern)?, depth))
}

fn open_directory(context: &Context, path: &Path) -> Result<Root, ErrorDetail> {
    let root = open_root(context, path)?;
    if root.file_type != FileType::Directory {
        return Err(wrong_type(
            &root.path,
            "not a directory",
            "give the directory to search in path, and the file's name in pattern",
        ));
    }
    Ok(root)
}

fn is_candidate(entry: &DirEntry) -> bool {
    entry.file_type().is_some_and(|kind| kind.is_file() || kind.is_symlink())
}

/// The time of the last change of a file; for a link, of its target. `None` for anything else.
fn modified(context: &Context, entry: &DirEntry) -> Option<(i64, i64)> {
    if entry.file_type()?.is_file() {
        let metadata = entry.metadata().ok()?;
        return Some((metadata.mtime(), metadata.mtime_nsec()));
    }
    modified_target(context, entry.path())
}

/// The time of the last change of the file that a link leads to. `None` if it leads to no file, or out of the roots.
fn modified_target(context: &Context, path: &Path) -> Option<(i64, i64)> {
    let target = context.locate(&context.absolute(path)).ok()?;
    modified_file(&target.stat().ok()?)
}

fn modified_file(stat: &Stat) -> Option<(i64, i64)> {
    #[allow(
        clippy::unnecessary_cast,
        clippy::cast_possible_wrap,
        reason = "the types differ between targets"
    )]
    FileType::from_raw_mode(stat.st_mode)
        .is_file()
        .then_some((stat.st_mtime as i64, stat.st_mtime_nsec as i64))
}

/// The newest files so far: oldest first in the heap, so that it is the one to go.
struct Newest {
    limit: usize,
    found: u64,
    heap: BinaryHeap<(Reverse<(i64, i64)>, PathBytes)>,
}

/// A path that sorts by its bytes.
#[derive(PartialEq, Eq)]
struct PathBytes(PathBuf);

impl Ord for PathBytes {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.0.as_os_str().cmp(other.0.as_os_str())
    }
}

impl PartialOrd for PathBytes {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Newest {
    fn new(limit: usize) -> Self {
        Self { limit, found: 0, heap: BinaryHeap::new() }
    }

    fn add(&mut self, modified: (i64, i64), path: PathBuf) {
        self.found += 1;
        let candidate = (Reverse(modified), PathBytes(path));
        if self.heap.len() < self.limit {
            self.heap.push(candidate);
        } else if let Some(mut oldest) = self.heap.peek_mut()
            && candidate < *oldest
        {
            *oldest = candidate;
        }
    }

    fn answer(self) -> GlobAnswer {
        let matches: Vec<String> =
            self.heap.into_sorted_vec().into_iter().map(|(_, path)| path.0.display().to_string()).collect();
        GlobAnswer { count: matches.len() as u64, truncated: self.found > matches.len() as u64, matches }
    }
}
