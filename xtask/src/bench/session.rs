//! The measured server and a client of it.

use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use emergent_test_support::server::TestServer;
use reqwest::Method;
use serde_json::{Value, json};

/// A release server with a new data directory, and a client with one kept-alive connection.
pub(crate) struct Session {
    server: TestServer,
    client: reqwest::Client,
    begun: Instant,
    notes: RefCell<Vec<String>>,
    /// Fewer rounds and less data.
    pub(crate) quick: bool,
}

/// A workspace.
pub(crate) struct Workspace {
    pub(crate) id: String,
}

impl Workspace {
    /// Its container's name.
    pub(crate) fn container(&self) -> String {
        format!("agent-workspace-{}", self.id)
    }
}

/// Cargo's target directory. This program is in a subdirectory.
pub(crate) fn target_dir() -> Result<PathBuf> {
    let program = std::env::current_exe()?;
    let directory =
        program.parent().and_then(Path::parent).context("this program is not in a target directory")?;
    Ok(directory.to_owned())
}

/// The server's program: `EMERGENT_BIN`, or the release build beside this one.
pub(crate) fn release_binary() -> Result<String> {
    let binary = match std::env::var_os("EMERGENT_BIN") {
        Some(path) => PathBuf::from(path),
        None => target_dir()?.join("release/emergent"),
    };
    ensure!(
        binary.is_file(),
        "{} does not exist: `make bench` builds it, or cargo build --release -p emergent",
        binary.display()
    );
    Ok(binary.to_string_lossy().into_owned())
}

impl Session {
    /// Starts the server.
    pub(crate) async fn start(quick: bool) -> Result<Self> {
        Self::with(TestServer::start(&release_binary()?).await, quick)
    }

    /// Makes a client of a running server.
    pub(crate) fn with(server: TestServer, quick: bool) -> Result<Self> {
        let client = reqwest::Client::builder().pool_max_idle_per_host(1).no_proxy().build()?;
        Ok(Self { server, client, begun: Instant::now(), notes: RefCell::default(), quick })
    }

    /// Stops the server. After a success it asserts that nothing is left. After a failure the janitor removes everything.
    pub(crate) fn end(self, is_success: bool) {
        if is_success {
            self.server.stop();
        }
    }

    /// Prints a line of progress on standard error.
    pub(crate) fn progress(&self, text: &str) {
        eprintln!("{:6.1} s  {text}", self.begun.elapsed().as_secs_f64());
    }

    /// Prints a line on standard error, and again below the table.
    pub(crate) fn note(&self, text: &str) {
        self.progress(text);
        self.notes.borrow_mut().push(text.to_owned());
    }

    /// The notes below the table.
    pub(crate) fn notes(&self) -> Vec<String> {
        self.notes.borrow().clone()
    }

    /// The first value in a quick run, and the second one otherwise.
    pub(crate) fn either<T>(&self, quick: T, full: T) -> T {
        if self.quick { quick } else { full }
    }

    /// The label of the containers that the janitor removes.
    pub(crate) fn label(&self) -> String {
        format!("emergent.installation={}", self.server.installation())
    }

    /// The server's URL.
    pub(crate) fn url(&self) -> &str {
        &self.server.url
    }

    /// The admin token.
    pub(crate) fn token(&self) -> &str {
        self.server.token.trim()
    }

    /// The server's data directory.
    pub(crate) fn data_dir(&self) -> &Path {
        self.server.data_dir()
    }

    /// The server's process id.
    pub(crate) fn server_pid(&self) -> u32 {
        self.server.pid()
    }

    /// Sends a request. Returns the duration until the whole answer was read, and the answer.
    pub(crate) async fn request(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
    ) -> Result<(Duration, Value)> {
        let mut request = self
            .client
            .request(method.clone(), format!("{}{path}", self.server.url))
            .bearer_auth(self.server.token.trim());
        if let Some(body) = body {
            request = request.json(body);
        }
        let begun = Instant::now();
        let response = request.send().await?;
        let status = response.status();
        let bytes = response.bytes().await?;
        let took = begun.elapsed();
        if !status.is_success() {
            bail!("{method} {path}: {status} {}", String::from_utf8_lossy(&bytes));
        }
        Ok((took, serde_json::from_slice(&bytes).unwrap_or(Value::Null)))
    }

    /// Sets the pool to this number of gVisor spares, and waits for them.
    pub(crate) async fn set_pool(&self, size: usize) -> Result<()> {
        let body = json!({ "shapes": [{ "size": size, "provider": "gvisor" }] });
        self.request(Method::PUT, "/api/v1/agent/pool", Some(&body)).await?;
        self.wait_for_pool(size).await;
        Ok(())
    }

    /// Waits until this number of spares is ready and no more are made.
    pub(crate) async fn wait_for_pool(&self, size: usize) {
        self.server.wait_for_pool(size as u64).await;
    }

    /// Creates a workspace without a warm start. Returns the duration too.
    pub(crate) async fn create(&self, provider: &str) -> Result<(Duration, Workspace)> {
        self.create_of(&json!({ "provider": provider, "warm_start": false })).await
    }

    /// Creates a workspace from the pool. Returns the duration too.
    pub(crate) async fn claim(&self) -> Result<(Duration, Workspace)> {
        self.create_of(&json!({ "provider": "gvisor" })).await
    }

    /// Creates a workspace that must be ready. Returns the duration too.
    pub(crate) async fn create_of(&self, body: &Value) -> Result<(Duration, Workspace)> {
        let (took, created) = self.request(Method::POST, "/api/v1/agent/workspaces", Some(body)).await?;
        ensure!(created["status"] == "ready", "the new workspace is not ready: {created}");
        let is_warm = body["warm_start"] != false;
        ensure!(created["placement"]["warm_hit"] == is_warm, "warm_hit should be {is_warm}: {created}");
        let id = created["id"].as_str().context("the new workspace has no id")?.to_owned();
        Ok((took, Workspace { id }))
    }

    /// Destroys a workspace.
    pub(crate) async fn destroy(&self, workspace: Workspace) -> Result<()> {
        let path = format!("/api/v1/agent/workspaces/{}", workspace.id);
        self.request(Method::DELETE, &path, None).await.map(|_| ())
    }

    /// Calls a tool. Returns the duration and the answer.
    pub(crate) async fn tool(
        &self,
        workspace: &Workspace,
        tool: &str,
        body: &Value,
    ) -> Result<(Duration, Value)> {
        let path = format!("/api/v1/agent/workspaces/{}/{tool}", workspace.id);
        self.request(Method::POST, &path, Some(body)).await
    }

    /// Runs a command that must succeed. Returns the duration and the output.
    pub(crate) async fn bash(&self, workspace: &Workspace, command: &str) -> Result<(Duration, String)> {
        let body = json!({ "command": command, "timeout_ms": 600_000 });
        let (took, answer) = self.tool(workspace, "bash", &body).await?;
        ensure!(answer["exit_code"] == 0, "{command}: {answer}");
        Ok((took, answer["stdout"].as_str().unwrap_or_default().to_owned()))
    }
}
