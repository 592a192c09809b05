//! Endless output, as fast as it is read.

use std::io::Write;
use std::sync::Arc;
use std::thread;

use crate::message::outgoing;
use crate::mode::Mode;
use crate::output::Output;

/// Lines in one write. One write for each line would be slower.
const LINES: usize = 500;

/// Starts the flood, if the mode has one.
pub(crate) fn start(mode: Mode, output: &Arc<Output>) {
    let output = Arc::clone(output);
    match mode {
        Mode::FloodStdout => {
            let line = outgoing(None, "notifications/message", Some(r#"{"level":"info","data":"flood"}"#));
            let lines = line.repeat(LINES);
            thread::spawn(move || while output.flood(lines.as_bytes()) {});
        }
        Mode::FloodJunk => {
            let lines = "this is not JSON\n".repeat(LINES);
            thread::spawn(move || while output.flood(lines.as_bytes()) {});
        }
        Mode::FloodStderr => {
            let lines = "a lot to complain about\n".repeat(LINES);
            thread::spawn(move || while std::io::stderr().write_all(lines.as_bytes()).is_ok() {});
        }
        _ => {}
    }
}
