//! The commands of `emergent mcp`.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::process::{Command, Output};

use emergent_test_support::mcp;
use emergent_test_support::server::TestServer;
use serde_json::{Value, json};

const BINARY: &str = env!("CARGO_BIN_EXE_emergent");

fn emergent(server: &TestServer, arguments: &[&str]) -> Output {
    let mut command = Command::new(BINARY);
    command.arg("mcp").args(arguments).env("EMERGENT_DATA_DIR", server.data_dir());
    command.env("SECRET_OF_TEST", "hush").output().unwrap()
}

/// The output of a command, which must have this exit code.
#[track_caller]
fn text(output: &Output, code: i32) -> String {
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.status.code(), Some(code), "{stdout}\n{stderr}");
    format!("{stdout}{stderr}")
}

#[tokio::test(flavor = "multi_thread")]
async fn mcp_commands_register_call_show_and_remove_a_server() {
    let server = TestServer::start(BINARY).await;
    let image = mcp::image(BINARY);
    let run = |arguments: &[&str], code: i32| text(&emergent(&server, arguments), code);
    assert!(run(&["list"], 0).contains("no MCP servers"));
    let made = run(
        &[
            "register",
            "tiny",
            "--image",
            &image,
            "--env",
            "SECRET_OF_TEST",
            "--volume",
            "data:/data",
            "--provider",
            "docker",
        ],
        0,
    );
    assert!(made.contains("ready") && made.contains("emergent mcp config tiny"), "{made}");
    assert!(run(&["list"], 0).contains("tiny"));
    assert_eq!(run(&["call", "tiny", "echo", "--args", r#"{"text":"hello"}"#], 0), "hello\n");
    assert_eq!(run(&["call", "tiny", "env", "--args", r#"{"name":"SECRET_OF_TEST"}"#], 0), "hush\n");
    assert!(run(&["call", "tiny", "tools/list"], 0).contains("\"echo\""));
    assert!(run(&["call", "tiny", "no_such_tool"], 1).contains("no_such_tool"));
    assert!(run(&["call", "tiny", "echo", "--args", "{"], 1).contains("--args is not JSON"));
    run(&["call", "tiny", "stderr", "--args", r#"{"text":"a line"}"#], 0);
    assert!(run(&["logs", "tiny"], 0).contains("a line"));
    let shown = run(&["get", "tiny"], 0);
    assert!(
        shown.contains("SECRET_OF_TEST") && shown.contains("data:/data") && !shown.contains("hush"),
        "{shown}"
    );
    let config: Value = serde_json::from_slice(&emergent(&server, &["config", "tiny"]).stdout).unwrap();
    let entry = &config["mcpServers"]["tiny"];
    assert_eq!(entry["headers"]["Authorization"], "Bearer ${EMERGENT_TOKEN}");
    let url = entry["url"].as_str().unwrap();
    assert!(url.starts_with(&server.url) && url.ends_with("/mcp"), "{url}");
    let with_token = run(&["config", "tiny", "--with-token", "--client", "claude-code"], 0);
    assert!(with_token.contains(&server.token) && with_token.starts_with("claude mcp add"), "{with_token}");
    assert!(run(&["restart", "tiny"], 0).contains("ready"));
    assert!(run(&["remove", "tiny"], 0).contains("tiny removed"));
    assert!(run(&["get", "tiny"], 1).contains("there is no MCP server 'tiny'"));
    server.stop();
}

#[tokio::test(flavor = "multi_thread")]
async fn mcp_register_reports_why_a_server_does_not_start() {
    let server = TestServer::start(BINARY).await;
    let image = mcp::image(BINARY);
    let register = ["register", "bad", "--image", &image, "--provider", "docker", "--", "die-in-initialize"];
    let output = text(&emergent(&server, &register), 1);
    assert!(output.contains("exit code 3") && output.contains("boom"), "{output}");
    text(&emergent(&server, &["remove", "bad"]), 0);
    let register =
        ["register", "bad", "--image", &image, "--provider", "docker", "--command", "--", "no-such-program"];
    let output = text(&emergent(&server, &register), 1);
    assert!(output.contains("'no-such-program' is not in the image"), "{output}");
    text(&emergent(&server, &["remove", "bad"]), 0);
    let id = server.create(json!({ "provider": "docker" })).await;
    let config: Value =
        serde_json::from_slice(&emergent(&server, &["config", "--workspace", &id]).stdout).unwrap();
    let url = config["mcpServers"]["workspace"]["url"].as_str().unwrap();
    assert!(url.ends_with(&format!("/agent/workspaces/{id}/mcp")), "{url}");
    server.destroy(&id).await;
    server.stop();
}
