//! Accepts connections over TCP, with or without TLS, or on a Unix socket, and serves HTTP on them.
//!
//! ```text
//! connections  the limit on connections, and which one is closed at the limit
//! tls          TLS by certificate files
//! stall        ends writes that the client does not read
//! malformed    error bodies for requests that are not HTTP
//! ```
//!
//! Each phase of a connection has a time limit: the TLS handshake, the head of the first request, the pause between
//! requests, each read of a request's body, each write of an answer.

mod connections;
mod malformed;
mod stall;
pub(crate) mod tls;

use std::convert::Infallible;
use std::future::Future;
use std::io;
use std::net::IpAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::{Request, Response};
use hyper::body::{Body as HttpBody, Bytes, Frame, Incoming, SizeHint};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use hyper_util::server::graceful::{GracefulShutdown, Watcher};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;
use tower::ServiceExt;

pub(crate) use connections::Connection;
use connections::{ConnectionSlot, Connections, RequestGuard};
use malformed::ExplainMalformed;
use stall::StallGuard;

/// The time limit for the head of a connection's first request.
const FIRST_HEAD_TIMEOUT: Duration = Duration::from_secs(15);
/// The time limit for an idle connection, and for the head of a later request. Common clients keep idle connections for 90 s. A
/// shorter limit could close a connection while the client sends a request on it.
const HEAD_TIMEOUT: Duration = Duration::from_secs(100);
/// The time limit for the TLS handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(15);
/// The time limit for one write to a client of the server.
pub(crate) const WRITE_TIMEOUT: Duration = Duration::from_secs(60);
/// The interval of HTTP/2 keep-alive pings.
const PING_EVERY: Duration = Duration::from_secs(30);
/// The time that requests in progress have to end at shutdown.
const SHUTDOWN_GRACE: Duration = Duration::from_secs(20);

/// A bound TCP port or Unix socket.
pub(crate) enum Listener {
    Tcp(TcpListener, Option<TlsAcceptor>),
    Unix(UnixListener),
}

enum Stream {
    Tcp(TcpStream, Option<TlsAcceptor>),
    Unix(UnixStream),
}

impl Listener {
    async fn accept(&self) -> io::Result<(Stream, Option<IpAddr>)> {
        match self {
            Self::Tcp(listener, tls) => {
                let (stream, address) = listener.accept().await?;
                Ok((Stream::Tcp(stream, tls.clone()), Some(address.ip())))
            }
            Self::Unix(listener) => listener.accept().await.map(|(stream, _)| (Stream::Unix(stream), None)),
        }
    }
}

/// Accepts connections until `shutdown`, then waits for the requests in progress.
///
/// `write_timeout` limits each write to a client.
pub(crate) async fn accept(
    listener: Listener,
    router: Router,
    write_timeout: Option<Duration>,
    shutdown: impl Future<Output = ()>,
) {
    let graceful = GracefulShutdown::new();
    let all = Arc::new(Connections::default());
    let mut shutdown = pin!(shutdown);
    let mut connections = JoinSet::new();
    loop {
        let (stream, address) = tokio::select! {
            () = &mut shutdown => break,
            accepted = listener.accept() => match accepted {
                Ok(accepted) => accepted,
                Err(error) => {
                    tracing::warn!(%error, "a connection could not be accepted");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                    continue;
                }
            },
        };
        while connections.try_join_next().is_some() {}
        let Ok(slot) = all.admit(address) else {
            tracing::warn!(
                "a connection is refused: the limit is reached, and all other connections have sent a valid token"
            );
            continue;
        };
        let (router, watcher) = (router.clone(), graceful.watcher());
        connections.spawn(async move {
            if let Err(error) = serve_connection(stream, router, write_timeout, watcher, &slot).await {
                tracing::debug!(error, "a connection ended early");
            }
        });
    }
    drop(listener);
    tokio::select! {
        () = graceful.shutdown() => {}
        () = tokio::time::sleep(SHUTDOWN_GRACE) => tracing::warn!("requests did not end in time and are cut off"),
    }
}

async fn serve_connection(
    stream: Stream,
    router: Router,
    write_timeout: Option<Duration>,
    watcher: Watcher,
    slot: &ConnectionSlot,
) -> Result<(), String> {
    let connection = slot.connection();
    let served = async {
        match stream {
            Stream::Unix(stream) => serve_stream(stream, router, write_timeout, watcher, connection).await,
            Stream::Tcp(stream, tls) => {
                let _ = stream.set_nodelay(true);
                match tls {
                    None => serve_stream(stream, router, write_timeout, watcher, connection).await,
                    Some(tls) => match tokio::time::timeout(HANDSHAKE_TIMEOUT, tls.accept(stream)).await {
                        Ok(Ok(stream)) => {
                            serve_stream(stream, router, write_timeout, watcher, connection).await
                        }
                        Ok(Err(error)) => Err(error.to_string()),
                        Err(_) => Err("the TLS handshake timed out".to_owned()),
                    },
                }
            }
        }
    };
    tokio::select! {
        served = served => served,
        () = connection.closed.cancelled() => Err("closed in favour of a new connection: the limit is reached".to_owned()),
    }
}

async fn serve_stream(
    stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
    router: Router,
    write_timeout: Option<Duration>,
    watcher: Watcher,
    connection: &Arc<Connection>,
) -> Result<(), String> {
    let mut builder = Builder::new(TokioExecutor::new());
    builder.http1().timer(TokioTimer::new()).header_read_timeout(HEAD_TIMEOUT).max_buf_size(64 * 1024);
    builder
        .http2()
        .timer(TokioTimer::new())
        .keep_alive_interval(PING_EVERY)
        .keep_alive_timeout(PING_EVERY)
        .max_concurrent_streams(128)
        .max_header_list_size(32 * 1024);
    let answering = Arc::clone(connection);
    let service = hyper::service::service_fn(move |request: Request<Incoming>| {
        answer(router.clone(), Arc::clone(&answering), request)
    });
    let io =
        TokioIo::new(ExplainMalformed::new(StallGuard::new(stream, write_timeout), Arc::clone(connection)));
    let served = watcher.watch(builder.serve_connection_with_upgrades(io, service).into_owned());
    tokio::select! {
        served = served => served.map_err(|error| error.to_string()),
        () = until_unused(connection) => Err("no request came in time".to_owned()),
    }
}

/// Waits until a connection has had no request for too long. For HTTP/1, hyper has a timeout between requests of its own.
async fn until_unused(connection: &Connection) {
    tokio::time::sleep(FIRST_HEAD_TIMEOUT).await;
    if !connection.has_sent_request() {
        return;
    }
    loop {
        tokio::time::sleep(HEAD_TIMEOUT).await;
        if !connection.take_used() && !connection.is_busy() {
            return;
        }
    }
}

async fn answer(
    router: Router,
    connection: Arc<Connection>,
    mut request: Request<Incoming>,
) -> Result<Response<TrackedBody>, Infallible> {
    let in_progress = connection.begin_request();
    // Access control marks the connection as trusted when the token is valid.
    request.extensions_mut().insert(connection);
    let response = router.oneshot(request.map(Body::new)).await?;
    Ok(response.map(|body| TrackedBody { body, _in_progress: in_progress }))
}

/// The body of an answer. Its request counts as in progress until this is dropped.
struct TrackedBody {
    body: Body,
    _in_progress: RequestGuard,
}

impl HttpBody for TrackedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
