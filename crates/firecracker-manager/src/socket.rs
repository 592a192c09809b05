//! Unix sockets in jails. Their paths can be longer than the kernel's limit for sockets, so they are addressed through a
//! descriptor of their directory.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, Mode, OFlags};
use tokio::net::{UnixListener, UnixStream};

/// A short path of a file. It is valid while the descriptor is open.
fn short(path: &Path) -> io::Result<(OwnedFd, PathBuf)> {
    let directory = path.parent().unwrap_or(Path::new("/"));
    let name = path.file_name().unwrap_or_default();
    let directory =
        rustix::fs::open(directory, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    let path = Path::new("/proc/self/fd").join(directory.as_raw_fd().to_string()).join(name);
    Ok((directory, path))
}

/// Connects to a socket that a process in a jail has made. Links are not followed.
pub(crate) async fn connect(path: &Path) -> io::Result<UnixStream> {
    let (_directory, path) = short(path)?;
    let socket = rustix::fs::open(&path, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
    if FileType::from_raw_mode(rustix::fs::fstat(&socket)?.st_mode) != FileType::Socket {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "the file is not a socket"));
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
    async fn sockets_with_long_paths_can_be_used() {
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
    async fn links_to_sockets_are_not_followed() {
        let directory = tempfile::tempdir().unwrap();
        let (others, link) = (directory.path().join("others"), directory.path().join("link"));
        let _listener = listen(&others).unwrap();
        std::os::unix::fs::symlink(&others, &link).unwrap();
        assert_eq!(connect(&link).await.unwrap_err().kind(), io::ErrorKind::InvalidInput);
        connect(&others).await.unwrap();
    }
}
