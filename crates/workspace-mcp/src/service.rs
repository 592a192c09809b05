//! The address of one workspace's MCP server.

use std::convert::Infallible;
use std::fmt;
use std::fmt::Display;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{Method, Request, Response, StatusCode, header};
use http_body::Body;
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt as _, Full, LengthLimitError, Limited};
use rmcp::ErrorData;
use rmcp::model::{ConstString as _, ErrorCode as RpcCode, InitializeResultMethod, JsonRpcError};
use rmcp::transport::{StreamableHttpServerConfig, StreamableHttpService};
use serde::Deserialize;
use serde::de::IgnoredAny;
use tokio::sync::Semaphore;
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::Tools;
use crate::origin::{Doors, Origin};
use crate::server::{SESSION_HEADER, Server};
use crate::sessions::Sessions;

/// The largest body: as REST, but for its write.
const BODY_BYTES: usize = 5 << 20;
/// How long a body may take to arrive.
const BODY_TIME: Duration = Duration::from_secs(60);
/// Proxies must not take a quiet command for a dead connection.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// The body of an answer: all at once, or events as they come.
pub type ResponseBody = BoxBody<Bytes, Infallible>;

/// How much one workspace's server takes, and from whom.
#[derive(Clone, Debug)]
pub struct Config {
    /// Sessions at once. Another takes the place of the one that was not used for longest.
    pub sessions: usize,
    /// After this time without a call and an open stream a session ends.
    pub session_idle: Duration,
    /// Calls at once.
    pub calls: usize,
    /// Pages that may ask, besides those from the host they ask and from this machine.
    pub origins: Vec<Origin>,
    /// Host names that requests may be for, besides those of this machine. Empty: any.
    pub hosts: Vec<String>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            sessions: 64,
            session_idle: Duration::from_secs(3600),
            // As many as a sandbox takes.
            calls: 64,
            origins: Vec::new(),
            hosts: Vec::new(),
        }
    }
}

/// The MCP server of one workspace, with its sessions. When it is dropped, these end and calls are cancelled.
pub struct WorkspaceMcp {
    service: StreamableHttpService<Server, Sessions>,
    sessions: Arc<Sessions>,
    calls: Arc<Semaphore>,
    most_calls: usize,
    doors: Doors,
    _ended: DropGuard,
}

impl WorkspaceMcp {
    /// A server for a workspace's tools. Needs a Tokio runtime when it is used.
    pub fn new(tools: Arc<dyn Tools>, config: Config) -> Self {
        let ended = CancellationToken::new();
        let sessions = Arc::new(Sessions::new(config.sessions, config.session_idle, ended.clone()));
        let calls = Arc::new(Semaphore::new(config.calls));
        let server = Server {
            tools,
            sessions: Arc::clone(&sessions),
            calls: Arc::clone(&calls),
            ended: ended.clone(),
        };
        let transport = StreamableHttpServerConfig::default()
            // Checked here, before the library sees the request.
            .disable_allowed_hosts()
            .disable_allowed_origins()
            .with_max_request_body_bytes(BODY_BYTES)
            .with_json_response(true)
            .with_sse_keep_alive(Some(KEEP_ALIVE))
            // Sessions do this for streams with something to resume.
            .with_sse_retry(None)
            .with_cancellation_token(ended.child_token());
        let service =
            StreamableHttpService::new(move || Ok(server.clone()), Arc::clone(&sessions), transport);
        let doors = Doors { origins: config.origins, hosts: config.hosts };
        Self { service, sessions, calls, most_calls: config.calls, doors, _ended: ended.drop_guard() }
    }

    /// Answers a request. Who asks must have been checked.
    ///
    /// Dropping the future, or the body of an answer that is not complete, cancels the call where the protocol says
    /// so: from 2026-07-28 on. Before that a client may come back for its answer, and says when it will not.
    pub async fn handle<B>(&self, request: Request<B>) -> Response<ResponseBody>
    where
        B: Body + Send + 'static,
        B::Data: Send,
        B::Error: Into<Box<dyn std::error::Error + Send + Sync>> + Display,
    {
        if let Err(reason) = self.doors.check(request.uri(), request.headers()) {
            tracing::debug!(reason, "an MCP request was not let in");
            return refuse(StatusCode::FORBIDDEN, RpcCode::INVALID_REQUEST, reason);
        }
        let session = request.headers().get(SESSION_HEADER).and_then(|id| id.to_str().ok());
        match *request.method() {
            Method::DELETE if session.is_some_and(|id| self.sessions.get(id).is_none()) => {
                refuse(StatusCode::NOT_FOUND, RpcCode::INVALID_REQUEST, "there is no such session")
            }
            Method::DELETE => {
                let mut response = self.service.handle(request).await;
                // Done, not begun; and some clients take only that for an answer.
                if response.status() == StatusCode::ACCEPTED {
                    *response.status_mut() = StatusCode::NO_CONTENT;
                }
                response
            }
            Method::POST => self.post(request).await,
            _ => self.service.handle(request).await,
        }
    }

    async fn post<B>(&self, request: Request<B>) -> Response<ResponseBody>
    where
        B: Body + Send + 'static,
        B::Data: Send,
        B::Error: Into<Box<dyn std::error::Error + Send + Sync>> + Display,
    {
        let (parts, body) = request.into_parts();
        let body = match tokio::time::timeout(BODY_TIME, Limited::new(body, BODY_BYTES).collect()).await {
            Ok(Ok(body)) => body.to_bytes(),
            Ok(Err(error)) if error.is::<LengthLimitError>() => {
                let reason = format!("the body is larger than {BODY_BYTES} bytes");
                return refuse(StatusCode::PAYLOAD_TOO_LARGE, RpcCode::INVALID_REQUEST, reason);
            }
            Ok(Err(error)) => {
                let reason = format!("the body can't be read: {error}");
                return refuse(StatusCode::BAD_REQUEST, RpcCode::INVALID_REQUEST, reason);
            }
            Err(_) => {
                let reason = "the body did not arrive in time";
                return refuse(StatusCode::REQUEST_TIMEOUT, RpcCode::INVALID_REQUEST, reason);
            }
        };
        if !self.sessions.has_room() && is_initialize(&body) {
            let reason = "all sessions of this workspace are in use: end one, or retry later";
            return refuse(StatusCode::TOO_MANY_REQUESTS, RpcCode(-32000), reason);
        }
        let is_json = parts.headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
        let is_json = is_json.is_some_and(|value| value.starts_with("application/json"));
        let request = Request::from_parts(parts, Full::new(body.clone()));
        let response = self.service.handle(request).await;
        // The library says so also of a body that has the right type and can't be read.
        if response.status() == StatusCode::UNSUPPORTED_MEDIA_TYPE && is_json {
            return unreadable(&body);
        }
        response
    }

    /// Whether there is neither a session nor a call: dropping this server now takes nothing from anybody.
    pub fn is_idle(&self) -> bool {
        self.sessions.count() == 0 && self.calls.available_permits() == self.most_calls
    }
}

impl fmt::Debug for WorkspaceMcp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WorkspaceMcp").field("sessions", &self.sessions.count()).finish_non_exhaustive()
    }
}

fn is_initialize(body: &[u8]) -> bool {
    #[derive(Deserialize)]
    struct Message<'a> {
        method: &'a str,
    }
    serde_json::from_slice::<Message<'_>>(body)
        .is_ok_and(|message| message.method == InitializeResultMethod::VALUE)
}

/// A body that is no message of the protocol.
fn unreadable(body: &[u8]) -> Response<ResponseBody> {
    match serde_json::from_slice::<IgnoredAny>(body) {
        Ok(_) => {
            let reason = "the body is JSON, but no message of JSON-RPC 2.0";
            refuse(StatusCode::BAD_REQUEST, RpcCode::INVALID_REQUEST, reason)
        }
        Err(error) => {
            let reason = format!("the body is not JSON: {error}");
            refuse(StatusCode::BAD_REQUEST, RpcCode::PARSE_ERROR, reason)
        }
    }
}

/// An answer to a request that did not get to the server.
fn refuse(status: StatusCode, code: RpcCode, reason: impl Into<String>) -> Response<ResponseBody> {
    let error = JsonRpcError::new(None, ErrorData::new(code, reason.into(), None));
    let body = serde_json::to_vec(&error).unwrap_or_default();
    let mut response = Response::new(Full::new(Bytes::from(body)).boxed());
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, header::HeaderValue::from_static("application/json"));
    response
}
