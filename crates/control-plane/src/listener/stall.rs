//! A stream whose writes fail when the other side reads nothing for too long.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep};

/// Limits the time for which a write may block. Reads have limits elsewhere: a client that waits for an answer sends nothing.
pub(crate) struct StallGuard<S> {
    stream: S,
    /// None for no limit.
    limit: Option<Duration>,
    /// Runs while a write blocks.
    timer: Option<Pin<Box<Sleep>>>,
}

impl<S> StallGuard<S> {
    pub(crate) fn new(stream: S, limit: Option<Duration>) -> Self {
        Self { stream, limit, timer: None }
    }

    /// Returns the result of a write, or an error when writes have blocked for too long.
    fn limited<T>(&mut self, context: &mut Context<'_>, result: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        let Some(limit) = self.limit.filter(|_| result.is_pending()) else {
            self.timer = None;
            return result;
        };
        let timer =
            self.timer.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(Instant::now() + limit)));
        match timer.as_mut().poll(context) {
            Poll::Ready(()) => Poll::Ready(Err(io::ErrorKind::TimedOut.into())),
            Poll::Pending => Poll::Pending,
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for StallGuard<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for StallGuard<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.limited(context, result)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let result = Pin::new(&mut self.stream).poll_flush(context);
        self.limited(context, result)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let result = Pin::new(&mut self.stream).poll_shutdown(context);
        self.limited(context, result)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffers: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.stream).poll_write_vectored(context, buffers);
        self.limited(context, result)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn writes_to_a_stalled_reader_fail_and_writes_to_a_slow_reader_do_not() {
        let (client, server) = tokio::io::duplex(8);
        let mut server = StallGuard::new(server, Some(Duration::from_secs(60)));
        let (mut client, all_read) = (client, tokio::sync::Notify::new());
        let slow = async {
            for _ in 0..4 {
                tokio::time::sleep(Duration::from_secs(50)).await;
                client.read_exact(&mut [0; 8]).await.unwrap();
            }
            all_read.notify_one();
            std::future::pending::<()>().await;
        };
        let written = async {
            server.write_all(&[0; 40]).await.unwrap();
            all_read.notified().await;
            server.write_all(&[0; 40]).await.unwrap_err().kind()
        };
        let kind = tokio::select! {
            () = slow => unreachable!(),
            kind = written => kind,
        };
        assert_eq!(kind, io::ErrorKind::TimedOut);
    }
}
