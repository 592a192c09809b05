//! The servers that share this database.
//!
//! Each server increments a number in the database, its heartbeat. A server whose number does not change for some time, measured by
//! this server's monotonic clock, is dead. Other servers may then finish its work. A SQLite file belongs to one server, so all other
//! servers are dead there.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use emergent_store::{Store, StoreError};
use emergent_wire::id::ServerId;
use parking_lot::Mutex;
use tokio::sync::Notify;

/// The interval of heartbeats.
pub(crate) const BEAT_EVERY: Duration = Duration::from_secs(4);
/// A server without a heartbeat for this time is dead.
const DEAD_AFTER: Duration = Duration::from_secs(20);

/// The running servers, as this server has observed them.
#[derive(Default)]
pub(crate) struct Servers {
    running: Mutex<HashMap<ServerId, Heartbeat>>,
    /// Notified when another server is dead, so that recovery finishes its work.
    pub(crate) died: Notify,
}

/// The last heartbeat of a server.
#[derive(Clone, Copy)]
struct Heartbeat {
    number: u64,
    since: Instant,
    /// Whether the number has changed since it was first observed.
    has_changed: bool,
}

impl Servers {
    /// Writes this server's heartbeat and reads those of the others.
    pub(crate) async fn refresh(&self, store: &Store) -> Result<(), StoreError> {
        if !store.is_shared() {
            return Ok(());
        }
        store.beat().await?;
        let numbers = store.servers().await?;
        let dead = self.record(&numbers, Instant::now());
        for id in dead.into_iter().filter(|id| *id != store.server()) {
            tracing::warn!(server = %id, "another server on this database has crashed");
            store.forget_server(id).await?;
            self.died.notify_one();
        }
        Ok(())
    }

    /// Records the numbers that were read. Removes and returns the servers that are dead.
    fn record(&self, numbers: &[(ServerId, u64)], now: Instant) -> Vec<ServerId> {
        let mut running = self.running.lock();
        running.retain(|id, _| numbers.iter().any(|(known, _)| known == id));
        for (id, number) in numbers {
            let first = Heartbeat { number: *number, since: now, has_changed: false };
            let known = running.entry(*id).or_insert(first);
            if known.number != *number {
                *known = Heartbeat { number: *number, since: now, has_changed: true };
            }
        }
        let is_dead = |heartbeat: &Heartbeat| now.duration_since(heartbeat.since) >= DEAD_AFTER;
        running.extract_if(|_, heartbeat| is_dead(heartbeat)).map(|(id, _)| id).collect()
    }

    /// Refreshes if one of these owners is not known. Call it after reading rows and before [`is_alive`](Self::is_alive) of their
    /// owners: a server writes its first heartbeat before it owns a row, so an owner that is still unknown has ended.
    pub(crate) async fn refresh_for(
        &self,
        owners: impl IntoIterator<Item = Option<ServerId>>,
        store: &Store,
    ) -> Result<(), StoreError> {
        let is_new = |owner: ServerId| owner != store.server() && !self.is_alive(owner);
        if owners.into_iter().flatten().any(is_new) { self.refresh(store).await } else { Ok(()) }
    }

    /// Whether this server is the last one: no other has had a heartbeat since it was first observed, and none has one now.
    pub(crate) async fn is_last(&self, store: &Store) -> Result<bool, StoreError> {
        let others = store.servers().await?;
        let has_heartbeat = {
            let running = self.running.lock();
            let is_running =
                |(id, _): &&(ServerId, u64)| running.get(id).is_some_and(|known| known.has_changed);
            others.iter().filter(|(id, _)| *id != store.server()).any(|other| is_running(&other))
        };
        Ok(!has_heartbeat && !another_is_running(store).await?)
    }

    /// Whether a server is running.
    pub(crate) fn is_alive(&self, id: ServerId) -> bool {
        self.running.lock().contains_key(&id)
    }
}

/// Waits for a heartbeat of another server, longer than the interval of heartbeats. Returns whether there was one.
pub(crate) async fn another_is_running(store: &Store) -> Result<bool, StoreError> {
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
    fn a_server_without_a_heartbeat_is_dead() {
        let servers = Servers::default();
        let (a, b) = (ServerId::generate(), ServerId::generate());
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        assert_eq!(servers.record(&[(a, 1), (b, 1)], at(0)), []);
        assert_eq!(servers.record(&[(a, 2), (b, 1)], at(10)), []);
        assert_eq!(servers.record(&[(a, 3), (b, 1)], at(20)), [b]);
        assert!(servers.is_alive(a));
        assert!(!servers.is_alive(b));
        assert_eq!(servers.record(&[(a, 3)], at(25)), []);
        // It was only slow, and has a heartbeat again.
        assert_eq!(servers.record(&[(a, 3), (b, 2)], at(30)), []);
        assert!(servers.is_alive(b));
    }
}
