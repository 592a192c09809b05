//! Faults of the guest: a kernel that does not boot, an agent that does not start, a damaged root disk, a microVM that dies, floods of
//! output.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use emergent_test_support::command::run;
use emergent_test_support::microvm::{Microvms, ask_manager};
use serde_json::json;

use super::{BINARY, assert_fails_and_falls_back, manager_dir};

#[tokio::test]
async fn invalid_kernel_is_reported_and_gvisor_is_used() {
    let microvms = Microvms::find(BINARY);
    let server = microvms.start(BINARY, &[("FIRECRACKER_KERNEL", "/etc/passwd")]).await;
    assert_fails_and_falls_back(&microvms, &server, &["kernel", "Firecracker refused"]).await;
    server.stop();
}

#[tokio::test]
async fn boot_over_its_time_limit_is_reported_and_gvisor_is_used() {
    let microvms = Microvms::find(BINARY);
    let server = microvms.start(BINARY, &[("FIRECRACKER_BOOT_TIMEOUT_SECONDS", "1")]).await;
    assert_fails_and_falls_back(&microvms, &server, &["the start of the guest agent did not end within 1 s"])
        .await;
    server.stop();
}

#[tokio::test]
async fn damaged_root_disk_is_reported_and_gvisor_is_used() {
    let microvms = Microvms::find(BINARY);
    let server = microvms.start(BINARY, &[]).await;
    let id = server.create(microvms.small()).await;
    server.destroy(&id).await;
    // Each image is replaced by a damaged copy, because other tests share the original.
    let images: Vec<PathBuf> = std::fs::read_dir(manager_dir(&server).join("images"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "ext4"))
        .collect();
    let damage = |keep: usize| {
        for image in &images {
            let mut bytes = std::fs::read(image).unwrap();
            bytes[keep..].fill(0);
            std::fs::remove_file(image).unwrap();
            std::fs::write(image, bytes).unwrap();
        }
    };
    damage(4096);
    assert_fails_and_falls_back(
        &microvms,
        &server,
        &["ended before its agent was ready", "the root disk can't be mounted"],
    )
    .await;
    // An image without a file system is made again.
    damage(0);
    let id = server.create(microvms.small()).await;
    server.destroy(&id).await;
    server.stop();
}

#[tokio::test]
async fn dead_microvm_is_restarted_with_its_disk() {
    let microvms = Microvms::find(BINARY);
    let server = microvms.start(BINARY, &[]).await;
    let id = server.create(microvms.small()).await;
    server.bash(&id, "echo kept > file; sync").await;
    let path = format!("/v1/machines/{id}");
    // First its kernel panics, then its process is killed on the host.
    for (how, expected) in [("panic", "Kernel panic"), ("kill", "its process has ended")] {
        let before = ask_manager(&manager_dir(&server), "GET", &path, None).await.ok();
        if how == "panic" {
            // A panic that every kernel can have: it reserves all memory for itself, and panics when it is out of memory.
            let command = "cd /proc/sys/vm; echo 2 > panic_on_oom; \
                           awk '/MemTotal/ { print $2 }' /proc/meminfo > min_free_kbytes; tail /dev/zero";
            // The call may fail, because the microVM may die before it answers.
            server.tool(&id, "bash", json!({ "command": command, "background": true })).await;
        } else {
            run("kill", &["-KILL", &before["pid"].to_string()]);
        }
        let begun = Instant::now();
        loop {
            let now = ask_manager(&manager_dir(&server), "GET", &path, None).await.ok();
            if now["phase"] == "stopped" {
                assert!(now["ended"].as_str().unwrap().contains(expected), "{now}");
                break;
            }
            assert!(begun.elapsed() < microvms.scaled_limit(Duration::from_secs(3)), "{how}: {now}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        assert_eq!(server.bash(&id, "cat file").await, "kept\n", "{how}");
        let after = ask_manager(&manager_dir(&server), "GET", &path, None).await.ok();
        assert_ne!(after["pid"], before["pid"], "{how}");
    }
    server.destroy(&id).await;
    microvms.keep_images(&manager_dir(&server));
    server.stop();
}

#[tokio::test]
async fn console_output_and_vsock_connections_of_a_guest_use_no_host_resources() {
    let microvms = Microvms::find(BINARY);
    let server = microvms.start(BINARY, &[]).await;
    let id = server.create(microvms.small()).await;
    server.start_in_background(&id, "cat /dev/zero | tr '\\0' x > /dev/console").await;
    // Connections to ports on the host that may have a listener, and to the agent's port.
    let connect = "perl -e 'for $port (22, 52, 1024, 1025, 1026) { socket(my $s, 40, 1, 0) or die; \
                   connect($s, pack(\"SSLLx4\", 40, 0, $port, 2)) and print \"$port \" } print \"done\"'";
    assert_eq!(server.bash(&id, connect).await, "done");
    assert_eq!(server.bash(&id, "echo still here").await, "still here\n");
    let directory = manager_dir(&server);
    // The manager keeps the record of the microVM and its disk, but not its console output.
    let files = std::fs::read_dir(directory.join("machines").join(&id)).unwrap().flatten();
    let files = files.filter(|entry| entry.file_name() != "disk.ext4");
    let taken: u64 = files.map(|entry| entry.metadata().unwrap().len()).sum();
    assert!(taken < 64 << 10, "the console output is kept: {taken} bytes");
    let health = ask_manager(&directory, "GET", "/v1/health", None).await.ok();
    assert_eq!(health["healthy"], true, "{health}");
    server.destroy(&id).await;
    microvms.keep_images(&directory);
    server.stop();
}
