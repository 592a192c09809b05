//! The sessions of one server, and their limit.
//!
//! A session has a place from its `initialize` on, so that sessions that begin at once stay within the limit.
//!
//! One owner may have all places until another one needs some. At the limit a new session replaces an idle one, of the owner with
//! the most sessions. If none is idle, it replaces the one that was not used for longest, of an owner with more sessions than its
//! own will have. So no owner can keep others out, or end sessions of an owner that has fewer. A session with a request in progress
//! is never ended for another.

use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::mpsc;

use crate::Refusal;
use crate::peer::{Caller, Peer};
use crate::session::Session;

/// The sessions of one server.
pub(crate) struct Sessions<C: Caller> {
    max: usize,
    idle: Duration,
    /// A session that was not used for this time may be ended for a new one.
    replaceable_after: Duration,
    places: Mutex<Places<C>>,
}

/// The places that are taken, by the ids of their sessions.
type Places<C> = HashMap<String, Place<C>>;

struct Place<C: Caller> {
    owner: <C as Caller>::Owner,
    /// None while `initialize` is in progress.
    session: Option<Arc<Session<C>>>,
}

/// The place of a session whose `initialize` is in progress. Dropped before the session begins, it frees the place.
pub(crate) struct Reservation<'a, C: Caller> {
    sessions: &'a Sessions<C>,
    id: String,
}

impl<C: Caller> Sessions<C> {
    pub(crate) fn new(max: usize, idle: Duration, replaceable_after: Duration) -> Self {
        Self { max, idle, replaceable_after, places: Mutex::default() }
    }

    /// An open session of this owner.
    pub(crate) fn get(&self, id: &str, owner: &C::Owner) -> Option<Arc<Session<C>>> {
        let session = {
            let places = self.places.lock();
            places.get(id).filter(|place| place.owner == *owner)?.session.clone()?
        };
        if session.is_over(self.idle) {
            self.remove(id);
            return None;
        }
        Some(session)
    }

    /// Reserves a place for a new session. At the limit another session is ended for it, because many clients never end theirs.
    pub(crate) fn reserve(&self, owner: C::Owner) -> Result<Reservation<'_, C>, Refusal> {
        self.sweep();
        let id = uuid::Uuid::new_v4().to_string();
        let mut places = self.places.lock();
        let mut replaced = None;
        if places.len() >= self.max {
            let found = self.replaceable(&places, &owner).ok_or(Refusal::TooManySessions(self.max))?;
            replaced = places.remove(&found);
        }
        places.insert(id.clone(), Place { owner, session: None });
        drop(places);
        if let Some(session) = replaced.and_then(|place| place.session) {
            session.close();
        }
        Ok(Reservation { sessions: self, id })
    }

    /// The session that is ended for a new one of this owner: an idle one, or one of an owner that has more sessions.
    fn replaceable(&self, places: &Places<C>, owner: &C::Owner) -> Option<String> {
        let mut counts: HashMap<&C::Owner, usize> = HashMap::new();
        for place in places.values() {
            *counts.entry(&place.owner).or_default() += 1;
        }
        let own = counts.get(owner).copied().unwrap_or_default();
        let candidates = places.iter().filter_map(|(id, place)| {
            let uses = place.session.as_ref()?.uses();
            let is_idle = uses.idle_for()? >= self.replaceable_after;
            let count = counts.get(&place.owner).copied().unwrap_or_default();
            let has_more = count > own + 1;
            (is_idle || has_more).then_some((!is_idle, Reverse(count), uses.streams > 0, uses.last, id))
        });
        candidates.min().map(|(.., id)| id.clone())
    }

    /// Ends a session. False when there is none.
    pub(crate) fn remove(&self, id: &str) -> bool {
        let removed = self.places.lock().remove(id);
        removed.and_then(|place| place.session).is_some_and(|session| {
            session.close();
            true
        })
    }

    /// Ends the sessions that were idle for too long.
    pub(crate) fn sweep(&self) {
        self.remove_where(|place| place.session.as_ref().is_some_and(|session| session.is_over(self.idle)));
    }

    /// Ends the sessions of an owner. Those that begin now do not begin.
    pub(crate) fn remove_owner(&self, owner: &C::Owner) {
        self.remove_where(|place| place.owner == *owner);
    }

    pub(crate) fn owners(&self) -> HashSet<C::Owner> {
        self.places.lock().values().map(|place| place.owner.clone()).collect()
    }

    /// Ends all sessions. Those that begin now do not begin.
    pub(crate) fn remove_all(&self) {
        self.remove_where(|_| true);
    }

    fn remove_where(&self, is_removed: impl Fn(&Place<C>) -> bool) {
        let removed: Vec<_> = self.places.lock().extract_if(|_, place| is_removed(place)).collect();
        removed.iter().filter_map(|(_, place)| place.session.as_ref()).for_each(|session| session.close());
    }

    /// Requests in progress.
    pub(crate) fn requests(&self) -> usize {
        let places = self.places.lock();
        let open = places.values().filter_map(|place| place.session.as_ref());
        open.map(|session| session.uses().requests).sum()
    }

    /// Sessions that are open.
    pub(crate) fn count(&self) -> usize {
        self.places.lock().values().filter(|place| place.session.is_some()).count()
    }
}

impl<C: Caller> Reservation<'_, C> {
    /// Begins the session at the reserved place. None when the sessions were ended meanwhile.
    pub(crate) fn begin(
        self,
        peer: Arc<dyn Peer<C>>,
        notifications: Option<mpsc::Receiver<String>>,
        accepts_empty_events: bool,
    ) -> Option<Arc<Session<C>>> {
        let session = Session::begin(self.id.clone(), peer, notifications, accepts_empty_events);
        let mut places = self.sessions.places.lock();
        places.get_mut(&self.id)?.session = Some(Arc::clone(&session));
        drop(places);
        Some(session)
    }
}

impl<C: Caller> Drop for Reservation<'_, C> {
    fn drop(&mut self) {
        let mut places = self.sessions.places.lock();
        if places.get(&self.id).is_some_and(|place| place.session.is_none()) {
            places.remove(&self.id);
        }
    }
}

impl<C: Caller> Drop for Sessions<C> {
    fn drop(&mut self) {
        self.remove_all();
    }
}

#[cfg(test)]
mod tests {
    use async_trait::async_trait;
    use emergent_mcp_protocol::envelope::Message;

    use super::*;
    use crate::peer::{Exchange, PeerError};

    #[derive(Clone)]
    struct Anyone;

    impl Caller for Anyone {
        type Owner = ();

        fn owner(&self) {}
    }

    struct Idle;

    #[async_trait]
    impl Peer<Anyone> for Idle {
        async fn request(&self, _: &Message<'_>, _: &Anyone) -> Result<Box<dyn Exchange>, PeerError> {
            Err(PeerError::DuplicateId)
        }

        async fn notify(&self, _: &Message<'_>) {}

        async fn answer(&self, _: &Message<'_>) {}

        fn is_closed(&self) -> bool {
            false
        }

        fn close(&self) {}
    }

    /// At most two sessions, which are never replaced.
    fn sessions() -> Sessions<Anyone> {
        let hour = Duration::from_secs(3600);
        Sessions::new(2, hour, hour)
    }

    #[test]
    fn a_session_that_begins_while_those_of_its_owner_are_ended_does_not_begin() {
        let sessions = sessions();
        let place = sessions.reserve(()).unwrap();
        assert_eq!(sessions.owners(), HashSet::from([()]));
        sessions.remove_owner(&());
        assert!(place.begin(Arc::new(Idle), None, false).is_none());
        assert_eq!((sessions.count(), sessions.owners().len()), (0, 0));
    }

    #[test]
    fn a_place_is_counted_once_while_its_session_begins() {
        // The two threads have at most one place each.
        let sessions = sessions();
        let begin_and_end = || {
            for _ in 0..50_000 {
                let place = sessions.reserve(()).unwrap();
                let session = place.begin(Arc::new(Idle), None, false).unwrap();
                assert!(sessions.remove(&session.id));
            }
        };
        std::thread::scope(|scope| {
            scope.spawn(begin_and_end);
            scope.spawn(begin_and_end);
        });
    }
}
