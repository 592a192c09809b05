//! Recovery after a crash: complete changes are kept, incomplete ones are undone, orphans are removed, and the audit log is complete.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::process::Command;
use std::time::Duration;

use emergent_test_support::command::run;
use emergent_test_support::server::{POOL, TestServer, WORKSPACES};
use emergent_test_support::wait::wait_until;
use serde_json::{Value, json};

const BINARY: &str = env!("CARGO_BIN_EXE_emergent");

#[tokio::test]
async fn background_commands_survive_a_killed_server() {
    let mut server = TestServer::start(BINARY).await;
    let id = server.create(json!({})).await;
    let command = "for i in $(seq 1 1000); do echo tick $i; sleep 0.1; done";
    let path = server.start_in_background(&id, command).await;
    let limit = Duration::from_secs(60);
    let mut before = Value::Null;
    wait_until("the command has output", limit, async || {
        before = server.request("GET", &path, None).await.ok();
        before["next_offset"] != 0
    })
    .await;
    server.kill();
    server.start_again().await;
    assert_eq!(server.bash(&id, "echo alive").await, "alive\n");
    // The command continued, and its output can be read from the last offset.
    let offset = before["next_offset"].as_u64().unwrap();
    let mut after = Value::Null;
    wait_until("the command has more output", limit, async || {
        after = server.request("GET", &format!("{path}?offset={offset}"), None).await.ok();
        after["next_offset"].as_u64() != Some(offset)
    })
    .await;
    assert_eq!(after["status"], "running");
    let all = server.request("GET", &path, None).await.ok();
    let joined = format!("{}{}", before["stdout"].as_str().unwrap(), after["stdout"].as_str().unwrap());
    assert!(all["stdout"].as_str().unwrap().starts_with(&joined));
    let killed = server.request("DELETE", &path, None).await.ok();
    assert_eq!((&killed["status"], &killed["exit_code"]), (&json!("exited"), &json!(null)));
    server.destroy(&id).await;
    server.stop();
}

#[tokio::test]
async fn answered_calls_are_in_the_audit_log_after_the_server_was_killed() {
    let mut server = TestServer::start(BINARY).await;
    let id = server.create(json!({ "provider": "docker", "network": "isolated" })).await;
    for round in 1..=3 {
        let calls = (0..10).map(|number| {
            let write = json!({ "file_path": format!("file{number}"), "content": "x" });
            let (server, id) = (&server, &id);
            async move { server.tool(id, "write", write).await.ok() }
        });
        futures_util::future::join_all(calls).await;
        server.kill();
        server.start_again().await;
        let path = format!("/api/v1/audit?tool=write&workspace_id={id}&limit=500");
        let found = server.request("GET", &path, None).await.ok();
        assert_eq!(found["records"].as_array().map(Vec::len), Some(round * 10), "{found}");
        assert_eq!(server.request("GET", "/api/v1/audit/verify", None).await.ok()["ok"], true);
    }
    server.destroy(&id).await;
    server.stop();
}

#[tokio::test]
async fn streamed_calls_are_in_the_audit_log_before_their_output_is_sent() {
    let mut server = TestServer::start(BINARY).await;
    let id = server.create(json!({ "provider": "docker", "network": "isolated" })).await;
    let bash = format!("{WORKSPACES}/{id}/bash");
    let audited = async |server: &TestServer, tool: &str| {
        let path = format!("/api/v1/audit?tool={tool}&workspace_id={id}");
        let found = server.request("GET", &path, None).await.ok();
        let records = found["records"].as_array().unwrap().iter().rev();
        records.map(|record| (record["outcome"].clone(), record["request_id"].clone())).collect::<Vec<_>>()
    };
    // Killed in the middle of a command, and of a file.
    let command = json!({ "command": "echo first; sleep 600" });
    let mut events = server.events("POST", &bash, Some(command), None).await;
    assert_eq!(events.next().await.unwrap().data["text"], "first\n");
    server.bash(&id, "truncate -s 60M large").await;
    let url = format!("{}{WORKSPACES}/{id}/read", server.url);
    let read = server.client().post(&url).bearer_auth(&server.token);
    let read = read.header("accept", "application/octet-stream");
    let read = read.body(json!({ "file_path": "large", "raw": true }).to_string());
    let mut file = read.send().await.unwrap();
    assert!(!file.chunk().await.unwrap().unwrap().is_empty());
    server.kill();
    server.start_again().await;
    let bash_calls = audited(&server, "bash").await;
    assert_eq!(bash_calls.iter().map(|call| &call.0).collect::<Vec<_>>(), ["started", "success"]);
    let reads = audited(&server, "read").await;
    assert_eq!(reads.iter().map(|call| &call.0).collect::<Vec<_>>(), ["started"]);
    // A call that ends has a second entry with its outcome.
    server.events("POST", &bash, Some(json!({ "command": "sleep 1" })), None).await.collect().await;
    let bash_calls = audited(&server, "bash").await;
    assert_eq!(bash_calls[2..].iter().map(|call| &call.0).collect::<Vec<_>>(), ["started", "success"]);
    assert_eq!(bash_calls[2].1, bash_calls[3].1);
    let path = format!("/api/v1/audit?tool=bash&workspace_id={id}&outcome=success&limit=1");
    let found = server.request("GET", &path, None).await.ok();
    assert!(found["records"][0]["duration_ms"].as_u64().unwrap() >= 1000, "{found}");
    assert_eq!(server.request("GET", "/api/v1/audit/verify", None).await.ok()["ok"], true);
    server.destroy(&id).await;
    server.stop();
}

#[tokio::test]
async fn kill_during_creates_and_destroys_leaves_nothing() {
    let mut server = TestServer::start(BINARY).await;
    let doomed = server.create(json!({})).await;
    let keep = server.create(json!({})).await;
    // The server is killed while several creates and a destroy run. Each pause is a different moment, not a wait for a condition.
    for pause_ms in [0, 60, 150, 300] {
        let url = format!("{}{WORKSPACES}", server.url);
        for _ in 0..3 {
            let request = server.client().post(&url).bearer_auth(&server.token).body("{}").send();
            tokio::spawn(request);
        }
        let destroy = server.client().delete(format!("{url}/{doomed}")).bearer_auth(&server.token).send();
        tokio::spawn(destroy);
        tokio::time::sleep(Duration::from_millis(pause_ms)).await;
        server.kill();
        server.start_again().await;
        // Ready workspaces are kept. Incomplete creates are undone, and incomplete destroys are finished. A complete create is kept,
        // though its caller got no answer.
        let listed = server.request("GET", WORKSPACES, None).await.ok();
        for workspace in listed["workspaces"].as_array().unwrap() {
            assert_eq!(workspace["status"], "ready", "{workspace}");
            let id = workspace["id"].as_str().unwrap();
            if id != keep && id != doomed {
                server.destroy(id).await;
            }
        }
        assert_eq!(server.bash(&keep, "echo alive").await, "alive\n");
    }
    server.request("DELETE", &format!("{WORKSPACES}/{doomed}"), None).await;
    server.destroy(&keep).await;
    server.stop();
}

#[tokio::test]
async fn orphaned_container_is_removed_after_the_grace_period_and_foreign_ones_are_kept() {
    let mut server = TestServer::start(BINARY).await;
    let id = server.create(json!({ "network": "isolated" })).await;
    let label = format!("emergent.installation={}", server.installation());
    let stray = "0190a0a0-0000-7000-8000-000000000001";
    let create = |name: &str, label: &str| {
        run(
            "docker",
            &[
                "create",
                "--name",
                name,
                "--label",
                label,
                "--label",
                &format!("emergent.workspace={stray}"),
                "emergent/workspace:latest",
                "true",
            ],
        );
    };
    let foreign = format!("emergent-test-foreign-{}", std::process::id());
    create(&format!("agent-workspace-{stray}"), &label);
    create(&foreign, "emergent.installation=somebody-else");
    server.kill();
    server.start_again().await;
    let names = || run("docker", &["ps", "--all", "--format", "{{.Names}}"]);
    assert!(names().contains(stray), "it is removed before the grace period is over: {}", names());
    server.kill();
    server.start_again_with(&[("WORKSPACE_ORPHAN_GRACE_SECONDS", "0")]).await;
    let names = names();
    assert!(!names.contains(stray), "{names}");
    // It has no disk, so nothing is in quarantine.
    let listed = server.request("GET", "/api/v1/agent/workspaces/quarantine", None).await.ok();
    assert_eq!(listed["snapshots"], json!([]));
    assert!(names.contains(&foreign), "{names}");
    run("docker", &["rm", &foreign]);
    assert_eq!(server.bash(&id, "echo alive").await, "alive\n");
    server.destroy(&id).await;
    server.stop();
}

#[tokio::test]
async fn damaged_spare_is_listed_as_unreadable() {
    let mut server = TestServer::start(BINARY).await;
    server.kill();
    let id = "0193e1a0-0000-7000-8000-000000000001";
    let columns = "id, provider, image, image_digest, network, resource_limits, status";
    let values = format!("'{id}', 'docker', 'image', 'digest', 'lost', '{{}}', 'ready'");
    server.sql(&format!("INSERT INTO warm_spares ({columns}) VALUES ({values})")).await;
    server.start_again().await;
    let pool = server.request("GET", POOL, None).await.ok();
    assert_eq!(pool["unreadable"][0]["id"], id, "{pool}");
    let error = pool["unreadable"][0]["error"].as_str().unwrap();
    assert!(error.contains("column network is damaged"), "{error}");
    let mut show = Command::new(BINARY);
    let output = show.args(["pool", "show"]).env("EMERGENT_DATA_DIR", server.data_dir()).output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && stderr.contains("column network is damaged"), "{stderr}");
    server.kill();
    server.sql(&format!("DELETE FROM warm_spares WHERE id = '{id}'")).await;
    server.start_again().await;
    assert!(server.request("GET", POOL, None).await.ok().get("unreadable").is_none());
    server.stop();
}

#[tokio::test]
async fn damaged_row_is_listed_as_unreadable_and_its_sandbox_is_kept() {
    let mut server = TestServer::start(BINARY).await;
    let docker = json!({ "provider": "docker", "network": "isolated" });
    let (good, damaged) = (server.create(docker.clone()).await, server.create(docker).await);
    server.kill();
    server.sql(&format!("UPDATE agent_workspaces SET status = 'lost' WHERE id = '{damaged}'")).await;
    server.start_again_with(&[("WORKSPACE_ORPHAN_GRACE_SECONDS", "0")]).await;
    let listed = server.request("GET", WORKSPACES, None).await.ok();
    let ids = |list: &str| -> Vec<String> {
        let rows = listed[list].as_array().unwrap().iter();
        rows.map(|row| row["id"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!((ids("workspaces"), ids("unreadable")), (vec![good.clone()], vec![damaged.clone()]));
    let error = listed["unreadable"][0]["error"].as_str().unwrap();
    assert!(error.contains("column status is damaged: 'lost'"), "{error}");
    let output = Command::new(BINARY)
        .args(["workspace", "list"])
        .env("EMERGENT_DATA_DIR", server.data_dir())
        .output()
        .unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && stderr.contains("column status is damaged"), "{stderr}");
    let quarantined = server.request("GET", "/api/v1/agent/workspaces/quarantine", None).await.ok();
    assert_eq!(quarantined["snapshots"], json!([]));
    assert_eq!(server.bash(&good, "echo alive").await, "alive\n");

    server.kill();
    server.sql(&format!("UPDATE agent_workspaces SET status = 'ready' WHERE id = '{damaged}'")).await;
    server.start_again().await;
    assert_eq!(server.bash(&damaged, "echo alive").await, "alive\n");
    server.destroy(&good).await;
    server.destroy(&damaged).await;
    server.stop();
}

#[tokio::test]
async fn second_server_on_the_same_data_directory_is_refused() {
    let server = TestServer::start(BINARY).await;
    let output = Command::new(BINARY)
        .args(["serve", "--listen", "127.0.0.1:0", "--data-dir"])
        .arg(server.data_dir())
        .output()
        .unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && stderr.contains("in use by process"), "{stderr}");
    server.stop();
}

/// Each export call adds a record, and the export still ends.
#[tokio::test]
async fn exported_audit_records_verify_and_changed_ones_do_not() {
    let server = TestServer::start(BINARY).await;
    for _ in 0..3 {
        server.request("GET", WORKSPACES, None).await.ok();
    }
    let file = server.data_dir().join("export.jsonl");
    let audit = |arguments: &[&str]| {
        let mut command = Command::new(BINARY);
        command.arg("audit").args(arguments).arg(&file).env("EMERGENT_DATA_DIR", server.data_dir());
        let output = command.output().unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (code, stderr) = audit(&["export", "--output"]);
    assert_eq!(code, Some(0), "{stderr}");
    let (code, stderr) = audit(&["export", "--output"]);
    assert!(code == Some(1) && stderr.contains("exists"), "an export was overwritten: {stderr}");
    let (code, stderr) = audit(&["verify", "--export"]);
    assert!(code == Some(0) && stderr.contains("belong to this log"), "{stderr}");
    let text = std::fs::read_to_string(&file).unwrap();
    assert!(text.lines().count() >= 3, "{text}");
    std::fs::write(&file, text.replacen("workspace.list", "workspace.get", 1)).unwrap();
    let (code, stderr) = audit(&["verify", "--export"]);
    assert!(code == Some(1) && stderr.contains("was changed"), "{stderr}");
    server.stop();
}
