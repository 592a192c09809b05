//! Searches file contents with ripgrep's engine.
//!
//! Files are walked and searched in parallel with the settings of `rg --hidden`: no memory maps (a file that
//! shrinks would kill the process), the search of a file ends where a NUL byte shows that it is binary, UTF-16 is
//! decoded. Unlike rg, `$` also matches before `\r\n`, since no tool shows the `\r`.
//!
//! The answer is the first `limit` matches in the order of paths (by bytes) and lines, whichever thread finds
//! them first: when there are enough, files behind the last of them are not searched any more.

mod collector;
mod sink;

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use emergent_wire::tools::{DEFAULT_MATCHES, GrepAnswer, GrepRequest};
use emergent_wire::{ErrorCode, ErrorDetail, Validate as _};
use grep_matcher::LineTerminator;
use grep_regex::{RegexMatcher, RegexMatcherBuilder};
use grep_searcher::{BinaryDetection, MmapChoice, Searcher, SearcherBuilder};
use ignore::{DirEntry, WalkState};
use rustix::fs::{CWD, FileType, Mode, OFlags, openat};
use rustix::io::Errno;

use crate::Context;
use crate::confined_walk::{self, Entry, Visitor};
use crate::error::check_cancel;
use crate::glob_pattern::GlobPattern;
use crate::read::special_file;
use crate::walk::{self, Root, open_root};

use collector::Collector;
use sink::{Limits, MatchSink};

/// The longest line that is searched; a file with a longer one is reported as skipped.
const MAX_LINE_BYTES: usize = 64 << 20;
/// The largest compiled regular expression, and the largest cache of its automaton, for each thread.
const MAX_REGEX_BYTES: usize = 32 << 20;
/// The longest explanation of an invalid pattern.
const MAX_REASON_BYTES: usize = 2000;

/// Searches a file or a tree.
pub fn grep(
    context: &Context,
    request: &GrepRequest,
    cancel: &AtomicBool,
) -> Result<GrepAnswer, ErrorDetail> {
    request.validate()?;
    check_cancel(cancel)?;
    let matcher = compile(request)?;
    let include = request.include.as_deref().map(GlobPattern::new).transpose()?;
    let limits = Limits {
        matches: request.limit.unwrap_or(DEFAULT_MATCHES) as usize,
        context: request.context.unwrap_or(0) as usize,
    };
    let root = open_root(context, request.path.as_deref().map_or(&context.workspace_dir, Path::new))?;
    let collector = Collector::new(limits.matches);
    let search = Search { matcher: &matcher, limits, cancel, collector: &collector };
    match root.file_type {
        FileType::RegularFile => search.explicit_file(&root),
        FileType::Directory if context.confined_to.is_some() => {
            confined_walk::walk(context, &root, None, cancel, || TreeVisitor {
                search: &search,
                searcher: search.searcher(),
                root: &root.path,
                include: include.as_ref(),
            });
        }
        FileType::Directory => search.tree(context, &root.path, include.as_ref()),
        other => return Err(special_file(&root.path, other)),
    }
    check_cancel(cancel)?;
    Ok(collector.answer())
}

fn compile(request: &GrepRequest) -> Result<RegexMatcher, ErrorDetail> {
    let pattern = &request.pattern;
    let mut builder = RegexMatcherBuilder::new();
    builder
        .multi_line(true)
        .unicode(true)
        .octal(false)
        .case_insensitive(request.ignore_case)
        .line_terminator(Some(b'\n'))
        .dot_matches_new_line(false)
        .ban_byte(Some(0))
        .size_limit(MAX_REGEX_BYTES)
        .dfa_size_limit(MAX_REGEX_BYTES);
    // With `crlf` a pattern that asks for a line feed is taken and matches nothing; without, it is refused.
    let checked = if pattern.contains('\n') || pattern.contains("\\n") {
        builder.build(pattern).map(|_| ())
    } else {
        Ok(())
    };
    checked.and_then(|()| builder.crlf(true).build(pattern)).map_err(|error| {
        ErrorDetail::new(
            ErrorCode::InvalidPattern,
            format!(
                "the pattern is not a valid regular expression (Rust syntax, one line at a time; `\\` makes a \
                 character literal): {}",
                short_reason(&error.to_string())
            ),
        )
    })
}

/// The reason why a pattern does not compile. The library shows the whole pattern above the reason; for a long pattern
/// only the reason is kept.
fn short_reason(reason: &str) -> String {
    if reason.len() <= MAX_REASON_BYTES {
        return reason.to_owned();
    }
    let last = reason.lines().last().unwrap_or_default();
    last.chars().take(MAX_REASON_BYTES / 4).collect()
}

struct Search<'a> {
    matcher: &'a RegexMatcher,
    limits: Limits,
    cancel: &'a AtomicBool,
    collector: &'a Collector,
}

impl Search<'_> {
    fn searcher(&self) -> Searcher {
        SearcherBuilder::new()
            .line_terminator(LineTerminator::crlf())
            .line_number(true)
            .multi_line(false)
            .memory_map(MmapChoice::never())
            .binary_detection(BinaryDetection::quit(0))
            .heap_limit(Some(MAX_LINE_BYTES))
            .before_context(self.limits.context)
            .after_context(self.limits.context)
            .build()
    }

    /// Searches a file that the request names. Ignore rules do not apply.
    fn explicit_file(&self, root: &Root) {
        let is_binary = self.file(&mut self.searcher(), &root.file, &root.path);
        if is_binary {
            self.collector.skip(&root.path, "a binary file (it has a NUL byte), not searched to its end");
        }
    }

    fn tree(&self, context: &Context, root: &Path, include: Option<&GlobPattern>) {
        walk::builder(context, root).build_parallel().run(|| {
            let mut searcher = self.searcher();
            let root = root.to_owned();
            Box::new(move |entry| {
                if self.cancel.load(Ordering::Relaxed) {
                    return WalkState::Quit;
                }
                match entry {
                    Ok(entry) => self.entry(&mut searcher, &root, include, &entry),
                    Err(error) => {
                        self.walk_error(&error);
                        WalkState::Continue
                    }
                }
            })
        });
    }

    fn entry(
        &self,
        searcher: &mut Searcher,
        root: &Path,
        include: Option<&GlobPattern>,
        entry: &DirEntry,
    ) -> WalkState {
        let path = entry.path();
        let Some(kind) = entry.file_type() else {
            return WalkState::Continue;
        };
        if kind.is_dir() {
            return if self.collector.needs_directory(path) { WalkState::Continue } else { WalkState::Skip };
        }
        if kind.is_file() && self.wants(root, include, path) {
            let flags =
                OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
            match openat(CWD, path, flags, Mode::empty()) {
                Ok(fd) => {
                    self.file(searcher, &File::from(fd), path);
                }
                // Gone since its directory was read, or not a file any more.
                Err(Errno::NOENT | Errno::LOOP | Errno::NXIO) => {}
                Err(errno) => self.collector.skip(path, &io::Error::from(errno).to_string()),
            }
        }
        WalkState::Continue
    }

    /// Whether a file may have matches for the answer.
    fn wants(&self, root: &Path, include: Option<&GlobPattern>, path: &Path) -> bool {
        include.is_none_or(|include| include.is_match(path.strip_prefix(root).unwrap_or(path)))
            && self.collector.needs_file(path)
    }

    /// Searches one file; says whether it is binary.
    fn file(&self, searcher: &mut Searcher, file: &File, path: &Path) -> bool {
        let mut sink = MatchSink::new(self.limits, path);
        let reader = FileReader { file, is_at_end: false, cancel: self.cancel };
        let result = searcher.search_reader(self.matcher, reader, &mut sink);
        let is_binary = sink.is_binary();
        let matches = sink.into_matches();
        if !matches.is_empty() {
            self.collector.add(path, matches);
        }
        if let Err(error) = result {
            self.collector.skip(path, &error.to_string());
        }
        is_binary
    }

    fn walk_error(&self, error: &ignore::Error) {
        let is_gone = error.io_error().is_some_and(|error| error.kind() == io::ErrorKind::NotFound);
        if !is_gone {
            self.collector.skip_message(error.to_string());
        }
    }
}

/// Searches the files of a confined walk.
struct TreeVisitor<'a> {
    search: &'a Search<'a>,
    searcher: Searcher,
    root: &'a Path,
    include: Option<&'a GlobPattern>,
}

impl Visitor for TreeVisitor<'_> {
    fn enters(&mut self, directory: &Path) -> bool {
        self.search.collector.needs_directory(directory)
    }

    fn entry(&mut self, entry: &Entry<'_>) {
        if entry.file_type != FileType::RegularFile || !self.search.wants(self.root, self.include, entry.path)
        {
            return;
        }
        match entry.open() {
            Ok(Some(file)) => {
                self.search.file(&mut self.searcher, &file, entry.path);
            }
            Ok(None) => {}
            Err(errno) => self.failure(entry.path, errno),
        }
    }

    fn failure(&mut self, path: &Path, errno: Errno) {
        self.search.collector.skip(path, &io::Error::from(errno).to_string());
    }
}

/// A file whose reads fill the buffer, so that the matches do not depend on the sizes of the file system's reads. A read fails
/// when the call is cancelled, because the engine checks for that only at matches.
struct FileReader<'a> {
    file: &'a File,
    is_at_end: bool,
    cancel: &'a AtomicBool,
}

impl io::Read for FileReader<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let mut filled = 0;
        while filled < buffer.len() && !self.is_at_end {
            if self.cancel.load(Ordering::Relaxed) {
                return Err(io::Error::other("cancelled"));
            }
            match self.file.read(&mut buffer[filled..]) {
                Ok(0) => self.is_at_end = true,
                Ok(read) => filled += read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(filled)
    }
}
