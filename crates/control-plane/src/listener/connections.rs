//! The limits on connections: in all, and for each address.
//!
//! ```text
//!  accepted ──▶ silent ──first request──▶ known ──a request with a valid token──▶ trusted
//!                 │ no request in time, or a new connection at the limit: closed
//! ```
//!
//! A new connection never waits. At the limit, an older connection is closed for it: the oldest silent one, else the oldest idle
//! one that is not trusted, else the oldest busy one that is not trusted. So clients that send nothing, or read their answers one
//! byte at a time, can't keep others out, and a health check is always served. A new connection is refused only when all
//! connections are trusted.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;

/// The limit on connections of a listener.
const MAX_CONNECTIONS: usize = 2048;
/// The limit on connections of one address that are not trusted.
const MAX_OF_ADDRESS: usize = 256;

/// All connections of a listener.
#[derive(Default)]
pub(crate) struct Connections {
    open: Mutex<BTreeMap<u64, Arc<Connection>>>,
    next: AtomicUsize,
}

/// One connection.
pub(crate) struct Connection {
    /// None on a Unix socket.
    address: Option<IpAddr>,
    has_sent_request: AtomicBool,
    /// A request has begun since the last [`Connection::take_used`].
    was_used: AtomicBool,
    is_trusted: AtomicBool,
    requests: AtomicUsize,
    /// Cancelled when the connection is to be closed.
    pub(super) closed: CancellationToken,
}

/// Counts a connection until it is dropped.
pub(crate) struct ConnectionSlot {
    all: Arc<Connections>,
    number: u64,
    connection: Arc<Connection>,
}

/// The limit is reached, and all connections are trusted.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct AllTrusted;

impl Connections {
    /// Admits a connection. At the limit, another one is closed.
    pub(crate) fn admit(self: &Arc<Self>, address: Option<IpAddr>) -> Result<ConnectionSlot, AllTrusted> {
        let mut open = self.open.lock();
        let of_address =
            || open.values().filter(|one| one.address == address && !one.is_trusted() && address.is_some());
        if of_address().count() >= MAX_OF_ADDRESS {
            close_oldest(&mut open, |one| one.address == address).ok_or(AllTrusted)?;
        } else if open.len() >= MAX_CONNECTIONS {
            close_oldest(&mut open, |_| true).ok_or(AllTrusted)?;
        }
        let connection = Arc::new(Connection {
            address,
            has_sent_request: AtomicBool::new(false),
            was_used: AtomicBool::new(false),
            is_trusted: AtomicBool::new(false),
            requests: AtomicUsize::new(0),
            closed: CancellationToken::new(),
        });
        let number = self.next.fetch_add(1, Ordering::Relaxed) as u64;
        open.insert(number, Arc::clone(&connection));
        drop(open);
        Ok(ConnectionSlot { all: Arc::clone(self), number, connection })
    }
}

/// Closes one of the connections that `among` selects: the oldest silent one, else the oldest idle one that is not trusted, else
/// the oldest that is not trusted.
fn close_oldest(
    open: &mut BTreeMap<u64, Arc<Connection>>,
    among: impl Fn(&Connection) -> bool,
) -> Option<()> {
    let silent = open.iter().find(|(_, one)| among(one) && !one.has_sent_request());
    let idle = || open.iter().find(|(_, one)| among(one) && !one.is_trusted() && !one.is_busy());
    let untrusted = || open.iter().find(|(_, one)| among(one) && !one.is_trusted());
    let number = silent.or_else(idle).or_else(untrusted).map(|(number, _)| *number)?;
    // It stops counting now. Its task ends a moment later.
    open.remove(&number)?.closed.cancel();
    Some(())
}

impl Connection {
    pub(crate) fn has_sent_request(&self) -> bool {
        self.has_sent_request.load(Ordering::Relaxed)
    }

    /// Whether a request has begun since the last call of this function.
    pub(crate) fn take_used(&self) -> bool {
        self.was_used.swap(false, Ordering::Relaxed)
    }

    fn is_trusted(&self) -> bool {
        self.is_trusted.load(Ordering::Relaxed)
    }

    /// Whether a request or its answer is in progress.
    pub(crate) fn is_busy(&self) -> bool {
        self.requests.load(Ordering::Relaxed) > 0
    }

    /// Marks the connection as trusted, because it has sent a valid token.
    pub(crate) fn trust(&self) {
        self.is_trusted.store(true, Ordering::Relaxed);
    }

    /// Counts a request until the returned guard is dropped.
    pub(crate) fn begin_request(self: &Arc<Self>) -> RequestGuard {
        self.has_sent_request.store(true, Ordering::Relaxed);
        self.was_used.store(true, Ordering::Relaxed);
        self.requests.fetch_add(1, Ordering::Relaxed);
        RequestGuard(Arc::clone(self))
    }
}

/// Counts a request in progress.
pub(crate) struct RequestGuard(Arc<Connection>);

impl Drop for RequestGuard {
    fn drop(&mut self) {
        self.0.requests.fetch_sub(1, Ordering::Relaxed);
    }
}

impl ConnectionSlot {
    pub(crate) fn connection(&self) -> &Arc<Connection> {
        &self.connection
    }
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        self.all.open.lock().remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(number: u32) -> Option<IpAddr> {
        Some(IpAddr::from(std::net::Ipv4Addr::from(0x0a00_0000 + number)))
    }

    /// One number for each connection up to the limit.
    fn all_numbers() -> std::ops::Range<u32> {
        0..u32::try_from(MAX_CONNECTIONS).unwrap()
    }

    #[test]
    fn at_the_limit_of_an_address_its_oldest_silent_connection_is_closed() {
        let all = Arc::new(Connections::default());
        let slots: Vec<ConnectionSlot> =
            (0..MAX_OF_ADDRESS).map(|_| all.admit(address(1)).unwrap()).collect();
        let _request = slots[0].connection().begin_request();
        let other = all.admit(address(2)).unwrap();
        let new = all.admit(address(1)).unwrap();
        let closed: Vec<bool> = slots.iter().map(|slot| slot.connection().closed.is_cancelled()).collect();
        assert_eq!(closed.iter().filter(|closed| **closed).count(), 1);
        assert!(closed[1], "the first has a request in progress");
        assert!(!other.connection().closed.is_cancelled() && !new.connection().closed.is_cancelled());
    }

    #[test]
    fn silent_connections_from_many_addresses_never_keep_a_new_one_out() {
        let all = Arc::new(Connections::default());
        let slots: Vec<ConnectionSlot> =
            all_numbers().map(|number| all.admit(address(number)).unwrap()).collect();
        for _ in 0..100 {
            assert!(all.admit(address(1_000_000)).is_ok());
        }
        assert!(slots[0].connection().closed.is_cancelled());
    }

    #[test]
    fn busy_connections_without_a_token_are_closed_last_and_trusted_ones_never() {
        let all = Arc::new(Connections::default());
        let slots: Vec<ConnectionSlot> =
            all_numbers().map(|number| all.admit(address(number)).unwrap()).collect();
        let busy: Vec<RequestGuard> = slots.iter().map(|slot| slot.connection().begin_request()).collect();
        slots.iter().skip(2).for_each(|slot| slot.connection().trust());
        let is_closed = |index: usize| slots[index].connection().closed.is_cancelled();
        let new = all.admit(address(1_000_000)).unwrap();
        assert!(is_closed(0) && !is_closed(1));
        let _request = new.connection().begin_request();
        new.connection().trust();
        let other = all.admit(address(1_000_001)).unwrap();
        assert!(is_closed(1));
        let _request = other.connection().begin_request();
        other.connection().trust();
        assert_eq!(all.admit(address(1_000_002)).err(), Some(AllTrusted));
        assert!((2..slots.len()).all(|index| !is_closed(index)));
        drop(busy);
    }
}
