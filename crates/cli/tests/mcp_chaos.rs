//! MCP servers that misbehave, many concurrent clients, and engines that fail. Each client gets its own answers, every call ends, and
//! nothing is left.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::{Duration, Instant};

use emergent_test_support::command::docker;
use emergent_test_support::engine::TestEngine;
use emergent_test_support::mcp::{self, SERVERS};
use emergent_test_support::mcp_client::{McpClient, request};
use emergent_test_support::server::{Answer, TestServer};
use futures_util::future::join_all;
use serde_json::{Value, json};

const BINARY: &str = env!("CARGO_BIN_EXE_emergent");

struct World {
    server: TestServer,
    image: String,
}

impl World {
    async fn new() -> Self {
        Self { server: TestServer::start(BINARY).await, image: mcp::image(BINARY) }
    }

    /// Registers `mcp-chaos` with one of its modes. The mode is also the name of the server.
    async fn host(&self, mode: &[&str]) -> &Self {
        let request = json!({ "name": mode[0], "args": mode, "provider": "docker", "timeout_ms": 3000 });
        self.server.register(&self.image, request).await;
        self.server.wait_for_status(mode[0], "ready").await;
        self
    }

    async fn echo(&self, name: &str, text: &str) -> String {
        self.server.mcp_text(name, "echo", json!({ "text": text })).await
    }

    async fn remove(&self, name: &str) {
        self.server.remove_mcp(name).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_succeed_beside_junk_and_floods_of_output() {
    let world = World::new().await;
    for mode in [
        &["junk"][..],
        &["half-line"],
        &["twice"],
        &["stranger"],
        &["flood-stdout"],
        &["flood-junk"],
        &["flood-stderr"],
    ] {
        world.host(mode).await;
        for turn in 0..20 {
            let text = format!("{} {turn}", mode[0]);
            assert_eq!(world.echo(mode[0], &text).await, text);
        }
        let server = world.server.mcp_server(mode[0]).await;
        assert_eq!((&server["status"], &server["restarts"]), (&json!("ready"), &json!(0)), "{server:#}");
        world.remove(mode[0]).await;
    }
    // The floods are not in the server's log.
    assert!(world.server.log().len() < 200_000, "{}", world.server.log().len());
    world.server.stop();
}

#[tokio::test(flavor = "multi_thread")]
async fn answer_of_100_mb_fails_only_its_call() {
    let world = World::new().await;
    world.host(&["long-line", "100000000"]).await;
    let before = world.server.memory_bytes();
    // Printing the answer takes longer than the server's time-out, so this call has its own.
    let body = json!({ "method": "tools/call", "params": { "name": "long" }, "timeout_ms": 60_000 });
    let answer = world.server.request("POST", &format!("{SERVERS}/long-line/call"), Some(body)).await.ok();
    assert!(answer["error"]["message"].as_str().unwrap().contains("100000000 bytes"), "{answer}");
    assert_eq!(world.echo("long-line", "still there").await, "still there");
    let after = world.server.memory_bytes();
    assert!(after < before + (60_000 << 10), "{before} bytes, then {after} bytes");
    world.remove("long-line").await;
    world.server.stop();
}

#[tokio::test(flavor = "multi_thread")]
async fn server_that_never_answers_is_unresponsive_and_keeps_running() {
    let world = World::new().await;
    world.host(&["silent-after-init"]).await;
    let late = world.server.mcp_tool("silent-after-init", "echo", json!({ "text": "x" })).await;
    assert_eq!(late.error(504), "deadline_exceeded");
    let server = world.server.wait_for_status("silent-after-init", "unresponsive").await;
    assert_eq!(server["restarts"], 0, "{server:#}");
    world.remove("silent-after-init").await;
    // A server that does not answer `initialize`: calls fail, and it keeps running.
    let request = json!({ "name": "silent", "args": ["silent"], "provider": "docker", "timeout_ms": 1000 });
    let silent = async {
        world.server.register(&world.image, request).await;
        let late = world.server.mcp_tool("silent", "echo", json!({ "text": "x" })).await;
        assert_eq!(late.error(503), "unavailable");
        let server = world.server.wait_for_status("silent", "unresponsive").await;
        assert_eq!(server["restarts"], 0, "{server:#}");
        assert_eq!(world.server.mcp_server("silent").await["usage"]["processes"], 1);
        world.remove("silent").await;
    };
    // A server that starts slowly: the call waits.
    let request = json!({ "name": "slow-start", "args": ["slow-start", "4000"], "provider": "docker" });
    let slow = async {
        world.server.register(&world.image, request).await;
        assert_eq!(world.echo("slow-start", "here I am").await, "here I am");
        world.remove("slow-start").await;
    };
    tokio::join!(silent, slow);
    world.server.stop();
}

#[tokio::test(flavor = "multi_thread")]
async fn servers_that_ignore_signals_are_killed_with_their_children() {
    let world = World::new().await;
    for mode in ["ignore-eof", "ignore-term"] {
        world.host(&[mode]).await;
        world.server.mcp_text(mode, "spawn", json!({ "seconds": 600 })).await;
        assert_eq!(world.server.mcp_server(mode).await["usage"]["processes"], 2);
        // When the process dies, its child is killed.
        world.server.mcp_tool(mode, "crash", json!({ "code": 1 })).await.error(502);
        world.server.wait_for_status(mode, "ready").await;
        assert_eq!(world.server.mcp_server(mode).await["usage"]["processes"], 1);
        world.remove(mode).await;
    }
    world.server.stop();
}

#[tokio::test(flavor = "multi_thread")]
async fn sixty_four_concurrent_clients_get_their_own_answers() {
    let world = World::new().await;
    world.host(&["normal"]).await;
    let path = format!("{SERVERS}/normal/mcp");
    let clients = join_all((0..64).map(|_| McpClient::open(&world.server, &path))).await;
    let work = clients.iter().enumerate().map(|(number, client)| async move {
        // All clients use the same ids and the same progress token.
        for turn in 0..6_u64 {
            let text = format!("client {number}, turn {turn}");
            if (number as u64 + turn).is_multiple_of(3) {
                let arguments = json!({ "ms": 50 + number, "text": text });
                assert_eq!(client.text(turn, "sleep", arguments).await, text);
            } else if number % 5 == 0 {
                let arguments = json!({ "steps": 3, "text": text });
                let params = json!({ "name": "progress", "arguments": arguments, "_meta": { "progressToken": "same" } });
                let mut messages = client.ask(turn, "tools/call", params).await;
                let answer = messages.pop().unwrap();
                assert!(answer.to_string().contains(&text), "{answer}");
                assert_eq!(messages.len(), 3, "{messages:?}");
                assert!(messages.iter().all(|told| told["params"]["progressToken"] == "same"), "{messages:?}");
            } else {
                assert_eq!(client.text(turn, "echo", json!({ "text": text })).await, text);
            }
        }
    });
    join_all(work).await;
    let server = world.server.mcp_server("normal").await;
    assert_eq!((&server["sessions"], &server["pending_calls"]), (&json!(64), &json!(0)), "{server:#}");
    assert_eq!(server["usage"]["processes"], 1, "{server:#}");
    join_all(clients.iter().map(McpClient::end)).await;
    assert_eq!(world.server.mcp_server("normal").await["sessions"], 0);
    world.remove("normal").await;
    world.server.stop();
}

#[tokio::test(flavor = "multi_thread")]
async fn bridge_forwards_json_unchanged() {
    let world = World::new().await;
    world.host(&["normal"]).await;
    // The server returns the received text. It must have the forms of numbers, the unknown fields and their order.
    let meta = r#"{"z":1.0,"progressToken":7,"a":12345678901234567890,"x-odd":[1e400,"\u00e9"]}"#;
    let body = format!(
        r#"{{"method":"tools/call","params":{{"name":"echo","arguments":{{"text":"x"}},"_meta":{meta}}}}}"#
    );
    let response = world
        .server
        .client()
        .post(format!("{}{SERVERS}/normal/call", world.server.url))
        .bearer_auth(&world.server.token)
        .body(body)
        .send()
        .await
        .unwrap();
    let text = response.text().await.unwrap();
    for piece in [r#""z":1.0"#, r#""a":12345678901234567890"#, r#"[1e400,"\u00e9"]"#] {
        assert!(text.contains(piece), "{piece} is not in {text}");
    }
    world.remove("normal").await;
    world.server.stop();
}

#[tokio::test(flavor = "multi_thread")]
async fn removed_or_killed_container_of_an_mcp_server_is_replaced() {
    let world = World::new().await;
    let request = json!({ "name": "kept", "volumes": ["data:/data"] });
    let made = world.server.register(&world.image, request).await;
    let container = made["provider_workspace_id"].as_str().unwrap();
    docker(&["rm", "--force", container]);
    let begun = Instant::now();
    loop {
        let Answer { status, body } = world.server.mcp_tool("kept", "echo", json!({ "text": "back" })).await;
        if status == 200 && body["result"]["content"][0]["text"] == "back" {
            break;
        }
        assert!(begun.elapsed() < Duration::from_secs(30), "{status} {body}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let server = world.server.wait_for_status("kept", "ready").await;
    assert!(server["last_exit"]["reason"].as_str().unwrap().contains("sandbox was lost"), "{server:#}");
    assert_eq!(docker(&["inspect", "--format", "{{.State.Running}}", container]), "true");
    // The whole sandbox is killed.
    let restarts = server["restarts"].as_u64().unwrap();
    docker(&["kill", "--signal", "KILL", container]);
    world.server.wait_until_mcp("kept", "restarts", |now| now > restarts).await;
    world.server.wait_for_status("kept", "ready").await;
    assert_eq!(world.echo("kept", "again").await, "again");
    world.remove("kept").await;
    world.server.stop();
}

/// An MCP server in bash. It answers every request with the number of its starts.
const COUNTING: &str = r#"
echo x >> /data/starts
while read -r line; do
    id=$(printf '%s' "$line" | sed -n 's/.*"id":\([0-9]*\).*/\1/p')
    [ -z "$id" ] || printf '{"jsonrpc":"2.0","id":%s,"result":{"protocolVersion":"2025-11-25","capabilities":{},"serverInfo":{"name":"s","version":"1"},"starts":%s}}\n' "$id" "$(wc -l < /data/starts)"
done
"#;

#[tokio::test(flavor = "multi_thread")]
async fn mcp_server_is_restarted_after_the_engine_restarts() {
    for signal in ["TERM", "KILL"] {
        let mut engine = TestEngine::start_with_gvisor("");
        let host = engine.host();
        let server = TestServer::start_with(BINARY, &[("DOCKER_HOST", &host)]).await;
        let command = json!(["bash", "-c", COUNTING]);
        let request = json!({ "name": "counting", "command": command, "volumes": ["data:/data"], "network": "isolated" });
        server.register("emergent/workspace:latest", request).await;
        server.wait_for_status("counting", "ready").await;
        let starts = async || server.mcp("counting", "count", json!({})).await;
        assert_eq!(starts().await.ok()["result"]["starts"], 1);
        tokio::task::block_in_place(|| engine.end(signal));
        server.wait_for_status("counting", "error").await;
        assert_eq!(starts().await.error(503), "unavailable", "{signal}");
        engine.start_again();
        server.wait_for_status("counting", "ready").await;
        assert_eq!(starts().await.ok()["result"]["starts"], 2, "{signal}");
        server.remove_mcp("counting").await;
        server.stop();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn cancellation_is_forwarded_to_the_mcp_server() {
    let world = World::new().await;
    world.host(&["normal"]).await;
    let client = McpClient::open(&world.server, &format!("{SERVERS}/normal/mcp")).await;
    // A cancelled request gets no answer.
    let cancelled = async {
        let params = json!({ "name": "sleep", "arguments": { "ms": 60_000, "text": "late" } });
        client.post(&request(8, "tools/call", params)).await.status()
    };
    let cancel = async {
        world.server.wait_until_mcp("normal", "pending_calls", |calls| calls == 1).await;
        client.notify("notifications/cancelled", json!({ "requestId": 8, "reason": "enough" })).await;
    };
    let (status, ()) = tokio::join!(cancelled, cancel);
    assert_eq!(status, 202);
    let received = world.server.mcp_text("normal", "received", json!({})).await;
    let received: Value = serde_json::from_str(&received).unwrap();
    let all = received["notifications"].as_array().unwrap();
    let cancelled: Vec<_> = all.iter().filter(|told| told["method"] == "notifications/cancelled").collect();
    assert_eq!(cancelled.len(), 1, "{received:#}");
    assert_ne!(
        cancelled[0]["params"]["requestId"], 8,
        "the server gets the id of the bridge, not of the client"
    );
    world.remove("normal").await;
    world.server.stop();
}

/// An MCP server in Python. The method `eat` takes all memory.
const HUNGRY: &str = r#"
import json, sys
for line in sys.stdin:
    asked = json.loads(line)
    if asked.get("method") == "initialize":
        info = {"protocolVersion": "2025-11-25", "capabilities": {}, "serverInfo": {"name": "h", "version": "1"}}
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": info}), flush=True)
    elif asked.get("method") == "eat":
        eaten = []
        while True:
            eaten.append(bytearray(16 << 20))
"#;

#[tokio::test(flavor = "multi_thread")]
async fn mcp_server_out_of_memory_is_reported_and_restarted() {
    let world = World::new().await;
    for provider in ["gvisor", "docker"] {
        let command = json!(["python3", "-c", HUNGRY]);
        let limits = json!({ "memory": "256M" });
        let request =
            json!({ "name": "hungry", "command": command, "provider": provider, "resource_limits": limits });
        world.server.register(&world.image, request).await;
        world.server.wait_for_status("hungry", "ready").await;
        let answer = world.server.mcp("hungry", "eat", json!({})).await;
        assert_eq!(answer.error(502), "sandbox_lost", "{provider}");
        let server = world.server.wait_for_status("hungry", "ready").await;
        let reason = server["last_exit"]["reason"].as_str().unwrap();
        assert!(reason.contains("out of memory"), "{provider}: {server:#}");
        world.remove("hungry").await;
    }
    world.server.stop();
}
