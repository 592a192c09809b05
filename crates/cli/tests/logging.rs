//! The log: a search for a request's id finds every line of its call, and no line has a secret (docs/logging.md).

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use emergent_test_support::server::{TestServer, WORKSPACES};
use serde_json::{Value, json};

const BINARY: &str = env!("CARGO_BIN_EXE_emergent");

/// The JSON lines of the log whose span has this request id.
fn lines_of(server: &TestServer, request: &str) -> Vec<Value> {
    let log = server.log();
    let lines = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let has_request = |line: &Value| {
        line["spans"].as_array().is_some_and(|spans| spans.iter().any(|span| span["request"] == request))
    };
    lines.filter(has_request).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn log_lines_of_a_call_have_its_request_id_and_no_secret() {
    let environment =
        [("EMERGENT_ALLOW_DOCKER", "true"), ("EMERGENT_LOG", "debug"), ("EMERGENT_LOG_FORMAT", "json")];
    let server = TestServer::start_with(BINARY, &environment).await;
    let id = server
        .create(json!({
            "provider": "docker",
            "network": "isolated",
            "environment": { "API_KEY": "value-of-a-variable" },
        }))
        .await;
    let response = reqwest::Client::new()
        .post(format!("{}{WORKSPACES}/{id}/bash", server.url))
        .bearer_auth(&server.token)
        .header("x-request-id", "the-call-to-find")
        .json(&json!({ "command": "echo text-of-a-command $API_KEY" }))
        .send()
        .await
        .unwrap();
    assert_eq!(response.headers()["x-request-id"], "the-call-to-find");
    let answer: Value = response.json().await.unwrap();
    assert_eq!(answer["stdout"], "text-of-a-command value-of-a-variable\n");

    let lines = lines_of(&server, "the-call-to-find");
    let targets: Vec<&str> = lines.iter().filter_map(|line| line["target"].as_str()).collect();
    // The lines are from the domain and from the front.
    for module in ["workspace::calls", "http::record"] {
        assert!(targets.iter().any(|target| target.ends_with(module)), "{module}: {lines:#?}");
    }
    let span = lines
        .iter()
        .find(|line| line["target"].as_str().is_some_and(|target| target.ends_with("workspace::calls")))
        .and_then(|line| line["spans"].as_array()?.iter().find(|span| span["name"] == "request"))
        .unwrap();
    assert_eq!(span["workspace"], id.as_str());
    assert_eq!(span["principal"], "first-start");

    server.destroy(&id).await;
    let log = server.log();
    for secret in ["value-of-a-variable", "text-of-a-command", server.token.as_str()] {
        assert!(!log.contains(secret), "'{secret}' is in the log");
    }
    server.stop();
}
