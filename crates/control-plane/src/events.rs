//! The events of the server, published to all listeners.

use chrono::Utc;
use emergent_wire::WorkspaceId;
use emergent_wire::event::{Event, EventKind};
use emergent_wire::workspace::ProviderName;
use parking_lot::Mutex;
use tokio::sync::broadcast;

/// The number of events that are kept for a slow listener. A listener that is further behind misses events.
const MAX_BACKLOG: usize = 1024;

/// Publishes events.
pub(crate) struct Events {
    /// None after the shutdown of the server has begun.
    sender: Mutex<Option<broadcast::Sender<Event>>>,
}

impl Default for Events {
    fn default() -> Self {
        Self { sender: Mutex::new(Some(broadcast::Sender::new(MAX_BACKLOG))) }
    }
}

impl Events {
    /// A receiver of all further events. None during shutdown.
    pub(crate) fn listen(&self) -> Option<broadcast::Receiver<Event>> {
        self.sender.lock().as_ref().map(broadcast::Sender::subscribe)
    }

    /// Ends the streams of all listeners after the events that are published already.
    pub(crate) fn close(&self) {
        *self.sender.lock() = None;
    }

    /// Publishes an event of a workspace.
    pub(crate) fn workspace(&self, kind: EventKind, id: WorkspaceId, message: impl Into<String>) {
        self.publish(Event {
            at: Utc::now(),
            kind,
            workspace_id: Some(id),
            provider: None,
            message: message.into(),
        });
    }

    /// Publishes an event of a provider.
    pub(crate) fn provider(&self, kind: EventKind, name: ProviderName, message: impl Into<String>) {
        self.publish(Event {
            at: Utc::now(),
            kind,
            workspace_id: None,
            provider: Some(name),
            message: message.into(),
        });
    }

    /// Publishes an event.
    pub(crate) fn publish(&self, event: Event) {
        metrics::counter!("emergent_events_total", "kind" => event.kind.as_str()).increment(1);
        if let Some(sender) = self.sender.lock().as_ref() {
            // An error means that there is no listener.
            let _ = sender.send(event);
        }
    }
}
