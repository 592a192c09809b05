//! MCP's Streamable HTTP for hosted servers: sessions, resumed streams, access, both eras of the protocol, and servers that speak HTTP.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::Duration;

use emergent_test_support::mcp::{self, SERVERS};
use emergent_test_support::mcp_client::{McpClient, request};
use emergent_test_support::server::TestServer;
use emergent_test_support::sse::EventReader;
use emergent_test_support::wait::wait_until;
use serde_json::{Value, json};

const BINARY: &str = env!("CARGO_BIN_EXE_emergent");
const BOTH: &str = "application/json, text/event-stream";

async fn host(name: &str, more: Value) -> (TestServer, String) {
    let server = TestServer::start(BINARY).await;
    let mut wanted = json!({ "name": name, "provider": "docker" });
    wanted.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    server.register(&mcp::image(BINARY), wanted).await;
    server.wait_for_status(name, "ready").await;
    (server, format!("{SERVERS}/{name}/mcp"))
}

/// Sends a raw message with these headers. Returns its status and body.
async fn send(server: &TestServer, path: &str, headers: &[(&str, &str)], body: &str) -> (u16, Value) {
    let mut call = server.client().post(format!("{}{path}", server.url)).bearer_auth(&server.token);
    for (name, value) in [("accept", BOTH), ("content-type", "application/json")] {
        if !headers.iter().any(|(own, _)| *own == name) {
            call = call.header(name, value);
        }
    }
    for (name, value) in headers {
        call = call.header(*name, *value);
    }
    let response = call.body(body.to_owned()).send().await.unwrap();
    let status = response.status().as_u16();
    (status, serde_json::from_slice(&response.bytes().await.unwrap()).unwrap_or(Value::Null))
}

#[tokio::test(flavor = "multi_thread")]
async fn sessions_begin_with_initialize_and_end_with_delete() {
    let (server, path) = host("sessions", json!({})).await;
    let client = McpClient::open(&server, &path).await;
    assert_eq!(client.initialized["serverInfo"]["name"], "mcp-chaos");
    assert_eq!(client.text(1, "echo", json!({ "text": "hello" })).await, "hello");
    let list = request(2, "tools/list", json!({})).to_string();
    assert_eq!(send(&server, &path, &[], &list).await.0, 400);
    assert_eq!(send(&server, &path, &[("mcp-session-id", "nobody's")], &list).await.0, 404);
    let own = [("mcp-session-id", client.session.as_str())];
    assert_eq!(send(&server, &path, &own, &list).await.0, 200);
    let strange = [own[0], ("mcp-protocol-version", "1999-01-01")];
    assert_eq!(send(&server, &path, &strange, &list).await.0, 400);
    // Bodies that are not messages, and headers that accept no answer.
    for (body, code) in [("nonsense", -32700), ("[]", -32600), ("{\"jsonrpc\":\"2.0\",\"id\":1}", -32600)] {
        let (status, answer) = send(&server, &path, &own, body).await;
        assert_eq!((status, &answer["error"]["code"]), (400, &json!(code)), "{body}: {answer}");
    }
    assert_eq!(send(&server, &path, &[own[0], ("accept", "application/json")], &list).await.0, 406);
    assert_eq!(send(&server, &path, &[own[0], ("content-type", "text/plain")], &list).await.0, 415);
    // An older client gets the version that it requests.
    let old = json!({ "protocolVersion": "2024-11-05", "capabilities": {}, "clientInfo": { "name": "old", "version": "1" } });
    let (_, answer) = send(&server, &path, &[], &request(1, "initialize", old).to_string()).await;
    assert_eq!(answer["result"]["protocolVersion"], "2024-11-05", "{answer}");
    assert_eq!(client.end().await, 204);
    assert_eq!(client.end().await, 404);
    assert_eq!(send(&server, &path, &own, &list).await.0, 404);
    server.remove_mcp("sessions").await;
    server.stop();
}

#[tokio::test(flavor = "multi_thread")]
async fn mcp_endpoint_checks_origin_and_token() {
    let (server, path) = host("guarded", json!({})).await;
    let initialize = json!({ "protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": { "name": "c", "version": "1" } });
    let initialize = request(0, "initialize", initialize).to_string();
    for (origin, status) in [
        ("http://evil.example", 403),
        ("null", 403),
        ("http://localhost:5173", 200),
        ("http://127.0.0.1", 200),
    ] {
        assert_eq!(send(&server, &path, &[("origin", origin)], &initialize).await.0, status, "{origin}");
    }
    let url = format!("{}{path}", server.url);
    for token in [None, Some("emt_wrong")] {
        let mut call = server.client().post(&url).body(initialize.clone());
        if let Some(token) = token {
            call = call.bearer_auth(token);
        }
        let answer = call.send().await.unwrap();
        assert_eq!(answer.status(), 401);
        let challenge = answer.headers()["www-authenticate"].to_str().unwrap().to_owned();
        assert!(challenge.starts_with("Bearer realm="), "{challenge}");
        assert_eq!(challenge.contains("error=\"invalid_token\""), token.is_some(), "{challenge}");
    }
    // A token for this MCP server may call it by its id, and nothing else.
    let id = server.mcp_server("guarded").await["id"].as_str().unwrap().to_owned();
    let made = server
        .request("POST", "/api/v1/tokens", Some(json!({ "name": "own", "workspace_id": id })))
        .await
        .ok();
    let token = made["secret"].as_str().unwrap().to_owned();
    let call =
        json!({ "method": "tools/call", "params": { "name": "echo", "arguments": { "text": "mine" } } });
    let answer =
        server.request_as(Some(&token), "POST", &format!("{SERVERS}/{id}/call"), Some(call)).await.ok();
    assert_eq!(answer["result"]["content"][0]["text"], "mine");
    for (method, rest) in [("DELETE", ""), ("POST", "/restart"), ("GET", "/logs")] {
        server.request_as(Some(&token), method, &format!("{SERVERS}/{id}{rest}"), None).await.error(403);
    }
    server.request_as(Some(&token), "GET", SERVERS, None).await.error(403);
    server.remove_mcp("guarded").await;
    server.stop();
}

#[tokio::test(flavor = "multi_thread")]
async fn cut_off_stream_is_resumed_after_its_last_event() {
    let (server, path) = host("streams", json!({})).await;
    let client = McpClient::open(&server, &path).await;
    let params = json!({ "name": "progress", "arguments": { "steps": 3, "text": "done" }, "_meta": { "progressToken": 5 } });
    let response = client.post(&request(9, "tools/call", params)).await;
    assert_eq!(response.headers()["content-type"], "text/event-stream");
    let mut events = EventReader::new(response);
    let first = events.next().await.unwrap();
    assert_eq!(first.data, Value::Null, "the first event has an id to resume after, and no data");
    let second = events.next().await.unwrap();
    assert_eq!(second.data["params"]["progressToken"], 5);
    drop(events);
    let rest = client.listen(second.id.as_deref()).await.collect().await;
    let seen: Vec<Value> = rest.into_iter().map(|event| event.data).collect();
    assert_eq!(seen.len(), 3, "{seen:?}");
    assert_eq!(seen[2]["id"], 9, "{seen:?}");
    // A listening stream gets messages that the server sends by itself, also earlier ones.
    client.text(10, "notify", json!({ "method": "notifications/tools/list_changed" })).await;
    let told = client.listen(None).await.until(|event| !event.data.is_null()).await;
    assert_eq!(told.data["method"], "notifications/tools/list_changed");
    server.remove_mcp("streams").await;
    server.stop();
}

#[tokio::test(flavor = "multi_thread")]
async fn sessions_survive_a_crash_of_their_shared_server() {
    let (server, path) = host("crashing", json!({})).await;
    let client = McpClient::open(&server, &path).await;
    let answer = client.tool(1, "crash", json!({ "code": 3 })).await;
    assert_eq!(answer["error"]["code"], -32000, "{answer}");
    assert!(answer["error"]["message"].as_str().unwrap().contains("exit code 3"), "{answer}");
    assert_eq!(client.text(2, "echo", json!({ "text": "the same session" })).await, "the same session");
    server.remove_mcp("crashing").await;
    server.stop();
}

#[tokio::test(flavor = "multi_thread")]
async fn per_session_mode_runs_one_process_for_each_session() {
    let (server, path) = host("own", json!({ "mode": "per_session" })).await;
    let (a, b) = (McpClient::open(&server, &path).await, McpClient::open(&server, &path).await);
    let pids = [a.text(1, "pid", json!({})).await, b.text(1, "pid", json!({})).await];
    assert_ne!(pids[0], pids[1]);
    assert_eq!(server.mcp_server("own").await["usage"]["processes"], 2);
    // A server sends a request to its client, and gets the answer of that client.
    let params = json!({ "name": "ask", "arguments": { "method": "roots/list" } });
    let response = a.post(&request(2, "tools/call", params)).await;
    let mut events = EventReader::new(response);
    let from_server = events.until(|event| event.data["method"] == "roots/list").await.data;
    let roots =
        json!({ "jsonrpc": "2.0", "id": from_server["id"], "result": { "roots": [{ "uri": "file:///a" }] } });
    assert_eq!(a.post(&roots).await.status(), 202);
    let answer = events.until(|event| event.data["id"] == 2).await.data;
    assert!(answer.to_string().contains("file:///a"), "{answer}");
    // A crash ends one session, and the other continues.
    a.tool(3, "crash", json!({ "code": 1 })).await;
    let again = a.post(&request(4, "tools/list", json!({}))).await;
    assert_eq!(again.status(), 404);
    assert_eq!(b.text(5, "echo", json!({ "text": "here" })).await, "here");
    // A call without a session has a process of its own.
    let pid = server.mcp_text("own", "pid", json!({})).await;
    assert!(!pids.contains(&pid));
    // The end of a session does not wait for its streams and calls.
    let listening = b.listen(None).await;
    let sleep =
        request(6, "tools/call", json!({ "name": "sleep", "arguments": { "ms": 600_000, "text": "late" } }));
    let end = async {
        server.wait_until_mcp("own", "pending_calls", |calls| calls == 1).await;
        b.end().await
    };
    let (answered, ended) = tokio::join!(b.post(&sleep), end);
    assert_eq!((answered.status().as_u16(), ended), (200, 204));
    listening.collect().await;
    wait_until("no process is left", Duration::from_secs(15), async || {
        server.mcp_server("own").await["usage"]["processes"] == 0
    })
    .await;
    server.remove_mcp("own").await;
    server.stop();
}

/// The parameters of a request in the modern era, which has its protocol version in each request.
fn modern(params: Value) -> Value {
    let mut params = params;
    params["_meta"] = json!({
        "io.modelcontextprotocol/protocolVersion": "2026-07-28",
        "io.modelcontextprotocol/clientCapabilities": {},
    });
    params
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_of_the_modern_era_need_no_session() {
    let (server, path) = host("dual", json!({ "command": ["mcp-fixture"] })).await;
    let version = ("mcp-protocol-version", "2026-07-28");
    let call = request(1, "tools/call", modern(json!({ "name": "echo", "arguments": { "text": "new" } })))
        .to_string();
    let headers = [version, ("mcp-method", "tools/call"), ("mcp-name", "echo")];
    let (status, answer) = send(&server, &path, &headers, &call).await;
    assert_eq!((status, &answer["result"]["content"][0]["text"]), (200, &json!("new")), "{answer}");
    for (headers, code) in [
        (vec![version, ("mcp-method", "tools/list"), ("mcp-name", "echo")], -32020),
        (vec![version, ("mcp-method", "tools/call"), ("mcp-name", "other")], -32020),
        (vec![version, ("mcp-method", "tools/call")], -32020),
        (
            vec![("mcp-protocol-version", "2025-11-25"), ("mcp-method", "tools/call"), ("mcp-name", "echo")],
            -32020,
        ),
    ] {
        let (status, answer) = send(&server, &path, &headers, &call).await;
        assert_eq!((status, &answer["error"]["code"]), (400, &json!(code)), "{headers:?}: {answer}");
    }
    let ping = request(2, "ping", modern(json!({}))).to_string();
    let (status, answer) = send(&server, &path, &[version, ("mcp-method", "ping")], &ping).await;
    assert_eq!((status, &answer["error"]["code"]), (404, &json!(-32601)), "{answer}");
    let listen = server.client().get(format!("{}{path}", server.url)).bearer_auth(&server.token);
    let listen =
        listen.header(version.0, version.1).header("accept", "text/event-stream").send().await.unwrap();
    assert_eq!((listen.status().as_u16(), listen.headers()["allow"].to_str().unwrap()), (405, "POST"));
    // A client of the legacy era uses the same server.
    let client = McpClient::open(&server, &path).await;
    assert_eq!(client.text(1, "echo", json!({ "text": "old" })).await, "old");
    server.remove_mcp("dual").await;
    // A server of the legacy era refuses the version.
    server.register(&mcp::image(BINARY), json!({ "name": "old", "provider": "docker" })).await;
    let path = format!("{SERVERS}/old/mcp");
    let (status, answer) = send(&server, &path, &headers, &call).await;
    assert_eq!((status, &answer["error"]["code"]), (400, &json!(-32022)), "{answer}");
    assert_eq!(answer["error"]["data"]["requested"], "2026-07-28");
    server.remove_mcp("old").await;
    server.stop();
}

#[tokio::test(flavor = "multi_thread")]
async fn http_server_is_reached_only_through_its_sandbox() {
    for network in ["nat", "isolated"] {
        let command = json!(["mcp-fixture", "--http", "127.0.0.1:8931"]);
        let more = json!({ "command": command, "stdio_bridge": false, "port": 8931, "network": network });
        let (server, path) = host("direct", more).await;
        let client = McpClient::open(&server, &path).await;
        assert_eq!(client.initialized["serverInfo"]["name"], "mcp-fixture");
        for turn in 1..5 {
            assert_eq!(client.text(turn, "echo", json!({ "text": "through" })).await, "through");
        }
        // The endpoint checks tokens and origins.
        let url = format!("{}{path}", server.url);
        assert_eq!(server.client().post(&url).body("{}").send().await.unwrap().status(), 401);
        let evil = send(&server, &path, &[("origin", "http://evil.example")], "{}").await;
        assert_eq!(evil.0, 403);
        let call = json!({ "method": "tools/list" });
        server.request("POST", &format!("{SERVERS}/direct/call"), Some(call)).await.error(422);
        let lines = server.request("GET", &format!("{SERVERS}/direct/logs"), None).await.ok();
        assert!(lines.to_string().contains("listening on"), "{lines:#}");
        server.remove_mcp("direct").await;
        server.stop();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn followed_logs_are_streamed_and_resumed() {
    let (server, _) = host("talkative", json!({})).await;
    server.mcp_text("talkative", "stderr", json!({ "text": "one" })).await;
    let path = format!("{SERVERS}/talkative/logs?follow=true");
    let mut events = server.events("GET", &path, None, None).await;
    let first = events.next().await.unwrap();
    assert_eq!((&first.data["text"], &first.data["source"]), (&json!("one"), &json!("stderr")));
    server.mcp_text("talkative", "stderr", json!({ "text": "two" })).await;
    let second = events.next().await.unwrap();
    assert_eq!(second.data["text"], "two");
    drop(events);
    let mut events = server.events("GET", &path, None, first.id.as_deref()).await;
    assert_eq!(events.next().await.unwrap().data["text"], "two");
    drop(events);
    let lines = server.request("GET", &format!("{SERVERS}/talkative/logs?tail=1"), None).await.ok();
    assert_eq!(lines["lines"].as_array().unwrap().len(), 1);
    server.remove_mcp("talkative").await;
    server.stop();
}
