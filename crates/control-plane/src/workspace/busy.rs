//! Counts the calls in progress of a workspace.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::live::Live;

/// A call in progress; it ends when this is dropped.
pub(crate) struct Busy(Arc<Live>);

impl Busy {
    pub(super) fn begin(live: &Arc<Live>) -> Self {
        live.calls.fetch_add(1, Ordering::SeqCst);
        Self(Arc::clone(live))
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.calls.fetch_sub(1, Ordering::SeqCst);
    }
}
