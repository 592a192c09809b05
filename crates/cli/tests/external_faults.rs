//! Faults outside the server: a lost or older database, silent connections, a revoked token with open streams, a client that
//! disconnects.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::Duration;

use emergent_test_support::command::run;
use emergent_test_support::server::{TestServer, WORKSPACES};
use emergent_test_support::wait::wait_until;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::json;
use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;

const BINARY: &str = env!("CARGO_BIN_EXE_emergent");

fn disks(server: &TestServer) -> Vec<String> {
    let entries = std::fs::read_dir(server.data_dir().join("disks")).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries.map(|entry| entry.file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[tokio::test]
async fn server_refuses_to_start_beside_disks_of_a_lost_database() {
    let mut server = TestServer::start(BINARY).await;
    let id = server.create(json!({ "provider": "docker", "network": "isolated" })).await;
    server.tool(&id, "write", json!({ "file_path": "precious", "content": "kept\n" })).await.ok();
    server.terminate();
    let before = disks(&server);
    let aside = server.data_dir().join("away");
    std::fs::create_dir(&aside).unwrap();
    let database: Vec<String> =
        ["emergent.db", "emergent.db-wal", "emergent.db-shm"].map(str::to_owned).to_vec();
    for name in &database {
        let _ = std::fs::rename(server.data_dir().join(name), aside.join(name));
    }
    let stderr = server.refusal(&[]);
    for part in ["holds 2 files of workspaces", "Nothing was changed", "--adopt", "--discard-existing"] {
        assert!(stderr.contains(part), "{stderr}");
    }
    // The second start finds the empty database of the first one.
    assert!(server.refusal(&[]).contains("Nothing was changed"));
    assert_eq!(disks(&server), before);
    // With the right database the server starts.
    for name in &database {
        let _ = std::fs::remove_file(server.data_dir().join(name));
        let _ = std::fs::rename(aside.join(name), server.data_dir().join(name));
    }
    server.start_again().await;
    assert_eq!(server.bash(&id, "cat precious").await, "kept\n");
    server.destroy(&id).await;
    server.stop();
}

/// An older version stored the credential in the URL of a clone, and git kept it in the clone.
#[tokio::test]
async fn upgrade_removes_credentials_from_clones_of_older_versions() {
    let mut server = TestServer::start(BINARY).await;
    for provider in ["gvisor", "docker"] {
        let id = server.create(json!({ "provider": provider, "network": "isolated" })).await;
        let clone = "git init -q && git remote add origin https://user:hunter2@host.example/r.git && git config --local -l";
        assert!(server.bash(&id, clone).await.contains("hunter2"));
        server.terminate();
        let row = "SET repository_url = 'https://user:hunter2@host.example/r.git'";
        assert_eq!(server.sql(&format!("UPDATE agent_workspaces {row} WHERE id = '{id}'")).await, 1);
        assert_eq!(server.sql("DELETE FROM schema_migrations WHERE version = 5").await, 1);
        server.start_again().await;
        let config = server.bash(&id, "grep -r hunter2 . || git remote get-url origin").await;
        assert_eq!(config, "https://host.example/r.git\n");
        let workspace = server.workspace(&id).await;
        assert_eq!(workspace["metadata"]["credential_in_clone"], serde_json::Value::Null, "{workspace}");
        // A credential that a user adds later is kept.
        let by_hand = "git remote set-url origin https://user:hunter2@host.example/r.git";
        server.bash(&id, by_hand).await;
        server.kill();
        server.start_again().await;
        assert!(server.bash(&id, "git remote get-url origin").await.contains("hunter2"));
        server.destroy(&id).await;
    }
    server.stop();
}

const QUARANTINE: &str = "/api/v1/agent/workspaces/quarantine";

/// Waits until this number of disks is in quarantine.
async fn wait_for_quarantine(server: &TestServer, count: usize) -> Vec<serde_json::Value> {
    let mut found = Vec::new();
    wait_until("the disks are in quarantine", Duration::from_secs(100), async || {
        let listed = server.request("GET", QUARANTINE, None).await.ok();
        found = listed["snapshots"].as_array().unwrap().clone();
        found.len() == count && found.iter().all(|each| each["size_bytes"].is_u64())
    })
    .await;
    found
}

/// Restores a disk in quarantine, makes a workspace of it, and returns the workspace's id.
async fn restore(server: &TestServer, id: &str) -> String {
    let restored = server.request("POST", &format!("{QUARANTINE}/{id}/restore"), None).await.ok();
    assert_eq!(restored["status"], "ready", "{restored}");
    server.request("POST", &format!("{QUARANTINE}/{id}/restore"), None).await.error(409);
    let request = json!({ "snapshot_id": id });
    let made = server.request("POST", "/api/v1/agent/workspaces/from-snapshot", Some(request)).await.ok();
    let deleted = server.request("DELETE", &format!("{WORKSPACES}/snapshots/{id}"), None).await;
    deleted.ok();
    made["id"].as_str().unwrap().to_owned()
}

#[tokio::test]
async fn disks_missing_in_a_restored_database_are_quarantined_and_restorable() {
    let mut server = TestServer::start(BINARY).await;
    let request = || json!({ "provider": "docker", "network": "isolated" });
    let old = server.create(request()).await;
    server.terminate();
    let (database, backup) = (server.data_dir().join("emergent.db"), server.data_dir().join("backup"));
    std::fs::copy(&database, &backup).unwrap();
    server.start_again().await;
    let new = server.create(request()).await;
    server.tool(&new, "write", json!({ "file_path": "precious", "content": "kept\n" })).await.ok();
    let snapshot = format!("{WORKSPACES}/{new}/snapshot");
    let copy =
        server.request("POST", &snapshot, Some(json!({}))).await.ok()["id"].as_str().unwrap().to_owned();
    server.terminate();
    std::fs::copy(&backup, &database).unwrap();
    // Within the grace period nothing is changed.
    server.start_again().await;
    let running = || run("docker", &["ps", "--format", "{{.Names}}"]);
    assert!(running().contains(&new), "{}", running());
    assert!(wait_for_quarantine(&server, 0).await.is_empty());
    server.request("GET", &format!("{WORKSPACES}/{new}"), None).await.error(404);
    server.terminate();
    // A server that is killed at a step is followed by one that continues.
    for step in [
        "quarantine.row_written",
        "quarantine.container_removed",
        "quarantine.disk_moved",
        "quarantine.sandbox_ended",
    ] {
        server.start_again_without_waiting(&[
            ("WORKSPACE_ORPHAN_GRACE_SECONDS", "0"),
            ("EMERGENT_FAILPOINT", step),
        ]);
        server.wait_until_killed();
    }
    server.start_again_with(&[("WORKSPACE_ORPHAN_GRACE_SECONDS", "0")]).await;
    let found = wait_for_quarantine(&server, 2).await;
    let ids: Vec<&str> = found.iter().map(|each| each["id"].as_str().unwrap()).collect();
    assert!(ids.contains(&new.as_str()) && ids.contains(&copy.as_str()), "{found:?}");
    assert!(!running().contains(&new));
    let listed = server.request("GET", "/api/v1/agent/workspaces/snapshots", None).await.ok();
    assert_eq!(listed["snapshots"], json!([]), "disks in quarantine are not in the list of snapshots");
    let body = json!({ "snapshot_id": new });
    let refused = server.request("POST", "/api/v1/agent/workspaces/from-snapshot", Some(body)).await;
    refused.error(409);
    server.request("DELETE", &format!("{QUARANTINE}/{copy}"), None).await.ok();
    let restored = restore(&server, &new).await;
    assert_eq!(server.bash(&restored, "cat precious").await, "kept\n");
    for id in [&old, &restored] {
        server.destroy(id).await;
    }
    wait_for_quarantine(&server, 0).await;
    server.stop();
}

#[tokio::test]
async fn adopt_flag_quarantines_the_disks_of_a_lost_database() {
    let mut server = TestServer::start(BINARY).await;
    let id = server.create(json!({ "provider": "gvisor", "network": "isolated" })).await;
    server.tool(&id, "write", json!({ "file_path": "precious", "content": "kept\n" })).await.ok();
    let installation = server.installation();
    server.terminate();
    for name in ["emergent.db", "emergent.db-wal", "emergent.db-shm"] {
        let _ = std::fs::remove_file(server.data_dir().join(name));
    }
    server.start_again_with_flags(&["--adopt"]).await;
    assert_eq!(server.installation(), installation);
    let found = wait_for_quarantine(&server, 1).await;
    assert_eq!(found[0]["id"], json!(id));
    let restored = restore(&server, &id).await;
    assert_eq!(server.bash(&restored, "cat precious").await, "kept\n");
    server.destroy(&restored).await;
    server.stop();
}

#[tokio::test]
async fn silent_connections_do_not_block_new_clients() {
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }).unwrap();
    let server = TestServer::start(BINARY).await;
    let address = server.url.trim_start_matches("http://").to_owned();
    let mut silent = Vec::new();
    for number in 0..2300 {
        let stream = TcpStream::connect(&address).await.unwrap();
        // Half of them have sent the first byte of a request.
        if number % 2 == 0 {
            stream.writable().await.unwrap();
            let _ = stream.try_write(b"P");
        }
        silent.push(stream);
    }
    // A client with a new connection, and one with an open connection.
    let new = reqwest::Client::new();
    let request = new.get(format!("{}/health/live", server.url)).timeout(Duration::from_secs(10)).send();
    assert_eq!(request.await.unwrap().status(), 200);
    server.request("GET", WORKSPACES, None).await.ok();
    // Silent connections are closed.
    let last = silent.last_mut().unwrap();
    let ended = tokio::time::timeout(Duration::from_secs(60), last.read(&mut [0; 64])).await;
    assert!(matches!(ended, Ok(Ok(0) | Err(_))), "{ended:?}");
    drop(silent);
    server.stop();
}

#[tokio::test]
async fn streams_end_when_their_token_is_revoked() {
    let server = TestServer::start(BINARY).await;
    let id = server.create(json!({ "provider": "docker", "network": "isolated" })).await;
    let made = server.request("POST", "/api/v1/tokens", Some(json!({ "name": "streams" }))).await.ok();
    let (token, secret) = (made["id"].as_str().unwrap(), made["secret"].as_str().unwrap());
    let get = |path: String| server.client().get(format!("{}{path}", server.url)).bearer_auth(secret);
    let bash = |body: serde_json::Value| {
        let url = format!("{}{WORKSPACES}/{id}/bash", server.url);
        server.client().post(url).bearer_auth(secret).json(&body)
    };
    let events = get("/api/v1/events".to_owned()).send().await.unwrap();
    let command = json!({ "command": "echo begun; sleep 300" });
    let stream = bash(command.clone()).header("accept", "text/event-stream").send().await.unwrap();
    assert_eq!((events.status(), stream.status()), (200.try_into().unwrap(), 200.try_into().unwrap()));
    let waiting = tokio::spawn(bash(command).send());
    let running = || async { server.bash(&id, "grep -c -a -l '^sleep' /proc/[0-9]*/cmdline | wc -l").await };
    let limit = Duration::from_secs(60);
    wait_until("both commands run", limit, async || running().await.trim() == "2").await;
    server.request("DELETE", &format!("/api/v1/tokens/{token}"), None).await.ok();
    let all = async {
        let answer = waiting.await.unwrap().unwrap();
        assert_eq!(answer.status(), 401);
        // Both are cut off, so that a client does not take them for complete.
        assert!(events.bytes().await.is_err());
        assert!(stream.bytes().await.is_err());
    };
    tokio::time::timeout(Duration::from_secs(10), all).await.expect("the streams end");
    wait_until("both commands have ended", limit, async || running().await.trim() == "0").await;
    server.destroy(&id).await;
    server.stop();
}

/// Both container providers make the network of the installation at the same time.
#[tokio::test]
async fn concurrent_first_creates_share_one_network() {
    let server = TestServer::start(BINARY).await;
    let create = |provider: &str| {
        let request = json!({ "provider": provider, "network": "nat" });
        server.request("POST", WORKSPACES, Some(request))
    };
    let made = futures_util::future::join_all(["gvisor", "docker", "gvisor", "docker"].map(create)).await;
    let ids: Vec<String> = made.into_iter().map(|one| one.ok()["id"].as_str().unwrap().to_owned()).collect();
    let label = format!("label=emergent.installation={}", server.installation());
    assert_eq!(run("docker", &["network", "ls", "-q", "--filter", &label]).lines().count(), 1);
    for id in ids {
        server.destroy(&id).await;
    }
    server.stop();
}

/// Waits until this number of workspaces exists, and all are ready.
async fn wait_for_workspaces(server: &TestServer, count: usize) -> Vec<serde_json::Value> {
    let mut all = Vec::new();
    wait_until("this number of workspaces is ready", Duration::from_secs(90), async || {
        let listed = server.request("GET", WORKSPACES, None).await.ok();
        all = listed["workspaces"].as_array().unwrap().clone();
        all.len() == count && all.iter().all(|one| one["status"] == "ready")
    })
    .await;
    all
}

#[tokio::test]
async fn create_of_a_disconnected_client_is_undone_unless_it_has_an_idempotency_key() {
    let server = TestServer::start(BINARY).await;
    let url = format!("{}{WORKSPACES}", server.url);
    let create = |key: Option<&str>| {
        let body = json!({ "provider": "gvisor", "network": "isolated" });
        let request = server.client().post(&url).bearer_auth(&server.token).json(&body);
        key.into_iter().fold(request, |request, key| request.header("idempotency-key", key))
    };
    // The client disconnects before the create ends.
    let limit = Duration::from_millis(100);
    assert!(create(None).timeout(limit).send().await.unwrap_err().is_timeout());
    wait_for_workspaces(&server, 0).await;
    assert!(create(Some("again")).timeout(limit).send().await.unwrap_err().is_timeout());
    let made = wait_for_workspaces(&server, 1).await;
    let found = create(Some("again")).send().await.unwrap();
    assert_eq!(found.status(), 201);
    let found: serde_json::Value = found.json().await.unwrap();
    assert_eq!(found["id"], made[0]["id"]);
    let other = server.client().post(&url).bearer_auth(&server.token).header("idempotency-key", "again");
    let other = other.json(&json!({ "provider": "docker" })).send().await.unwrap();
    assert_eq!(other.status(), 409, "the same key for another request");
    wait_for_workspaces(&server, 1).await;
    server.destroy(found["id"].as_str().unwrap()).await;
    server.stop();
}
