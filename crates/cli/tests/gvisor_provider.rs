//! The scenarios in the requirements of the gVisor provider. Each is a test with the title of its scenario as name.
//!
//! The tests use a real server, a real Docker engine and the real gVisor runtime.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::process::Command;

use emergent_test_support::command::run;
use emergent_test_support::engine::TestEngine;
use emergent_test_support::internet::Internet;
use emergent_test_support::mcp::{self, SERVERS};
use emergent_test_support::mcp_client::McpClient;
use emergent_test_support::server::{TestServer, WORKSPACES};
use serde_json::{Value, json};

const BINARY: &str = env!("CARGO_BIN_EXE_emergent");

fn inspect(kind: &str, id: &str) -> Value {
    let text = run("docker", &[kind, "inspect", &format!("agent-workspace-{id}")]);
    serde_json::from_str::<Value>(&text).unwrap()[0].clone()
}

fn exists(kind: &str, id: &str) -> bool {
    let name = format!("agent-workspace-{id}");
    Command::new("docker").args([kind, "inspect", &name]).output().unwrap().status.success()
}

#[tokio::test]
async fn create_gvisor_container_with_default_configuration() {
    let server = TestServer::start(BINARY).await;
    let created = server.request("POST", WORKSPACES, Some(json!({}))).await;
    assert_eq!(created.status, 201);
    let created = created.ok();
    assert_eq!((&created["status"], &created["provider"]), (&json!("ready"), &json!("gvisor")));
    assert_eq!(created["resource_limits"], json!({ "cpu": "2", "memory": "4G", "disk": "10G" }));
    let id = created["id"].as_str().unwrap();
    let container = inspect("container", id);
    assert_eq!(container["HostConfig"]["Runtime"], "runsc");
    assert_eq!(container["HostConfig"]["CapDrop"], json!(["ALL"]));
    assert_eq!(container["HostConfig"]["SecurityOpt"], json!(["no-new-privileges"]));
    assert_eq!(container["Config"]["Labels"]["emergent.installation"], json!(server.installation()));
    // The workspace runs on gVisor's kernel, not on the host's.
    let kernel = server.bash(id, "uname -r; dmesg").await;
    assert!(kernel.contains("gVisor"), "{kernel}");
    assert_ne!(kernel.lines().next().unwrap(), run("uname", &["-r"]).trim());
    server.destroy(id).await;
    server.stop();
}

#[tokio::test]
async fn gvisor_runtime_not_installed() {
    let engine = TestEngine::start("{}");
    let host = engine.host();
    let server = TestServer::start_with(BINARY, &[("DOCKER_HOST", &host)]).await;
    let request = json!({ "provider": "gvisor" });
    let refused = server.request("POST", WORKSPACES, Some(request)).await;
    assert!(refused.message().contains("gVisor runtime not available"), "{refused:?}");
    assert_eq!(refused.error(503), "unavailable");
    // With `auto` no other provider can be used. The error names each with its reason.
    let refused = server.request("POST", WORKSPACES, Some(json!({}))).await;
    let message = refused.message().to_owned();
    for part in ["firecracker: ", "gvisor: gVisor runtime not available", "docker: "] {
        assert!(message.contains(part), "{message}");
    }
    let providers = server.request("GET", "/api/v1/agent/workspaces/providers", None).await.ok();
    let gvisor =
        providers["providers"].as_array().unwrap().iter().find(|one| one["name"] == "gvisor").unwrap();
    assert_eq!(gvisor["status"], "unhealthy");
    let listed = server.request("GET", WORKSPACES, None).await.ok();
    assert_eq!(listed["workspaces"], json!([]));
}

#[tokio::test]
async fn gvisor_runtime_installed_but_broken() {
    let engine = TestEngine::start(r#"{"runtimes":{"runsc":{"path":"/bin/false"}}}"#);
    engine.import_empty_image("emergent/workspace:latest");
    let host = engine.host();
    let server = TestServer::start_with(BINARY, &[("DOCKER_HOST", &host)]).await;
    let request = json!({ "provider": "gvisor", "network": "isolated" });
    let refused = server.request("POST", WORKSPACES, Some(request)).await;
    assert!(refused.message().contains("gVisor runtime not available"), "{refused:?}");
    assert!((500..600).contains(&refused.status));
}

#[tokio::test]
async fn fallback_to_standard_docker_runtime() {
    // Without `allow_docker` the provider is refused.
    let server = TestServer::start_with(BINARY, &[]).await;
    let request = json!({ "provider": "docker" });
    let refused = server.request("POST", WORKSPACES, Some(request.clone())).await;
    assert!(refused.message().contains("allow_docker"), "{refused:?}");
    refused.error(422);
    server.stop();
    // With `allow_docker` it works, with a warning in the answer, the metadata and the log.
    let server = TestServer::start(BINARY).await;
    let created = server.request("POST", WORKSPACES, Some(request)).await.ok();
    let id = created["id"].as_str().unwrap();
    let warnings = created["metadata"]["warnings"].to_string();
    assert!(warnings.contains("reduced isolation"), "{created}");
    let seen = server.workspace(id).await;
    assert_eq!(seen["metadata"]["warnings"], created["metadata"]["warnings"]);
    assert!(server.log().contains("reduced isolation"));
    assert_eq!(server.bash(id, "uname -r").await, run("uname", &["-r"]));
    server.destroy(id).await;
    server.stop();
}

#[tokio::test]
async fn execute_bash_command_via_docker_exec() {
    let server = TestServer::start(BINARY).await;
    let id = server.create(json!({})).await;
    let command = json!({ "command": "echo out; echo err >&2; exit 7", "workdir": "/tmp" });
    let answer = server.tool(&id, "bash", command).await.ok();
    assert_eq!(
        (&answer["stdout"], &answer["stderr"], &answer["exit_code"]),
        (&json!("out\n"), &json!("err\n"), &json!(7))
    );
    // All calls use one channel. No call starts an exec.
    for _ in 0..5 {
        server.bash(&id, "true").await;
    }
    assert_eq!(inspect("container", &id)["ExecIDs"], Value::Null);
    server.destroy(&id).await;
    server.stop();
}

#[tokio::test]
async fn file_operations_via_docker_exec() {
    let server = TestServer::start(BINARY).await;
    let id = server.create(json!({})).await;
    server.tool(&id, "write", json!({ "file_path": "src/main.rs", "content": "fn main() {}\n" })).await.ok();
    let read = server.tool(&id, "read", json!({ "file_path": "/workspace/src/main.rs" })).await.ok();
    assert_eq!(read["content"], "1: fn main() {}");
    let edit = json!({ "file_path": "src/main.rs", "old_string": "{}", "new_string": "{ run() }" });
    assert_eq!(server.tool(&id, "edit", edit).await.ok()["lines_changed"], 1);
    let glob = server.tool(&id, "glob", json!({ "pattern": "**/*.rs" })).await.ok();
    assert_eq!(glob["matches"], json!(["/workspace/src/main.rs"]));
    let grep = server.tool(&id, "grep", json!({ "pattern": "run\\(" })).await.ok();
    assert_eq!(grep["matches"][0]["line_number"], 1);
    assert_eq!(server.bash(&id, "cat src/main.rs").await, "fn main() { run() }\n");
    server.destroy(&id).await;
    server.stop();
}

#[tokio::test]
async fn named_volume_creation() {
    let server = TestServer::start(BINARY).await;
    let id = server.create(json!({})).await;
    assert!(exists("volume", &id));
    let mounts = inspect("container", &id)["Mounts"].clone();
    let mount = mounts.as_array().unwrap().iter().find(|mount| mount["Destination"] == "/workspace").unwrap();
    assert_eq!((&mount["Name"], &mount["Type"]), (&json!(format!("agent-workspace-{id}")), &json!("volume")));
    server.destroy(&id).await;
    server.stop();
}

#[tokio::test]
async fn volume_persists_across_container_stop_start() {
    let server = TestServer::start(BINARY).await;
    let id = server.create(json!({})).await;
    server
        .bash(&id, "echo inside > kept; mkdir /opt/tool && echo outside > /opt/tool/kept; chmod 600 kept")
        .await;
    let path = format!("{WORKSPACES}/{id}");
    for round in 0..2 {
        let stopped = server.request("POST", &format!("{path}/stop"), None).await.ok();
        assert_eq!(stopped["status"], "stopped");
        let refused = server.tool(&id, "bash", json!({ "command": "true" })).await;
        assert_eq!(refused.error(409), "wrong_state");
        assert_eq!(server.request("POST", &format!("{path}/stop"), None).await.ok()["status"], "stopped");
        assert_eq!(server.request("POST", &format!("{path}/resume"), None).await.ok()["status"], "ready");
        let seen = server.bash(&id, "cat kept /opt/tool/kept; stat -c %a kept; ls").await;
        let expected: String = (0..round).map(|n| format!("more{n}\n")).collect();
        assert_eq!(seen, format!("inside\noutside\n600\nkept\n{expected}"));
        server.bash(&id, &format!("touch more{round}")).await;
    }
    server.destroy(&id).await;
    server.stop();
}

#[tokio::test]
async fn volume_cleanup_on_workspace_destroy() {
    let server = TestServer::start(BINARY).await;
    let id = server.create(json!({})).await;
    server.bash(&id, "head -c 20M /dev/zero > big").await;
    assert!(!server.leftovers().is_empty());
    server.destroy(&id).await;
    assert!(!exists("container", &id) && !exists("volume", &id));
    server.request("GET", &format!("{WORKSPACES}/{id}"), None).await.error(404);
    server.stop();
}

#[tokio::test]
async fn cpu_limit_via_docker() {
    let server = TestServer::start(BINARY).await;
    let id = server.create(json!({ "resource_limits": { "cpu": "2" } })).await;
    let cpus = inspect("container", &id)["HostConfig"]["NanoCpus"].as_i64().unwrap();
    let host = std::thread::available_parallelism().unwrap().get();
    assert_eq!(cpus, 1_000_000_000 * i64::try_from(host.min(2)).unwrap());
    server.destroy(&id).await;
    let id = server.create(json!({ "resource_limits": { "cpu": "0.5" } })).await;
    assert_eq!(inspect("container", &id)["HostConfig"]["NanoCpus"], 500_000_000);
    server.destroy(&id).await;
    server.stop();
}

#[tokio::test]
async fn memory_limit_via_docker() {
    let server = TestServer::start(BINARY).await;
    let id = server.create(json!({ "resource_limits": { "memory": "4G" } })).await;
    let limits = inspect("container", &id)["HostConfig"].clone();
    assert_eq!((&limits["Memory"], &limits["MemorySwap"]), (&json!(4_u64 << 30), &json!(4_u64 << 30)));
    server.destroy(&id).await;
    server.stop();
}

#[tokio::test]
async fn disk_quota_via_docker_volume() {
    let server = TestServer::start(BINARY).await;
    let created = json!({ "resource_limits": { "disk": "64M" } });
    let created = server.request("POST", WORKSPACES, Some(created)).await.ok();
    assert_eq!(created["metadata"]["disk_quota"], "enforced");
    let id = created["id"].as_str().unwrap();
    let full = server.tool(id, "bash", json!({ "command": "head -c 100M /dev/zero > big" })).await.ok();
    assert_ne!(full["exit_code"], 0);
    assert!(full["stderr"].as_str().unwrap().contains("No space left on device"), "{full}");
    // The write tool is refused, the read tool works, and a removal frees space.
    let content = "x".repeat(1 << 20);
    let refused = server.tool(id, "write", json!({ "file_path": "more", "content": content })).await;
    assert_eq!(refused.error(422), "disk_full");
    let entries = server.tool(id, "read", json!({ "file_path": "." })).await.ok();
    assert_eq!(entries["content"], "big");
    server.bash(id, "rm big").await;
    server.tool(id, "write", json!({ "file_path": "more", "content": content })).await.ok();
    server.destroy(id).await;
    server.stop();
}

#[tokio::test]
async fn linux_without_kvm() {
    // gVisor works without KVM, and the runtime's arguments don't ask for it.
    let server = TestServer::start(BINARY).await;
    let info: Value =
        serde_json::from_str(&run("docker", &["info", "--format", "{{json .Runtimes}}"])).unwrap();
    assert!(!info["runsc"].to_string().contains("platform=kvm"), "{info}");
    let created = server.request("POST", WORKSPACES, Some(json!({}))).await.ok();
    let id = created["id"].as_str().unwrap();
    assert_eq!(
        server.bash(id, "ls /dev/kvm 2>&1 || true").await,
        "ls: cannot access '/dev/kvm': No such file or directory\n"
    );
    // The answer names Firecracker, which needs KVM, as rejected.
    let rejected = created["placement"]["rejected"].to_string();
    assert!(rejected.contains("firecracker"), "{created}");
    server.destroy(id).await;
    server.stop();
}

#[tokio::test]
async fn mcp_server_with_gvisor_networking() {
    // The MCP server listens on all its addresses. Clients reach it through its channel, but workspaces don't reach it. Workspaces
    // reach neither the host nor private networks.
    let server = TestServer::start(BINARY).await;
    let command = json!(["mcp-fixture", "--http", "0.0.0.0:8000"]);
    let request = json!({ "name": "listening", "command": command, "stdio_bridge": false, "port": 8000 });
    let hosted = server.register(&mcp::image(BINARY), request).await;
    assert_eq!((&hosted["status"], &hosted["provider"]), (&json!("ready"), &json!("gvisor")), "{hosted:#}");
    let first = server.create(json!({})).await;
    let second = hosted["id"].as_str().unwrap();
    let network = inspect("container", second)["NetworkSettings"]["Networks"].clone();
    let address =
        network.as_object().unwrap().values().next().unwrap()["IPAddress"].as_str().unwrap().to_owned();
    let gateway =
        network.as_object().unwrap().values().next().unwrap()["Gateway"].as_str().unwrap().to_owned();
    let client = McpClient::open(&server, &format!("{SERVERS}/listening/mcp")).await;
    assert_eq!(client.text(1, "echo", json!({ "text": "reached" })).await, "reached");
    // A port on all addresses of the host.
    let listener = std::net::TcpListener::bind("0.0.0.0:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    for (host, port) in [
        (address.as_str(), 8000),
        (&gateway, port),
        ("169.254.169.254", 80),
        ("10.0.0.1", 80),
        ("172.17.0.1", port),
    ] {
        assert_eq!(server.bash(&first, &probe(host, port)).await, "closed\n", "{host}:{port}");
    }
    server.destroy(&first).await;
    server.remove_mcp("listening").await;
    server.stop();
}

/// A command that prints whether a connection is `open` or `closed`.
fn probe(host: &str, port: u16) -> String {
    format!(
        "python3 - <<'END'\nimport socket\ntry:\n    socket.create_connection(('{host}', {port}), 3); print('open')\n\
         except OSError:\n    print('closed')\nEND"
    )
}

#[tokio::test]
async fn egress_stays_blocked_while_docker_rewrites_its_chains() {
    // The engine removes the jump to DOCKER-USER for a moment whenever a network is made.
    let server = TestServer::start(BINARY).await;
    let id = server.create(json!({})).await;
    let neighbour = Internet::start_private();
    let listener = neighbour.listen();
    let ask = probe(&neighbour.address.to_string(), listener.local_addr().unwrap().port());
    assert_eq!(server.bash(&id, &ask).await, "closed\n");
    let bridge = format!("em-{}", &server.installation().replace('-', "")[22..]);
    let remove_jump = |table: &str, parent: &str| {
        let rule = ["-D", parent, "-i", &bridge, "-j", &format!("{bridge}-fwd")];
        let removed = Command::new("iptables").args(["-w", "10", "-t", table]).args(rule).status().unwrap();
        removed.success()
    };
    assert!(remove_jump("filter", "DOCKER-USER"));
    assert_eq!(server.bash(&id, &ask).await, "closed\n");
    // Without both jumps the connection is open, so the rules are the reason that it was closed.
    assert!(remove_jump("security", "FORWARD") || remove_jump("mangle", "FORWARD"));
    assert_eq!(server.bash(&id, &ask).await, "open\n");
    server.destroy(&id).await;
    server.stop();
}

#[tokio::test]
async fn isolated_workspace_has_only_loopback_and_a_working_channel() {
    let server = TestServer::start(BINARY).await;
    let id = server.create(json!({ "network": "isolated" })).await;
    let seen = server.bash(&id, "cat /proc/net/dev | tail -n +3 | cut -d: -f1 | tr -d ' '").await;
    assert_eq!(seen, "lo\n");
    server.destroy(&id).await;
    server.stop();
}
