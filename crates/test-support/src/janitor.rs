//! Removes what a test leaves, whatever happens to the test.
//!
//! A small script (`janitor.sh`) waits for the end of a pipe that only the test process holds open, then kills the server
//! on a data directory and removes everything with its installation's label, and the directory itself.

use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};

const SCRIPT: &str = include_str!("janitor.sh");

/// Watches over one data directory, in which a file `installation-id` says whose things to remove.
pub struct Janitor {
    process: Child,
    leash: Option<ChildStdin>,
}

impl Janitor {
    /// Starts to watch.
    pub fn of(data_dir: &Path) -> Self {
        let mut process = Command::new("bash")
            .args(["-c", SCRIPT, "emergent-test-janitor"])
            .arg(data_dir)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()
            .expect("bash starts");
        let leash = process.stdin.take();
        Self { process, leash }
    }

    /// Lets it begin.
    pub(crate) fn call(&mut self) {
        self.leash = None;
    }

    /// Waits until it is done.
    pub(crate) fn wait(&mut self) {
        let _ = self.process.wait();
    }
}

impl Drop for Janitor {
    fn drop(&mut self) {
        self.call();
        self.wait();
    }
}
