//! Walks a tree by descriptors, for searches that are confined to the roots of the context.
//!
//! A process of the guest can replace a directory or a file by a link after its path was checked. So this walk uses no paths.
//! The root is opened by the confined resolution of paths; each further step opens one name in an open directory with
//! `O_NOFOLLOW`. So each descriptor belongs to a file or directory that was below the root.
//!
//! ```text
//! queue ─► open directory ─► list ─► read ignore files ─► visit files
//!   ▲                                                  └► directories ─┐
//!   └──────────────────────────────────────────────────────────────────┘
//! ```
//!
//! Exclusions and ignore rules are those of the unconfined walk (see `walk`), except that no rules are read from outside the
//! roots. The numbers of threads and open descriptors are limited for every shape of tree.

mod queue;
mod rules;

use std::ffi::{CStr, CString, OsStr};
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use emergent_wire::tools::MAX_PATH_BYTES;
use rustix::fs::{AtFlags, FileType, Mode, OFlags, RawDir, Stat, fstat, openat, statat};
use rustix::io::Errno;

use crate::Context;
use crate::walk::{LeftOut, Root, threads};

use queue::{Budget, Held, Pending, Queue, Work};
use rules::{Rules, Sources};

/// The flags for files and directories. Without `O_DIRECTORY`, because with it gVisor follows a link in spite of
/// `O_NOFOLLOW`; listing anything but a directory fails anyway.
const READ: OFlags = OFlags::RDONLY.union(OFlags::NONBLOCK).union(OFlags::NOCTTY);
const LIST_BYTES: usize = 32 * 1024;
/// The entries of a directory that one thread visits at a time.
const BATCH: usize = 64;
/// The number of entries after which a long loop checks for cancellation.
const CANCEL_INTERVAL: usize = 1024;

/// The visitor of a tree. Each thread has one.
pub(crate) trait Visitor {
    /// Whether a directory is to be entered.
    fn enters(&mut self, directory: &Path) -> bool;
    /// Takes an entry that is not a directory.
    fn entry(&mut self, entry: &Entry<'_>);
    /// Takes the failure of a directory.
    fn failure(&mut self, path: &Path, errno: Errno);
}

/// An entry of an open directory.
pub(crate) struct Entry<'a> {
    directory: BorrowedFd<'a>,
    name: &'a CStr,
    pub(crate) path: &'a Path,
    pub(crate) file_type: FileType,
}

impl Entry<'_> {
    /// Opens the entry for reading; none if it is not a regular file any more.
    pub(crate) fn open(&self) -> Result<Option<File>, Errno> {
        check_length(self.path)?;
        match open_at(self.directory, self.name, READ) {
            Ok(file) => regular(file),
            Err(Errno::NOENT | Errno::LOOP | Errno::NXIO) => Ok(None),
            Err(errno) => Err(errno),
        }
    }

    /// The current type of the entry; a link is not followed.
    pub(crate) fn stat(&self) -> Result<Stat, Errno> {
        check_length(self.path)?;
        statat(self.directory, self.name, AtFlags::SYMLINK_NOFOLLOW)
    }
}

/// Walks the tree below `root`, a directory, at most `max_depth` deep.
pub(crate) fn walk<V: Visitor>(
    context: &Context,
    root: &Root,
    max_depth: Option<usize>,
    cancel: &AtomicBool,
    visitor: impl Fn() -> V + Sync,
) {
    let budget = Budget::default();
    let anchor = match open_at(root.file.as_fd(), c".", READ).map(|file| budget.hold(file)) {
        Ok(Ok(anchor)) => anchor,
        Ok(Err(_)) => return visitor().failure(&root.path, Errno::MFILE),
        Err(errno) => return visitor().failure(&root.path, errno),
    };
    let queue = Queue::new(Work::Directory(Pending {
        anchor,
        names: Vec::new(),
        path: root.path.clone(),
        depth: 0,
        rules: Rules::above(context, &root.path),
    }));
    let left_out = LeftOut::new(context, &root.path);
    let walk = Walk { context, left_out, max_depth, cancel, budget: &budget, queue: &queue };
    std::thread::scope(|scope| {
        for _ in 1..threads() {
            // With fewer threads the walk only takes longer.
            let _ = std::thread::Builder::new().spawn_scoped(scope, || walk.run(&mut visitor()));
        }
        walk.run(&mut visitor());
    });
}

struct Walk<'q, 'a> {
    context: &'q Context,
    left_out: LeftOut,
    max_depth: Option<usize>,
    cancel: &'q AtomicBool,
    budget: &'a Budget,
    queue: &'q Queue<'a>,
}

/// The entries of a directory that are searched.
struct Listing {
    directories: Vec<CString>,
    entries: Vec<(CString, FileType)>,
    rules: Arc<Rules>,
}

impl<'a> Walk<'_, 'a> {
    fn run(&self, visitor: &mut impl Visitor) {
        while let Some((work, _at_work)) = self.queue.next() {
            if self.is_cancelled() {
                self.queue.clear();
                continue;
            }
            match work {
                Work::Directory(pending) => self.directory(visitor, &pending),
                Work::Entries { directory, path, entries } => {
                    self.visit(visitor, directory.as_fd(), &path, &entries);
                }
            }
        }
    }

    fn is_cancelled(&self) -> bool {
        self.cancel.load(Ordering::Relaxed)
    }

    fn directory(&self, visitor: &mut impl Visitor, pending: &Pending<'a>) {
        if !visitor.enters(&pending.path) || self.max_depth.is_some_and(|depth| pending.depth >= depth) {
            return;
        }
        let listed = check_length(&pending.path).and_then(|()| pending.open()).and_then(|file| {
            let listing = self.list(&file, pending)?;
            Ok((file, listing))
        });
        let (file, listing) = match listed {
            Ok(listed) => listed,
            // It was removed or replaced since its name was read.
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => return,
            Err(errno) => return visitor.failure(&pending.path, errno),
        };
        let held = self.budget.hold(file);
        let (anchor, way) = match &held {
            Ok(directory) => (directory, [].as_slice()),
            Err(_) => (&pending.anchor, pending.names.as_slice()),
        };
        for name in listing.directories {
            self.queue.push(Work::Directory(Pending {
                anchor: Arc::clone(anchor),
                path: join(&pending.path, &name),
                names: way.iter().cloned().chain([name]).collect(),
                depth: pending.depth + 1,
                rules: Arc::clone(&listing.rules),
            }));
        }
        match held {
            Ok(directory) => self.share(visitor, &directory, &pending.path, listing.entries),
            Err(file) => self.visit(visitor, file.as_fd(), &pending.path, &listing.entries),
        }
    }

    /// Visits a batch of entries and queues the rest for all threads.
    fn share(
        &self,
        visitor: &mut impl Visitor,
        directory: &Arc<Held<'a>>,
        path: &Path,
        mut entries: Vec<(CString, FileType)>,
    ) {
        if entries.len() > BATCH {
            let path = Arc::new(path.to_owned());
            while entries.len() > BATCH {
                let batch = entries.split_off(entries.len() - BATCH);
                let (directory, path) = (Arc::clone(directory), Arc::clone(&path));
                self.queue.push(Work::Entries { directory, path, entries: batch });
            }
        }
        self.visit(visitor, directory.as_fd(), path, &entries);
    }

    /// Lists a directory without excluded and ignored entries.
    fn list(&self, directory: &File, pending: &Pending<'a>) -> Result<Listing, Errno> {
        let mut all = Vec::new();
        let mut sources = Sources::NONE;
        let mut buffer = Vec::with_capacity(LIST_BYTES);
        let mut names = RawDir::new(directory, buffer.spare_capacity_mut());
        while let Some(entry) = names.next() {
            let entry = entry?;
            let name = entry.file_name();
            if name == c"." || name == c".." {
                continue;
            }
            sources.note(name);
            all.push((name.to_owned(), entry.file_type()));
            if all.len() % CANCEL_INTERVAL == 0 && self.is_cancelled() {
                break;
            }
        }
        let rules = pending.rules.child(self.context, directory.as_fd(), &pending.path, sources);
        let mut listing = Listing { directories: Vec::new(), entries: Vec::new(), rules };
        for (index, (name, file_type)) in all.into_iter().enumerate() {
            if index % CANCEL_INTERVAL == 0 && self.is_cancelled() {
                break;
            }
            let file_type = match file_type {
                // Some file systems do not list the types of entries.
                FileType::Unknown => match statat(directory, &name, AtFlags::SYMLINK_NOFOLLOW) {
                    Ok(stat) => FileType::from_raw_mode(stat.st_mode),
                    Err(_) => continue,
                },
                known => known,
            };
            let path = join(&pending.path, &name);
            if listing.rules.ignores(&path, file_type.is_dir())
                || self.left_out.contains(&path, name.to_bytes(), pending.depth + 1)
            {
                continue;
            }
            if file_type.is_dir() {
                listing.directories.push(name);
            } else {
                listing.entries.push((name, file_type));
            }
        }
        Ok(listing)
    }

    fn visit(
        &self,
        visitor: &mut impl Visitor,
        directory: BorrowedFd<'_>,
        path: &Path,
        entries: &[(CString, FileType)],
    ) {
        for (name, file_type) in entries {
            if self.is_cancelled() {
                return;
            }
            let path = join(path, name);
            visitor.entry(&Entry { directory, name, path: &path, file_type: *file_type });
        }
    }
}

fn join(directory: &Path, name: &CStr) -> PathBuf {
    directory.join(OsStr::from_bytes(name.to_bytes()))
}

/// The longest path that the kernel takes. This also limits the depth of a walk.
fn check_length(path: &Path) -> Result<(), Errno> {
    if path.as_os_str().len() > MAX_PATH_BYTES { Err(Errno::NAMETOOLONG) } else { Ok(()) }
}

/// Opens a name in a directory. A link is not followed: it is a failure.
fn open_at(directory: BorrowedFd<'_>, name: impl rustix::path::Arg, flags: OFlags) -> Result<File, Errno> {
    openat(directory, name, flags | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty()).map(File::from)
}

/// The file, if it is a regular one.
fn regular(file: File) -> Result<Option<File>, Errno> {
    let stat = fstat(&file)?;
    Ok(FileType::from_raw_mode(stat.st_mode).is_file().then_some(file))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::sync::atomic::AtomicUsize;

    use super::*;
    use crate::walk::open_root;

    /// Counts the entries, and the most descriptors that were open at one of them.
    #[derive(Default)]
    struct Counts {
        entries: AtomicUsize,
        descriptors: AtomicUsize,
    }

    impl Visitor for &Counts {
        fn enters(&mut self, _: &Path) -> bool {
            true
        }

        fn entry(&mut self, _: &Entry<'_>) {
            self.entries.fetch_add(1, Ordering::Relaxed);
            let open = fs::read_dir("/proc/self/fd").unwrap().count();
            self.descriptors.fetch_max(open, Ordering::Relaxed);
        }

        fn failure(&mut self, path: &Path, errno: Errno) {
            panic!("{}: {errno}", path.display());
        }
    }

    #[test]
    fn deep_trees_are_walked_with_few_descriptors() {
        const LEVELS: usize = 400;
        let temp = tempfile::tempdir().unwrap();
        let base = temp.path().canonicalize().unwrap();
        let mut at = base.clone();
        for _ in 0..LEVELS {
            // Directories on both sides of the deep one, so that some wait whatever the order.
            for name in ["a", "d", "z"] {
                at.push(name);
                fs::create_dir(&at).unwrap();
                fs::write(at.join("file"), "").unwrap();
                at.pop();
            }
            at.push("d");
        }
        let context = Context::confined(&base, vec![base.clone()]);
        let root = open_root(&context, &base).unwrap();
        let counts = Counts::default();
        walk(&context, &root, None, &AtomicBool::new(false), || &counts);
        assert_eq!(counts.entries.into_inner(), 3 * LEVELS);
        let descriptors = counts.descriptors.into_inner();
        assert!(descriptors < 120, "{descriptors}");
    }
}
