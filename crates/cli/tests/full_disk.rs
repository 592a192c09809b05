//! A host with a full disk. Acknowledged writes are not lost, other workspaces are not harmed, workspaces and snapshots can be
//! removed, and all calls succeed again once there is free space.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

use emergent_test_support::command::run;
use emergent_test_support::server::{Answer, TestServer, WORKSPACES};
use emergent_test_support::wait::wait_until;
use serde_json::{Value, json};

const BINARY: &str = env!("CARGO_BIN_EXE_emergent");
const LIMIT: Duration = Duration::from_secs(60);

/// A server with its data directory on a small disk. The janitor unmounts the disk.
async fn on_small_disk(megabytes: u64, environment: &[(&str, &str)]) -> (TestServer, tempfile::TempDir) {
    let mut all = vec![("EMERGENT_ALLOW_DOCKER", "true"), ("WORKSPACE_MIN_FREE_DISK", "64M")];
    all.extend(environment);
    let mut server = TestServer::start_with(BINARY, &all).await;
    server.terminate();
    let images = tempfile::tempdir().unwrap();
    let image = images.path().join("disk");
    std::fs::File::create(&image).unwrap().set_len(megabytes << 20).unwrap();
    // `-m 0` reserves no blocks for root.
    run("mkfs.ext4", &["-q", "-m", "0", image.to_str().unwrap()]);
    run("mount", &["-o", "loop", image.to_str().unwrap(), server.data_dir().to_str().unwrap()]);
    server.start_again().await;
    (server, images)
}

fn free_megabytes(directory: &Path) -> u64 {
    let stat = rustix::fs::statvfs(directory).unwrap();
    (stat.f_bavail * stat.f_frsize) >> 20
}

/// Makes a file that leaves this number of megabytes free.
fn fill(directory: &Path, name: &str, left: u64) {
    let file = std::fs::File::create(directory.join(name)).unwrap();
    let bytes = free_megabytes(directory).saturating_sub(left) << 20;
    rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, bytes).unwrap();
}

/// Fills the disk, after it has reserved space for the server's log.
fn fill_completely(directory: &Path) {
    let log = std::fs::OpenOptions::new().write(true).open(directory.join("test.log")).unwrap();
    rustix::fs::fallocate(&log, rustix::fs::FallocateFlags::KEEP_SIZE, 0, 4 << 20).unwrap();
    let mut rest = std::fs::File::create(directory.join("rest")).unwrap();
    while std::io::Write::write_all(&mut rest, &[7; 4096]).is_ok() {}
}

async fn ready(server: &TestServer) -> (u16, Value) {
    let answer = server.client().get(format!("{}/health/ready", server.url)).send().await.unwrap();
    (answer.status().as_u16(), answer.json().await.unwrap())
}

async fn wait_for_log(server: &TestServer, text: &str) {
    wait_until(text, LIMIT, async || server.log().contains(text)).await;
}

async fn has_status(server: &TestServer, id: &str, status: &str) -> bool {
    server.workspace(id).await["status"] == status
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
async fn full_disk_refuses_writes_and_allows_removals() {
    let (mut server, _images) = on_small_disk(600, &[]).await;
    let directory = server.data_dir().to_owned();
    let (first, second) = (marked(&server, "gvisor").await, marked(&server, "docker").await);
    let copies = format!("{WORKSPACES}/{first}/snapshot");
    let copy = server.request("POST", &copies, Some(json!({}))).await.ok();
    // A disk that is larger than the host's disk is refused.
    let body = json!({ "provider": "docker", "resource_limits": { "disk": "100G" } });
    let refused = server.request("POST", WORKSPACES, Some(body)).await;
    assert_eq!(refused.error(507), "host_disk_full");
    assert_eq!(ready(&server).await, (200, json!({ "status": "ok" })));

    // A nearly full disk is reported.
    fill(&directory, "filler", 100);
    let (status, health) = ready(&server).await;
    assert_eq!((status, &health["warnings"][0]), (200, &json!("the host's disk is nearly full")));
    wait_for_log(&server, "disk is nearly full").await;

    fill(&directory, "more", 40);
    let (status, health) = ready(&server).await;
    assert_eq!((status, &health["status"]), (503, &json!("the host's disk is full")));
    assert_eq!(health["code"], "host_disk_full");
    wait_for_log(&server, "the host's disk is full: ").await;
    let large = "x".repeat(20 << 20);
    for request in
        [json!({ "file_path": "large", "content": large }), json!({ "file_path": "a", "content": "a" })]
    {
        assert_eq!(server.tool(&first, "write", request).await.error(507), "host_disk_full");
    }
    let edit = json!({ "file_path": "mark", "old_string": "mine", "new_string": "yours" });
    assert_eq!(server.tool(&second, "edit", edit).await.error(507), "host_disk_full");
    assert_eq!(server.request("POST", &copies, Some(json!({}))).await.error(507), "host_disk_full");
    let body = json!({ "provider": "docker", "resource_limits": { "disk": "16M" } });
    let refused = server.request("POST", WORKSPACES, Some(body)).await;
    assert_eq!(refused.error(507), "host_disk_full");
    let answer = server.tool(&second, "bash", json!({ "command": "cat mark" })).await.ok();
    assert_eq!(answer["stdout"], "mine\n");
    assert!(answer["notes"].to_string().contains("the host's disk is full"), "{answer}");

    // A server can start on a completely full disk.
    fill_completely(&directory);
    server.kill();
    server.start_again().await;
    assert_eq!(server.bash(&first, "cat mark").await, "mine\n");
    server.destroy(&second).await;
    let copy = format!("{WORKSPACES}/snapshots/{}", copy["id"].as_str().unwrap());
    server.request("DELETE", &copy, None).await.ok();

    // Once there is free space, all calls succeed again without a restart.
    for name in ["filler", "more", "rest"] {
        std::fs::remove_file(directory.join(name)).unwrap();
    }
    assert_eq!(ready(&server).await.0, 200);
    wait_for_log(&server, "the host's disk has room again").await;
    server.tool(&first, "write", json!({ "file_path": "large", "content": large })).await.ok();
    server.act(&first, "stop").await;
    server.act(&first, "resume").await;
    assert_eq!(server.bash(&first, "cat mark; wc -c < large").await, "mine\n20971520\n");
    server.destroy(&first).await;
    server.stop();
}

/// Calls create, write, snapshot, stop, resume and destroy with different amounts of free space. Each call succeeds or is refused
/// for lack of space, and leaves nothing that makes a later call fail.
#[tokio::test]
async fn each_call_succeeds_or_is_refused_at_every_level_of_free_space() {
    let (server, _images) = on_small_disk(600, &[("WORKSPACE_MIN_FREE_DISK", "32M")]).await;
    let directory = server.data_dir().to_owned();
    let id = marked(&server, "gvisor").await;
    let path = |what: &str| format!("{WORKSPACES}/{id}/{what}");
    // Whether the call succeeded.
    let succeeded = |step: &str, left: u64, answer: Answer| {
        let is_success = (200..300).contains(&answer.status);
        if !is_success {
            let code = answer.body["error"]["code"].as_str().unwrap_or_default();
            assert!(
                ["host_disk_full", "disk_full", "unavailable"].contains(&code),
                "{step} with {left} MiB: {answer:?}"
            );
        }
        is_success
    };
    for left in [0, 1, 5, 20, 32, 33, 36, 40, 60, 150] {
        fill(&directory, "filler", left);
        let request =
            json!({ "provider": "gvisor", "network": "isolated", "resource_limits": { "disk": "128M" } });
        let created = server.request("POST", WORKSPACES, Some(request)).await;
        let new = created.body["id"].as_str().map(str::to_owned);
        if succeeded("create", left, created) {
            let new = new.unwrap();
            server.request("DELETE", &format!("{WORKSPACES}/{new}"), None).await.ok();
        }
        let content = "x".repeat(6 << 20);
        let written = server.tool(&id, "write", json!({ "file_path": "large", "content": content })).await;
        let is_written = succeeded("write", left, written);
        let copied = server.request("POST", &path("snapshot"), Some(json!({}))).await;
        let copy = copied.body["id"].as_str().map(str::to_owned);
        if succeeded("snapshot", left, copied) {
            let copy = format!("{WORKSPACES}/snapshots/{}", copy.unwrap());
            server.request("DELETE", &copy, None).await.ok();
        }
        succeeded("stop", left, server.request("POST", &path("stop"), None).await);
        succeeded("resume", left, server.request("POST", &path("resume"), None).await);
        std::fs::remove_file(directory.join("filler")).unwrap();
        wait_until("the workspace is ready again", LIMIT, async || {
            let _ = server.request("POST", &path("resume"), None).await;
            has_status(&server, &id, "ready").await
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
async fn only_the_workspace_that_fills_the_disk_is_stopped() {
    let (server, _images) = on_small_disk(900, &[]).await;
    let directory = server.data_dir().to_owned();
    for provider in ["gvisor", "docker"] {
        let (neighbour, writer) = (marked(&server, provider).await, marked(&server, provider).await);
        fill(&directory, "filler", 50);
        let command = "while true; do dd if=/dev/zero of=big bs=1M count=100 conv=fsync,notrunc; done";
        let call = server.tool(&writer, "bash", json!({ "command": command, "timeout_ms": 60_000 })).await;
        assert_eq!(call.error(502), "sandbox_lost");
        wait_until("the writer is stopped", LIMIT, async || has_status(&server, &writer, "stopped").await)
            .await;
        let stopped = server.workspace(&writer).await;
        let why = stopped["metadata"]["last_stop"]["reason"].as_str().unwrap();
        assert!(why.contains("the host's disk is full and the workspace went on writing"), "{why}");
        assert_eq!(server.bash(&neighbour, "cat mark; touch mark && echo ok").await, "mine\nok\n");
        assert!(has_status(&server, &neighbour, "ready").await);
        std::fs::remove_file(directory.join("filler")).unwrap();
        server.act(&writer, "resume").await;
        assert_eq!(server.bash(&writer, "rm -f big; cat mark; echo ok > new && cat new").await, "mine\nok\n");
        server.destroy(&writer).await;
        server.destroy(&neighbour).await;
    }
    server.stop();
}

#[tokio::test]
async fn preallocated_disks_can_be_filled_on_a_full_host() {
    let (server, _images) = on_small_disk(600, &[("WORKSPACE_DISK_OVERCOMMIT", "1")]).await;
    let directory = server.data_dir().to_owned();
    let (first, second) = (marked(&server, "gvisor").await, marked(&server, "docker").await);
    let request = json!({ "provider": "docker", "resource_limits": { "disk": "400M" } });
    let refused = server.request("POST", WORKSPACES, Some(request)).await;
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

/// The test sets the error flag of the file system, which is also set after a write that failed for lack of space on the host.
#[tokio::test]
async fn disk_with_errors_is_repaired_before_it_is_mounted() {
    let server = TestServer::start(BINARY).await;
    for provider in ["gvisor", "docker"] {
        let id = marked(&server, provider).await;
        server.act(&id, "stop").await;
        let image = server.data_dir().join(format!("disks/{id}.img"));
        let file = std::fs::OpenOptions::new().write(true).open(image).unwrap();
        file.write_all_at(&[2, 0], 1024 + 0x3A).unwrap();
        let resumed = server.act(&id, "resume").await;
        let mended = resumed["metadata"]["disk_mended"]["result"].as_str().unwrap().to_owned();
        assert!(mended.contains("its disk had errors, which were mended"), "{mended}");
        assert_eq!(server.bash(&id, "cat mark; echo ok > new && cat new").await, "mine\nok\n");
        server.destroy(&id).await;
    }
    server.stop();
}
