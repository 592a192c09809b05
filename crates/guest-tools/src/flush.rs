//! Flushes small files to the disk right after they were acknowledged. Waiting for the flush would take longer than the rest of
//! a small write.

use std::fs::File;
use std::sync::OnceLock;
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};

/// The most files that wait. The writer of a further file flushes it itself.
const MAX_WAITING: usize = 64;
const STACK_BYTES: usize = 64 * 1024;

/// Queues a file to be flushed.
pub(crate) fn soon(file: File) {
    static FLUSHER: OnceLock<Option<SyncSender<File>>> = OnceLock::new();
    let left = match FLUSHER.get_or_init(start) {
        Some(flusher) => match flusher.try_send(file) {
            Ok(()) => return,
            Err(TrySendError::Full(file) | TrySendError::Disconnected(file)) => file,
        },
        None => file,
    };
    // The content is in its place already. The next write reports a failure.
    let _ = left.sync_all();
}

/// Starts the thread that flushes; none when the sandbox has no room for one.
fn start() -> Option<SyncSender<File>> {
    let (sender, receiver) = sync_channel::<File>(MAX_WAITING);
    let flush = move || {
        for file in receiver {
            let _ = file.sync_all();
        }
    };
    std::thread::Builder::new().name("flush".to_owned()).stack_size(STACK_BYTES).spawn(flush).ok()?;
    Some(sender)
}
