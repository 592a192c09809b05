//! One connection of a listener: moves bytes between its socket and its ACCEPT call without blocking.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use emergent_guest_protocol::{Frame, Kind};
use emergent_wire::{ErrorCode, ErrorDetail};
use rustix::event::PollFlags;
use rustix::net::sockopt;

use crate::call::{Call, NextInput, cancelled};

/// The time to deliver input after the host has closed a connection.
const LINGER_TIME: Duration = Duration::from_secs(10);
/// Reads and writes of one connection before the next connection gets its turn.
const STEPS_PER_TURN: usize = 8;

/// A program's connection and the call that carries it.
pub(super) struct Connection {
    pub(super) call: Arc<Call>,
    pub(super) socket: TcpStream,
    /// Input that the socket has not taken yet.
    unsent: Vec<u8>,
    sent: usize,
    has_read_all: bool,
    has_sent_all: bool,
    /// The host has closed the connection; its input is delivered until this time.
    pub(super) linger_until: Option<Instant>,
}

impl Connection {
    pub(super) fn new(call: Arc<Call>, socket: TcpStream) -> Self {
        Self {
            call,
            socket,
            unsent: Vec::new(),
            sent: 0,
            has_read_all: false,
            has_sent_all: false,
            linger_until: None,
        }
    }

    /// The events of the socket that allow the next step.
    pub(super) fn wanted(&self) -> PollFlags {
        let mut events = PollFlags::empty();
        if !self.has_read_all && (self.linger_until.is_some() || self.call.has_output_credit()) {
            events |= PollFlags::IN;
        }
        if !self.has_sent_all && (self.sent < self.unsent.len() || self.call.has_input()) {
            events |= PollFlags::OUT;
        }
        events
    }

    /// Carries bytes both ways as far as possible now. True when the connection has ended and its call is answered.
    pub(super) fn advance(&mut self, buffer: &mut [u8], now: Instant) -> bool {
        if self.linger_until.is_none() && self.call.is_cancelled() {
            if !self.call.has_input_ended() {
                // The program must not take the bytes so far for all of them.
                self.reset();
                self.call.finish(Err(cancelled()));
                return true;
            }
            self.linger_until = Some(now + LINGER_TIME);
        }
        let moved = self.receive(buffer).and_then(|()| self.send());
        let result = match moved {
            Ok(()) if self.has_read_all && self.has_sent_all => Ok(b"{}".to_vec()),
            Ok(()) if self.linger_until.is_some_and(|until| now >= until) => {
                self.reset();
                Err(cancelled())
            }
            Ok(()) => return false,
            Err(error) => {
                let message = format!("the connection in the sandbox was lost: {error}");
                Err(ErrorDetail::new(ErrorCode::Unavailable, message))
            }
        };
        self.call.finish(result);
        true
    }

    /// Hands the program's bytes to the host, as credit allows. While the connection lingers they are dropped.
    fn receive(&mut self, buffer: &mut [u8]) -> io::Result<()> {
        let is_lingering = self.linger_until.is_some();
        for _ in 0..STEPS_PER_TURN {
            let room = if is_lingering { buffer.len() } else { self.call.output_room(buffer.len()) };
            if self.has_read_all || room == 0 {
                break;
            }
            match self.socket.read(&mut buffer[..room]) {
                Ok(0) => {
                    self.has_read_all = true;
                    if !is_lingering {
                        let _ = self.call.send(&Frame::new(Kind::OutputEnd, self.call.id, []));
                    }
                }
                // A failure means that the host is gone or has cancelled: the next turn sees that.
                Ok(length) if !is_lingering => {
                    let _ = self.call.send_some(Kind::Stdout, &buffer[..length]);
                }
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Hands the host's bytes to the program.
    fn send(&mut self) -> io::Result<()> {
        for _ in 0..STEPS_PER_TURN {
            if self.sent == self.unsent.len() {
                match self.call.take_input() {
                    NextInput::Bytes(bytes) => (self.unsent, self.sent) = (bytes, 0),
                    NextInput::NotYet => break,
                    NextInput::Ended => {
                        if !self.has_sent_all {
                            self.has_sent_all = true;
                            self.socket.shutdown(Shutdown::Write)?;
                        }
                        break;
                    }
                }
            }
            match self.socket.write(&self.unsent[self.sent..]) {
                Ok(length) => self.sent += length,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Makes the end of the socket a reset, which the program sees as an error.
    pub(super) fn reset(&self) {
        let _ = sockopt::set_socket_linger(&self.socket, Some(Duration::ZERO));
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, TcpListener};

    use rustix::event::{PollFd, Timespec, poll};

    use super::*;
    use crate::call;
    use crate::wake::Wake;

    /// A connection that nobody else serves, and its program's end.
    fn pair() -> (Connection, TcpStream) {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let program = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let socket = listener.accept().unwrap().0;
        socket.set_nonblocking(true).unwrap();
        let call = Arc::new(call::tests::accept(Arc::new(Wake::new().unwrap())));
        (Connection::new(call, socket), program)
    }

    /// Takes turns while the socket allows a wanted step, as the listener's thread does without a new wake-up.
    fn serve(connection: &mut Connection) {
        let mut buffer = [0; 1024];
        loop {
            connection.advance(&mut buffer, Instant::now());
            let mut fds = [PollFd::new(&connection.socket, connection.wanted())];
            if connection.wanted().is_empty() || poll(&mut fds, Some(&Timespec::default())) == Ok(0) {
                return;
            }
        }
    }

    #[test]
    fn the_end_of_input_follows_the_last_frame_of_a_turn() {
        for frames in [0, 1, STEPS_PER_TURN - 1, STEPS_PER_TURN, 2 * STEPS_PER_TURN] {
            let (mut connection, mut program) = pair();
            for _ in 0..frames {
                assert!(connection.call.push_input(vec![7]).is_ok());
            }
            assert!(connection.call.end_input().is_ok());
            serve(&mut connection);
            program.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
            let mut received = Vec::new();
            let read = program.read_to_end(&mut received);
            assert_eq!((read.ok(), received.len()), (Some(frames), frames));
            assert!(!connection.wanted().contains(PollFlags::OUT));
        }
    }
}
