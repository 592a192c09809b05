//! A container's standard streams as one byte stream each way.
//!
//! The engine multiplexes standard output and error in frames. Standard output is the channel. Standard error is the agent's
//! log and goes to the server's log. A guest can write there too, so only a few lines a minute are logged.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bollard::container::LogOutput;
use bytes::Bytes;
use futures_util::{Stream, StreamExt};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Instant;

type Output = Pin<Box<dyn Stream<Item = Result<LogOutput, bollard::errors::Error>> + Send>>;

/// Bytes of one message of an agent that are logged.
const MAX_LOG_BYTES: usize = 1000;
/// Lines of one agent that are logged in a [`LOG_PERIOD`].
const MAX_LOG_LINES: u32 = 20;
const LOG_PERIOD: Duration = Duration::from_secs(60);

/// A container's streams.
pub(crate) struct Attached {
    pub(crate) reader: OutputReader,
    pub(crate) writer: Pin<Box<dyn AsyncWrite + Send>>,
}

/// Reads a container's standard output.
pub(crate) struct OutputReader {
    log: AgentLog,
    output: Output,
    unread: Bytes,
}

impl Attached {
    pub(super) fn new(container: &str, output: Output, writer: Pin<Box<dyn AsyncWrite + Send>>) -> Self {
        Self { reader: OutputReader { log: AgentLog::new(container), output, unread: Bytes::new() }, writer }
    }
}

impl AsyncRead for OutputReader {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        loop {
            if !self.unread.is_empty() {
                let length = self.unread.len().min(buf.remaining());
                let bytes = self.unread.split_to(length);
                buf.put_slice(&bytes);
                return Poll::Ready(Ok(()));
            }
            match std::task::ready!(self.output.poll_next_unpin(cx)) {
                Some(Ok(LogOutput::StdErr { message })) => self.log.take(&message),
                Some(Ok(
                    LogOutput::StdOut { message }
                    | LogOutput::Console { message }
                    | LogOutput::StdIn { message },
                )) => self.unread = message,
                Some(Err(error)) => return Poll::Ready(Err(std::io::Error::other(error))),
                None => return Poll::Ready(Ok(())),
            }
        }
    }
}

/// Writes an agent's log lines to the server's log, a few a minute.
struct AgentLog {
    container: String,
    /// The begin of the current period.
    began: Instant,
    /// Lines in the current period, logged or not.
    lines: u32,
}

impl AgentLog {
    fn new(container: &str) -> Self {
        Self { container: container.to_owned(), began: Instant::now(), lines: 0 }
    }

    fn take(&mut self, message: &[u8]) {
        let text = String::from_utf8_lossy(&message[..message.len().min(MAX_LOG_BYTES)]);
        for line in text.lines().filter(|line| !line.trim().is_empty()) {
            if self.admits() {
                tracing::info!(container = self.container, agent = %line.escape_debug(), "log line of the guest agent");
            }
        }
    }

    /// Whether one more line may be logged. Logs the number of omitted lines when a period ends.
    fn admits(&mut self) -> bool {
        if self.began.elapsed() >= LOG_PERIOD {
            let omitted = self.lines.saturating_sub(MAX_LOG_LINES);
            if omitted > 0 {
                tracing::warn!(
                    container = self.container,
                    omitted,
                    "lines of the guest agent were omitted from the log"
                );
            }
            *self = Self::new(&self.container);
        }
        self.lines = self.lines.saturating_add(1);
        self.lines <= MAX_LOG_LINES
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_flooding_guest_gets_a_few_log_lines_a_minute() {
        let mut log = AgentLog::new("container");
        for _ in 0..3 {
            assert_eq!((0..10_000).filter(|_| log.admits()).count(), 20);
            tokio::time::advance(LOG_PERIOD).await;
        }
    }
}
