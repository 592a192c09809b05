//! The Firecracker manager is killed with SIGKILL at every step of everything it does, and started again: then what ran
//! still runs, what was being made is there as a whole or can be removed, and nothing is left over.
//!
//! The steps are the failpoints of the manager; `every_failpoint_is_in_this_suite` makes sure that none is forgotten.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeSet;
use std::path::Path;

use emergent_test_support::microvm::{Microvms, TestManager};
use emergent_test_support::server::run;
use emergent_wire::id::InstallationId;
use emergent_wire::{SnapshotId, WorkspaceId};
use serde_json::{Value, json};

const BINARY: &str = env!("CARGO_BIN_EXE_emergent");

/// Steps of a creation after which nothing is left of it.
const BEFORE: [&str; 3] = ["manager.reserved", "manager.disk_copied", "manager.disk_made"];
/// Steps after which its disk is there, and whoever asked for it can start it or remove it.
const STARTING: [&str; 8] = [
    "manager.configured",
    "manager.jail_made",
    "manager.rules_set",
    "manager.process_started",
    "manager.process_noted",
    "manager.vmm_configured",
    "manager.machine_started",
    "manager.agent_ready",
];
const STARTED: [&str; 1] = ["manager.running"];
const STOP: [&str; 3] = ["manager.process_killed", "manager.jail_removed", "manager.rules_removed"];
const DESTROY: [&str; 5] = [
    "manager.removal_noted",
    "manager.process_killed",
    "manager.jail_removed",
    "manager.rules_removed",
    "manager.files_removed",
];
const SNAPSHOT: [&str; 3] = ["manager.paused", "manager.disk_copied", "manager.goes_on"];
const IMAGE: [&str; 1] = ["manager.image_unpacked"];

/// A manager with a microVM that must outlive everything.
struct World {
    microvms: Microvms,
    manager: TestManager,
    image: String,
    kept: Value,
}

fn path(id: &str) -> String {
    format!("/v1/machines/{id}")
}

impl World {
    async fn start() -> Self {
        let microvms = Microvms::find(BINARY);
        let manager = TestManager::start(&microvms, BINARY, &[]).await;
        let image = manager.image().await;
        let mut world = Self { microvms, manager, image, kept: Value::Null };
        let id = WorkspaceId::generate().to_string();
        world.kept = world.manager.request("PUT", &path(&id), Some(world.asked())).await.ok();
        world
    }

    /// A request for a microVM.
    fn asked(&self) -> Value {
        json!({
            "installation": InstallationId::generate(),
            "image": self.image,
            "limits": self.microvms.small()["resource_limits"],
            "network": "nat",
        })
    }

    /// The manager dies at a step of a request; and is started again.
    async fn die(&mut self, step: &str, method: &str, path: &str, body: Option<Value>) {
        self.manager.terminate();
        self.manager.start_again(&[("EMERGENT_FAILPOINT", step)]).await;
        self.manager.request_in_vain(method, path, body).await;
        self.manager.wait_until_killed();
        self.manager.start_again(&[]).await;
        self.check(step).await;
    }

    /// Asserts that what is there is what the manager knows of, and that the microVM that is kept has noticed nothing.
    async fn check(&self, step: &str) {
        let kept = self.manager.request("GET", &path(self.kept["id"].as_str().unwrap()), None).await.ok();
        assert_eq!(kept, self.kept, "{step}");
        // Its agent answers: a copy is made of what it has flushed.
        let copy = format!("/v1/snapshots/{}", SnapshotId::generate());
        let body = json!({ "machine": self.kept["id"] });
        self.manager.request("PUT", &copy, Some(body)).await.ok();
        self.manager.request("DELETE", &copy, None).await.ok();
        let machines = self.manager.request("GET", "/v1/machines", None).await.ok();
        let machines = machines["machines"].as_array().unwrap().clone();
        let of = |field: &str| -> BTreeSet<String> {
            machines.iter().filter_map(|machine| machine[field].as_str().map(str::to_owned)).collect()
        };
        let (ids, interfaces) = (of("id"), of("interface"));
        let running: BTreeSet<String> = machines
            .iter()
            .filter(|machine| machine["phase"] == "running")
            .map(|machine| machine["id"].as_str().unwrap().to_owned())
            .collect();
        for machine in &machines {
            assert!(
                ["running", "stopped"].contains(&machine["phase"].as_str().unwrap()),
                "{step}: {machine}"
            );
        }
        for left in self.manager.leftovers() {
            let is_known = match left.split_once(' ') {
                Some(("interface", name)) => interfaces.contains(name),
                Some(("process", line)) => running.iter().any(|id| line.contains(id.as_str())),
                // Rules are of the manager as a whole; one that names an interface belongs to it.
                Some(("rule", line)) => {
                    let named = line.split(' ').skip_while(|word| *word != "-i" && *word != "-o").nth(1);
                    named.is_none_or(|name| name.ends_with('+') || interfaces.contains(name))
                }
                Some(("control", _)) => true,
                _ => match left.rsplit_once('/') {
                    Some(("jails/firecracker", id)) => running.contains(id),
                    Some(("machines", id)) => ids.contains(id),
                    _ => false,
                },
            };
            assert!(is_known, "{step}: {left}");
        }
        for id in &running {
            let processes = run("sh", &["-c", &format!("pgrep -fc -- '{id}' || true")]);
            assert_ne!(processes.trim(), "0", "{step}: {id} does not run");
        }
    }

    async fn end(self) {
        self.manager.request("DELETE", &path(self.kept["id"].as_str().unwrap()), None).await.ok();
        self.microvms.keep_images(self.manager.directory());
        self.manager.stop();
    }

    async fn phase(&self, id: &str) -> String {
        let machine = self.manager.request("GET", &path(id), None).await;
        machine.body["phase"].as_str().unwrap_or("gone").to_owned()
    }
}

#[tokio::test]
async fn killed_while_a_microvm_is_made() {
    let mut world = World::start().await;
    for (step, expected) in
        BEFORE.map(|step| (step, "gone")).into_iter().chain(STARTING.map(|step| (step, "stopped")))
    {
        let id = WorkspaceId::generate().to_string();
        let asked = world.asked();
        world.die(step, "PUT", &path(&id), Some(asked.clone())).await;
        assert_eq!(world.phase(&id).await, expected, "{step}");
        // Asked again, it is there.
        if ["manager.disk_made", "manager.machine_started"].contains(&step) {
            let made = world.manager.request("PUT", &path(&id), Some(asked)).await.ok();
            assert_eq!(made["phase"], "running", "{step}");
        }
        world.manager.request("DELETE", &path(&id), None).await.ok();
    }
    world.end().await;
}

#[tokio::test]
async fn killed_while_a_microvm_is_stopped_or_removed() {
    let mut world = World::start().await;
    let id = WorkspaceId::generate().to_string();
    let asked = world.asked();
    world.die(STARTED[0], "PUT", &path(&id), Some(asked.clone())).await;
    assert_eq!(world.phase(&id).await, "running");
    for step in STOP {
        world.die(step, "POST", &format!("{}/stop", path(&id)), None).await;
        assert_eq!(world.phase(&id).await, "stopped", "{step}");
        world.manager.request("POST", &format!("{}/start", path(&id)), None).await.ok();
    }
    for step in DESTROY {
        world.die(step, "DELETE", &path(&id), None).await;
        assert_eq!(world.phase(&id).await, "gone", "{step}");
        world.manager.request("PUT", &path(&id), Some(asked.clone())).await.ok();
    }
    world.manager.request("DELETE", &path(&id), None).await.ok();
    world.end().await;
}

#[tokio::test]
async fn killed_while_something_is_copied() {
    let mut world = World::start().await;
    let body = json!({ "machine": world.kept["id"] });
    for step in SNAPSHOT {
        let copy = SnapshotId::generate();
        world.die(step, "PUT", &format!("/v1/snapshots/{copy}"), Some(body.clone())).await;
        let listed = world.manager.request("GET", "/v1/snapshots", None).await.ok();
        assert_eq!(listed["snapshots"], json!([]), "{step}");
    }
    world.manager.terminate();
    world.manager.start_again(&[("EMERGENT_FAILPOINT", IMAGE[0])]).await;
    world.manager.put_image("/v1/images/another", "emergent/test-empty:latest").await;
    world.manager.wait_until_killed();
    world.manager.start_again(&[]).await;
    world.check(IMAGE[0]).await;
    world.manager.request("GET", "/v1/images/another", None).await.error(404);
    world.end().await;
}

#[test]
fn every_failpoint_is_in_this_suite() {
    let lists: [&[&str]; 7] = [&BEFORE, &STARTING, &STARTED, &STOP, &DESTROY, &SNAPSHOT, &IMAGE];
    let tried: BTreeSet<String> =
        lists.iter().flat_map(|list| list.iter()).map(|&step| step.to_owned()).collect();
    let own = std::env::var("CARGO_MANIFEST_DIR").unwrap();
    let source = Path::new(&own).with_file_name("firecracker-manager").join("src");
    let text = run("grep", &["-rhoE", r#"failpoint!\("[^"]+"#, source.to_str().unwrap()]);
    let there = text.lines().map(|line| line.trim_start_matches("failpoint!(\"").to_owned());
    assert_eq!(tried, there.collect());
}
