//! Which servers on this database work.
//!
//! Each server counts up a number in the database. One whose number has stood still for a while, by our own steady
//! clock, is dead, and what it had begun is anybody's to finish. A SQLite file belongs to one server, so there every
//! other is dead at once.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use emergent_store::{Store, StoreError};
use emergent_wire::id::ServerId;
use tokio::sync::Notify;

/// How often a server counts.
pub(crate) const BEAT_EVERY: Duration = Duration::from_secs(4);
/// A number that stands still this long is a dead server's.
const DEAD_AFTER: Duration = Duration::from_secs(20);

/// What is known of the servers.
#[derive(Default)]
pub(crate) struct Servers {
    seen: Mutex<HashMap<ServerId, Seen>>,
    /// Another server was found dead: what it had begun is to be finished.
    pub(crate) died: Notify,
}

#[derive(Clone, Copy)]
struct Seen {
    beat: u64,
    since: Instant,
}

impl Servers {
    /// Shows the others that this server works, and looks how far they have counted.
    pub(crate) async fn look(&self, store: &Store) -> Result<(), StoreError> {
        if !store.is_shared() {
            return Ok(());
        }
        store.beat().await?;
        let beats = store.servers().await?;
        let dead = self.note(&beats, Instant::now());
        for id in dead.into_iter().filter(|id| *id != store.server()) {
            tracing::warn!(server = %id, "another server on this database has ended without a word");
            store.forget_server(id).await?;
            self.died.notify_one();
        }
        Ok(())
    }

    /// Takes down what was read; forgets and gives those that are dead.
    fn note(&self, beats: &[(ServerId, u64)], now: Instant) -> Vec<ServerId> {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        seen.retain(|id, _| beats.iter().any(|(known, _)| known == id));
        for (id, beat) in beats {
            let entry = seen.entry(*id).or_insert(Seen { beat: *beat, since: now });
            if entry.beat != *beat {
                *entry = Seen { beat: *beat, since: now };
            }
        }
        let is_dead = |seen: &Seen| now.duration_since(seen.since) >= DEAD_AFTER;
        seen.extract_if(|_, seen| is_dead(seen)).map(|(id, _)| id).collect()
    }

    /// Looks again if a row names a server that is not known. To be called between reading rows and asking whether their
    /// owners are alive: a server shows itself before it owns anything, so one that is still not known then is gone.
    pub(crate) async fn look_for(
        &self,
        owners: impl IntoIterator<Item = Option<ServerId>>,
        store: &Store,
    ) -> Result<(), StoreError> {
        let is_new = |owner: ServerId| owner != store.server() && !self.is_alive(owner);
        if owners.into_iter().flatten().any(is_new) { self.look(store).await } else { Ok(()) }
    }

    /// Whether another server works on what it owns.
    pub(crate) fn is_alive(&self, id: ServerId) -> bool {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner).contains_key(&id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_that_stops_counting_is_dead_and_one_that_goes_on_is_not() {
        let servers = Servers::default();
        let (a, b) = (ServerId::generate(), ServerId::generate());
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        assert_eq!(servers.note(&[(a, 1), (b, 1)], at(0)), []);
        assert_eq!(servers.note(&[(a, 2), (b, 1)], at(10)), []);
        assert_eq!(servers.note(&[(a, 3), (b, 1)], at(20)), [b]);
        assert!(servers.is_alive(a));
        assert!(!servers.is_alive(b));
        assert_eq!(servers.note(&[(a, 3)], at(25)), []);
        // It was only slow: it counts again.
        assert_eq!(servers.note(&[(a, 3), (b, 2)], at(30)), []);
        assert!(servers.is_alive(b));
    }
}
