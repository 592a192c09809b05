//! Calls to the REST API: one builder for requests, one place that turns answers into results or errors.

use std::fmt;
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, bail};
use reqwest::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HeaderValue};
use reqwest::{Certificate, Method, Response, StatusCode, Url};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::connection::{Target, is_loopback};

/// For a connection to be made.
const CONNECT: Duration = Duration::from_secs(10);
/// For calls that only look something up.
const LOOK_UP: Duration = Duration::from_secs(60);
/// For calls that start, stop or move something.
pub(crate) const ACT: Duration = Duration::from_secs(600);
/// A server that has said nothing for so long is gone: longer than any command may be silent.
const SILENCE: Duration = Duration::from_secs(900);
/// The largest answer that is read into memory: a file of 64 MiB in base64, and then some.
const MAX_ANSWER_BYTES: usize = 128 << 20;

/// The server refused or failed a call.
#[derive(Debug)]
pub(crate) struct ApiError {
    /// The HTTP status.
    pub(crate) status: StatusCode,
    /// The stable code, if the answer had one.
    pub(crate) code: Option<String>,
    /// What went wrong and what to do.
    pub(crate) message: String,
    /// The answer's JSON.
    pub(crate) body: Option<String>,
    /// What the client knows in addition.
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
    /// From the body of a failed answer, or the data of an `error` event.
    pub(crate) fn parse(status: StatusCode, body: &str) -> Self {
        #[derive(serde::Deserialize)]
        struct Body {
            error: Detail,
        }
        // The code is read as text: a newer server may have codes that this program does not know.
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
                let said = crate::output::shorten(&crate::output::one_line(body.trim()), 200);
                let separator = if said.is_empty() { "" } else { ": " };
                let message =
                    format!("the server answered {status}{separator}{said} (is it an emergent server?)");
                Self { status, code: None, message, body: None, hint: None }
            }
        }
    }
}

/// A request, before it is sent.
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
    fn new(method: Method, path: &[&str], limit: Duration) -> Self {
        Self {
            method,
            path: path.iter().map(|segment| (*segment).to_owned()).collect(),
            query: Vec::new(),
            body: None,
            accept: "application/json",
            limit: Some(limit),
        }
    }

    /// Looks something up. The path starts below `/api/v1`; its parts are escaped.
    pub(crate) fn get(path: &[&str]) -> Self {
        Self::new(Method::GET, path, LOOK_UP)
    }

    /// Does something.
    pub(crate) fn post(path: &[&str]) -> Self {
        Self::new(Method::POST, path, ACT)
    }

    /// Sets something.
    pub(crate) fn put(path: &[&str]) -> Self {
        Self::new(Method::PUT, path, ACT)
    }

    /// Takes something away.
    pub(crate) fn delete(path: &[&str]) -> Self {
        Self::new(Method::DELETE, path, ACT)
    }

    /// With this parameter, if there is a value for it.
    pub(crate) fn query(mut self, name: &'static str, value: Option<impl fmt::Display>) -> Self {
        self.query.extend(value.map(|value| (name, value.to_string())));
        self
    }

    /// With this body.
    pub(crate) fn body(mut self, body: &impl Serialize) -> Result<Self> {
        self.body = Some(serde_json::to_string(body)?);
        Ok(self)
    }

    /// Answered with server-sent events, for as long as they come.
    pub(crate) fn events(mut self) -> Self {
        self.accept = "text/event-stream";
        self.limit = None;
        self
    }

    /// Answered with raw bytes.
    pub(crate) fn raw_bytes(mut self) -> Self {
        self.accept = "application/octet-stream";
        self
    }

    /// Answered within this time.
    pub(crate) fn within(mut self, limit: Duration) -> Self {
        self.limit = Some(limit);
        self
    }
}

/// A successful answer.
#[derive(Debug)]
pub(crate) struct Answer {
    /// Its body, as it came.
    pub(crate) text: String,
}

impl Answer {
    /// The body as a value.
    pub(crate) fn parse<T: DeserializeOwned>(&self) -> Result<T> {
        serde_json::from_str(&self.text).context(
            "the server's answer can't be understood: are `emergent` here and there the same version?",
        )
    }
}

/// A connection to one server.
pub(crate) struct Client {
    http: reqwest::Client,
    base: Url,
    authorization: HeaderValue,
    token_source: String,
}

impl Client {
    /// Where the server is.
    pub(crate) fn base_url(&self) -> &str {
        self.base.as_str()
    }

    /// The token that is sent.
    pub(crate) fn token(&self) -> &str {
        let header = self.authorization.to_str().unwrap_or_default();
        header.strip_prefix("Bearer ").unwrap_or(header)
    }

    /// A client for this server. Does not connect yet.
    pub(crate) fn open(target: &Target) -> Result<Self> {
        let mut builder = reqwest::Client::builder()
            .user_agent(concat!("emergent/", env!("CARGO_PKG_VERSION")))
            .connect_timeout(CONNECT)
            .read_timeout(SILENCE)
            .redirect(reqwest::redirect::Policy::none());
        if is_loopback(&target.url) {
            // A proxy would look for the server on its own machine.
            builder = builder.no_proxy();
        }
        if let Some(path) = &target.ca_cert {
            let pem = std::fs::read(path).with_context(|| format!("can't read {}", path.display()))?;
            let certificates = Certificate::from_pem_bundle(&pem)
                .with_context(|| format!("{} has no certificate in it", path.display()))?;
            builder = builder.tls_certs_merge(certificates);
        }
        let mut authorization = HeaderValue::from_str(&format!("Bearer {}", target.token))
            .map_err(|_| anyhow!("the token from {} has characters no token has", target.token_source))?;
        authorization.set_sensitive(true);
        Ok(Self {
            http: builder.build().context("can't set up the HTTP client")?,
            base: target.url.clone(),
            authorization,
            token_source: target.token_source.clone(),
        })
    }

    fn address(&self, call: &Call) -> Result<Url> {
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

    /// Sends the call; an answer that is a failure becomes an [`ApiError`].
    pub(crate) async fn send(&self, call: Call) -> Result<Response> {
        let mut request = self
            .http
            .request(call.method.clone(), self.address(&call)?)
            .header(AUTHORIZATION, self.authorization.clone())
            .header(ACCEPT, call.accept);
        if let Some(limit) = call.limit {
            request = request.timeout(limit);
        }
        if let Some(body) = call.body {
            request = request.header(CONTENT_TYPE, "application/json").body(body);
        }
        let response = request.send().await.map_err(|error| self.explain(error, call.limit))?;
        let status = response.status();
        if status.is_success() {
            return Ok(response);
        }
        let body = read_body(response).await.unwrap_or_default();
        let mut error = ApiError::parse(status, &body);
        if status == StatusCode::UNAUTHORIZED {
            error.hint = Some(format!("the token came from {}", self.token_source));
        }
        Err(error.into())
    }

    /// Sends the call and reads the whole answer.
    pub(crate) async fn call(&self, call: Call) -> Result<Answer> {
        let limit = call.limit;
        let response = self.send(call).await?;
        let text = read_body(response).await.map_err(|error| match error.downcast::<reqwest::Error>() {
            Ok(error) => self.explain(error, limit),
            Err(error) => error,
        })?;
        Ok(Answer { text })
    }

    /// Says what a person can do about a call that got no answer.
    fn explain(&self, error: reqwest::Error, limit: Option<Duration>) -> anyhow::Error {
        let url = self.base.as_str().trim_end_matches('/');
        let message = if error.is_connect() && says(&error, "certificate") {
            format!(
                "the certificate of the server at {url} is not trusted: name it, or its authority, with --ca-cert FILE"
            )
        } else if error.is_connect() {
            format!("no server answers at {url}: start it with: emergent serve (or set EMERGENT_URL)")
        } else if error.is_timeout() {
            let seconds = limit.unwrap_or(SILENCE).as_secs();
            format!("the server at {url} did not answer within {seconds} s")
        } else {
            format!("the call to {url} failed")
        };
        anyhow::Error::new(error.without_url()).context(message)
    }
}

/// Whether a word is in the text of an error or its causes.
fn says(error: &dyn std::error::Error, word: &str) -> bool {
    error.to_string().contains(word) || error.source().is_some_and(|cause| says(cause, word))
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
    fn addresses_are_below_the_base_and_escaped() {
        let call = Call::get(&["agent", "workspaces", "a/../b"])
            .query("cursor", Some("x&y"))
            .query("limit", None::<u32>);
        let url = client("http://localhost:1/base/").address(&call).unwrap();
        assert_eq!(url.as_str(), "http://localhost:1/base/api/v1/agent/workspaces/a%2F..%2Fb?cursor=x%26y");
        let url = client("http://localhost:1").address(&Call::get(&["tokens"])).unwrap();
        assert_eq!(url.as_str(), "http://localhost:1/api/v1/tokens");
    }

    #[test]
    fn errors_are_shown_with_their_code() {
        let body = r#"{"error":{"code":"newer_than_us","message":"do this","details":{"a":1}}}"#;
        assert_eq!(ApiError::parse(StatusCode::CONFLICT, body).to_string(), "do this (newer_than_us)");
        let other = ApiError::parse(StatusCode::BAD_GATEWAY, "<html>\n nginx").to_string();
        assert!(other.contains("502") && other.contains("<html> nginx"), "{other}");
    }

    #[tokio::test]
    async fn without_a_server_the_error_says_what_to_do() {
        let error = client("http://127.0.0.1:9").call(Call::get(&["tokens"])).await.unwrap_err();
        assert!(format!("{error:#}").contains("emergent serve"), "{error:#}");
        assert!(!format!("{error:?}").contains("secret"));
    }
}
