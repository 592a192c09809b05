//! `mcp-fixture` over stdio.

use serde_json::{Value, json};

use crate::client::Client;

fn meta(capabilities: Value) -> Value {
    json!({
        "io.modelcontextprotocol/protocolVersion": "2026-07-28",
        "io.modelcontextprotocol/clientCapabilities": capabilities,
    })
}

/// A call of the modern era.
fn call(client: &mut Client, id: i32, tool: &str, arguments: Value) {
    client.send(id, "tools/call", json!({"name": tool, "arguments": arguments, "_meta": meta(json!({}))}));
}

#[test]
fn a_legacy_client_initializes_lists_and_calls() {
    let mut client = Client::fixture();
    let initialized = client.initialize(json!({}));
    assert_eq!(initialized["result"]["protocolVersion"], "2025-11-25");
    client.send(1, "tools/list", json!({}));
    let tools = client.response(1)["result"]["tools"].as_array().unwrap().clone();
    assert_eq!(tools[0]["name"], "test_simple_text", "the suite calls the first tool without arguments");
    client.call(2, "echo", json!({"text": "hi"}));
    let response = client.response(2);
    assert_eq!(response["result"]["content"][0]["text"], "hi");
    assert_eq!(response["result"].get("resultType"), None, "the legacy era has no result types");
}

#[test]
fn a_modern_client_calls_without_initialize() {
    let mut client = Client::fixture();
    call(&mut client, 1, "echo", json!({"text": "hi"}));
    let response = client.response(1);
    assert_eq!(response["result"]["resultType"], "complete");
    assert_eq!(response["result"]["content"][0]["text"], "hi");
    client.call(2, "echo", json!({"text": "hi"}));
    assert_eq!(client.response(2)["error"]["code"], -32602, "a request without meta");
    client.send(3, "ping", json!({"_meta": meta(json!({}))}));
    assert_eq!(client.response(3)["error"]["code"], -32601);
}

#[test]
fn one_process_serves_both_eras() {
    let mut client = Client::fixture();
    client.send(1, "server/discover", json!({"_meta": meta(json!({}))}));
    let versions = client.response(1)["result"]["supportedVersions"].clone();
    let mut unknown = meta(json!({}));
    unknown["io.modelcontextprotocol/protocolVersion"] = json!("1066-10-14");
    client.send(2, "server/discover", json!({"_meta": unknown}));
    let error = client.response(2)["error"].clone();
    assert_eq!(error["code"], -32022);
    assert_eq!(error["data"], json!({"supported": versions, "requested": "1066-10-14"}));
    client.initialize(json!({}));
    client.call(3, "echo", json!({"text": "legacy"}));
    assert_eq!(client.text(3), "legacy");
    call(&mut client, 4, "echo", json!({"text": "modern"}));
    assert_eq!(client.response(4)["result"]["resultType"], "complete");
}

#[test]
fn a_legacy_client_is_asked_by_a_request() {
    let mut client = Client::fixture();
    client.initialize(json!({"sampling": {}}));
    client.call(1, "test_sampling", json!({"prompt": "well?"}));
    let request = client.message();
    assert_eq!(request["method"], "sampling/createMessage");
    let answer = json!({"role": "assistant", "content": {"type": "text", "text": "yes"}, "model": "m"});
    client.send_line(&json!({"jsonrpc": "2.0", "id": request["id"], "result": answer}).to_string());
    assert_eq!(client.text(1), "LLM response: yes");
    client.call(2, "test_elicitation", json!({"message": "well?"}));
    assert_eq!(client.response(2)["result"]["isError"], true, "this client has no user");
}

#[test]
fn a_modern_client_is_asked_by_the_result_and_returns_the_state() {
    let mut client = Client::fixture();
    let mut id = 0;
    let mut round = |client: &mut Client, more: Value| {
        id += 1;
        let name = "test_input_required_result_multi_round";
        let mut params = json!({"name": name, "_meta": meta(json!({"elicitation": {}}))});
        params.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        client.send(id, "tools/call", params);
        client.response(id)
    };
    let first = round(&mut client, json!({}))["result"].clone();
    assert_eq!(first["resultType"], "input_required");
    assert_eq!(first["inputRequests"]["step1"]["method"], "elicitation/create");
    let answer = json!({"action": "accept", "content": {"name": "Alice"}});
    let second = json!({"inputResponses": {"step1": answer}, "requestState": first["requestState"]});
    let second = round(&mut client, second)["result"].clone();
    assert_eq!(second["resultType"], "input_required");
    assert_ne!(second["requestState"], first["requestState"]);
    let tampered = format!("{}x", second["requestState"].as_str().unwrap());
    assert_eq!(round(&mut client, json!({"requestState": tampered}))["error"]["code"], -32602);
    let third = round(&mut client, json!({"requestState": second["requestState"]}));
    assert_eq!(third["result"]["resultType"], "complete");
}

#[test]
fn progress_and_logs_come_before_the_answer() {
    let mut client = Client::fixture();
    client.initialize(json!({}));
    let params = json!({"name": "test_tool_with_progress", "_meta": {"progressToken": 0}});
    client.send(1, "tools/call", params);
    let progress: Vec<Value> = (0..3).map(|_| client.message()["params"]["progressToken"].clone()).collect();
    assert_eq!(progress, [0, 0, 0]);
    client.response(1);
    client.send(2, "logging/setLevel", json!({"level": "error"}));
    client.response(2);
    client.call(3, "test_tool_with_logging", json!({}));
    assert_eq!(client.message()["id"], 3, "no message has the level error");
    client.send(4, "logging/setLevel", json!({"level": "debug"}));
    client.response(4);
    client.call(5, "test_tool_with_logging", json!({}));
    assert_eq!(client.message()["method"], "notifications/message");
}

#[test]
fn a_cancelled_call_is_not_answered() {
    let mut client = Client::fixture();
    client.initialize(json!({}));
    client.call(1, "slow", json!({"ms": 600_000, "text": "long"}));
    client.call(2, "slow", json!({"ms": 1, "text": "short"}));
    assert_eq!(client.message()["id"], 2);
    client.notify("notifications/cancelled", json!({"requestId": 1}));
    assert_eq!(client.error_line(), "mcp-fixture: slow was cancelled: long");
    client.call(3, "echo", json!({"text": "next"}));
    assert_eq!(client.message()["id"], 3);
}

#[test]
fn a_modern_client_is_notified_on_its_subscriptions() {
    let mut client = Client::fixture();
    let listen = |client: &mut Client, id: &str, notifications: Value| {
        client.send(
            id,
            "subscriptions/listen",
            json!({"notifications": notifications, "_meta": meta(json!({}))}),
        );
        let acknowledged = client.message();
        assert_eq!(acknowledged["method"], "notifications/subscriptions/acknowledged");
        assert_eq!(subscription(&acknowledged), id);
    };
    listen(&mut client, "tools", json!({"toolsListChanged": true}));
    listen(&mut client, "watch", json!({"resourceSubscriptions": ["test://watched-resource"]}));
    call(&mut client, 1, "test_trigger_tool_change", json!({}));
    let changed = client.message();
    assert_eq!(changed["method"], "notifications/tools/list_changed");
    assert_eq!(subscription(&changed), "tools");
    client.response(1);
    call(&mut client, 2, "test_trigger_resource_update", json!({"uri": "test://watched-resource"}));
    assert_eq!(subscription(&client.message()), "watch");
    client.response(2);
    client.notify("notifications/cancelled", json!({"requestId": "tools"}));
    call(&mut client, 3, "test_end_subscriptions", json!({}));
    let ended = client.response("watch");
    assert_eq!(ended["result"]["resultType"], "complete");
}

fn subscription(message: &Value) -> &Value {
    &message["params"]["_meta"]["io.modelcontextprotocol/subscriptionId"]
}

#[test]
fn a_legacy_client_is_notified_in_its_session() {
    let mut client = Client::fixture();
    client.initialize(json!({}));
    client.call(1, "test_trigger_tool_change", json!({}));
    assert_eq!(client.message()["method"], "notifications/tools/list_changed");
    client.response(1);
    let uri = json!({"uri": "test://watched-resource"});
    client.call(2, "test_trigger_resource_update", uri.clone());
    assert_eq!(client.message()["id"], 2, "it did not subscribe");
    client.send(3, "resources/subscribe", uri.clone());
    client.response(3);
    client.call(4, "test_trigger_resource_update", uri);
    assert_eq!(client.message()["method"], "notifications/resources/updated");
}

#[test]
fn the_end_of_the_input_ends_the_server_and_its_calls() {
    let mut client = Client::fixture();
    call(&mut client, 1, "slow", json!({"ms": 600_000, "text": "long"}));
    let filter = json!({"notifications": {"toolsListChanged": true}, "_meta": meta(json!({}))});
    client.send(2, "subscriptions/listen", filter);
    client.message();
    client.close_input();
    assert_eq!(client.exit().code(), Some(0));
    let mut unused = Client::fixture();
    unused.close_input();
    assert_eq!(unused.exit().code(), Some(0));
}

#[test]
fn sigterm_ends_the_server() {
    let mut client = Client::fixture();
    client.initialize(json!({}));
    client.signal(libc::SIGTERM);
    assert_eq!(client.exit().code(), Some(0));
}
