//! Access to MCP endpoints. Hosted MCP servers and workspaces have the same rules for origins, sessions and bodies.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::Duration;

use emergent_test_support::mcp::{self, SERVERS};
use emergent_test_support::mcp_client::{McpClient, request};
use emergent_test_support::server::{TestServer, WORKSPACES};
use emergent_test_support::wait::wait_until;
use reqwest::Method;
use serde_json::{Value, json};

const BINARY: &str = env!("CARGO_BIN_EXE_emergent");
const BOTH: &str = "application/json, text/event-stream";

/// A server with two workspaces and a hosted MCP server. It allows one additional origin.
struct World {
    server: TestServer,
    workspaces: [String; 2],
    hosted: String,
}

impl World {
    async fn start() -> Self {
        let allowed = ("EMERGENT_MCP_ALLOWED_ORIGINS", r#"["https://app.example"]"#);
        let settings = [("EMERGENT_ALLOW_DOCKER", "true"), allowed];
        let server = TestServer::start_with(BINARY, &settings).await;
        let wanted = || json!({ "provider": "docker", "network": "isolated" });
        let workspaces = [server.create(wanted()).await, server.create(wanted()).await];
        server.register(&mcp::image(BINARY), json!({ "name": "chaos", "provider": "docker" })).await;
        server.wait_for_status("chaos", "ready").await;
        let hosted = server.mcp_server("chaos").await["id"].as_str().unwrap().to_owned();
        Self { server, workspaces, hosted }
    }

    /// An endpoint of each kind.
    fn addresses(&self) -> [String; 2] {
        [workspace(&self.workspaces[0]), format!("{SERVERS}/{}/mcp", self.hosted)]
    }

    /// Creates a token for one workspace or MCP server, or an admin token.
    async fn token(&self, bound_to: Option<&str>) -> String {
        let mut wanted = json!({ "name": bound_to.unwrap_or("another admin") });
        if let Some(id) = bound_to {
            wanted["workspace_id"] = id.into();
        }
        let made = self.server.request("POST", "/api/v1/tokens", Some(wanted)).await.ok();
        made["secret"].as_str().unwrap().to_owned()
    }

    /// Sends a request with these headers. Returns its status and body.
    async fn send(
        &self,
        token: &str,
        (method, path): (Method, &str),
        headers: &[(&str, &str)],
        body: String,
    ) -> (u16, Value) {
        let url = format!("{}{path}", self.server.url);
        let call = self.server.client().request(method, url).bearer_auth(token);
        let call = call.header("accept", BOTH).header("content-type", "application/json");
        let call = headers.iter().fold(call, |call, (name, value)| call.header(*name, *value));
        let response = call.body(body).send().await.unwrap();
        let status = response.status().as_u16();
        let is_stream =
            response.headers().get("content-type").is_some_and(|kind| kind == "text/event-stream");
        if is_stream {
            return (status, Value::Null);
        }
        (status, serde_json::from_slice(&response.bytes().await.unwrap()).unwrap_or(Value::Null))
    }

    async fn end(self) {
        for id in &self.workspaces {
            self.server.destroy(id).await;
        }
        self.server.remove_mcp("chaos").await;
        self.server.stop();
    }
}

fn workspace(id: &str) -> String {
    format!("{WORKSPACES}/{id}/mcp")
}

fn initialize() -> String {
    let info = json!({ "name": "c", "version": "1" });
    let params = json!({ "protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": info });
    request(0, "initialize", params).to_string()
}

#[tokio::test(flavor = "multi_thread")]
async fn every_mcp_endpoint_applies_the_same_origin_policy() {
    let world = World::start().await;
    let host = world.server.url.clone();
    for path in world.addresses() {
        for (origin, status) in [
            ("http://localhost:5173", 200),
            ("HTTP://LOCALHOST", 200),
            ("http://127.0.0.1:6274", 200),
            ("http://[::1]:6274", 200),
            ("https://app.example", 200),
            ("https://app.example:443", 200),
            ("https://app.example:8443", 403),
            ("http://app.example", 403),
            ("https://app.example.", 403),
            ("http://localhost.", 403),
            ("http://localhost.evil.example", 403),
            ("http://localhost:1@evil.example", 403),
            ("http://[2001:db8::1]", 403),
            ("https://evil.example", 403),
            ("null", 403),
            ("nonsense", 403),
            ("", 403),
        ] {
            let headers = [("origin", origin)];
            let answer = world.send(&world.server.token, (Method::POST, &path), &headers, initialize()).await;
            assert_eq!(answer.0, status, "{path} {origin}: {}", answer.1);
        }
        // DNS rebinding: the Host of a page agrees with its Origin.
        let rebound = [("origin", "http://evil.example"), ("host", "evil.example")];
        for method in [Method::POST, Method::GET, Method::DELETE] {
            let answer =
                world.send(&world.server.token, (method.clone(), &path), &rebound, initialize()).await;
            assert_eq!((answer.0, &answer.1["error"]["code"]), (403, &json!("forbidden")), "{method} {path}");
        }
        // A program sends no Origin, and its Host may be any name.
        for name in ["evil.example", host.trim_start_matches("http://")] {
            let headers = [("host", name)];
            let answer = world.send(&world.server.token, (Method::POST, &path), &headers, initialize()).await;
            assert_eq!(answer.0, 200, "{path} {name}");
        }
    }
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn mcp_session_is_unknown_to_other_tokens_and_endpoints() {
    let world = World::start().await;
    let ping = || request(1, "ping", json!({})).to_string();
    let admin = world.token(None).await;
    let addresses = world.addresses();
    for (path, bound_to) in addresses.iter().zip([&world.workspaces[0], &world.hosted]) {
        let bound = world.token(Some(bound_to)).await;
        let client = McpClient::open(&world.server, path).await;
        let session = [("mcp-session-id", client.session.as_str())];
        for token in [&admin, &bound] {
            // The token may use the endpoint, but not the session of another token.
            assert_eq!(world.send(token, (Method::POST, path), &[], initialize()).await.0, 200);
            for method in [Method::POST, Method::GET, Method::DELETE] {
                let answer = world.send(token, (method.clone(), path), &session, ping()).await;
                assert_eq!(
                    (answer.0, &answer.1["error"]["code"]),
                    (404, &json!("not_found")),
                    "{method} {path}"
                );
            }
        }
        let elsewhere = addresses.iter().filter(|other| *other != path).cloned();
        for other in elsewhere.chain([workspace(&world.workspaces[1])]) {
            let answer = world.send(&world.server.token, (Method::POST, &other), &session, ping()).await;
            assert_eq!(answer.0, 404, "{path} at {other}");
        }
        assert_eq!(world.send(&world.server.token, (Method::POST, path), &session, ping()).await.0, 200);
        assert_eq!(client.end().await, 204);
    }
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn malformed_mcp_requests_are_refused_and_the_session_continues() {
    let world = World::start().await;
    for path in world.addresses() {
        let client = McpClient::open(&world.server, &path).await;
        let other = McpClient::open(&world.server, &path).await;
        let (own, foreign) = (client.session.as_str(), other.session.as_str());
        let ping = request(1, "ping", json!({})).to_string();
        let event = |session: &str, rest: &str| format!("{}{rest}", session.split('-').next().unwrap());
        let foreign_event = event(foreign, "-0-0");
        for (method, last_event, body, status) in [
            (Method::POST, None, " ".repeat((5 << 20) + 1), 413),
            (Method::POST, None, format!("[{ping},{ping}]"), 400),
            (Method::POST, None, format!("{ping}\n{ping}"), 400),
            (Method::POST, None, "{".repeat(100_000), 400),
            (Method::POST, None, String::new(), 400),
            (Method::GET, Some(foreign_event.as_str()), String::new(), 400),
            (Method::GET, Some("1-1"), String::new(), 400),
            (Method::GET, Some(""), String::new(), 400),
        ] {
            let mut headers = vec![("mcp-session-id", own)];
            headers.extend(last_event.map(|id| ("last-event-id", id)));
            let about = format!("{method} {path} {last_event:?} {body:.40}");
            let answer = world.send(&world.server.token, (method, &path), &headers, body).await;
            assert_eq!(answer.0, status, "{about}: {}", answer.1);
            assert!(answer.1["error"]["message"].is_string(), "{about}: {}", answer.1);
        }
        // An event of a stream that no longer exists.
        let expired = event(own, "-99-1");
        let headers = [("mcp-session-id", own), ("last-event-id", expired.as_str())];
        let answer = world.send(&world.server.token, (Method::GET, &path), &headers, String::new()).await;
        assert_eq!(answer.0, 404, "{path}");
        assert!(client.ask(2, "tools/list", json!({})).await[0]["result"]["tools"].is_array());
        assert_eq!((client.end().await, other.end().await), (204, 204));
    }
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn sessions_and_calls_of_a_revoked_token_end() {
    let world = World::start().await;
    let calls = [
        json!({ "name": "bash", "arguments": { "command": "echo $$ > pid; exec sleep 600" } }),
        json!({ "name": "sleep", "arguments": { "ms": 600_000, "text": "late" } }),
    ];
    for ((path, call), bound_to) in
        world.addresses().iter().zip(calls).zip([&world.workspaces[0], &world.hosted])
    {
        let wanted = json!({ "name": "revoked", "workspace_id": bound_to });
        let made = world.server.request("POST", "/api/v1/tokens", Some(wanted)).await.ok();
        let client = McpClient::open_as(&world.server, path, made["secret"].as_str().unwrap()).await;
        // The call continues in the background, as after a lost connection.
        drop(client.post(&request(1, "tools/call", call)).await);
        let is_running = async || match bound_to == &world.hosted {
            true => world.server.mcp_server("chaos").await["pending_calls"] == 1,
            false => {
                let running = "kill -0 $(cat pid 2>/dev/null) 2>/dev/null && echo yes || true";
                world.server.bash(bound_to, running).await == "yes\n"
            }
        };
        let limit = Duration::from_secs(20);
        wait_until("the call runs", limit, async || is_running().await).await;
        let token = format!("/api/v1/tokens/{}", made["id"].as_str().unwrap());
        world.server.request("DELETE", &token, None).await.ok();
        wait_until("the call ends", limit, async || !is_running().await).await;
    }
    assert_eq!(world.server.mcp_server("chaos").await["sessions"], 0);
    world.end().await;
}
