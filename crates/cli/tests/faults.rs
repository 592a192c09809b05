//! Invalid input, hostile commands, memory exhaustion, and sandboxes and engines that are killed. The caller gets an error, and the
//! workspace stays usable.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::Duration;

use emergent_test_support::command::run;
use emergent_test_support::engine::TestEngine;
use emergent_test_support::server::{TestServer, WORKSPACES};
use emergent_test_support::wait::wait_until;
use serde_json::{Value, json};

const BINARY: &str = env!("CARGO_BIN_EXE_emergent");

#[tokio::test]
async fn invalid_input_gets_an_error_with_a_message() {
    let server = TestServer::start(BINARY).await;
    let workspaces = WORKSPACES;
    for (body, status) in [
        (json!({ "provider": "lxc" }), 400),
        (json!({ "ttl": 5 }), 400),
        (json!({ "ttl_seconds": 1 }), 400),
        (json!({ "ttl_seconds": -1 }), 400),
        (json!({ "resource_limits": { "memory": "lots" } }), 400),
        (json!({ "resource_limits": { "memory": "1K" } }), 422),
        (json!({ "resource_limits": { "cpu": "0" } }), 400),
        (json!({ "resource_limits": { "cpu": 100_000 } }), 422),
        (json!({ "resource_limits": { "disk": "1" } }), 422),
        (json!({ "environment": { "A=B": "x" } }), 400),
        (json!({ "image": "no such image" }), 400),
        (json!({ "image": "emergent/nosuchimage:latest" }), 422),
        (json!({ "branch": "main" }), 400),
        (json!({ "security_level": "high" }), 422),
        (json!({ "security_level": "extreme" }), 400),
        (json!({ "provider": "firecracker" }), 503),
        (json!({ "container_type": "mcp_server" }), 422),
        (json!([]), 400),
        (json!("x"), 400),
    ] {
        let answer = server.request("POST", workspaces, Some(body.clone())).await;
        assert_eq!(answer.status, status, "{body}: {}", answer.body);
        assert!(!answer.message().is_empty(), "{body}");
    }
    let id = server.create(json!({ "provider": "docker", "network": "isolated" })).await;
    let path = format!("{workspaces}/{id}");
    for (method, address, status) in [
        ("GET", format!("{workspaces}/nonsense"), 404),
        ("GET", format!("{workspaces}/0190a0a0-0000-7000-8000-000000000001"), 404),
        ("DELETE", format!("{workspaces}/0190a0a0-0000-7000-8000-000000000001"), 404),
        ("POST", format!("{workspaces}/0190a0a0-0000-7000-8000-000000000001/bash"), 400),
        ("GET", format!("{path}/operations/0190a0a0-0000-7000-8000-000000000001"), 404),
        ("GET", format!("{path}/operations/x"), 404),
        ("GET", format!("{workspaces}?limit=0"), 400),
        ("GET", format!("{workspaces}?limit=x"), 400),
        ("GET", format!("{workspaces}?unknown=1"), 400),
        ("GET", format!("{workspaces}?cursor=garbage"), 400),
        ("GET", format!("{workspaces}?status=redy"), 400),
        ("PUT", workspaces.to_owned(), 405),
        ("GET", "/api/v1/nothing".to_owned(), 404),
        ("GET", "/nothing".to_owned(), 404),
    ] {
        let answer = server.request(method, &address, None).await;
        assert_eq!(answer.status, status, "{method} {address}: {}", answer.body);
        assert!(answer.body["error"]["message"].is_string(), "{method} {address}: {}", answer.body);
    }
    // Bodies that are not JSON, not UTF-8, deeply nested, or too large.
    let client = server.client();
    let post = |body: Vec<u8>| {
        client.post(format!("{}{path}/bash", server.url)).bearer_auth(&server.token).body(body).send()
    };
    for (body, status) in [
        (b"not json".to_vec(), 400),
        (b"{\"command\":\"\xff\xfe\"}".to_vec(), 400),
        (vec![b'['; 100_000], 400),
        (format!("{{\"command\":\"{}\"}}", "x".repeat(2 << 20)).into_bytes(), 413),
        (vec![b' '; 6 << 20], 413),
    ] {
        let length = body.len();
        let answer = post(body).await.unwrap();
        assert_eq!(answer.status(), status, "{length} bytes");
    }
    assert_eq!(server.bash(&id, "echo alive").await, "alive\n");
    server.destroy(&id).await;
    server.stop();
}

#[tokio::test]
async fn hostile_commands_leave_the_workspace_usable() {
    let server = TestServer::start(BINARY).await;
    for provider in ["gvisor", "docker"] {
        let id = server.create(json!({ "provider": provider })).await;
        let bash = |command: &str, timeout_ms: u64| {
            let request = json!({ "command": command, "timeout_ms": timeout_ms });
            let (server, id) = (&server, id.clone());
            async move { server.tool(&id, "bash", request).await.ok() }
        };
        // The command and its children ignore SIGTERM, and some children have left its process group.
        let stubborn = "trap '' TERM; (trap '' TERM; setsid sleep 1000) & setsid sh -c 'trap \"\" TERM; sleep 1001' & sleep 1002";
        let answer = bash(stubborn, 200).await;
        assert_eq!((&answer["timed_out"], &answer["exit_code"]), (&json!(true), &json!(null)), "{answer}");
        assert_eq!(server.bash(&id, "pgrep -x sleep || echo none").await, "none\n", "{provider}");
        // The command prints without end.
        let answer = bash("yes", 1000).await;
        assert_eq!((&answer["timed_out"], &answer["truncated"]), (&json!(true), &json!(true)));
        assert!(answer["stdout"].as_str().unwrap().len() < 60_000);
        // Commands that leave a child behind, close their streams, kill their shell, or exit while a child prints.
        assert_eq!(bash("(setsid sleep 1000 &) ; echo gone", 5000).await["stdout"], "gone\n");
        assert_eq!(bash("exec >&- 2>&-; exit 4", 5000).await["exit_code"], 4);
        assert_eq!(bash("kill -9 $$", 5000).await["signal"], "SIGKILL");
        assert_eq!(bash("yes > /dev/null & yes & exit 6", 5000).await["exit_code"], 6);
        server.bash(&id, "pkill -9 yes; pkill -9 sleep; true").await;
        // A fork bomb is killed with all its descendants. `hostile_guest.rs` tests it on gVisor, where the sandbox may crash and
        // restart.
        if provider == "docker" {
            let answer = bash("bomb() { bomb | bomb & }; bomb; sleep 100", 300).await;
            // The bomb reaches its time-out, or the limit of tasks of the workspace.
            let is_over_limit = answer["notes"].to_string().contains("tasks");
            assert!(answer["timed_out"] == true || is_over_limit, "{answer}");
            let count = "n=$(ls /proc | grep -c '^[0-9]')";
            let settle =
                format!("for i in $(seq 100); do {count}; [ $n -lt 50 ] && break; sleep 0.1; done; echo $n");
            let left = server.bash(&id, &settle).await;
            assert!(left.trim().parse::<u32>().unwrap() < 50, "{left}");
        }
        // Zombies are reaped.
        server.bash(&id, "for i in 1 2 3 4 5; do (sh -c 'true &') ; done; true").await;
        let zombies = "for i in $(seq 50); do ps -eo stat | grep -q Z || break; sleep 0.1; done; ps -eo stat | grep -c Z || true";
        assert_eq!(server.bash(&id, zombies).await, "0\n", "{provider}");
        assert_eq!(server.bash(&id, "echo alive").await, "alive\n");
        server.destroy(&id).await;
    }
    server.stop();
}

#[tokio::test]
async fn out_of_memory_kills_the_process_but_not_the_sandbox() {
    let server = TestServer::start(BINARY).await;
    for provider in ["gvisor", "docker"] {
        let limits = json!({ "memory": "512M", "disk": "64M" });
        let id = server.create(json!({ "provider": provider, "resource_limits": limits })).await;
        server.bash(&id, "echo kept > file").await;
        let boot = server
            .bash(&id, "cat /proc/sys/kernel/random/boot_id; sleep 100 >/dev/null 2>&1 & echo $!")
            .await;
        let eat = "python3 -c 'x = bytearray(3 << 30)'; echo the shell lives";
        // The memory guard sleeps while no command runs, and must wake up for each command.
        for _ in 0..8 {
            let answer = server.tool(&id, "bash", json!({ "command": eat })).await.ok();
            assert_eq!(answer["oom_killed"], true, "{provider}: {answer}");
            assert!(answer["notes"][0].as_str().unwrap().contains("out of memory"), "{provider}: {answer}");
            assert_eq!(answer["stdout"], "the shell lives\n", "{provider}: {answer}");
        }
        if provider == "gvisor" {
            assert_host_prefers_the_agent_over_commands(&id);
        }
        assert_eq!(server.bash(&id, "cat file").await, "kept\n");
        // The sandbox was not restarted: another process still runs.
        let other = boot.lines().nth(1).unwrap();
        assert_eq!(server.bash(&id, &format!("kill -0 {other} && echo runs")).await, "runs\n", "{provider}");
        server.destroy(&id).await;
    }
    server.stop();
}

/// The process id of a sandbox on the host.
fn process_of(id: &str) -> String {
    let name = format!("agent-workspace-{id}");
    run("docker", &["inspect", "--format", "{{.State.Pid}}", &name]).trim().to_owned()
}

/// Asserts the priorities of gVisor and the agent over commands. On a busy host the memory guard may be too late, and then the
/// host's kernel chooses the process to kill by its `oom_score_adj`.
fn assert_host_prefers_the_agent_over_commands(id: &str) {
    let sandbox = process_of(id);
    let oom_score = |pid: &str| -> i32 {
        std::fs::read_to_string(format!("/proc/{pid}/oom_score_adj")).unwrap().trim().parse().unwrap()
    };
    let children = run("pgrep", &["--parent", &sandbox]);
    let of_children: Vec<i32> = children.lines().map(oom_score).collect();
    assert!(oom_score(&sandbox) < 500, "{of_children:?}");
    // The agent's process has a low score, and commands have the highest.
    assert!(of_children.iter().any(|score| *score < 500), "{of_children:?}");
    assert!(of_children.iter().filter(|score| **score == 1000).count() > 1, "{of_children:?}");
    // The agent's process has the highest CPU priority, and commands have the default.
    let priority = |pid: &str| -> i32 {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        stat.rsplit_once(')').unwrap().1.split_ascii_whitespace().nth(16).unwrap().parse().unwrap()
    };
    let of_children: Vec<i32> = children.lines().map(priority).collect();
    assert_eq!(priority(&sandbox), -20);
    assert!(of_children.contains(&-20) && of_children.contains(&0), "{of_children:?}");
}

/// Lowers the memory limit of a sandbox on the host. Its agent does not know the new limit, so only the host's kernel kills.
fn lower_memory_limit(id: &str, bytes: u64) {
    let groups = std::fs::read_to_string(format!("/proc/{}/cgroup", process_of(id))).unwrap();
    let of = |controllers: &str| {
        let mut lines = groups.lines().map(|line| line.splitn(3, ':').skip(1).collect::<Vec<_>>());
        lines.find(|fields| fields[0] == controllers).map(|fields| fields[1].to_owned())
    };
    let file = match of("memory") {
        Some(path) => format!("/sys/fs/cgroup/memory{path}/memory.limit_in_bytes"),
        None => format!("/sys/fs/cgroup{}/memory.max", of("").unwrap()),
    };
    std::fs::write(file, bytes.to_string()).unwrap();
}

/// Follows a command in the background until it ends, and returns its result.
async fn end_of(server: &TestServer, operation: &str) -> Value {
    server.events("GET", operation, None, None).await.collect().await.pop().unwrap().data
}

/// Takes more memory than the lowered limit.
const EAT: &str = "exec python3 -c 'x = bytearray(600 << 20)'";

fn assert_reports_oom(answer: &Value) {
    assert_eq!(answer["oom_killed"], true, "{answer}");
    assert!(answer["notes"][0].as_str().unwrap().contains("out of memory"), "{answer}");
}

#[tokio::test]
async fn sandbox_is_restarted_after_the_hosts_oom_killer_ended_a_command() {
    let server = TestServer::start(BINARY).await;
    let id = server.create(json!({ "provider": "gvisor", "resource_limits": { "memory": "1G" } })).await;
    server.bash(&id, "echo mine > kept").await;
    let path = format!("{WORKSPACES}/{id}");
    for is_streamed in [false, true] {
        let before = process_of(&id);
        lower_memory_limit(&id, 256 << 20);
        let request = json!({ "command": EAT });
        if is_streamed {
            let streamed = server.events("POST", &format!("{path}/bash"), Some(request), None).await;
            assert_reports_oom(&streamed.collect().await.last().unwrap().data);
        } else {
            assert_reports_oom(&server.tool(&id, "bash", request).await.ok());
        }
        assert_eq!(server.bash(&id, "cat kept").await, "mine\n");
        assert_ne!(process_of(&id), before);
    }
    let metrics = server.metrics().await;
    assert!(metrics.contains("emergent_oom_kills_total 2\n"), "{metrics}");
    assert!(metrics.contains("emergent_sandbox_restarts_total 2\n"), "{metrics}");
    server.destroy(&id).await;
    server.stop();
}

#[tokio::test]
async fn background_commands_keep_their_sandbox_after_the_hosts_oom_killer() {
    let mut server = TestServer::start(BINARY).await;
    let id = server.create(json!({ "provider": "gvisor", "resource_limits": { "memory": "1G" } })).await;
    let assert_reports_no_oom = |answer: &Value| {
        assert_eq!((&answer["exit_code"], &answer["oom_killed"]), (&json!(3), &json!(false)), "{answer}");
    };
    let failed = server.start_in_background(&id, "exit 3").await;
    assert_reports_no_oom(&end_of(&server, &failed).await);
    let before = process_of(&id);
    lower_memory_limit(&id, 256 << 20);
    let operation = server.start_in_background(&id, EAT).await;
    assert_reports_oom(&end_of(&server, &operation).await);
    assert_reports_oom(&server.request("GET", &operation, None).await.ok());
    // A command that failed before is not blamed on memory, and the kill is counted once.
    assert_reports_no_oom(&end_of(&server, &failed).await);
    let metrics = server.metrics().await;
    assert!(metrics.contains("emergent_oom_kills_total 1\n"), "{metrics}");
    // Other commands may run in the background, so the sandbox is not restarted. A command that fails gets a note about the
    // possible reason. It may also hang, because gVisor does not cope with a kill by the host.
    let answer = server.tool(&id, "bash", json!({ "command": "exit 3", "timeout_ms": 5000 })).await.ok();
    assert!(answer["notes"][0].as_str().unwrap().contains("stop and resume"), "{answer}");
    assert_eq!(process_of(&id), before);
    // The next server does not know of the kill, and blames no command.
    server.kill();
    server.start_again().await;
    assert_reports_no_oom(&end_of(&server, &failed).await);
    server.destroy(&id).await;
    server.stop();
}

#[tokio::test]
async fn killed_or_removed_sandbox_is_restarted_with_its_files() {
    let server = TestServer::start(BINARY).await;
    let id = server.create(json!({})).await;
    let name = format!("agent-workspace-{id}");
    server.bash(&id, "echo kept > file").await;
    // A command in the sandbox kills the agent.
    let answer = server.tool(&id, "bash", json!({ "command": "kill -9 1; sleep 60" })).await;
    assert_eq!(answer.error(502), "sandbox_lost");
    assert_eq!(server.bash(&id, "cat file").await, "kept\n");
    // The container is killed from outside while a call runs.
    let running = server.tool(&id, "bash", json!({ "command": "echo begun > begun; sleep 60" }));
    let kill = async {
        server.wait_for_file(&id, "begun").await;
        run("docker", &["kill", &name]);
    };
    let (answer, ()) = tokio::join!(running, kill);
    let message = answer.message().to_owned();
    assert!(message.contains("the sandbox ended while the call ran"), "{message}");
    assert_eq!(answer.error(502), "sandbox_lost");
    assert_eq!(server.bash(&id, "cat file").await, "kept\n");
    // The container is removed behind the server's back.
    run("docker", &["rm", "--force", &name]);
    assert_eq!(server.bash(&id, "cat file").await, "kept\n");
    let seen = server.workspace(&id).await;
    assert!(seen["metadata"]["last_restart"]["reason"].is_string(), "{seen}");
    // Container and volume are removed. The disk is still there, because the volume only refers to it.
    run("docker", &["rm", "--force", &name]);
    run("docker", &["volume", "rm", &name]);
    assert_eq!(server.bash(&id, "cat file").await, "kept\n");
    // The disk is removed too: the files are lost, and the error says so.
    run("docker", &["rm", "--force", &name]);
    run("docker", &["volume", "rm", &name]);
    for entry in std::fs::read_dir(server.data_dir().join("disks")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|end| end == "dev") {
            run("losetup", &["--detach", std::fs::read_link(&path).unwrap().to_str().unwrap()]);
        }
        std::fs::remove_file(path).unwrap();
    }
    let answer = server.tool(&id, "bash", json!({ "command": "cat file" })).await;
    assert!(answer.message().contains("gone"), "{}", answer.body);
    let seen = server.workspace(&id).await;
    assert_eq!(seen["status"], "error", "{seen}");
    server.destroy(&id).await;
    server.stop();
}

#[tokio::test(flavor = "multi_thread")]
async fn workspaces_recover_after_the_engine_restarts() {
    for (more, signal) in [("", "TERM"), ("", "KILL"), (",\"live-restore\":true", "TERM")] {
        let mut engine = TestEngine::start_with_gvisor(more);
        let host = engine.host();
        let server = TestServer::start_with(BINARY, &[("DOCKER_HOST", &host)]).await;
        let id = server.create(json!({ "network": "isolated" })).await;
        server.bash(&id, "echo kept > file; echo installed > /usr/local/file").await;
        // A call that runs when the engine ends gets an answer.
        let running = server.tool(&id, "bash", json!({ "command": "echo > begun; sleep 300" }));
        let end = async {
            server.wait_for_file(&id, "begun").await;
            tokio::task::block_in_place(|| engine.end(signal));
        };
        let (answer, ()) = tokio::join!(running, end);
        // An engine that gets SIGTERM stops the sandboxes with SIGTERM. Otherwise the channel breaks.
        if answer.status == 200 {
            assert_eq!((signal, &answer.body["signal"]), ("TERM", &json!("SIGTERM")), "{answer:?}");
        } else {
            assert_eq!(answer.error(502), "sandbox_lost", "{signal}");
        }
        // Without the engine, calls and creates fail.
        let call = server.tool(&id, "bash", json!({ "command": "true" })).await;
        assert_eq!(call.error(503), "unavailable", "{signal}");
        let request = json!({ "network": "isolated" });
        let refused = server.request("POST", WORKSPACES, Some(request)).await;
        assert!(refused.status >= 500, "{refused:?}");
        engine.start_again();
        // A create succeeds at once, though the last health check failed. Recovery removes the rest of the refused create.
        let other = server.create(json!({ "network": "isolated" })).await;
        server.destroy(&other).await;
        wait_until("the refused create is removed", Duration::from_secs(90), async || {
            let listed = server.request("GET", WORKSPACES, None).await.ok();
            listed["workspaces"].as_array().is_some_and(|all| all.len() == 1)
        })
        .await;
        assert_eq!(server.bash(&id, "cat file /usr/local/file").await, "kept\ninstalled\n", "{signal}");
        let seen = server.workspace(&id).await;
        assert_eq!(seen["status"], "ready", "{seen}");
        server.destroy(&id).await;
        server.stop();
    }
}

#[tokio::test]
async fn concurrent_calls_get_their_own_answers() {
    let server = TestServer::start(BINARY).await;
    let id = server.create(json!({ "network": "isolated" })).await;
    let calls = (0..40).map(|number| {
        let (server, id) = (&server, &id);
        async move {
            let request = json!({ "command": format!("sleep 0.{}; echo {number}", number % 5) });
            let answer: Value = server.tool(id, "bash", request).await.ok();
            assert_eq!(answer["stdout"], format!("{number}\n"));
            let file = format!("file{number}");
            server.tool(id, "write", json!({ "path": file, "content": format!("{number}") })).await.ok();
            let read = server.tool(id, "read", json!({ "path": file })).await.ok();
            assert_eq!(read["content"], format!("1: {number}"));
        }
    });
    futures_util::future::join_all(calls).await;
    server.destroy(&id).await;
    server.stop();
}

#[tokio::test]
async fn files_of_the_maximum_size_are_written_and_read_unchanged() {
    let server = TestServer::start(BINARY).await;
    let id = server.create(json!({ "network": "isolated" })).await;
    // 64 MiB is the limit. One byte more is refused.
    let content = "0123456789abcde\n".repeat(4 << 20);
    let written = server.tool(&id, "write", json!({ "path": "large", "content": content })).await.ok();
    assert_eq!(written["bytes_written"], 64 << 20);
    let sum = server.bash(&id, "sha256sum < large | cut -d' ' -f1").await;
    assert_eq!(written["sha256"], sum.trim());
    let url = format!("{}{WORKSPACES}/{id}/read", server.url);
    let request =
        server.client().post(&url).bearer_auth(&server.token).header("accept", "application/octet-stream");
    let bytes = request.body(r#"{"path":"large","raw":true}"#).send().await.unwrap().bytes().await.unwrap();
    assert!(bytes == content.as_bytes());
    let edit = json!({ "path": "large", "old_string": "0123456789abcde\n", "new_string": "x", "replace_all": false });
    assert_eq!(server.tool(&id, "edit", edit).await.error(422), "multiple_matches");
    server.bash(&id, "echo -n needle >> large; truncate -s 67108864 large").await;
    let refused =
        server.tool(&id, "write", json!({ "path": "larger", "content": format!("{content}x") })).await;
    assert_eq!(refused.error(413), "too_large");
    assert_eq!(server.bash(&id, "ls; ls -a | grep -c emergent- || true").await, "large\n0\n");
    server.destroy(&id).await;
    server.stop();
}
