//! The server is killed with SIGKILL at each step of each change, and started again. Then the change is complete or undone, nothing
//! else is left on the host, and ready workspaces still answer.
//!
//! The steps are the failpoints of the code. `every_failpoint_of_the_server_is_in_this_suite` asserts that the lists are complete.
//! The failpoints of microVMs are in `firecracker_kill_anywhere.rs`.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use emergent_test_support::command::run;
use emergent_test_support::mcp::{self, SERVERS};
use emergent_test_support::server::{POOL, TestServer, WORKSPACES};
use emergent_test_support::wait::wait_until;
use serde_json::{Value, json};

const BINARY: &str = env!("CARGO_BIN_EXE_emergent");

/// Steps of every start of a sandbox. `@2` is the second hit: at its start the server first greets the agent of the kept workspace.
const SANDBOX: [&str; 5] =
    ["disk.made", "sandbox.made", "sandbox.attached", "sandbox.started", "sandbox.greeted@2"];
const CREATE: [&str; 5] =
    ["create.row_written", "create.placed", "create.sandbox_made", "create.metadata_written", "create.ready"];
const STOP: [&str; 3] = ["stop.row_written", "stop.sandbox_stopped", "stop.done"];
const RESUME: [&str; 6] = [
    "resume.ownership_taken",
    "sandbox.attached",
    "sandbox.started",
    "sandbox.greeted@2",
    "resume.sandbox_started",
    "resume.ready",
];
const DESTROY: [&str; 7] = [
    "destroy.row_written",
    "destroy.commands_ended",
    "sandbox.container_removed",
    "sandbox.volume_removed",
    "disk.detached",
    "destroy.sandbox_removed",
    "destroy.row_deleted",
];
const SNAPSHOT: [&str; 5] =
    ["snapshot.row_written", "snapshot.paused", "snapshot.copied", "snapshot.unpaused", "snapshot.ready"];
const DELETE_SNAPSHOT: [&str; 3] = ["snapshot.withdrawn", "snapshot.removed", "snapshot.row_deleted"];
const FROM_SNAPSHOT: [&str; 4] =
    ["create.row_written", "disk.made", "sandbox.started", "create.sandbox_made"];
const FILL: [&str; 7] = [
    "fill.row_written",
    "disk.made",
    "sandbox.made",
    "sandbox.started",
    "sandbox.greeted@2",
    "fill.made",
    "fill.ready",
];
const CLAIM: [&str; 3] = ["claim.row_written", "claim.configured", "claim.ready"];
const WITHDRAW: [&str; 4] =
    ["withdraw.row_written", "sandbox.container_removed", "withdraw.destroyed", "withdraw.row_deleted"];
const EXPIRE: [&str; 4] =
    ["sweep.found", "sweep.row_written", "sandbox.container_removed", "destroy.sandbox_removed"];
/// Steps of registering an MCP server. After a kill at one of them, it is registered.
const HOSTED: [&str; 4] = ["create.ready", "mcp.registered", "mcp.sandbox_reached", "mcp.process_started"];
const HOST: [&str; 3] = ["disk.made", "sandbox.started", "create.sandbox_made"];
const HOST_AGAIN: [&str; 2] = ["mcp.process_ended", "mcp.renewed"];
const UNHOST: [&str; 4] =
    ["mcp.remove_written", "sandbox.container_removed", "sandbox.volume_removed", "destroy.sandbox_removed"];
const STOP_IDLE: [&str; 2] = ["sweep.row_written", "stop.sandbox_stopped"];

/// `external_faults.rs` tests these steps, because they need a restored database.
const QUARANTINE: [&str; 4] = [
    "quarantine.row_written",
    "quarantine.container_removed",
    "quarantine.disk_moved",
    "quarantine.sandbox_ended",
];

/// A server with a workspace that must survive every kill.
struct World {
    server: TestServer,
    kept: String,
}

impl World {
    async fn start(settings: &[(&str, &str)]) -> Self {
        let server = TestServer::start_with(BINARY, settings).await;
        let kept = server.create(json!({})).await;
        server.bash(&kept, "echo kept > /workspace/kept; echo also > /srv/also").await;
        Self { server, kept }
    }

    /// Restarts the server with a failpoint.
    async fn arm(&mut self, step: &str) {
        self.server.terminate();
        self.server.start_again_with(&[("EMERGENT_FAILPOINT", step)]).await;
    }

    /// Kills the server at a step of its background work with this setting, starts it again without the setting, and checks the
    /// host.
    async fn kill_in_background_at(&mut self, step: &str, setting: (&str, &str)) {
        self.server.terminate();
        self.server.start_again_without_waiting(&[("EMERGENT_FAILPOINT", step), setting]);
        self.recover(step).await;
    }

    /// Kills the server at a step of a request, starts it again and checks the host.
    async fn kill_at(&mut self, step: &str, method: &str, path: &str, body: Option<Value>) {
        self.arm(step).await;
        self.server.request_ignoring_outcome(method, path, body).await;
        self.recover(step).await;
    }

    async fn recover(&mut self, step: &str) {
        self.server.wait_until_killed();
        self.server.start_again().await;
        self.check(step).await;
    }

    async fn workspaces(&self) -> Vec<Value> {
        let listed = self.server.request("GET", WORKSPACES, None).await.ok();
        listed["workspaces"].as_array().unwrap().clone()
    }

    /// Waits until the pool has its wanted number of spares, and returns the number.
    async fn wait_for_wanted_spares(&self) -> u64 {
        let pool = self.server.request("GET", POOL, None).await.ok();
        let wanted =
            pool["shapes"].as_array().unwrap().iter().map(|shape| shape["size"].as_u64().unwrap()).sum();
        self.server.wait_for_pool(wanted).await;
        wanted
    }

    /// Asserts that everything on the host belongs to a workspace, spare or snapshot of the server's lists, that nothing of them is
    /// missing, and that the kept workspace works.
    async fn check(&self, step: &str) {
        let spares = self.wait_for_wanted_spares().await;
        let workspaces = self.workspaces().await;
        for workspace in &workspaces {
            let status = workspace["status"].as_str().unwrap();
            assert!(matches!(status, "ready" | "stopped"), "{step}: {workspace}");
        }
        let ids: BTreeSet<String> =
            workspaces.iter().map(|workspace| workspace["id"].as_str().unwrap().to_owned()).collect();
        let filter = format!("label=emergent.installation={}", self.server.installation());
        let list = |arguments: &[&str]| -> BTreeSet<String> {
            let text = run("docker", &[arguments, &["--filter", &filter]].concat());
            text.lines().map(|line| line.trim_start_matches("agent-workspace-").to_owned()).collect()
        };
        // Only objects of a workspace have this label. Others belong to the installation.
        let owned = "label=emergent.workspace";
        let containers = list(&["ps", "--all", "--format", "{{.Names}}", "--filter", owned]);
        let spare_ids: BTreeSet<String> = containers.difference(&ids).cloned().collect();
        assert_eq!(
            spare_ids.len() as u64,
            spares,
            "{step}: {spare_ids:?} belong to no workspace\n{}",
            self.server.log()
        );
        assert!(containers.is_superset(&ids), "{step}: {ids:?} are not all in {containers:?}");
        // MCP servers also have named volumes.
        let named: Vec<(&str, &str)> = workspaces.iter().flat_map(named_volumes).collect();
        let mut volumes = containers.clone();
        volumes.extend(named.iter().map(|(id, name)| format!("{id}-{name}")));
        let found = list(&["volume", "ls", "--format", "{{.Name}}", "--filter", owned]);
        assert_eq!(found, volumes, "{step}: volumes");
        let paused = list(&["ps", "--format", "{{.Names}}", "--filter", "status=paused"]);
        assert_eq!(paused, BTreeSet::new(), "{step}: paused");
        assert_eq!(list(&["network", "ls", "--format", "{{.Name}}"]).len(), 1, "{step}: networks");

        let files = |directory: &str| -> BTreeSet<String> {
            let entries = std::fs::read_dir(self.server.data_dir().join(directory)).unwrap();
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
        };
        let named_disks = named.iter().map(|(id, name)| format!("{id}.{name}"));
        let disks: BTreeSet<String> = containers.iter().cloned().chain(named_disks).collect();
        let disk_files =
            disks.iter().flat_map(|disk| [format!("{disk}.img"), format!("{disk}.dev")]).collect();
        assert_eq!(files("disks"), disk_files, "{step}: disks");
        let loops = run("losetup", &["--noheadings", "--output", "BACK-FILE"]);
        let directory = self.server.data_dir().join("disks");
        let loops: Vec<&str> =
            loops.lines().filter(|line| line.contains(directory.to_str().unwrap())).collect();
        assert_eq!(loops.len(), disks.len(), "{step}: {loops:?}");
        assert!(loops.iter().all(|line| !line.contains("(deleted)")), "{step}: {loops:?}");
        let listed = self.server.request("GET", &format!("{WORKSPACES}/snapshots"), None).await.ok();
        let snapshots = listed["snapshots"].as_array().unwrap();
        assert!(snapshots.iter().all(|snapshot| snapshot["status"] == "ready"), "{step}: {listed}");
        let copies =
            snapshots.iter().map(|snapshot| format!("{}.img", snapshot["id"].as_str().unwrap())).collect();
        assert_eq!(files("snapshots"), copies, "{step}: snapshots");

        let alive = self.server.bash(&self.kept, "cat /workspace/kept /srv/also").await;
        assert_eq!(alive, "kept\nalso\n", "{step}");
    }

    /// Destroys all workspaces but the kept one.
    async fn clear(&self) {
        for workspace in self.workspaces().await {
            let id = workspace["id"].as_str().unwrap();
            if id != self.kept {
                self.server.destroy(id).await;
            }
        }
    }

    async fn end(self) {
        self.clear().await;
        self.server.destroy(&self.kept).await;
        self.server.stop();
    }
}

/// The named volumes of an MCP server.
fn named_volumes(workspace: &Value) -> impl Iterator<Item = (&str, &str)> {
    let volumes = workspace["mcp_config"]["volumes"].as_array().into_iter().flatten();
    volumes.map(|volume| (workspace["id"].as_str().unwrap(), volume["name"].as_str().unwrap()))
}

#[tokio::test]
async fn server_recovers_from_a_kill_at_each_step_of_hosting_an_mcp_server() {
    let mut world = World::start(&[]).await;
    let hosted = format!("{SERVERS}/hosted");
    let body = json!({ "name": "hosted", "image": mcp::image(BINARY), "volumes": ["data:/data"] });
    let works = async |world: &World, step: &str| {
        world.server.wait_for_status("hosted", "ready").await;
        assert_eq!(world.server.mcp_text("hosted", "echo", json!({ "text": step })).await, step);
        // The process does not run twice.
        assert_eq!(world.server.mcp_server("hosted").await["usage"]["processes"], 1, "{step}");
    };
    for step in HOST {
        world.kill_at(step, "POST", SERVERS, Some(body.clone())).await;
        world.server.request("GET", &hosted, None).await.error(404);
    }
    for step in HOSTED {
        world.kill_at(step, "POST", SERVERS, Some(body.clone())).await;
        works(&world, step).await;
        world.server.remove_mcp("hosted").await;
    }
    world.server.request("POST", SERVERS, Some(body)).await.ok();
    for step in ["mcp.sandbox_reached", "mcp.process_started"] {
        world.kill_in_background_at(step, ("EMERGENT_LOG", "info")).await;
        works(&world, step).await;
    }
    for (step, path) in HOST_AGAIN.into_iter().zip(["call", "restart"]) {
        let crash =
            json!({ "method": "tools/call", "params": { "name": "crash", "arguments": { "code": 1 } } });
        world.arm(step).await;
        world.server.wait_for_status("hosted", "ready").await;
        world.server.request_ignoring_outcome("POST", &format!("{hosted}/{path}"), Some(crash)).await;
        world.recover(step).await;
        works(&world, step).await;
    }
    for step in UNHOST {
        world.kill_at(step, "DELETE", &hosted, None).await;
        world.server.request("GET", &hosted, None).await.error(404);
        let body = json!({ "name": "hosted", "image": mcp::image(BINARY), "volumes": ["data:/data"] });
        world.server.request("POST", SERVERS, Some(body)).await.ok();
    }
    world.server.remove_mcp("hosted").await;
    world.end().await;
}

#[tokio::test]
async fn server_recovers_from_a_kill_at_each_step_of_create() {
    let mut world = World::start(&[]).await;
    for step in CREATE.into_iter().chain(SANDBOX) {
        world.kill_at(step, "POST", WORKSPACES, Some(json!({}))).await;
        // The create is complete or undone. A complete one is a workspace, though its caller got no answer.
        let made = world.workspaces().await.len() - 1;
        assert_eq!(made, usize::from(step == "create.ready"), "{step}");
        world.clear().await;
    }
    // A create that failed and is being undone.
    let body = json!({ "image": "emergent/no-such-image" });
    world.kill_at("create.undone", "POST", WORKSPACES, Some(body)).await;
    assert_eq!(world.workspaces().await.len(), 1);
    world.end().await;
}

#[tokio::test]
async fn server_recovers_from_a_kill_at_each_step_of_stop_and_resume() {
    let mut world = World::start(&[]).await;
    let id = world.server.create(json!({})).await;
    let path = format!("{WORKSPACES}/{id}");
    world.server.bash(&id, "echo mine > /workspace/f; echo other > /srv/g").await;
    for step in STOP {
        world.kill_at(step, "POST", &format!("{path}/stop"), None).await;
        assert_eq!(world.server.request("GET", &path, None).await.ok()["status"], "stopped", "{step}");
        world.server.request("POST", &format!("{path}/resume"), None).await.ok();
        assert_eq!(world.server.bash(&id, "cat f /srv/g").await, "mine\nother\n", "{step}");
    }
    for step in RESUME {
        world.server.request("POST", &format!("{path}/stop"), None).await.ok();
        world.kill_at(step, "POST", &format!("{path}/resume"), None).await;
        world.server.request("POST", &format!("{path}/resume"), None).await.ok();
        assert_eq!(world.server.bash(&id, "cat f /srv/g").await, "mine\nother\n", "{step}");
    }
    world.end().await;
}

#[tokio::test]
async fn server_recovers_from_a_kill_at_each_step_of_destroy() {
    let mut world = World::start(&[]).await;
    for step in DESTROY {
        let id = world.server.create(json!({})).await;
        world.kill_at(step, "DELETE", &format!("{WORKSPACES}/{id}"), None).await;
        world.server.request("GET", &format!("{WORKSPACES}/{id}"), None).await.error(404);
    }
    world.end().await;
}

#[tokio::test]
async fn server_recovers_from_a_kill_at_each_step_of_snapshots() {
    let mut world = World::start(&[]).await;
    let snapshots = format!("{WORKSPACES}/snapshots");
    let ids = async |world: &World| -> Vec<String> {
        let listed = world.server.request("GET", &snapshots, None).await.ok();
        let all = listed["snapshots"].as_array().unwrap().iter();
        all.map(|snapshot| snapshot["id"].as_str().unwrap().to_owned()).collect()
    };
    let copy = format!("{WORKSPACES}/{}/snapshot", world.kept);
    for step in SNAPSHOT {
        world.kill_at(step, "POST", &copy, None).await;
        let made = ids(&world).await;
        assert_eq!(made.len(), usize::from(step == "snapshot.ready"), "{step}");
        for id in made {
            world.server.request("DELETE", &format!("{snapshots}/{id}"), None).await.ok();
        }
    }
    for step in DELETE_SNAPSHOT {
        let made = world.server.request("POST", &copy, None).await.ok();
        let id = made["id"].as_str().unwrap();
        world.kill_at(step, "DELETE", &format!("{snapshots}/{id}"), None).await;
        assert_eq!(ids(&world).await.len(), 0, "{step}");
    }
    let made = world.server.request("POST", &copy, None).await.ok();
    for step in FROM_SNAPSHOT {
        let body = json!({ "snapshot_id": made["id"] });
        world.kill_at(step, "POST", &format!("{WORKSPACES}/from-snapshot"), Some(body)).await;
        assert_eq!(world.workspaces().await.len(), 1, "{step}");
    }
    let path = format!("{snapshots}/{}", made["id"].as_str().unwrap());
    world.server.request("DELETE", &path, None).await.ok();
    world.end().await;
}

#[tokio::test]
async fn server_recovers_from_a_kill_at_each_step_of_filling_the_pool() {
    let mut world = World::start(&[]).await;
    let one = json!({ "shapes": [{ "size": 1 }] });
    let none = json!({ "shapes": [] });
    for step in FILL {
        world.kill_at(step, "PUT", POOL, Some(one.clone())).await;
        assert_eq!(world.wait_for_wanted_spares().await, 1, "{step}");
        world.server.request("PUT", POOL, Some(none.clone())).await.ok();
        world.wait_for_wanted_spares().await;
    }
    for step in WITHDRAW {
        world.server.request("PUT", POOL, Some(one.clone())).await.ok();
        world.wait_for_wanted_spares().await;
        world.kill_at(step, "PUT", POOL, Some(none.clone())).await;
        assert_eq!(world.wait_for_wanted_spares().await, 0, "{step}");
    }
    world.end().await;
}

#[tokio::test]
async fn server_recovers_from_a_kill_at_each_step_of_claiming_a_spare() {
    let mut world = World::start(&[("WORKSPACE_WARM_POOL_SIZE", "1")]).await;
    for step in CLAIM {
        world.wait_for_wanted_spares().await;
        let body = json!({ "environment": { "SECRET": "hush" } });
        world.arm(step).await;
        world.wait_for_wanted_spares().await;
        // The server has adopted the spare and did not make it again. Now the spare is claimed.
        world.server.request_ignoring_outcome("POST", WORKSPACES, Some(body)).await;
        world.recover(step).await;
        let made: Vec<Value> =
            world.workspaces().await.into_iter().filter(|one| one["id"] != world.kept.as_str()).collect();
        assert_eq!(made.len(), usize::from(step == "claim.ready"), "{step}");
        for workspace in made {
            let id = workspace["id"].as_str().unwrap();
            assert_eq!(world.server.bash(id, "echo $SECRET").await, "hush\n");
        }
        world.clear().await;
    }
    world.server.turn_pool_off().await;
    world.end().await;
}

#[tokio::test]
async fn server_recovers_from_a_kill_at_each_step_of_expiry() {
    // No sweep runs before the failpoints are set.
    let settings = [
        ("WORKSPACE_SWEEP_EVERY_SECONDS", "100000"),
        ("WORKSPACE_MAX_CONCURRENT", "20"),
        ("EMERGENT_ALLOW_DOCKER", "true"),
    ];
    let mut world = World::start(&settings).await;
    // A sweep removes several at once, so each step needs a few.
    for _ in 0..13 {
        let doomed = json!({ "ttl_seconds": 60, "network": "isolated", "provider": "docker" });
        world.server.create(doomed).await;
    }
    world.server.advance_clock(61);
    for step in EXPIRE {
        world.kill_in_background_at(step, ("WORKSPACE_SWEEP_EVERY_SECONDS", "1")).await;
    }
    world.server.terminate();
    world.server.start_again_with(&[("WORKSPACE_SWEEP_EVERY_SECONDS", "1")]).await;
    let limit = Duration::from_secs(30);
    wait_until("expired workspaces are removed", limit, async || world.workspaces().await.len() == 1).await;
    world.check("after the last step").await;
    world.end().await;
}

#[tokio::test]
async fn server_recovers_from_a_kill_at_each_step_of_an_idle_stop() {
    let mut world = World::start(&[]).await;
    // A workspace with a command in the background is not idle.
    let sleep = json!({ "command": "sleep 1000", "background": true });
    world.server.tool(&world.kept, "bash", sleep).await.ok();
    let id = world.server.create(json!({ "network": "isolated" })).await;
    let path = format!("{WORKSPACES}/{id}");
    for step in STOP_IDLE {
        world.server.request("POST", &format!("{path}/resume"), None).await.ok();
        world.kill_in_background_at(step, ("WORKSPACE_IDLE_STOP_SECONDS", "10")).await;
        assert_eq!(world.server.request("GET", &path, None).await.ok()["status"], "stopped", "{step}");
    }
    world.end().await;
}

#[test]
fn every_failpoint_of_the_server_is_in_this_suite() {
    let lists: [&[&str]; 19] = [
        &HOST,
        &HOSTED,
        &HOST_AGAIN,
        &UNHOST,
        &SANDBOX,
        &CREATE,
        &STOP,
        &RESUME,
        &DESTROY,
        &SNAPSHOT,
        &DELETE_SNAPSHOT,
        &FROM_SNAPSHOT,
        &FILL,
        &CLAIM,
        &WITHDRAW,
        &EXPIRE,
        &STOP_IDLE,
        &["create.undone"],
        &QUARANTINE,
    ];
    let points: usize = lists.iter().map(|list| list.len()).sum();
    assert!(points >= 40, "{points}");
    let tested: BTreeSet<&str> =
        lists.iter().flat_map(|list| list.iter()).map(|step| step.split('@').next().unwrap()).collect();
    let mut there = BTreeSet::new();
    let own = std::env::var("CARGO_MANIFEST_DIR").unwrap();
    let crates = Path::new(&own).parent().unwrap();
    for source in ["control-plane/src", "providers/src"] {
        let source = crates.join(source);
        let pattern = r#"failpoint!\("[^"]+"#;
        let text = run("grep", &["-rhoE", "--exclude-dir=firecracker", pattern, source.to_str().unwrap()]);
        // The suite of microVMs has the steps of sending an image to a manager.
        let text = text.lines().filter(|line| !line.contains("image."));
        there.extend(text.map(|line| line.trim_start_matches("failpoint!(\"").to_owned()));
    }
    let there: BTreeSet<&str> = there.iter().map(String::as_str).collect();
    assert_eq!(tested, there);
}
