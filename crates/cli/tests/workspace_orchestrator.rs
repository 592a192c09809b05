//! The scenarios in the requirements of the orchestrator that need a whole server. Each is a test with the title of its scenario as
//! name. The scenarios about selection, fallback and health are unit tests of the control plane.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::{Duration, Instant};

use emergent_test_support::command::run;
use emergent_test_support::server::{POOL, TestServer, WORKSPACES};
use serde_json::{Value, json};

const BINARY: &str = env!("CARGO_BIN_EXE_emergent");

async fn provider(server: &TestServer, name: &str) -> Value {
    let listed = server.request("GET", &format!("{WORKSPACES}/providers"), None).await.ok();
    listed["providers"].as_array().unwrap().iter().find(|one| one["name"] == name).unwrap().clone()
}

#[tokio::test]
async fn all_providers_implement_the_same_interface() {
    // The same lifecycle on each container provider.
    let server = TestServer::start(BINARY).await;
    for provider in ["gvisor", "docker"] {
        let id = server.create(json!({ "provider": provider })).await;
        let path = format!("{WORKSPACES}/{id}");
        server.tool(&id, "write", json!({ "file_path": "f", "content": "text" })).await.ok();
        assert_eq!(server.bash(&id, "cat f").await, "text");
        assert_eq!(server.tool(&id, "read", json!({ "file_path": "f" })).await.ok()["content"], "1: text");
        assert_eq!(server.request("POST", &format!("{path}/stop"), None).await.ok()["status"], "stopped");
        assert_eq!(server.request("POST", &format!("{path}/resume"), None).await.ok()["status"], "ready");
        let copy = server.request("POST", &format!("{path}/snapshot"), None).await.ok();
        let request = json!({ "snapshot_id": copy["id"] });
        let made = server.request("POST", &format!("{WORKSPACES}/from-snapshot"), Some(request)).await.ok();
        assert_eq!(made["provider"], provider);
        let made = made["id"].as_str().unwrap();
        assert_eq!(server.bash(made, "cat f").await, "text");
        let copy = format!("{WORKSPACES}/snapshots/{}", copy["id"].as_str().unwrap());
        server.request("DELETE", &copy, None).await.ok();
        server.destroy(made).await;
        server.destroy(&id).await;
    }
    server.stop();
}

#[tokio::test]
async fn provider_capabilities_reporting() {
    let server = TestServer::start(BINARY).await;
    let before = provider(&server, "gvisor").await;
    let capabilities = &before["capabilities"];
    for feature in ["persistence", "snapshots", "warm_pool"] {
        assert_eq!(capabilities[feature], true, "{before}");
    }
    assert_eq!(capabilities["requires"], json!(["docker", "runsc"]));
    assert_eq!(capabilities["isolation"], "application_kernel");
    assert!(before["available_resources"]["memory_bytes"].as_u64().unwrap() > 0, "{before}");
    // The latency is measured, so it is null before the first start.
    assert_eq!(capabilities["startup_latency_ms"], Value::Null);
    let id = server.create(json!({})).await;
    let after = provider(&server, "gvisor").await;
    assert!(after["capabilities"]["startup_latency_ms"].as_u64().unwrap() > 0, "{after}");
    server.destroy(&id).await;
    server.stop();
}

#[tokio::test]
async fn no_provider_specified_defaults_to_auto() {
    let server = TestServer::start(BINARY).await;
    let mut placements = Vec::new();
    for request in [json!({}), json!({ "provider": "auto" })] {
        let made = server.request("POST", WORKSPACES, Some(request)).await.ok();
        placements.push(made["placement"].clone());
        server.destroy(made["id"].as_str().unwrap()).await;
    }
    assert_eq!(placements[0], placements[1]);
    server.stop();
}

#[tokio::test]
async fn health_status_api() {
    let server = TestServer::start_with(BINARY, &[]).await;
    let id = server.create(json!({})).await;
    let gvisor = provider(&server, "gvisor").await;
    assert_eq!((&gvisor["status"], &gvisor["active_workspaces"]), (&json!("healthy"), &json!(1)));
    assert!(gvisor["last_check"].is_string() && gvisor["available_resources"]["cpus"].is_number());
    // A provider that can't be used has a message with the reason.
    let firecracker = provider(&server, "firecracker").await;
    assert_eq!((&firecracker["status"], &firecracker["last_check"]), (&json!("disabled"), &Value::Null));
    assert_eq!(firecracker["message"], "not installed on this server");
    assert_eq!(provider(&server, "e2b").await["message"], "E2B API key not configured");
    assert!(provider(&server, "docker").await["message"].as_str().unwrap().contains("allow_docker"));
    server.destroy(&id).await;
    assert_eq!(provider(&server, "gvisor").await["active_workspaces"], 0);
    server.stop();
}

#[tokio::test]
async fn warm_pool_uses_default_provider() {
    // Docker is allowed too, but a request without a provider uses gVisor.
    let settings = [("WORKSPACE_WARM_POOL_SIZE", "1"), ("EMERGENT_ALLOW_DOCKER", "true")];
    let server = TestServer::start_with(BINARY, &settings).await;
    let pool = server.wait_for_pool(1).await;
    assert_eq!(pool["shapes"][0]["provider"], "gvisor");
    let made = server.request("POST", WORKSPACES, Some(json!({}))).await.ok();
    assert_eq!((&made["provider"], &made["placement"]["warm_hit"]), (&json!("gvisor"), &json!(true)));
    server.destroy(made["id"].as_str().unwrap()).await;
    server.turn_pool_off().await;
    server.stop();
}

#[tokio::test]
async fn warm_pool_container_matches_request() {
    let server = TestServer::start(BINARY).await;
    let shapes = json!({ "shapes": [
        { "size": 1, "provider": "docker", "network": "isolated" },
        { "size": 1, "provider": "docker", "network": "isolated", "resource_limits": { "memory": "1G" } },
    ] });
    server.request("PUT", POOL, Some(shapes)).await.ok();
    server.wait_for_pool(2).await;
    let small = json!({ "provider": "docker", "network": "isolated", "resource_limits": { "memory": "1G" } });
    let made = server.request("POST", WORKSPACES, Some(small)).await.ok();
    assert_eq!(
        (&made["placement"]["warm_hit"], &made["resource_limits"]["memory"]),
        (&json!(true), &json!("1G"))
    );
    server.destroy(made["id"].as_str().unwrap()).await;
    server.turn_pool_off().await;
    server.stop();
}

#[tokio::test]
async fn spare_of_an_outdated_image_is_not_claimed() {
    let server = TestServer::start(BINARY).await;
    // The janitor removes this name.
    let image = format!("emergent-test:{}", server.installation());
    run("docker", &["tag", "emergent/workspace:latest", &image]);
    let request = json!({ "provider": "docker", "network": "isolated", "image": image });
    let shapes =
        json!({ "shapes": [{ "size": 1, "provider": "docker", "network": "isolated", "image": image }] });
    server.request("PUT", POOL, Some(shapes)).await.ok();
    server.wait_for_pool(1).await;
    // The name gets another image.
    let name = format!("emergent-test-{}", server.installation());
    let label = format!("emergent.installation={}", server.installation());
    run("docker", &["create", "--name", &name, "--label", &label, "emergent/workspace:latest", "true"]);
    run("docker", &["commit", "--change", "ENV CHANGED=yes", &name, &image]);
    run("docker", &["rm", &name]);
    let made = server.request("POST", WORKSPACES, Some(request.clone())).await.ok();
    assert_eq!(made["placement"]["warm_hit"], false);
    assert!(server.log().contains("no spare fits reason=\"stale_image\""), "{}", server.log());
    let id = made["id"].as_str().unwrap();
    assert_eq!(server.bash(id, "echo $CHANGED").await, "yes\n");
    server.destroy(id).await;
    // The pool replaces the spare.
    let begun = Instant::now();
    loop {
        server.wait_for_pool(1).await;
        let made = server.request("POST", WORKSPACES, Some(request.clone())).await.ok();
        let id = made["id"].as_str().unwrap();
        assert_eq!(server.bash(id, "echo $CHANGED").await, "yes\n", "{made}");
        server.destroy(id).await;
        if made["placement"]["warm_hit"] == true {
            break;
        }
        assert!(begun.elapsed() < Duration::from_secs(60), "the stale spare is not replaced");
    }
    server.turn_pool_off().await;
    server.stop();
}

#[tokio::test]
async fn warm_pool_miss_triggers_cold_start_with_correct_provider() {
    let server = TestServer::start(BINARY).await;
    let shapes = json!({ "shapes": [{ "size": 1, "provider": "docker", "network": "isolated" }] });
    server.request("PUT", POOL, Some(shapes)).await.ok();
    server.wait_for_pool(1).await;
    // The request would use gVisor, so a spare of a plain container does not fit.
    let made = server.request("POST", WORKSPACES, Some(json!({ "network": "isolated" }))).await.ok();
    assert_eq!((&made["provider"], &made["placement"]["warm_hit"]), (&json!("gvisor"), &json!(false)));
    assert!(server.log().contains("no spare fits reason=\"other_provider\""), "{}", server.log());
    server.destroy(made["id"].as_str().unwrap()).await;
    server.turn_pool_off().await;
    server.stop();
}
