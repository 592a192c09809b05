//! A client of the Firecracker manager's REST API.
//!
//! Each request has a connection of its own. So a manager that was restarted is reached again without a failed request, and
//! no request waits for another.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bytes::Bytes;
use emergent_wire::ErrorCode;
use emergent_wire::error::ErrorBody;
use emergent_wire::manager::{CHANNEL_PROTOCOL, ManagerHealth};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Limited};
use reqwest::redirect::Policy;
use reqwest::{Body, Certificate, Method, RequestBuilder, Response, StatusCode, Upgraded, Url, header};
use secrecy::{ExposeSecret, SecretString};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::ProviderError;

/// The time limit for a connection, and for a request that only reads.
const READ_TIME: Duration = Duration::from_secs(15);
/// The time limit for creating or starting a microVM. The manager limits each step; this limits all of them together.
const START_TIME: Duration = Duration::from_secs(300);
/// The time limit for stopping or removing a microVM.
const END_TIME: Duration = Duration::from_secs(90);
/// The time limit for sending an image and making it.
const IMAGE_TIME: Duration = Duration::from_secs(900);
/// The time limit for opening a channel.
const CHANNEL_TIME: Duration = Duration::from_secs(60);
/// The largest answer.
const ANSWER_BYTES: usize = 16 << 20;
/// The file in a manager's data directory that contains its token.
pub const MANAGER_TOKEN_FILE: &str = "manager-token";
/// The port of an address without one.
const DEFAULT_PORT: u16 = 7172;

/// Why a client could not be made.
#[derive(Debug, thiserror::Error)]
pub enum ManagerClientError {
    /// The address can't be parsed.
    #[error("'{address}': {reason}")]
    Address {
        /// The address.
        address: String,
        /// Why.
        reason: url::ParseError,
    },
    /// The address has an unknown scheme.
    #[error("'{0}' is not a unix:, https: or http: address")]
    Scheme(String),
    /// The address has parts that it must not have.
    #[error("'{0}' must be a scheme, a host and a port")]
    NotAnOrigin(String),
    /// A manager on another host was named without its token.
    #[error(
        "the token of the Firecracker manager at {0} is needed: set FIRECRACKER_MANAGER_TOKEN to the content of the \
         file {MANAGER_TOKEN_FILE} in its data directory"
    )]
    NoToken(String),
    /// The file of the certificate can't be read.
    #[error("{}: {reason}", path.display())]
    CertificateFile {
        /// The file.
        path: PathBuf,
        /// Why.
        reason: std::io::Error,
    },
    /// The certificate can't be used.
    #[error("{}: {reason}", path.display())]
    Certificate {
        /// The file.
        path: PathBuf,
        /// Why.
        reason: String,
    },
}

impl ManagerClientError {
    fn certificate(path: &Path, reason: String) -> Self {
        Self::Certificate { path: path.to_owned(), reason }
    }
}

/// A client of one manager.
#[derive(Clone)]
pub struct Client {
    /// The configured address, for messages.
    address: String,
    base: Url,
    connector: Connector,
    /// Made by the first request.
    http: Arc<OnceLock<reqwest::Client>>,
    token: Token,
}

/// The token that each request carries.
#[derive(Clone)]
enum Token {
    Given(SecretString),
    /// A file that the manager writes when it first starts, possibly after this server.
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

/// The parsed address of a manager.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Address {
    Unix(PathBuf),
    Tcp(Url),
}

impl Address {
    fn parse(address: &str) -> Result<Self, ManagerClientError> {
        let (scheme, rest) = address.split_once(':').unwrap_or_default();
        match scheme {
            "unix" => Ok(Self::Unix(PathBuf::from(format!("/{}", rest.trim_start_matches('/'))))),
            "http" | "https" => Self::parse_tcp(address, rest),
            _ => Err(ManagerClientError::Scheme(address.to_owned())),
        }
    }

    fn parse_tcp(address: &str, rest: &str) -> Result<Self, ManagerClientError> {
        let invalid = |reason| ManagerClientError::Address { address: address.to_owned(), reason };
        let not_an_origin = || ManagerClientError::NotAnOrigin(address.to_owned());
        let mut url = Url::parse(address).map_err(invalid)?;
        let has_more = url.path() != "/" || url.query().is_some() || url.fragment().is_some();
        if has_more || !url.username().is_empty() || url.password().is_some() {
            return Err(not_an_origin());
        }
        // The parsed URL does not tell the scheme's own port from no port.
        let has_port = rest.rsplit(']').next().is_some_and(|end| end.contains(':'));
        if !has_port {
            url.set_port(Some(DEFAULT_PORT)).map_err(|()| not_an_origin())?;
        }
        Ok(Self::Tcp(url))
    }

    /// The URL that paths are resolved against. A Unix socket has no host, but HTTP needs one.
    fn base(&self) -> Result<Url, url::ParseError> {
        match self {
            Self::Unix(_) => Url::parse("http://manager/"),
            Self::Tcp(url) => Ok(url.clone()),
        }
    }
}

impl Client {
    /// A client of the manager at `unix:/path`, `https://host[:port]`, or `http://host[:port]`. Without `token`, the token
    /// of a manager on this host is read from the file beside its socket. With `ca_certificate`, only that certificate is
    /// trusted, instead of those of the host.
    pub fn new(
        address: &str,
        token: Option<SecretString>,
        ca_certificate: Option<&Path>,
    ) -> Result<Self, ManagerClientError> {
        let address = address.trim_end_matches('/').to_owned();
        let parsed = Address::parse(&address)?;
        let token = match (token, &parsed) {
            (Some(token), _) => Token::Given(token),
            (None, Address::Unix(socket)) => Token::File(socket.with_file_name(MANAGER_TOKEN_FILE)),
            (None, Address::Tcp(_)) => return Err(ManagerClientError::NoToken(address)),
        };
        let base = parsed
            .base()
            .map_err(|reason| ManagerClientError::Address { address: address.clone(), reason })?;
        let connector = Connector::new(parsed, ca_certificate)?;
        let http = Arc::new(OnceLock::new());
        if let Some(path) = ca_certificate {
            // The operator has named this file, so it must be usable when the server starts.
            let invalid = |error| ManagerClientError::certificate(path, causes(&error));
            let _ = http.set(connector.connect().map_err(invalid)?);
        }
        Ok(Self { address, base, connector, http, token })
    }

    /// The HTTP client. It can't be made while the host has no CA certificates. They can be installed while the server runs.
    fn http(&self) -> Result<&reqwest::Client, ProviderError> {
        if let Some(http) = self.http.get() {
            return Ok(http);
        }
        let http = self.connector.connect().map_err(|error| {
            ProviderError::Unavailable(format!(
                "the certificate of the Firecracker manager at {} can't be checked: {}: install CA certificates on this host, \
                 or set FIRECRACKER_MANAGER_CA",
                self.address,
                causes(&error)
            ))
        })?;
        Ok(self.http.get_or_init(|| http))
    }

    /// The state of the manager.
    pub async fn health(&self) -> Result<ManagerHealth, ProviderError> {
        self.get("/v1/health").await
    }

    fn unreachable(&self, error: &dyn std::fmt::Display) -> ProviderError {
        ProviderError::Unavailable(format!(
            "the Firecracker manager at {} does not answer: {error}",
            self.address
        ))
    }

    fn request(&self, method: Method, path: &str) -> Result<RequestBuilder, ProviderError> {
        let url = self.base.join(path);
        let url = url.map_err(|error| ProviderError::failed("asking the manager", error))?;
        let token = self.token.get().map_err(|error| self.unreachable(&error))?;
        Ok(self.http()?.request(method, url).bearer_auth(token.expose_secret()))
    }

    async fn send(&self, request: RequestBuilder) -> Result<Response, ProviderError> {
        request.send().await.map_err(|error| self.unreachable(&causes(&error.without_url())))
    }

    /// Reads an answer, up to its limit.
    async fn body(&self, response: Response) -> Result<Bytes, ProviderError> {
        let body = Limited::new(Body::from(response), ANSWER_BYTES).collect().await;
        Ok(body.map_err(|error| self.unreachable(&causes(&*error)))?.to_bytes())
    }

    /// Sends a request and parses its JSON answer. An empty answer is `null`.
    async fn exchange<T: DeserializeOwned>(
        &self,
        request: RequestBuilder,
        within: Duration,
    ) -> Result<T, ProviderError> {
        let exchange = async {
            let response = self.send(request).await?;
            let status = response.status();
            let bytes = self.body(response).await?;
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
        self.exchange(self.request(Method::GET, path)?, READ_TIME).await
    }

    pub(super) async fn start<T: DeserializeOwned>(&self, path: &str) -> Result<T, ProviderError> {
        self.exchange(self.request(Method::POST, path)?, START_TIME).await
    }

    pub(super) async fn end<T: DeserializeOwned>(&self, path: &str) -> Result<T, ProviderError> {
        self.exchange(self.request(Method::POST, path)?, END_TIME).await
    }

    pub(super) async fn delete(&self, path: &str) -> Result<(), ProviderError> {
        self.exchange(self.request(Method::DELETE, path)?, END_TIME).await
    }

    pub(super) async fn put<T: DeserializeOwned>(
        &self,
        path: &str,
        body: &impl Serialize,
    ) -> Result<T, ProviderError> {
        self.exchange(self.request(Method::PUT, path)?.json(body), START_TIME).await
    }

    /// Sends an archive as it is read.
    pub(super) async fn put_archive<T: DeserializeOwned>(
        &self,
        path: &str,
        archive: UnsyncBoxBody<Bytes, std::io::Error>,
    ) -> Result<T, ProviderError> {
        let request = self
            .request(Method::PUT, path)?
            .header(header::CONTENT_TYPE, "application/x-tar")
            .body(Body::wrap_stream(archive.into_data_stream()));
        self.exchange(request, IMAGE_TIME).await
    }

    /// Opens a channel to a guest agent: a request that is upgraded to a stream of bytes.
    pub(super) async fn channel(&self, path: &str) -> Result<Upgraded, ProviderError> {
        let open = async {
            let request = self
                .request(Method::GET, path)?
                .header(header::CONNECTION, "upgrade")
                .header(header::UPGRADE, CHANNEL_PROTOCOL);
            let response = self.send(request).await?;
            let status = response.status();
            if status != StatusCode::SWITCHING_PROTOCOLS {
                return Err(self.refusal(status, &self.body(response).await?));
            }
            response.upgrade().await.map_err(|error| self.unreachable(&causes(&error.without_url())))
        };
        match tokio::time::timeout(CHANNEL_TIME, open).await {
            Ok(opened) => opened,
            Err(_) => {
                Err(ProviderError::TimedOut { what: "opening a channel", seconds: CHANNEL_TIME.as_secs() })
            }
        }
    }

    /// Maps an error of the manager by its code.
    fn refusal(&self, status: StatusCode, body: &[u8]) -> ProviderError {
        let Ok(ErrorBody { error }) = serde_json::from_slice::<ErrorBody>(body) else {
            return self.unreachable(&format!("its answer ({status}) is not a manager's: check the address"));
        };
        let message = error.message;
        match error.code {
            ErrorCode::Unauthorized => ProviderError::Unavailable(format!(
                "the Firecracker manager at {} refuses the token (FIRECRACKER_MANAGER_TOKEN): {message}",
                self.address
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

/// An error with all its causes. reqwest's messages do not contain them.
fn causes(error: &dyn Error) -> String {
    let mut messages = vec![error.to_string()];
    let mut cause = error.source();
    while let Some(error) = cause {
        messages.push(error.to_string());
        cause = error.source();
    }
    messages.join(": ")
}

/// The parameters of connections to a manager.
#[derive(Clone)]
struct Connector {
    address: Address,
    /// The certificates that the manager's is checked against. None: those that the host trusts.
    trusted: Option<Vec<Certificate>>,
}

impl Connector {
    fn new(address: Address, ca_certificate: Option<&Path>) -> Result<Self, ManagerClientError> {
        let is_https = matches!(&address, Address::Tcp(url) if url.scheme() == "https");
        let trusted = match ca_certificate {
            Some(path) if is_https => Some(certificates(path)?),
            None if is_https => None,
            // Without TLS, the host's certificates need not be readable.
            _ => Some(Vec::new()),
        };
        Ok(Self { address, trusted })
    }

    fn connect(&self) -> Result<reqwest::Client, reqwest::Error> {
        let mut builder = reqwest::Client::builder()
            .http1_only()
            .no_proxy()
            .redirect(Policy::none())
            .retry(reqwest::retry::never())
            .pool_max_idle_per_host(0)
            .connect_timeout(READ_TIME)
            // The kernel would end a connection whose peer reads nothing for 30 s, reqwest's default: a manager whose disk is
            // slow, or a sandbox that is paused. Requests have time limits of their own, and channels notice a silent guest.
            .tcp_user_timeout(None::<Duration>);
        if let Some(trusted) = &self.trusted {
            builder = builder.tls_certs_only(trusted.clone());
        }
        if let Address::Unix(socket) = &self.address {
            builder = builder.unix_socket(socket.as_path());
        }
        builder.build()
    }
}

fn certificates(path: &Path) -> Result<Vec<Certificate>, ManagerClientError> {
    let pem = std::fs::read(path)
        .map_err(|reason| ManagerClientError::CertificateFile { path: path.to_owned(), reason })?;
    let invalid = |reason| ManagerClientError::certificate(path, reason);
    let certificates = Certificate::from_pem_bundle(&pem).map_err(|error| invalid(causes(&error)))?;
    if certificates.is_empty() {
        return Err(invalid("the file contains no certificate".to_owned()));
    }
    Ok(certificates)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use std::net::SocketAddr;
    use std::os::fd::BorrowedFd;

    use rustix::net::sockopt;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::{TcpListener, TcpStream, UnixListener};

    use super::*;

    fn secret() -> Option<SecretString> {
        Some(SecretString::from("secret"))
    }

    #[test]
    fn addresses_are_parsed_with_the_default_port() {
        for address in ["unix:/run/m.sock", "unix:///run/m.sock"] {
            assert_eq!(Address::parse(address).unwrap(), Address::Unix("/run/m.sock".into()), "{address}");
        }
        for (address, url) in [
            ("http://127.0.0.1:9", "http://127.0.0.1:9/"),
            ("https://vm.example", "https://vm.example:7172/"),
            ("https://vm.example:443", "https://vm.example/"),
            ("https://[::1]:8", "https://[::1]:8/"),
            ("https://[::1]", "https://[::1]:7172/"),
        ] {
            let expected = Address::Tcp(Url::parse(url).unwrap());
            assert_eq!(Address::parse(address).unwrap(), expected, "{address}");
        }
        for address in ["", "vm.example", "ftp://x", "http://", "http://x/path", "https://a b", "http://u@x"]
        {
            assert!(Client::new(address, secret(), None).is_err(), "{address}");
        }
    }

    #[test]
    fn a_manager_on_another_host_needs_a_token_and_usable_certificates() {
        let refused = Client::new("https://vm.example", None, None).err().unwrap();
        assert!(matches!(refused, ManagerClientError::NoToken(_)), "{refused}");
        let refused = |path: &str| Client::new("https://vm.example", secret(), Some(Path::new(path))).err();
        assert!(matches!(refused("/no/such/file"), Some(ManagerClientError::CertificateFile { .. })));
        assert!(matches!(refused("/dev/null"), Some(ManagerClientError::Certificate { .. })));
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(&file, "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n").unwrap();
        let path = file.path().to_str().unwrap();
        assert!(matches!(refused(path), Some(ManagerClientError::Certificate { .. })));
        Client::new("http://127.0.0.1:9", secret(), None).unwrap();
    }

    /// Reads a request up to its empty line.
    async fn read_head(stream: &mut (impl AsyncReadExt + Unpin)) -> String {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(stream.read_u8().await.unwrap());
        }
        String::from_utf8(head).unwrap()
    }

    #[tokio::test]
    async fn a_channel_over_a_unix_socket_carries_bytes_both_ways() {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("m.sock");
        std::fs::write(directory.path().join(MANAGER_TOKEN_FILE), "from-the-file\n").unwrap();
        let listener = UnixListener::bind(&socket).unwrap();
        let client = Client::new(&format!("unix:{}", socket.display()), None, None).unwrap();
        let manager = async {
            let (mut stream, _) = listener.accept().await.unwrap();
            let head = read_head(&mut stream).await.to_ascii_lowercase();
            assert!(head.starts_with("get /v1/machines/m/channel http/1.1\r\n"), "{head}");
            assert!(head.contains("\r\nauthorization: bearer from-the-file\r\n"), "{head}");
            assert!(head.contains("\r\nupgrade: emergent-channel\r\n"), "{head}");
            let answer = "HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: emergent-channel\r\n\r\n";
            // The agent can speak first, and its bytes can come with the answer.
            stream.write_all(format!("{answer}first").as_bytes()).await.unwrap();
            let mut said = [0; 4];
            stream.read_exact(&mut said).await.unwrap();
            assert_eq!(&said, b"ping");
            stream
        };
        let server = async {
            let mut channel = client.channel("/v1/machines/m/channel").await.unwrap();
            let mut said = [0; 5];
            channel.read_exact(&mut said).await.unwrap();
            assert_eq!(&said, b"first");
            channel.write_all(b"ping").await.unwrap();
            channel.flush().await.unwrap();
            channel
        };
        let (mut stream, channel) = tokio::join!(manager, server);
        drop(channel);
        assert_eq!(stream.read(&mut [0]).await.unwrap(), 0, "the connection ends with the channel");
    }

    /// The TCP_USER_TIMEOUT, in milliseconds, of this process's socket with this address. 0: the socket has none.
    fn user_timeout_of(address: SocketAddr) -> u32 {
        let mut descriptors = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
        let timeout = descriptors.find_map(|entry| {
            let descriptor = entry.file_name().to_str()?.parse().ok()?;
            // SAFETY: it is used at once, and the socket that is looked for stays open.
            let descriptor = unsafe { BorrowedFd::borrow_raw(descriptor) };
            let found = SocketAddr::try_from(rustix::net::getsockname(descriptor).ok()?).ok()?;
            (found == address).then(|| sockopt::tcp_user_timeout(descriptor).unwrap())
        });
        timeout.unwrap()
    }

    #[tokio::test]
    async fn a_manager_that_does_not_read_for_a_while_keeps_its_connection() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let client = Client::new(&url, secret(), None).unwrap();
        let manager = async {
            let (stream, address) = listener.accept().await.unwrap();
            let timeout = user_timeout_of(address);
            answer(stream, "HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await;
            timeout
        };
        let (timeout, answer) = tokio::join!(manager, client.delete("/v1/machines/m"));
        answer.unwrap();
        assert_eq!(timeout, 0);
    }

    async fn answer(mut stream: TcpStream, answer: &str) -> String {
        let head = read_head(&mut stream).await;
        stream.write_all(answer.as_bytes()).await.unwrap();
        head
    }

    #[tokio::test]
    async fn errors_of_a_manager_are_mapped_by_code_and_other_answers_are_not_followed() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let client = Client::new(&url, secret(), None).unwrap();
        let refusal = r#"{"error":{"code":"not_found","message":"no m"}}"#;
        let refusal = format!("HTTP/1.1 404 Not Found\r\ncontent-length: {}\r\n\r\n{refusal}", refusal.len());
        let manager = async { answer(listener.accept().await.unwrap().0, &refusal).await };
        let (head, refused) = tokio::join!(manager, client.get::<serde_json::Value>("/v1/machines/m"));
        assert!(head.contains("Bearer secret"), "{head}");
        assert!(matches!(refused, Err(ProviderError::Gone(message)) if message == "no m"));
        // A second request has a second connection. A redirect could lead the token elsewhere.
        let redirect =
            "HTTP/1.1 307 Temporary Redirect\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n";
        let manager = async { answer(listener.accept().await.unwrap().0, redirect).await };
        let (_, refused) = tokio::join!(manager, client.get::<serde_json::Value>("/v1/health"));
        assert!(matches!(refused, Err(ProviderError::Unavailable(message)) if message.contains("307")));
        drop(listener);
        let refused = client.health().await.unwrap_err().to_string();
        assert!(refused.contains("does not answer") && refused.contains("refused"), "{refused}");
    }
}
