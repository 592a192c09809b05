//! Faults of the host: a database that can't be written for a while, a clock that jumps.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::PathBuf;

use emergent_test_support::server::{TestServer, run};
use serde_json::{Value, json};

const BINARY: &str = env!("CARGO_BIN_EXE_emergent");
const WORKSPACES: &str = "/api/v1/agent/workspaces";

fn path(id: &str) -> String {
    format!("{WORKSPACES}/{id}")
}

/// Makes files unchangeable, also for root, until it is dropped.
struct Frozen(Vec<PathBuf>);

impl Frozen {
    fn new(files: Vec<PathBuf>) -> Self {
        files.iter().for_each(|file| drop(run("chattr", &["+i", file.to_str().unwrap()])));
        Self(files)
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        self.0.iter().for_each(|file| drop(run("chattr", &["-i", file.to_str().unwrap()])));
    }
}

#[tokio::test]
async fn a_database_that_is_read_only_for_a_while_is_told_and_loses_nothing() {
    let mut server = TestServer::start(BINARY).await;
    let id = server.create(json!({})).await;
    server.bash(&id, "echo kept > file").await;
    let before = server.request("GET", WORKSPACES, None).await.ok()["workspaces"].clone();
    let database = server.data_dir().join("emergent.db");
    let frozen = Frozen::new(vec![database.clone(), server.data_dir().join("emergent.db-wal")]);
    // What needs no change of the database works; what does says why not, and changes nothing.
    assert_eq!(server.bash(&id, "cat file").await, "kept\n");
    assert_eq!(server.request("GET", &path(&id), None).await.ok()["status"], "ready");
    let changes = [("POST", WORKSPACES.to_owned()), ("POST", path(&id) + "/stop"), ("DELETE", path(&id))];
    for (method, target) in &changes {
        let body = (*method == "POST").then(|| json!({}));
        let answer = server.request(method, target, body).await;
        let message = answer.body["error"]["message"].as_str().unwrap().to_owned();
        assert!(message.contains("the database can't be written"), "{method} {target}: {message}");
        assert_eq!(answer.error(503), "unavailable");
    }
    drop(frozen);
    // It is writable again: nobody has to restart anything.
    let after = server.request("GET", WORKSPACES, None).await.ok()["workspaces"].clone();
    assert_eq!(ids(&after), ids(&before));
    server.request("POST", &(path(&id) + "/stop"), Some(json!({}))).await.ok();
    // A server does not start on a database that it can't write, and leaves everything as it is.
    server.terminate();
    let frozen = Frozen::new(vec![database]);
    server.start_again_unattended(&[]);
    server.wait_for_end();
    assert!(server.log().contains("the database can't be used"), "{}", server.log());
    drop(frozen);
    server.start_again().await;
    server.request("POST", &(path(&id) + "/resume"), Some(json!({}))).await.ok();
    assert_eq!(server.bash(&id, "cat file").await, "kept\n");
    server.destroy(&id).await;
    server.stop();
}

fn ids(workspaces: &Value) -> Vec<Value> {
    workspaces.as_array().unwrap().iter().map(|workspace| workspace["id"].clone()).collect()
}

/// A library that answers for the clock, with what a file says.
fn clock_library() -> String {
    let found = std::fs::read_dir("/usr/lib").unwrap().flatten().find_map(|entry| {
        let path = entry.path().join("faketime/libfaketimeMT.so.1");
        path.exists().then_some(path)
    });
    found.expect("libfaketime is installed (scripts/setup test)").to_str().unwrap().to_owned()
}

#[tokio::test]
async fn a_clock_that_is_stepped_neither_ends_workspaces_nor_keeps_them_for_ever() {
    let directory = tempfile::tempdir().unwrap();
    let clock = directory.path().join("clock");
    let set = |step: &str| std::fs::write(&clock, step).unwrap();
    set("+0");
    let library = clock_library();
    let settings = [
        ("LD_PRELOAD", library.as_str()),
        ("FAKETIME_TIMESTAMP_FILE", clock.to_str().unwrap()),
        ("FAKETIME_NO_CACHE", "1"),
        // What has passed is not what the clock says.
        ("FAKETIME_DONT_FAKE_MONOTONIC", "1"),
        ("WORKSPACE_SWEEP_EVERY_SECONDS", "1"),
        ("WORKSPACE_IDLE_STOP_SECONDS", "10"),
    ];
    let server = TestServer::start_with(BINARY, &settings).await;
    let id = server.create(json!({ "ttl_seconds": 60 })).await;
    for step in ["+400d", "-400d"] {
        set(step);
        // The usage shows that the server sees the stepped clock.
        let seen = server.request("GET", &path(&id), None).await.ok();
        let measured = seen["usage"]["measured_at"].as_str().unwrap()[..4].to_owned();
        let created = seen["created_at"].as_str().unwrap()[..4].to_owned();
        assert_ne!(measured, created, "{step}: {seen}");
        // One that nobody uses is stopped, when its time has come, so sweeps pass; the one that is used lives.
        let unused = server.create(json!({})).await;
        let created = std::time::Instant::now();
        while server.request("GET", &path(&unused), None).await.ok()["status"] != "stopped" {
            assert!(created.elapsed().as_secs() < 60, "{step}: {unused} is not stopped");
            assert_eq!(server.bash(&id, "echo alive").await, "alive\n", "{step}");
            tokio::time::sleep(std::time::Duration::from_millis(200)).await;
        }
        assert!(created.elapsed().as_secs() >= 8, "{step}: {unused} was stopped too early");
        server.destroy(&unused).await;
    }
    // Unused it ends when its minute has passed, though the clock went back by more than a year.
    let begun = std::time::Instant::now();
    loop {
        tokio::time::sleep(std::time::Duration::from_secs(1)).await;
        let listed = server.request("GET", WORKSPACES, None).await.ok();
        if listed["workspaces"].as_array().unwrap().is_empty() {
            break;
        }
        assert!(begun.elapsed().as_secs() < 120, "it never ends: {listed}");
    }
    server.stop();
}
