//! The scenarios in the requirements of the Firecracker provider. Each is a test with the title of its scenario as name. The other
//! tests are about remote managers, MCP servers and snapshots.
//!
//! A real Linux boots in each test, on Firecracker or on QEMU behind a double of Firecracker.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod disks;
mod manager;
mod network;
mod snapshots;

use std::path::{Path, PathBuf};

use emergent_test_support::command::{pgrep, run};
use emergent_test_support::mcp;
use emergent_test_support::microvm::{Microvms, ask_manager};
use emergent_test_support::server::{TestServer, WORKSPACES};
use serde_json::{Value, json};

const BINARY: &str = env!("CARGO_BIN_EXE_emergent");

/// Starts a server that runs a manager itself.
async fn start(more: &[(&str, &str)]) -> (Microvms, TestServer) {
    let microvms = Microvms::find(BINARY);
    let server = microvms.start(BINARY, more).await;
    (microvms, server)
}

fn manager_dir(server: &TestServer) -> PathBuf {
    server.data_dir().join("firecracker")
}

/// Reads a microVM from its manager.
async fn machine(server: &TestServer, id: &str) -> Value {
    ask_manager(&manager_dir(server), "GET", &format!("/v1/machines/{id}"), None).await.ok()
}

fn disk(server: &TestServer, id: &str) -> PathBuf {
    manager_dir(server).join("machines").join(id).join("disk.ext4")
}

/// Keeps the images for the next test, and stops the server.
fn end(microvms: &Microvms, server: TestServer) {
    microvms.keep_images(&manager_dir(&server));
    server.stop();
}

#[tokio::test]
async fn create_microvm_with_default_configuration() {
    let (microvms, server) = start(&[]).await;
    let created = server.request("POST", WORKSPACES, Some(json!({}))).await;
    assert_eq!(created.status, 201, "{}", created.body);
    let created = created.ok();
    assert_eq!((&created["status"], &created["provider"]), (&json!("ready"), &json!("firecracker")));
    assert_eq!(created["resource_limits"], json!({ "cpu": "2", "memory": "4G", "disk": "10G" }));
    let id = created["id"].as_str().unwrap();
    let machine = machine(&server, id).await;
    assert_eq!((&machine["phase"], &machine["vcpus"]), (&json!("running"), &json!(2)));
    assert_eq!(std::fs::metadata(disk(&server, id)).unwrap().len(), 10 << 30);
    assert!(
        Path::new("/sys/class/net").join(machine["interface"].as_str().unwrap()).join("tun_flags").exists()
    );
    // It has a kernel of its own, and the whole memory and disk of its limits.
    assert_ne!(server.bash(id, "uname -r").await, run("uname", &["-r"]));
    let memory: u64 =
        server.bash(id, "awk '/MemTotal/ { print $2 }' /proc/meminfo").await.trim().parse().unwrap();
    assert!((3_700_000..4_200_000).contains(&memory), "{memory} KiB");
    let blocks: u64 = server.bash(id, "stat -f -c '%b * %S' / | xargs expr").await.trim().parse().unwrap();
    assert!(blocks > 9 << 30, "{blocks} bytes");
    if !microvms.is_real() {
        assert_eq!(server.bash(id, "nproc").await, "2\n");
    }
    let providers = server.request("GET", &format!("{WORKSPACES}/providers"), None).await.ok();
    let own =
        providers["providers"].as_array().unwrap().iter().find(|one| one["name"] == "firecracker").unwrap();
    assert_eq!((&own["status"], &own["capabilities"]["isolation"]), (&json!("healthy"), &json!("microvm")));
    assert!(own["capabilities"]["startup_latency_ms"].as_u64().unwrap() > 0, "{own}");
    server.destroy(id).await;
    end(&microvms, server);
}

#[tokio::test]
async fn create_microvm_with_custom_resource_limits() {
    let (microvms, server) = start(&[]).await;
    // A guest with more emulated CPUs than the host has may lock up.
    let (cpu, vcpus) = if microvms.is_real() { ("4", 4) } else { ("1.5", 2) };
    let limits = json!({ "cpu": cpu, "memory": "8G", "disk": "20G" });
    let request = json!({ "provider": "firecracker", "resource_limits": limits });
    let id = server.create(request).await;
    let machine = machine(&server, &id).await;
    assert_eq!((&machine["vcpus"], &machine["limits"]), (&json!(vcpus), &limits));
    assert_eq!(std::fs::metadata(disk(&server, &id)).unwrap().len(), 20 << 30);
    let memory = server.bash(&id, "awk '/MemTotal/ { print $2 }' /proc/meminfo").await;
    assert!(memory.trim().parse::<u64>().unwrap() > 7_600_000, "{memory} KiB");
    if !microvms.is_real() {
        assert_eq!(server.bash(&id, "nproc").await, format!("{vcpus}\n"));
    }
    server.destroy(&id).await;
    end(&microvms, server);
}

#[tokio::test]
async fn kvm_not_available() {
    let settings = [("FIRECRACKER_REQUIRE_KVM", "true"), ("FIRECRACKER_KVM_DEVICE", "/dev/no-kvm-here")];
    let (microvms, server) = start(&settings).await;
    let request = json!({ "provider": "firecracker" });
    let refused = server.request("POST", WORKSPACES, Some(request)).await;
    let message = refused.message().to_owned();
    assert!(message.contains("KVM not available: /dev/no-kvm-here does not exist"), "{message}");
    assert_eq!(refused.error(503), "unavailable");
    // With `auto` the next provider is used, and the answer has the reason.
    let created = server.request("POST", WORKSPACES, Some(json!({}))).await.ok();
    assert_eq!(created["provider"], "gvisor");
    let rejected = created["placement"]["rejected"][0].clone();
    assert_eq!(rejected["provider"], "firecracker", "{created}");
    assert!(rejected["reason"].as_str().unwrap().contains("KVM not available"), "{rejected}");
    server.destroy(created["id"].as_str().unwrap()).await;
    end(&microvms, server);
}

#[tokio::test]
async fn destroy_running_microvm() {
    let (microvms, server) = start(&[]).await;
    let id = server.create(microvms.small()).await;
    let machine = machine(&server, &id).await;
    let process = PathBuf::from(format!("/proc/{}", machine["pid"]));
    assert!(process.exists());
    server.bash(&id, "nohup sleep 1000 >/dev/null 2>&1 &").await;
    server.destroy(&id).await;
    assert!(!process.exists(), "its process lives");
    assert!(!disk(&server, &id).exists(), "its disk exists");
    let jail = manager_dir(&server).join("jails/firecracker").join(&id);
    assert!(!jail.exists(), "its jail exists");
    ask_manager(&manager_dir(&server), "GET", &format!("/v1/machines/{id}"), None).await.error(404);
    assert_eq!(pgrep(&["-f", &id]), "", "a process of it lives");
    end(&microvms, server);
}

#[tokio::test]
async fn destroy_stopped_microvm() {
    let (microvms, server) = start(&[]).await;
    let id = server.create(microvms.small()).await;
    server.act(&id, "stop").await;
    assert_eq!(machine(&server, &id).await["phase"], "stopped");
    assert!(disk(&server, &id).exists());
    server.destroy(&id).await;
    assert!(!manager_dir(&server).join("machines").join(&id).exists());
    ask_manager(&manager_dir(&server), "GET", &format!("/v1/machines/{id}"), None).await.error(404);
    end(&microvms, server);
}

#[tokio::test]
async fn execute_bash_command_via_internal_agent() {
    let (microvms, server) = start(&[]).await;
    let mut request = microvms.small();
    request["environment"] = json!({ "GREETING": "hello" });
    let id = server.create(request).await;
    let command = "echo \"$GREETING from $(cat /proc/1/comm)\"; echo oops >&2; exit 7";
    let answer = server.tool(&id, "bash", json!({ "command": command })).await.ok();
    assert_eq!((&answer["stdout"], &answer["stderr"]), (&json!("hello from init\n"), &json!("oops\n")));
    assert_eq!(answer["exit_code"], 7);
    // No port is open on its network, so it is reached only through the channel.
    let sockets = server.bash(&id, "cat /proc/net/tcp /proc/net/udp | grep -v local_address || true").await;
    assert_eq!(sockets, "");
    let late = server
        .tool(&id, "bash", json!({ "command": "echo begun; sleep 100", "timeout_ms": 1000 }))
        .await
        .ok();
    assert_eq!(
        (&late["timed_out"], &late["exit_code"], &late["stdout"]),
        (&json!(true), &Value::Null, &json!("begun\n"))
    );
    server.destroy(&id).await;
    end(&microvms, server);
}

#[tokio::test]
async fn file_operations_via_internal_agent() {
    let (microvms, server) = start(&[]).await;
    let id = server.create(microvms.small()).await;
    server.tool(&id, "write", json!({ "path": "src/a.txt", "content": "one\ntwo\n" })).await.ok();
    let edited = server
        .tool(&id, "edit", json!({ "path": "src/a.txt", "old_string": "two", "new_string": "2" }))
        .await
        .ok();
    assert_eq!(edited["replacements"], 1);
    let read = server.tool(&id, "read", json!({ "path": "src/a.txt" })).await.ok();
    assert_eq!(read["content"], "1: one\n2: 2");
    let found = server.tool(&id, "glob", json!({ "pattern": "**/*.txt" })).await.ok();
    assert_eq!(found["matches"], json!(["/workspace/src/a.txt"]));
    let found = server.tool(&id, "grep", json!({ "pattern": "^2$" })).await.ok();
    assert_eq!(found["matches"][0]["line_number"], 2);
    // The files are on the microVM's own disk.
    assert_eq!(server.bash(&id, "cat /workspace/src/a.txt; stat -f -c %T .").await, "one\n2\next2/ext3\n");
    server.destroy(&id).await;
    end(&microvms, server);
}

#[tokio::test]
async fn mcp_server_in_a_microvm_is_restarted_after_the_microvm_was_killed() {
    let (microvms, server) = start(&[]).await;
    let image = mcp::image(BINARY);
    let mut request = json!({ "name": "echo", "args": ["twice"] });
    request.as_object_mut().unwrap().extend(microvms.small().as_object().unwrap().clone());
    server.register(&image, request).await;
    let hosted = server.wait_for_status("echo", "ready").await;
    assert_eq!(hosted["provider"], "firecracker", "{hosted}");
    assert_eq!(server.mcp_text("echo", "echo", json!({ "text": "hello" })).await, "hello");
    // Its microVM is killed, and another one replaces it.
    let machines = ask_manager(&manager_dir(&server), "GET", "/v1/machines", None).await.ok();
    run("kill", &["-9", &machines["machines"][0]["pid"].to_string()]);
    server.wait_until_mcp("echo", "restarts", |count| count >= 1).await;
    server.wait_for_status("echo", "ready").await;
    assert_eq!(server.mcp_text("echo", "echo", json!({ "text": "again" })).await, "again");
    server.remove_mcp("echo").await;
    end(&microvms, server);
}
