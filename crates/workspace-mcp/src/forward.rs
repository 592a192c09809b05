//! From a session to the client's connection, without the session ever waiting for the client.
//!
//! The library's session sends to all its streams in one task. A client that stops reading one of them would stop
//! that task, and with it the session's other calls, cancellations and end. So each stream is emptied at once into
//! a queue of its own; when that is full, progress is left out. All else on a stream is the one answer.

use rmcp::model::{JsonRpcMessage, ServerNotification};
use rmcp::transport::streamable_http_server::session::ServerSseMessage;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use crate::sessions::InUse;

/// Messages that wait for a slow client.
const QUEUE: usize = 16;

/// A stream that takes what the session gives at once. The session counts as used until it ends.
pub(crate) fn forward(
    mut from: mpsc::Receiver<ServerSseMessage>,
    session: InUse,
) -> ReceiverStream<ServerSseMessage> {
    let (to, stream) = mpsc::channel(QUEUE);
    tokio::spawn(async move {
        loop {
            let message = tokio::select! {
                message = from.recv() => message,
                // The client went away. What comes from now on is kept by the session, for it to come back.
                () = to.closed() => None,
            };
            let Some(message) = message else { return };
            if is_priming(&message) && !session.takes_priming() {
                continue;
            }
            if is_progress(&message) {
                // Full: left out.
                let _ = to.try_send(message);
            } else if to.send(message).await.is_err() {
                return;
            }
        }
    });
    ReceiverStream::new(stream)
}

fn is_progress(message: &ServerSseMessage) -> bool {
    let Some(JsonRpcMessage::Notification(message)) = message.message.as_deref() else { return false };
    matches!(message.notification, ServerNotification::ProgressNotification(_))
}

/// An event that holds no message, only the place to resume from.
fn is_priming(message: &ServerSseMessage) -> bool {
    message.message.is_none()
}
