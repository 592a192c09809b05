//! Configurations of a server: PostgreSQL, TLS, no root, confined tools, disabled features. Also its reaction to signals, and
//! asynchronous creates.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::os::unix::fs::PermissionsExt;
use std::process::Command;
use std::time::{Duration, Instant};

use emergent_test_support::command::run;
use emergent_test_support::postgres::TestPostgres;
use emergent_test_support::server::{TestServer, WORKSPACES};
use emergent_test_support::wait::wait_until;
use serde_json::{Value, json};

const BINARY: &str = env!("CARGO_BIN_EXE_emergent");
/// The time limit of a condition.
const LIMIT: Duration = Duration::from_secs(90);

/// Runs a command of the CLI, which must succeed, and returns its output. The command finds the server by its data directory.
fn cli(server: &TestServer, arguments: &[&str]) -> String {
    let output = Command::new(BINARY)
        .args(arguments)
        .env("EMERGENT_DATA_DIR", server.data_dir())
        .env_remove("EMERGENT_URL")
        .env_remove("EMERGENT_TOKEN")
        .output()
        .unwrap();
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[tokio::test]
async fn server_on_postgresql_keeps_its_state_in_the_database() {
    let database = TestPostgres::shared().fresh_database();
    let mut server = TestServer::start_with(BINARY, &[("DATABASE_URL", &database)]).await;
    let id = server.create(json!({ "environment": { "SECRET": "hush" } })).await;
    assert_eq!(server.bash(&id, "echo $SECRET; echo kept > file").await, "hush\n");
    assert!(!server.data_dir().join("emergent.db").exists());
    server.kill();
    server.start_again().await;
    assert_eq!(server.bash(&id, "cat file; echo $SECRET").await, "kept\nhush\n");
    let listed = server.request("GET", WORKSPACES, None).await.ok();
    assert_eq!(listed["workspaces"][0]["id"], json!(id));
    server.destroy(&id).await;
    assert!(cli(&server, &["audit", "verify"]).contains("the chain is whole"));
    server.stop();
}

#[tokio::test]
async fn server_with_a_certificate_speaks_only_tls() {
    let directory = tempfile::tempdir().unwrap();
    let (certificate, key) = (directory.path().join("certificate.pem"), directory.path().join("key.pem"));
    let made = Command::new("openssl")
        .args(["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"])
        .args(["-addext", "subjectAltName=IP:127.0.0.1", "-addext", "basicConstraints=critical,CA:FALSE"])
        .arg("-keyout")
        .arg(&key)
        .arg("-out")
        .arg(&certificate)
        .output()
        .unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let certificate = certificate.to_str().unwrap();
    let variables = [("EMERGENT_TLS_CERTIFICATE", certificate), ("EMERGENT_TLS_KEY", key.to_str().unwrap())];
    let server = TestServer::start_with(BINARY, &variables).await;
    assert!(server.url.starts_with("https://"), "{}", server.url);
    server.request("GET", WORKSPACES, None).await.ok();
    // The CLI and curl trust the certificate only if it is given.
    cli(&server, &["workspace", "list", "--ca-cert", certificate]);
    let refused = Command::new(BINARY)
        .args(["workspace", "list"])
        .env("EMERGENT_DATA_DIR", server.data_dir())
        .output()
        .unwrap();
    assert!(!refused.status.success());
    let stderr = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(stderr.contains("--ca-cert"), "{stderr}");
    let live = format!("{}/health/live", server.url);
    run("curl", &["--silent", "--fail", "--cacert", certificate, &live]);
    let plain = server.url.replace("https:", "http:");
    assert!(reqwest::get(format!("{plain}/health/live")).await.is_err());
    server.stop();

    // A server with an invalid certificate does not start, and the error names the file.
    let broken = Command::new(BINARY)
        .args(["serve", "--listen", "127.0.0.1:0", "--data-dir"])
        .arg(directory.path().join("data"))
        .env("EMERGENT_TLS_CERTIFICATE", &key)
        .env("EMERGENT_TLS_KEY", certificate)
        .output()
        .unwrap();
    assert!(!broken.status.success());
    let stderr = String::from_utf8_lossy(&broken.stderr).into_owned();
    assert!(stderr.contains("TLS can't be used") && stderr.contains("key.pem"), "{stderr}");
}

/// A script that runs the server as `nobody` with access to Docker. The script makes `nobody` the owner of the data directory.
fn unprivileged(directory: &std::path::Path) -> String {
    let (binary, script) = (directory.join("emergent"), directory.join("as-nobody"));
    std::fs::copy(BINARY, &binary).unwrap();
    let group = run("stat", &["--format=%g", "/var/run/docker.sock"]);
    let text = format!(
        "#!/bin/sh\nchown 65534 \"$5\"\nexec setpriv --reuid=65534 --regid={} --clear-groups -- {} \"$@\"\n",
        group.trim(),
        binary.display()
    );
    std::fs::write(&script, text).unwrap();
    for path in [directory, &script, &binary] {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).unwrap();
    }
    script.to_str().unwrap().to_owned()
}

#[tokio::test]
async fn server_without_root_watches_disk_use_instead_of_limiting_it() {
    let directory = tempfile::tempdir().unwrap();
    let server = TestServer::start_with(&unprivileged(directory.path()), &[]).await;
    // A workspace with a network needs egress rules, which need root. The error names the fix.
    let refused = server.request("POST", WORKSPACES, Some(json!({}))).await;
    let message = refused.message();
    assert!(message.contains("isolated") && message.contains("root"), "{message}");
    let request = json!({ "network": "isolated", "resource_limits": { "disk": "64M" } });
    let created = server.request("POST", WORKSPACES, Some(request)).await.ok();
    assert!(created["metadata"]["warnings"].to_string().contains("watched"), "{created}");
    assert_eq!(created["metadata"]["disk_quota"], "watched", "{created}");
    let id = created["id"].as_str().unwrap();
    assert_eq!(server.bash(id, "cat /etc/hostname > /dev/null; whoami").await, "root\n");

    // A nearly full disk is reported after the next measurement.
    server.bash(id, "head -c 55M /dev/zero > first").await;
    wait_until("a note tells of the nearly full disk", LIMIT, async || {
        let answer = server.tool(id, "bash", json!({ "command": "true" })).await.ok();
        answer["notes"][0].as_str().is_some_and(|note| note.contains("nearly full"))
    })
    .await;
    // A command that writes beyond the limit is killed, long before the host's disk is full.
    let answer = server
        .tool(id, "bash", json!({ "command": "cat /dev/zero > second", "timeout_ms": 60000 }))
        .await
        .ok();
    assert_eq!((&answer["timed_out"], answer["exit_code"].as_i64()), (&json!(false), Some(137)), "{answer}");
    assert!(answer["notes"].to_string().contains("was killed"), "{answer}");
    // On a full disk the write tool is refused, and files can be removed.
    let write = json!({ "file_path": "third", "content": "x" });
    assert_eq!(server.tool(id, "write", write.clone()).await.error(422), "disk_full");
    server.bash(id, "rm first second").await;
    wait_until("the write tool succeeds", LIMIT, async || {
        server.tool(id, "write", write.clone()).await.status == 200
    })
    .await;
    let log = server.log();
    assert!(log.contains("nearly full") && log.contains("wrote the most"), "{log}");
    server.destroy(id).await;
    server.stop();
}

#[tokio::test]
async fn confined_file_tools_stay_in_the_workspace() {
    let configuration = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(configuration.path(), "[workspaces]\nconfine_file_tools = true\n").unwrap();
    let path = configuration.path().to_str().unwrap();
    let server = TestServer::start_with(BINARY, &[("EMERGENT_CONFIG", path)]).await;
    let id = server.create(json!({ "network": "isolated" })).await;
    server
        .bash(
            &id,
            "ln -s /etc out; ln -s /etc/passwd passwd; ln -s ../tmp temporary; mkdir in; ln -s in also",
        )
        .await;
    for (tool, request) in [
        ("read", json!({ "file_path": "/etc/passwd" })),
        ("read", json!({ "file_path": "../etc/passwd" })),
        ("read", json!({ "file_path": "out/passwd" })),
        ("read", json!({ "file_path": "passwd" })),
        ("read", json!({ "file_path": "passwd", "raw": true })),
        ("write", json!({ "file_path": "out/new", "content": "x" })),
        ("write", json!({ "file_path": "passwd", "content": "x" })),
        ("edit", json!({ "file_path": "passwd", "old_string": "root", "new_string": "x" })),
        ("glob", json!({ "pattern": "*", "path": "/etc" })),
        ("grep", json!({ "pattern": "root", "path": "out" })),
        ("git", json!({ "action": "status", "path": "/etc" })),
    ] {
        let refused = server.tool(&id, tool, request.clone()).await;
        let message = refused.message().to_owned();
        assert!((400..500).contains(&refused.status), "{tool} {request}: {refused:?}");
        assert!(tool == "git" || message.contains("confined"), "{tool} {request}: {message}");
    }
    for path in ["also/file", "/tmp/file", "temporary/other"] {
        server.tool(&id, "write", json!({ "file_path": path, "content": "x" })).await.ok();
    }
    assert_eq!(server.bash(&id, "cat in/file /tmp/file /tmp/other; test ! -e /etc/new").await, "xxx");
    server.destroy(&id).await;
    server.stop();
}

#[tokio::test]
async fn file_tools_work_in_an_image_without_a_shell() {
    let server = TestServer::start(BINARY).await;
    for provider in ["gvisor", "docker"] {
        let request = json!({ "provider": provider, "image": "emergent/test-empty:latest" });
        let id = server.create(request).await;
        server.tool(&id, "write", json!({ "file_path": "a/b.txt", "content": "one\ntwo\n" })).await.ok();
        let edit = json!({ "file_path": "a/b.txt", "old_string": "two", "new_string": "three" });
        server.tool(&id, "edit", edit).await.ok();
        let read = server.tool(&id, "read", json!({ "file_path": "/workspace/a/b.txt" })).await.ok();
        assert_eq!(read["content"], "1: one\n2: three");
        let found = server.tool(&id, "grep", json!({ "pattern": "thr.e" })).await.ok();
        assert_eq!(found["matches"][0]["line_number"], 2);
        let found = server.tool(&id, "glob", json!({ "pattern": "**/*.txt" })).await.ok();
        assert_eq!(found["matches"], json!(["/workspace/a/b.txt"]));
        for (tool, request) in
            [("bash", json!({ "command": "true" })), ("git", json!({ "action": "status" }))]
        {
            let refused = server.tool(&id, tool, request).await;
            let message = refused.message().to_owned();
            assert!(message.contains("image"), "{tool}: {message}");
            refused.error(422);
        }
        server.destroy(&id).await;
    }
    server.stop();
}

#[tokio::test]
async fn asynchronous_create_becomes_ready_or_an_error() {
    let server = TestServer::start(BINARY).await;
    let create = |body: &'static str| {
        let request = server.client().post(format!("{}{WORKSPACES}", server.url)).bearer_auth(&server.token);
        request.header("Prefer", "respond-async").body(body).send()
    };
    let created_workspace = async |id: &str| {
        let mut seen = Value::Null;
        wait_until("the create ends", LIMIT, async || {
            seen = server.workspace(id).await;
            seen["status"] != "creating"
        })
        .await;
        seen
    };
    let answer = create("{}").await.unwrap();
    assert_eq!(answer.status(), 202);
    let created: Value = answer.json().await.unwrap();
    assert_eq!(created["status"], "creating", "{created}");
    let id = created["id"].as_str().unwrap();
    assert_eq!(created_workspace(id).await["status"], "ready");
    assert_eq!(server.bash(id, "echo works").await, "works\n");
    server.destroy(id).await;
    // A failed create stays in the list with its error.
    let answer = create(r#"{"image":"emergent/nosuchimage:latest"}"#).await.unwrap();
    let created: Value = answer.json().await.unwrap();
    let id = created["id"].as_str().unwrap();
    let failed = created_workspace(id).await;
    assert_eq!(failed["status"], "error", "{failed}");
    assert!(failed["metadata"]["error"].to_string().contains("nosuchimage"), "{failed}");
    server.destroy(id).await;
    server.stop();
}

#[tokio::test]
async fn first_stop_signal_waits_for_calls_and_the_second_does_not() {
    let mut server = TestServer::start(BINARY).await;
    let id = server.create(json!({ "network": "isolated" })).await;
    let running = async |command: &'static str| {
        let request = server.client().post(format!("{}{WORKSPACES}/{id}/bash", server.url));
        request.bearer_auth(&server.token).json(&json!({ "command": command })).send().await
    };
    let pid = server.pid().to_string();
    let (url, client) = (format!("{}/health/live", server.url), reqwest::Client::new());
    let signal = async {
        server.wait_for_file(&id, "begun").await;
        run("kill", &[&pid]);
        let is_refused = async || client.get(&url).send().await.is_err();
        wait_until("new connections are refused", LIMIT, is_refused).await;
    };
    let (answer, ()) = tokio::join!(running("echo > begun; sleep 2; echo done"), signal);
    let answer: Value = answer.unwrap().json().await.unwrap();
    assert_eq!(answer["stdout"], "done\n");
    server.wait_for_end();
    server.start_again().await;
    let pid = server.pid().to_string();
    let running = async |command: &'static str| {
        let request = server.client().post(format!("{}{WORKSPACES}/{id}/bash", server.url));
        request.bearer_auth(&server.token).json(&json!({ "command": command })).send().await
    };
    let signal = async {
        server.wait_for_file(&id, "again").await;
        run("kill", &[&pid]);
        let url = format!("{}/health/live", server.url);
        let is_refused = async || client.get(&url).send().await.is_err();
        wait_until("new connections are refused", LIMIT, is_refused).await;
        run("kill", &[&pid]);
    };
    let (answer, ()) = tokio::join!(running("echo > again; sleep 300"), signal);
    assert!(answer.is_err());
    server.wait_for_end();
    server.start_again().await;
    server.destroy(&id).await;
    server.stop();
}

#[tokio::test]
async fn disabled_workspaces_answer_404_and_are_left_alone() {
    let mut server = TestServer::start(BINARY).await;
    let id = server.create(json!({ "provider": "docker", "ttl_seconds": 60 })).await;
    server.bash(&id, "echo kept > file").await;
    server.terminate();
    let off = [
        ("ENABLE_AGENT_WORKSPACES", "false"),
        ("WORKSPACE_SWEEP_EVERY_SECONDS", "1"),
        ("WORKSPACE_WARM_POOL_SIZE", "1"),
    ];
    server.start_again_with(&off).await;
    for (method, path) in [("GET", WORKSPACES.to_owned()), ("DELETE", format!("{WORKSPACES}/{id}"))] {
        let answer = server.request(method, &path, None).await;
        assert!(answer.message().contains("ENABLE_AGENT_WORKSPACES"), "{answer:?}");
        assert_eq!(answer.error(404), "not_found");
    }
    server.request("GET", "/api/v1/tokens", None).await.ok();
    // The workspace expires. For the time of three sweeps it must not be removed, and no spare may be made.
    server.advance_clock(63);
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(3) {
        let running =
            run("docker", &["inspect", "--format", "{{.State.Running}}", &format!("agent-workspace-{id}")]);
        assert_eq!(running.trim(), "true");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let filter = format!("label=emergent.installation={}", server.installation());
    let containers = run("docker", &["ps", "--filter", &filter, "--format", "{{.Names}}"]);
    assert_eq!(containers.lines().collect::<Vec<_>>(), [format!("agent-workspace-{id}")]);
    assert_eq!(run("docker", &["exec", containers.trim(), "cat", "/workspace/file"]), "kept\n");
    server.terminate();
    // Enabled again, the server removes it.
    server.start_again_with(&[("WORKSPACE_SWEEP_EVERY_SECONDS", "1")]).await;
    wait_until("the expired workspace is removed", LIMIT, async || {
        server.request("GET", &format!("{WORKSPACES}/{id}"), None).await.status == 404
    })
    .await;
    server.stop();
}

#[tokio::test]
async fn disabled_provider_is_not_used_and_its_workspaces_are_kept() {
    let mut server = TestServer::start(BINARY).await;
    let id = server.create(json!({ "provider": "gvisor" })).await;
    server.bash(&id, "echo kept > file").await;
    server.terminate();
    server.start_again_with(&[("EMERGENT_GVISOR", "false")]).await;
    let listed = server.request("GET", &format!("{WORKSPACES}/providers"), None).await.ok();
    let gvisor = listed["providers"].as_array().unwrap().iter().find(|one| one["name"] == "gvisor").unwrap();
    assert_eq!(gvisor["status"], "disabled", "{gvisor}");
    let refused = server.request("POST", WORKSPACES, Some(json!({ "provider": "gvisor" }))).await;
    assert_eq!(refused.error(503), "unavailable");
    // A request without a provider uses another one.
    let other = server.request("POST", WORKSPACES, Some(json!({}))).await.ok();
    assert_eq!(other["provider"], "docker", "{other}");
    server.destroy(other["id"].as_str().unwrap()).await;
    let answer = server.tool(&id, "bash", json!({ "command": "cat file" })).await;
    assert_eq!(answer.error(503), "unavailable");
    server.terminate();
    server.start_again().await;
    assert_eq!(server.bash(&id, "cat file").await, "kept\n");
    server.destroy(&id).await;
    server.stop();
}
