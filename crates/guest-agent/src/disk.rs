//! The disk limit where no file system enforces it: the agent measures, and refuses to write over it.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use emergent_wire::tools::WORKSPACE_DIR;
use emergent_wire::{ErrorCode, ErrorDetail};

use crate::agent::Agent;

/// A measurement is used for at least this long, and for ten times as long as it took.
const MEASURE_EVERY: Duration = Duration::from_secs(2);

/// The last measurement.
#[derive(Default)]
pub(crate) struct Watch {
    last: Mutex<Option<Measured>>,
}

#[derive(Clone, Copy)]
struct Measured {
    used: u64,
    until: Instant,
}

impl Watch {
    /// Refuses when the workspace is over a limit that the agent must watch.
    pub(crate) fn refuse_if_full(&self, agent: &Agent) -> Result<(), ErrorDetail> {
        let Some(limit) = agent.configuration().watched_disk_bytes else {
            return Ok(());
        };
        let used = self.used();
        if used < limit {
            return Ok(());
        }
        let message =
            format!("the workspace's disk is full: {used} of {limit} bytes are used; remove files to go on");
        // Removing files must stay possible, so only the tools that write refuse.
        Err(ErrorDetail::new(ErrorCode::DiskFull, message))
    }

    /// Bytes used under the workspace, measured not too often.
    pub(crate) fn used(&self) -> u64 {
        let now = Instant::now();
        let mut last = self.last.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some(measured) = *last
            && now < measured.until
        {
            return measured.used;
        }
        let used = size_of(Path::new(WORKSPACE_DIR));
        let pause = MEASURE_EVERY.max(now.elapsed() * 10);
        *last = Some(Measured { used, until: Instant::now() + pause });
        used
    }
}

/// Blocks used by all files below a directory; hard links count once each.
fn size_of(directory: &Path) -> u64 {
    let mut total = 0;
    let mut left = vec![directory.to_owned()];
    while let Some(directory) = left.pop() {
        for entry in std::fs::read_dir(&directory).into_iter().flatten().flatten() {
            let Ok(metadata) = entry.metadata() else { continue };
            total += metadata.blocks() * 512;
            if metadata.is_dir() {
                left.push(entry.path());
            }
        }
    }
    total
}

/// Used and total bytes of the file system under the workspace.
pub(crate) fn file_system() -> (u64, u64) {
    rustix::fs::statvfs(WORKSPACE_DIR).map_or((0, 0), |stat| {
        let total = stat.f_blocks * stat.f_frsize;
        (total - stat.f_bfree * stat.f_frsize, total)
    })
}
