//! A host whose disk is full: nothing that was acknowledged is lost, nobody else's workspace is harmed, what fills it can be
//! removed, and everything works again once there is room.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

use emergent_test_support::server::{TestServer, run};
use serde_json::{Value, json};

const BINARY: &str = env!("CARGO_BIN_EXE_emergent");

/// A server whose data directory is on a small disk of its own. The janitor unmounts it.
async fn on_small_disk(megabytes: u64, environment: &[(&str, &str)]) -> (TestServer, tempfile::TempDir) {
    let mut all = vec![("EMERGENT_ALLOW_DOCKER", "true"), ("WORKSPACE_MIN_FREE_DISK", "64M")];
    all.extend(environment);
    let mut server = TestServer::start_with(BINARY, &all).await;
    server.terminate();
    let images = tempfile::tempdir().unwrap();
    let image = images.path().join("disk");
    std::fs::File::create(&image).unwrap().set_len(megabytes << 20).unwrap();
    // Nothing is kept back for root.
    run("mkfs.ext4", &["-q", "-m", "0", image.to_str().unwrap()]);
    run("mount", &["-o", "loop", image.to_str().unwrap(), server.data_dir().to_str().unwrap()]);
    server.start_again().await;
    (server, images)
}

fn free_megabytes(directory: &Path) -> u64 {
    let stat = rustix::fs::statvfs(directory).unwrap();
    (stat.f_bavail * stat.f_frsize) >> 20
}

/// Takes room until so many megabytes are left.
fn fill(directory: &Path, name: &str, left: u64) {
    let file = std::fs::File::create(directory.join(name)).unwrap();
    let bytes = free_megabytes(directory).saturating_sub(left) << 20;
    rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, bytes).unwrap();
}

/// Takes what is left, but for what the server's log needs.
fn fill_to_the_brim(directory: &Path) {
    let log = std::fs::OpenOptions::new().write(true).open(directory.join("test.log")).unwrap();
    rustix::fs::fallocate(&log, rustix::fs::FallocateFlags::KEEP_SIZE, 0, 4 << 20).unwrap();
    let mut rest = std::fs::File::create(directory.join("rest")).unwrap();
    while std::io::Write::write_all(&mut rest, &[7; 4096]).is_ok() {}
}

async fn ready(server: &TestServer) -> (u16, Value) {
    let answer = server.client().get(format!("{}/health/ready", server.url)).send().await.unwrap();
    (answer.status().as_u16(), answer.json().await.unwrap())
}

async fn wait_for(what: &str, server: &TestServer, mut is_so: impl AsyncFnMut() -> bool) {
    let begun = Instant::now();
    while !is_so().await {
        assert!(begun.elapsed() < Duration::from_secs(60), "{what}:\n{}", server.log());
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

async fn workspace(server: &TestServer, id: &str) -> Value {
    server.request("GET", &format!("/api/v1/agent/workspaces/{id}"), None).await.ok()
}

async fn marked(server: &TestServer, provider: &str) -> String {
    let limits = json!({ "disk": "128M" });
    let id = server
        .create(json!({ "provider": provider, "network": "isolated", "resource_limits": limits }))
        .await;
    server.tool(&id, "write", json!({ "file_path": "mark", "content": "mine\n" })).await.ok();
    id
}

#[tokio::test]
async fn on_a_full_disk_nothing_is_promised_and_everything_can_be_removed() {
    let (mut server, _images) = on_small_disk(600, &[]).await;
    let directory = server.data_dir().to_owned();
    let (first, second) = (marked(&server, "gvisor").await, marked(&server, "docker").await);
    let copies = format!("/api/v1/agent/workspaces/{first}/snapshot");
    let copy = server.request("POST", &copies, Some(json!({}))).await.ok();
    // More than there will ever be.
    let asked = json!({ "provider": "docker", "resource_limits": { "disk": "100G" } });
    let refused = server.request("POST", "/api/v1/agent/workspaces", Some(asked)).await;
    assert_eq!(refused.error(507), "host_disk_full");
    assert_eq!(ready(&server).await, (200, json!({ "status": "ok" })));

    // It is told before it is full.
    fill(&directory, "filler", 100);
    let (status, health) = ready(&server).await;
    assert_eq!((status, &health["warnings"][0]), (200, &json!("the host's disk is nearly full")));
    wait_for("it is told", &server, async || server.log().contains("disk is nearly full")).await;

    fill(&directory, "more", 40);
    let (status, health) = ready(&server).await;
    assert_eq!((status, &health["status"]), (503, &json!("the host's disk is full")));
    wait_for("it is told", &server, async || server.log().contains("the host's disk is full: ")).await;
    let large = "x".repeat(20 << 20);
    for request in
        [json!({ "file_path": "large", "content": large }), json!({ "file_path": "a", "content": "a" })]
    {
        assert_eq!(server.tool(&first, "write", request).await.error(507), "host_disk_full");
    }
    let edit = json!({ "file_path": "mark", "old_string": "mine", "new_string": "yours" });
    assert_eq!(server.tool(&second, "edit", edit).await.error(507), "host_disk_full");
    assert_eq!(server.request("POST", &copies, Some(json!({}))).await.error(507), "host_disk_full");
    let asked = json!({ "provider": "docker", "resource_limits": { "disk": "16M" } });
    let refused = server.request("POST", "/api/v1/agent/workspaces", Some(asked)).await;
    assert_eq!(refused.error(507), "host_disk_full");
    let answer = server.tool(&second, "bash", json!({ "command": "cat mark" })).await.ok();
    assert_eq!(answer["stdout"], "mine\n");
    assert!(answer["notes"].to_string().contains("the host's disk is full"), "{answer}");

    // Not a byte is left; a server that starts now finds everything.
    fill_to_the_brim(&directory);
    server.kill();
    server.start_again().await;
    assert_eq!(server.bash(&first, "cat mark").await, "mine\n");
    server.destroy(&second).await;
    let copy = format!("/api/v1/agent/workspaces/snapshots/{}", copy["id"].as_str().unwrap());
    server.request("DELETE", &copy, None).await.ok();

    // There is room again, and nothing has to be done about it.
    for name in ["filler", "more", "rest"] {
        std::fs::remove_file(directory.join(name)).unwrap();
    }
    assert_eq!(ready(&server).await.0, 200);
    wait_for("it is told", &server, async || server.log().contains("the host's disk has room again")).await;
    server.tool(&first, "write", json!({ "file_path": "large", "content": large })).await.ok();
    let changed = |what: &str| format!("/api/v1/agent/workspaces/{first}/{what}");
    server.request("POST", &changed("stop"), None).await.ok();
    server.request("POST", &changed("resume"), None).await.ok();
    assert_eq!(server.bash(&first, "cat mark; wc -c < large").await, "mine\n20971520\n");
    server.destroy(&first).await;
    server.stop();
}

/// The disk is full at another step each time: of create, write, snapshot, stop, resume and destroy. Each step is done or says that
/// there is no room, and leaves nothing that a later one trips over.
#[tokio::test]
async fn whatever_room_is_left_each_step_is_done_or_refused() {
    let (server, _images) = on_small_disk(600, &[("WORKSPACE_MIN_FREE_DISK", "32M")]).await;
    let directory = server.data_dir().to_owned();
    let id = marked(&server, "gvisor").await;
    let path = |what: &str| format!("/api/v1/agent/workspaces/{id}/{what}");
    let done_or_refused = |step: &str, left: u64, answer: emergent_test_support::server::Answer| {
        let is_done = (200..300).contains(&answer.status);
        if !is_done {
            let code = answer.body["error"]["code"].as_str().unwrap_or_default();
            assert!(
                ["host_disk_full", "disk_full", "unavailable"].contains(&code),
                "{step} with {left} MiB: {answer:?}"
            );
        }
        is_done
    };
    for left in [0, 1, 5, 20, 32, 33, 36, 40, 60, 150] {
        fill(&directory, "filler", left);
        let asked =
            json!({ "provider": "gvisor", "network": "isolated", "resource_limits": { "disk": "128M" } });
        let created = server.request("POST", "/api/v1/agent/workspaces", Some(asked)).await;
        let new = created.body["id"].as_str().map(str::to_owned);
        if done_or_refused("create", left, created) {
            let new = new.unwrap();
            server.request("DELETE", &format!("/api/v1/agent/workspaces/{new}"), None).await.ok();
        }
        let content = "x".repeat(6 << 20);
        let written = server.tool(&id, "write", json!({ "file_path": "large", "content": content })).await;
        let is_written = done_or_refused("write", left, written);
        let copied = server.request("POST", &path("snapshot"), Some(json!({}))).await;
        let copy = copied.body["id"].as_str().map(str::to_owned);
        if done_or_refused("snapshot", left, copied) {
            let copy = format!("/api/v1/agent/workspaces/snapshots/{}", copy.unwrap());
            server.request("DELETE", &copy, None).await.ok();
        }
        done_or_refused("stop", left, server.request("POST", &path("stop"), None).await);
        done_or_refused("resume", left, server.request("POST", &path("resume"), None).await);
        std::fs::remove_file(directory.join("filler")).unwrap();
        wait_for("it is ready again", &server, async || {
            let _ = server.request("POST", &path("resume"), None).await;
            workspace(&server, &id).await["status"] == "ready"
        })
        .await;
        assert_eq!(server.bash(&id, "cat mark").await, "mine\n", "with {left} MiB");
        if is_written {
            assert_eq!(
                server.bash(&id, "wc -c < large").await,
                format!("{}\n", content.len()),
                "with {left} MiB"
            );
        }
        server.bash(&id, "rm -f large; sync .").await;
    }
    server.destroy(&id).await;
    server.stop();
}

#[tokio::test]
async fn who_fills_the_disk_is_stopped_and_its_neighbours_are_not() {
    let (server, _images) = on_small_disk(900, &[]).await;
    let directory = server.data_dir().to_owned();
    for provider in ["gvisor", "docker"] {
        let (neighbour, writer) = (marked(&server, provider).await, marked(&server, provider).await);
        fill(&directory, "filler", 50);
        let command = "while true; do dd if=/dev/zero of=big bs=1M count=100 conv=fsync,notrunc; done";
        let call = server.tool(&writer, "bash", json!({ "command": command, "timeout_ms": 60_000 })).await;
        assert_eq!(call.error(502), "sandbox_lost");
        wait_for("it is stopped", &server, async || workspace(&server, &writer).await["status"] == "stopped")
            .await;
        let stopped = workspace(&server, &writer).await;
        let why = stopped["metadata"]["last_stop"]["reason"].as_str().unwrap();
        assert!(why.contains("the host's disk is full and the workspace went on writing"), "{why}");
        assert_eq!(server.bash(&neighbour, "cat mark; touch mark && echo ok").await, "mine\nok\n");
        assert_eq!(workspace(&server, &neighbour).await["status"], "ready");
        std::fs::remove_file(directory.join("filler")).unwrap();
        server.request("POST", &format!("/api/v1/agent/workspaces/{writer}/resume"), None).await.ok();
        assert_eq!(server.bash(&writer, "rm -f big; cat mark; echo ok > new && cat new").await, "mine\nok\n");
        server.destroy(&writer).await;
        server.destroy(&neighbour).await;
    }
    server.stop();
}

#[tokio::test]
async fn disks_whose_bytes_are_set_aside_can_be_filled_on_a_full_host() {
    let (server, _images) = on_small_disk(600, &[("WORKSPACE_DISK_OVERCOMMIT", "1")]).await;
    let directory = server.data_dir().to_owned();
    let (first, second) = (marked(&server, "gvisor").await, marked(&server, "docker").await);
    let asked = json!({ "provider": "docker", "resource_limits": { "disk": "400M" } });
    let refused = server.request("POST", "/api/v1/agent/workspaces", Some(asked)).await;
    assert_eq!(refused.error(507), "host_disk_full");
    fill(&directory, "filler", 1);
    let command = "for round in 1 2; do head -c 60000000 /dev/zero > big; sync big && wc -c < big; rm big; sync .; sleep 1; done";
    for id in [&first, &second] {
        let answer = server.tool(id, "bash", json!({ "command": command, "timeout_ms": 60_000 })).await.ok();
        assert_eq!(answer["stdout"], "60000000\n60000000\n", "{answer}");
    }
    std::fs::remove_file(directory.join("filler")).unwrap();
    for id in [first, second] {
        server.destroy(&id).await;
    }
    server.stop();
}

/// The file system says of itself that it has errors, as after a write that the host's disk had no room for.
#[tokio::test]
async fn a_disk_with_errors_is_mended_before_it_is_used() {
    let server = TestServer::start(BINARY).await;
    for provider in ["gvisor", "docker"] {
        let id = marked(&server, provider).await;
        let change = async |what: &str| {
            server.request("POST", &format!("/api/v1/agent/workspaces/{id}/{what}"), None).await.ok()
        };
        change("stop").await;
        let image = server.data_dir().join(format!("disks/{id}.img"));
        let file = std::fs::OpenOptions::new().write(true).open(image).unwrap();
        file.write_all_at(&[2, 0], 1024 + 0x3A).unwrap();
        let resumed = change("resume").await;
        let mended = resumed["metadata"]["disk_mended"]["result"].as_str().unwrap().to_owned();
        assert!(mended.contains("its disk had errors, which were mended"), "{mended}");
        assert_eq!(server.bash(&id, "cat mark; echo ok > new && cat new").await, "mine\nok\n");
        server.destroy(&id).await;
    }
    server.stop();
}
