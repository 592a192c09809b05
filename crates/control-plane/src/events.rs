//! What happens, told to whoever listens.

use std::sync::{Mutex, MutexGuard, PoisonError};

use chrono::Utc;
use emergent_wire::WorkspaceId;
use emergent_wire::event::{Event, EventKind};
use emergent_wire::workspace::ProviderName;
use tokio::sync::broadcast;

/// Events that a slow listener may be behind before it misses some.
const KEPT: usize = 1024;

/// Where events go.
pub(crate) struct Events {
    /// None once the server ends.
    sender: Mutex<Option<broadcast::Sender<Event>>>,
}

impl Default for Events {
    fn default() -> Self {
        Self { sender: Mutex::new(Some(broadcast::Sender::new(KEPT))) }
    }
}

impl Events {
    fn sender(&self) -> MutexGuard<'_, Option<broadcast::Sender<Event>>> {
        self.sender.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Everything that happens from now on; none when the server ends.
    pub(crate) fn listen(&self) -> Option<broadcast::Receiver<Event>> {
        self.sender().as_ref().map(broadcast::Sender::subscribe)
    }

    /// The server ends: listeners are let go when they have heard everything.
    pub(crate) fn end(&self) {
        *self.sender() = None;
    }

    /// Something happened to a workspace.
    pub(crate) fn workspace(&self, kind: EventKind, id: WorkspaceId, message: impl Into<String>) {
        self.tell(Event {
            at: Utc::now(),
            kind,
            workspace_id: Some(id),
            provider: None,
            message: message.into(),
        });
    }

    /// Something happened to a provider.
    pub(crate) fn provider(&self, kind: EventKind, name: ProviderName, message: impl Into<String>) {
        self.tell(Event {
            at: Utc::now(),
            kind,
            workspace_id: None,
            provider: Some(name),
            message: message.into(),
        });
    }

    /// Anything else that happened.
    pub(crate) fn tell(&self, event: Event) {
        metrics::counter!("emergent_events_total", "kind" => event.kind.as_str()).increment(1);
        if let Some(sender) = self.sender().as_ref() {
            // Nobody listening is fine.
            let _ = sender.send(event);
        }
    }
}
