//! The sessions of one server, and their limit.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use crate::Refusal;
use crate::peer::Caller;
use crate::session::Session;
use parking_lot::Mutex;

/// The sessions of one server.
pub(crate) struct Sessions<C: Caller> {
    max: usize,
    idle: Duration,
    /// A session that was not used for this time may be ended for a new one.
    replaceable_after: Duration,
    table: Mutex<Table<C>>,
}

struct Table<C: Caller> {
    open: HashMap<String, Arc<Session<C>>>,
    /// Places that are reserved for sessions whose `initialize` is in progress.
    reserved: usize,
}

/// A place for a session whose `initialize` is in progress. It is free again when this is dropped.
pub(crate) struct Reservation<'a, C: Caller>(&'a Sessions<C>);

impl<C: Caller> Sessions<C> {
    pub(crate) fn new(max: usize, idle: Duration, replaceable_after: Duration) -> Self {
        let table = Mutex::new(Table { open: HashMap::new(), reserved: 0 });
        Self { max, idle, replaceable_after, table }
    }

    /// An open session of this owner.
    pub(crate) fn get(&self, id: &str, owner: &C::Owner) -> Option<Arc<Session<C>>> {
        let session = self.table.lock().open.get(id).cloned()?;
        if !session.belongs_to(owner) {
            return None;
        }
        if session.is_over(self.idle) {
            self.remove(id);
            return None;
        }
        Some(session)
    }

    /// Reserves a place for a new session. At the limit the session that was idle for longest is ended, because many clients
    /// never end theirs. A session with a request in progress is never ended for another.
    pub(crate) fn reserve(&self) -> Result<Reservation<'_, C>, Refusal> {
        self.sweep();
        let mut table = self.table.lock();
        let mut replaced = None;
        if table.open.len() + table.reserved >= self.max {
            let idle = table.open.values().filter_map(|session| {
                let uses = session.uses();
                let is_idle = uses.requests == 0 && uses.last.elapsed() >= self.replaceable_after;
                is_idle.then_some((uses.streams > 0, uses.last, &session.id))
            });
            let id = idle.min().map(|(.., id)| id.clone());
            replaced = id.and_then(|id| table.open.remove(&id));
            if replaced.is_none() {
                return Err(Refusal::TooManySessions(self.max));
            }
        }
        table.reserved += 1;
        drop(table);
        if let Some(session) = replaced {
            session.close();
        }
        Ok(Reservation(self))
    }

    /// Ends a session. False when there is none.
    pub(crate) fn remove(&self, id: &str) -> bool {
        let removed = self.table.lock().open.remove(id);
        removed.is_some_and(|session| {
            session.close();
            true
        })
    }

    /// Ends the sessions that were idle for too long.
    pub(crate) fn sweep(&self) {
        let over: Vec<_> = self
            .table
            .lock()
            .open
            .extract_if(|_, session| session.is_over(self.idle))
            .map(|(_, over)| over)
            .collect();
        over.iter().for_each(|session| session.close());
    }

    /// Ends all sessions.
    pub(crate) fn remove_all(&self) {
        let all = std::mem::take(&mut self.table.lock().open);
        all.values().for_each(|session| session.close());
    }

    /// Requests in progress.
    pub(crate) fn requests(&self) -> usize {
        self.table.lock().open.values().map(|session| session.uses().requests).sum()
    }

    pub(crate) fn count(&self) -> usize {
        self.table.lock().open.len()
    }
}

impl<C: Caller> Reservation<'_, C> {
    /// Puts the session at the reserved place.
    pub(crate) fn fill(self, session: &Arc<Session<C>>) {
        self.0.table.lock().open.insert(session.id.clone(), Arc::clone(session));
    }
}

impl<C: Caller> Drop for Reservation<'_, C> {
    fn drop(&mut self) {
        self.0.table.lock().reserved -= 1;
    }
}

impl<C: Caller> Drop for Sessions<C> {
    fn drop(&mut self) {
        self.remove_all();
    }
}
