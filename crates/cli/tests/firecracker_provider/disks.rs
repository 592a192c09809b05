//! Block devices of microVMs.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use emergent_test_support::command::run;
use emergent_test_support::microvm::Microvms;
use emergent_test_support::server::WORKSPACES;
use serde_json::{Value, json};

use super::{BINARY, disk, end, machine, start};

/// The description of the file system on a disk.
fn file_system(disk: &Path) -> String {
    run("dumpe2fs", &["-h", disk.to_str().unwrap()])
}

#[tokio::test]
async fn create_block_device_for_new_workspace() {
    let (microvms, server) = start(&[]).await;
    let mut request = microvms.small();
    request["resource_limits"]["disk"] = json!("5G");
    let id = server.create(request).await;
    let file = std::fs::metadata(disk(&server, &id)).unwrap();
    assert_eq!(file.len(), 5 << 30);
    // The disk is sparse: it takes the space of the image, and little more.
    assert!(file.blocks() * 512 < 1 << 30, "{} MiB", (file.blocks() * 512) >> 20);
    assert_eq!(server.bash(&id, "awk '$2 == \"/\" { print $1, $3 }' /proc/mounts").await, "/dev/vda ext4\n");
    // The size of the disk is a limit.
    let full = server.tool(&id, "bash", json!({ "command": "fallocate -l 6G /workspace/big" })).await.ok();
    assert!(full["stderr"].as_str().unwrap().contains("No space left"), "{full}");
    server.act(&id, "stop").await;
    let described = file_system(&disk(&server, &id));
    assert!(described.contains("Filesystem state:         clean"), "{described}");
    run("e2fsck", &["-f", "-n", disk(&server, &id).to_str().unwrap()]);
    server.destroy(&id).await;
    end(&microvms, server);
}

#[tokio::test]
async fn copy_on_write_for_warm_pool() {
    let small = Microvms::find(BINARY).small()["resource_limits"].clone();
    let limit = |name: &str| small[name].as_str().unwrap().to_owned();
    let (cpu, memory, disk_size) = (limit("cpu"), limit("memory"), limit("disk"));
    // The manager sets the number of spares, and the server keeps them.
    let (microvms, server) = start(&[
        ("FIRECRACKER_WARM_POOL_SIZE", "1"),
        ("WORKSPACE_DEFAULT_CPU", &cpu),
        ("WORKSPACE_DEFAULT_MEMORY", &memory),
        ("WORKSPACE_DEFAULT_DISK", &disk_size),
    ])
    .await;
    server.wait_for_pool(1).await;
    let request = json!({ "environment": { "NAME": "claimed" } });
    let created = server.request("POST", WORKSPACES, Some(request)).await.ok();
    assert_eq!(created["placement"]["warm_hit"], true, "{created}");
    let id = created["id"].as_str().unwrap();
    assert_eq!(server.bash(id, "echo $NAME").await, "claimed\n");
    // The disk is a clone of the image, and takes much less space than its size.
    let file = std::fs::metadata(disk(&server, id)).unwrap();
    assert_eq!(file.len(), 1 << 30);
    assert!(file.blocks() * 512 < 512 << 20, "{} MiB", (file.blocks() * 512) >> 20);
    server.turn_pool_off().await;
    server.destroy(id).await;
    end(&microvms, server);
}

#[tokio::test]
async fn block_device_persists_across_stop_resume() {
    let (microvms, server) = start(&[]).await;
    let id = server.create(microvms.small()).await;
    server
        .bash(&id, "echo kept > /workspace/file; echo also > /srv/other; ln -s file link; chmod 640 file")
        .await;
    let boot = server.bash(&id, "cat /proc/sys/kernel/random/boot_id").await;
    for _ in 0..2 {
        server.act(&id, "stop").await;
        assert_eq!(machine(&server, &id).await["pid"], Value::Null);
        server.act(&id, "resume").await;
        assert_eq!(server.bash(&id, "cat link /srv/other; stat -c %a file").await, "kept\nalso\n640\n");
        assert_ne!(server.bash(&id, "cat /proc/sys/kernel/random/boot_id").await, boot);
    }
    server.destroy(&id).await;
    end(&microvms, server);
}
