//! Clients that write the protocol by hand, so that a test sees its messages unchanged.

use std::sync::Arc;

use bytes::Bytes;
use emergent_mcp_http::ResponseBody;
use futures_util::StreamExt as _;
use http::{Method, Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Full};
use serde_json::{Value, json};
use sse_stream::{Sse, SseStream};

use super::{Caller, Mcp};

pub const LEGACY: &str = "2025-11-25";
pub const MODERN: &str = "2026-07-28";
pub const ERAS: [&str; 2] = [LEGACY, MODERN];

/// A client of one version of the protocol.
pub struct Client {
    pub mcp: Arc<Mcp>,
    pub version: &'static str,
    pub session: Option<String>,
    pub caller: Caller,
    /// The result of `initialize` or `server/discover`.
    pub info: Value,
}

impl Client {
    /// A client that has introduced itself.
    pub async fn connect(mcp: &Arc<Mcp>, version: &'static str) -> Self {
        Self::connect_as(mcp, version, Caller("nobody", 0)).await
    }

    /// A client of this caller.
    pub async fn connect_as(mcp: &Arc<Mcp>, version: &'static str, caller: Caller) -> Self {
        let mut client = Self { mcp: mcp.clone(), version, session: None, caller, info: Value::Null };
        if version == MODERN {
            client.info = client.ask("server/discover", json!({})).await["result"].clone();
            return client;
        }
        let (response, session) = initialize_as(mcp, version, &client.caller).await;
        client.info = only(response).await["result"].clone();
        client.session = session;
        let status = client.tell("notifications/initialized", json!({})).await;
        assert_eq!(status, StatusCode::ACCEPTED);
        client
    }

    /// A request as this version writes it.
    pub fn request(&self, id: u64, method: &str, mut params: Value) -> Request<Full<Bytes>> {
        let mut request = message("POST");
        if self.version == MODERN {
            let name = params.get("name").and_then(Value::as_str).map(str::to_owned);
            let meta = params.as_object_mut().unwrap().entry("_meta").or_insert_with(|| json!({}));
            meta["io.modelcontextprotocol/protocolVersion"] = MODERN.into();
            meta["io.modelcontextprotocol/clientCapabilities"] = json!({});
            meta["io.modelcontextprotocol/clientInfo"] = json!({"name": "test", "version": "1"});
            request = request.header("mcp-method", method);
            if let Some(name) = name {
                request = request.header("mcp-name", name);
            }
        }
        request = request.header("mcp-protocol-version", self.version);
        if let Some(session) = &self.session {
            request = request.header("mcp-session-id", session);
        }
        let body = json!({"jsonrpc": "2.0", "id": id, "method": method, "params": params});
        request.body(Full::<Bytes>::from(body.to_string())).unwrap()
    }

    /// Sends a request of any kind.
    pub async fn handle(&self, request: Request<Full<Bytes>>) -> Response<ResponseBody> {
        handle(&self.mcp, &self.caller, request).await
    }

    /// Sends a request and gives its answer as it comes.
    pub async fn send(&self, id: u64, method: &str, params: Value) -> Messages {
        Messages::of(self.handle(self.request(id, method, params)).await)
    }

    /// Sends a request and gives its one answer.
    pub async fn ask(&self, method: &str, params: Value) -> Value {
        let mut messages = self.send(1, method, params).await;
        let answer = messages.next().await.unwrap();
        assert_eq!(messages.next().await, None, "after {answer}");
        assert_eq!(answer["id"], 1, "{answer}");
        answer
    }

    /// Calls a tool and gives its result.
    pub async fn call(&self, tool: &str, arguments: Value) -> Value {
        let answer = self.ask("tools/call", json!({"name": tool, "arguments": arguments})).await;
        assert!(answer.get("error").is_none(), "{answer}");
        answer["result"].clone()
    }

    /// Sends a notification.
    pub async fn tell(&self, method: &str, params: Value) -> StatusCode {
        let mut request = message("POST").header("mcp-protocol-version", self.version);
        if let Some(session) = &self.session {
            request = request.header("mcp-session-id", session);
        }
        let body = json!({"jsonrpc": "2.0", "method": method, "params": params});
        self.handle(request.body(Full::<Bytes>::from(body.to_string())).unwrap()).await.status()
    }

    /// Ends the session.
    pub async fn delete(&self) -> StatusCode {
        let request = message("DELETE").header("mcp-session-id", self.session.as_deref().unwrap());
        self.handle(request.body(Full::<Bytes>::default()).unwrap()).await.status()
    }

    /// Opens the stream that belongs to no request.
    pub async fn listen(&self) -> Response<ResponseBody> {
        self.listen_after(None).await
    }

    /// Continues a stream after an event.
    pub async fn listen_after(&self, event: Option<&str>) -> Response<ResponseBody> {
        let mut request = message("GET").header("mcp-session-id", self.session.as_deref().unwrap());
        if let Some(event) = event {
            request = request.header("last-event-id", event);
        }
        self.handle(request.body(Full::<Bytes>::default()).unwrap()).await
    }
}

/// The beginning of a request.
pub fn message(method: &str) -> http::request::Builder {
    Request::builder()
        .method(Method::from_bytes(method.as_bytes()).unwrap())
        .uri("/api/v1/agent/workspaces/1/mcp")
        .header("host", "work.example")
        .header("accept", "application/json, text/event-stream")
        .header("content-type", "application/json")
}

/// Sends `initialize`, and gives the answer and the session's id.
pub async fn initialize(mcp: &Mcp, version: &str) -> (Response<ResponseBody>, Option<String>) {
    initialize_as(mcp, version, &Caller("nobody", 0)).await
}

async fn initialize_as(
    mcp: &Mcp,
    version: &str,
    caller: &Caller,
) -> (Response<ResponseBody>, Option<String>) {
    let body = json!({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {
        "protocolVersion": version, "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}}});
    let request = message("POST").body(Full::<Bytes>::from(body.to_string())).unwrap();
    let response = handle(mcp, caller, request).await;
    let session = response.headers().get("mcp-session-id").map(|id| id.to_str().unwrap().to_owned());
    (response, session)
}

/// Sends a request, and writes a refusal as the server's error body.
pub async fn handle(mcp: &Mcp, caller: &Caller, request: Request<Full<Bytes>>) -> Response<ResponseBody> {
    mcp.handle(caller, request).await.unwrap_or_else(|refusal| {
        let body = json!({"error": {"message": refusal.to_string()}}).to_string();
        let mut response = Response::new(Full::<Bytes>::from(body).boxed_unsync());
        *response.status_mut() = refusal.status();
        response
    })
}

/// The one message of an answer.
pub async fn only(response: Response<ResponseBody>) -> Value {
    let mut messages = Messages::of(response);
    let message = messages.next().await.unwrap();
    assert_eq!(messages.next().await, None, "after {message}");
    message
}

/// The messages of an answer, as they come. Dropping it closes the connection.
pub struct Messages {
    pub status: StatusCode,
    pub is_stream: bool,
    /// Events without a message.
    pub priming: usize,
    /// The id of the last event.
    pub last_event: Option<String>,
    body: Body,
    /// An event that was read and not given yet.
    read: Option<Sse>,
}

enum Body {
    Events(SseStream<ResponseBody>),
    Json(ResponseBody),
}

impl Messages {
    pub fn of(response: Response<ResponseBody>) -> Self {
        let kind = response.headers().get("content-type").map(|kind| kind.to_str().unwrap().to_owned());
        let is_stream = kind.as_deref() == Some("text/event-stream");
        let status = response.status();
        let body = response.into_body();
        let body = if is_stream { Body::Events(SseStream::new(body)) } else { Body::Json(body) };
        Self { status, is_stream, priming: 0, last_event: None, body, read: None }
    }

    async fn next_event(events: &mut SseStream<ResponseBody>) -> Option<Sse> {
        events.next().await.map(|event| event.unwrap())
    }

    /// Waits for the first event, and gives its id.
    pub async fn first_event_id(&mut self) -> String {
        let Body::Events(events) = &mut self.body else { panic!("the answer has no events") };
        if self.read.is_none() {
            self.read = Self::next_event(events).await;
        }
        self.read.as_ref().unwrap().id.clone().unwrap()
    }

    /// The next message; none at the end.
    pub async fn next(&mut self) -> Option<Value> {
        let events = match &mut self.body {
            Body::Events(events) => events,
            Body::Json(body) => {
                let bytes = body.collect().await.unwrap().to_bytes();
                return (!bytes.is_empty()).then(|| serde_json::from_slice(&bytes).unwrap());
            }
        };
        loop {
            let event = match self.read.take() {
                Some(event) => event,
                None => Self::next_event(events).await?,
            };
            self.last_event = event.id.or(self.last_event.take());
            match event.data.unwrap_or_default().as_str() {
                "" => self.priming += 1,
                data => return Some(serde_json::from_str(data).unwrap()),
            }
        }
    }
}
