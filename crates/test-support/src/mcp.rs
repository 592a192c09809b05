//! MCP servers for tests: an image with the fixtures, and the calls that tests make most.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant, UNIX_EPOCH};

use serde_json::{Value, json};

use crate::server::{Answer, TestServer};

/// The path of hosted MCP servers.
pub const SERVERS: &str = "/api/v1/mcp/servers";
/// The image that the fixtures are added to.
const BASE: &str = "emergent/workspace:latest";
const NAME: &str = "emergent/test-mcp";
const FIXTURES: [&str; 2] = ["mcp-chaos", "mcp-fixture"];

/// The image with `mcp-chaos` and `mcp-fixture`. It is made if it does not exist. The fixtures are taken from the directory of the
/// server's binary, and built if they are missing.
pub fn image(server_binary: &str) -> String {
    let directory = Path::new(server_binary).parent().expect("the binary is in a directory");
    let lock = File::create(std::env::temp_dir().join("emergent-test-mcp.lock"));
    let lock = lock.expect("the lock can be made");
    lock.lock().expect("the lock can be taken");
    let fixtures = FIXTURES.map(|name| directory.join(name));
    if !fixtures.iter().all(|path| path.exists()) {
        build(directory, "emergent-mcp-fixture");
    }
    let tag = fixtures.iter().map(|path| version(path)).collect::<Vec<_>>().join("-");
    let image = format!("{NAME}:{tag}");
    if docker(&["image", "inspect", &image]).is_err() {
        make(&image, &fixtures);
    }
    image
}

/// A version of a program, which changes with each build.
pub(crate) fn version(path: &Path) -> String {
    let metadata = path.metadata().expect("the program exists");
    let built = metadata.modified().expect("it has a time");
    let built = built.duration_since(UNIX_EPOCH).expect("the time is after 1970");
    format!("{:x}", built.as_millis() ^ u128::from(metadata.len()))
}

/// Builds a package into the directory of the server's binary.
pub(crate) fn build(directory: &Path, package: &str) {
    let target = directory.parent().expect("the binary is in a target directory");
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.args(["build", "--locked", "--package", package, "--target-dir"]).arg(target);
    if directory.ends_with("release") {
        cargo.arg("--release");
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let status = cargo.current_dir(root).status().expect("cargo starts");
    assert!(status.success(), "{package} can't be built");
}

fn make(image: &str, fixtures: &[PathBuf]) {
    let old = docker(&["image", "ls", "--quiet", NAME]).unwrap_or_default();
    let container = docker(&["create", BASE, "none"]).expect("a container can be made");
    let container = container.trim();
    let made = || -> Result<String, String> {
        for path in fixtures {
            docker(&["cp", &path.to_string_lossy(), &format!("{container}:/usr/local/bin/")])?;
        }
        let entrypoint = ["--change", "ENTRYPOINT [\"mcp-chaos\"]", "--change", "CMD []"];
        let user = ["--change", "USER 1000:1000", "--change", "WORKDIR /srv"];
        docker(&[&["commit"], &entrypoint[..], &user[..], &[container, image]].concat())
    };
    let made = made();
    let _ = docker(&["rm", "--force", container]);
    made.unwrap_or_else(|error| panic!("the image {image} can't be made: {error}"));
    for id in old.lines() {
        // An image that another test uses can't be removed. The next build removes it.
        let _ = docker(&["image", "rm", id]);
    }
}

/// Runs `docker` and returns its standard output, or its standard error after a failure.
fn docker(arguments: &[&str]) -> Result<String, String> {
    let output = Command::new("docker").args(arguments).output().map_err(|error| error.to_string())?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    Err(String::from_utf8_lossy(&output.stderr).into_owned())
}

impl TestServer {
    /// Registers an MCP server with the image of the fixtures, unless the request has one. It may not be ready.
    pub async fn register(&self, image: &str, mut request: Value) -> Value {
        request["image"] = request.get("image").cloned().unwrap_or_else(|| json!(image));
        self.request("POST", SERVERS, Some(request)).await.ok()
    }

    /// Reads an MCP server.
    pub async fn mcp_server(&self, name: &str) -> Value {
        self.request("GET", &format!("{SERVERS}/{name}"), None).await.ok()
    }

    /// Waits until an MCP server has this status, and returns it.
    pub async fn wait_for_status(&self, name: &str, status: &str) -> Value {
        let begun = Instant::now();
        loop {
            let server = self.mcp_server(name).await;
            if server["status"] == status {
                return server;
            }
            assert!(begun.elapsed() < Duration::from_secs(60), "not {status}: {server:#}\n{}", self.log());
            tokio::time::sleep(Duration::from_millis(25)).await;
        }
    }

    /// Waits until a number field of an MCP server meets a condition.
    pub async fn wait_until_mcp(&self, name: &str, field: &str, holds: impl Fn(u64) -> bool) {
        let begun = Instant::now();
        loop {
            let server = self.mcp_server(name).await;
            if server[field].as_u64().is_some_and(&holds) {
                return;
            }
            assert!(begun.elapsed() < Duration::from_secs(30), "{field} is wrong: {server:#}");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Calls a method of an MCP server.
    pub async fn mcp(&self, name: &str, method: &str, params: Value) -> Answer {
        let body = json!({ "method": method, "params": params });
        self.request("POST", &format!("{SERVERS}/{name}/call"), Some(body)).await
    }

    /// Calls a tool of an MCP server.
    pub async fn mcp_tool(&self, name: &str, tool: &str, arguments: Value) -> Answer {
        self.mcp(name, "tools/call", json!({ "name": tool, "arguments": arguments })).await
    }

    /// Calls a tool of an MCP server, and returns the text of its result.
    pub async fn mcp_text(&self, name: &str, tool: &str, arguments: Value) -> String {
        let answer = self.mcp_tool(name, tool, arguments).await.ok();
        let text = answer["result"]["content"][0]["text"].as_str();
        text.unwrap_or_else(|| panic!("no text: {answer:#}")).to_owned()
    }

    /// Removes an MCP server.
    pub async fn remove_mcp(&self, name: &str) {
        self.request("DELETE", &format!("{SERVERS}/{name}"), None).await.ok();
    }
}
