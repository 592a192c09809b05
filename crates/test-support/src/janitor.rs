//! Removes everything that a test server made, even if the test is killed.
//!
//! A script (`janitor.sh`) waits for the end of the test process. Then it kills the server on a data directory, and removes
//! everything with the label of its installation, and the directory.

use std::path::Path;
use std::process::Stdio;

use crate::keeper::Keeper;

const SCRIPT: &str = include_str!("janitor.sh");

/// The janitor of one data directory. The directory's file `installation-id` has the label of the things to remove.
pub struct Janitor(Keeper);

impl Janitor {
    /// Starts the script, which waits.
    pub fn of(data_dir: &Path) -> Self {
        Self(Keeper::start("emergent-test-janitor", SCRIPT, data_dir, Stdio::null()))
    }

    /// Begins to remove.
    pub(crate) fn begin(&mut self) {
        self.0.release();
    }

    /// Waits until everything is removed.
    pub(crate) fn wait(&mut self) {
        self.0.wait();
    }
}
