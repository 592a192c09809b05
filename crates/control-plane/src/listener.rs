//! Accepting connections, over TCP with or without TLS, or on a Unix socket.
//!
//! Each phase of a connection has a limit in time: the TLS handshake, the first request's head, the pause between two
//! requests, each piece of a request's body, each piece of an answer that the client takes. [`connections`](crate::connections)
//! decides which ones are closed when there are too many.

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

use crate::connections::{Connection, Connections, Place, RequestInProgress};
use crate::malformed::ExplainMalformed;
use crate::stall::StallGuard;

/// How long a client may take to send the head of its first request.
const FIRST_HEAD_TIME: Duration = Duration::from_secs(15);
/// How long a connection may be idle, and how long a client may take to send a later request's head. Longer than common
/// clients keep a connection (90 s): one that is closed under a request loses it.
const HEAD_TIME: Duration = Duration::from_secs(100);
/// How long the TLS handshake may take.
const HANDSHAKE_TIME: Duration = Duration::from_secs(15);
/// How long a client of the server may take to accept a piece of an answer.
pub(crate) const WRITE_TIME: Duration = Duration::from_secs(60);
/// How often the client of an HTTP/2 connection is asked whether it is still there.
const PING_EVERY: Duration = Duration::from_secs(30);
/// How long requests have to end when the server is stopped.
const SHUTDOWN_GRACE: Duration = Duration::from_secs(20);

/// What connections come from.
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

/// Accepts connections until `shutdown`, then lets the requests in progress end.
///
/// `write_time` limits how long a client may take to accept a piece of an answer.
pub(crate) async fn accept(
    listener: Listener,
    router: Router,
    write_time: Option<Duration>,
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
        let Ok(place) = all.admit(address) else {
            tracing::warn!("a connection is refused: all others are in use");
            continue;
        };
        let (router, watcher) = (router.clone(), graceful.watcher());
        connections.spawn(async move {
            if let Err(error) = serve_connection(stream, router, write_time, watcher, &place).await {
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
    write_time: Option<Duration>,
    watcher: Watcher,
    place: &Place,
) -> Result<(), String> {
    let connection = place.connection();
    let served = async {
        match stream {
            Stream::Unix(stream) => serve_stream(stream, router, write_time, watcher, connection).await,
            Stream::Tcp(stream, tls) => {
                let _ = stream.set_nodelay(true);
                match tls {
                    None => serve_stream(stream, router, write_time, watcher, connection).await,
                    Some(tls) => match tokio::time::timeout(HANDSHAKE_TIME, tls.accept(stream)).await {
                        Ok(Ok(stream)) => serve_stream(stream, router, write_time, watcher, connection).await,
                        Ok(Err(error)) => Err(error.to_string()),
                        Err(_) => Err("the TLS handshake took too long".to_owned()),
                    },
                }
            }
        }
    };
    tokio::select! {
        served = served => served,
        () = connection.closed.cancelled() => Err("it was closed to make room".to_owned()),
    }
}

async fn serve_stream(
    stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
    router: Router,
    write_time: Option<Duration>,
    watcher: Watcher,
    connection: &Arc<Connection>,
) -> Result<(), String> {
    let mut builder = Builder::new(TokioExecutor::new());
    builder.http1().timer(TokioTimer::new()).header_read_timeout(HEAD_TIME).max_buf_size(64 * 1024);
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
    let io = TokioIo::new(ExplainMalformed::new(StallGuard::new(stream, write_time), Arc::clone(connection)));
    let served = watcher.watch(builder.serve_connection_with_upgrades(io, service).into_owned());
    tokio::select! {
        served = served => served.map_err(|error| error.to_string()),
        () = until_unused(connection) => Err("nothing was asked over it in time".to_owned()),
    }
}

/// Waits until nothing was asked over a connection for too long. HTTP/1 ends a pause between requests by itself.
async fn until_unused(connection: &Connection) {
    tokio::time::sleep(FIRST_HEAD_TIME).await;
    if !connection.has_asked() {
        return;
    }
    loop {
        tokio::time::sleep(HEAD_TIME).await;
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
    // For the check of its token, which makes the connection a trusted one.
    request.extensions_mut().insert(connection);
    let response = router.oneshot(request.map(Body::new)).await?;
    Ok(response.map(|body| TrackedBody { body, _in_progress: in_progress }))
}

/// An answer's body; its request is in progress as long as this lives.
struct TrackedBody {
    body: Body,
    _in_progress: RequestInProgress,
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
