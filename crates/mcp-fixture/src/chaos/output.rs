//! Standard output: whole lines, each with one write, from any thread.

use std::fs::File;
use std::io::Write;
use std::mem::ManuallyDrop;
use std::os::fd::FromRawFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use parking_lot::Mutex;

/// Standard output without the buffer that the standard library puts before it.
pub(crate) struct Output {
    file: Mutex<ManuallyDrop<File>>,
    /// Answers that wait for the lock. A flood lets them go first.
    waiting: AtomicUsize,
}

impl Output {
    pub(crate) fn new() -> Self {
        // SAFETY: descriptor 1 is standard output all the time, and `ManuallyDrop` never closes it.
        let file = ManuallyDrop::new(unsafe { File::from_raw_fd(1) });
        Self { file: Mutex::new(file), waiting: AtomicUsize::new(0) }
    }

    /// Writes whole lines. A closed output is not an error.
    pub(crate) fn write(&self, lines: &[u8]) {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let mut file = self.file.lock();
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        let _ = file.write_all(lines);
    }

    /// Writes when no answer waits. False if the output is closed.
    pub(crate) fn flood(&self, lines: &[u8]) -> bool {
        while self.waiting.load(Ordering::Relaxed) > 0 {
            thread::yield_now();
        }
        self.file.lock().write_all(lines).is_ok()
    }
}
