//! The scenarios of the Firecracker provider's requirements, each as a test named after its title, and what is built on
//! them: managers of other hosts, MCP servers, copies.
//!
//! A real Linux boots in each of them: on Firecracker where the machine has one, else on QEMU behind a double of it.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use emergent_test_support::internet::Internet;
use emergent_test_support::mcp;
use emergent_test_support::microvm::{Microvms, TestManager, ask_manager};
use emergent_test_support::server::{TestServer, run};
use serde_json::{Value, json};

const BINARY: &str = env!("CARGO_BIN_EXE_emergent");
const WORKSPACES: &str = "/api/v1/agent/workspaces";

/// A server that is its own manager.
async fn start(more: &[(&str, &str)]) -> (Microvms, TestServer) {
    let microvms = Microvms::find(BINARY);
    let server = microvms.start(BINARY, more).await;
    (microvms, server)
}

fn manager_dir(server: &TestServer) -> PathBuf {
    server.data_dir().join("firecracker")
}

/// A microVM as its manager sees it.
async fn machine(server: &TestServer, id: &str) -> Value {
    ask_manager(&manager_dir(server), "GET", &format!("/v1/machines/{id}"), None).await.ok()
}

fn disk(server: &TestServer, id: &str) -> PathBuf {
    manager_dir(server).join("machines").join(id).join("disk.ext4")
}

/// What a microVM's file systems say of themselves.
fn file_system(disk: &Path) -> String {
    run("dumpe2fs", &["-h", disk.to_str().unwrap()])
}

/// Keeps what was made for the next test, and ends.
fn end(microvms: &Microvms, server: TestServer) {
    microvms.keep_images(&manager_dir(&server));
    server.stop();
}

/// Whether a command in a workspace gets a connection.
async fn reaches(server: &TestServer, id: &str, address: &str) -> bool {
    let (host, port) = address.rsplit_once(':').unwrap();
    let command = format!("timeout 10 bash -c 'exec 3<>/dev/tcp/{host}/{port}'");
    let answer = server.tool(id, "bash", json!({ "command": command })).await.ok();
    answer["exit_code"] == 0
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
    // A kernel of its own, with all the memory and the disk that it was given.
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
    // An emulated processor with more CPUs than the host has may lock up.
    let (cpu, vcpus) = if microvms.is_real() { ("4", 4) } else { ("1.5", 2) };
    let limits = json!({ "cpu": cpu, "memory": "8G", "disk": "20G" });
    let asked = json!({ "provider": "firecracker", "resource_limits": limits });
    let id = server.create(asked).await;
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
    let asked = json!({ "provider": "firecracker" });
    let refused = server.request("POST", WORKSPACES, Some(asked)).await;
    let message = refused.body["error"]["message"].as_str().unwrap().to_owned();
    assert!(message.contains("KVM not available: /dev/no-kvm-here does not exist"), "{message}");
    assert_eq!(refused.error(503), "unavailable");
    // With `auto` the next provider is taken, and the answer says why.
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
    assert!(!disk(&server, &id).exists(), "its disk is there");
    let jail = manager_dir(&server).join("jails/firecracker").join(&id);
    assert!(!jail.exists(), "its jail is there");
    ask_manager(&manager_dir(&server), "GET", &format!("/v1/machines/{id}"), None).await.error(404);
    let held = Command::new("pgrep").args(["-f", &id]).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&held.stdout), "", "a process of it lives");
    end(&microvms, server);
}

#[tokio::test]
async fn destroy_stopped_microvm() {
    let (microvms, server) = start(&[]).await;
    let id = server.create(microvms.small()).await;
    server.request("POST", &format!("{WORKSPACES}/{id}/stop"), None).await.ok();
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
    let mut asked = microvms.small();
    asked["environment"] = json!({ "GREETING": "hello" });
    let id = server.create(asked).await;
    let command = "echo \"$GREETING from $(cat /proc/1/comm)\"; echo oops >&2; exit 7";
    let answer = server.tool(&id, "bash", json!({ "command": command })).await.ok();
    assert_eq!((&answer["stdout"], &answer["stderr"]), (&json!("hello from init\n"), &json!("oops\n")));
    assert_eq!(answer["exit_code"], 7);
    // No port is open on its network: the channel is the only way in.
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
    // On the microVM's own disk.
    assert_eq!(server.bash(&id, "cat /workspace/src/a.txt; stat -f -c %T .").await, "one\n2\next2/ext3\n");
    server.destroy(&id).await;
    end(&microvms, server);
}

#[tokio::test]
async fn workspace_has_network_access() {
    let (microvms, server) = start(&[]).await;
    let internet = Internet::start();
    let listener = internet.listen();
    let outside = listener.local_addr().unwrap().to_string();
    let id = server.create(microvms.small()).await;
    let machine = machine(&server, &id).await;
    let (interface, address) = (machine["interface"].as_str().unwrap(), machine["address"].as_str().unwrap());
    assert!(reaches(&server, &id, &outside).await, "the internet is not reached\n{}", server.log());
    // From an address that the outside can answer: the host's.
    let (_, peer) = listener.accept().unwrap();
    assert_ne!(peer.ip().to_string(), address);
    let routes = server.bash(&id, "cat /proc/net/route; cat /sys/class/net/*/address; hostname -I").await;
    assert!(routes.contains(address), "{routes}");
    assert!(run("iptables", &["-w", "5", "-t", "nat", "-S"]).contains("MASQUERADE"));
    // The host, private networks, the metadata service and other microVMs are not reached.
    let on_host = std::net::TcpListener::bind("0.0.0.0:0").unwrap();
    let port = on_host.local_addr().unwrap().port();
    let gateway = run("ip", &["-4", "-o", "addr", "show", "dev", interface]);
    let gateway = gateway.split_ascii_whitespace().nth(3).unwrap().split('/').next().unwrap().to_owned();
    let private = Internet::start_private();
    let private_listener = private.listen();
    let other = server.create(microvms.small()).await;
    let other_address = self::machine(&server, &other).await["address"].as_str().unwrap().to_owned();
    assert_ne!(other_address, address);
    server.begin(&other, "timeout 600 perl -MIO::Socket -e '$s = IO::Socket::INET->new(LocalPort => 8000, Listen => 5); $s->accept while 1'").await;
    for closed in [
        format!("{gateway}:{port}"),
        private_listener.local_addr().unwrap().to_string(),
        "169.254.169.254:80".to_owned(),
        format!("{other_address}:8000"),
    ] {
        assert!(!reaches(&server, &id, &closed).await, "{closed} is reached");
    }
    assert!(reaches(&server, &id, &outside).await);
    server.destroy(&other).await;
    server.destroy(&id).await;
    let rules = run("iptables-save", &[]);
    assert!(!rules.contains(address), "{rules}");
    end(&microvms, server);
}

#[tokio::test]
async fn isolated_network_mode() {
    let (microvms, server) = start(&[]).await;
    let internet = Internet::start();
    let listener = internet.listen();
    let mut asked = microvms.small();
    asked["network"] = json!("isolated");
    let id = server.create(asked).await;
    let machine = machine(&server, &id).await;
    let (interface, address) = (machine["interface"].as_str().unwrap(), machine["address"].as_str().unwrap());
    assert!(Path::new("/sys/class/net").join(interface).exists());
    // The channel works …
    assert_eq!(server.bash(&id, "echo in touch").await, "in touch\n");
    // … and nothing else, also with a route that root in the microVM sets.
    assert!(!run("iptables-save", &["-t", "nat"]).contains(address));
    let outside = listener.local_addr().unwrap().to_string();
    assert!(!reaches(&server, &id, &outside).await);
    let routes = server.bash(&id, "cat /proc/net/route").await;
    assert_eq!(routes.lines().count(), 2, "{routes}");
    server.destroy(&id).await;
    end(&microvms, server);
}

#[tokio::test]
async fn create_block_device_for_new_workspace() {
    use std::os::unix::fs::MetadataExt;
    let (microvms, server) = start(&[]).await;
    let mut asked = microvms.small();
    asked["resource_limits"]["disk"] = json!("5G");
    let id = server.create(asked).await;
    let file = std::fs::metadata(disk(&server, &id)).unwrap();
    assert_eq!(file.len(), 5 << 30);
    // Sparse: what the image holds, and a little.
    assert!(file.blocks() * 512 < 1 << 30, "{} MiB", (file.blocks() * 512) >> 20);
    assert_eq!(server.bash(&id, "awk '$2 == \"/\" { print $1, $3 }' /proc/mounts").await, "/dev/vda ext4\n");
    // The limit is one.
    let full = server.tool(&id, "bash", json!({ "command": "fallocate -l 6G /workspace/big" })).await.ok();
    assert!(full["stderr"].as_str().unwrap().contains("No space left"), "{full}");
    server.request("POST", &format!("{WORKSPACES}/{id}/stop"), None).await.ok();
    let described = file_system(&disk(&server, &id));
    assert!(described.contains("Filesystem state:         clean"), "{described}");
    run("e2fsck", &["-f", "-n", disk(&server, &id).to_str().unwrap()]);
    server.destroy(&id).await;
    end(&microvms, server);
}

#[tokio::test]
async fn copy_on_write_for_warm_pool() {
    use std::os::unix::fs::MetadataExt;
    let small = Microvms::find(BINARY).small()["resource_limits"].clone();
    let limit = |name: &str| small[name].as_str().unwrap().to_owned();
    let (cpu, memory, disk_size) = (limit("cpu"), limit("memory"), limit("disk"));
    // The manager says how many shall wait, the server keeps them.
    let (microvms, server) = start(&[
        ("FIRECRACKER_WARM_POOL_SIZE", "1"),
        ("WORKSPACE_DEFAULT_CPU", &cpu),
        ("WORKSPACE_DEFAULT_MEMORY", &memory),
        ("WORKSPACE_DEFAULT_DISK", &disk_size),
    ])
    .await;
    server.wait_for_pool(1).await;
    let asked = json!({ "environment": { "NAME": "claimed" } });
    let created = server.request("POST", WORKSPACES, Some(asked)).await.ok();
    assert_eq!(created["placement"]["warm_hit"], true, "{created}");
    let id = created["id"].as_str().unwrap();
    assert_eq!(server.bash(id, "echo $NAME").await, "claimed\n");
    // A clone of the image that is much larger than what it takes.
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
        server.request("POST", &format!("{WORKSPACES}/{id}/stop"), None).await.ok();
        assert_eq!(machine(&server, &id).await["pid"], Value::Null);
        server.request("POST", &format!("{WORKSPACES}/{id}/resume"), None).await.ok();
        assert_eq!(server.bash(&id, "cat link /srv/other; stat -c %a file").await, "kept\nalso\n640\n");
        assert_ne!(server.bash(&id, "cat /proc/sys/kernel/random/boot_id").await, boot);
    }
    server.destroy(&id).await;
    end(&microvms, server);
}

/// The interfaces of a manager that nobody uses.
fn ahead(manager: &TestManager) -> usize {
    manager.leftovers().iter().filter(|left| left.starts_with("interface ")).count()
}

#[tokio::test]
async fn manager_starts_successfully() {
    let microvms = Microvms::find(BINARY);
    let manager = TestManager::start(&microvms, BINARY, &[]).await;
    let log = manager.log();
    assert!(log.contains(&format!("listening on {}", manager.url())), "{log}");
    let health = manager.request("GET", "/v1/health", None).await.ok();
    assert_eq!((&health["healthy"], &health["errors"]), (&json!(true), &json!([])), "{health}");
    for program in ["firecracker", "jailer"] {
        assert!(health[program].as_str().unwrap().starts_with("v1."), "{health}");
    }
    let made_ahead = ahead(&manager);
    // A server on the same host finds its token.
    let (url, own) = (manager.url(), ("FIRECRACKER_MANAGER_URL", manager.url()));
    let server = TestServer::start_with(BINARY, &[(own.0, &url), ("EMERGENT_FIRECRACKER", "true")]).await;
    let id = server.create(microvms.small()).await;
    assert_eq!(server.bash(&id, "echo through a manager").await, "through a manager\n");
    // It is another server's as much as this one's: what it made it can list by itself.
    let listed = manager
        .request("GET", &format!("/v1/machines?installation={}", server.installation()), None)
        .await
        .ok();
    assert_eq!(listed["machines"][0]["id"], json!(id));
    server.destroy(&id).await;
    server.stop();
    assert_eq!(ahead(&manager), made_ahead);
    microvms.keep_images(manager.directory());
    manager.stop();
}

#[tokio::test]
async fn manager_health_check() {
    let microvms = Microvms::find(BINARY);
    let settings = [("FIRECRACKER_MAX_VMS", "7"), ("FIRECRACKER_WARM_POOL_SIZE", "6")];
    let manager = TestManager::start(&microvms, BINARY, &settings).await;
    let health = manager.request("GET", "/v1/health", None).await.ok();
    assert_eq!((&health["active_vms"], &health["max_vms"]), (&json!(0), &json!(7)), "{health}");
    assert_eq!(health["warm_pool_size"], 6);
    // Interfaces are there before anybody needs one.
    assert_eq!(ahead(&manager), 6);
    assert!(health["kvm_available"].is_boolean(), "{health}");
    for resource in ["cpus", "memory_bytes", "disk_bytes"] {
        assert!(health["available"][resource].as_u64().unwrap() > 0, "{health}");
    }
    manager.stop();
    // What is wrong is said, each with what to do.
    let settings = [
        ("FIRECRACKER_REQUIRE_KVM", "true"),
        ("FIRECRACKER_KVM_DEVICE", "/dev/null"),
        ("FIRECRACKER_BIN", "/nonexistent/firecracker"),
        ("FIRECRACKER_KERNEL", "/nonexistent/kernel"),
    ];
    let manager = TestManager::start(&microvms, BINARY, &settings).await;
    let health = manager.request("GET", "/v1/health", None).await.ok();
    assert_eq!((&health["healthy"], &health["kvm_available"]), (&json!(false), &json!(false)));
    let errors = health["errors"].to_string();
    for part in [
        "KVM not available",
        "/nonexistent/firecracker",
        "/nonexistent/kernel",
        "emergent firecracker install",
    ] {
        assert!(errors.contains(part), "{errors}");
    }
    manager.stop();
}

#[tokio::test]
async fn manager_handles_concurrent_vm_requests() {
    let microvms = Microvms::find(BINARY);
    let most = if microvms.is_real() { 4 } else { 5 };
    let settings = [("FIRECRACKER_MAX_VMS", most.to_string())];
    let settings: Vec<(&str, &str)> = settings.iter().map(|(name, value)| (*name, value.as_str())).collect();
    let (microvms, server) = { (microvms, Microvms::find(BINARY).start(BINARY, &settings).await) };
    let asked = microvms.small();
    // One more than there is room for.
    let creates = (0..=most).map(|_| server.request("POST", WORKSPACES, Some(asked.clone())));
    let answers = futures_util::future::join_all(creates).await;
    let (made, refused): (Vec<_>, Vec<_>) = answers.into_iter().partition(|answer| answer.status == 201);
    assert_eq!((made.len(), refused.len()), (most, 1), "{made:?} {refused:?}");
    assert!(
        refused[0].body["error"]["message"].as_str().unwrap().contains("FIRECRACKER_MAX_VMS"),
        "{refused:?}"
    );
    let mut seen: [HashSet<String>; 4] = Default::default();
    let mut ids = Vec::new();
    for created in made {
        let id = created.body["id"].as_str().unwrap().to_owned();
        let machine = machine(&server, &id).await;
        for (set, field) in seen.iter_mut().zip(["interface", "address", "pid"]) {
            assert!(set.insert(machine[field].to_string()), "{field} twice: {machine}");
        }
        assert!(seen[3].insert(server.bash(&id, "hostname; cat /etc/machine-id").await));
        ids.push(id);
    }
    futures_util::future::join_all(ids.iter().map(|id| server.destroy(id))).await;
    end(&microvms, server);
}

#[tokio::test]
async fn a_manager_of_another_host_is_reached_by_tls() {
    let microvms = Microvms::find(BINARY);
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    let (certificate, key) = (path("certificate.pem"), path("key.pem"));
    let subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"];
    let request = ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"];
    let files = ["-addext", "basicConstraints=critical,CA:FALSE", "-keyout", &key, "-out", &certificate];
    run("openssl", &[&request[..], &subject, &files].concat());
    let tls = [("EMERGENT_TLS_CERTIFICATE", certificate.as_str()), ("EMERGENT_TLS_KEY", &key)];
    let listen = ("FIRECRACKER_MANAGER_LISTEN", "127.0.0.1:0");
    let manager = TestManager::start(&microvms, BINARY, &[tls[0], tls[1], listen]).await;
    let (url, token) = (manager.url(), manager.token());
    assert!(url.starts_with("https://127.0.0.1:"), "{url}");
    let known = [
        ("FIRECRACKER_MANAGER_URL", url.as_str()),
        ("FIRECRACKER_MANAGER_TOKEN", token.as_str()),
        ("EMERGENT_FIRECRACKER", "true"),
    ];
    // A server that does not trust the certificate says so, and tells nobody its token.
    let server = TestServer::start_with(BINARY, &known).await;
    let refused = server.request("POST", WORKSPACES, Some(microvms.small())).await;
    let said = refused.body["error"]["message"].as_str().unwrap_or_default().to_owned();
    assert!(said.contains(&url) && said.contains("certificate"), "{refused:?}");
    assert_eq!(refused.error(503), "unavailable");
    server.stop();
    let trusted = [&known[..], &[("FIRECRACKER_MANAGER_CA", certificate.as_str())]].concat();
    let server = TestServer::start_with(BINARY, &trusted).await;
    let id = server.create(microvms.small()).await;
    // More than fits in one record of TLS, there and back.
    let text = "0123456789abcdef".repeat(1_500);
    let write = json!({ "file_path": "big", "content": text });
    server.tool(&id, "write", write).await.ok();
    assert_eq!(server.bash(&id, "wc -c < big; cat big").await, format!("24000\n{text}"));
    server.destroy(&id).await;
    assert!(!server.log().contains(&token) && !manager.log().contains(&token));
    server.stop();
    microvms.keep_images(manager.directory());
    manager.stop();
}

#[tokio::test]
async fn an_mcp_server_is_hosted_in_a_microvm() {
    let (microvms, server) = start(&[]).await;
    let image = mcp::image(BINARY);
    let mut request = json!({ "name": "echo", "args": ["twice"] });
    request.as_object_mut().unwrap().extend(microvms.small().as_object().unwrap().clone());
    server.register(&image, request).await;
    let hosted = server.wait_for_status("echo", "ready").await;
    assert_eq!(hosted["provider"], "firecracker", "{hosted}");
    assert_eq!(server.mcp_text("echo", "echo", json!({ "text": "hello" })).await, "hello");
    // Its microVM dies: another takes its place.
    let machines = ask_manager(&manager_dir(&server), "GET", "/v1/machines", None).await.ok();
    run("kill", &["-9", &machines["machines"][0]["pid"].to_string()]);
    server.wait_until_mcp("echo", "restarts", |count| count >= 1).await;
    server.wait_for_status("echo", "ready").await;
    assert_eq!(server.mcp_text("echo", "echo", json!({ "text": "again" })).await, "again");
    server.remove_mcp("echo").await;
    end(&microvms, server);
}

#[tokio::test]
async fn a_workspace_that_is_copied_goes_on_and_the_copy_has_its_files() {
    let (microvms, server) = start(&[]).await;
    let id = server.create(microvms.small()).await;
    server.begin(&id, "i=0; while true; do i=$((i + 1)); echo $i > count; sleep 0.2; done").await;
    server.bash(&id, "until [ -s count ]; do sleep 0.1; done; echo kept > file").await;
    let snapshot = format!("{WORKSPACES}/{id}/snapshot");
    let mut copies = Vec::new();
    for _ in 0..3 {
        copies.push(server.request("POST", &snapshot, Some(json!({}))).await.ok());
        // By the connection that there was, and by a new one: a copy needs one.
        let goes_on = "a=$(cat count); until [ $(cat count) -gt $a ]; do sleep 0.1; done; echo on";
        assert_eq!(server.bash(&id, goes_on).await, "on\n");
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
async fn clones_of_memory_go_on_and_share_no_identity() {
    let (microvms, server) = start(&[]).await;
    let id = server.create(microvms.small()).await;
    // Something that runs, and something that was written.
    server
        .begin(&id, "echo $$ > pid; i=0; while true; do i=$((i + 1)); echo $i > count; sleep 0.5; done")
        .await;
    server.bash(&id, "until [ -s count ]; do sleep 0.1; done; echo kept > file").await;
    let asked = json!({ "memory": true });
    let snapshot = server.request("POST", &format!("{WORKSPACES}/{id}/snapshot"), Some(asked)).await.ok();
    assert_eq!(snapshot["memory"], true, "{snapshot}");
    // Its connections are gone, which nobody notices.
    assert_eq!(server.bash(&id, "echo at once").await, "at once\n");
    let from = |more: Value| {
        let mut body = json!({ "snapshot_id": snapshot["id"] });
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    let restore = format!("{WORKSPACES}/from-snapshot");
    // Its size is what it was.
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
        // What ran goes on, from where it was.
        let count = "kill -0 $(cat pid) && a=$(cat count); until [ $(cat count) -gt $a ]; do sleep 0.1; done; echo on";
        assert_eq!(server.bash(id, count).await, "on\n", "{number}");
        assert_eq!(server.bash(id, "cat file").await, "kept\n");
        let text = server.bash(id, identity).await;
        let lines: Vec<&str> = text.lines().collect();
        let machine = machine(&server, id).await;
        assert_eq!(lines[3].trim(), machine["address"].as_str().unwrap(), "{text}");
        // One way out, on its own network.
        assert_eq!(lines.iter().filter(|line| line.starts_with("eth0")).count(), 2, "{text}");
        let parts = [lines[0], lines[1], lines[2], lines[3], lines[lines.len() - 2], lines[lines.len() - 1]];
        for (set, part) in seen.iter_mut().zip(parts) {
            assert!(set.insert(part.to_owned()), "{part} twice: {text}");
        }
        // The clock is the host's.
        let time: i64 = server.bash(id, "date +%s").await.trim().parse().unwrap();
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs();
        assert!(now.abs_diff(time.unsigned_abs()) < 60, "{time} {now}");
    }
    assert_eq!(server.bash(&ids[1], "echo $NAME").await, "one\n");
    assert_eq!(server.bash(&ids[2], "echo $NAME").await, "two\n");
    // They are different machines from here on, also for their disks; and they come back without the copy.
    server.bash(&ids[1], "echo changed > file; sync").await;
    assert_eq!(server.bash(&ids[2], "cat file").await, "kept\n");
    let path = format!("{WORKSPACES}/snapshots/{}", snapshot["id"].as_str().unwrap());
    server.request("DELETE", &path, None).await.ok();
    server.request("POST", &format!("{WORKSPACES}/{}/stop", ids[1]), None).await.ok();
    server.request("POST", &format!("{WORKSPACES}/{}/resume", ids[1]), None).await.ok();
    assert_eq!(server.bash(&ids[1], "cat file").await, "changed\n");
    for id in &ids {
        server.destroy(id).await;
    }
    end(&microvms, server);
}
