//! Unix sockets in jails, whose paths may be longer than a socket's may be: they are named through their directory.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use tokio::net::{UnixListener, UnixStream};

/// A short name for a path, as long as the descriptor is open.
fn short(path: &Path) -> io::Result<(OwnedFd, PathBuf)> {
    let directory = path.parent().unwrap_or(Path::new("/"));
    let name = path.file_name().unwrap_or_default();
    let directory =
        rustix::fs::open(directory, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    let path = Path::new("/proc/self/fd").join(directory.as_raw_fd().to_string()).join(name);
    Ok((directory, path))
}

pub(crate) async fn connect(path: &Path) -> io::Result<UnixStream> {
    let (_directory, path) = short(path)?;
    UnixStream::connect(path).await
}

pub(crate) fn listen(path: &Path) -> io::Result<UnixListener> {
    let (_directory, path) = short(path)?;
    UnixListener::bind(path)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use super::*;

    #[tokio::test]
    async fn a_long_path_is_no_obstacle() {
        let directory = tempfile::tempdir().unwrap();
        let deep = directory.path().join("d".repeat(200));
        std::fs::create_dir(&deep).unwrap();
        let path = deep.join("socket");
        assert!(UnixListener::bind(&path).is_err());
        let listener = listen(&path).unwrap();
        let (connected, accepted) = tokio::join!(connect(&path), listener.accept());
        connected.unwrap();
        accepted.unwrap();
    }
}
