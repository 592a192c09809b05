//! The MCP endpoint of a workspace has the same tools and results as REST.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::Duration;

use emergent_test_support::mcp_client::{McpClient, request};
use emergent_test_support::server::{TestServer, WORKSPACES};
use emergent_test_support::wait::wait_until;
use serde_json::{Value, json};

const BINARY: &str = env!("CARGO_BIN_EXE_emergent");

#[tokio::test(flavor = "multi_thread")]
async fn mcp_tools_give_the_same_results_as_rest() {
    let server = TestServer::start(BINARY).await;
    let id = server.create(json!({})).await;
    let client = McpClient::open(&server, &format!("{WORKSPACES}/{id}/mcp")).await;
    let tools = client.ask(1, "tools/list", json!({})).await.pop().unwrap();
    let names: Vec<_> =
        tools["result"]["tools"].as_array().unwrap().iter().map(|tool| &tool["name"]).collect();
    assert_eq!(names, ["bash", "read", "write", "edit", "glob", "grep", "git"]);
    let calls = [
        ("write", json!({ "file_path": "a.txt", "content": "one\ntwo\n" })),
        ("read", json!({ "file_path": "a.txt" })),
        ("edit", json!({ "file_path": "a.txt", "old_string": "two", "new_string": "three" })),
        ("glob", json!({ "pattern": "*.txt" })),
        ("grep", json!({ "pattern": "three" })),
        ("git", json!({ "action": "status" })),
        ("read", json!({ "file_path": "missing.txt" })),
        ("read", json!({ "file_path": 5 })),
    ];
    for (turn, (tool, arguments)) in calls.into_iter().enumerate() {
        let over_mcp = client.tool(10 + turn as u64, tool, arguments.clone()).await;
        if tool == "write" || tool == "edit" {
            assert_eq!(over_mcp["result"]["isError"], json!(false), "{over_mcp:#}");
            continue;
        }
        let over_rest = server.tool(&id, tool, arguments).await;
        let result = &over_mcp["result"]["structuredContent"];
        if over_rest.status == 200 {
            assert_eq!(result, &over_rest.body, "{tool}");
        } else {
            assert_eq!(over_mcp["result"]["isError"], true, "{over_mcp:#}");
            assert_eq!(result["error"]["code"], over_rest.body["error"]["code"], "{tool}");
        }
    }
    let bash = client.tool(30, "bash", json!({ "command": "cat a.txt; echo bad >&2; exit 3" })).await;
    let answer = &bash["result"]["structuredContent"];
    assert_eq!((&answer["stdout"], &answer["stderr"]), (&json!("one\nthree\n"), &json!("bad\n")), "{bash:#}");
    assert_eq!(answer["exit_code"], 3);
    // Each call is in the audit log under its own name, without its arguments.
    let audit = server.request("GET", &format!("/api/v1/audit?workspace_id={id}"), None).await.ok();
    let text = audit.to_string();
    assert!(text.contains("\"bash\"") && text.contains("\"grep\"") && !text.contains("echo bad"), "{text}");
    assert_eq!(server.request("GET", "/api/v1/audit/verify", None).await.ok()["ok"], true);
    assert_eq!(client.end().await, 204);
    server.destroy(&id).await;
    server.stop();
}

#[tokio::test(flavor = "multi_thread")]
async fn mcp_bash_sends_output_as_progress_and_ends_when_cancelled() {
    let server = TestServer::start(BINARY).await;
    let id = server.create(json!({})).await;
    let client = McpClient::open(&server, &format!("{WORKSPACES}/{id}/mcp")).await;
    let command = "for i in 1 2 3; do echo line $i; sleep 0.5; done; head -c 200000 /dev/zero | tr '\\0' x";
    let params =
        json!({ "name": "bash", "arguments": { "command": command }, "_meta": { "progressToken": 1 } });
    let mut messages = client.ask(1, "tools/call", params).await;
    let answer = messages.pop().unwrap();
    let shown: String =
        messages.iter().filter_map(|told| told["params"]["message"].as_str()).collect::<Vec<_>>().concat();
    assert!(shown.contains("line 1") && shown.contains("line 3"), "{messages:?}");
    // The answer is that of REST, truncated in the same places.
    let over_rest = server.tool(&id, "bash", json!({ "command": command })).await.ok();
    let own = &answer["result"]["structuredContent"];
    for field in ["stdout", "stderr", "exit_code", "truncated", "stdout_bytes", "timed_out"] {
        // The ids of the operations differ.
        let [own, other] = [own, &over_rest]
            .map(|answer| answer[field].to_string().replace(answer["operation_id"].as_str().unwrap(), "ID"));
        assert!(own == other, "{field}");
    }
    assert!(own["stdout_path"].is_string(), "{own}");
    let params = json!({ "name": "bash", "arguments": { "command": "exec sleep 4711" } });
    let message = request(2, "tools/call", params);
    let hanging = client.post(&message);
    let cancel = async {
        let runs = async || server.bash(&id, "pgrep -fc 'sleep 471[1]' || true").await.trim() != "0";
        let limit = Duration::from_secs(15);
        wait_until("the command runs", limit, runs).await;
        client.notify("notifications/cancelled", json!({ "requestId": 2 })).await;
        wait_until("the command has ended", limit, async || !runs().await).await;
    };
    let ((), response) =
        tokio::join!(cancel, async { tokio::time::timeout(Duration::from_secs(30), hanging).await });
    drop(response);
    server.destroy(&id).await;
    server.stop();
}

#[tokio::test(flavor = "multi_thread")]
async fn workspace_token_reaches_only_its_own_mcp_endpoint() {
    let server = TestServer::start(BINARY).await;
    let (own, other) = (
        server.create(json!({ "provider": "docker" })).await,
        server.create(json!({ "provider": "docker" })).await,
    );
    let made = server
        .request("POST", "/api/v1/tokens", Some(json!({ "name": "own", "workspace_id": own })))
        .await
        .ok();
    let token = made["secret"].as_str().unwrap();
    let initialize = json!({ "protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": { "name": "c", "version": "1" } });
    let message: Value = request(0, "initialize", initialize);
    for (id, status) in [(&own, 200), (&other, 403)] {
        let response = server
            .client()
            .post(format!("{}{WORKSPACES}/{id}/mcp", server.url))
            .bearer_auth(token)
            .header("accept", "application/json, text/event-stream")
            .json(&message)
            .send()
            .await
            .unwrap();
        assert_eq!(response.status(), status, "{id}");
    }
    let nobody = format!("{WORKSPACES}/018f4e3a-0000-7000-8000-000000000000/mcp");
    let response =
        server.client().post(format!("{}{nobody}", server.url)).bearer_auth(&server.token).json(&message);
    assert_eq!(response.send().await.unwrap().status(), 404);
    server.destroy(&own).await;
    server.destroy(&other).await;
    server.stop();
}
