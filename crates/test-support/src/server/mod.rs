//! A real `emergent serve` for one test.
//!
//! The server is a process of its own, so that a test can kill it. A [`Janitor`] removes everything that the server made when the
//! test ends, even if the test is killed. [`TestServer::stop`] asserts that the server left nothing for the janitor.
//!
//! ```text
//! mod         starts, kills and stops the process     request      requests to the REST API
//! leftovers   finds what is left on the host          workspaces   workspaces, tools, the warm pool
//! ```
//! All functions panic on failure, like assertions.

mod leftovers;
mod request;
mod workspaces;

use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use sqlx::sqlite::SqliteConnectOptions;
use sqlx::{AssertSqlSafe, ConnectOptions as _, Connection as _};

use crate::command::run;
use crate::janitor::Janitor;

pub use leftovers::leftovers_of_manager;
pub use request::Answer;
pub use workspaces::{POOL, WORKSPACES, workspace_path};

/// The time limit for a start of the server.
const START_TIME: Duration = Duration::from_secs(60);

/// The time limit for an end of the server.
const END_TIME: Duration = Duration::from_secs(60);

/// The file with the offset of the server's clock. [`TestServer::advance_clock`] writes it.
const CLOCK_FILE: &str = "clock-offset";

/// A running server.
pub struct TestServer {
    binary: PathBuf,
    environment: Vec<(String, String)>,
    data_dir: PathBuf,
    process: Child,
    janitor: Janitor,
    client: reqwest::Client,
    /// The server's URL.
    pub url: String,
    /// The first admin token.
    pub token: String,
}

impl TestServer {
    /// Starts a server on a free port with a new data directory. It allows the provider `docker`.
    pub async fn start(binary: &str) -> Self {
        Self::start_with(binary, &[("EMERGENT_ALLOW_DOCKER", "true")]).await
    }

    /// Starts a server on a free port with a new data directory and these variables.
    pub async fn start_with(binary: &str, environment: &[(&str, &str)]) -> Self {
        let directory = tempfile::Builder::new().prefix("emergent-test-").tempdir();
        Self::start_in(binary, directory.expect("a directory can be made").keep(), environment).await
    }

    /// Starts a server with this data directory, which is removed at the end.
    pub async fn start_in(binary: &str, data_dir: PathBuf, environment: &[(&str, &str)]) -> Self {
        let janitor = Janitor::of(&data_dir);
        let environment: Vec<_> =
            environment.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        let process = spawn(Path::new(binary), &data_dir, &environment, &[]);
        // The certificates of TLS tests are self-signed.
        let client =
            reqwest::Client::builder().pool_max_idle_per_host(32).tls_danger_accept_invalid_certs(true);
        let client = client.build().expect("the client can be made");
        let mut server = Self {
            binary: binary.into(),
            environment,
            data_dir,
            process,
            janitor,
            client,
            url: String::new(),
            token: String::new(),
        };
        server.wait_until_ready().await;
        server
    }

    /// Waits until the server takes connections. It may be ready later.
    pub async fn wait_until_it_listens(&mut self) {
        let begun = Instant::now();
        loop {
            self.url = self.file("server-url");
            let live = self.client.get(format!("{}/health/live", self.url)).send().await;
            if live.is_ok_and(|answer| answer.status() == 200) {
                return;
            }
            assert!(begun.elapsed() < START_TIME, "the server does not listen:\n{}", self.log());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Waits until the server's first recovery has ended.
    pub async fn wait_until_ready(&mut self) {
        let begun = Instant::now();
        loop {
            if let Some(status) = self.exit_status() {
                panic!("the server ended with {status}:\n{}", self.log());
            }
            assert!(begun.elapsed() < START_TIME, "the server did not start:\n{}", self.log());
            self.url = self.file("server-url");
            self.token = self.file("admin-token");
            if !self.url.is_empty() {
                let ready = self.client.get(format!("{}/health/ready", self.url)).send().await;
                let text = match ready {
                    Ok(answer) => answer.text().await.unwrap_or_default(),
                    Err(_) => String::new(),
                };
                if is_ready(&text) {
                    return;
                }
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// The status of the process, once it has ended.
    fn exit_status(&mut self) -> Option<ExitStatus> {
        self.process.try_wait().expect("the process can be waited for")
    }

    fn file(&self, name: &str) -> String {
        std::fs::read_to_string(self.data_dir.join(name)).unwrap_or_default()
    }

    /// The server's standard output and error so far.
    pub fn log(&self) -> String {
        self.file("test.log")
    }

    /// The server's data directory.
    pub fn data_dir(&self) -> &Path {
        &self.data_dir
    }

    /// The installation's id.
    pub fn installation(&self) -> String {
        self.file("installation-id")
    }

    /// Kills the server with SIGKILL.
    pub fn kill(&mut self) {
        self.process.kill().expect("the server can be killed");
        self.process.wait().expect("the server ends");
        let _ = std::fs::remove_file(self.data_dir.join("server-url"));
    }

    /// Starts the server again on the same data directory, after [`kill`](Self::kill) or [`terminate`](Self::terminate).
    pub async fn start_again(&mut self) {
        self.process = spawn(&self.binary, &self.data_dir, &self.environment, &[]);
        self.wait_until_ready().await;
    }

    /// Starts the server again with additional variables. Later starts don't have them.
    pub async fn start_again_with(&mut self, more: &[(&str, &str)]) {
        self.start_again_without_waiting(more);
        self.wait_until_ready().await;
    }

    /// Starts the server again with additional arguments. Later starts don't have them.
    pub async fn start_again_with_flags(&mut self, flags: &[&str]) {
        self.process = spawn(&self.binary, &self.data_dir, &self.environment, flags);
        self.wait_until_ready().await;
    }

    /// Starts the server with additional arguments, asserts that it refuses to start, and returns its standard error.
    pub fn refusal(&self, flags: &[&str]) -> String {
        let output = Command::new("timeout")
            .arg("60")
            .arg(&self.binary)
            .args(["serve", "--listen", "127.0.0.1:0", "--data-dir"])
            .arg(&self.data_dir)
            .args(flags)
            .env_remove("DATABASE_URL")
            .env("EMERGENT_FIRECRACKER", "false")
            .stdin(Stdio::null())
            .output()
            .expect("the program starts");
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "the server should have refused to start: {stderr}");
        stderr
    }

    /// Starts the server again with additional variables, and does not wait until it is ready. It may end before that.
    pub fn start_again_without_waiting(&mut self, more: &[(&str, &str)]) {
        let mut environment = self.environment.clone();
        environment.extend(more.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())));
        self.process = spawn(&self.binary, &self.data_dir, &environment, &[]);
    }

    /// Waits until SIGKILL has ended the server.
    pub fn wait_until_killed(&mut self) {
        let status = self.wait_for_exit_status();
        assert_eq!(status.signal(), Some(9), "{status}:\n{}", self.log());
        let _ = std::fs::remove_file(self.data_dir.join("server-url"));
    }

    fn wait_for_exit_status(&mut self) -> ExitStatus {
        let begun = Instant::now();
        loop {
            if let Some(status) = self.exit_status() {
                return status;
            }
            assert!(begun.elapsed() < END_TIME, "the server does not end:\n{}", self.log());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Stops the server with SIGTERM and asserts that nothing is left on the host.
    #[track_caller]
    pub fn stop(mut self) {
        self.terminate();
        let left = self.leftovers();
        assert!(left.is_empty(), "left on the host: {left:#?}\n{}", self.log());
    }

    /// Stops the server with SIGTERM beside another one on the same database, and asserts that this changes nothing for the other.
    #[track_caller]
    pub fn stop_beside(&mut self, other: &Self) {
        let before = other.leftovers();
        self.terminate();
        assert_eq!(other.leftovers(), before, "{}", self.log());
    }

    /// Runs SQL on the database of a stopped server, and returns the number of changed rows.
    pub async fn sql(&self, text: &str) -> u64 {
        let options = SqliteConnectOptions::new().filename(self.data_dir.join("emergent.db"));
        let mut connection = options.connect().await.expect("the database can be opened");
        let done = sqlx::query(AssertSqlSafe(text.to_owned())).execute(&mut connection).await;
        connection.close().await.expect("the database can be closed");
        done.expect("the statement can be run").rows_affected()
    }

    /// The server's process id.
    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    /// Sends SIGTERM and waits until the server has ended.
    pub fn terminate(&mut self) {
        run("kill", &[&self.pid().to_string()]);
        self.wait_for_end();
    }

    /// Waits until the server has ended, with any status.
    pub fn wait_for_end(&mut self) {
        self.wait_for_exit_status();
    }

    /// Advances the clock that ends idle and expired workspaces. Later starts of the server keep the offset.
    pub fn advance_clock(&self, seconds: u64) {
        let file = self.data_dir.join(CLOCK_FILE);
        let before = std::fs::read_to_string(&file).ok().and_then(|text| text.parse().ok()).unwrap_or(0_u64);
        // The rename is atomic, so the server never reads an incomplete number.
        let new = self.data_dir.join("clock-offset.new");
        std::fs::write(&new, (before + seconds).to_string()).expect("the offset can be written");
        std::fs::rename(&new, &file).expect("the offset can be replaced");
    }

    /// The resident memory of the server in bytes.
    pub fn memory_bytes(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid()));
        let status = status.expect("the server runs");
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("it has memory");
        line.trim().trim_end_matches(" kB").parse::<u64>().expect("VmRSS is a number") * 1024
    }

    /// The number of open files and connections of the server.
    pub fn open_files(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.pid())).expect("the server runs").count()
    }
}

/// Whether a body of `/health/ready` tells that recovery has ended. A server on a full disk is not ready, but takes all requests that
/// need no space.
fn is_ready(body: &str) -> bool {
    let body: Value = serde_json::from_str(body).unwrap_or_default();
    body["status"] == "ok" || body["code"] == "host_disk_full"
}

fn spawn(binary: &Path, data_dir: &Path, environment: &[(String, String)], flags: &[&str]) -> Child {
    let log = std::fs::OpenOptions::new().create(true).append(true).open(data_dir.join("test.log"));
    let log = log.expect("the log can be opened");
    Command::new(binary)
        .args(["serve", "--listen", "127.0.0.1:0", "--data-dir"])
        .arg(data_dir)
        .args(flags)
        .env_remove("DATABASE_URL")
        // Tests enable microVMs by their own environment, whatever this machine has.
        .env("EMERGENT_FIRECRACKER", "false")
        .env("EMERGENT_CLOCK_OFFSET", data_dir.join(CLOCK_FILE))
        .envs(environment.iter().map(|(name, value)| (name, value)))
        .current_dir(data_dir)
        .stdin(Stdio::null())
        .stdout(log.try_clone().expect("the log can be opened twice"))
        .stderr(log)
        .process_group(0)
        .spawn()
        .expect("the server starts")
}

impl Drop for TestServer {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let mut log = self.log();
            let start = log.len().saturating_sub(6000);
            let start = (start..log.len()).find(|index| log.is_char_boundary(*index)).unwrap_or(0);
            eprintln!("--- the end of the server's log ---\n{}", log.split_off(start));
        }
        // A test ends only after the janitor has removed everything.
        self.janitor.begin();
        let _ = self.process.kill();
        let _ = self.process.wait();
        self.janitor.wait();
    }
}
