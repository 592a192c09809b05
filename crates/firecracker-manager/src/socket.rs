//! Unix sockets in jails, whose paths may be longer than a socket's may be: they are named through their directory.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, Mode, OFlags};
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

/// Connects to a socket that somebody in a jail has made. What leads elsewhere is not followed.
pub(crate) async fn connect(path: &Path) -> io::Result<UnixStream> {
    let (_directory, path) = short(path)?;
    let socket = rustix::fs::open(&path, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
    if FileType::from_raw_mode(rustix::fs::fstat(&socket)?.st_mode) != FileType::Socket {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is no socket"));
    }
    UnixStream::connect(Path::new("/proc/self/fd").join(socket.as_raw_fd().to_string())).await
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

    #[tokio::test]
    async fn a_link_is_not_followed() {
        let directory = tempfile::tempdir().unwrap();
        let (others, link) = (directory.path().join("others"), directory.path().join("link"));
        let _listener = listen(&others).unwrap();
        std::os::unix::fs::symlink(&others, &link).unwrap();
        assert_eq!(connect(&link).await.unwrap_err().kind(), io::ErrorKind::InvalidInput);
        connect(&others).await.unwrap();
    }
}
