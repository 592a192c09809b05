//! Faults of the host: a read-only database, a stepped clock.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::PathBuf;
use std::time::{Duration, Instant};

use emergent_test_support::command::run;
use emergent_test_support::server::{TestServer, WORKSPACES, workspace_path as path};
use emergent_test_support::wait::wait_until;
use serde_json::{Value, json};

const BINARY: &str = env!("CARGO_BIN_EXE_emergent");

/// Makes files immutable, also for root, until it is dropped.
struct Immutable(Vec<PathBuf>);

impl Immutable {
    fn new(files: Vec<PathBuf>) -> Self {
        files.iter().for_each(|file| drop(run("chattr", &["+i", file.to_str().unwrap()])));
        Self(files)
    }
}

impl Drop for Immutable {
    fn drop(&mut self) {
        self.0.iter().for_each(|file| drop(run("chattr", &["-i", file.to_str().unwrap()])));
    }
}

#[tokio::test]
async fn read_only_database_refuses_changes_and_loses_nothing() {
    let mut server = TestServer::start(BINARY).await;
    let id = server.create(json!({})).await;
    server.bash(&id, "echo kept > file").await;
    let before = server.request("GET", WORKSPACES, None).await.ok()["workspaces"].clone();
    let database = server.data_dir().join("emergent.db");
    let immutable = Immutable::new(vec![database.clone(), server.data_dir().join("emergent.db-wal")]);
    // Calls that need no write to the database succeed. The others fail with the reason, and change nothing.
    assert_eq!(server.bash(&id, "cat file").await, "kept\n");
    assert_eq!(server.workspace(&id).await["status"], "ready");
    let changes = [("POST", WORKSPACES.to_owned()), ("POST", path(&id) + "/stop"), ("DELETE", path(&id))];
    for (method, target) in &changes {
        let body = (*method == "POST").then(|| json!({}));
        let answer = server.request(method, target, body).await;
        let message = answer.message().to_owned();
        assert!(message.contains("the database can't be written"), "{method} {target}: {message}");
        assert_eq!(answer.error(503), "unavailable");
    }
    drop(immutable);
    // When the database can be written again, calls succeed without a restart.
    let after = server.request("GET", WORKSPACES, None).await.ok()["workspaces"].clone();
    assert_eq!(ids(&after), ids(&before));
    server.act(&id, "stop").await;
    // A server refuses to start on a database that it can't write.
    server.terminate();
    let immutable = Immutable::new(vec![database]);
    server.start_again_without_waiting(&[]);
    server.wait_for_end();
    assert!(server.log().contains("the database can't be used"), "{}", server.log());
    drop(immutable);
    server.start_again().await;
    server.act(&id, "resume").await;
    assert_eq!(server.bash(&id, "cat file").await, "kept\n");
    server.destroy(&id).await;
    server.stop();
}

fn ids(workspaces: &Value) -> Vec<Value> {
    workspaces.as_array().unwrap().iter().map(|workspace| workspace["id"].clone()).collect()
}

/// The library that replaces the clock, with the offset in a file.
fn clock_library() -> String {
    let found = std::fs::read_dir("/usr/lib").unwrap().flatten().find_map(|entry| {
        let path = entry.path().join("faketime/libfaketimeMT.so.1");
        path.exists().then_some(path)
    });
    found.expect("libfaketime is installed (scripts/setup test)").to_str().unwrap().to_owned()
}

#[tokio::test]
async fn stepped_clock_does_not_change_the_lifetime_of_workspaces() {
    let directory = tempfile::tempdir().unwrap();
    let clock = directory.path().join("clock");
    let set = |step: &str| std::fs::write(&clock, step).unwrap();
    set("+0");
    let library = clock_library();
    let settings = [
        ("LD_PRELOAD", library.as_str()),
        ("FAKETIME_TIMESTAMP_FILE", clock.to_str().unwrap()),
        ("FAKETIME_NO_CACHE", "1"),
        // Only the time of day is stepped.
        ("FAKETIME_DONT_FAKE_MONOTONIC", "1"),
        ("WORKSPACE_SWEEP_EVERY_SECONDS", "1"),
        ("WORKSPACE_IDLE_STOP_SECONDS", "10"),
    ];
    let server = TestServer::start_with(BINARY, &settings).await;
    let id = server.create(json!({ "ttl_seconds": 60 })).await;
    for step in ["+400d", "-400d"] {
        set(step);
        // The measurement's timestamp shows that the server has the stepped clock.
        let seen = server.workspace(&id).await;
        let measured = seen["usage"]["measured_at"].as_str().unwrap()[..4].to_owned();
        let created = seen["created_at"].as_str().unwrap()[..4].to_owned();
        assert_ne!(measured, created, "{step}: {seen}");
        // An unused workspace is stopped after its idle time, which shows that sweeps run. A used one is not.
        let unused = server.create(json!({})).await;
        let created = Instant::now();
        wait_until("the unused workspace is stopped", Duration::from_secs(60), async || {
            assert_eq!(server.bash(&id, "echo alive").await, "alive\n", "{step}");
            server.workspace(&unused).await["status"] == "stopped"
        })
        .await;
        assert!(created.elapsed().as_secs() >= 8, "{step}: {unused} was stopped too early");
        server.destroy(&unused).await;
    }
    // The unused workspace expires after its minute, though the clock went back by more than a year.
    wait_until("the workspace expires", Duration::from_secs(120), async || {
        server.request("GET", WORKSPACES, None).await.ok()["workspaces"] == json!([])
    })
    .await;
    server.stop();
}
