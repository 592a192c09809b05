//! The limit on large files that are in memory at once.
//!
//! A file is large if it has more bytes than other requests may have. Before a call reads a large request, or holds more than that of a
//! file that it collects, it waits for a place. So a sandbox that is restarted, or an agent that sends nothing, keeps no place. One
//! workspace has at most half of the places, so that it can't keep the others waiting.

use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::Duration;

use emergent_wire::WorkspaceId;
use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::error::ToolError;

/// The limit on large files that are in memory at once while they are transferred.
const MAX_LARGE_FILES: usize = 4;
/// The limit on those of one workspace.
const MAX_OF_WORKSPACE: usize = MAX_LARGE_FILES / 2;
/// The time that a call waits at these limits.
const WAIT_FOR_PLACE: Duration = Duration::from_secs(30);

/// The places for large files.
pub(super) struct LargeFiles {
    places: Arc<Semaphore>,
    /// The places of the workspaces that use or want some.
    of_workspaces: Mutex<HashMap<WorkspaceId, Weak<Semaphore>>>,
}

/// A place for a large file.
pub(crate) struct LargeFile {
    _place: OwnedSemaphorePermit,
    _of_workspace: OwnedSemaphorePermit,
}

impl Default for LargeFiles {
    fn default() -> Self {
        Self { places: Arc::new(Semaphore::new(MAX_LARGE_FILES)), of_workspaces: Mutex::default() }
    }
}

impl LargeFiles {
    /// Waits for a place.
    pub(super) async fn place(&self, id: WorkspaceId) -> Result<LargeFile, ToolError> {
        let place = async {
            let of_workspace = self.of_workspace(id).acquire_owned().await.ok()?;
            let place = Arc::clone(&self.places).acquire_owned().await.ok()?;
            Some(LargeFile { _place: place, _of_workspace: of_workspace })
        };
        let place = tokio::time::timeout(WAIT_FOR_PLACE, place).await;
        place.ok().flatten().ok_or(ToolError::TooManyLargeFiles)
    }

    fn of_workspace(&self, id: WorkspaceId) -> Arc<Semaphore> {
        let mut all = self.of_workspaces.lock();
        if let Some(known) = all.get(&id).and_then(Weak::upgrade) {
            return known;
        }
        all.retain(|_, places| places.strong_count() > 0);
        let new = Arc::new(Semaphore::new(MAX_OF_WORKSPACE));
        all.insert(id, Arc::downgrade(&new));
        new
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_workspace_leaves_places_to_others() {
        let files = LargeFiles::default();
        let (greedy, other) = (WorkspaceId::generate(), WorkspaceId::generate());
        let mut taken = Vec::new();
        for id in [greedy, greedy, other, other] {
            assert!(matches!(files.place(greedy).await, Err(ToolError::TooManyLargeFiles)) == (id == other));
            taken.push(files.place(id).await.unwrap());
        }
        assert!(matches!(files.place(WorkspaceId::generate()).await, Err(ToolError::TooManyLargeFiles)));
        drop(taken);
        files.place(greedy).await.unwrap();
        assert_eq!(files.of_workspaces.lock().len(), 1);
    }
}
