//! A port of the sandbox whose connections go to the host.
//!
//! ```text
//! program ──connect──▶ pending ──a parked ACCEPT call──▶ connected ──both sides ended──▶ closed, RESULT
//!                         │                                 │
//!                         │ 10 s                            ├─ CANCEL after INPUT_END ─▶ lingering ─▶ closed
//!                         ▼                                 └─ CANCEL, error ─▶ reset, ERROR
//!                       closed
//! ```
//! One thread serves a listener, with `poll`: the LISTEN call's own. ACCEPT calls have no thread, so connections work
//! when the sandbox can't start another thread. Programs in the sandbox may be hostile: the thread takes connections only
//! while fewer than [`MAX_PENDING`] wait for an ACCEPT call, the kernel keeps [`BACKLOG`] more and refuses the others.

mod connection;

use std::collections::VecDeque;
use std::io;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use connection::Connection;
use emergent_guest_protocol::{ListenCall, Listening};
use emergent_wire::{ErrorCode, ErrorDetail};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};

use crate::call::{Call, cancelled};
use crate::wake::Wake;

/// Connections that wait in the agent for an ACCEPT call.
const MAX_PENDING: usize = 128;
/// Connections that wait in the kernel.
const BACKLOG: i32 = 1024;
/// The time that a connection waits in the agent for an ACCEPT call.
const PENDING_TIME: Duration = Duration::from_secs(10);
/// The pause after the kernel refused to hand over a connection (no descriptors, no memory).
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// The size of the buffer that all connections of a listener share.
const BUFFER_BYTES: usize = 32 * 1024;

/// The parked ACCEPT calls of a listener. The channel's reader adds them, the listener's thread takes them.
pub(crate) struct Parking {
    /// Wakes the listener's thread.
    wake: Arc<Wake>,
    state: Mutex<Parked>,
}

#[derive(Default)]
struct Parked {
    calls: VecDeque<Arc<Call>>,
    is_closed: bool,
}

impl Parking {
    pub(crate) fn new(wake: Arc<Wake>) -> Self {
        Self { wake, state: Mutex::default() }
    }

    pub(crate) fn wake(&self) -> Arc<Wake> {
        Arc::clone(&self.wake)
    }

    fn state(&self) -> MutexGuard<'_, Parked> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Parks a call. Gives it back when the listener has ended.
    pub(crate) fn park(&self, call: Arc<Call>) -> Result<(), Arc<Call>> {
        let mut state = self.state();
        if state.is_closed {
            return Err(call);
        }
        state.calls.push_back(call);
        drop(state);
        self.wake.set();
        Ok(())
    }

    /// Takes out the calls that were cancelled.
    fn take_cancelled(&self) -> Vec<Arc<Call>> {
        let mut state = self.state();
        let (cancelled, parked) = state.calls.drain(..).partition(|call| call.is_cancelled());
        state.calls = parked;
        Vec::from(cancelled)
    }

    fn take(&self) -> Option<Arc<Call>> {
        self.state().calls.pop_front()
    }

    /// Takes no more calls, and takes out those that are parked.
    fn close(&self) -> VecDeque<Arc<Call>> {
        let mut state = self.state();
        state.is_closed = true;
        std::mem::take(&mut state.calls)
    }
}

/// Serves a LISTEN call until the host cancels it.
pub(crate) fn run(call: &Arc<Call>, message: &ListenCall) -> Result<(), ErrorDetail> {
    let socket = open(message.port).map_err(|error| refused(message.port, &error))?;
    let limited = |error: io::Error| ErrorDetail::new(ErrorCode::LimitReached, error.to_string());
    let port = socket.local_addr().map_err(limited)?.port();
    let parking = call.add_listener(Parking::new(call.wake().map_err(limited)?))?;
    let mut listener = Listener::new(socket, parking);
    let started = call.send_started(&Listening { port });
    if started.is_ok() {
        listener.serve(call);
    }
    call.remove_listener();
    listener.close();
    started.and(Err(cancelled()))
}

fn open(port: u16) -> io::Result<TcpListener> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::INET, SocketType::STREAM, flags, None)?;
    // A port is free again at once after its last listener has ended.
    sockopt::set_socket_reuseaddr(&socket, true)?;
    rustix::net::bind(&socket, &std::net::SocketAddrV4::new(Ipv4Addr::LOCALHOST, port))?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(socket.into())
}

fn refused(port: u16, error: &io::Error) -> ErrorDetail {
    if error.kind() == io::ErrorKind::AddrInUse {
        let advice = "choose another port, or end the program that listens on it";
        return ErrorDetail::new(
            ErrorCode::Conflict,
            format!("port {port} of the sandbox is in use: {advice}"),
        );
    }
    ErrorDetail::new(ErrorCode::Unavailable, format!("port {port} of the sandbox can't be opened: {error}"))
}

/// A port, the connections to it, and the calls that wait for one.
struct Listener {
    socket: TcpListener,
    parking: Arc<Parking>,
    /// Connections without a call, the oldest first, and the end of their time.
    pending: VecDeque<(TcpStream, Instant)>,
    connections: Vec<Connection>,
    /// The socket is not asked for connections before this time.
    paused_until: Option<Instant>,
    buffer: Vec<u8>,
}

impl Listener {
    fn new(socket: TcpListener, parking: Arc<Parking>) -> Self {
        Self {
            socket,
            parking,
            pending: VecDeque::new(),
            connections: Vec::new(),
            paused_until: None,
            buffer: vec![0; BUFFER_BYTES],
        }
    }

    fn serve(&mut self, call: &Call) {
        while !call.is_cancelled() {
            self.wait();
            self.parking.wake.clear();
            let now = Instant::now();
            self.accept(now);
            for call in self.parking.take_cancelled() {
                call.finish(Err(cancelled()));
            }
            self.connect();
            self.expire(now);
            let buffer = &mut self.buffer;
            self.connections.retain_mut(|connection| !connection.advance(buffer, now));
        }
    }

    /// Waits until a socket is ready, a call has changed, or a time is over.
    fn wait(&self) {
        let mut fds = vec![PollFd::new(&self.parking.wake, PollFlags::IN)];
        if self.pending.len() < MAX_PENDING && self.paused_until.is_none() {
            fds.push(PollFd::new(&self.socket, PollFlags::IN));
        }
        for connection in &self.connections {
            // A socket without a wanted event is left out: the kernel would report its hang-up again and again.
            let events = connection.wanted();
            if !events.is_empty() {
                fds.push(PollFd::from_borrowed_fd(connection.socket.as_fd(), events));
            }
        }
        let lingering = self.connections.iter().filter_map(|connection| connection.linger_until);
        let pending = self.pending.front().map(|(_, until)| *until);
        let timeout = lingering.chain(pending).chain(self.paused_until).min().map(|until| {
            let left = until.saturating_duration_since(Instant::now());
            Timespec { tv_sec: left.as_secs().cast_signed(), tv_nsec: left.subsec_nanos().into() }
        });
        let _ = poll(&mut fds, timeout.as_ref());
    }

    /// Takes connections from the kernel.
    fn accept(&mut self, now: Instant) {
        if self.paused_until.is_some_and(|until| now < until) {
            return;
        }
        self.paused_until = None;
        while self.pending.len() < MAX_PENDING {
            match self.socket.accept() {
                Ok((socket, _)) => {
                    let _ = socket.set_nodelay(true);
                    if socket.set_nonblocking(true).is_ok() {
                        self.pending.push_back((socket, now + PENDING_TIME));
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted
                    ) => {}
                Err(_) => {
                    self.paused_until = Some(now + ACCEPT_PAUSE);
                    return;
                }
            }
        }
    }

    /// Closes the connections that have waited too long.
    fn expire(&mut self, now: Instant) {
        while self.pending.front().is_some_and(|(_, until)| now >= *until) {
            self.pending.pop_front();
        }
    }

    /// Gives pending connections to parked calls.
    fn connect(&mut self) {
        while !self.pending.is_empty() {
            let Some(call) = self.parking.take() else { return };
            let Some((socket, _)) = self.pending.pop_front() else { return };
            if let Err(error) = call.send_started(&serde_json::Map::new()) {
                call.finish(Err(error));
                continue;
            }
            self.connections.push(Connection::new(call, socket));
        }
    }

    /// Resets all connections and ends their calls.
    fn close(mut self) {
        for call in self.parking.close() {
            call.finish(Err(cancelled()));
        }
        for connection in self.connections.drain(..) {
            connection.reset();
            connection.call.finish(Err(cancelled()));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    #[test]
    fn connections_that_no_call_takes_are_limited_in_number_and_time() {
        let socket = open(0).unwrap();
        let address = socket.local_addr().unwrap();
        let parking = Arc::new(Parking::new(Arc::new(Wake::new().unwrap())));
        let mut listener = Listener::new(socket, parking);
        let programs: Vec<TcpStream> =
            (0..MAX_PENDING + 10).map(|_| TcpStream::connect(address).unwrap()).collect();
        let start = Instant::now();
        listener.accept(start);
        listener.connect();
        assert_eq!(listener.pending.len(), MAX_PENDING);
        listener.expire(start + PENDING_TIME / 2);
        assert_eq!(listener.pending.len(), MAX_PENDING);
        listener.expire(start + PENDING_TIME);
        assert_eq!(listener.pending.len(), 0);
        assert_eq!((&programs[0]).read(&mut [0]).unwrap(), 0);
        // The next ones have their time from now on.
        listener.accept(start + PENDING_TIME);
        listener.expire(start + PENDING_TIME);
        assert_eq!(listener.pending.len(), 10);
    }
}
