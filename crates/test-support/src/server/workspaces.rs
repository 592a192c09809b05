//! The calls that tests make most: workspaces, their tools and the warm pool.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::request::Answer;
use super::{START_TIME, TestServer};
use crate::wait::wait_until;

/// The path of the workspaces.
pub const WORKSPACES: &str = "/api/v1/agent/workspaces";

/// The path of the warm pool.
pub const POOL: &str = "/api/v1/agent/pool";

/// The time limit for destroying a workspace, whatever runs in it.
const DESTROY_TIME: Duration = Duration::from_secs(30);

/// The path of a workspace.
pub fn workspace_path(id: &str) -> String {
    format!("{WORKSPACES}/{id}")
}

impl TestServer {
    /// Creates a workspace that must be ready, and returns its id.
    pub async fn create(&self, request: Value) -> String {
        let created = self.request("POST", WORKSPACES, Some(request)).await.ok();
        assert_eq!(created["status"], "ready", "{created}");
        created["id"].as_str().expect("a workspace has an id").to_owned()
    }

    /// Reads a workspace.
    pub async fn workspace(&self, id: &str) -> Value {
        self.request("GET", &workspace_path(id), None).await.ok()
    }

    /// Changes a workspace by an action of its path: `stop`, `resume`, `snapshot`. Returns the body of the answer.
    pub async fn act(&self, id: &str, action: &str) -> Value {
        self.request("POST", &format!("{WORKSPACES}/{id}/{action}"), None).await.ok()
    }

    /// Calls a tool.
    pub async fn tool(&self, id: &str, tool: &str, request: Value) -> Answer {
        self.request("POST", &format!("{WORKSPACES}/{id}/{tool}"), Some(request)).await
    }

    /// Runs a command that must succeed, and returns its standard output.
    pub async fn bash(&self, id: &str, command: &str) -> String {
        // Guests on an emulated processor are slow, above all several at once.
        let request = json!({ "command": command, "timeout_ms": 600_000 });
        let answer = self.tool(id, "bash", request).await.ok();
        assert_eq!(answer["exit_code"], 0, "{command}: {answer}");
        answer["stdout"].as_str().expect("the output is text").to_owned()
    }

    /// Waits until a command in the workspace has written a file.
    pub async fn wait_for_file(&self, id: &str, file: &str) {
        let read = format!("cat {file} 2>/dev/null || true");
        wait_until(file, START_TIME, async || !self.bash(id, &read).await.is_empty()).await;
    }

    /// Starts a command in the background, and returns the path of its operation.
    pub async fn start_in_background(&self, id: &str, command: &str) -> String {
        let started = self.tool(id, "bash", json!({ "command": command, "background": true })).await;
        assert_eq!(started.status, 202, "{}", started.body);
        let operation = started.body["operation_id"].as_str().expect("an operation has an id").to_owned();
        format!("{WORKSPACES}/{id}/operations/{operation}")
    }

    /// Destroys a workspace.
    pub async fn destroy(&self, id: &str) {
        self.request("DELETE", &workspace_path(id), None).await.ok();
    }

    /// Destroys a workspace within the promised time limit, whatever runs in it.
    pub async fn destroy_in_time(&self, id: &str) {
        let destroyed = tokio::time::timeout(DESTROY_TIME, self.destroy(id)).await;
        assert!(destroyed.is_ok(), "destroy took more than {} s:\n{}", DESTROY_TIME.as_secs(), self.log());
    }

    /// Creates a workspace with a file, which [`assert_works`](Self::assert_works) reads.
    pub async fn create_marked(&self, request: Value) -> String {
        let id = self.create(request).await;
        self.tool(&id, "write", json!({ "file_path": "mark", "content": "mine\n" })).await.ok();
        id
    }

    /// Asserts that a marked workspace works: commands, the agent's own tools, and the search process.
    pub async fn assert_works(&self, id: &str) {
        assert_eq!(self.bash(id, "cat /workspace/mark").await, "mine\n");
        let found = self.tool(id, "grep", json!({ "pattern": "^mine$" })).await.ok();
        assert_eq!(found["matches"][0]["line"], "mine", "{found}");
    }

    /// Waits until a marked workspace works again after an attack on itself. Until then its calls may fail, because its commands
    /// may be killed with the attack, and its sandbox may be restarted.
    pub async fn wait_until_it_works(&self, id: &str) {
        let recovers = async {
            loop {
                let read = self.tool(id, "bash", json!({ "command": "cat /workspace/mark" })).await;
                let found = self.tool(id, "grep", json!({ "pattern": "^mine$" })).await;
                let is_found = found.body["matches"][0]["line"] == "mine";
                if read.body["exit_code"] == 0 && read.body["stdout"] == "mine\n" && is_found {
                    return;
                }
            }
        };
        let recovered = tokio::time::timeout(Duration::from_secs(150), recovers).await;
        assert!(recovered.is_ok(), "the workspace does not work again:\n{}", self.log());
    }

    /// Waits until this number of spares is ready, and none is being made or removed. Returns the status of the pool.
    pub async fn wait_for_pool(&self, ready: u64) -> Value {
        let begun = Instant::now();
        loop {
            let pool = self.request("GET", POOL, None).await.ok();
            let shapes = pool["shapes"].as_array().expect("a pool has shapes");
            let sum = |key: &str| shapes.iter().filter_map(|shape| shape[key].as_u64()).sum::<u64>();
            if sum("ready") == ready && sum("filling") == 0 && pool["leaving"] == 0 {
                return pool;
            }
            assert!(
                begun.elapsed() < START_TIME,
                "the pool does not get {ready} spares: {pool}\n{}",
                self.log()
            );
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Turns the pool off and waits until its spares are removed.
    pub async fn turn_pool_off(&self) {
        self.request("PUT", POOL, Some(json!({ "shapes": [] }))).await.ok();
        self.wait_for_pool(0).await;
    }
}
