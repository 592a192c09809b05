//! The work of a confined walk, shared by its threads.
//!
//! The queue is a stack: the walk is depth-first, so that few directories wait at any time. The walk is complete when the queue
//! is empty and no thread works, because only a working thread adds to the queue.
//!
//! Descriptors that are held for later work have a budget. Directories beyond the budget are opened again from the nearest held
//! directory (see `Pending`).

use std::ffi::CString;
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use rustix::fs::FileType;
use rustix::fs::OFlags;
use rustix::io::Errno;

use super::rules::Rules;
use super::{READ, open_at};

/// The most directories that are held open for later work.
const MAX_HELD: usize = 64;

/// A piece of work.
pub(super) enum Work<'a> {
    /// A directory to enter.
    Directory(Pending<'a>),
    /// Entries of a directory to visit.
    Entries { directory: Arc<Held<'a>>, path: Arc<PathBuf>, entries: Vec<(CString, FileType)> },
}

/// A directory that was seen and is not yet open.
pub(super) struct Pending<'a> {
    /// A directory above it.
    pub(super) anchor: Arc<Held<'a>>,
    /// The names from the anchor to it; empty for the anchor itself.
    pub(super) names: Vec<CString>,
    pub(super) path: PathBuf,
    pub(super) depth: usize,
    /// The rules of the directories above it.
    pub(super) rules: Arc<Rules>,
}

impl Pending<'_> {
    /// Opens the directory name by name, without following links.
    pub(super) fn open(&self) -> Result<File, Errno> {
        let Some((last, way)) = self.names.split_last() else {
            return open_at(self.anchor.as_fd(), c".", READ);
        };
        let mut at: Option<File> = None;
        for name in way {
            let from = at.as_ref().map_or(self.anchor.as_fd(), AsFd::as_fd);
            at = Some(open_at(from, name.as_c_str(), OFlags::PATH | OFlags::DIRECTORY)?);
        }
        open_at(at.as_ref().map_or(self.anchor.as_fd(), AsFd::as_fd), last.as_c_str(), READ)
    }
}

/// A directory that is held open.
pub(super) struct Held<'a> {
    file: File,
    budget: &'a Budget,
}

impl AsFd for Held<'_> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.budget.held.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Counts the directories that are held open.
#[derive(Default)]
pub(super) struct Budget {
    held: AtomicUsize,
}

impl Budget {
    /// Holds a directory; gives it back when the budget is used up.
    pub(super) fn hold(&self, file: File) -> Result<Arc<Held<'_>>, File> {
        if self.held.fetch_add(1, Ordering::Relaxed) >= MAX_HELD {
            self.held.fetch_sub(1, Ordering::Relaxed);
            return Err(file);
        }
        Ok(Arc::new(Held { file, budget: self }))
    }
}

pub(super) struct Queue<'a> {
    state: Mutex<State<'a>>,
    changed: Condvar,
}

struct State<'a> {
    waiting: Vec<Work<'a>>,
    at_work: usize,
}

impl<'a> Queue<'a> {
    pub(super) fn new(first: Work<'a>) -> Self {
        Self { state: Mutex::new(State { waiting: vec![first], at_work: 0 }), changed: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, State<'a>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn push(&self, work: Work<'a>) {
        self.lock().waiting.push(work);
        self.changed.notify_one();
    }

    /// The next work, and a guard for its duration; none when the walk is complete.
    pub(super) fn next(&self) -> Option<(Work<'a>, AtWork<'_, 'a>)> {
        let mut state = self.lock();
        loop {
            if let Some(work) = state.waiting.pop() {
                state.at_work += 1;
                return Some((work, AtWork(self)));
            }
            if state.at_work == 0 {
                return None;
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Drops all work that waits.
    pub(super) fn clear(&self) {
        let waiting = std::mem::take(&mut self.lock().waiting);
        drop(waiting);
    }
}

/// Marks a working thread, which may add to the queue.
pub(super) struct AtWork<'q, 'a>(&'q Queue<'a>);

impl Drop for AtWork<'_, '_> {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.at_work -= 1;
        if state.at_work == 0 && state.waiting.is_empty() {
            self.0.changed.notify_all();
        }
    }
}
