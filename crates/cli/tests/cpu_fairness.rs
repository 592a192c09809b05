//! Workspaces that use all CPUs of the host run at background priority while another one is in use.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::{Path, PathBuf};
use std::time::Duration;

use emergent_test_support::command::run;
use emergent_test_support::server::TestServer;
use serde_json::json;

const BINARY: &str = env!("CARGO_BIN_EXE_emergent");

/// The control group with a container's CPU settings.
fn cpu_group(workspace: &str) -> PathBuf {
    let container = format!("agent-workspace-{workspace}");
    let pid = run("docker", &["inspect", "--format", "{{.State.Pid}}", &container]);
    let groups = std::fs::read_to_string(format!("/proc/{}/cgroup", pid.trim())).unwrap();
    let path_of = |controller: &str| {
        groups.lines().find_map(|line| {
            let (_, rest) = line.split_once(':')?;
            let (controllers, path) = rest.split_once(':')?;
            controllers.split(',').any(|one| one == controller).then(|| path.to_owned())
        })
    };
    let root = PathBuf::from("/sys/fs/cgroup");
    match path_of("cpu") {
        Some(path) => root.join("cpu").join(path.trim_start_matches('/')),
        None => root.join(path_of("").unwrap().trim_start_matches('/')),
    }
}

fn is_background(group: &Path) -> bool {
    std::fs::read_to_string(group.join("cpu.idle")).unwrap().trim() == "1"
}

/// Whether the group has a quarter of the default weight, which workspaces have. Works with both versions of control groups.
fn has_workspace_weight(group: &Path) -> bool {
    let weight = |file: &str| std::fs::read_to_string(group.join(file));
    weight("cpu.shares")
        .or_else(|_| weight("cpu.weight"))
        .is_ok_and(|text| ["256", "25"].contains(&text.trim()))
}

/// Calls the workspace in use until a condition holds for all groups.
async fn use_until(server: &TestServer, in_use: &str, groups: &[PathBuf], holds: fn(&Path) -> bool) {
    let waited = async {
        while !groups.iter().all(|group| holds(group)) {
            server.assert_works(in_use).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), waited).await.unwrap();
}

async fn busy_workspaces_get_background_priority(provider: &str) {
    let mut server = TestServer::start(BINARY).await;
    let cpus = std::thread::available_parallelism().unwrap().get();
    let limits = json!({ "cpu": cpus.to_string(), "memory": "256M", "disk": "128M" });
    let request = json!({ "provider": provider, "network": "isolated", "resource_limits": limits });
    let in_use = server.create_marked(request.clone()).await;
    let (first, second) = (server.create(request.clone()).await, server.create(request).await);
    let groups = [cpu_group(&first), cpu_group(&second)];
    assert!(groups.iter().all(|group| !is_background(group)));

    let burn = format!("for n in $(seq {cpus}); do while :; do :; done & done; wait");
    let operations =
        [server.start_in_background(&first, &burn).await, server.start_in_background(&second, &burn).await];
    use_until(&server, &in_use, &groups, is_background).await;
    assert!(!is_background(&cpu_group(&in_use)));

    // A killed server leaves the priority as it is. The next server restores it when the load is over.
    server.kill();
    server.start_again().await;
    for operation in &operations {
        server.request("DELETE", operation, None).await.ok();
    }
    use_until(&server, &in_use, &groups, |group| !is_background(group) && has_workspace_weight(group)).await;
    for id in [in_use, first, second] {
        server.destroy_in_time(&id).await;
    }
    server.stop();
}

#[tokio::test]
async fn busy_gvisor_workspaces_get_background_priority() {
    busy_workspaces_get_background_priority("gvisor").await;
}

#[tokio::test]
async fn busy_plain_containers_get_background_priority() {
    busy_workspaces_get_background_priority("docker").await;
}
