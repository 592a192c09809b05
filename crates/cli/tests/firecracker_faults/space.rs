//! A host without enough memory or disk.

use emergent_test_support::command::run;
use emergent_test_support::microvm::{Microvms, TestManager};
use emergent_test_support::server::WORKSPACES;
use emergent_wire::{SnapshotId, WorkspaceId};
use serde_json::json;

use super::{BINARY, left, manager_dir};

#[tokio::test]
async fn microvm_without_host_memory_or_disk_is_refused_before_it_is_made() {
    let microvms = Microvms::find(BINARY);
    let server = microvms.start(BINARY, &[]).await;
    let mut request = microvms.small();
    request["resource_limits"]["memory"] = json!("900G");
    let refused = server.request("POST", WORKSPACES, Some(request)).await;
    let message = refused.message();
    assert!(message.contains("of memory left") || message.contains("resource_limits"), "{message}");
    let mut request = microvms.small();
    request["resource_limits"]["disk"] = json!("64M");
    let refused = server.request("POST", WORKSPACES, Some(request)).await;
    assert!(refused.message().contains("disk"), "{refused:?}");
    assert_eq!(left(&manager_dir(&server)), Vec::<String>::new());
    server.stop();
}

#[tokio::test]
async fn full_disk_is_reported_and_leaves_no_files() {
    let microvms = Microvms::find(BINARY);
    // The manager's directory is on a small disk. The janitor unmounts it.
    let mut manager = TestManager::start(&microvms, BINARY, &[]).await;
    manager.terminate();
    let directory = manager.directory().to_owned();
    run("mount", &["-t", "tmpfs", "-o", "size=900M", "small", directory.to_str().unwrap()]);
    manager.start_again(&[]).await;
    let request = manager.machine_request(&microvms).await;
    let path = format!("/v1/machines/{}", WorkspaceId::generate());
    let refused = manager.request("PUT", &path, Some(request)).await;
    assert!(refused.message().contains("the host's disk has no room"), "{refused:?}");
    assert_eq!(left(&directory), Vec::<String>::new());
    manager.request("GET", &path, None).await.error(404);
    // An image that is too large for the disk leaves no incomplete file.
    run(
        "dd",
        &[
            "if=/dev/zero",
            &format!("of={}", directory.join("filler").display()),
            "bs=1M",
            "count=600",
            "status=none",
        ],
    );
    let refused = manager.put_image("/v1/images/another", "emergent/workspace:latest").await;
    assert!(refused.message().contains("No space left"), "{refused:?}");
    assert_eq!(left(&directory), Vec::<String>::new());
    manager.stop();
}

#[tokio::test]
async fn microvms_can_be_stopped_and_removed_on_a_full_disk() {
    let microvms = Microvms::find(BINARY);
    let mut manager = TestManager::start(&microvms, BINARY, &[]).await;
    manager.terminate();
    // The manager's directory is on a disk without reserved blocks for root. The janitor unmounts it.
    let (directory, images) = (manager.directory().to_owned(), tempfile::tempdir().unwrap());
    let image = images.path().join("disk");
    std::fs::File::create(&image).unwrap().set_len(6 << 30).unwrap();
    run("mkfs.ext4", &["-q", "-m", "0", image.to_str().unwrap()]);
    run("mount", &["-o", "loop", image.to_str().unwrap(), directory.to_str().unwrap()]);
    manager.start_again(&[]).await;
    let request = manager.machine_request(&microvms).await;
    let path = |id: WorkspaceId| format!("/v1/machines/{id}");
    let (first, second) = (WorkspaceId::generate(), WorkspaceId::generate());
    for id in [first, second] {
        manager.request("PUT", &path(id), Some(request.clone())).await.ok();
    }
    let filler = directory.join("filler");
    // The log gets space, because the test reads it.
    let fill = "fallocate -n -l 1M test.log; fallocate -l $(($(stat -f -c %a .) * $(stat -f -c %S .))) filler; \
                for name in $(seq 5000); do echo > filler-$name || exit 0; done";
    run("sh", &["-c", &format!("cd {} && {fill}", directory.display())]);
    let full = std::fs::write(directory.join("more"), vec![1; 1 << 20]).unwrap_err();
    assert_eq!(full.kind(), std::io::ErrorKind::StorageFull);
    let stopped = manager.request("POST", &format!("{}/stop", path(first)), None).await.ok();
    assert_eq!(stopped["phase"], "stopped");
    let copy = format!("/v1/snapshots/{}", SnapshotId::generate());
    let refused = manager.request("PUT", &copy, Some(json!({ "machine": second }))).await;
    assert!(refused.message().contains("the host's disk has no room"), "{refused:?}");
    // The microVM continues after the failed snapshot.
    let machine = manager.request("GET", &path(second), None).await.ok();
    assert_eq!(machine["phase"], "running");
    // A manager can start on the full disk.
    manager.kill();
    manager.start_again(&[]).await;
    let machine = manager.request("GET", &path(second), None).await.ok();
    assert_eq!(machine["phase"], "running");
    // A running and a stopped microVM can be removed.
    manager.request("DELETE", &path(second), None).await.ok();
    manager.request("DELETE", &path(first), None).await.ok();
    assert_eq!(left(&directory), Vec::<String>::new());
    std::fs::remove_file(filler).unwrap();
    manager.request("PUT", &path(first), Some(request)).await.ok();
    manager.request("DELETE", &path(first), None).await.ok();
    manager.stop();
}
