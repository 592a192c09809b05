//! Which connections there are, and which one goes when there are too many.
//!
//! ```text
//!  accepted ──▶ silent ──first request──▶ known ──a request with a valid token──▶ trusted
//!                 │ no request in time, or room is needed: closed
//! ```
//!
//! A new connection is never kept waiting: when there is no room, the oldest one that has not sent a request is closed; and if
//! there is none, the oldest without a valid token, idle ones before busy ones. So connections that say nothing, or take their
//! answers one byte at a time, can't keep out others, and a health check always gets in. A new connection is refused only when
//! all are trusted.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio_util::sync::CancellationToken;

/// Connections at once.
const MOST: usize = 2048;
/// Connections of one address that have sent no valid token.
const MOST_OF_ADDRESS: usize = 256;

/// All connections of a listener.
#[derive(Default)]
pub(crate) struct Connections {
    open: Mutex<BTreeMap<u64, Arc<Connection>>>,
    next: AtomicUsize,
}

/// One connection; it counts until the [`Place`] that holds it is dropped.
pub(crate) struct Connection {
    /// None on a Unix socket.
    address: Option<IpAddr>,
    has_asked: AtomicBool,
    /// A request has begun since somebody looked.
    was_used: AtomicBool,
    is_trusted: AtomicBool,
    requests: AtomicUsize,
    /// It is to be closed.
    pub(crate) closed: CancellationToken,
}

/// A connection's place among all.
pub(crate) struct Place {
    all: Arc<Connections>,
    number: u64,
    connection: Arc<Connection>,
}

/// There is no room, and nothing that could be closed for it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct NoRoom;

impl Connections {
    fn open(&self) -> MutexGuard<'_, BTreeMap<u64, Arc<Connection>>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a connection in; another may be closed for it.
    pub(crate) fn admit(self: &Arc<Self>, address: Option<IpAddr>) -> Result<Place, NoRoom> {
        let mut open = self.open();
        let of_address =
            || open.values().filter(|one| one.address == address && !one.is_trusted() && address.is_some());
        if of_address().count() >= MOST_OF_ADDRESS {
            close_oldest(&mut open, |one| one.address == address).ok_or(NoRoom)?;
        } else if open.len() >= MOST {
            close_oldest(&mut open, |_| true).ok_or(NoRoom)?;
        }
        let connection = Arc::new(Connection {
            address,
            has_asked: AtomicBool::new(false),
            was_used: AtomicBool::new(false),
            is_trusted: AtomicBool::new(false),
            requests: AtomicUsize::new(0),
            closed: CancellationToken::new(),
        });
        let number = self.next.fetch_add(1, Ordering::Relaxed) as u64;
        open.insert(number, Arc::clone(&connection));
        drop(open);
        Ok(Place { all: Arc::clone(self), number, connection })
    }
}

/// Closes the oldest silent connection among these, else the oldest idle one that is not trusted, else any that is not.
fn close_oldest(
    open: &mut BTreeMap<u64, Arc<Connection>>,
    among: impl Fn(&Connection) -> bool,
) -> Option<()> {
    let silent = open.iter().find(|(_, one)| among(one) && !one.has_asked());
    let idle = || open.iter().find(|(_, one)| among(one) && !one.is_trusted() && !one.is_busy());
    let untrusted = || open.iter().find(|(_, one)| among(one) && !one.is_trusted());
    let number = silent.or_else(idle).or_else(untrusted).map(|(number, _)| *number)?;
    // Out of the count at once: its task ends a moment later.
    open.remove(&number)?.closed.cancel();
    Some(())
}

impl Connection {
    pub(crate) fn has_asked(&self) -> bool {
        self.has_asked.load(Ordering::Relaxed)
    }

    /// Whether a request has begun since this was last asked.
    pub(crate) fn take_used(&self) -> bool {
        self.was_used.swap(false, Ordering::Relaxed)
    }

    fn is_trusted(&self) -> bool {
        self.is_trusted.load(Ordering::Relaxed)
    }

    /// Whether a request is in progress, its answer included.
    pub(crate) fn is_busy(&self) -> bool {
        self.requests.load(Ordering::Relaxed) > 0
    }

    /// A request with a valid token came over it.
    pub(crate) fn trust(&self) {
        self.is_trusted.store(true, Ordering::Relaxed);
    }

    /// A request has begun; it ends when what is returned is dropped.
    pub(crate) fn begin_request(self: &Arc<Self>) -> RequestInProgress {
        self.has_asked.store(true, Ordering::Relaxed);
        self.was_used.store(true, Ordering::Relaxed);
        self.requests.fetch_add(1, Ordering::Relaxed);
        RequestInProgress(Arc::clone(self))
    }
}

/// A request in progress.
pub(crate) struct RequestInProgress(Arc<Connection>);

impl Drop for RequestInProgress {
    fn drop(&mut self) {
        self.0.requests.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Place {
    pub(crate) fn connection(&self) -> &Arc<Connection> {
        &self.connection
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.all.open().remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(number: u32) -> Option<IpAddr> {
        Some(IpAddr::from(std::net::Ipv4Addr::from(0x0a00_0000 + number)))
    }

    /// As many as there may be at once.
    fn all_numbers() -> std::ops::Range<u32> {
        0..u32::try_from(MOST).unwrap()
    }

    #[test]
    fn the_oldest_silent_connection_of_an_address_goes_first() {
        let all = Arc::new(Connections::default());
        let places: Vec<Place> = (0..MOST_OF_ADDRESS).map(|_| all.admit(address(1)).unwrap()).collect();
        let _asked = places[0].connection().begin_request();
        let other = all.admit(address(2)).unwrap();
        let new = all.admit(address(1)).unwrap();
        let closed: Vec<bool> = places.iter().map(|place| place.connection().closed.is_cancelled()).collect();
        assert_eq!(closed.iter().filter(|closed| **closed).count(), 1);
        assert!(closed[1], "the first has a request in progress");
        assert!(!other.connection().closed.is_cancelled() && !new.connection().closed.is_cancelled());
    }

    #[test]
    fn silent_connections_from_many_addresses_never_keep_a_new_one_out() {
        let all = Arc::new(Connections::default());
        let places: Vec<Place> = all_numbers().map(|number| all.admit(address(number)).unwrap()).collect();
        for _ in 0..100 {
            assert!(all.admit(address(1_000_000)).is_ok());
        }
        assert!(places[0].connection().closed.is_cancelled());
    }

    #[test]
    fn a_busy_connection_without_a_token_goes_last_and_a_trusted_one_never() {
        let all = Arc::new(Connections::default());
        let places: Vec<Place> = all_numbers().map(|number| all.admit(address(number)).unwrap()).collect();
        let busy: Vec<RequestInProgress> =
            places.iter().map(|place| place.connection().begin_request()).collect();
        places.iter().skip(2).for_each(|place| place.connection().trust());
        let is_closed = |index: usize| places[index].connection().closed.is_cancelled();
        let new = all.admit(address(1_000_000)).unwrap();
        assert!(is_closed(0) && !is_closed(1));
        let _asked = new.connection().begin_request();
        new.connection().trust();
        let other = all.admit(address(1_000_001)).unwrap();
        assert!(is_closed(1));
        let _asked = other.connection().begin_request();
        other.connection().trust();
        assert_eq!(all.admit(address(1_000_002)).err(), Some(NoRoom));
        assert!((2..places.len()).all(|index| !is_closed(index)));
        drop(busy);
    }
}
