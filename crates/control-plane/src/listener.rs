//! Accepting connections, over TCP with or without TLS, or on a Unix socket.

use std::future::Future;
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use hyper_util::server::graceful::{GracefulShutdown, Watcher};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;

/// How long a connection may be idle, and how long a client may take to send a request's head. Longer than common clients
/// keep a connection (90 s): one that is closed under a request loses it.
const HEAD_TIME: Duration = Duration::from_secs(100);
/// How long the TLS handshake may take.
const HANDSHAKE_TIME: Duration = Duration::from_secs(15);
/// Connections at once; more wait to be accepted.
const MAX_CONNECTIONS: usize = 2048;
/// How long requests have to end when the server is stopped.
const SHUTDOWN_GRACE: Duration = Duration::from_secs(20);

/// What connections come from.
pub(crate) enum Listener {
    Tcp(TcpListener, Option<TlsAcceptor>),
    Unix(UnixListener),
}

enum Connection {
    Tcp(TcpStream, Option<TlsAcceptor>),
    Unix(UnixStream),
}

impl Listener {
    async fn accept(&self) -> io::Result<Connection> {
        match self {
            Self::Tcp(listener, tls) => {
                listener.accept().await.map(|(stream, _)| Connection::Tcp(stream, tls.clone()))
            }
            Self::Unix(listener) => listener.accept().await.map(|(stream, _)| Connection::Unix(stream)),
        }
    }
}

/// Accepts connections until `shutdown`, then lets the requests in progress end.
pub(crate) async fn accept(listener: Listener, router: Router, shutdown: impl Future<Output = ()>) {
    let graceful = GracefulShutdown::new();
    let places = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let mut shutdown = pin!(shutdown);
    let mut connections = JoinSet::new();
    loop {
        let place = tokio::select! {
            () = &mut shutdown => break,
            place = Arc::clone(&places).acquire_owned() => place,
        };
        let connection = tokio::select! {
            () = &mut shutdown => break,
            accepted = listener.accept() => match accepted {
                Ok(connection) => connection,
                Err(error) => {
                    tracing::warn!(%error, "a connection could not be accepted");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                    continue;
                }
            },
        };
        while connections.try_join_next().is_some() {}
        let (router, watcher) = (router.clone(), graceful.watcher());
        connections.spawn(async move {
            let _place = place;
            if let Err(error) = serve_connection(connection, router, watcher).await {
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

async fn serve_connection(connection: Connection, router: Router, watcher: Watcher) -> Result<(), String> {
    match connection {
        Connection::Unix(stream) => serve_stream(stream, router, watcher).await,
        Connection::Tcp(stream, tls) => {
            let _ = stream.set_nodelay(true);
            match tls {
                None => serve_stream(stream, router, watcher).await,
                Some(tls) => match tokio::time::timeout(HANDSHAKE_TIME, tls.accept(stream)).await {
                    Ok(Ok(stream)) => serve_stream(stream, router, watcher).await,
                    Ok(Err(error)) => Err(error.to_string()),
                    Err(_) => Err("the TLS handshake took too long".to_owned()),
                },
            }
        }
    }
}

async fn serve_stream(
    stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
    router: Router,
    watcher: Watcher,
) -> Result<(), String> {
    let mut builder = Builder::new(TokioExecutor::new());
    builder.http1().timer(TokioTimer::new()).header_read_timeout(HEAD_TIME).max_buf_size(64 * 1024);
    builder.http2().timer(TokioTimer::new()).max_concurrent_streams(128).max_header_list_size(32 * 1024);
    let service = TowerToHyperService::new(router);
    let connection = builder.serve_connection_with_upgrades(TokioIo::new(stream), service);
    watcher.watch(connection.into_owned()).await.map_err(|error| error.to_string())
}
