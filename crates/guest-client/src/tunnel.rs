//! One connection of a program in the sandbox, as a byte stream on the host.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Buf, Bytes};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::call::{Call, CallError};
use crate::input::{InputError, InputWriter};
use crate::table::Incoming;

/// A TCP connection of a program in the sandbox to a [`GuestListener`](crate::GuestListener), or ours to a program in the sandbox.
///
/// The end of reading is the program's half-close; `shutdown` is ours. Dropping the stream closes the connection: after
/// `shutdown` the guest still delivers the written bytes, for a limited time; without `shutdown` it resets the connection.
pub struct TunnelConnection {
    call: Call,
    input: InputWriter,
    unread: Bytes,
    reading: Side,
    writing: Side,
}

/// One direction of the connection.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Side {
    Open,
    Ended,
    Failed,
}

impl TunnelConnection {
    /// The connection that a call carries: an ACCEPT call, or a CONNECT call.
    pub fn new(call: Call) -> Self {
        let input = call.input_writer();
        Self { call, input, unread: Bytes::new(), reading: Side::Open, writing: Side::Open }
    }
}

impl AsyncRead for TunnelConnection {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        loop {
            if !this.unread.is_empty() {
                let length = this.unread.len().min(buffer.remaining());
                buffer.put_slice(&this.unread[..length]);
                this.unread.advance(length);
                return Poll::Ready(Ok(()));
            }
            match this.reading {
                Side::Open => {}
                Side::Ended => return Poll::Ready(Ok(())),
                Side::Failed => return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into())),
            }
            match ready!(this.call.poll_incoming(context)) {
                Ok(Incoming::Data(_, bytes)) => this.unread = bytes,
                Ok(Incoming::OutputEnd | Incoming::Result(_)) => this.reading = Side::Ended,
                Ok(_) => {}
                Err(error) => {
                    this.reading = Side::Failed;
                    return Poll::Ready(Err(io_error(error)));
                }
            }
        }
    }
}

impl AsyncWrite for TunnelConnection {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        if this.writing != Side::Open {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        if bytes.is_empty() {
            return Poll::Ready(Ok(0));
        }
        let sent = ready!(this.input.poll_send(context, bytes));
        if sent.is_err() {
            this.writing = Side::Failed;
        }
        Poll::Ready(sent.map_err(input_error))
    }

    fn poll_flush(self: Pin<&mut Self>, _context: &mut Context<'_>) -> Poll<io::Result<()>> {
        // A written frame is in the channel's queue already.
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if this.writing != Side::Open {
            return Poll::Ready(Ok(()));
        }
        let ended = ready!(this.input.poll_end(context));
        this.writing = Side::Ended;
        Poll::Ready(ended.map_err(input_error))
    }
}

fn io_error(error: CallError) -> io::Error {
    let kind = match &error {
        CallError::Lost(_) => io::ErrorKind::ConnectionAborted,
        _ => io::ErrorKind::ConnectionReset,
    };
    io::Error::new(kind, error)
}

fn input_error(error: InputError) -> io::Error {
    match error {
        InputError::Over => io::ErrorKind::BrokenPipe.into(),
        InputError::Lost(reason) => io_error(CallError::Lost(reason)),
    }
}
