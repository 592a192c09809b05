//! A real `emergent serve` for one test.
//!
//! The server is a process of its own, so that a test can kill it. Whatever happens to the test, nothing is left: see
//! [`Janitor`]. [`TestServer::stop`] checks that there was nothing for it to do.
//!
//! Functions here panic on failure, as assertions in tests do.

use std::io::Read;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sqlx::sqlite::SqliteConnectOptions;
use sqlx::{AssertSqlSafe, ConnectOptions as _, Connection as _};

use crate::janitor::Janitor;
use crate::sse::EventReader;

/// A server that has not answered by then never will.
const START_TIME: Duration = Duration::from_secs(60);

/// The longest that removing a workspace may take, whatever runs in it.
const DESTROY_TIME: Duration = Duration::from_secs(30);

/// The file by which [`TestServer::advance_clock`] moves the server's clock.
const CLOCK_FILE: &str = "clock-offset";

/// A running server.
pub struct TestServer {
    binary: PathBuf,
    environment: Vec<(String, String)>,
    data_dir: PathBuf,
    process: Child,
    janitor: Janitor,
    client: reqwest::Client,
    /// Where it listens.
    pub url: String,
    /// The first admin token.
    pub token: String,
}

/// An answer: its status and its JSON.
#[derive(Clone, Debug)]
pub struct Answer {
    /// The HTTP status.
    pub status: u16,
    /// The body; null when it is not JSON.
    pub body: Value,
}

impl Answer {
    /// The body of a success.
    #[track_caller]
    pub fn ok(self) -> Value {
        assert!((200..300).contains(&self.status), "{} {}", self.status, self.body);
        self.body
    }

    /// The code of a failure with this status.
    #[track_caller]
    pub fn error(self, status: u16) -> String {
        assert_eq!(self.status, status, "{}", self.body);
        let code = self.body["error"]["code"].as_str().unwrap_or_default().to_owned();
        assert!(
            !code.is_empty() && self.body["error"]["message"].as_str().is_some_and(|text| !text.is_empty()),
            "{}",
            self.body
        );
        code
    }
}

impl TestServer {
    /// Starts a server on a free port with a data directory of its own. Plain Docker is allowed.
    pub async fn start(binary: &str) -> Self {
        Self::start_with(binary, &[("EMERGENT_ALLOW_DOCKER", "true")]).await
    }

    /// Starts a server with these variables.
    pub async fn start_with(binary: &str, environment: &[(&str, &str)]) -> Self {
        let directory = tempfile::Builder::new().prefix("emergent-test-").tempdir().expect("a directory");
        Self::start_in(binary, directory.keep(), environment).await
    }

    /// Starts a server on a directory, which is removed at the end.
    pub async fn start_in(binary: &str, data_dir: PathBuf, environment: &[(&str, &str)]) -> Self {
        let janitor = Janitor::of(&data_dir);
        let environment: Vec<_> =
            environment.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        let process = spawn(Path::new(binary), &data_dir, &environment);
        // Tests of TLS make certificates that nobody else trusts.
        let client =
            reqwest::Client::builder().pool_max_idle_per_host(32).tls_danger_accept_invalid_certs(true);
        let client = client.build().expect("a client");
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

    /// Waits until it takes requests; it may not be ready for a while.
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

    /// Waits until its first recovery has ended.
    pub async fn wait_until_ready(&mut self) {
        let begun = Instant::now();
        loop {
            if let Some(status) = self.process.try_wait().expect("the process can be waited for") {
                panic!("the server ended with {status}:\n{}", self.log());
            }
            assert!(begun.elapsed() < START_TIME, "the server did not start:\n{}", self.log());
            self.url = self.file("server-url");
            self.token = self.file("admin-token");
            if !self.url.is_empty() {
                let ready = self.client.get(format!("{}/health/ready", self.url)).send().await;
                // A server on a full disk does what needs no room.
                let text = match ready {
                    Ok(answer) => answer.text().await.unwrap_or_default(),
                    Err(_) => String::new(),
                };
                if text.contains(r#""ok""#) || text.contains("disk is full") {
                    return;
                }
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    fn file(&self, name: &str) -> String {
        std::fs::read_to_string(self.data_dir.join(name)).unwrap_or_default()
    }

    /// What the server wrote to standard error so far.
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

    /// Starts it again on the same data directory, after [`kill`](Self::kill).
    pub async fn start_again(&mut self) {
        self.process = spawn(&self.binary, &self.data_dir, &self.environment);
        self.wait_until_ready().await;
    }

    /// Starts it again with more variables, which are not kept for the next time.
    pub async fn start_again_with(&mut self, more: &[(&str, &str)]) {
        self.start_again_unattended(more);
        self.wait_until_ready().await;
    }

    /// Starts it again with more arguments, once.
    pub async fn start_again_with_flags(&mut self, flags: &[&str]) {
        self.process = spawn_with_flags(&self.binary, &self.data_dir, &self.environment, flags);
        self.wait_until_ready().await;
    }

    /// Starts it again where it should refuse to, with more arguments; gives what it says.
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
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "it should have refused: {said}");
        said
    }

    /// Starts it again with more variables, without waiting: it may not live long enough to be ready.
    pub fn start_again_unattended(&mut self, more: &[(&str, &str)]) {
        let mut environment = self.environment.clone();
        environment.extend(more.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())));
        self.process = spawn(&self.binary, &self.data_dir, &environment);
    }

    /// Waits until the server has been killed, by whomever.
    pub fn wait_until_killed(&mut self) {
        use std::os::unix::process::ExitStatusExt;
        let begun = Instant::now();
        let status = loop {
            if let Some(status) = self.process.try_wait().expect("the process can be waited for") {
                break status;
            }
            assert!(begun.elapsed() < Duration::from_secs(60), "the server lives:\n{}", self.log());
            std::thread::sleep(Duration::from_millis(10));
        };
        assert_eq!(status.signal(), Some(9), "{status}:\n{}", self.log());
        let _ = std::fs::remove_file(self.data_dir.join("server-url"));
    }

    /// Stops the server (SIGTERM) and asserts that nothing is left that carries its label.
    #[track_caller]
    pub fn stop(mut self) {
        self.terminate();
        let left = self.leftovers();
        assert!(left.is_empty(), "left behind: {left:#?}\n{}", self.log());
    }

    /// Stops the server while another on the same database goes on; that one must find nothing changed.
    #[track_caller]
    pub fn stop_beside(&mut self, other: &Self) {
        let before = other.leftovers();
        self.terminate();
        assert_eq!(other.leftovers(), before, "{}", self.log());
    }

    /// Runs SQL on the database of a server that is stopped, and says how many rows it changed.
    pub async fn sql(&self, text: &str) -> u64 {
        let options = SqliteConnectOptions::new().filename(self.data_dir.join("emergent.db"));
        let mut connection = options.connect().await.expect("the database can be opened");
        let done = sqlx::query(AssertSqlSafe(text.to_owned())).execute(&mut connection).await;
        connection.close().await.expect("the database can be closed");
        done.expect("the statement can be run").rows_affected()
    }

    /// The server's process.
    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    /// Sends SIGTERM and waits.
    pub fn terminate(&mut self) {
        run("kill", &[&self.pid().to_string()]);
        self.wait_for_end();
    }

    /// Waits until a server that was told to end has ended.
    pub fn wait_for_end(&mut self) {
        let begun = Instant::now();
        while self.process.try_wait().expect("the process can be waited for").is_none() {
            assert!(begun.elapsed() < Duration::from_secs(60), "the server did not stop:\n{}", self.log());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Everything outside the data directory that carries the installation's label, and loop devices on its disks.
    pub fn leftovers(&self) -> Vec<String> {
        let id = self.installation();
        let filter = format!("label=emergent.installation={id}");
        let mut found = Vec::new();
        let mut list = |kind: &str, program: &str, arguments: &[&str]| {
            let text = run(program, arguments);
            found.extend(
                text.lines().filter(|line| !line.trim().is_empty()).map(|line| format!("{kind} {line}")),
            );
        };
        list("container", "docker", &["ps", "--all", "--filter", &filter, "--format", "{{.Names}}"]);
        list("volume", "docker", &["volume", "ls", "--filter", &filter, "--format", "{{.Name}}"]);
        list("network", "docker", &["network", "ls", "--filter", &filter, "--format", "{{.Name}}"]);
        let short: String = id.replace('-', "").chars().skip(22).collect();
        for program in ["iptables-save", "ip6tables-save"] {
            let rules = run(program, &[]);
            let ours =
                rules.lines().filter(|line| !short.is_empty() && line.contains(&format!("em-{short}")));
            found.extend(ours.map(|line| format!("rule of {program} {line}")));
        }
        let loops = run("losetup", &["--all"]);
        let ours = loops.lines().filter(|line| line.contains(&*self.data_dir.to_string_lossy()));
        found.extend(ours.map(|line| format!("loop device {line}")));
        for (kind, directory) in [("disk", "disks"), ("snapshot", "snapshots")] {
            let files = std::fs::read_dir(self.data_dir.join(directory)).into_iter().flatten().flatten();
            found.extend(files.map(|entry| format!("{kind} {}", entry.path().display())));
        }
        found.extend(leftovers_of_manager(&self.data_dir.join("firecracker")));
        found
    }

    /// Moves the clock of workspaces' lives forward, also that of the servers that are started again.
    pub fn advance_clock(&self, seconds: u64) {
        let file = self.data_dir.join(CLOCK_FILE);
        let before = std::fs::read_to_string(&file).ok().and_then(|text| text.parse().ok()).unwrap_or(0_u64);
        // Renamed, so that the server never reads half of it.
        let new = self.data_dir.join("clock-offset.new");
        std::fs::write(&new, (before + seconds).to_string()).expect("the clock's file");
        std::fs::rename(&new, &file).expect("the clock's file");
    }

    /// A request with the admin token.
    pub async fn request(&self, method: &str, path: &str, body: Option<Value>) -> Answer {
        self.request_as(Some(&self.token), method, path, body).await
    }

    /// A request with another token, or none.
    pub async fn request_as(
        &self,
        token: Option<&str>,
        method: &str,
        path: &str,
        body: Option<Value>,
    ) -> Answer {
        let response = match self.build(token, method, path, body).send().await {
            Ok(response) => response,
            Err(error) => panic!("{path}: {error:?}\n{}", self.log()),
        };
        let status = response.status().as_u16();
        let bytes = response.bytes().await.expect("a body");
        Answer { status, body: serde_json::from_slice(&bytes).unwrap_or(Value::Null) }
    }

    fn build(
        &self,
        token: Option<&str>,
        method: &str,
        path: &str,
        body: Option<Value>,
    ) -> reqwest::RequestBuilder {
        let method = method.parse().expect("a method");
        let mut request = self.client.request(method, format!("{}{path}", self.url));
        if let Some(token) = token {
            request = request.bearer_auth(token);
        }
        if let Some(body) = body {
            request = request.json(&body);
        }
        request
    }

    /// A request that the server may not live to answer.
    pub async fn request_in_vain(&self, method: &str, path: &str, body: Option<Value>) {
        if let Ok(response) = self.build(Some(&self.token), method, path, body).send().await {
            let _ = response.bytes().await;
        }
    }

    /// A request whose answer comes as events, after the one with the id `after`.
    pub async fn events(
        &self,
        method: &str,
        path: &str,
        body: Option<Value>,
        after: Option<&str>,
    ) -> EventReader {
        let mut request = self.build(Some(&self.token), method, path, body);
        request = request.header("accept", "text/event-stream");
        if let Some(id) = after {
            request = request.header("last-event-id", id);
        }
        let response = request.send().await.expect("an answer");
        assert_eq!(response.status(), 200, "{path}");
        EventReader::new(response)
    }

    /// What `/metrics` says.
    pub async fn metrics(&self) -> String {
        let request = self.build(Some(&self.token), "GET", "/metrics", None);
        request.send().await.expect("an answer").text().await.expect("text")
    }

    /// The HTTP client, for what the other functions don't do.
    pub fn client(&self) -> &reqwest::Client {
        &self.client
    }

    /// Creates a workspace; returns its id.
    pub async fn create(&self, request: Value) -> String {
        let created = self.request("POST", "/api/v1/agent/workspaces", Some(request)).await.ok();
        assert_eq!(created["status"], "ready", "{created}");
        created["id"].as_str().expect("an id").to_owned()
    }

    /// Calls a tool.
    pub async fn tool(&self, id: &str, tool: &str, request: Value) -> Answer {
        self.request("POST", &format!("/api/v1/agent/workspaces/{id}/{tool}"), Some(request)).await
    }

    /// Runs a command that must succeed; returns what it printed.
    pub async fn bash(&self, id: &str, command: &str) -> String {
        // Guests whose processor is emulated are slow, several at once above all.
        let request = json!({ "command": command, "timeout_ms": 600_000 });
        let answer = self.tool(id, "bash", request).await.ok();
        assert_eq!(answer["exit_code"], 0, "{command}: {answer}");
        answer["stdout"].as_str().expect("text").to_owned()
    }

    /// Starts a command in the background; returns the path of its operation.
    pub async fn begin(&self, id: &str, command: &str) -> String {
        let started = self.tool(id, "bash", json!({ "command": command, "background": true })).await;
        assert_eq!(started.status, 202, "{}", started.body);
        let operation = started.body["operation_id"].as_str().expect("an id").to_owned();
        format!("/api/v1/agent/workspaces/{id}/operations/{operation}")
    }

    /// Waits until so many spares are ready, and none is being made or removed; says how the pool stands then.
    pub async fn wait_for_pool(&self, ready: u64) -> Value {
        let begun = Instant::now();
        loop {
            let pool = self.request("GET", "/api/v1/agent/pool", None).await.ok();
            let shapes = pool["shapes"].as_array().expect("shapes");
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

    /// Turns the pool off and waits until its spares are gone.
    pub async fn turn_pool_off(&self) {
        self.request("PUT", "/api/v1/agent/pool", Some(json!({ "shapes": [] }))).await.ok();
        self.wait_for_pool(0).await;
    }

    /// Creates a workspace with a file in it, which [`assert_works`](Self::assert_works) reads.
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

    /// Waits until a marked workspace works again after an attack on itself. Until then its calls may fail: its commands may be
    /// killed with the attack, and its sandbox be started again.
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
        assert!(recovered.is_ok(), "it does not work again:\n{}", self.log());
    }

    /// Destroys a workspace, whatever runs in it, within the time that is promised for that.
    pub async fn destroy_in_time(&self, id: &str) {
        let destroyed = tokio::time::timeout(DESTROY_TIME, self.destroy(id)).await;
        assert!(destroyed.is_ok(), "it took more than {} s:\n{}", DESTROY_TIME.as_secs(), self.log());
    }

    /// Memory that the server takes, in bytes.
    pub fn memory_bytes(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid())).expect("it runs");
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("its memory");
        line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number") * 1024
    }

    /// Files and connections that the server has open.
    pub fn open_files(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.pid())).expect("it runs").count()
    }

    /// Destroys a workspace.
    pub async fn destroy(&self, id: &str) {
        self.request("DELETE", &format!("/api/v1/agent/workspaces/{id}"), None).await.ok();
    }
}

/// Everything that a Firecracker manager made and has not removed.
pub fn leftovers_of_manager(directory: &Path) -> Vec<String> {
    let mut found = Vec::new();
    let Ok(identity) = std::fs::read(directory.join("manager.json")) else {
        return found;
    };
    let identity: Value = serde_json::from_slice(&identity).expect("an identity");
    let name = format!("fc{:06x}", identity["manager"].as_u64().expect("a number"));
    let names = |directory: &Path| -> Vec<String> {
        let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
        entries.filter_map(|entry| entry.file_name().into_string().ok()).collect()
    };
    let interfaces = names(Path::new("/sys/class/net")).into_iter();
    found.extend(interfaces.filter(|each| each.starts_with(&name)).map(|each| format!("interface {each}")));
    for program in ["iptables-save", "ip6tables-save"] {
        let rules = run(program, &[]);
        found.extend(
            rules.lines().filter(|line| line.contains(&name)).map(|line| format!("rule of {program} {line}")),
        );
    }
    let group = format!("emergent-{name}");
    let groups = Command::new("find").args(["/sys/fs/cgroup", "-maxdepth", "2", "-name", &group]).output();
    let groups = groups.map(|output| output.stdout).unwrap_or_default();
    found.extend(String::from_utf8_lossy(&groups).lines().map(|line| format!("control group {line}")));
    for place in ["jails/firecracker", "machines", "snapshots"] {
        found.extend(names(&directory.join(place)).iter().map(|each| format!("{place}/{each}")));
    }
    let unfinished = names(&directory.join("images")).into_iter().filter(|each| each.ends_with(".new"));
    found.extend(unfinished.map(|each| format!("images/{each}")));
    // The jail is in the arguments of the double, the id in those of both.
    let jails = directory.join("jails");
    let processes = Command::new("pgrep").args(["-af", &jails.to_string_lossy()]).output();
    let processes = processes.map(|output| output.stdout).unwrap_or_default();
    found.extend(String::from_utf8_lossy(&processes).lines().map(|line| format!("process {line}")));
    found
}

fn spawn(binary: &Path, data_dir: &Path, environment: &[(String, String)]) -> Child {
    spawn_with_flags(binary, data_dir, environment, &[])
}

fn spawn_with_flags(
    binary: &Path,
    data_dir: &Path,
    environment: &[(String, String)],
    flags: &[&str],
) -> Child {
    let log =
        std::fs::OpenOptions::new().create(true).append(true).open(data_dir.join("test.log")).expect("a log");
    Command::new(binary)
        .args(["serve", "--listen", "127.0.0.1:0", "--data-dir"])
        .arg(data_dir)
        .args(flags)
        .env_remove("DATABASE_URL")
        // Whatever this machine has: tests say where they want microVMs.
        .env("EMERGENT_FIRECRACKER", "false")
        .env("EMERGENT_CLOCK_OFFSET", data_dir.join(CLOCK_FILE))
        .envs(environment.iter().map(|(name, value)| (name, value)))
        .current_dir(data_dir)
        .stdin(Stdio::null())
        .stdout(log.try_clone().expect("a second handle"))
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
            eprintln!("--- the server's log ends with ---\n{}", log.split_off(start));
        }
        // Tests end only when the janitor is done.
        self.janitor.call();
        let _ = self.process.kill();
        let _ = self.process.wait();
        self.janitor.wait();
    }
}

/// What a program printed, when it succeeded.
#[track_caller]
pub fn run(program: &str, arguments: &[&str]) -> String {
    let mut child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap_or_else(|error| panic!("{program}: {error}"));
    let mut text = String::new();
    child.stdout.take().expect("a pipe").read_to_string(&mut text).expect("text");
    let status = child.wait().expect("it ends");
    assert!(status.success(), "{program} {arguments:?}: {status}");
    text
}
