//! The manager as a service of its own.

use std::collections::HashSet;

use emergent_test_support::command::run;
use emergent_test_support::microvm::{Microvms, TestManager};
use emergent_test_support::server::{TestServer, WORKSPACES};
use serde_json::json;

use super::{BINARY, end, machine};

/// The number of interfaces of a manager. Without a running microVM, all are made ahead.
fn interfaces(manager: &TestManager) -> usize {
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
    let made_ahead = interfaces(&manager);
    // A server on the same host reads its token.
    let (url, own) = (manager.url(), ("FIRECRACKER_MANAGER_URL", manager.url()));
    let server = TestServer::start_with(BINARY, &[(own.0, &url), ("EMERGENT_FIRECRACKER", "true")]).await;
    let id = server.create(microvms.small()).await;
    assert_eq!(server.bash(&id, "echo through a manager").await, "through a manager\n");
    // Several servers may use the manager. A list can be limited to the microVMs of one installation.
    let listed = manager
        .request("GET", &format!("/v1/machines?installation={}", server.installation()), None)
        .await
        .ok();
    assert_eq!(listed["machines"][0]["id"], json!(id));
    server.destroy(&id).await;
    server.stop();
    assert_eq!(interfaces(&manager), made_ahead);
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
    // Interfaces are made ahead.
    assert_eq!(interfaces(&manager), 6);
    assert!(health["kvm_available"].is_boolean(), "{health}");
    for resource in ["cpus", "memory_bytes", "disk_bytes"] {
        assert!(health["available"][resource].as_u64().unwrap() > 0, "{health}");
    }
    manager.stop();
    // Each unmet requirement is reported with its fix.
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
    let request = microvms.small();
    // One request more than the limit.
    let creates = (0..=most).map(|_| server.request("POST", WORKSPACES, Some(request.clone())));
    let answers = futures_util::future::join_all(creates).await;
    let (made, refused): (Vec<_>, Vec<_>) = answers.into_iter().partition(|answer| answer.status == 201);
    assert_eq!((made.len(), refused.len()), (most, 1), "{made:?} {refused:?}");
    assert!(refused[0].message().contains("FIRECRACKER_MAX_VMS"), "{refused:?}");
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
async fn remote_manager_is_used_over_tls_with_a_trusted_certificate() {
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
    // A server that does not trust the certificate reports it, and does not send its token.
    let server = TestServer::start_with(BINARY, &known).await;
    let refused = server.request("POST", WORKSPACES, Some(microvms.small())).await;
    let message = refused.message();
    assert!(message.contains(&url) && message.contains("certificate"), "{refused:?}");
    assert_eq!(refused.error(503), "unavailable");
    server.stop();
    let trusted = [&known[..], &[("FIRECRACKER_MANAGER_CA", certificate.as_str())]].concat();
    let server = TestServer::start_with(BINARY, &trusted).await;
    let id = server.create(microvms.small()).await;
    // Both directions transfer more than one TLS record.
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
