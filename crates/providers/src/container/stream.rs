//! A container's standard streams as one byte stream each way.
//!
//! The engine mixes standard output and error in frames of its own. Output is the channel; what the agent writes to
//! standard error is its log and goes to ours. A guest can write there too, so only a few lines a minute are taken.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bollard::container::LogOutput;
use bytes::Bytes;
use futures_util::{Stream, StreamExt};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Instant;

type Output = Pin<Box<dyn Stream<Item = Result<LogOutput, bollard::errors::Error>> + Send>>;

/// How much of one log line of an agent is kept.
const MAX_LOG_BYTES: usize = 1000;
/// How many lines of one agent are logged in [`LOG_PERIOD`].
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
    left: Bytes,
}

impl Attached {
    pub(super) fn new(container: &str, output: Output, writer: Pin<Box<dyn AsyncWrite + Send>>) -> Self {
        Self { reader: OutputReader { log: AgentLog::new(container), output, left: Bytes::new() }, writer }
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
                Some(Ok(LogOutput::StdErr { message })) => self.log.take(&message),
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

/// Hands an agent's log lines on to the server's log, a few a minute.
struct AgentLog {
    container: String,
    /// When the current period began.
    began: Instant,
    /// Lines in the current period, also those that were not logged.
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
                tracing::info!(container = self.container, agent = %line.escape_debug(), "the guest agent says");
            }
        }
    }

    /// Whether one more line is logged. Says how many were not, once the period is over.
    fn admits(&mut self) -> bool {
        if self.began.elapsed() >= LOG_PERIOD {
            let left_out = self.lines.saturating_sub(MAX_LOG_LINES);
            if left_out > 0 {
                tracing::warn!(
                    container = self.container,
                    left_out,
                    "lines of the guest agent were left out of the log"
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
    async fn a_guest_that_floods_the_log_gets_a_few_lines_a_minute() {
        let mut log = AgentLog::new("container");
        for _ in 0..3 {
            assert_eq!((0..10_000).filter(|_| log.admits()).count(), 20);
            tokio::time::advance(LOG_PERIOD).await;
        }
    }
}
