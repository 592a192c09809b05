//! Both eras: the tools, their answers and errors, progress and cancellation.

use crate::support::client::{Client, ERAS, LEGACY, MODERN};
use crate::support::{Caller, Fake, TOOLS, events_at_once};
use emergent_workspace_mcp::Config;
use serde_json::{Value, json};

#[tokio::test]
async fn the_server_describes_itself_and_agrees_on_a_version() {
    let (_, mcp) = Fake::default().serve(Config::default());
    let legacy = Client::connect(&mcp, LEGACY).await.info;
    assert_eq!(legacy["serverInfo"]["name"], "emergent-workspace");
    assert_eq!(legacy["serverInfo"]["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(legacy["protocolVersion"], LEGACY);
    assert_eq!(legacy["capabilities"], json!({"tools": {}}));
    let modern = Client::connect(&mcp, MODERN).await.info;
    assert_eq!(modern["instructions"], legacy["instructions"]);
    assert_eq!(modern["capabilities"], legacy["capabilities"]);
    assert_eq!(modern["_meta"]["io.modelcontextprotocol/serverInfo"], legacy["serverInfo"]);
    let versions = ["2024-11-05", "2025-03-26", "2025-06-18", LEGACY, MODERN];
    assert_eq!(modern["supportedVersions"], json!(versions));
    for version in &versions[..4] {
        assert_eq!(Client::connect(&mcp, version).await.info["protocolVersion"], *version);
    }
}

#[tokio::test]
async fn the_tools_are_described() {
    let (_, mcp) = Fake::default().serve(Config::default());
    let mut lists = Vec::new();
    for era in ERAS {
        let answer = Client::connect(&mcp, era).await.ask("tools/list", json!({})).await;
        lists.push(answer["result"]["tools"].clone());
    }
    assert_eq!(lists[0], lists[1]);
    let names: Vec<_> = lists[0].as_array().unwrap().iter().map(|tool| &tool["name"]).collect();
    assert_eq!(names, TOOLS);
    insta::assert_json_snapshot!("tool", lists[0][0]);
}

#[tokio::test]
async fn only_allowed_tools_are_shown_and_run() {
    let (fake, mcp) = Fake::default().serve(Config::default());
    *fake.allowed.lock() = vec!["grep", "read", "read"];
    for era in ERAS {
        let client = Client::connect(&mcp, era).await;
        let answer = client.ask("tools/list", json!({})).await;
        let tools = answer["result"]["tools"].as_array().unwrap();
        let names: Vec<&str> = tools.iter().map(|tool| tool["name"].as_str().unwrap()).collect();
        assert_eq!(names, ["read", "grep"]);
        for name in ["bash", "nonsense", ""] {
            let answer =
                client.ask("tools/call", json!({"name": name, "arguments": {"command": "fail"}})).await;
            assert_eq!(answer["error"]["code"], -32602, "{answer}");
            assert!(answer.get("result").is_none(), "{answer}");
        }
        assert_eq!(client.call("grep", json!({"pattern": "x"})).await["isError"], false);
    }
    assert_eq!(*fake.dropped.borrow() + *fake.running.borrow(), 0);
}

#[tokio::test]
async fn every_tool_answers_as_data_and_as_text() {
    for era in ERAS {
        let (_, mcp) = Fake::default().serve(Config::default());
        let client = Client::connect(&mcp, era).await;
        let mut seen = Vec::new();
        for (tool, arguments) in [
            ("bash", json!({"command": "echo hello"})),
            ("bash", json!({"command": "fail"})),
            ("bash", json!({"command": "panic"})),
            ("bash", json!({})),
            ("read", json!({"path": "/workspace/a"})),
            ("read", json!({"path": "/workspace/none"})),
            ("picture", json!({})),
            ("grep", json!({})),
        ] {
            let mut result = client.call(tool, arguments.clone()).await;
            let data = &result["structuredContent"];
            assert_eq!(result["isError"].as_bool().unwrap(), data.get("error").is_some());
            // The only difference between the eras.
            let kind = result.as_object_mut().unwrap().remove("resultType");
            assert_eq!(kind, (era == MODERN).then(|| "complete".into()));
            seen.push(json!({"tool": tool, "arguments": arguments, "result": result}));
        }
        insta::assert_json_snapshot!("answers", seen);
    }
}

#[tokio::test]
async fn invalid_parameters_and_unknown_methods_are_refused() {
    let (_, mcp) = Fake::default().serve(Config::default());
    for era in ERAS {
        let client = Client::connect(&mcp, era).await;
        for params in [json!({"name": "bash", "arguments": "ls"}), json!({"name": "bash", "arguments": [1]})]
        {
            let answer = client.ask("tools/call", params).await;
            assert_eq!(answer["error"]["code"], -32602, "{answer}");
        }
        // Methods of features that are not declared.
        for method in ["tools/nonsense", "prompts/list", "resources/list", "resources/templates/list"] {
            assert_eq!(client.ask(method, json!({})).await["error"]["code"], -32601, "{method}");
        }
    }
}

#[tokio::test]
async fn a_call_runs_for_the_caller_of_its_own_request() {
    let (_, mcp) = Fake::default().serve(Config::default());
    for era in ERAS {
        for name in ["alice", "bob"] {
            let mut client = Client::connect_as(&mcp, era, Caller(name, 0)).await;
            for number in [7, 8] {
                client.caller = Caller(name, number);
                // Names in the message mean nothing.
                let arguments =
                    json!({"command": "who", "caller": "mallory", "_meta": {"caller": "mallory"}});
                let result = client.call("bash", arguments).await;
                assert_eq!(result["structuredContent"]["stdout"], format!("{name} {number}"));
            }
        }
    }
}

fn with_progress(command: &str) -> Value {
    json!({"name": "bash", "arguments": {"command": command}, "_meta": {"progressToken": "t"}})
}

#[tokio::test]
async fn output_is_shown_as_progress_with_a_progress_token() {
    for era in ERAS {
        let (fake, mcp) = Fake::default().serve(Config::default());
        let client = Client::connect(&mcp, era).await;
        fake.say("one\n");
        let mut messages = client.send(5, "tools/call", with_progress("listen")).await;
        assert!(messages.is_stream);
        let first = messages.next().await.unwrap();
        assert_eq!(first["method"], "notifications/progress");
        assert_eq!(first["params"], json!({"progressToken": "t", "progress": 4, "message": "one\n"}));
        fake.say("two\n");
        let second = messages.next().await.unwrap();
        assert_eq!(second["params"], json!({"progressToken": "t", "progress": 8, "message": "two\n"}));
        fake.end();
        let answer = messages.next().await.unwrap();
        assert_eq!(answer["id"], 5);
        assert_eq!(answer["result"]["structuredContent"]["stdout"], "one\ntwo\n");
        assert_eq!(messages.next().await, None);
    }
}

#[tokio::test]
async fn output_is_not_shown_without_a_progress_token() {
    for era in ERAS {
        let (fake, mcp) = Fake::default().serve(Config::default());
        let client = Client::connect(&mcp, era).await;
        fake.say("one\n");
        fake.end();
        let result = client.call("bash", json!({"command": "listen"})).await;
        assert_eq!(result["structuredContent"]["stdout"], "one\n");
    }
}

/// A client that does not read: the command continues, the queue is bounded, and the session can still be used.
#[tokio::test]
async fn a_slow_client_blocks_neither_its_command_nor_its_session() {
    for era in ERAS {
        let (fake, mcp) = Fake::default().serve(events_at_once());
        let client = Client::connect(&mcp, era).await;
        // Without this the answer to the request itself would wait in the modern era.
        let mut messages = client.send(5, "tools/call", with_progress("flood")).await;
        fake.until_running(1).await;
        tokio::time::pause();
        // Time for many more messages than all queues hold.
        for _ in 0..1000 {
            tokio::time::advance(std::time::Duration::from_millis(200)).await;
            tokio::task::yield_now().await;
        }
        tokio::time::resume();
        assert_eq!(client.call("bash", json!({"command": "echo hello"})).await["isError"], false);
        fake.end();
        fake.until_running(0).await;
        let mut last = 0.0;
        let mut count = 0;
        let answer = loop {
            let message = messages.next().await.unwrap();
            if message.get("result").is_some() {
                break message;
            }
            let progress = message["params"]["progress"].as_f64().unwrap();
            assert!(progress > last, "{progress} after {last}");
            assert!(message["params"]["message"].as_str().unwrap().len() < 5000);
            last = progress;
            count += 1;
        };
        assert!(count < 300, "{count} messages were waiting");
        assert_eq!(answer["id"], 5);
        assert_eq!(messages.next().await, None);
    }
}

#[tokio::test]
async fn too_many_calls_are_refused() {
    for era in ERAS {
        let (fake, mcp) = Fake::default().serve(Config { calls: 1, ..events_at_once() });
        let client = Client::connect(&mcp, era).await;
        fake.say("x");
        let first = client.send(5, "tools/call", with_progress("listen")).await;
        fake.until_running(1).await;
        let result = client.call("bash", json!({"command": "echo hello"})).await;
        assert_eq!(result["structuredContent"]["error"]["code"], "limit_reached");
        fake.end();
        fake.until_running(0).await;
        drop(first);
        while client.call("bash", json!({"command": "echo hello"})).await["isError"] == true {}
    }
}

#[tokio::test]
async fn a_closed_connection_cancels_the_call_in_the_modern_era() {
    let (fake, mcp) = Fake::default().serve(Config::default());
    let client = Client::connect(&mcp, MODERN).await;
    // Before the first message: the request is dropped.
    let request =
        client.request(5, "tools/call", json!({"name": "bash", "arguments": {"command": "listen"}}));
    let server = mcp.clone();
    let call = tokio::spawn(async move { server.handle(&Caller("nobody", 0), request).await });
    fake.until_running(1).await;
    call.abort();
    fake.until_dropped(1).await;
    // After it: the body is.
    fake.say("x");
    let messages = client.send(6, "tools/call", with_progress("listen")).await;
    fake.until_running(1).await;
    drop(messages);
    fake.until_dropped(2).await;
    assert!(mcp.is_idle());
}

#[tokio::test]
async fn a_legacy_client_cancels_by_a_notification_and_not_by_closing_its_connection() {
    let (fake, mcp) = Fake::default().serve(events_at_once());
    let client = Client::connect(&mcp, LEGACY).await;
    let mut messages = client.send(5, "tools/call", with_progress("listen")).await;
    fake.until_running(1).await;
    client.tell("notifications/cancelled", json!({"requestId": 5, "reason": "enough"})).await;
    fake.until_dropped(1).await;
    assert_eq!(messages.next().await, None);
    // A closed connection alone says nothing: the client may come back.
    let messages = client.send(6, "tools/call", with_progress("listen")).await;
    fake.until_running(1).await;
    drop(messages);
    assert_eq!(client.call("bash", json!({"command": "echo still"})).await["isError"], false);
    assert_eq!(*fake.running.borrow(), 1);
    client.tell("notifications/cancelled", json!({"requestId": 6})).await;
    fake.until_dropped(2).await;
}

#[tokio::test]
async fn the_end_of_the_server_cancels_its_calls() {
    for era in ERAS {
        let (fake, mcp) = Fake::default().serve(events_at_once());
        let mut client = Client::connect(&mcp, era).await;
        fake.say("x");
        let mut messages = client.send(5, "tools/call", with_progress("listen")).await;
        fake.until_running(1).await;
        assert!(!mcp.is_idle());
        client.mcp = Fake::default().serve(Config::default()).1;
        drop(mcp);
        fake.until_dropped(1).await;
        while messages.next().await.is_some() {}
    }
}
