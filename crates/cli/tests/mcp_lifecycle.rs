//! The lifecycle of hosted MCP servers. Some tests have the title of a scenario in the requirements as name.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::Instant;

use emergent_test_support::command::docker;
use emergent_test_support::mcp::{self, SERVERS};
use emergent_test_support::server::{TestServer, workspace_path};
use serde_json::{Value, json};

const BINARY: &str = env!("CARGO_BIN_EXE_emergent");

/// An MCP server in bash. It answers `initialize`, ignores the end of its input, and takes 6 s to end at SIGTERM. Bash handles a signal
/// only between two commands, so each command is short.
const SLOW_TO_END: &str = r#"
cat /data/bye >&2
trap 'sleep 6; echo "said bye" > /data/bye; exit 0' TERM
while read -r line; do
    case $line in *'"initialize"'*)
        id=$(printf '%s' "$line" | sed 's/.*"id":\([0-9]*\).*/\1/')
        printf '{"jsonrpc":"2.0","id":%s,"result":{"protocolVersion":"2025-11-25","capabilities":{},"serverInfo":{"name":"s","version":"1"}}}\n' "$id" ;;
    esac
done
while :; do sleep 0.1; done
"#;

/// The number of processes in the sandbox of an MCP server, without the guest agent.
async fn processes(server: &TestServer, name: &str) -> u64 {
    server.mcp_server(name).await["usage"]["processes"].as_u64().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn successful_mcp_server_registration() {
    let server = TestServer::start(BINARY).await;
    let image = mcp::image(BINARY);
    let request =
        json!({ "name": "first", "environment": { "SECRET": "s3cr3t-value" }, "volumes": ["data:/data"] });
    let made = server.register(&image, request).await;
    assert_eq!((&made["status"], &made["expires_at"]), (&json!("ready"), &Value::Null), "{made:#}");
    assert_eq!((&made["container_type"], &made["lifecycle"]), (&json!("mcp_server"), &json!("persistent")));
    assert_eq!(made["provider"], "gvisor", "{made:#}");
    assert_eq!(made["resource_limits"], json!({ "cpu": "0.5", "memory": "512M", "disk": "1G" }));
    assert_eq!(made["initialize_result"]["serverInfo"]["name"], "mcp-chaos", "{made:#}");
    let id = made["id"].as_str().unwrap();
    // It is also listed as a workspace, and can be called by its name and by its id.
    let row = server.workspace(id).await;
    assert_eq!((&row["status"], &row["expires_at"]), (&json!("ready"), &Value::Null), "{row:#}");
    for name in ["first", id] {
        assert_eq!(server.mcp_text(name, "echo", json!({ "text": "hello" })).await, "hello");
    }
    // It runs with the user and directory of the image, and has its variable. The value of the variable is shown nowhere.
    let whoami: Value = serde_json::from_str(&server.mcp_text("first", "whoami", json!({})).await).unwrap();
    assert_eq!((&whoami["uid"], &whoami["cwd"]), (&json!(1000), &json!("/srv")), "{whoami}");
    assert_eq!(server.mcp_text("first", "env", json!({ "name": "SECRET" })).await, "s3cr3t-value");
    let container = made["provider_workspace_id"].as_str().unwrap();
    let shown = docker(&["inspect", container]) + &made.to_string() + &server.log();
    assert!(!shown.contains("s3cr3t-value"));
    assert_eq!(made["environment"], json!(["SECRET"]));
    // Unknown, used and invalid names.
    assert_eq!(server.request("GET", &format!("{SERVERS}/nobody"), None).await.error(404), "not_found");
    let again = json!({ "name": "first", "image": image });
    assert_eq!(server.request("POST", SERVERS, Some(again)).await.error(409), "conflict");
    for (request, status) in [
        (json!({ "name": "Bad Name", "image": image }), 400),
        (json!({ "name": "second" }), 400),
        (json!({ "name": "second", "image": "emergent/no-such-image" }), 422),
    ] {
        server.request("POST", SERVERS, Some(request)).await.error(status);
    }
    // The calls of workspaces refuse it.
    let workspace = workspace_path(id);
    server.request("POST", &format!("{workspace}/bash"), Some(json!({ "command": "id" }))).await.error(422);
    server.request("POST", &format!("{workspace}/stop"), Some(json!({}))).await.error(422);
    server.request("DELETE", &workspace, None).await.error(422);
    assert_eq!(server.mcp_text("first", "echo", json!({ "text": "still there" })).await, "still there");
    assert_eq!(server.request("GET", SERVERS, None).await.ok()["servers"].as_array().unwrap().len(), 1);
    server.remove_mcp("first").await;
    assert_eq!(server.request("GET", SERVERS, None).await.ok()["servers"], json!([]));
    server.stop();
}

#[tokio::test(flavor = "multi_thread")]
async fn mcp_server_auto_start_on_emergent_boot() {
    let mut server = TestServer::start(BINARY).await;
    let image = mcp::image(BINARY);
    for name in ["a", "b", "c"] {
        server.register(&image, json!({ "name": name, "provider": "docker" })).await;
        server.wait_for_status(name, "ready").await;
    }
    // After SIGTERM the containers exist and don't run.
    server.terminate();
    let label = format!("label=emergent.installation={}", server.installation());
    assert_eq!(docker(&["ps", "--quiet", "--filter", &label]), "");
    assert_eq!(docker(&["ps", "--all", "--quiet", "--filter", &label]).lines().count(), 3);
    server.start_again().await;
    for name in ["a", "b", "c"] {
        server.wait_for_status(name, "ready").await;
        assert_eq!(server.mcp_text(name, "echo", json!({ "text": name })).await, name);
    }
    // After SIGKILL the containers continue, and the next server takes them over. No process runs twice.
    server.kill();
    assert_eq!(docker(&["ps", "--quiet", "--filter", &label]).lines().count(), 3);
    server.start_again().await;
    for name in ["a", "b", "c"] {
        server.wait_for_status(name, "ready").await;
        assert_eq!(server.mcp_text(name, "echo", json!({ "text": name })).await, name);
        assert_eq!(processes(&server, name).await, 1, "{name}");
        server.remove_mcp(name).await;
    }
    server.stop();
}

#[tokio::test(flavor = "multi_thread")]
async fn slow_starting_server_is_ready_after_emergent_was_killed() {
    let mut server = TestServer::start(BINARY).await;
    let image = mcp::image(BINARY);
    for provider in ["gvisor", "docker"] {
        let command = json!(["mcp-chaos", "slow-start", "4000"]);
        let request = json!({ "name": provider, "provider": provider, "command": command });
        server.register(&image, request).await;
    }
    server.kill();
    server.start_again().await;
    for name in ["gvisor", "docker"] {
        let ready = server.wait_for_status(name, "ready").await;
        assert_eq!((&ready["restarts"], &ready["last_exit"]), (&json!(0), &Value::Null), "{ready:#}");
        // The agent's processes for the channel are not counted.
        assert_eq!(processes(&server, name).await, 1);
        server.remove_mcp(name).await;
    }
    server.stop();
}

#[tokio::test(flavor = "multi_thread")]
async fn mcp_server_process_exits_with_error() {
    let server = TestServer::start(BINARY).await;
    let image = mcp::image(BINARY);
    let made = server.register(&image, json!({ "name": "fragile" })).await;
    let container =
        docker(&["inspect", "--format", "{{.Id}}", made["provider_workspace_id"].as_str().unwrap()]);
    server.mcp_text("fragile", "stderr", json!({ "text": "about to break" })).await;
    // A waiting call fails at once, and so does the call that caused the crash.
    let slow = server.mcp_tool("fragile", "sleep", json!({ "ms": 60_000, "text": "late" }));
    let crash = async {
        server.wait_until_mcp("fragile", "pending_calls", |calls| calls == 1).await;
        server.mcp_tool("fragile", "crash", json!({ "code": 7 })).await
    };
    let (slow, crash) = tokio::join!(slow, crash);
    for answer in [slow, crash] {
        let message = answer.message().to_owned();
        assert_eq!(answer.error(502), "sandbox_lost");
        assert!(message.contains("exit code 7") && message.contains("restarted"), "{message}");
    }
    let server_now = server.wait_for_status("fragile", "ready").await;
    assert_eq!(server.mcp_text("fragile", "echo", json!({ "text": "again" })).await, "again");
    assert_eq!((&server_now["restarts"], &server_now["last_exit"]["exit_code"]), (&json!(1), &json!(7)));
    assert!(
        server_now["last_exit"]["stderr_tail"].as_str().unwrap().contains("about to break"),
        "{server_now:#}"
    );
    let log = server.log();
    assert!(log.contains("an MCP server has ended") && log.contains("exit code 7"), "{log}");
    let lines = server.request("GET", &format!("{SERVERS}/fragile/logs"), None).await.ok();
    assert!(lines.to_string().contains("it ended with exit code 7"), "{lines:#}");
    // A restart by the API makes a new container and resets the number of restarts.
    let restarted = server.request("POST", &format!("{SERVERS}/fragile/restart"), Some(json!({}))).await.ok();
    assert_eq!((&restarted["status"], &restarted["restarts"]), (&json!("ready"), &json!(0)), "{restarted:#}");
    let new = docker(&["inspect", "--format", "{{.Id}}", made["provider_workspace_id"].as_str().unwrap()]);
    assert_ne!(new, container);
    server.remove_mcp("fragile").await;
    server.stop();
}

#[tokio::test(flavor = "multi_thread")]
async fn server_that_refuses_to_initialize_is_stopped_and_callers_get_the_reason() {
    let server = TestServer::start(BINARY).await;
    let image = mcp::image(BINARY);
    let request = json!({ "name": "refuses", "args": ["refuse-initialize"], "provider": "docker", "restart_policy": "never" });
    let made = server.register(&image, request).await;
    assert_eq!(made["status"], "stopped", "{made:#}");
    let reason = made["last_exit"]["reason"].as_str().unwrap();
    assert!(reason.contains("refused to initialize") && reason.contains("not today"), "{made:#}");
    let refused = server.mcp_tool("refuses", "echo", json!({ "text": "x" })).await;
    assert!(refused.body.to_string().contains("not today"), "{}", refused.body);
    assert_eq!(refused.error(503), "unavailable");
    assert_eq!(server.mcp_server("refuses").await["usage"]["processes"], 0);
    server.remove_mcp("refuses").await;
    server.stop();
}

#[tokio::test(flavor = "multi_thread")]
async fn server_whose_answer_to_initialize_is_too_long_is_ended_and_counts_as_crashed() {
    let server = TestServer::start(BINARY).await;
    let image = mcp::image(BINARY);
    let args = json!(["long-initialize", "9000000"]);
    let request = json!({ "name": "long", "args": args, "provider": "docker", "restart_policy": "never" });
    let made = server.register(&image, request).await;
    assert_eq!(made["status"], "stopped", "{made:#}");
    let reason = made["last_exit"]["reason"].as_str().unwrap();
    assert!(reason.contains("refused to initialize") && reason.contains("bytes"), "{made:#}");
    assert_eq!(server.mcp_server("long").await["usage"]["processes"], 0);
    server.remove_mcp("long").await;
    let request = json!({ "name": "again", "args": args, "provider": "docker" });
    server.register(&image, request).await;
    server.wait_until_mcp("again", "recent_crashes", |crashes| crashes > 1).await;
    server.remove_mcp("again").await;
    server.stop();
}

#[tokio::test(flavor = "multi_thread")]
async fn mcp_server_crash_loop_detection() {
    let server = TestServer::start(BINARY).await;
    let image = mcp::image(BINARY);
    let mut events = server.events("GET", "/api/v1/events", None, None).await;
    let request = json!({ "name": "broken", "args": ["die-in-initialize"], "provider": "docker" });
    let made = server.register(&image, request).await;
    assert_ne!(made["status"], "ready");
    let told = events.until(|event| event.name == "mcp.crash_loop").await.data;
    assert!(told.to_string().contains("in 5 s"), "{told}");
    let held = server.wait_for_status("broken", "restarting").await;
    assert!(held["next_restart_at"].is_string(), "{held:#}");
    assert_eq!((&held["restarts"], &held["last_exit"]["exit_code"]), (&json!(4), &json!(3)), "{held:#}");
    assert!(held["last_exit"]["stderr_tail"].as_str().unwrap().contains("boom"), "{held:#}");
    let refused = server.mcp_tool("broken", "echo", json!({ "text": "x" })).await;
    assert_eq!(refused.error(503), "unavailable");
    assert!(server.metrics().await.contains("emergent_mcp_crash_loops_total 1"));
    assert!(server.log().contains("an MCP server ends again and again"));
    // The pauses are 5, 15 and 45 s. The test waits for the first restart after a pause.
    server.wait_until_mcp("broken", "restarts", |count| count > 4).await;
    let held = server.wait_for_status("broken", "restarting").await;
    assert_eq!(held["restarts"], 5);
    server.remove_mcp("broken").await;
    server.stop();
}

#[tokio::test(flavor = "multi_thread")]
async fn mcp_server_graceful_shutdown_on_emergent_stop() {
    let mut server = TestServer::start(BINARY).await;
    let image = mcp::image(BINARY);
    let script = json!(["bash", "-c", SLOW_TO_END]);
    let request =
        json!({ "name": "slow", "command": script, "volumes": ["data:/data"], "provider": "docker" });
    server.register(&image, request).await;
    server.wait_for_status("slow", "ready").await;
    server.register(&image, json!({ "name": "deaf", "args": ["ignore-term"], "provider": "docker" })).await;
    server.wait_for_status("deaf", "ready").await;
    let begun = Instant::now();
    server.terminate();
    // Both had 30 s at the same time. One ended after 6 s, and the other was killed after 30 s.
    assert!(begun.elapsed().as_secs() >= 28, "{:?}", begun.elapsed());
    let label = format!("label=emergent.installation={}", server.installation());
    assert_eq!(docker(&["ps", "--quiet", "--filter", &label]), "");
    server.start_again().await;
    server.wait_for_status("slow", "ready").await;
    let lines = server.request("GET", &format!("{SERVERS}/slow/logs"), None).await.ok();
    assert!(lines.to_string().contains("said bye"), "{lines:#}");
    server.remove_mcp("slow").await;
    server.remove_mcp("deaf").await;
    server.stop();
}

#[tokio::test(flavor = "multi_thread")]
async fn restart_policy_decides_whether_an_ended_server_is_restarted() {
    let server = TestServer::start(BINARY).await;
    let image = mcp::image(BINARY);
    for (name, policy, code, status) in [
        ("never", "never", 1, "stopped"),
        ("fine", "on-failure", 0, "stopped"),
        ("failed", "on-failure", 1, "ready"),
    ] {
        let request = json!({ "name": name, "restart_policy": policy, "provider": "docker" });
        server.register(&image, request).await;
        server.mcp_tool(name, "crash", json!({ "code": code })).await.error(502);
        let now = server.wait_for_status(name, status).await;
        assert_eq!(now["last_exit"]["exit_code"], code, "{now:#}");
        if status == "stopped" {
            server.mcp_tool(name, "echo", json!({ "text": "x" })).await.error(503);
            let again =
                server.request("POST", &format!("{SERVERS}/{name}/restart"), Some(json!({}))).await.ok();
            assert_eq!(again["status"], "ready", "{again:#}");
        }
        server.remove_mcp(name).await;
    }
    server.stop();
}
