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
    /// Whether it has counted while we looked.
    has_counted: bool,
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
            let entry = seen.entry(*id).or_insert(Seen { beat: *beat, since: now, has_counted: false });
            if entry.beat != *beat {
                *entry = Seen { beat: *beat, since: now, has_counted: true };
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

    /// Whether this server is the last one: no other has counted since it was seen first, nor does now.
    pub(crate) async fn is_last(&self, store: &Store) -> Result<bool, StoreError> {
        let others = store.servers().await?;
        let has_counted = {
            let seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
            let counted = |(id, _): &&(ServerId, u64)| seen.get(id).is_some_and(|seen| seen.has_counted);
            others.iter().filter(|(id, _)| *id != store.server()).any(|other| counted(&other))
        };
        Ok(!has_counted && !another_works(store).await?)
    }

    /// Whether another server works on what it owns.
    pub(crate) fn is_alive(&self, id: ServerId) -> bool {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner).contains_key(&id)
    }
}

/// Whether another server counts while we look, for as long as one that works needs to.
pub(crate) async fn another_works(store: &Store) -> Result<bool, StoreError> {
    let mut before = store.servers().await?;
    before.retain(|(id, _)| *id != store.server());
    if before.is_empty() {
        return Ok(false);
    }
    tokio::time::sleep(BEAT_EVERY * 2 + Duration::from_secs(1)).await;
    let after = store.servers().await?;
    Ok(after.iter().any(|server| server.0 != store.server() && !before.contains(server)))
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
