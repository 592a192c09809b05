//! The scenarios in the requirements of the workspace lifecycle. Each is a test with the title of its scenario as name.
//!
//! The tests use a real server, a real Docker engine and the real gVisor runtime. The scenario that MCP servers are exempt from TTL is
//! a test of the store.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use emergent_test_support::command::run;
use emergent_test_support::server::{POOL, TestServer, WORKSPACES, workspace_path as path};
use emergent_test_support::wait::wait_until;
use serde_json::{Value, json};

const BINARY: &str = env!("CARGO_BIN_EXE_emergent");

/// The names of a server's containers.
fn containers(server: &TestServer) -> BTreeSet<String> {
    let filter = format!("label=emergent.installation={}", server.installation());
    let text = run("docker", &["ps", "--all", "--filter", &filter, "--format", "{{.Names}}"]);
    text.lines().map(str::to_owned).collect()
}

/// The value of a metric.
async fn metric(server: &TestServer, name: &str) -> f64 {
    let text = server.metrics().await;
    let line = text.lines().find(|line| line.starts_with(name));
    line.and_then(|line| line.rsplit(' ').next()?.parse().ok()).unwrap_or(0.0)
}

#[tokio::test]
async fn successful_workspace_creation_with_default_settings() {
    let server = TestServer::start_with(BINARY, &[]).await;
    let created = server.request("POST", WORKSPACES, Some(json!({}))).await;
    assert_eq!(created.status, 201);
    let created = created.ok();
    assert_eq!(
        (&created["status"], &created["container_type"]),
        (&json!("ready"), &json!("agent_workspace"))
    );
    assert_eq!(created["resource_limits"], json!({ "cpu": "2", "memory": "4G", "disk": "10G" }));
    let placement = &created["placement"];
    assert_eq!((&placement["provider"], &placement["warm_hit"]), (&json!("gvisor"), &json!(false)));
    assert!(placement["reason"].as_str().unwrap().contains("firecracker can't be used"), "{placement}");
    let id = created["id"].as_str().unwrap();
    assert_eq!(server.workspace(id).await["status"], "ready");
    server.destroy(id).await;
    server.stop();
}

#[tokio::test]
async fn workspace_creation_with_explicit_provider() {
    let server = TestServer::start(BINARY).await;
    let refused = server.request("POST", WORKSPACES, Some(json!({ "provider": "firecracker" }))).await;
    let message = refused.message().to_owned();
    assert!(message.contains("firecracker: not installed"), "{message}");
    assert!(!message.contains("gvisor"), "{message}");
    refused.error(503);
    assert_eq!(server.request("GET", WORKSPACES, None).await.ok()["workspaces"], json!([]));
    // A usable provider is used, though `auto` would choose another one.
    let created = server.request("POST", WORKSPACES, Some(json!({ "provider": "docker" }))).await.ok();
    assert_eq!(created["placement"]["reason"], "docker was asked for");
    server.destroy(created["id"].as_str().unwrap()).await;
    server.stop();
}

#[tokio::test]
async fn workspace_creation_with_warm_pool_hit() {
    let server = TestServer::start_with(BINARY, &[("WORKSPACE_WARM_POOL_SIZE", "1")]).await;
    server.wait_for_pool(1).await;
    let waiting = containers(&server);
    let request = json!({ "environment": { "TOKEN": "hush" }, "ttl_seconds": 600 });
    let created = server.request("POST", WORKSPACES, Some(request)).await.ok();
    assert_eq!((&created["status"], &created["placement"]["warm_hit"]), (&json!("ready"), &json!(true)));
    let id = created["id"].as_str().unwrap();
    // The spare has become the workspace, with its variables, limits and time to live.
    assert!(waiting.contains(&format!("agent-workspace-{id}")), "{waiting:?}");
    assert_eq!(server.bash(id, "echo $TOKEN; ls -A").await, "hush\n");
    assert_eq!(created["resource_limits"]["disk"], "10G");
    assert_eq!(created["metadata"]["disk_quota"], "enforced");
    assert!(created["expires_at"].is_string());
    assert_eq!(metric(&server, "emergent_pool_hits_total").await, 1.0);
    // The pool makes a new spare.
    server.wait_for_pool(1).await;
    server.destroy(id).await;
    server.turn_pool_off().await;
    server.stop();
}

#[tokio::test]
async fn workspace_creation_with_warm_pool_miss() {
    let server = TestServer::start_with(BINARY, &[("WORKSPACE_WARM_POOL_SIZE", "1")]).await;
    server.wait_for_pool(1).await;
    // No spare fits another size or another network. The log has the reason.
    for request in [json!({ "resource_limits": { "cpu": "1" } }), json!({ "network": "isolated" })] {
        let created = server.request("POST", WORKSPACES, Some(request)).await.ok();
        assert_eq!((&created["status"], &created["placement"]["warm_hit"]), (&json!("ready"), &json!(false)));
        server.destroy(created["id"].as_str().unwrap()).await;
    }
    assert_eq!(metric(&server, "emergent_pool_misses_total{reason=\"other_shape\"}").await, 2.0);
    assert!(server.log().contains("no spare fits reason=\"other_shape\""));
    // A request without a warm start gets no spare, which is not counted as a miss.
    let created = server.request("POST", WORKSPACES, Some(json!({ "warm_start": false }))).await.ok();
    assert_eq!(created["placement"]["warm_hit"], false);
    assert_eq!(metric(&server, "emergent_pool_misses_total{reason=\"other_shape\"}").await, 2.0);
    server.destroy(created["id"].as_str().unwrap()).await;
    // An empty pool.
    server
        .request("PUT", POOL, Some(json!({ "shapes": [{ "size": 1, "image": "emergent/none" }] })))
        .await
        .ok();
    until_pool_has_only_problems(&server).await;
    let created = server.request("POST", WORKSPACES, Some(json!({}))).await.ok();
    assert_eq!(created["placement"]["warm_hit"], false);
    assert_eq!(metric(&server, "emergent_pool_misses_total{reason=\"empty\"}").await, 1.0);
    server.destroy(created["id"].as_str().unwrap()).await;
    server.turn_pool_off().await;
    server.stop();
}

async fn until_pool_has_only_problems(server: &TestServer) {
    wait_until("the pool reports its problem", Duration::from_secs(60), async || {
        let pool = server.request("GET", POOL, None).await.ok();
        let problem = pool["shapes"][0]["problem"].as_str().unwrap_or_default().to_owned();
        problem.contains("'emergent/none' is not on this host") && pool["leaving"] == 0
    })
    .await;
}

#[tokio::test]
async fn workspace_creation_exceeds_concurrent_limit() {
    let settings = [("WORKSPACE_MAX_CONCURRENT", "3"), ("EMERGENT_ALLOW_DOCKER", "true")];
    let server = TestServer::start_with(BINARY, &settings).await;
    let request = json!({ "provider": "docker", "network": "isolated" });
    let attempts = (0..200).map(|_| server.request("POST", WORKSPACES, Some(request.clone())));
    let answers = futures_util::future::join_all(attempts).await;
    let (made, refused): (Vec<_>, Vec<_>) = answers.into_iter().partition(|answer| answer.status == 201);
    assert_eq!(made.len(), 3);
    for answer in refused {
        let message = answer.message().to_owned();
        assert!(message.contains("limit of 3") && message.contains("destroy"), "{message}");
        assert_eq!(answer.error(429), "limit_reached");
    }
    // After one is destroyed, one can be created.
    server.destroy(made[0].body["id"].as_str().unwrap()).await;
    let again = server.create(request.clone()).await;
    server.request("POST", WORKSPACES, Some(request)).await.error(429);
    for id in [&again, made[1].body["id"].as_str().unwrap(), made[2].body["id"].as_str().unwrap()] {
        server.destroy(id).await;
    }
    server.stop();
}

#[tokio::test]
async fn successful_workspace_destruction() {
    let server = TestServer::start_with(BINARY, &[]).await;
    let ready = server.create(json!({})).await;
    let stopped = server.create(json!({})).await;
    server.act(&stopped, "stop").await;
    for id in [ready, stopped] {
        let answer = server.request("DELETE", &path(&id), None).await.ok();
        assert_eq!(answer, json!({ "id": id, "destroyed": true }));
        server.request("GET", &path(&id), None).await.error(404);
    }
    assert_eq!(containers(&server), BTreeSet::new());
    server.stop();
}

#[tokio::test]
async fn destroy_running_workspace_with_active_operations() {
    let server = TestServer::start_with(BINARY, &[]).await;
    let id = server.create(json!({})).await;
    // One command ends at SIGTERM, and one ignores it.
    let polite = "trap 'echo bye; exit 0' TERM; echo up; touch polite; while :; do sleep 0.1; done";
    let polite = json!({ "command": polite });
    let stubborn = json!({ "command": "trap '' TERM; touch stubborn; while :; do sleep 0.1; done" });
    let (polite, stubborn, destroyed) =
        tokio::join!(server.tool(&id, "bash", polite), server.tool(&id, "bash", stubborn), async {
            server.bash(&id, "until [ -e polite ] && [ -e stubborn ]; do sleep 0.05; done").await;
            let begun = Instant::now();
            server.request("DELETE", &path(&id), None).await.ok();
            begun.elapsed()
        });
    // Both calls were answered. The answer of the first has its output after SIGTERM.
    assert_eq!(polite.clone().ok()["stdout"], "up\nbye\n", "{polite:?}");
    assert!(stubborn.status != 200 || stubborn.body["exit_code"].is_null(), "{stubborn:?}");
    assert!(destroyed >= Duration::from_secs(9), "the stubborn command was killed after {destroyed:?}");
    assert_eq!(containers(&server), BTreeSet::new());
    server.stop();
}

#[tokio::test]
async fn destroy_non_existent_workspace() {
    let server = TestServer::start_with(BINARY, &[]).await;
    let answer = server.request("DELETE", &path("0190a000-0000-7000-8000-000000000000"), None).await;
    let message = answer.message().to_owned();
    assert!(message.contains("there is no workspace 0190a000"), "{message}");
    assert_eq!(answer.error(404), "not_found");
    server.stop();
}

#[tokio::test]
async fn stop_a_running_workspace() {
    let server = TestServer::start_with(BINARY, &[]).await;
    let id = server.create(json!({})).await;
    let before = server.workspace(&id).await;
    server.bash(&id, "echo kept > file").await;
    let stop = format!("{}/stop", path(&id));
    // Two concurrent stops and a third one have the same result.
    let (one, two) = tokio::join!(server.request("POST", &stop, None), server.request("POST", &stop, None));
    let three = server.request("POST", &stop, None).await;
    for answer in [one, two, three] {
        assert_eq!(answer.ok()["status"], "stopped");
    }
    let stopped = server.workspace(&id).await;
    assert!(stopped["last_used_at"].as_str().unwrap() > before["last_used_at"].as_str().unwrap());
    assert_eq!(server.tool(&id, "bash", json!({ "command": "true" })).await.error(409), "wrong_state");
    server.destroy(&id).await;
    server.stop();
}

#[tokio::test]
async fn resume_a_stopped_workspace() {
    let server = TestServer::start_with(BINARY, &[]).await;
    let id = server.create(json!({ "environment": { "A": "b" } })).await;
    server.bash(&id, "echo in > file; echo out > /srv/file; ls / > /opt/list").await;
    server.act(&id, "stop").await;
    let resume = format!("{}/resume", path(&id));
    let (one, two) =
        tokio::join!(server.request("POST", &resume, None), server.request("POST", &resume, None));
    for answer in [one, two] {
        assert_eq!(answer.ok()["status"], "ready");
    }
    assert_eq!(server.bash(&id, "cat file /srv/file; test -s /opt/list && echo $A").await, "in\nout\nb\n");
    server.destroy(&id).await;
    server.stop();
}

#[tokio::test]
async fn workspace_expires_after_ttl() {
    let settings = [("WORKSPACE_SWEEP_EVERY_SECONDS", "1"), ("EMERGENT_ALLOW_DOCKER", "true")];
    let server = TestServer::start_with(BINARY, &settings).await;
    let short = json!({ "ttl_seconds": 60, "provider": "docker", "network": "isolated" });
    let idle = server.create(short.clone()).await;
    let stopped = server.create(short.clone()).await;
    server.act(&stopped, "stop").await;
    let used = server.create(short.clone()).await;
    let busy = server.create(short.clone()).await;
    let background = server.create(short).await;
    let sleep = json!({ "command": "sleep 1000", "background": true });
    server.tool(&background, "bash", sleep).await.ok();
    // A call that takes longer than the time to live.
    let wait = "touch begun; until [ -e end ]; do sleep 0.1; done; echo done";
    let long = server.tool(&busy, "bash", json!({ "command": wait }));
    let others = async {
        server.bash(&busy, "until [ -e begun ]; do sleep 0.1; done").await;
        server.advance_clock(40);
        server.bash(&used, "true").await;
        server.advance_clock(30);
        for id in [&idle, &stopped] {
            until_gone(&server, id).await;
        }
        for id in [&used, &busy, &background] {
            assert_eq!(server.workspace(id).await["status"], "ready");
        }
        server.bash(&busy, "touch end").await;
    };
    let (long, ()) = tokio::join!(long, others);
    assert_eq!(long.ok()["stdout"], "done\n");
    assert!(server.log().contains("the workspace's time is over"));
    for id in [used, busy, background] {
        server.destroy(&id).await;
    }
    server.stop();
}

async fn until_gone(server: &TestServer, id: &str) {
    wait_until("the expired workspace is removed", Duration::from_secs(90), async || {
        server.request("GET", &path(id), None).await.status == 404
    })
    .await;
}

#[tokio::test]
async fn active_workspace_ttl_extension() {
    let server = TestServer::start(BINARY).await;
    let id = server.create(json!({ "provider": "docker", "network": "isolated", "ttl_seconds": 3600 })).await;
    let mut before = server.workspace(&id).await;
    for (tool, request) in [
        ("bash", json!({ "command": "true" })),
        ("write", json!({ "file_path": "a", "content": "b" })),
        ("read", json!({ "file_path": "a" })),
        ("glob", json!({ "pattern": "*" })),
    ] {
        server.tool(&id, tool, request).await.ok();
        let after = server.workspace(&id).await;
        for time in ["last_used_at", "expires_at"] {
            assert!(after[time].as_str().unwrap() > before[time].as_str().unwrap(), "{tool} {time}: {after}");
        }
        before = after;
    }
    // Reading the workspace does not count as a use.
    assert_eq!(server.workspace(&id).await["expires_at"], before["expires_at"]);
    server.destroy(&id).await;
    server.stop();
}

#[tokio::test]
async fn cpu_limit_enforcement() {
    let server = TestServer::start_with(BINARY, &[]).await;
    let id = server.create(json!({ "resource_limits": { "cpu": "0.5" } })).await;
    let container = run("docker", &["inspect", &format!("agent-workspace-{id}")]);
    let container: Value = serde_json::from_str(&container).unwrap();
    assert_eq!(container[0]["HostConfig"]["NanoCpus"], 500_000_000);
    // A command that wants more CPU time is not killed.
    let spin = "timeout 3 sh -c 'while :; do :; done'; echo $?";
    assert_eq!(server.bash(&id, spin).await, "124\n");
    assert!(
        server.workspace(&id).await["usage"]["cpu"].is_number()
            || server.workspace(&id).await["usage"].is_object()
    );
    server.destroy(&id).await;
    server.stop();
}

#[tokio::test]
async fn memory_limit_enforcement() {
    let server = TestServer::start_with(BINARY, &[]).await;
    let id = server.create(json!({ "resource_limits": { "memory": "512M" } })).await;
    let greedy = json!({ "command": "python3 -c 'x = bytearray(3 << 30); print(len(x))'" });
    let answer = server.tool(&id, "bash", greedy).await.ok();
    assert_eq!(answer["oom_killed"], true, "{answer}");
    assert!(server.log().contains("a command ran out of memory"));
    assert_eq!(server.bash(&id, "echo alive").await, "alive\n");
    server.destroy(&id).await;
    server.stop();
}

#[tokio::test]
async fn disk_quota_enforcement() {
    let server = TestServer::start_with(BINARY, &[]).await;
    let id = server.create(json!({ "resource_limits": { "disk": "64M" } })).await;
    server.bash(&id, "echo small > small").await;
    let fill = json!({ "command": "dd if=/dev/zero of=big bs=1M count=100 2>&1; true" });
    let answer = server.tool(&id, "bash", fill).await.ok();
    assert!(answer["stdout"].as_str().unwrap().contains("No space left on device"), "{answer}");
    let refused =
        server.tool(&id, "write", json!({ "file_path": "more", "content": "x".repeat(1 << 20) })).await;
    assert_eq!(refused.error(422), "disk_full");
    // Reads succeed on the full disk, and writes succeed once there is free space.
    assert_eq!(server.bash(&id, "cat small").await, "small\n");
    server.bash(&id, "rm big; echo again > small").await;
    server.destroy(&id).await;
    server.stop();
}

#[tokio::test]
async fn warm_pool_initialization_on_server_start() {
    let mut server = TestServer::start_with(BINARY, &[("WORKSPACE_WARM_POOL_SIZE", "2")]).await;
    server.wait_for_pool(2).await;
    let first = containers(&server);
    assert_eq!(first.len(), 2);
    // Spares survive a kill of the server. The next server adopts them, and does not make new ones.
    server.kill();
    server.start_again().await;
    server.wait_for_pool(2).await;
    assert_eq!(containers(&server), first);
    let created = server.request("POST", WORKSPACES, Some(json!({}))).await.ok();
    assert_eq!(created["placement"]["warm_hit"], true);
    assert!(first.contains(created["provider_workspace_id"].as_str().unwrap()));
    server.destroy(created["id"].as_str().unwrap()).await;
    // A dead spare is not claimed.
    server.wait_for_pool(2).await;
    for name in containers(&server) {
        run("docker", &["kill", &name]);
    }
    let created = server.request("POST", WORKSPACES, Some(json!({}))).await.ok();
    assert_eq!(created["status"], "ready");
    let id = created["id"].as_str().unwrap();
    assert_eq!(server.bash(id, "echo alive").await, "alive\n");
    server.destroy(id).await;
    server.turn_pool_off().await;
    server.stop();
}

#[tokio::test]
async fn warm_pool_replenishment_after_assignment() {
    let server = TestServer::start_with(BINARY, &[("WORKSPACE_WARM_POOL_SIZE", "2")]).await;
    server.wait_for_pool(2).await;
    // With more concurrent requests than spares, no spare is claimed twice, and the other workspaces are cold starts.
    let attempts = (0..5).map(|_| server.request("POST", WORKSPACES, Some(json!({}))));
    let answers = futures_util::future::join_all(attempts).await;
    let made: Vec<Value> = answers.into_iter().map(|answer| answer.ok()).collect();
    let ids: BTreeSet<&str> = made.iter().map(|one| one["id"].as_str().unwrap()).collect();
    assert_eq!(ids.len(), 5);
    let warm = made.iter().filter(|one| one["placement"]["warm_hit"] == true).count();
    assert!(warm >= 2, "{warm}");
    server.wait_for_pool(2).await;
    assert_eq!(containers(&server).len(), 7, "there are more spares than wanted");
    for id in ids {
        server.destroy(id).await;
    }
    server.turn_pool_off().await;
    server.stop();
}

#[tokio::test]
async fn warm_pool_size_adjustment() {
    let mut server = TestServer::start(BINARY).await;
    let size = |size: u32| json!({ "shapes": [{ "size": size, "provider": "docker" }] });
    for wanted in [3, 1, 2, 0] {
        server.request("PUT", POOL, Some(size(wanted))).await.ok();
        server.wait_for_pool(u64::from(wanted)).await;
        assert_eq!(containers(&server).len(), wanted as usize);
    }
    // A size that was set stays after a restart, until it is reset.
    server.request("PUT", POOL, Some(size(1))).await.ok();
    server.wait_for_pool(1).await;
    server.terminate();
    server.start_again().await;
    server.wait_for_pool(1).await;
    assert_eq!(server.request("GET", POOL, None).await.ok()["set_at_run_time"], true);
    let reset = server.request("DELETE", POOL, None).await.ok();
    assert_eq!((&reset["set_at_run_time"], &reset["shapes"]), (&json!(false), &json!([])));
    server.wait_for_pool(0).await;
    for (bad, status) in [
        (json!({ "shapes": [{ "size": 201 }] }), 400),
        (json!({ "shapes": [{ "size": 1, "colour": "red" }] }), 400),
        (json!({ "size": 3 }), 400),
        (json!({ "shapes": [{ "size": 1, "resource_limits": { "memory": "1M" } }] }), 422),
    ] {
        server.request("PUT", POOL, Some(bad)).await.error(status);
    }
    server.stop();
}
