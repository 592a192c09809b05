//! Snapshots of microVMs, with and without memory.

use std::collections::HashSet;

use emergent_test_support::server::WORKSPACES;
use serde_json::{Value, json};

use super::{end, machine, start};

#[tokio::test]
async fn snapshot_has_the_files_and_its_workspace_continues() {
    let (microvms, server) = start(&[]).await;
    let id = server.create(microvms.small()).await;
    server
        .start_in_background(&id, "i=0; while true; do i=$((i + 1)); echo $i > count; sleep 0.2; done")
        .await;
    server.bash(&id, "until [ -s count ]; do sleep 0.1; done; echo kept > file").await;
    let snapshot = format!("{WORKSPACES}/{id}/snapshot");
    let mut copies = Vec::new();
    for _ in 0..3 {
        copies.push(server.request("POST", &snapshot, Some(json!({}))).await.ok());
        // The process in the background continues.
        let continues = "a=$(cat count); until [ $(cat count) -gt $a ]; do sleep 0.1; done; echo on";
        assert_eq!(server.bash(&id, continues).await, "on\n");
    }
    let body = json!({ "snapshot_id": copies[0]["id"] });
    let made = server.request("POST", &format!("{WORKSPACES}/from-snapshot"), Some(body)).await.ok();
    let made = made["id"].as_str().unwrap();
    assert_eq!(server.bash(made, "cat file; pgrep -c sleep || true").await, "kept\n0\n");
    for copy in &copies {
        let path = format!("{WORKSPACES}/snapshots/{}", copy["id"].as_str().unwrap());
        server.request("DELETE", &path, None).await.ok();
    }
    server.destroy(made).await;
    server.destroy(&id).await;
    end(&microvms, server);
}

#[tokio::test]
async fn restored_memory_snapshots_continue_and_share_no_identity() {
    let (microvms, server) = start(&[]).await;
    let id = server.create(microvms.small()).await;
    // A process that runs, and a file.
    server
        .start_in_background(
            &id,
            "echo $$ > pid; i=0; while true; do i=$((i + 1)); echo $i > count; sleep 0.5; done",
        )
        .await;
    server.bash(&id, "until [ -s count ]; do sleep 0.1; done; echo kept > file").await;
    let request = json!({ "memory": true });
    let snapshot = server.request("POST", &format!("{WORKSPACES}/{id}/snapshot"), Some(request)).await.ok();
    assert_eq!(snapshot["memory"], true, "{snapshot}");
    // A snapshot breaks the connections of the microVM. The next call opens a new one.
    assert_eq!(server.bash(&id, "echo at once").await, "at once\n");
    let from = |more: Value| {
        let mut body = json!({ "snapshot_id": snapshot["id"] });
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    let restore = format!("{WORKSPACES}/from-snapshot");
    // The memory of a restored microVM has the size of the snapshot.
    let other = from(json!({ "resource_limits": { "memory": "300M" } }));
    assert_eq!(server.request("POST", &restore, Some(other)).await.error(422), "unacceptable");
    let mut ids = vec![id];
    for name in ["one", "two"] {
        let body = from(json!({ "environment": { "NAME": name } }));
        let made = server.request("POST", &restore, Some(body)).await;
        ids.push(made.ok()["id"].as_str().unwrap().to_owned());
    }
    let identity = "hostname; cat /etc/machine-id /sys/class/net/eth0/address; hostname -I; cat /proc/net/route; \
                    head -c 16 /dev/urandom | od -An -tx1; cat /proc/sys/kernel/random/uuid";
    let mut seen: [HashSet<String>; 6] = Default::default();
    for (number, id) in ids.iter().enumerate() {
        // The process continues.
        let count = "kill -0 $(cat pid) && a=$(cat count); until [ $(cat count) -gt $a ]; do sleep 0.1; done; echo on";
        assert_eq!(server.bash(id, count).await, "on\n", "{number}");
        assert_eq!(server.bash(id, "cat file").await, "kept\n");
        let text = server.bash(id, identity).await;
        let lines: Vec<&str> = text.lines().collect();
        let machine = machine(&server, id).await;
        assert_eq!(lines[3].trim(), machine["address"].as_str().unwrap(), "{text}");
        // The network of the microVM has one route and one local network.
        assert_eq!(lines.iter().filter(|line| line.starts_with("eth0")).count(), 2, "{text}");
        let parts = [lines[0], lines[1], lines[2], lines[3], lines[lines.len() - 2], lines[lines.len() - 1]];
        for (set, part) in seen.iter_mut().zip(parts) {
            assert!(set.insert(part.to_owned()), "{part} twice: {text}");
        }
        // The clock is set to the host's time.
        let time: i64 = server.bash(id, "date +%s").await.trim().parse().unwrap();
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs();
        assert!(now.abs_diff(time.unsigned_abs()) < 60, "{time} {now}");
    }
    assert_eq!(server.bash(&ids[1], "echo $NAME").await, "one\n");
    assert_eq!(server.bash(&ids[2], "echo $NAME").await, "two\n");
    // Their disks are independent, and they can be resumed without the snapshot.
    server.bash(&ids[1], "echo changed > file; sync").await;
    assert_eq!(server.bash(&ids[2], "cat file").await, "kept\n");
    let path = format!("{WORKSPACES}/snapshots/{}", snapshot["id"].as_str().unwrap());
    server.request("DELETE", &path, None).await.ok();
    server.act(&ids[1], "stop").await;
    server.act(&ids[1], "resume").await;
    assert_eq!(server.bash(&ids[1], "cat file").await, "changed\n");
    for id in &ids {
        server.destroy(id).await;
    }
    end(&microvms, server);
}
