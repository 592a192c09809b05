//! The REST client. [`calls`] has the paths, [`Call`] is one request, [`Client`] sends it and turns the response into an
//! answer or an error.

pub(crate) mod calls;

use std::error::Error as StdError;
use std::fmt;
use std::io;
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, bail};
use reqwest::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HeaderValue};
use reqwest::{Certificate, Method, Response, StatusCode, Url};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio_rustls::rustls;

use crate::connection::{Target, is_loopback};

/// The time limit for connecting.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// The time limit of calls that read.
const READ_TIMEOUT: Duration = Duration::from_secs(60);
/// The time limit of calls that change something.
const CHANGE_TIMEOUT: Duration = Duration::from_secs(600);
/// The time limit between two pieces of a response. It is longer than the longest time-out of a command (600 s), because a
/// command may print nothing until it ends.
const IDLE_TIMEOUT: Duration = Duration::from_secs(900);
/// The size limit of an answer that is read into memory. A file of 64 MiB is 85.3 MiB in base64.
const MAX_ANSWER_BYTES: usize = 128 << 20;

/// An error response of the server.
#[derive(Debug)]
pub(crate) struct ApiError {
    /// The HTTP status.
    pub(crate) status: StatusCode,
    /// The stable code, if the body has one.
    pub(crate) code: Option<String>,
    /// The cause and the next step, for a person.
    pub(crate) message: String,
    /// The JSON of the body.
    pub(crate) body: Option<String>,
    /// A hint of the client.
    pub(crate) hint: Option<String>,
}

impl fmt::Display for ApiError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.code {
            Some(code) => write!(f, "{} ({code})", self.message),
            None => f.write_str(&self.message),
        }
    }
}

impl std::error::Error for ApiError {}

impl ApiError {
    /// Parses the body of an error response, or the data of an `error` event.
    pub(crate) fn parse(status: StatusCode, body: &str) -> Self {
        #[derive(serde::Deserialize)]
        struct Body {
            error: Detail,
        }
        // The code is a text, because a newer server may have codes that this program does not know.
        #[derive(serde::Deserialize)]
        struct Detail {
            code: String,
            message: String,
        }
        match serde_json::from_str::<Body>(body) {
            Ok(Body { error }) => Self {
                status,
                code: Some(error.code),
                message: error.message,
                body: Some(body.to_owned()),
                hint: None,
            },
            Err(_) => {
                let text = crate::output::shorten(&crate::output::one_line(body.trim()), 200);
                let separator = if text.is_empty() { "" } else { ": " };
                let message =
                    format!("the server answered {status}{separator}{text} (is it an emergent server?)");
                Self { status, code: None, message, body: None, hint: None }
            }
        }
    }
}

/// A request that has not been sent.
#[derive(Debug)]
pub(crate) struct Call {
    method: Method,
    path: Vec<String>,
    query: Vec<(&'static str, String)>,
    body: Option<String>,
    accept: &'static str,
    limit: Option<Duration>,
}

impl Call {
    /// A call of a path below `/api/v1`. Its segments are escaped when it is sent.
    fn new(method: Method, path: &[&str]) -> Self {
        let limit = if method == Method::GET { READ_TIMEOUT } else { CHANGE_TIMEOUT };
        Self {
            method,
            path: path.iter().map(|segment| (*segment).to_owned()).collect(),
            query: Vec::new(),
            body: None,
            accept: "application/json",
            limit: Some(limit),
        }
    }

    /// Adds a query parameter if there is a value for it.
    pub(crate) fn query(mut self, name: &'static str, value: Option<impl fmt::Display>) -> Self {
        self.query.extend(value.map(|value| (name, value.to_string())));
        self
    }

    /// Sets the JSON body.
    pub(crate) fn body(mut self, body: &impl Serialize) -> Result<Self> {
        self.body = Some(serde_json::to_string(body)?);
        Ok(self)
    }

    /// Asks for server-sent events, without a time limit for the whole response.
    pub(crate) fn events(mut self) -> Self {
        self.accept = "text/event-stream";
        self.limit = None;
        self
    }

    /// Asks for raw bytes.
    pub(crate) fn raw_bytes(mut self) -> Self {
        self.accept = "application/octet-stream";
        self
    }

    /// Sets the time limit for the whole response.
    pub(crate) fn within(mut self, limit: Duration) -> Self {
        self.limit = Some(limit);
        self
    }
}

/// A successful response.
#[derive(Debug)]
pub(crate) struct Answer {
    /// Its body, unchanged.
    pub(crate) text: String,
}

impl Answer {
    /// Parses the body.
    pub(crate) fn parse<T: DeserializeOwned>(&self) -> Result<T> {
        serde_json::from_str(&self.text).context(
            "the server's answer can't be parsed: check that client and server have the same version (emergent --version)",
        )
    }
}

/// A client of one server.
pub(crate) struct Client {
    http: reqwest::Client,
    base: Url,
    authorization: HeaderValue,
    token_source: String,
}

impl Client {
    /// The server's URL.
    pub(crate) fn base_url(&self) -> &str {
        self.base.as_str()
    }

    /// The token of all calls.
    pub(crate) fn token(&self) -> &str {
        let header = self.authorization.to_str().unwrap_or_default();
        header.strip_prefix("Bearer ").unwrap_or(header)
    }

    /// Makes a client. It connects with the first call.
    pub(crate) fn open(target: &Target) -> Result<Self> {
        let mut builder = reqwest::Client::builder()
            .user_agent(concat!("emergent/", env!("CARGO_PKG_VERSION")))
            .connect_timeout(CONNECT_TIMEOUT)
            .read_timeout(IDLE_TIMEOUT)
            .redirect(reqwest::redirect::Policy::none());
        if is_loopback(&target.url) {
            // A proxy would resolve a loopback address to the proxy's own machine.
            builder = builder.no_proxy();
        }
        if let Some(path) = &target.ca_cert {
            let pem = std::fs::read(path).with_context(|| format!("can't read {}", path.display()))?;
            let certificates = Certificate::from_pem_bundle(&pem)
                .with_context(|| format!("{} has no certificate in it", path.display()))?;
            builder = builder.tls_certs_merge(certificates);
        }
        let mut authorization = HeaderValue::from_str(&format!("Bearer {}", target.token)).map_err(|_| {
            anyhow!("the token from {} has characters that a token can't have", target.token_source)
        })?;
        authorization.set_sensitive(true);
        Ok(Self {
            http: builder.build().context("can't set up the HTTP client")?,
            base: target.url.clone(),
            authorization,
            token_source: target.token_source.clone(),
        })
    }

    fn url_of(&self, call: &Call) -> Result<Url> {
        let mut url = self.base.clone();
        url.set_query(None);
        url.path_segments_mut()
            .map_err(|()| anyhow!("{} can't have a path", self.base))?
            .pop_if_empty()
            .extend(["api", "v1"])
            .extend(&call.path);
        if !call.query.is_empty() {
            url.query_pairs_mut().extend_pairs(&call.query);
        }
        Ok(url)
    }

    /// Sends the call. An error response becomes an [`ApiError`].
    pub(crate) async fn send(&self, call: Call) -> Result<Response> {
        let mut request = self
            .http
            .request(call.method.clone(), self.url_of(&call)?)
            .header(AUTHORIZATION, self.authorization.clone())
            .header(ACCEPT, call.accept);
        if let Some(limit) = call.limit {
            request = request.timeout(limit);
        }
        if let Some(body) = call.body {
            request = request.header(CONTENT_TYPE, "application/json").body(body);
        }
        let response = request.send().await.map_err(|error| self.with_next_step(error, call.limit))?;
        let status = response.status();
        if status.is_success() {
            return Ok(response);
        }
        let body = read_body(response).await.unwrap_or_default();
        let mut error = ApiError::parse(status, &body);
        if status == StatusCode::UNAUTHORIZED {
            error.hint = Some(format!("the token is from {}", self.token_source));
        }
        Err(error.into())
    }

    /// Sends the call and reads the whole response.
    pub(crate) async fn call(&self, call: Call) -> Result<Answer> {
        let limit = call.limit;
        let response = self.send(call).await?;
        let text = read_body(response).await.map_err(|error| match error.downcast::<reqwest::Error>() {
            Ok(error) => self.with_next_step(error, limit),
            Err(error) => error,
        })?;
        Ok(Answer { text })
    }

    /// Adds the next step to the error of a call that got no response.
    fn with_next_step(&self, error: reqwest::Error, limit: Option<Duration>) -> anyhow::Error {
        let url = self.base.as_str().trim_end_matches('/');
        let message = if is_untrusted_certificate(&error) {
            format!(
                "the certificate of the server at {url} is not trusted: pass it, or its CA's certificate, with --ca-cert FILE"
            )
        } else if error.is_connect() {
            format!("no server answers at {url}: start it with: emergent serve (or set EMERGENT_URL)")
        } else if error.is_timeout() {
            let seconds = limit.unwrap_or(IDLE_TIMEOUT).as_secs();
            format!("the server at {url} did not answer within {seconds} s")
        } else {
            format!("the call to {url} failed")
        };
        anyhow::Error::new(error.without_url()).context(message)
    }
}

/// Whether the error, or one of its causes, is that the server's certificate was refused.
fn is_untrusted_certificate(error: &(dyn StdError + 'static)) -> bool {
    if let Some(rustls::Error::InvalidCertificate(_)) = error.downcast_ref() {
        return true;
    }
    // `source` of an I/O error skips the wrapped error and returns the source of that one, so the wrapped error is checked, too.
    let wrapped = error.downcast_ref::<io::Error>().and_then(io::Error::get_ref);
    wrapped.is_some_and(|wrapped| is_untrusted_certificate(wrapped))
        || error.source().is_some_and(is_untrusted_certificate)
}

async fn read_body(mut response: Response) -> Result<String> {
    let mut bytes = Vec::new();
    while let Some(chunk) = response.chunk().await? {
        if bytes.len() + chunk.len() > MAX_ANSWER_BYTES {
            bail!("the server's answer has more than {MAX_ANSWER_BYTES} bytes");
        }
        bytes.extend_from_slice(&chunk);
    }
    String::from_utf8(bytes).context("the server's answer is not UTF-8")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn client(url: &str) -> Client {
        let target = Target {
            url: url.parse().unwrap(),
            token: "secret".into(),
            token_source: "a test".into(),
            ca_cert: None,
        };
        Client::open(&target).unwrap()
    }

    #[test]
    fn call_urls_are_below_the_base_url_and_escaped() {
        let call = calls::get_mcp_server("a/../b").query("cursor", Some("x&y")).query("limit", None::<u32>);
        let url = client("http://localhost:1/base/").url_of(&call).unwrap();
        assert_eq!(url.as_str(), "http://localhost:1/base/api/v1/mcp/servers/a%2F..%2Fb?cursor=x%26y");
        let url = client("http://localhost:1").url_of(&calls::list_tokens()).unwrap();
        assert_eq!(url.as_str(), "http://localhost:1/api/v1/tokens");
    }

    #[test]
    fn api_errors_are_shown_with_their_code() {
        let body = r#"{"error":{"code":"newer_than_us","message":"do this","details":{"a":1}}}"#;
        assert_eq!(ApiError::parse(StatusCode::CONFLICT, body).to_string(), "do this (newer_than_us)");
        let other = ApiError::parse(StatusCode::BAD_GATEWAY, "<html>\n nginx").to_string();
        assert!(other.contains("502") && other.contains("<html> nginx"), "{other}");
    }

    #[tokio::test]
    async fn refused_connection_error_names_the_next_step_and_no_token() {
        let error = client("http://127.0.0.1:9").call(calls::list_tokens()).await.unwrap_err();
        assert!(format!("{error:#}").contains("emergent serve"), "{error:#}");
        assert!(!format!("{error:?}").contains("secret"));
    }

    #[test]
    fn untrusted_certificate_is_found_inside_io_errors() {
        let refused = rustls::Error::InvalidCertificate(rustls::CertificateError::UnknownIssuer);
        let nested = io::Error::other(io::Error::new(io::ErrorKind::InvalidData, refused));
        assert!(is_untrusted_certificate(&nested));
        let other = io::Error::new(io::ErrorKind::InvalidData, rustls::Error::DecryptError);
        assert!(!is_untrusted_certificate(&other));
    }
}
