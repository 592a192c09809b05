//! A minimal MCP client over Streamable HTTP. It exposes raw messages and events.

use reqwest::header::{ACCEPT, CONTENT_TYPE};
use reqwest::{RequestBuilder, Response};
use serde_json::{Value, json};

use crate::server::TestServer;
use crate::sse::EventReader;

/// The requested version of the protocol.
const VERSION: &str = "2025-11-25";

/// A client with a session.
pub struct McpClient {
    http: reqwest::Client,
    url: String,
    token: String,
    /// The session's id.
    pub session: String,
    /// The result of `initialize`.
    pub initialized: Value,
}

impl McpClient {
    /// Opens a session at this path.
    pub async fn open(server: &TestServer, path: &str) -> Self {
        Self::open_with(server, path, json!({})).await
    }

    /// Opens a session with another token than the admin token.
    pub async fn open_as(server: &TestServer, path: &str, token: &str) -> Self {
        Self::begin(server, path, token, json!({})).await
    }

    /// Opens a session with these capabilities.
    pub async fn open_with(server: &TestServer, path: &str, capabilities: Value) -> Self {
        Self::begin(server, path, &server.token, capabilities).await
    }

    async fn begin(server: &TestServer, path: &str, token: &str, capabilities: Value) -> Self {
        let mut client = Self {
            http: server.client().clone(),
            url: format!("{}{path}", server.url),
            token: token.to_owned(),
            session: String::new(),
            initialized: Value::Null,
        };
        let info = json!({ "name": "test", "version": "1" });
        let params = json!({ "protocolVersion": VERSION, "capabilities": capabilities, "clientInfo": info });
        let response = client.post(&request(0, "initialize", params)).await;
        assert_eq!(response.status(), 200, "{:?}", response.text().await);
        let session = response.headers().get("mcp-session-id").expect("the server begins a session");
        client.session = session.to_str().expect("the id is text").to_owned();
        let mut messages = read(response).await;
        client.initialized = messages.pop().expect("the server answers")["result"].clone();
        client.notify("notifications/initialized", json!({})).await;
        client
    }

    fn build(&self, method: reqwest::Method) -> RequestBuilder {
        let mut request = self.http.request(method, &self.url).bearer_auth(&self.token);
        if !self.session.is_empty() {
            request = request.header("mcp-session-id", &self.session).header("mcp-protocol-version", VERSION);
        }
        request
    }

    /// Sends a message, and returns the response with an unread body.
    pub async fn post(&self, message: &Value) -> Response {
        let request = self.build(reqwest::Method::POST).header(CONTENT_TYPE, "application/json");
        let request = request.header(ACCEPT, "application/json, text/event-stream").body(message.to_string());
        request.send().await.expect("the server answers")
    }

    /// Sends a request, and returns all messages of the response. The answer is the last one.
    pub async fn ask(&self, id: u64, method: &str, params: Value) -> Vec<Value> {
        let response = self.post(&request(id, method, params)).await;
        assert_eq!(response.status(), 200, "{:?}", response.text().await);
        read(response).await
    }

    /// Calls a tool, and returns the answer.
    pub async fn tool(&self, id: u64, name: &str, arguments: Value) -> Value {
        let params = json!({ "name": name, "arguments": arguments });
        self.ask(id, "tools/call", params).await.pop().expect("the server answers")
    }

    /// Calls a tool, and returns the text of its result.
    pub async fn text(&self, id: u64, name: &str, arguments: Value) -> String {
        let answer = self.tool(id, name, arguments).await;
        assert_eq!(answer["id"], id, "{answer}");
        answer["result"]["content"][0]["text"].as_str().unwrap_or_else(|| panic!("{answer:#}")).to_owned()
    }

    /// Sends a notification.
    pub async fn notify(&self, method: &str, params: Value) {
        let response = self.post(&json!({ "jsonrpc": "2.0", "method": method, "params": params })).await;
        assert_eq!(response.status(), 202);
    }

    /// Opens the stream of messages that the server sends by itself, or resumes a stream after an event.
    pub async fn listen(&self, after: Option<&str>) -> EventReader {
        let mut request = self.build(reqwest::Method::GET).header(ACCEPT, "text/event-stream");
        if let Some(id) = after {
            request = request.header("last-event-id", id);
        }
        let response = request.send().await.expect("the server answers");
        assert_eq!(response.status(), 200, "{:?}", response.text().await);
        EventReader::new(response)
    }

    /// Ends the session, and returns the status.
    pub async fn end(&self) -> u16 {
        let request = self.build(reqwest::Method::DELETE);
        request.send().await.expect("the server answers").status().as_u16()
    }
}

/// A JSON-RPC request.
#[allow(clippy::needless_pass_by_value, reason = "callers make the parameters for it")]
pub fn request(id: u64, method: &str, params: Value) -> Value {
    json!({ "jsonrpc": "2.0", "id": id, "method": method, "params": params })
}

/// The messages of a response, which is JSON or a stream of events.
async fn read(response: Response) -> Vec<Value> {
    let kind = response.headers().get(CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    if !kind.starts_with("text/event-stream") {
        return vec![response.json().await.expect("the body is JSON")];
    }
    let mut events = EventReader::new(response);
    let mut messages = Vec::new();
    while let Some(event) = events.next().await {
        messages.extend(Some(event.data).filter(|data| !data.is_null()));
    }
    messages
}
