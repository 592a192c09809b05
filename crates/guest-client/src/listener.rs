//! A port of the sandbox whose connections come to the host.
//!
//! A few ACCEPT calls are parked in the guest at any time, so that a connection does not wait for a round trip. All ACCEPT
//! calls of a channel share one limit; a call counts until the guest has sent its last frame.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll};

use emergent_guest_protocol::{GuestCall, ListenCall, Listening};
use tokio_util::sync::PollSemaphore;

use crate::call::{Call, CallError, parse};
use crate::channel::{GuestClient, Shared};
use crate::table::Incoming;
use crate::tunnel::TunnelConnection;

/// ACCEPT calls that are parked at once.
const PARKED_ACCEPTS: usize = 4;

/// A listening port of the sandbox. Dropping it closes the port and all its connections.
pub struct GuestListener {
    shared: Arc<Shared>,
    listen: Call,
    port: u16,
    parked: VecDeque<Call>,
    permits: PollSemaphore,
}

impl GuestClient {
    /// Opens a TCP port on 127.0.0.1 of the sandbox; port 0 means any free one.
    ///
    /// Agents of protocol 1 and 2 can't: the error is [`CallError::AgentTooOld`].
    pub async fn listen(&self, port: u16) -> Result<GuestListener, CallError> {
        let mut listen = self.start(&GuestCall::Listen(ListenCall { port })).await?;
        let Listening { port } = match poll_fn(|context| listen.poll_incoming(context)).await? {
            Incoming::Started(message) => parse(&message)?,
            other => return Err(CallError::Garbled(format!("a {other:?} frame instead of the port"))),
        };
        let shared = self.shared();
        let permits = PollSemaphore::new(shared.accepts());
        let mut listener = GuestListener { shared, listen, port, parked: VecDeque::new(), permits };
        poll_fn(|context| Poll::Ready(listener.park(context))).await?;
        Ok(listener)
    }
}

impl GuestListener {
    /// The port.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The next connection. Waits while the channel has as many connections as it may.
    ///
    /// Cancel-safe: a connection that was not returned is returned by the next call. After an error the port is closed.
    pub async fn accept(&mut self) -> Result<TunnelConnection, CallError> {
        poll_fn(|context| self.poll_accept(context)).await
    }

    /// Polls for the next connection, as [`GuestListener::accept`] does.
    pub fn poll_accept(&mut self, context: &mut Context<'_>) -> Poll<Result<TunnelConnection, CallError>> {
        if let Poll::Ready(ended) = self.listen.poll_incoming(context) {
            let error = ended.err().unwrap_or_else(|| CallError::Garbled("the listener ended".to_owned()));
            return Poll::Ready(Err(error));
        }
        self.park(context)?;
        for index in 0..self.parked.len() {
            let Poll::Ready(event) = self.parked[index].poll_incoming(context) else { continue };
            let Some(call) = self.parked.remove(index) else { continue };
            event?;
            // The replacement is sent before the caller handles this one.
            self.park(context)?;
            return Poll::Ready(Ok(TunnelConnection::new(call)));
        }
        Poll::Pending
    }

    /// Parks ACCEPT calls up to the limits.
    fn park(&mut self, context: &mut Context<'_>) -> Result<(), CallError> {
        while self.parked.len() < PARKED_ACCEPTS {
            let Poll::Ready(permit) = self.permits.poll_acquire(context) else { break };
            let permit = permit.ok_or_else(|| CallError::Lost(self.shared.closed_reason()))?;
            self.parked.push_back(self.shared.accept(self.listen.id(), permit)?);
        }
        Ok(())
    }
}
