//! The Firecracker manager, and a server that runs a manager itself, are killed with SIGKILL at each step of each change, and
//! started again. Then running microVMs still run, a microVM that was being made is complete or can be removed, and nothing else is
//! left.
//!
//! The steps are the failpoints of the manager and its client. `every_failpoint_of_microvms_is_in_this_suite` asserts that the lists
//! are complete.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use emergent_test_support::command::{pgrep, run};
use emergent_test_support::microvm::{Microvms, TestManager, ask_manager, wait_until_recovered};
use emergent_test_support::server::{TestServer, WORKSPACES, leftovers_of_manager};
use emergent_wire::{SnapshotId, WorkspaceId};
use serde_json::{Value, json};

const BINARY: &str = env!("CARGO_BIN_EXE_emergent");

/// Steps of a create. After a kill at one of them, recovery removes the microVM.
const BEFORE: [&str; 3] = ["manager.reserved", "manager.disk_copied", "manager.disk_made"];
/// Steps of a start. After a kill at one of them, the microVM is stopped, and the caller can start or remove it.
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
    ["manager.paused", "manager.memory_copied", "manager.disk_copied", "manager.unpaused"];
/// A step of a create from a snapshot with memory.
const FROM_MEMORY: [&str; 1] = ["manager.memory_loaded"];
const IMAGE: [&str; 1] = ["manager.image_unpacked"];

/// Steps of a server that uploads the first image.
const SEND: [&str; 2] = ["image.container_made", "image.sent"];
/// Steps of a server that creates a workspace. `@2` is the second hit: at its start the server first greets the agent of the kept
/// workspace.
const CREATE: [&str; 5] =
    ["create.placed", "manager.disk_made", "manager.machine_started", "sandbox.made", "sandbox.greeted@2"];
/// Steps of a server that changes a workspace.
const STOP_WORKSPACE: [&str; 2] = ["manager.process_killed", "stop.sandbox_stopped"];
const RESUME: [&str; 1] = ["sandbox.started"];
const DESTROY_WORKSPACE: [&str; 2] = ["manager.jail_removed", "destroy.sandbox_removed"];
const CLAIM: [&str; 2] = ["fill.made", "claim.configured"];

/// The number of interfaces that the manager makes ahead.
const INTERFACES_AHEAD: usize = 5;

/// A manager with a microVM that must survive every kill.
struct World {
    microvms: Microvms,
    manager: TestManager,
    kept: Value,
    /// The snapshots that must exist.
    snapshots: BTreeSet<String>,
}

fn path(id: &str) -> String {
    format!("/v1/machines/{id}")
}

impl World {
    async fn start() -> Self {
        let microvms = Microvms::find(BINARY);
        let ahead = INTERFACES_AHEAD.to_string();
        let manager = TestManager::start(&microvms, BINARY, &[("FIRECRACKER_WARM_POOL_SIZE", &ahead)]).await;
        let request = manager.machine_request(&microvms).await;
        let id = WorkspaceId::generate().to_string();
        let kept = manager.request("PUT", &path(&id), Some(request)).await.ok();
        Self { microvms, manager, kept, snapshots: BTreeSet::new() }
    }

    /// The body of a request for a microVM.
    async fn machine_request(&self) -> Value {
        self.manager.machine_request(&self.microvms).await
    }

    /// Kills the manager at a step of a request, starts it again and checks the host.
    async fn kill_at(&mut self, step: &str, method: &str, path: &str, body: Option<Value>) {
        self.manager.terminate();
        self.manager.start_again(&[("EMERGENT_FAILPOINT", step)]).await;
        self.manager.request_ignoring_outcome(method, path, body).await;
        self.manager.wait_until_killed();
        self.manager.start_again(&[]).await;
        self.check(step).await;
    }

    /// Asserts that the kept microVM is unchanged, and that everything on the host belongs to a microVM of the manager's list.
    async fn check(&self, step: &str) {
        let kept = self.manager.request("GET", &path(self.kept["id"].as_str().unwrap()), None).await.ok();
        assert_eq!(kept, self.kept, "{step}");
        // A snapshot needs an answer of its agent, which flushes the disk.
        let snapshot = format!("/v1/snapshots/{}", SnapshotId::generate());
        let body = json!({ "machine": self.kept["id"] });
        self.manager.request("PUT", &snapshot, Some(body)).await.ok();
        self.manager.request("DELETE", &snapshot, None).await.ok();
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
                // Interfaces that are made ahead have no microVM.
                Some(("interface", name)) => {
                    let index = name.rsplit_once('-').and_then(|(_, index)| index.parse::<usize>().ok());
                    interfaces.contains(name) || index.is_some_and(|index| index < INTERFACES_AHEAD)
                }
                Some(("process", line)) => running.iter().any(|id| line.contains(id.as_str())),
                // A rule with the name of an interface belongs to that interface. Other rules belong to the manager.
                Some(("rule", line)) => {
                    let named = line.split(' ').skip_while(|word| *word != "-i" && *word != "-o").nth(1);
                    named.is_none_or(|name| name.ends_with('+') || interfaces.contains(name))
                }
                Some(("control", _)) => true,
                _ => match left.rsplit_once('/') {
                    Some(("jails/firecracker", id)) => running.contains(id),
                    Some(("machines", id)) => ids.contains(id),
                    Some(("snapshots", file)) => {
                        self.snapshots.iter().any(|id| file.starts_with(id.as_str()))
                    }
                    _ => false,
                },
            };
            assert!(is_known, "{step}: {left}");
        }
        for id in &running {
            assert_ne!(pgrep(&["-f", "--", id]), "", "{step}: {id} does not run");
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
async fn manager_recovers_from_a_kill_at_each_step_of_create() {
    let mut world = World::start().await;
    for (step, expected) in
        BEFORE.map(|step| (step, "gone")).into_iter().chain(STARTING.map(|step| (step, "stopped")))
    {
        let id = WorkspaceId::generate().to_string();
        let request = world.machine_request().await;
        world.kill_at(step, "PUT", &path(&id), Some(request.clone())).await;
        assert_eq!(world.phase(&id).await, expected, "{step}");
        // The same request again makes it.
        if ["manager.disk_made", "manager.machine_started"].contains(&step) {
            let made = world.manager.request("PUT", &path(&id), Some(request)).await.ok();
            assert_eq!(made["phase"], "running", "{step}");
        }
        world.manager.request("DELETE", &path(&id), None).await.ok();
    }
    world.end().await;
}

#[tokio::test]
async fn manager_recovers_from_a_kill_at_each_step_of_stop_and_remove() {
    let mut world = World::start().await;
    let id = WorkspaceId::generate().to_string();
    let request = world.machine_request().await;
    world.kill_at(STARTED[0], "PUT", &path(&id), Some(request.clone())).await;
    assert_eq!(world.phase(&id).await, "running");
    for step in STOP {
        world.kill_at(step, "POST", &format!("{}/stop", path(&id)), None).await;
        let stopped = world.manager.request("GET", &path(&id), None).await.ok();
        assert_eq!((&stopped["phase"], &stopped["ended"]), (&json!("stopped"), &Value::Null), "{step}");
        let start = format!("{}/start", path(&id));
        if step == STOP[0] {
            // It was powered off and not killed, so its file system needs no recovery.
            let disk = world.manager.directory().join("machines").join(&id).join("disk.ext4");
            let described = run("dumpe2fs", &["-h", disk.to_str().unwrap()]);
            assert!(!described.contains("needs_recovery"), "{described}");
            // After a kill during a start it is stopped again, without a slot.
            world.kill_at(STARTING[0], "POST", &start, None).await;
            assert_eq!(world.manager.request("GET", &path(&id), None).await.ok(), stopped);
        }
        world.manager.request("POST", &start, None).await.ok();
    }
    for step in DESTROY {
        world.kill_at(step, "DELETE", &path(&id), None).await;
        assert_eq!(world.phase(&id).await, "gone", "{step}");
        world.manager.request("PUT", &path(&id), Some(request.clone())).await.ok();
    }
    world.manager.request("DELETE", &path(&id), None).await.ok();
    world.end().await;
}

#[tokio::test]
async fn manager_recovers_from_a_kill_at_each_step_of_snapshots_and_images() {
    let mut world = World::start().await;
    let body = |memory: bool| json!({ "machine": world.kept["id"], "memory": memory });
    let (disk, memory) = (body(false), body(true));
    let of_disk =
        SNAPSHOT.into_iter().filter(|step| *step != "manager.memory_copied").map(|step| (step, &disk));
    for (step, body) in of_disk.chain(SNAPSHOT.map(|step| (step, &memory))) {
        let id = SnapshotId::generate();
        world.kill_at(step, "PUT", &format!("/v1/snapshots/{id}"), Some(body.clone())).await;
        let listed = world.manager.request("GET", "/v1/snapshots", None).await.ok();
        assert_eq!(listed["snapshots"], json!([]), "{step}");
    }
    let id = SnapshotId::generate();
    let snapshot = format!("/v1/snapshots/{id}");
    world.manager.request("PUT", &snapshot, Some(memory)).await.ok();
    let mut request = world.machine_request().await;
    request["snapshot"] = json!(id);
    world.snapshots.insert(id.to_string());
    for step in FROM_MEMORY {
        let id = WorkspaceId::generate().to_string();
        world.kill_at(step, "PUT", &path(&id), Some(request.clone())).await;
        assert_eq!(world.phase(&id).await, "stopped", "{step}");
        world.manager.request("DELETE", &path(&id), None).await.ok();
    }
    world.manager.request("DELETE", &snapshot, None).await.ok();
    world.snapshots.clear();
    world.manager.terminate();
    world.manager.start_again(&[("EMERGENT_FAILPOINT", IMAGE[0])]).await;
    world.manager.put_image("/v1/images/another", "emergent/test-empty:latest").await;
    world.manager.wait_until_killed();
    world.manager.start_again(&[]).await;
    world.check(IMAGE[0]).await;
    world.manager.request("GET", "/v1/images/another", None).await.error(404);
    world.end().await;
}

/// A server that runs a manager itself, with a workspace that must survive every kill.
struct ServerWorld {
    microvms: Microvms,
    server: TestServer,
    kept: String,
}

impl ServerWorld {
    fn directory(&self) -> PathBuf {
        self.server.data_dir().join("firecracker")
    }

    /// Kills the server at a step of a request, starts it again and checks the host.
    async fn kill_at(&mut self, step: &str, method: &str, path: &str, body: Option<Value>) {
        self.server.terminate();
        self.server.start_again_with(&[("EMERGENT_FAILPOINT", step)]).await;
        self.server.request_ignoring_outcome(method, path, body).await;
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

    /// Asserts that each workspace and each spare has a microVM, and that nothing else is on the host.
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
async fn server_recovers_from_a_kill_while_it_uploads_its_first_image() {
    let microvms = Microvms::find(BINARY);
    // The server starts without cached images.
    let mut server = TestServer::start_with(BINARY, &microvms.environment(&[])).await;
    for step in SEND {
        server.terminate();
        server.start_again_with(&[("EMERGENT_FAILPOINT", step)]).await;
        server.request_ignoring_outcome("POST", WORKSPACES, Some(microvms.small())).await;
        server.wait_until_killed();
        server.start_again().await;
        wait_until_recovered(&server.data_dir().join("firecracker")).await;
        // A running manager makes interfaces ahead.
        let left = server.leftovers().into_iter().filter(|left| !left.starts_with("interface "));
        assert_eq!(left.collect::<Vec<_>>(), Vec::<String>::new(), "{step}");
    }
    let id = server.create(microvms.small()).await;
    server.destroy(&id).await;
    microvms.keep_images(&server.data_dir().join("firecracker"));
    server.stop();
}

#[tokio::test]
async fn server_recovers_from_a_kill_at_each_step_of_changing_microvms() {
    let microvms = Microvms::find(BINARY);
    let server = microvms.start(BINARY, &[]).await;
    let kept = server.create(microvms.small()).await;
    server.bash(&kept, "echo kept > kept").await;
    let mut world = ServerWorld { microvms, server, kept };
    let small = world.microvms.small();
    for step in CREATE {
        world.kill_at(step, "POST", WORKSPACES, Some(small.clone())).await;
        assert_eq!(world.ids().await.len(), 1, "{step}");
    }
    let id = world.server.create(small.clone()).await;
    let path = format!("{WORKSPACES}/{id}");
    for step in STOP_WORKSPACE {
        world.kill_at(step, "POST", &format!("{path}/stop"), None).await;
        assert_eq!(world.server.request("GET", &path, None).await.ok()["status"], "stopped", "{step}");
        if step != STOP_WORKSPACE[1] {
            world.server.request("POST", &format!("{path}/resume"), None).await.ok();
        }
    }
    for step in RESUME {
        world.kill_at(step, "POST", &format!("{path}/resume"), None).await;
        world.server.request("POST", &format!("{path}/resume"), None).await.ok();
        assert_eq!(world.server.bash(&id, "echo back").await, "back\n", "{step}");
    }
    world.kill_at(DESTROY_WORKSPACE[0], "DELETE", &path, None).await;
    assert_eq!(world.ids().await.len(), 1);
    let id = world.server.create(small.clone()).await;
    world.kill_at(DESTROY_WORKSPACE[1], "DELETE", &format!("{WORKSPACES}/{id}"), None).await;
    assert_eq!(world.ids().await.len(), 1);
    let mut shape = small.clone();
    shape["size"] = json!(1);
    world.kill_at(CLAIM[0], "PUT", "/api/v1/agent/pool", Some(json!({ "shapes": [shape] }))).await;
    world.kill_at(CLAIM[1], "POST", WORKSPACES, Some(small)).await;
    assert_eq!(world.ids().await.len(), 1);
    world.server.turn_pool_off().await;
    world.server.destroy(&world.kept).await;
    world.microvms.keep_images(&world.directory());
    world.server.stop();
}

#[test]
fn every_failpoint_of_microvms_is_in_this_suite() {
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
    let tested: BTreeSet<&str> =
        lists.iter().flat_map(|list| list.iter()).map(|step| step.split('@').next().unwrap()).collect();
    let own = std::env::var("CARGO_MANIFEST_DIR").unwrap();
    let crates = Path::new(&own).parent().unwrap();
    for source in ["firecracker-manager/src", "providers/src/firecracker"] {
        let text = run("grep", &["-rhoE", r#"failpoint!\("[^"]+"#, crates.join(source).to_str().unwrap()]);
        for there in text.lines().map(|line| line.trim_start_matches("failpoint!(\"")) {
            assert!(tested.contains(there), "{there} is not tested");
        }
    }
}
