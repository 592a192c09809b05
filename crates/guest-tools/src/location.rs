//! Resolves a path to a location, on which system calls are made.
//!
//! Without confinement the kernel resolves paths, so that a location costs no system call. With confinement the
//! path is walked component by component: each directory is opened with `O_NOFOLLOW`, links are read and
//! followed here, and a step that is neither inside a root nor on the way to one is refused. The result is an
//! open directory and a name in it, so a link that appears later is not followed. (`openat2` would do this in one
//! call, but gVisor does not have it.)

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::{Component, Path, PathBuf};

use emergent_wire::ErrorDetail;
use rustix::fs::{AtFlags, CWD, Mode, OFlags, Stat, mkdirat, openat, readlinkat, statat};
use rustix::io::Errno;

use crate::context::{Context, RequestPath};
use crate::error::{io_error, os_error, wrong_type};

/// As many links as Linux follows in one path.
const MAX_LINKS: u32 = 40;
const DIRECTORY: OFlags = OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

/// A location in the file system.
#[derive(Debug)]
pub(crate) struct Location {
    /// The directory that `name` is in; none when `name` is absolute and the kernel may follow links.
    directory: Option<OwnedFd>,
    /// The last component, or the whole path.
    pub(crate) name: PathBuf,
    /// The path for answers and walks.
    pub(crate) path: PathBuf,
}

impl Location {
    pub(crate) fn directory(&self) -> BorrowedFd<'_> {
        self.directory.as_ref().map_or(CWD, |fd| fd.as_fd())
    }

    /// Opens it for reading. Never waits, also for a FIFO.
    pub(crate) fn open(&self) -> Result<File, Errno> {
        self.open_with(OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY)
    }

    pub(crate) fn open_with(&self, flags: OFlags) -> Result<File, Errno> {
        let follow = if self.directory.is_some() { OFlags::NOFOLLOW } else { OFlags::empty() };
        let fd = openat(self.directory(), &self.name, flags | follow | OFlags::CLOEXEC, Mode::empty())?;
        Ok(File::from(fd))
    }

    pub(crate) fn stat(&self) -> Result<Stat, Errno> {
        let flags = if self.directory.is_some() { AtFlags::SYMLINK_NOFOLLOW } else { AtFlags::empty() };
        statat(self.directory(), &self.name, flags)
    }

    /// Opens its directory, to list the names.
    pub(crate) fn open_parent(&self) -> Result<OwnedFd, Errno> {
        let parent = match &self.directory {
            Some(_) => Path::new("."),
            None => self.name.parent().unwrap_or(Path::new("/")),
        };
        openat(self.directory(), parent, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
    }
}

impl Context {
    /// The location of a path that should exist.
    pub(crate) fn locate(&self, path: &RequestPath) -> Result<Location, ErrorDetail> {
        if self.confined_to.is_some() {
            return self.walk(path, false);
        }
        Ok(Location { directory: None, name: path.os.clone(), path: path.shown.clone() })
    }

    /// The location of a file to write, and its current state. Links are followed to the end. Missing directories are made if
    /// `make_directories` is set.
    pub(crate) fn locate_for_write(
        &self,
        path: &RequestPath,
        make_directories: bool,
    ) -> Result<(Location, Option<Stat>), ErrorDetail> {
        let shown = &path.shown;
        if path.names_directory() || shown.file_name().is_none() {
            return Err(wrong_type(shown, "the path of a directory", "give the path of a file"));
        }
        if self.confined_to.is_some() {
            let location = self.walk(path, make_directories)?;
            let stat = absent(statat(location.directory(), &location.name, AtFlags::SYMLINK_NOFOLLOW))
                .map_err(|errno| os_error("write", shown, errno))?;
            return Ok((location, stat));
        }
        let fail = |errno| os_error("write", shown, errno);
        let mut at = path.os.clone();
        for _ in 0..MAX_LINKS {
            let (Some(parent), Some(name)) = (at.parent(), at.file_name()) else {
                return Err(fail(Errno::ISDIR));
            };
            let directory = open_directory(parent, shown, make_directories)?;
            let stat = absent(statat(&directory, name, AtFlags::SYMLINK_NOFOLLOW)).map_err(fail)?;
            if stat.as_ref().is_some_and(is_link) {
                let target = readlinkat(&directory, name, Vec::new()).map_err(fail)?;
                at = parent.join(OsString::from_vec(target.into_bytes()));
                continue;
            }
            let name = PathBuf::from(name);
            let path = if path.has_parent_steps() {
                parent.canonicalize().map_err(|e| io_error("write", shown, &e))?.join(&name)
            } else {
                shown.clone()
            };
            let location = Location { directory: Some(directory), name, path };
            return Ok((location, stat));
        }
        Err(fail(Errno::LOOP))
    }

    /// Resolves a path under confinement.
    fn walk(&self, path: &RequestPath, make_directories: bool) -> Result<Location, ErrorDetail> {
        let shown = &path.shown;
        let fail = |errno| os_error("open", shown, errno);
        let root = openat(CWD, "/", DIRECTORY, Mode::empty()).map_err(fail)?;
        let mut walk = Walk { directories: vec![root], real: PathBuf::from("/"), pending: Vec::new() };
        walk.prepend(&path.os);
        if path.names_directory() {
            walk.pending.insert(0, OsString::from("."));
        }
        let mut links = 0;
        while let Some(name) = walk.pending.pop() {
            if name == ".." {
                walk.leave();
                continue;
            }
            if name == "." {
                continue;
            }
            let next = walk.real.join(&name);
            if !self.permits_passing(&next) {
                return Err(self.forbidden(shown));
            }
            let is_last = walk.pending.is_empty();
            if let Some(target) = walk.enter(&name, is_last, make_directories).map_err(fail)? {
                links += 1;
                if links > MAX_LINKS {
                    return Err(fail(Errno::LOOP));
                }
                walk.prepend(Path::new(&target));
            } else if is_last {
                if !self.permits(&next) {
                    return Err(self.forbidden(shown));
                }
                return Ok(walk.finish(PathBuf::from(name), next));
            }
        }
        if !self.permits(&walk.real) {
            return Err(self.forbidden(shown));
        }
        let real = walk.real.clone();
        Ok(walk.finish(PathBuf::from("."), real))
    }
}

/// The state of a walk: the directories from `/` to here, and the remaining components (last one first).
struct Walk {
    directories: Vec<OwnedFd>,
    real: PathBuf,
    pending: Vec<OsString>,
}

impl Walk {
    /// Puts the components of a path before the remaining ones. An absolute path starts again at `/`.
    fn prepend(&mut self, path: &Path) {
        if path.is_absolute() {
            self.directories.truncate(1);
            self.real = PathBuf::from("/");
        }
        for component in path.components().rev() {
            match component {
                Component::Normal(name) => self.pending.push(name.to_owned()),
                Component::ParentDir => self.pending.push(OsString::from("..")),
                Component::RootDir | Component::CurDir | Component::Prefix(_) => {}
            }
        }
    }

    fn leave(&mut self) {
        if self.directories.len() > 1 {
            self.directories.pop();
            self.real.pop();
        }
    }

    fn here(&self) -> BorrowedFd<'_> {
        // `directories` never gets empty: `leave` and `prepend` keep the first.
        self.directories.last().map_or(CWD, |fd| fd.as_fd())
    }

    /// Takes a step. Gives the target when `name` is a link. The last component is not opened, only checked.
    fn enter(&mut self, name: &OsStr, is_last: bool, make: bool) -> Result<Option<OsString>, Errno> {
        if is_last {
            return match self.read_link(name) {
                Err(Errno::NOENT) => Ok(None),
                other => other,
            };
        }
        let flags = DIRECTORY | OFlags::NOFOLLOW;
        let mut opened = openat(self.here(), name, flags, Mode::empty());
        if make && matches!(opened, Err(Errno::NOENT)) {
            match mkdirat(self.here(), name, Mode::from_raw_mode(0o777)) {
                Ok(()) | Err(Errno::EXIST) => opened = openat(self.here(), name, flags, Mode::empty()),
                Err(errno) => return Err(errno),
            }
        }
        match opened {
            Ok(fd) => {
                self.directories.push(fd);
                self.real.push(name);
                Ok(None)
            }
            Err(Errno::NOTDIR | Errno::LOOP) => match self.read_link(name)? {
                Some(target) => Ok(Some(target)),
                None => Err(Errno::NOTDIR),
            },
            Err(errno) => Err(errno),
        }
    }

    fn read_link(&self, name: &OsStr) -> Result<Option<OsString>, Errno> {
        match readlinkat(self.here(), name, Vec::new()) {
            Ok(target) => Ok(Some(OsString::from_vec(target.into_bytes()))),
            Err(Errno::INVAL) => Ok(None),
            Err(errno) => Err(errno),
        }
    }

    fn finish(mut self, name: PathBuf, path: PathBuf) -> Location {
        Location { directory: self.directories.pop(), name, path }
    }
}

fn open_directory(path: &Path, shown: &Path, make: bool) -> Result<OwnedFd, ErrorDetail> {
    match openat(CWD, path, DIRECTORY, Mode::empty()) {
        Err(Errno::NOENT) if make => {
            std::fs::create_dir_all(path).map_err(|error| io_error("write", shown, &error))?;
            openat(CWD, path, DIRECTORY, Mode::empty())
        }
        other => other,
    }
    .map_err(|errno| os_error("write", shown, errno))
}

fn absent<T>(result: Result<T, Errno>) -> Result<Option<T>, Errno> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(Errno::NOENT) => Ok(None),
        Err(errno) => Err(errno),
    }
}

fn is_link(stat: &Stat) -> bool {
    rustix::fs::FileType::from_raw_mode(stat.st_mode).is_symlink()
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use emergent_wire::ErrorCode;

    use super::*;

    fn locate(context: &Context, path: &str) -> Result<PathBuf, ErrorCode> {
        let path = context.request_path("file_path", path).map_err(|e| e.code)?;
        context.locate(&path).map(|l| l.path).map_err(|e| e.code)
    }

    #[test]
    fn a_confined_path_stays_inside_also_through_links() {
        let temp = tempfile::tempdir().unwrap();
        let base = temp.path().canonicalize().unwrap();
        let inside = base.join("inside");
        fs::create_dir_all(inside.join("a/b")).unwrap();
        fs::create_dir(base.join("outside")).unwrap();
        fs::write(base.join("outside/secret"), "x").unwrap();
        symlink("a/b", inside.join("good")).unwrap();
        symlink(inside.join("a"), inside.join("absolute")).unwrap();
        symlink("../outside", inside.join("bad")).unwrap();
        symlink(base.join("outside/secret"), inside.join("secret")).unwrap();
        symlink("loop", inside.join("loop")).unwrap();
        let context = Context::confined(&inside, vec![inside.clone()]);

        assert_eq!(locate(&context, "good/new"), Ok(inside.join("a/b/new")));
        assert_eq!(locate(&context, "absolute/b"), Ok(inside.join("a/b")));
        assert_eq!(locate(&context, "a/../a/./b/"), Ok(inside.join("a/b")));
        assert_eq!(locate(&context, "."), Ok(inside.clone()));
        // As the kernel has it: `good/..` is `a`, not the workspace.
        assert_eq!(locate(&context, "good/../b"), Ok(inside.join("a/b")));
        for path in ["bad/secret", "secret", "../outside/secret", "/etc/passwd", "..", "/", "/nowhere"] {
            assert_eq!(locate(&context, path), Err(ErrorCode::Forbidden), "{path}");
        }
        assert_eq!(locate(&context, "loop"), Err(ErrorCode::InvalidPath));
        assert_eq!(locate(&context, "missing/x"), Err(ErrorCode::FileNotFound));
    }

    #[test]
    fn a_confined_write_makes_directories_only_inside() {
        let temp = tempfile::tempdir().unwrap();
        let base = temp.path().canonicalize().unwrap();
        let inside = base.join("inside");
        fs::create_dir(&inside).unwrap();
        symlink("..", inside.join("up")).unwrap();
        let context = Context::confined(&inside, vec![inside.clone()]);
        let write = |path: &str| {
            let path = context.request_path("file_path", path)?;
            context.locate_for_write(&path, true).map(|(location, _)| location.path)
        };
        assert_eq!(write("x/y/z").unwrap(), inside.join("x/y/z"));
        assert!(inside.join("x/y").is_dir());
        assert_eq!(write("up/made/file").unwrap_err().code, ErrorCode::Forbidden);
        assert!(!base.join("made").exists());
    }

    #[test]
    fn a_root_may_be_a_link() {
        let temp = tempfile::tempdir().unwrap();
        let base = temp.path().canonicalize().unwrap();
        fs::create_dir(base.join("real")).unwrap();
        symlink("real", base.join("root")).unwrap();
        let context = Context::confined(base.join("root"), vec![base.join("root")]);
        assert_eq!(locate(&context, "file"), Ok(base.join("real/file")));
    }
}
