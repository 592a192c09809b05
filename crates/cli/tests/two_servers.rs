//! Two servers on one PostgreSQL. Each can use every workspace, they share limits and background work, and when one stops or is
//! killed, the other continues its changes.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeSet;
use std::time::Duration;

use emergent_test_support::mcp::{self, SERVERS};
use emergent_test_support::postgres::TestPostgres;
use emergent_test_support::server::{POOL, TestServer, WORKSPACES};
use emergent_test_support::wait::wait_until;
use futures_util::future::join_all;
use serde_json::{Value, json};

const BINARY: &str = env!("CARGO_BIN_EXE_emergent");

/// Starts two servers with one database and a data directory each.
async fn pair(settings: &[(&str, &str)]) -> (TestServer, TestServer) {
    let database = TestPostgres::shared().fresh_database();
    let mut all = vec![("DATABASE_URL", database.as_str()), ("EMERGENT_ALLOW_DOCKER", "true")];
    all.extend(settings);
    (TestServer::start_with(BINARY, &all).await, TestServer::start_with(BINARY, &all).await)
}

async fn status(server: &TestServer, id: &str) -> Value {
    server.workspace(id).await["status"].clone()
}

async fn post(server: &TestServer, path: &str, body: Value) -> Value {
    server.request("POST", &format!("{WORKSPACES}/{path}"), Some(body)).await.ok()
}

async fn until(what: &str, holds: impl AsyncFnMut() -> bool) {
    wait_until(what, Duration::from_secs(90), holds).await;
}

#[tokio::test]
async fn each_server_can_use_workspaces_of_the_other() {
    let (mut one, two) = pair(&[]).await;
    assert_eq!(one.installation(), two.installation());
    let id = one.create(json!({ "environment": { "SECRET": "hush" } })).await;
    one.bash(&id, "echo of one > file").await;
    assert_eq!(two.bash(&id, "cat file; echo $SECRET; echo of two > file").await, "of one\nhush\n");
    assert_eq!(one.bash(&id, "cat file").await, "of two\n");
    // Both servers know a command in the background.
    let begun =
        one.tool(&id, "bash", json!({ "command": "sleep 1; echo done", "background": true })).await.ok();
    let operation = format!("{WORKSPACES}/{id}/operations/{}", begun["operation_id"].as_str().unwrap());
    until("the operation ends", async || {
        two.request("GET", &operation, None).await.ok()["status"] == "exited"
    })
    .await;
    // One server stops the workspace, and the other resumes it with the same disk.
    post(&two, &format!("{id}/stop"), json!({})).await;
    assert_eq!(status(&one, &id).await, "stopped");
    assert_eq!(one.tool(&id, "bash", json!({ "command": "true" })).await.error(409), "wrong_state");
    post(&one, &format!("{id}/resume"), json!({})).await;
    assert_eq!(two.bash(&id, "cat file").await, "of two\n");
    // One server makes a snapshot, and the other makes a workspace of it.
    let snapshot = post(&one, &format!("{id}/snapshot"), json!({})).await;
    let copy = post(&two, "from-snapshot", json!({ "snapshot_id": snapshot["id"] })).await;
    let copy = copy["id"].as_str().unwrap();
    assert_eq!(one.bash(copy, "cat file").await, "of two\n");
    let snapshots = format!("{WORKSPACES}/snapshots");
    two.request("DELETE", &format!("{snapshots}/{}", snapshot["id"].as_str().unwrap()), None).await.ok();
    two.destroy(&id).await;
    one.destroy(copy).await;
    assert_eq!(one.request("GET", &format!("{WORKSPACES}/{id}"), None).await.status, 404);
    assert_eq!(one.tool(&id, "bash", json!({ "command": "true" })).await.status, 404);
    one.stop_beside(&two);
    two.stop();
}

#[tokio::test]
async fn two_servers_share_the_workspace_limit_and_the_pool() {
    let (mut one, two) = pair(&[("WORKSPACE_MAX_CONCURRENT", "6")]).await;
    let shape = json!({ "provider": "docker", "size": 3 });
    one.request("PUT", POOL, Some(json!({ "shapes": [shape] }))).await.ok();
    one.wait_for_pool(3).await;
    two.wait_for_pool(3).await;
    let both = [&one, &two, &one, &two, &one, &two, &one, &two, &one, &two];
    let creates =
        both.map(|server| server.request("POST", WORKSPACES, Some(json!({ "provider": "docker" }))));
    let answers = join_all(creates).await;
    let (made, refused): (Vec<_>, Vec<_>) = answers.into_iter().partition(|answer| answer.status == 201);
    assert_eq!((made.len(), refused.len()), (6, 4), "{made:?} {refused:?}");
    assert!(refused.iter().all(|answer| answer.status == 429), "{refused:?}");
    let ids: BTreeSet<&str> = made.iter().map(|answer| answer.body["id"].as_str().unwrap()).collect();
    assert_eq!(ids.len(), 6);
    assert!(made.iter().any(|answer| answer.body["placement"]["warm_hit"] == true), "{made:?}");
    // Each workspace has a sandbox of its own.
    for id in &ids {
        assert_eq!(two.bash(id, "cat mark 2>/dev/null; echo $$ > mark").await, "");
    }
    two.wait_for_pool(3).await;
    for id in ids {
        one.destroy(id).await;
    }
    two.turn_pool_off().await;
    one.stop_beside(&two);
    two.stop();
}

#[tokio::test]
async fn workspace_in_use_by_one_server_is_not_idle_for_the_other() {
    let (mut one, two) = pair(&[("WORKSPACE_IDLE_STOP_SECONDS", "10")]).await;
    let id = one.create(json!({})).await;
    let idle = one.create(json!({})).await;
    let command = "until [ -e end ]; do sleep 0.1; done; echo done";
    let busy = one.tool(&id, "bash", json!({ "command": command, "timeout_ms": 240_000 }));
    let others = async {
        until("the idle workspace is stopped", async || status(&two, &idle).await == "stopped").await;
        // The stop of another idle workspace shows that later sweeps have run.
        let next = one.create(json!({})).await;
        until("the next idle workspace is stopped", async || status(&two, &next).await == "stopped").await;
        assert_eq!(status(&two, &id).await, "ready");
        one.bash(&id, "touch end").await;
        next
    };
    let (answer, next) = tokio::join!(busy, others);
    assert_eq!(answer.ok()["stdout"], "done\n");
    until("the workspace is stopped when it is idle", async || status(&two, &id).await == "stopped").await;
    for id in [id, idle, next] {
        two.destroy(&id).await;
    }
    one.stop_beside(&two);
    two.stop();
}

#[tokio::test]
async fn changes_of_a_killed_server_are_finished_by_the_other() {
    let (mut one, two) = pair(&[]).await;
    let kept = one.create(json!({})).await;
    one.bash(&kept, "echo kept > file").await;
    for step in ["create.sandbox_made", "destroy.row_written", "stop.row_written"] {
        let victim = if step.starts_with("create") { None } else { Some(one.create(json!({})).await) };
        one.terminate();
        one.start_again_with(&[("EMERGENT_FAILPOINT", step)]).await;
        match (&victim, step) {
            (None, _) => one.request_ignoring_outcome("POST", WORKSPACES, Some(json!({}))).await,
            (Some(id), "stop.row_written") => {
                one.request_ignoring_outcome("POST", &format!("{WORKSPACES}/{id}/stop"), Some(json!({})))
                    .await;
            }
            (Some(id), _) => {
                one.request_ignoring_outcome("DELETE", &format!("{WORKSPACES}/{id}"), None).await
            }
        }
        one.wait_until_killed();
        // The other server sees that the heartbeat of this one has stopped, and takes over.
        until(&format!("{step}: no workspace is in transition"), async || {
            let listed = two.request("GET", WORKSPACES, None).await.ok();
            let all = listed["workspaces"].as_array().unwrap().clone();
            all.iter().all(|one| matches!(one["status"].as_str().unwrap(), "ready" | "stopped"))
        })
        .await;
        if let (Some(id), "stop.row_written") = (&victim, step) {
            assert_eq!(status(&two, id).await, "stopped");
            two.destroy(id).await;
        }
        let listed = two.request("GET", WORKSPACES, None).await.ok();
        for workspace in listed["workspaces"].as_array().unwrap() {
            let id = workspace["id"].as_str().unwrap();
            if id != kept {
                two.bash(id, "true").await;
                two.destroy(id).await;
            }
        }
        assert_eq!(two.bash(&kept, "cat file").await, "kept\n", "{step}");
        one.start_again().await;
    }
    two.destroy(&kept).await;
    one.stop_beside(&two);
    two.stop();
}

#[tokio::test]
async fn mcp_server_of_a_killed_server_is_taken_over_by_the_other() {
    let (mut one, two) = pair(&[]).await;
    one.register(&mcp::image(BINARY), json!({ "name": "common", "provider": "docker" })).await;
    one.wait_for_status("common", "ready").await;
    // The other server lists it, and does not run it.
    assert_eq!(two.mcp_server("common").await["status"], "elsewhere");
    assert_eq!(two.mcp_tool("common", "echo", json!({ "text": "x" })).await.error(503), "unavailable");
    two.request("POST", &format!("{SERVERS}/common/restart"), None).await.error(503);
    assert_eq!(one.mcp_text("common", "echo", json!({ "text": "mine" })).await, "mine");
    assert_eq!(one.mcp_server("common").await["usage"]["processes"], 1);
    one.kill();
    two.wait_for_status("common", "ready").await;
    assert_eq!(two.mcp_text("common", "echo", json!({ "text": "now mine" })).await, "now mine");
    assert_eq!(two.mcp_server("common").await["usage"]["processes"], 1);
    // After its return the first server does not run it. Both can remove it.
    one.start_again().await;
    assert_eq!(one.mcp_server("common").await["status"], "elsewhere");
    one.remove_mcp("common").await;
    two.request("GET", &format!("{SERVERS}/common"), None).await.error(404);
    one.terminate();
    two.stop();
}
