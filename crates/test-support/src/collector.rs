//! An OpenTelemetry collector: an HTTP or HTTPS server that takes traces as protobuf (OTLP) and keeps them.

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, Mutex, mpsc};

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, header};
use axum::response::Redirect;
use axum::routing::post;
use axum::serve::Listener;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::{KeyValue, any_value::Value};
use opentelemetry_proto::tonic::trace::v1::{Span, status::StatusCode};
use prost::Message as _;
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::server::TlsStream;

/// The requests so far.
type Requests = Arc<Mutex<Vec<(HeaderMap, Bytes)>>>;

/// A collector. It runs in a thread of its own until the test ends. Below `/moved` it redirects to itself.
pub struct Collector {
    /// Its address.
    pub url: String,
    received: Requests,
}

/// A span that the collector received.
#[derive(Clone, Debug)]
pub struct ReceivedSpan {
    /// Its name.
    pub name: String,
    /// The id of its trace, in hexadecimal.
    pub trace: String,
    /// Its own id.
    pub id: String,
    /// The id of its parent. Empty: it has none.
    pub parent: String,
    /// Its fields.
    pub fields: BTreeMap<String, String>,
    /// Whether its status is an error.
    pub failed: bool,
    /// Its duration in nanoseconds.
    pub nanos: u64,
    /// Events of it.
    pub events: usize,
}

impl Collector {
    /// Starts a collector that speaks HTTP.
    pub fn start() -> Self {
        Self::serve("http", |listener| listener)
    }

    /// Starts a collector that speaks HTTPS with this certificate.
    pub fn start_with_tls(certificate: &Path, key: &Path) -> Self {
        let certificate = CertificateDer::from_pem_file(certificate).expect("a certificate");
        let key = PrivateKeyDer::from_pem_file(key).expect("a key");
        let provider = Arc::new(tokio_rustls::rustls::crypto::aws_lc_rs::default_provider());
        let config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .expect("versions of TLS")
            .with_no_client_auth()
            .with_single_cert(vec![certificate], key)
            .expect("the key fits the certificate");
        let acceptor = TlsAcceptor::from(Arc::new(config));
        Self::serve("https", |tcp| TlsListener { tcp, acceptor })
    }

    fn serve<L>(scheme: &str, listener: impl FnOnce(TcpListener) -> L + Send + 'static) -> Self
    where
        L: Listener<Addr = SocketAddr>,
    {
        let received = Requests::default();
        let router = Router::new()
            .route("/v1/traces", post(receive))
            .route("/moved/v1/traces", post(async || Redirect::temporary("/v1/traces")))
            .with_state(Arc::clone(&received));
        let (started, has_started) = mpsc::channel();
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.expect("a runtime can be made").block_on(async {
                let tcp = TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
                started.send(tcp.local_addr().expect("an address")).expect("the test waits");
                axum::serve(listener(tcp), router).await
            })
        });
        let address = has_started.recv().expect("the collector starts");
        Self { url: format!("{scheme}://{address}"), received }
    }

    fn requests(&self) -> Vec<ExportTraceServiceRequest> {
        let received = self.received.lock().expect("no receiver panics");
        let bodies = received.iter().map(|(_, body)| body.clone());
        bodies.map(|body| ExportTraceServiceRequest::decode(body).expect("protobuf")).collect()
    }

    /// The spans so far.
    pub fn spans(&self) -> Vec<ReceivedSpan> {
        let resources = self.requests().into_iter().flat_map(|request| request.resource_spans);
        let scopes = resources.flat_map(|resource| resource.scope_spans);
        scopes.flat_map(|scope| scope.spans).map(ReceivedSpan::from).collect()
    }

    /// The attributes of the services that sent spans, each once.
    pub fn services(&self) -> Vec<BTreeMap<String, String>> {
        let resources = self.requests().into_iter().flat_map(|request| request.resource_spans);
        let mut services: Vec<_> =
            resources.filter_map(|one| Some(fields(one.resource?.attributes))).collect();
        services.sort();
        services.dedup();
        services
    }

    /// Whether a request has this text anywhere in its body.
    pub fn received(&self, text: &str) -> bool {
        let received = self.received.lock().expect("no receiver panics");
        received.iter().any(|(_, body)| body.windows(text.len()).any(|bytes| bytes == text.as_bytes()))
    }

    /// The values of a header, one for each request that has it.
    pub fn header(&self, name: &str) -> Vec<String> {
        let received = self.received.lock().expect("no receiver panics");
        let values = received.iter().filter_map(|(headers, _)| headers.get(name)?.to_str().ok());
        values.map(str::to_owned).collect()
    }
}

async fn receive(State(received): State<Requests>, headers: HeaderMap, body: Bytes) -> Vec<u8> {
    assert_eq!(headers[header::CONTENT_TYPE], "application/x-protobuf");
    received.lock().expect("no receiver panics").push((headers, body));
    // An empty message: all spans are taken.
    Vec::new()
}

impl From<Span> for ReceivedSpan {
    fn from(span: Span) -> Self {
        Self {
            name: span.name,
            trace: hex(&span.trace_id),
            id: hex(&span.span_id),
            parent: hex(&span.parent_span_id),
            fields: fields(span.attributes),
            failed: span.status.is_some_and(|status| status.code() == StatusCode::Error),
            nanos: span.end_time_unix_nano.checked_sub(span.start_time_unix_nano).expect("it ends later"),
            events: span.events.len(),
        }
    }
}

fn hex(id: &[u8]) -> String {
    id.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn fields(attributes: Vec<KeyValue>) -> BTreeMap<String, String> {
    let text = |one: KeyValue| match one.value?.value? {
        Value::StringValue(text) => Some((one.key, text)),
        other => Some((one.key, format!("{other:?}"))),
    };
    attributes.into_iter().filter_map(text).collect()
}

/// Accepts TLS connections. One that fails is dropped.
struct TlsListener {
    tcp: TcpListener,
    acceptor: TlsAcceptor,
}

impl Listener for TlsListener {
    type Io = TlsStream<TcpStream>;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Self::Io, SocketAddr) {
        loop {
            let (stream, address) = self.tcp.accept().await.expect("the listener accepts");
            if let Ok(stream) = self.acceptor.accept(stream).await {
                return (stream, address);
            }
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.tcp.local_addr()
    }
}
