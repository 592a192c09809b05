//! The manager's REST API. Each request has a connection of its own: a manager that went away and came back is simply
//! reached again, and one request never waits for another.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use emergent_wire::ErrorCode;
use emergent_wire::error::ErrorBody;
use emergent_wire::manager::ManagerHealth;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Empty, Full, Limited};
use hyper::body::Incoming;
use hyper::{Method, Request, Response, StatusCode, header};
use hyper_util::rt::TokioIo;
use secrecy::{ExposeSecret, SecretString};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

use crate::error::ProviderError;

/// For connecting, and for questions.
const ASK: Duration = Duration::from_secs(15);
/// For what makes or starts a microVM. The manager has bounds of its own for each step, this one is for all together.
const START: Duration = Duration::from_secs(300);
/// For what stops or removes one.
const END: Duration = Duration::from_secs(90);
/// For an image to be sent and made.
const SEND_IMAGE: Duration = Duration::from_secs(900);
/// The largest answer.
const ANSWER_BYTES: usize = 16 << 20;
/// What a request for a channel is upgraded to.
const CHANNEL: &str = "emergent-channel";
/// Where a manager keeps its token, in its own directory.
pub const MANAGER_TOKEN_FILE: &str = "manager-token";
/// The port of an address that names none.
const DEFAULT_PORT: u16 = 7172;

/// Bytes in both directions.
pub(super) trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

/// What is sent with a request.
pub(super) type Body = UnsyncBoxBody<Bytes, std::io::Error>;

/// Where a manager is.
#[derive(Clone)]
enum Address {
    Unix(PathBuf),
    Tcp { host: String, port: u16, tls: Option<(TlsConnector, ServerName<'static>)> },
}

/// A client of one manager.
#[derive(Clone)]
pub struct Client {
    url: String,
    address: Address,
    token: Token,
}

/// What proves to a manager who asks.
#[derive(Clone)]
enum Token {
    Given(SecretString),
    /// A file that the manager makes when it first starts, which may be after us.
    File(PathBuf),
}

impl Token {
    fn get(&self) -> Result<SecretString, String> {
        match self {
            Self::Given(token) => Ok(token.clone()),
            Self::File(path) => std::fs::read_to_string(path)
                .map(|text| SecretString::from(text.trim()))
                .map_err(|error| format!("its token is not at {}: {error}", path.display())),
        }
    }
}

impl Client {
    /// A client of the manager at `unix:/path`, `https://host[:port]`, or `http://host[:port]`. The token of one on this
    /// host is found beside its socket unless it is given.
    pub fn new(
        url: &str,
        token: Option<SecretString>,
        ca_certificate: Option<&Path>,
    ) -> Result<Self, String> {
        let url = url.trim_end_matches('/').to_owned();
        let address = match url.split_once(':') {
            Some(("unix", path)) => {
                Address::Unix(PathBuf::from(format!("/{}", path.trim_start_matches('/'))))
            }
            Some((scheme @ ("http" | "https"), rest)) => {
                let authority = rest.trim_start_matches('/');
                let uri: hyper::Uri =
                    format!("{scheme}://{authority}").parse().map_err(|error| format!("'{url}': {error}"))?;
                let host = uri.host().unwrap_or_default().trim_matches(['[', ']']).to_owned();
                if uri.path() != "/" || host.is_empty() {
                    return Err(format!("'{url}' must be a scheme, a host and a port"));
                }
                let port = uri.port_u16().unwrap_or(DEFAULT_PORT);
                let tls = match scheme {
                    "https" => Some((connector(ca_certificate)?, server_name(&host)?)),
                    _ => None,
                };
                Address::Tcp { host, port, tls }
            }
            _ => return Err(format!("'{url}' is not a unix:, https: or http: address")),
        };
        let token = match (token, &address) {
            (Some(token), _) => Token::Given(token),
            (None, Address::Unix(socket)) => Token::File(socket.with_file_name(MANAGER_TOKEN_FILE)),
            (None, Address::Tcp { .. }) => {
                return Err(format!(
                    "the token of the Firecracker manager at {url} is needed: set FIRECRACKER_MANAGER_TOKEN to what is in the \
                     file {MANAGER_TOKEN_FILE} of its directory"
                ));
            }
        };
        Ok(Self { url, address, token })
    }

    /// How the manager is doing.
    pub async fn health(&self) -> Result<ManagerHealth, ProviderError> {
        self.get("/v1/health").await
    }

    async fn connect(&self) -> std::io::Result<Box<dyn Stream>> {
        Ok(match &self.address {
            Address::Unix(path) => Box::new(UnixStream::connect(path).await?),
            Address::Tcp { host, port, tls } => {
                let stream = TcpStream::connect((host.as_str(), *port)).await?;
                stream.set_nodelay(true)?;
                match tls {
                    None => Box::new(stream),
                    Some((connector, name)) => Box::new(connector.connect(name.clone(), stream).await?),
                }
            }
        })
    }

    fn unreachable(&self, error: &dyn std::fmt::Display) -> ProviderError {
        ProviderError::Unavailable(format!(
            "the Firecracker manager at {} does not answer: {error}",
            self.url
        ))
    }

    async fn send(
        &self,
        method: Method,
        path: &str,
        content_type: &'static str,
        body: Body,
        is_channel: bool,
    ) -> Result<Response<Incoming>, ProviderError> {
        let stream = match tokio::time::timeout(ASK, self.connect()).await {
            Ok(stream) => stream.map_err(|error| self.unreachable(&error))?,
            Err(_) => return Err(self.unreachable(&format!("no connection within {} s", ASK.as_secs()))),
        };
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
            .await
            .map_err(|error| self.unreachable(&error))?;
        let token = self.token.get().map_err(|error| self.unreachable(&error))?;
        // Ends with the request, or lives on as the channel that it becomes.
        tokio::spawn(connection.with_upgrades());
        let mut request = Request::builder()
            .method(method)
            .uri(path)
            .header(header::HOST, "manager")
            .header(header::AUTHORIZATION, format!("Bearer {}", token.expose_secret()))
            .header(header::CONTENT_TYPE, content_type);
        if is_channel {
            request = request.header(header::CONNECTION, "upgrade").header(header::UPGRADE, CHANNEL);
        }
        let request =
            request.body(body).map_err(|error| ProviderError::failed("asking the manager", error))?;
        sender.send_request(request).await.map_err(|error| self.unreachable(&error))
    }

    /// Sends a request and takes a JSON answer, or none.
    async fn exchange<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        content_type: &'static str,
        body: Body,
        within: Duration,
    ) -> Result<T, ProviderError> {
        let exchange = async {
            let response = self.send(method, path, content_type, body, false).await?;
            let status = response.status();
            let bytes = Limited::new(response.into_body(), ANSWER_BYTES).collect().await;
            let bytes = bytes.map_err(|error| self.unreachable(&error))?.to_bytes();
            if !status.is_success() {
                return Err(self.refusal(status, &bytes));
            }
            let text: &[u8] = if bytes.is_empty() { b"null" } else { &bytes };
            serde_json::from_slice(text).map_err(|error| ProviderError::failed("the manager's answer", error))
        };
        match tokio::time::timeout(within, exchange).await {
            Ok(answer) => answer,
            Err(_) => {
                Err(ProviderError::TimedOut { what: "the Firecracker manager", seconds: within.as_secs() })
            }
        }
    }

    pub(super) async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, ProviderError> {
        self.exchange(Method::GET, path, "application/json", empty(), ASK).await
    }

    pub(super) async fn start<T: DeserializeOwned>(&self, path: &str) -> Result<T, ProviderError> {
        self.exchange(Method::POST, path, "application/json", empty(), START).await
    }

    pub(super) async fn end<T: DeserializeOwned>(&self, path: &str) -> Result<T, ProviderError> {
        self.exchange(Method::POST, path, "application/json", empty(), END).await
    }

    pub(super) async fn delete(&self, path: &str) -> Result<(), ProviderError> {
        self.exchange(Method::DELETE, path, "application/json", empty(), END).await
    }

    pub(super) async fn put<T: DeserializeOwned>(
        &self,
        path: &str,
        body: &impl Serialize,
    ) -> Result<T, ProviderError> {
        let body =
            serde_json::to_vec(body).map_err(|error| ProviderError::failed("asking the manager", error))?;
        let body = Full::new(Bytes::from(body)).map_err(|never| match never {}).boxed_unsync();
        self.exchange(Method::PUT, path, "application/json", body, START).await
    }

    /// Sends an archive.
    pub(super) async fn put_archive<T: DeserializeOwned>(
        &self,
        path: &str,
        archive: Body,
    ) -> Result<T, ProviderError> {
        self.exchange(Method::PUT, path, "application/x-tar", archive, SEND_IMAGE).await
    }

    /// A request that becomes a stream to a guest agent.
    pub(super) async fn channel(
        &self,
        path: &str,
    ) -> Result<TokioIo<hyper::upgrade::Upgraded>, ProviderError> {
        const WITHIN: Duration = Duration::from_secs(60);
        let open = async {
            let response = self.send(Method::GET, path, "application/json", empty(), true).await?;
            let status = response.status();
            if status != StatusCode::SWITCHING_PROTOCOLS {
                let bytes = Limited::new(response.into_body(), ANSWER_BYTES).collect().await;
                let bytes = bytes.map_err(|error| self.unreachable(&error))?.to_bytes();
                return Err(self.refusal(status, &bytes));
            }
            let upgraded = hyper::upgrade::on(response).await.map_err(|error| self.unreachable(&error))?;
            Ok(TokioIo::new(upgraded))
        };
        match tokio::time::timeout(WITHIN, open).await {
            Ok(opened) => opened,
            Err(_) => Err(ProviderError::TimedOut { what: "opening a channel", seconds: WITHIN.as_secs() }),
        }
    }

    /// What a refusal of the manager means for the caller.
    fn refusal(&self, status: StatusCode, body: &[u8]) -> ProviderError {
        let Ok(ErrorBody { error }) = serde_json::from_slice::<ErrorBody>(body) else {
            return self.unreachable(&format!("it says {status}, which is not what a manager says"));
        };
        let message = error.message;
        match error.code {
            ErrorCode::Unauthorized => ProviderError::Unavailable(format!(
                "the Firecracker manager at {} refuses the token (FIRECRACKER_MANAGER_TOKEN): {message}",
                self.url
            )),
            ErrorCode::Unavailable | ErrorCode::LimitReached => ProviderError::Unavailable(message),
            ErrorCode::HostDiskFull => ProviderError::NoRoom(message),
            ErrorCode::NotFound => ProviderError::Gone(message),
            ErrorCode::WrongState => ProviderError::NotRunning(message),
            ErrorCode::Unacceptable | ErrorCode::BadRequest => ProviderError::Unacceptable(message),
            _ => ProviderError::failed("the Firecracker manager", message),
        }
    }
}

fn empty() -> Body {
    Empty::new().map_err(|never| match never {}).boxed_unsync()
}

fn server_name(host: &str) -> Result<ServerName<'static>, String> {
    ServerName::try_from(host.to_owned()).map_err(|error| format!("'{host}': {error}"))
}

/// Trusts the given certificate alone, or what the host trusts.
fn connector(ca_certificate: Option<&Path>) -> Result<TlsConnector, String> {
    let mut roots = RootCertStore::empty();
    match ca_certificate {
        Some(path) => {
            let named = |error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
            for certificate in CertificateDer::pem_file_iter(path).map_err(|error| named(&error))? {
                let certificate = certificate.map_err(|error| named(&error))?;
                roots.add(certificate).map_err(|error| named(&error))?;
            }
        }
        None => {
            roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        }
    }
    let provider = Arc::new(tokio_rustls::rustls::crypto::aws_lc_rs::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| error.to_string())?
        .with_root_certificates(roots)
        .with_no_client_auth();
    Ok(TlsConnector::from(Arc::new(config)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(url: &str) -> Result<Address, String> {
        Client::new(url, Some(SecretString::from("secret")), None).map(|client| client.address)
    }

    #[test]
    fn addresses_of_managers() {
        for url in ["unix:/run/m.sock", "unix:///run/m.sock"] {
            assert!(
                matches!(address(url), Ok(Address::Unix(path)) if path == Path::new("/run/m.sock")),
                "{url}"
            );
        }
        for (url, expected, port, secure) in [
            ("http://127.0.0.1:9/", "127.0.0.1", 9, false),
            ("https://vm.example", "vm.example", DEFAULT_PORT, true),
            ("https://[::1]:8", "::1", 8, true),
        ] {
            match address(url) {
                Ok(Address::Tcp { host, port: found, tls }) => {
                    assert_eq!((host.as_str(), found, tls.is_some()), (expected, port, secure), "{url}");
                }
                _ => panic!("{url}"),
            }
        }
        assert!(
            Client::new("https://vm.example", None, None)
                .is_err_and(|error| error.contains("FIRECRACKER_MANAGER_TOKEN"))
        );
        for url in ["", "vm.example", "ftp://x", "http://", "http://x/path", "https://a b"] {
            assert!(address(url).is_err(), "{url}");
        }
    }
}
