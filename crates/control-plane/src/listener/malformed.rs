//! Error bodies for requests that are not HTTP.
//!
//! hyper itself answers a request whose head can't be read or is too large: it writes a status without a body and closes the
//! connection. No handler sees such a request. So the stream below hyper recognises these answers and adds the error body.
//!
//! Invariant: only the first answer of a connection can be changed, and only if no request has reached a handler. Later bytes may
//! be the content of a file, which a guest controls: a file that looks like such an answer must not be changed.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use emergent_wire::error::ErrorBody;
use emergent_wire::{ErrorCode, ErrorDetail};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::connections::Connection;

/// The first headers of hyper's own answers. Answers of handlers begin with other headers.
const NO_BODY: &[u8] = b"connection: close\r\ncontent-length: 0\r\n";

/// The first lines of hyper's own answers, and the errors for them.
const REFUSALS: [(&[u8], ErrorCode, &str); 2] = [
    (b"HTTP/1.1 400 Bad Request\r\n", ErrorCode::BadRequest, "this is not a request of HTTP/1.1 or HTTP/2"),
    (
        b"HTTP/1.1 431 Request Header Fields Too Large\r\n",
        ErrorCode::HeadersTooLarge,
        "the headers or the address are too large: send at most 100 headers of 64 KiB in all",
    ),
];

/// A stream that adds error bodies to hyper's own answers.
pub(crate) struct ExplainMalformed<S> {
    stream: S,
    connection: Arc<Connection>,
    /// The answer that is being written instead of hyper's.
    replacement: Option<Replacement>,
}

/// An answer with an error body, which replaces one of hyper's.
struct Replacement {
    text: Vec<u8>,
    /// Bytes of the text that were written.
    written: usize,
    /// The length of hyper's answer.
    head_bytes: usize,
}

impl<S> ExplainMalformed<S> {
    pub(crate) fn new(stream: S, connection: Arc<Connection>) -> Self {
        Self { stream, connection, replacement: None }
    }

    /// The answer that replaces these bytes, if they are an answer of hyper's own.
    fn replacement_of(&self, bytes: &[u8]) -> Option<Replacement> {
        let text = (!self.connection.has_sent_request()).then(|| with_body(bytes)).flatten()?;
        Some(Replacement { text, written: 0, head_bytes: bytes.len() })
    }
}

/// One of hyper's own answers with an error body. None for other bytes.
fn with_body(head: &[u8]) -> Option<Vec<u8>> {
    let (rest, line, code, message) = REFUSALS.iter().find_map(|(line, code, message)| {
        Some((head.strip_prefix(*line)?.strip_prefix(NO_BODY)?, *line, *code, *message))
    })?;
    if !rest.ends_with(b"\r\n\r\n") {
        return None;
    }
    let body = serde_json::to_vec(&ErrorBody { error: ErrorDetail::new(code, message) }).ok()?;
    let described =
        format!("connection: close\r\ncontent-type: application/json\r\ncontent-length: {}\r\n", body.len());
    Some([line, described.as_bytes(), rest, &body].concat())
}

impl<S: AsyncRead + Unpin> AsyncRead for ExplainMalformed<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for ExplainMalformed<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let this = &mut *self;
        if this.replacement.is_none() {
            this.replacement = this.replacement_of(bytes);
        }
        let Some(Replacement { text, written, head_bytes }) = &mut this.replacement else {
            return Pin::new(&mut this.stream).poll_write(context, bytes);
        };
        while *written < text.len() {
            let count = ready!(Pin::new(&mut this.stream).poll_write(context, &text[*written..]))?;
            if count == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            *written += count;
        }
        let head_bytes = *head_bytes;
        this.replacement = None;
        Poll::Ready(Ok(head_bytes))
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffers: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let first = buffers.iter().find(|buffer| !buffer.is_empty());
        match first {
            Some(head) if self.replacement.is_some() || self.replacement_of(head).is_some() => {
                self.poll_write(context, head)
            }
            _ => Pin::new(&mut self.stream).poll_write_vectored(context, buffers),
        }
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
    use crate::listener::connections::Connections;

    /// A guest controls the content of files, and a client may read them over a connection that it keeps using.
    #[tokio::test]
    async fn answers_of_handlers_are_never_changed() {
        let head = b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-length: 0\r\ndate: x\r\n\r\n";
        for has_sent_request in [false, true] {
            let connections = Arc::new(Connections::default());
            let slot = connections.admit(None).unwrap();
            drop(has_sent_request.then(|| slot.connection().begin_request()));
            let (mut client, server) = tokio::io::duplex(4096);
            let mut server = ExplainMalformed::new(server, Arc::clone(slot.connection()));
            server.write_all(head).await.unwrap();
            drop(server);
            let mut got = Vec::new();
            client.read_to_end(&mut got).await.unwrap();
            assert_eq!(got == head, has_sent_request, "{}", String::from_utf8_lossy(&got));
        }
    }

    #[test]
    fn a_body_is_added_only_to_answers_of_hyper_itself() {
        let head = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\ndate: x\r\n\r\n";
        let text = String::from_utf8(with_body(head).unwrap()).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        assert!(head.ends_with("\r\ndate: x") && head.contains(&format!("content-length: {}", body.len())));
        assert_eq!(serde_json::from_str::<ErrorBody>(body).unwrap().error.code, ErrorCode::HeadersTooLarge);
        for other in [
            "HTTP/1.1 400 Bad Request\r\ncontent-length: 5\r\n\r\n",
            "HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n",
            "HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-length: 0\r\n\r\nHTTP/1.1",
            // From a hosted MCP server.
            "HTTP/1.1 400 Bad Request\r\nx-request-id: 1\r\ncontent-length: 0\r\n\r\n",
        ] {
            assert_eq!(with_body(other.as_bytes()), None);
        }
    }
}
