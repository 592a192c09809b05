//! MCP servers from the public registries, each on gVisor. `scripts/setup test` makes their images.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use emergent_test_support::mcp::SERVERS;
use emergent_test_support::mcp_client::McpClient;
use emergent_test_support::server::TestServer;
use serde_json::{Value, json};

const BINARY: &str = env!("CARGO_BIN_EXE_emergent");

/// Starts a server that hosts this image without a network.
async fn host(name: &str, more: Value) -> TestServer {
    let server = TestServer::start_with(BINARY, &[]).await;
    let mut wanted = json!({ "name": name, "network": "isolated" });
    wanted.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let made = server.register(&format!("emergent/mcp-{name}:latest"), wanted).await;
    assert_eq!((&made["status"], &made["provider"]), (&json!("ready"), &json!("gvisor")), "{made:#}");
    server
}

async fn stop(server: TestServer, name: &str) {
    server.remove_mcp(name).await;
    server.stop();
}

#[tokio::test(flavor = "multi_thread")]
async fn everything_server_answers_with_progress_and_errors() {
    let server = host("everything", json!({})).await;
    assert_eq!(server.mcp_text("everything", "echo", json!({ "message": "hello" })).await, "Echo: hello");
    assert_eq!(
        server.mcp_text("everything", "get-sum", json!({ "a": 2, "b": 3 })).await,
        "The sum of 2 and 3 is 5."
    );
    let client = McpClient::open(&server, &format!("{SERVERS}/everything/mcp")).await;
    let arguments = json!({ "duration": 1, "steps": 2 });
    let params = json!({ "name": "trigger-long-running-operation", "arguments": arguments, "_meta": { "progressToken": "p" } });
    let messages = client.ask(1, "tools/call", params).await;
    let progress = messages.iter().filter(|message| message["params"]["progressToken"] == "p").count();
    assert_eq!(progress, 2, "{messages:?}");
    let prompt = client.ask(2, "prompts/get", json!({ "name": "simple-prompt" })).await.pop().unwrap();
    assert!(prompt.to_string().contains("This is a simple prompt without arguments."), "{prompt}");
    let wrong = client.tool(3, "get-sum", json!({ "a": "x", "b": 1 })).await;
    assert_eq!(wrong["result"]["isError"], true, "{wrong}");
    stop(server, "everything").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn filesystem_server_is_confined_to_its_volume_and_keeps_it() {
    let server = host("filesystem", json!({ "volumes": ["files:/data"] })).await;
    let write = json!({ "path": "/data/a.txt", "content": "one\ntwo\n" });
    let written = server.mcp_text("filesystem", "write_file", write).await;
    assert_eq!(written, "Successfully wrote to /data/a.txt");
    let refused =
        server.mcp_tool("filesystem", "read_text_file", json!({ "path": "/etc/passwd" })).await.ok();
    assert_eq!(refused["result"]["isError"], true, "{refused}");
    server.request("POST", &format!("{SERVERS}/filesystem/restart"), Some(json!({}))).await.ok();
    let read = server.mcp_text("filesystem", "read_text_file", json!({ "path": "/data/a.txt" })).await;
    assert_eq!(read, "one\ntwo\n");
    stop(server, "filesystem").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn memory_server_keeps_its_volume_after_emergent_was_killed() {
    let mut server = host("memory", json!({ "volumes": ["memory:/data"] })).await;
    let ada = json!({ "name": "Ada", "entityType": "person", "observations": ["writes programs"] });
    server.mcp_tool("memory", "create_entities", json!({ "entities": [ada] })).await.ok();
    server.kill();
    server.start_again().await;
    server.wait_for_status("memory", "ready").await;
    let found = server.mcp_tool("memory", "search_nodes", json!({ "query": "ada" })).await.ok();
    assert!(found.to_string().contains("writes programs"), "{found}");
    stop(server, "memory").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn time_server_converts_time_zones() {
    let server = host("time", json!({})).await;
    let arguments = json!({ "source_timezone": "UTC", "time": "12:00", "target_timezone": "Asia/Tokyo" });
    let converted = server.mcp_text("time", "convert_time", arguments).await;
    assert!(converted.contains("T21:00:00+09:00"), "{converted}");
    let wrong = server.mcp_tool("time", "get_current_time", json!({ "timezone": "Nowhere/None" })).await.ok();
    assert_eq!(wrong["result"]["isError"], true, "{wrong}");
    stop(server, "time").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn git_server_reads_a_repository_in_its_volume() {
    let server = host("git", json!({ "volumes": ["repository:/data"] })).await;
    let at = json!({ "repo_path": "/data" });
    let none = server.mcp_tool("git", "git_status", at.clone()).await.ok();
    assert_eq!(none["result"]["isError"], true, "{none}");
    stop(server, "git").await;
    // The next start makes a repository with the git of the image.
    let script = "git init -q -b main /data && cd /data && git config user.email a@b && git config user.name T && \
                  echo one > a.txt && git add . && git commit -q -m 'Add a.txt'; echo two >> a.txt; \
                  exec /usr/bin/python3 /usr/local/bin/mcp-server-git";
    let command = json!(["bash", "-c", script]);
    let server = host("git", json!({ "volumes": ["repository:/data"], "command": command })).await;
    let log = server.mcp_text("git", "git_log", json!({ "repo_path": "/data", "max_count": 1 })).await;
    assert!(log.contains("Add a.txt"), "{log}");
    let diff = server.mcp_text("git", "git_diff_unstaged", at).await;
    assert!(diff.contains("+two"), "{diff}");
    stop(server, "git").await;
}
