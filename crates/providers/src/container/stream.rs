//! A container's standard streams as one byte stream each way.
//!
//! The engine mixes standard output and error in frames of its own. Output is the channel; what the agent writes to
//! standard error is its log and goes to ours.

use std::pin::Pin;
use std::task::{Context, Poll};

use bollard::container::LogOutput;
use bytes::Bytes;
use futures_util::{Stream, StreamExt};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

type Output = Pin<Box<dyn Stream<Item = Result<LogOutput, bollard::errors::Error>> + Send>>;

/// How much of one log line of an agent is kept.
const MAX_LOG_BYTES: usize = 1000;

/// A container's streams.
pub(crate) struct Attached {
    pub(crate) reader: OutputReader,
    pub(crate) writer: Pin<Box<dyn AsyncWrite + Send>>,
}

/// Reads a container's standard output.
pub(crate) struct OutputReader {
    container: String,
    output: Output,
    left: Bytes,
}

impl Attached {
    pub(super) fn new(container: &str, output: Output, writer: Pin<Box<dyn AsyncWrite + Send>>) -> Self {
        Self { reader: OutputReader { container: container.to_owned(), output, left: Bytes::new() }, writer }
    }
}

impl AsyncRead for OutputReader {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        loop {
            if !self.left.is_empty() {
                let length = self.left.len().min(buf.remaining());
                let bytes = self.left.split_to(length);
                buf.put_slice(&bytes);
                return Poll::Ready(Ok(()));
            }
            match std::task::ready!(self.output.poll_next_unpin(cx)) {
                Some(Ok(LogOutput::StdErr { message })) => log(&self.container, &message),
                Some(Ok(
                    LogOutput::StdOut { message }
                    | LogOutput::Console { message }
                    | LogOutput::StdIn { message },
                )) => self.left = message,
                Some(Err(error)) => return Poll::Ready(Err(std::io::Error::other(error))),
                None => return Poll::Ready(Ok(())),
            }
        }
    }
}

fn log(container: &str, message: &[u8]) {
    let text = String::from_utf8_lossy(&message[..message.len().min(MAX_LOG_BYTES)]);
    for line in text.lines().filter(|line| !line.trim().is_empty()) {
        tracing::info!(container, agent = %line.escape_debug(), "the guest agent says");
    }
}
