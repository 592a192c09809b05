//! Usage of CPU, memory and disk, alerts, events, the watched list, and the stop of idle workspaces.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use emergent_test_support::server::TestServer;
use emergent_test_support::wait::wait_until;
use serde_json::{Value, json};

const BINARY: &str = env!("CARGO_BIN_EXE_emergent");

/// A running command of the CLI with the lines of its output. Dropping it kills the command.
struct Following {
    process: Child,
    lines: Receiver<String>,
}

impl Following {
    fn start(server: &TestServer, arguments: &[&str]) -> Self {
        let mut process = Command::new(BINARY)
            .args(arguments)
            .env("EMERGENT_DATA_DIR", server.data_dir())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let output = BufReader::new(process.stdout.take().unwrap());
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            output.lines().map_while(Result::ok).try_for_each(|line| sender.send(line))
        });
        Self { process, lines }
    }

    /// The next line that contains all of these texts.
    fn until(&self, texts: &[&str]) -> String {
        let deadline = Instant::now() + Duration::from_secs(90);
        let mut others = Vec::new();
        while let Ok(line) = self.lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            if texts.iter().all(|text| line.contains(text)) {
                return line;
            }
            others.push(line);
        }
        panic!("no line with {texts:?}, but {others:#?}");
    }
}

impl Drop for Following {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Starts `emergent events`, and waits until it gets events. Events before its connection are not sent to it.
async fn listen(server: &TestServer) -> Following {
    let events = Following::start(server, &["events", "--json"]);
    let begun = Instant::now();
    loop {
        let id = server.create(json!({ "provider": "docker" })).await;
        server.destroy(&id).await;
        // An event may need a moment. Without one, the loop makes new events.
        tokio::time::sleep(Duration::from_millis(300)).await;
        if events.lines.try_iter().any(|line| line.contains(&id)) {
            return events;
        }
        assert!(begun.elapsed() < Duration::from_secs(30), "no events come");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn workspace_near_its_disk_limit_raises_an_alert_in_log_metrics_and_events() {
    let server = TestServer::start(BINARY).await;
    let events = listen(&server).await;
    let id = server.create(json!({ "resource_limits": { "disk": "64M", "memory": "512M" } })).await;
    events.until(&["workspace.ready", &id]);
    server.bash(&id, "head -c 48M /dev/zero > big").await;
    let alert: Value = serde_json::from_str(&events.until(&["usage.high", &id])).unwrap();
    assert!(alert["message"].as_str().unwrap().starts_with("disk is at"), "{alert}");
    assert!(server.log().contains("a workspace is near its limit"), "{}", server.log());
    let text = server.metrics().await;
    assert!(text.contains("emergent_usage_alerts_total{resource=\"disk\"} 1"), "{text}");
    assert!(text.contains(&format!("emergent_workspace_disk_bytes{{workspace=\"{id}\"}} ")), "{text}");
    let seen = server.workspace(&id).await;
    assert!(seen["usage"]["disk_bytes"].as_u64().unwrap() >= 48 << 20, "{seen}");
    assert!(seen["usage"]["memory_bytes"].as_u64().unwrap() > 0, "{seen}");
    server.bash(&id, "rm big").await;
    events.until(&["usage.normal", &id]);
    server.destroy(&id).await;
    events.until(&["workspace.destroyed", &id]);
    drop(events);
    server.stop();
}

#[tokio::test(flavor = "multi_thread")]
async fn memory_usage_is_that_of_the_workspace_on_every_container_provider() {
    let server = TestServer::start(BINARY).await;
    for provider in ["docker", "gvisor"] {
        let limits = json!({ "memory": "512M" });
        let id = server.create(json!({ "provider": provider, "resource_limits": limits })).await;
        let seen = async || server.workspace(&id).await["usage"].clone();
        let before = seen().await;
        assert_eq!(before["memory_limit_bytes"], 512 << 20, "{provider}: {before}");
        assert!(before["memory_bytes"].as_u64().unwrap() < 256 << 20, "{provider}: {before}");
        server
            .start_in_background(
                &id,
                "python3 -c 'x = bytearray(200 << 20); open(\"full\", \"w\"); import time; time.sleep(600)'",
            )
            .await;
        server.bash(&id, "until [ -e full ]; do sleep 0.1; done").await;
        // gVisor counts new memory with a delay.
        wait_until("the memory is counted", Duration::from_secs(30), async || {
            seen().await["memory_bytes"].as_u64().unwrap() > 200 << 20
        })
        .await;
        server.destroy(&id).await;
    }
    server.stop();
}

#[tokio::test(flavor = "multi_thread")]
async fn watched_list_shows_changes_of_workspaces() {
    let server = TestServer::start(BINARY).await;
    let list = Following::start(&server, &["workspace", "list", "--watch"]);
    let id = server.create(json!({ "provider": "docker" })).await;
    list.until(&[&id, "ready"]);
    server.act(&id, "stop").await;
    list.until(&[&id, "stopped"]);
    server.destroy(&id).await;
    drop(list);
    server.stop();
}

#[tokio::test(flavor = "multi_thread")]
async fn idle_workspaces_are_stopped_and_used_ones_are_not() {
    let server = TestServer::start_with(
        BINARY,
        &[("EMERGENT_ALLOW_DOCKER", "true"), ("WORKSPACE_IDLE_STOP_SECONDS", "10")],
    )
    .await;
    let events = listen(&server).await;
    let idle = server.create(json!({})).await;
    let with_background = server.create(json!({})).await;
    let busy = server.create(json!({})).await;
    server.bash(&idle, "echo kept > file").await;
    let wait = "touch begun; until [ -e end ]; do sleep 0.1; done; echo done";
    let operation = server.start_in_background(&with_background, wait).await;
    let running = server.tool(&busy, "bash", json!({ "command": wait }));
    let others = async {
        server.bash(&busy, "until [ -e begun ]; do sleep 0.1; done").await;
        server.advance_clock(15);
        let stopped = tokio::task::block_in_place(|| events.until(&["workspace.idle", &idle]));
        for id in [&busy, &with_background] {
            server.bash(id, "touch end").await;
        }
        stopped
    };
    let (answer, stopped) = tokio::join!(running, others);
    assert_eq!(answer.ok()["stdout"], "done\n", "after {stopped}");
    let mut seen = Value::Null;
    wait_until("the command has ended", Duration::from_secs(60), async || {
        seen = server.request("GET", &operation, None).await.ok();
        seen["status"] != "running"
    })
    .await;
    assert_eq!(seen["stdout"], "done\n", "{seen}");
    server.advance_clock(15);
    for id in [&busy, &with_background] {
        let is_stopped = async || server.workspace(id).await["status"] == "stopped";
        wait_until("the workspace is stopped", Duration::from_secs(60), is_stopped).await;
    }
    // The idle workspace is stopped and keeps its files.
    server.act(&idle, "resume").await;
    assert_eq!(server.bash(&idle, "cat file").await, "kept\n");
    for id in [idle, busy, with_background] {
        server.destroy(&id).await;
    }
    drop(events);
    server.stop();
}
