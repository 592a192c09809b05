//! The reason of a failed git command. Only facts decide: git's reports to its credential helper, free space, exit statuses,
//! the remote's answer. git's messages are for people; their wording changes between versions.

use std::path::{Path, PathBuf};

use emergent_guest_protocol::GitFailureReason;
use emergent_wire::git_url::redact_urls;
use emergent_wire::{ErrorCode, ErrorDetail};

use super::remote;
use super::run::{Captured, Git, Transfer};

/// The part of git's messages that an error holds.
const MAX_MESSAGE_BYTES: usize = 4096;
/// A disk with less space than this is full: a write that fails for want of space leaves less than a block.
const FULL_BELOW_BYTES: u64 = 256 << 10;

/// Watches the free space of a directory's file system while git runs. It is read when git prints an error, which git does
/// before it removes its files, and after the end.
pub(super) struct SpaceWatch {
    directory: PathBuf,
    was_full: bool,
}

impl SpaceWatch {
    pub(super) fn new(directory: &Path) -> Self {
        Self { directory: directory.to_owned(), was_full: false }
    }

    pub(super) fn look(&mut self) {
        let Ok(found) = rustix::fs::statvfs(&self.directory) else { return };
        // File systems without a fixed number of blocks or inodes report 0 of 0.
        let has_no_block = found.f_blocks > 0 && found.f_bavail * found.f_frsize < FULL_BELOW_BYTES;
        let has_no_inode = found.f_files > 0 && found.f_favail == 0;
        self.was_full |= has_no_block || has_no_inode;
    }

    pub(super) fn was_full(&self) -> bool {
        self.was_full
    }
}

/// The error for a command that failed: git's messages, the reason if one was found, and the next step.
pub(super) fn error(
    git: &Git,
    arguments: &[&str],
    captured: &Captured,
    transfer: Option<&Transfer<'_>>,
) -> ErrorDetail {
    let shown =
        [captured.stderr.as_slice(), &captured.stdout[..captured.stdout.len().min(MAX_MESSAGE_BYTES)]];
    let shown = shown.concat();
    let message = String::from_utf8_lossy(&shown[..shown.len().min(MAX_MESSAGE_BYTES)]);
    // A remote that was set up by hand may hold a credential.
    let message = redact_urls(message.trim());
    let action = arguments.first().copied().unwrap_or_default();
    let failed =
        |hint: &str| ErrorDetail::new(ErrorCode::GitFailed, format!("git {action} failed: {message}{hint}"));
    let Some(reason) = reason(git, action, captured, transfer) else { return failed("") };
    let error = match reason {
        GitFailureReason::AuthenticationRequired => failed("; the repository needs credentials"),
        GitFailureReason::NotARepository => {
            failed("; clone a repository first, or give its directory as path")
        }
        GitFailureReason::NetworkUnreachable => {
            failed("; the remote does not answer: check its address and the network, or try again")
        }
        GitFailureReason::TransferInterrupted => failed("; the transfer was interrupted: try again"),
        GitFailureReason::DiskFull => ErrorDetail::new(
            ErrorCode::DiskFull,
            format!("git {action}: the workspace's disk is full: {message}"),
        ),
    };
    reason.add_to(error)
}

fn reason(
    git: &Git,
    action: &str,
    captured: &Captured,
    transfer: Option<&Transfer<'_>>,
) -> Option<GitFailureReason> {
    if transfer.is_some_and(Transfer::was_asked_for_credentials) {
        return Some(GitFailureReason::AuthenticationRequired);
    }
    if captured.disk_was_full() {
        return Some(GitFailureReason::DiskFull);
    }
    if action != "clone" && git.fails(&["rev-parse", "--git-dir"]) {
        return Some(GitFailureReason::NotARepository);
    }
    remote::does_not_answer(git, transfer?).then_some(GitFailureReason::NetworkUnreachable)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_system_that_reports_no_size_is_not_full() {
        let mut watch = SpaceWatch::new(Path::new("/proc"));
        assert_eq!(rustix::fs::statvfs("/proc").unwrap().f_blocks, 0);
        watch.look();
        assert!(!watch.was_full());
    }
}
