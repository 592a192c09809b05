//! Faults around microVMs. Each is reported within a time limit and leaves nothing on the host, and a request with the provider
//! `auto` falls back to gVisor.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod firewall;
mod guest;
mod manager;
mod space;

use std::path::{Path, PathBuf};

use emergent_test_support::microvm::Microvms;
use emergent_test_support::server::{TestServer, WORKSPACES, leftovers_of_manager};
use serde_json::{Value, json};

const BINARY: &str = env!("CARGO_BIN_EXE_emergent");

fn manager_dir(server: &TestServer) -> PathBuf {
    server.data_dir().join("firecracker")
}

/// The prefix of a manager's interfaces and chains.
fn manager_name(directory: &Path) -> String {
    let identity: Value =
        serde_json::from_slice(&std::fs::read(directory.join("manager.json")).unwrap()).unwrap();
    format!("fc{:06x}", identity["manager"].as_u64().unwrap())
}

/// Everything that a manager has made and not removed, except for the things that it keeps for the next microVM.
fn left(directory: &Path) -> Vec<String> {
    let all = leftovers_of_manager(directory).into_iter();
    all.filter(|each| !["interface ", "rule ", "control group "].iter().any(|kept| each.starts_with(kept)))
        .collect()
}

/// Asserts that a create on Firecracker fails with these texts and leaves nothing, and that a create with `auto` uses gVisor.
async fn assert_fails_and_falls_back(microvms: &Microvms, server: &TestServer, texts: &[&str]) {
    let refused = server.request("POST", WORKSPACES, Some(microvms.small())).await;
    assert!(refused.status >= 500, "{refused:?}");
    for text in texts {
        assert!(refused.message().contains(text), "{text}: {}", refused.message());
    }
    assert_eq!(left(&manager_dir(server)), Vec::<String>::new());
    let mut request = microvms.small();
    request["provider"] = json!("auto");
    let created = server.request("POST", WORKSPACES, Some(request)).await.ok();
    assert_eq!(created["provider"], "gvisor", "{created}");
    assert!(created["placement"]["rejected"].to_string().contains("firecracker"), "{created}");
    assert_eq!(left(&manager_dir(server)), Vec::<String>::new());
    server.destroy(created["id"].as_str().unwrap()).await;
}
