//! Turns errors of the operating system into errors for the caller, with the next step.

use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use emergent_wire::{ErrorCode, ErrorDetail};
use rustix::io::Errno;

/// Ends a call that was cancelled. Long loops ask this regularly.
pub(crate) fn check_cancel(cancel: &AtomicBool) -> Result<(), ErrorDetail> {
    if cancel.load(Ordering::Relaxed) {
        return Err(cancelled());
    }
    Ok(())
}

/// The failure of a call that was cancelled.
pub(crate) fn cancelled() -> ErrorDetail {
    ErrorDetail::new(ErrorCode::Cancelled, "the call was cancelled; nothing was changed by it")
}

/// The failure of a system call, with the path it was about. `doing` is the verb: "read", "write", ….
pub(crate) fn os_error(doing: &str, path: &Path, errno: Errno) -> ErrorDetail {
    let path = path.display();
    let (code, message) = match errno {
        Errno::NOENT => (
            ErrorCode::FileNotFound,
            format!("{path} does not exist: check the path, or list its directory with read"),
        ),
        Errno::NOTDIR => (
            ErrorCode::WrongFileType,
            format!("cannot {doing} {path}: a part of the path is a file, not a directory"),
        ),
        Errno::ISDIR => (
            ErrorCode::WrongFileType,
            format!("cannot {doing} {path}: it is a directory; give the path of a file"),
        ),
        Errno::NXIO | Errno::NODEV => (
            ErrorCode::WrongFileType,
            format!("cannot {doing} {path}: it is a socket or a device, not a regular file"),
        ),
        Errno::LOOP => (
            ErrorCode::InvalidPath,
            format!("cannot {doing} {path}: too many symbolic links, they may point at each other"),
        ),
        Errno::NAMETOOLONG => (
            ErrorCode::InvalidPath,
            format!(
                "cannot {doing} {path}: the path or a name in it is too long (a name has at most 255 bytes)"
            ),
        ),
        Errno::INVAL => (
            ErrorCode::InvalidPath,
            format!("cannot {doing} {path}: the file system does not take this name or operation"),
        ),
        Errno::ACCESS | Errno::PERM => (
            ErrorCode::PermissionDenied,
            format!("cannot {doing} {path}: permission denied by the sandbox's operating system"),
        ),
        Errno::ROFS => (
            ErrorCode::PermissionDenied,
            format!("cannot {doing} {path}: the file system is read-only; choose a path in the workspace"),
        ),
        Errno::NOSPC | Errno::DQUOT => (
            ErrorCode::DiskFull,
            format!(
                "cannot {doing} {path}: the workspace's disk is full: remove files or create a workspace with a \
                 larger disk"
            ),
        ),
        Errno::FBIG => (
            ErrorCode::TooLarge,
            format!("cannot {doing} {path}: the file system does not take a file this large"),
        ),
        Errno::EXIST | Errno::BUSY | Errno::TXTBSY | Errno::AGAIN => (
            ErrorCode::Conflict,
            format!(
                "cannot {doing} {path}: it is in use or was just made by someone else; look again and retry"
            ),
        ),
        Errno::MFILE | Errno::NFILE | Errno::NOMEM => (
            ErrorCode::Unavailable,
            format!(
                "cannot {doing} {path}: the sandbox is out of memory or open files; retry when less runs"
            ),
        ),
        // The caller chose the path, so the kernel's other errors are not faults of the server.
        other => (
            ErrorCode::Unacceptable,
            format!(
                "cannot {doing} {path}: {}; it may be a special file of the kernel, or damaged: look at it with bash",
                io::Error::from(other)
            ),
        ),
    };
    ErrorDetail::new(code, message)
}

/// The same for an error of the standard library.
pub(crate) fn io_error(doing: &str, path: &Path, error: &io::Error) -> ErrorDetail {
    match Errno::from_io_error(error) {
        Some(errno) => os_error(doing, path, errno),
        None => ErrorDetail::new(ErrorCode::Internal, format!("cannot {doing} {}: {error}", path.display())),
    }
}

/// The failure of a tool on a file of the wrong type.
pub(crate) fn wrong_type(path: &Path, what_it_is: &str, what_to_do: &str) -> ErrorDetail {
    ErrorDetail::new(ErrorCode::WrongFileType, format!("{} is {what_it_is}: {what_to_do}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_failure_names_its_path_and_has_its_code() {
        let path = Path::new("/workspace/a");
        for (errno, code) in [
            (Errno::NOENT, ErrorCode::FileNotFound),
            (Errno::NOTDIR, ErrorCode::WrongFileType),
            (Errno::ISDIR, ErrorCode::WrongFileType),
            (Errno::LOOP, ErrorCode::InvalidPath),
            (Errno::NAMETOOLONG, ErrorCode::InvalidPath),
            (Errno::ACCESS, ErrorCode::PermissionDenied),
            (Errno::PERM, ErrorCode::PermissionDenied),
            (Errno::ROFS, ErrorCode::PermissionDenied),
            (Errno::NOSPC, ErrorCode::DiskFull),
            (Errno::DQUOT, ErrorCode::DiskFull),
            (Errno::NXIO, ErrorCode::WrongFileType),
            (Errno::NODEV, ErrorCode::WrongFileType),
            (Errno::INVAL, ErrorCode::InvalidPath),
            (Errno::IO, ErrorCode::Unacceptable),
            (Errno::OVERFLOW, ErrorCode::Unacceptable),
            (Errno::SRCH, ErrorCode::Unacceptable),
            (Errno::OPNOTSUPP, ErrorCode::Unacceptable),
            (Errno::STALE, ErrorCode::Unacceptable),
        ] {
            let error = os_error("write", path, errno);
            assert_eq!(error.code, code, "{errno:?}");
            assert!(error.message.contains("/workspace/a"), "{}", error.message);
        }
        for number in 1..200 {
            let error = os_error("read", path, Errno::from_raw_os_error(number));
            assert_ne!(error.code, ErrorCode::Internal, "{number}");
        }
    }
}
