//! A workspace in a temporary directory, for the tests of the tools.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used)]

use std::fs;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;

use emergent_guest_tools::Context;
use proptest::prelude::ProptestConfig;

/// The cancellation flag of calls that are not cancelled.
pub static NEVER: AtomicBool = AtomicBool::new(false);

pub struct Workspace {
    _directory: tempfile::TempDir,
    pub path: PathBuf,
    pub context: Context,
}

impl Workspace {
    pub fn empty() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().canonicalize().unwrap();
        Self { context: Context::new(&path), _directory: directory, path }
    }

    /// Writes a file, and makes its directories.
    pub fn file(&self, name: &str, content: impl AsRef<[u8]>) {
        let path = self.path.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }
}

pub fn config(cases: u32) -> ProptestConfig {
    ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(cases) }
}
