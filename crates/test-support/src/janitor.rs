//! Removes what a test leaves, whatever happens to the test.
//!
//! A small script (`janitor.sh`) waits for the end of the test, then kills the server on a data directory and removes
//! everything with its installation's label, and the directory itself.

use std::path::Path;
use std::process::Stdio;

use crate::keeper::Keeper;

const SCRIPT: &str = include_str!("janitor.sh");

/// Watches over one data directory, in which a file `installation-id` says whose things to remove.
pub struct Janitor(Keeper);

impl Janitor {
    /// Starts to watch.
    pub fn of(data_dir: &Path) -> Self {
        Self(Keeper::start("emergent-test-janitor", SCRIPT, data_dir, Stdio::null()))
    }

    /// Lets it begin.
    pub(crate) fn call(&mut self) {
        self.0.let_go();
    }

    /// Waits until it is done.
    pub(crate) fn wait(&mut self) {
        self.0.wait();
    }
}
