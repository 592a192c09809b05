//! The Firecracker manager is killed with SIGKILL at every step of everything it does, and started again: then what ran
//! still runs, what was being made is there as a whole or can be removed, and nothing is left over. So is a server that
//! makes its workspaces on microVMs and is its own manager.
//!
//! The steps are the failpoints of the manager and its client; `every_failpoint_is_in_this_suite` makes sure that none is
//! forgotten.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use emergent_test_support::microvm::{Microvms, TestManager, ask_manager, wait_until_recovered};
use emergent_test_support::server::{TestServer, leftovers_of_manager, run};
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
const STOP: [&str; 4] =
    ["manager.end_noted", "manager.process_killed", "manager.jail_removed", "manager.rules_removed"];
const DESTROY: [&str; 5] = [
    "manager.removal_noted",
    "manager.process_killed",
    "manager.jail_removed",
    "manager.rules_removed",
    "manager.files_removed",
];
const SNAPSHOT: [&str; 4] =
    ["manager.paused", "manager.memory_copied", "manager.disk_copied", "manager.goes_on"];
/// A step of a creation from a copy with memory.
const FROM_MEMORY: [&str; 1] = ["manager.memory_loaded"];
const IMAGE: [&str; 1] = ["manager.image_unpacked"];

/// Steps of a server: sending the image that the first microVM needs …
const SEND: [&str; 2] = ["image.container_made", "image.sent"];
/// … making a workspace, as its own manager or as that manager's client (the agent of the workspace that is kept is greeted
/// first, at the start) …
const CREATE: [&str; 5] =
    ["create.placed", "manager.disk_made", "manager.machine_started", "sandbox.made", "sandbox.greeted@2"];
/// … and what comes after.
const STOP_WORKSPACE: [&str; 2] = ["manager.process_killed", "stop.sandbox_stopped"];
const RESUME: [&str; 1] = ["sandbox.started"];
const DESTROY_WORKSPACE: [&str; 2] = ["manager.jail_removed", "destroy.sandbox_removed"];
const CLAIM: [&str; 2] = ["fill.made", "claim.configured"];

/// So many interfaces the manager keeps ahead.
const INTERFACES_AHEAD: usize = 5;

/// A manager with a microVM that must outlive everything.
struct World {
    microvms: Microvms,
    manager: TestManager,
    kept: Value,
    /// Copies that shall be there.
    copies: BTreeSet<String>,
}

fn path(id: &str) -> String {
    format!("/v1/machines/{id}")
}

impl World {
    async fn start() -> Self {
        let microvms = Microvms::find(BINARY);
        let ahead = INTERFACES_AHEAD.to_string();
        let manager = TestManager::start(&microvms, BINARY, &[("FIRECRACKER_WARM_POOL_SIZE", &ahead)]).await;
        let asked = manager.asked(&microvms).await;
        let id = WorkspaceId::generate().to_string();
        let kept = manager.request("PUT", &path(&id), Some(asked)).await.ok();
        Self { microvms, manager, kept, copies: BTreeSet::new() }
    }

    /// A request for a microVM.
    async fn asked(&self) -> Value {
        self.manager.asked(&self.microvms).await
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
                // A few are made ahead.
                Some(("interface", name)) => {
                    let index = name.rsplit_once('-').and_then(|(_, index)| index.parse::<usize>().ok());
                    interfaces.contains(name) || index.is_some_and(|index| index < INTERFACES_AHEAD)
                }
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
                    Some(("snapshots", file)) => self.copies.iter().any(|id| file.starts_with(id.as_str())),
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
        let asked = world.asked().await;
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
    let asked = world.asked().await;
    world.die(STARTED[0], "PUT", &path(&id), Some(asked.clone())).await;
    assert_eq!(world.phase(&id).await, "running");
    for step in STOP {
        world.die(step, "POST", &format!("{}/stop", path(&id)), None).await;
        let stopped = world.manager.request("GET", &path(&id), None).await.ok();
        assert_eq!((&stopped["phase"], &stopped["ended"]), (&json!("stopped"), &Value::Null), "{step}");
        let start = format!("{}/start", path(&id));
        if step == STOP[0] {
            // It was powered off, not killed: its file system has nothing to recover.
            let disk = world.manager.directory().join("machines").join(&id).join("disk.ext4");
            let described = run("dumpe2fs", &["-h", disk.to_str().unwrap()]);
            assert!(!described.contains("needs_recovery"), "{described}");
            // Nor does it keep a slot that it was given to start in.
            world.die(STARTING[0], "POST", &start, None).await;
            assert_eq!(world.manager.request("GET", &path(&id), None).await.ok(), stopped);
        }
        world.manager.request("POST", &start, None).await.ok();
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
    let body = |memory: bool| json!({ "machine": world.kept["id"], "memory": memory });
    let (disk, memory) = (body(false), body(true));
    let of_disk =
        SNAPSHOT.into_iter().filter(|step| *step != "manager.memory_copied").map(|step| (step, &disk));
    for (step, body) in of_disk.chain(SNAPSHOT.map(|step| (step, &memory))) {
        let copy = SnapshotId::generate();
        world.die(step, "PUT", &format!("/v1/snapshots/{copy}"), Some(body.clone())).await;
        let listed = world.manager.request("GET", "/v1/snapshots", None).await.ok();
        assert_eq!(listed["snapshots"], json!([]), "{step}");
    }
    let copy = SnapshotId::generate();
    let snapshot = format!("/v1/snapshots/{copy}");
    world.manager.request("PUT", &snapshot, Some(memory)).await.ok();
    let mut asked = world.asked().await;
    asked["snapshot"] = json!(copy);
    world.copies.insert(copy.to_string());
    for step in FROM_MEMORY {
        let id = WorkspaceId::generate().to_string();
        world.die(step, "PUT", &path(&id), Some(asked.clone())).await;
        assert_eq!(world.phase(&id).await, "stopped", "{step}");
        world.manager.request("DELETE", &path(&id), None).await.ok();
    }
    world.manager.request("DELETE", &snapshot, None).await.ok();
    world.copies.clear();
    world.manager.terminate();
    world.manager.start_again(&[("EMERGENT_FAILPOINT", IMAGE[0])]).await;
    world.manager.put_image("/v1/images/another", "emergent/test-empty:latest").await;
    world.manager.wait_until_killed();
    world.manager.start_again(&[]).await;
    world.check(IMAGE[0]).await;
    world.manager.request("GET", "/v1/images/another", None).await.error(404);
    world.end().await;
}

const WORKSPACES: &str = "/api/v1/agent/workspaces";

/// A server that is its own manager, with a workspace that must outlive everything.
struct Served {
    microvms: Microvms,
    server: TestServer,
    kept: String,
}

impl Served {
    fn directory(&self) -> PathBuf {
        self.server.data_dir().join("firecracker")
    }

    async fn die(&mut self, step: &str, method: &str, path: &str, body: Option<Value>) {
        self.server.terminate();
        self.server.start_again_with(&[("EMERGENT_FAILPOINT", step)]).await;
        self.server.request_in_vain(method, path, body).await;
        self.server.wait_until_killed();
        self.server.start_again().await;
        wait_until_recovered(&self.directory()).await;
        self.check(step).await;
    }

    async fn ids(&self) -> BTreeSet<String> {
        let listed = self.server.request("GET", WORKSPACES, None).await.ok();
        let all = listed["workspaces"].as_array().unwrap().iter();
        all.map(|workspace| workspace["id"].as_str().unwrap().to_owned()).collect()
    }

    /// Asserts that there is a microVM for each workspace and each spare, and nothing else.
    async fn check(&self, step: &str) {
        let pool = self.server.request("GET", "/api/v1/agent/pool", None).await.ok();
        let spares: u64 =
            pool["shapes"].as_array().unwrap().iter().map(|shape| shape["size"].as_u64().unwrap()).sum();
        self.server.wait_for_pool(spares).await;
        let ids = self.ids().await;
        let listed = ask_manager(&self.directory(), "GET", "/v1/machines", None).await.ok();
        let machines: BTreeSet<String> = listed["machines"]
            .as_array()
            .unwrap()
            .iter()
            .map(|machine| machine["id"].as_str().unwrap().to_owned())
            .collect();
        assert!(machines.is_superset(&ids), "{step}: {ids:?} {machines:?}");
        assert_eq!(machines.len() as u64, ids.len() as u64 + spares, "{step}: {ids:?} {machines:?}");
        for left in leftovers_of_manager(&self.directory()) {
            let named = machines.iter().any(|id| left.contains(id.as_str()));
            let is_shared =
                ["interface ", "rule ", "control group "].iter().any(|kind| left.starts_with(kind));
            assert!(named || is_shared, "{step}: {left}");
        }
        let label = format!("label=emergent.installation={}", self.server.installation());
        let containers = run("docker", &["ps", "--all", "--quiet", "--filter", &label]);
        assert_eq!(containers, "", "{step}: a container is left");
        assert_eq!(self.server.bash(&self.kept, "cat kept").await, "kept\n", "{step}");
    }
}

#[tokio::test]
async fn killed_while_a_server_makes_its_first_microvm() {
    let microvms = Microvms::find(BINARY);
    // Without the images of other tests.
    let mut server = TestServer::start_with(BINARY, &microvms.environment(&[])).await;
    for step in SEND {
        server.terminate();
        server.start_again_with(&[("EMERGENT_FAILPOINT", step)]).await;
        server.request_in_vain("POST", WORKSPACES, Some(microvms.small())).await;
        server.wait_until_killed();
        server.start_again().await;
        wait_until_recovered(&server.data_dir().join("firecracker")).await;
        // But for the interfaces that a manager that runs has made ahead.
        let left = server.leftovers().into_iter().filter(|left| !left.starts_with("interface "));
        assert_eq!(left.collect::<Vec<_>>(), Vec::<String>::new(), "{step}");
    }
    let id = server.create(microvms.small()).await;
    server.destroy(&id).await;
    microvms.keep_images(&server.data_dir().join("firecracker"));
    server.stop();
}

#[tokio::test]
async fn killed_while_a_server_uses_microvms() {
    let microvms = Microvms::find(BINARY);
    let server = microvms.start(BINARY, &[]).await;
    let kept = server.create(microvms.small()).await;
    server.bash(&kept, "echo kept > kept").await;
    let mut served = Served { microvms, server, kept };
    let small = served.microvms.small();
    for step in CREATE {
        served.die(step, "POST", WORKSPACES, Some(small.clone())).await;
        assert_eq!(served.ids().await.len(), 1, "{step}");
    }
    let id = served.server.create(small.clone()).await;
    let path = format!("{WORKSPACES}/{id}");
    for step in STOP_WORKSPACE {
        served.die(step, "POST", &format!("{path}/stop"), None).await;
        assert_eq!(served.server.request("GET", &path, None).await.ok()["status"], "stopped", "{step}");
        if step != STOP_WORKSPACE[1] {
            served.server.request("POST", &format!("{path}/resume"), None).await.ok();
        }
    }
    for step in RESUME {
        served.die(step, "POST", &format!("{path}/resume"), None).await;
        served.server.request("POST", &format!("{path}/resume"), None).await.ok();
        assert_eq!(served.server.bash(&id, "echo back").await, "back\n", "{step}");
    }
    served.die(DESTROY_WORKSPACE[0], "DELETE", &path, None).await;
    assert_eq!(served.ids().await.len(), 1);
    let id = served.server.create(small.clone()).await;
    served.die(DESTROY_WORKSPACE[1], "DELETE", &format!("{WORKSPACES}/{id}"), None).await;
    assert_eq!(served.ids().await.len(), 1);
    let mut shape = small.clone();
    shape["size"] = json!(1);
    served.die(CLAIM[0], "PUT", "/api/v1/agent/pool", Some(json!({ "shapes": [shape] }))).await;
    served.die(CLAIM[1], "POST", WORKSPACES, Some(small)).await;
    assert_eq!(served.ids().await.len(), 1);
    served.server.turn_pool_off().await;
    served.server.destroy(&served.kept).await;
    served.microvms.keep_images(&served.directory());
    served.server.stop();
}

#[test]
fn every_failpoint_is_in_this_suite() {
    let lists: [&[&str]; 14] = [
        &BEFORE,
        &STARTING,
        &STARTED,
        &STOP,
        &DESTROY,
        &SNAPSHOT,
        &FROM_MEMORY,
        &IMAGE,
        &SEND,
        &CREATE,
        &STOP_WORKSPACE,
        &RESUME,
        &DESTROY_WORKSPACE,
        &CLAIM,
    ];
    let tried: BTreeSet<&str> =
        lists.iter().flat_map(|list| list.iter()).map(|step| step.split('@').next().unwrap()).collect();
    let own = std::env::var("CARGO_MANIFEST_DIR").unwrap();
    let crates = Path::new(&own).parent().unwrap();
    for source in ["firecracker-manager/src", "providers/src/firecracker"] {
        let text = run("grep", &["-rhoE", r#"failpoint!\("[^"]+"#, crates.join(source).to_str().unwrap()]);
        for there in text.lines().map(|line| line.trim_start_matches("failpoint!(\"")) {
            assert!(tried.contains(there), "{there} is not tried");
        }
    }
}
