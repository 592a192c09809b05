//! A server whose answers the test gives, and requests of its clients.

use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use bytes::Bytes;
use emergent_mcp_http::{
    Endpoint, Exchange, Initialized, Item, Limits, Peer, PeerError, Refusal, ResponseBody, Server,
};
use emergent_mcp_protocol::envelope::{Message, result_line};
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Full};
use serde_json::{Value, json};
use tokio::sync::{Mutex as AsyncMutex, mpsc};
use tokio_util::sync::CancellationToken;

pub(crate) const LEGACY: &str = "2025-11-25";
pub(crate) const MODERN: &str = "2026-07-28";

/// A caller by its name.
#[derive(Clone, Debug)]
pub(crate) struct Caller(pub(crate) &'static str);

impl emergent_mcp_http::Caller for Caller {
    type Owner = &'static str;

    fn owner(&self) -> &'static str {
        self.0
    }
}

pub(crate) const ALICE: Caller = Caller("alice");
pub(crate) const BOB: Caller = Caller("bob");

/// An endpoint with its server. The test answers the requests.
pub(crate) struct World {
    pub(crate) endpoint: Endpoint<Caller>,
    server: Script,
    requests: AsyncMutex<mpsc::UnboundedReceiver<Asked>>,
    sessions: AsyncMutex<mpsc::UnboundedReceiver<mpsc::Sender<String>>>,
    /// The error of `initialize` and of requests of the modern era.
    pub(crate) failure: Arc<Mutex<Option<PeerError>>>,
}

/// A request that has reached the server.
pub(crate) struct Asked {
    pub(crate) message: Value,
    items: mpsc::Sender<Item>,
}

impl Asked {
    /// Sends the answer.
    pub(crate) async fn answer(&self, member: &str, value: Value) {
        let line = json!({ "jsonrpc": "2.0", "id": self.message["id"], member: value }).to_string();
        self.items.send(Item::Answer(line)).await.unwrap();
    }

    /// Sends a message that belongs to the request.
    pub(crate) async fn tell(&self, message: &Value) {
        self.items.send(Item::Message(message.to_string())).await.unwrap();
    }

    /// Waits until the stack has dropped the request.
    pub(crate) async fn cancelled(&self) {
        self.items.closed().await;
    }
}

struct Script {
    asked: mpsc::UnboundedSender<Asked>,
    began: mpsc::UnboundedSender<mpsc::Sender<String>>,
    failure: Arc<Mutex<Option<PeerError>>>,
}

struct ScriptedPeer {
    asked: mpsc::UnboundedSender<Asked>,
    closed: CancellationToken,
}

struct Items(mpsc::Receiver<Item>);

#[async_trait]
impl Exchange for Items {
    async fn next(&mut self) -> Option<Item> {
        self.0.recv().await
    }
}

#[async_trait]
impl Peer<Caller> for ScriptedPeer {
    async fn request(&self, message: &Message<'_>, _: &Caller) -> Result<Box<dyn Exchange>, PeerError> {
        let (items, receiver) = mpsc::channel(16);
        let message = serde_json::from_str(&message.to_line(&[])).unwrap();
        self.asked.send(Asked { message, items }).unwrap();
        Ok(Box::new(Items(receiver)))
    }

    async fn notify(&self, _: &Message<'_>) {}

    async fn answer(&self, _: &Message<'_>) {}

    fn is_closed(&self) -> bool {
        self.closed.is_cancelled()
    }

    fn close(&self) {
        self.closed.cancel();
    }
}

impl Script {
    fn peer(&self) -> Result<Arc<dyn Peer<Caller>>, PeerError> {
        match self.failure.lock().unwrap().clone() {
            Some(error) => Err(error),
            None => {
                Ok(Arc::new(ScriptedPeer { asked: self.asked.clone(), closed: CancellationToken::new() }))
            }
        }
    }
}

#[async_trait]
impl Server<Caller> for Script {
    async fn initialize(&self, message: &Message<'_>, _: &Caller) -> Result<Initialized<Caller>, PeerError> {
        let peer = self.peer()?;
        let version = message.param("protocolVersion").unwrap();
        let answer = result_line(message.raw_id().unwrap(), &format!("{{\"protocolVersion\":{version}}}"));
        let (sender, notifications) = mpsc::channel(512);
        self.began.send(sender).unwrap();
        Ok(Initialized::Session { answer, peer, notifications: Some(notifications) })
    }

    async fn stateless(&self) -> Result<Option<Arc<dyn Peer<Caller>>>, PeerError> {
        self.peer().map(Some)
    }
}

impl World {
    pub(crate) fn new(limits: Limits) -> Self {
        let (asked, requests) = mpsc::unbounded_channel();
        let (began, sessions) = mpsc::unbounded_channel();
        let failure = Arc::default();
        let server = Script { asked, began, failure: Arc::clone(&failure) };
        let (requests, sessions) = (AsyncMutex::new(requests), AsyncMutex::new(sessions));
        Self { endpoint: Endpoint::new(limits), server, requests, sessions, failure }
    }

    /// The next request that reaches the server.
    pub(crate) async fn asked(&self) -> Asked {
        self.requests.lock().await.recv().await.unwrap()
    }

    /// The queue for the next session's messages outside of requests.
    pub(crate) async fn notifications(&self) -> mpsc::Sender<String> {
        self.sessions.lock().await.recv().await.unwrap()
    }

    pub(crate) async fn handle(
        &self,
        caller: &Caller,
        request: Request<Full<Bytes>>,
    ) -> Result<Response<ResponseBody>, Refusal> {
        self.endpoint.handle(&self.server, caller, request).await
    }

    /// Begins a session, and gives its id.
    pub(crate) async fn try_begin(&self, caller: &Caller) -> Result<String, Refusal> {
        let params = json!({ "protocolVersion": LEGACY, "capabilities": {} });
        let response = self.handle(caller, post(None, "initialize", &params)).await?;
        assert_eq!(response.status(), StatusCode::OK);
        Ok(response.headers()["mcp-session-id"].to_str().unwrap().to_owned())
    }

    pub(crate) async fn begin(&self, caller: &Caller) -> String {
        self.try_begin(caller).await.unwrap()
    }

    /// Listens to a session, after this event.
    pub(crate) async fn listen(
        &self,
        caller: &Caller,
        session: &str,
        after: Option<&str>,
    ) -> Result<Events, Refusal> {
        let mut request = request("GET").header("mcp-session-id", session);
        if let Some(event) = after {
            request = request.header("last-event-id", event);
        }
        let response = self.handle(caller, request.body(Full::default()).unwrap()).await?;
        Ok(Events::of(response))
    }

    /// Whether a session can be used by this caller.
    pub(crate) async fn lives(&self, caller: &Caller, session: &str) -> bool {
        let body = json!({ "jsonrpc": "2.0", "method": "notifications/none" }).to_string();
        let request = request("POST").header("mcp-session-id", session).body(Full::from(body)).unwrap();
        match self.handle(caller, request).await {
            Ok(response) => response.status() == StatusCode::ACCEPTED,
            Err(Refusal::SessionUnknown) => false,
            Err(other) => panic!("{other:?}"),
        }
    }
}

fn request(method: &str) -> http::request::Builder {
    let request = Request::builder().method(method).uri("/mcp");
    request.header("accept", "application/json, text/event-stream").header("content-type", "application/json")
}

/// A request of the legacy era.
pub(crate) fn post(session: Option<&str>, method: &str, params: &Value) -> Request<Full<Bytes>> {
    let body = json!({ "jsonrpc": "2.0", "id": 1, "method": method, "params": params }).to_string();
    let mut request = request("POST");
    if let Some(session) = session {
        request = request.header("mcp-session-id", session);
    }
    request.body(Full::from(body)).unwrap()
}

/// A request of the modern era.
pub(crate) fn modern(method: &str) -> Request<Full<Bytes>> {
    let meta = json!({
        "io.modelcontextprotocol/protocolVersion": MODERN,
        "io.modelcontextprotocol/clientCapabilities": {},
    });
    let params = json!({ "_meta": meta });
    let body = json!({ "jsonrpc": "2.0", "id": 1, "method": method, "params": params }).to_string();
    let request = request("POST").header("mcp-protocol-version", MODERN).header("mcp-method", method);
    request.body(Full::from(body)).unwrap()
}

/// The events of an answer. Dropping it closes the connection.
pub(crate) struct Events {
    body: ResponseBody,
    text: String,
}

/// An event: its id, and its message; null without one.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Event {
    pub(crate) id: Option<String>,
    pub(crate) message: Value,
}

impl Events {
    pub(crate) fn of(response: Response<ResponseBody>) -> Self {
        assert_eq!(response.status(), StatusCode::OK);
        assert_eq!(response.headers()["content-type"], "text/event-stream");
        Self { body: response.into_body(), text: String::new() }
    }

    /// The next event; none at the end. Comments are left out.
    pub(crate) async fn next(&mut self) -> Option<Event> {
        loop {
            if let Some((event, rest)) = self.text.split_once("\n\n") {
                let field = |name: &str| event.lines().find_map(|line| line.strip_prefix(name));
                let (id, data) = (field("id: ").map(str::to_owned), field("data: ").map(str::to_owned));
                self.text = rest.to_owned();
                let Some(data) = data else { continue };
                let message =
                    if data.is_empty() { Value::Null } else { serde_json::from_str(&data).unwrap() };
                return Some(Event { id, message });
            }
            let frame = self.body.frame().await?.unwrap().into_data().unwrap();
            self.text.push_str(std::str::from_utf8(&frame).unwrap());
        }
    }
}

/// The one message of an answer.
pub(crate) async fn only(response: Response<ResponseBody>) -> Value {
    assert_eq!(response.headers()["content-type"], "application/json");
    serde_json::from_slice(&response.into_body().collect().await.unwrap().to_bytes()).unwrap()
}
