//! Firecracker for tests: a real one, or a double that runs QEMU with an emulated processor.
//!
//! The real one is used when `FIRECRACKER_BIN`, `JAILER_BIN` and `FIRECRACKER_KERNEL` are set, else the double. A real Linux boots on
//! both, and the product uses both in the same way.

use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use emergent_wire::id::InstallationId;
use serde_json::{Value, json};

use crate::command::{docker, run};
use crate::conformance::cache_dir;
use crate::janitor::Janitor;
use crate::mcp::{build, version};
use crate::server::{Answer, TestServer, leftovers_of_manager};

const REAL: [&str; 3] = ["FIRECRACKER_BIN", "JAILER_BIN", "FIRECRACKER_KERNEL"];
const DOUBLE: &str = "emergent-vmm-double";
/// The paths that `emergent firecracker install` installs to.
const INSTALLED: [&str; 3] =
    ["/usr/local/bin/firecracker", "/usr/local/bin/jailer", "/usr/local/share/emergent/vmlinux"];
/// The image of the tests' microVMs.
const IMAGE: &str = "emergent/workspace:latest";
/// The time limit for a start or an end of a manager.
const LIMIT: Duration = Duration::from_secs(60);
/// The time limit for a manager's recovery, and for its death at a failpoint.
const LONG_LIMIT: Duration = Duration::from_secs(150);

/// The Firecracker of a test: the variables for servers and managers, and a cache of images.
pub struct Microvms {
    environment: Vec<(&'static str, String)>,
    /// The images that earlier tests made with the same binary.
    images: PathBuf,
    is_real: bool,
}

impl Microvms {
    /// Chooses the real Firecracker or the double, and prints the choice.
    pub fn find(server_binary: &str) -> Self {
        let directory = Path::new(server_binary).parent().expect("the binary is in a directory");
        let is_real = REAL.iter().all(|name| std::env::var_os(name).is_some());
        let mut environment = vec![("EMERGENT_FIRECRACKER", "true".to_owned())];
        if is_real {
            eprintln!("microVMs: a real Firecracker, {}", std::env::var(REAL[0]).expect("it is set"));
            if std::env::var_os("FIRECRACKER_BOOT_TIMEOUT_SECONDS").is_none() {
                environment.push(("FIRECRACKER_BOOT_TIMEOUT_SECONDS", "240".to_owned()));
            }
        } else {
            eprintln!("microVMs: QEMU with an emulated processor, behind a double of Firecracker");
            environment.extend(double(directory));
        }
        Self { environment, images: images(server_binary), is_real }
    }

    /// Chooses the Firecracker to measure: the one in the variables, else the installed one, else the double. `None` if none is
    /// there.
    pub fn find_any(server_binary: &str) -> Option<Self> {
        if REAL.iter().all(|name| std::env::var_os(name).is_some()) {
            return Some(Self::find(server_binary));
        }
        if INSTALLED.iter().all(|path| Path::new(path).exists()) {
            let environment = vec![("EMERGENT_FIRECRACKER", "true".to_owned())];
            return Some(Self { environment, images: images(server_binary), is_real: true });
        }
        (qemu().is_some() && kernel().exists()).then(|| Self::find(server_binary))
    }

    /// Whether it is a real Firecracker.
    pub fn is_real(&self) -> bool {
        self.is_real
    }

    /// A request for a workspace in a small microVM.
    pub fn small(&self) -> Value {
        let memory = if self.is_real { "192M" } else { "256M" };
        json!({ "provider": "firecracker", "resource_limits": { "cpu": "1", "memory": memory, "disk": "1G" } })
    }

    /// The time limit here for work that takes this long with a hardware processor. Emulated processors are slow.
    pub fn scaled_limit(&self, hardware: Duration) -> Duration {
        hardware * if self.is_real { 40 } else { 10 }
    }

    /// The variables for a server or a manager, with additional ones.
    pub fn environment<'a>(&'a self, more: &[(&'a str, &'a str)]) -> Vec<(&'a str, &'a str)> {
        let own = self.environment.iter().map(|(name, value)| (*name, value.as_str()));
        own.chain(more.iter().copied()).collect()
    }

    /// Starts a server that runs a manager itself.
    pub async fn start(&self, server_binary: &str, more: &[(&str, &str)]) -> TestServer {
        let directory = tempfile::Builder::new().prefix("emergent-test-").tempdir();
        let data_dir = directory.expect("a directory can be made").keep();
        self.use_cached_images(&data_dir.join("firecracker"));
        TestServer::start_in(server_binary, data_dir, &self.environment(more)).await
    }

    /// Gives a manager the cached images, because making an image is slow.
    pub fn use_cached_images(&self, manager_dir: &Path) {
        let images = manager_dir.join("images");
        fs::create_dir_all(&images).expect("a directory can be made");
        link_all(&self.images, &images);
    }

    /// Adds the images of a manager to the cache.
    pub fn keep_images(&self, manager_dir: &Path) {
        let caches = self.images.parent().expect("the cache is in a directory");
        for other in fs::read_dir(caches).into_iter().flatten().flatten() {
            if other.path() != self.images {
                let _ = fs::remove_dir_all(other.path());
            }
        }
        fs::create_dir_all(&self.images).expect("a directory can be made");
        link_all(&manager_dir.join("images"), &self.images);
    }
}

/// The cache of images of this binary.
fn images(server_binary: &str) -> PathBuf {
    let binary = Path::new(server_binary);
    binary.with_file_name("microvm-images").join(version(binary))
}

fn link_all(from: &Path, to: &Path) {
    let mut files: Vec<PathBuf> =
        fs::read_dir(from).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    // A manager uses an image once its description exists, so the description is linked last.
    files.sort_by_key(|path| path.extension().is_some_and(|extension| extension == "json"));
    for file in files.iter().filter(|path| path.extension().is_some_and(|extension| extension != "new")) {
        let _ = fs::hard_link(file, to.join(file.file_name().expect("a file has a name")));
    }
}

fn qemu() -> Option<String> {
    let found = Command::new("sh").args(["-c", "command -v qemu-system-x86_64"]).output().expect("sh starts");
    Some(String::from_utf8_lossy(&found.stdout).trim().to_owned()).filter(|path| !path.is_empty())
}

/// The double's kernel.
fn kernel() -> PathBuf {
    cache_dir().join("microvm/vmlinuz")
}

/// Sets up the double, and returns the variables that name its programs.
fn double(directory: &Path) -> Vec<(&'static str, String)> {
    let lock = File::create(std::env::temp_dir().join("emergent-test-microvm.lock"));
    let lock = lock.expect("the lock can be made");
    lock.lock().expect("the lock can be taken");
    let program = directory.join(DOUBLE);
    if !program.exists() {
        build(directory, DOUBLE);
    }
    let guest = cache_dir().join("microvm");
    let qemu = qemu().filter(|_| kernel().exists());
    let qemu = qemu.expect("QEMU or the kernel for tests is missing: run scripts/setup test");
    let settings = json!({
        "qemu": qemu,
        "vhost_device_vsock": guest.join("bin/vhost-device-vsock"),
        "modules": guest.join("modules.cpio"),
    });
    let double = directory.join("vmm-double");
    fs::create_dir_all(&double).expect("a directory can be made");
    fs::write(double.join("double.json"), settings.to_string()).expect("the settings can be written");
    for name in ["firecracker", "jailer"] {
        let _ = symlink(&program, double.join(name));
    }
    let path = |path: PathBuf| path.to_string_lossy().into_owned();
    vec![
        ("FIRECRACKER_BIN", path(double.join("firecracker"))),
        ("JAILER_BIN", path(double.join("jailer"))),
        ("FIRECRACKER_KERNEL", path(kernel())),
        ("FIRECRACKER_REQUIRE_KVM", "false".to_owned()),
        ("FIRECRACKER_BOOT_TIMEOUT_SECONDS", "120".to_owned()),
    ]
}

/// The token of the manager with this directory.
fn token_of(directory: &Path) -> String {
    let token = fs::read_to_string(directory.join("manager-token")).expect("the manager has a token");
    token.trim().to_owned()
}

/// A request to the socket of the manager with this directory.
fn build_request(directory: &Path, token: &str, method: &str, path: &str) -> reqwest::RequestBuilder {
    let client = reqwest::Client::builder().unix_socket(directory.join("manager.sock")).build();
    let client = client.expect("the client can be made");
    let method = method.parse().expect("the method is valid");
    client.request(method, format!("http://manager{path}")).bearer_auth(token)
}

/// Sends a request to the manager with this directory.
pub async fn ask_manager(directory: &Path, method: &str, path: &str, body: Option<Value>) -> Answer {
    ask_manager_as(directory, &token_of(directory), method, path, body).await
}

/// Sends a request with another token to the manager with this directory.
pub async fn ask_manager_as(
    directory: &Path,
    token: &str,
    method: &str,
    path: &str,
    body: Option<Value>,
) -> Answer {
    let mut request = build_request(directory, token, method, path);
    if let Some(body) = body {
        request = request.json(&body);
    }
    let response = request.send().await.unwrap_or_else(|error| panic!("{method} {path}: {error:?}"));
    let status = response.status().as_u16();
    let bytes = response.bytes().await.expect("the body is complete");
    Answer { status, body: serde_json::from_slice(&bytes).unwrap_or(Value::Null) }
}

/// Waits until the manager with this directory has ended its recovery.
pub async fn wait_until_recovered(directory: &Path) {
    let begun = Instant::now();
    while ask_manager(directory, "GET", "/v1/health", None).await.ok()["recovering"] == true {
        assert!(begun.elapsed() < LONG_LIMIT, "the manager does not end its recovery");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// A manager as a process of its own.
pub struct TestManager {
    binary: PathBuf,
    environment: Vec<(String, String)>,
    directory: PathBuf,
    process: Child,
    janitor: Janitor,
}

impl TestManager {
    /// Starts a manager with a new directory and additional variables.
    pub async fn start(microvms: &Microvms, binary: &str, more: &[(&str, &str)]) -> Self {
        let directory = tempfile::Builder::new().prefix("emergent-manager-").tempdir();
        let directory = directory.expect("a directory can be made").keep();
        let janitor = Janitor::of(&directory);
        microvms.use_cached_images(&directory);
        let environment = microvms.environment(more).into_iter();
        let environment: Vec<_> =
            environment.map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
        let process = spawn(Path::new(binary), &directory, &environment);
        let mut manager = Self { binary: binary.into(), environment, directory, process, janitor };
        manager.wait_until_it_answers(1).await;
        manager.wait_until_recovered().await;
        manager
    }

    /// The number of managers of this directory that have printed their address.
    fn starts(&self) -> usize {
        self.log().matches("listening on").count()
    }

    /// Waits until this number of managers has started, and the last one answers. The log decides, because a child of a killed
    /// manager may hold the old socket for a moment.
    async fn wait_until_it_answers(&mut self, starts: usize) {
        let begun = Instant::now();
        loop {
            if let Some(status) = self.process.try_wait().expect("the process can be waited for") {
                panic!("the manager ended with {status}:\n{}", self.log());
            }
            assert!(begun.elapsed() < LIMIT, "the manager does not start:\n{}", self.log());
            if self.starts() >= starts {
                let socket = self.url().strip_prefix("unix:").map(str::to_owned);
                let is_answered = match socket {
                    Some(socket) => tokio::net::UnixStream::connect(socket).await.is_ok(),
                    None => true,
                };
                if is_answered {
                    return;
                }
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// The manager's standard output and error.
    pub fn log(&self) -> String {
        fs::read_to_string(self.directory.join("test.log")).unwrap_or_default()
    }

    /// The manager's directory.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// The manager's URL.
    pub fn url(&self) -> String {
        let log = self.log();
        let url = log.lines().filter_map(|line| line.strip_prefix("listening on ")).next_back();
        url.expect("the manager has printed its address").to_owned()
    }

    /// The manager's token.
    pub fn token(&self) -> String {
        token_of(&self.directory)
    }

    /// The manager's process id.
    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    /// Sends a request with the manager's token.
    pub async fn request(&self, method: &str, path: &str, body: Option<Value>) -> Answer {
        ask_manager(&self.directory, method, path, body).await
    }

    /// Kills the manager with SIGKILL.
    pub fn kill(&mut self) {
        self.process.kill().expect("the manager can be killed");
        self.process.wait().expect("the manager ends");
    }

    /// Waits until the manager has died at a failpoint.
    pub fn wait_until_killed(&mut self) {
        self.wait_for_end(LONG_LIMIT);
    }

    fn wait_for_end(&mut self, limit: Duration) {
        let begun = Instant::now();
        while self.process.try_wait().expect("the process can be waited for").is_none() {
            assert!(begun.elapsed() < limit, "the manager does not end:\n{}", self.log());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Starts the manager again with additional variables, and waits until it has ended its recovery. Later starts don't have the
    /// variables.
    pub async fn start_again(&mut self, more: &[(&str, &str)]) {
        self.start_again_without_recovery(more).await;
        self.wait_until_recovered().await;
    }

    /// Waits until the manager has ended its recovery, if it listens on a socket.
    pub async fn wait_until_recovered(&self) {
        if self.url().starts_with("unix:") && self.directory.join("manager-token").exists() {
            wait_until_recovered(&self.directory).await;
        }
    }

    /// Starts the manager again like [`Self::start_again`], and does not wait for its recovery.
    pub async fn start_again_without_recovery(&mut self, more: &[(&str, &str)]) {
        let mut environment = self.environment.clone();
        environment.extend(more.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())));
        let starts = self.starts() + 1;
        self.process = spawn(&self.binary, &self.directory, &environment);
        self.wait_until_it_answers(starts).await;
    }

    /// Sends SIGTERM and waits until the manager has ended.
    pub fn terminate(&mut self) {
        run("kill", &[&self.pid().to_string()]);
        self.wait_for_end(LIMIT);
    }

    /// Everything that the manager has made and not removed.
    pub fn leftovers(&self) -> Vec<String> {
        leftovers_of_manager(&self.directory)
    }

    /// Stops the manager with SIGTERM and asserts that nothing is left on the host.
    #[track_caller]
    pub fn stop(mut self) {
        self.terminate();
        let left = self.leftovers();
        assert!(left.is_empty(), "left on the host: {left:#?}\n{}", self.log());
    }
}

fn spawn(binary: &Path, directory: &Path, environment: &[(String, String)]) -> Child {
    let log = fs::OpenOptions::new().create(true).append(true).open(directory.join("test.log"));
    let log = log.expect("the log can be opened");
    Command::new(binary)
        .args(["firecracker-manager", "--data-dir"])
        .arg(directory)
        .envs(environment.iter().map(|(name, value)| (name, value)))
        .current_dir(directory)
        .stdin(Stdio::null())
        .stdout(log.try_clone().expect("the log can be opened twice"))
        .stderr(log)
        .process_group(0)
        .spawn()
        .expect("the manager starts")
}

impl Drop for TestManager {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let log = self.log();
            let lines: Vec<&str> = log.lines().collect();
            eprintln!(
                "--- the end of the manager's log ---\n{}",
                lines[lines.len().saturating_sub(40)..].join("\n")
            );
        }
        self.janitor.begin();
        let _ = self.process.kill();
        let _ = self.process.wait();
        self.janitor.wait();
    }
}

impl TestManager {
    /// Uploads the workspace image, unless the manager has it, and returns its id.
    pub async fn image(&self) -> String {
        let digest = docker(&["image", "inspect", "--format", "{{.Id}}", IMAGE]);
        let path = format!("/v1/images/{digest}");
        if self.request("GET", &path, None).await.status != 200 {
            self.put_image(&path, IMAGE).await.ok();
        }
        digest
    }

    /// A request for a small microVM of this manager.
    pub async fn machine_request(&self, microvms: &Microvms) -> Value {
        json!({
            "installation": InstallationId::generate(),
            "image": self.image().await,
            "limits": microvms.small()["resource_limits"],
            "network": "nat",
        })
    }

    /// Uploads the files of an image to this path. The status is 0 if the manager died during the upload.
    pub async fn put_image(&self, path: &str, image: &str) -> Answer {
        let archive = tempfile::NamedTempFile::new().expect("a file can be made");
        // The janitor removes a container with this label if the test is killed.
        let label = format!("emergent.test={}", self.directory.display());
        let container = docker(&["create", "--label", &label, image, "none"]);
        docker(&["export", "--output", &archive.path().to_string_lossy(), &container]);
        docker(&["rm", &container]);
        let request = build_request(&self.directory, &self.token(), "PUT", path);
        let sent = request.body(fs::read(archive.path()).expect("the archive can be read")).send().await;
        match sent {
            Ok(response) => Answer {
                status: response.status().as_u16(),
                body: response.json().await.unwrap_or(Value::Null),
            },
            Err(_) => Answer { status: 0, body: Value::Null },
        }
    }

    /// Sends a request and ignores its outcome, because the manager may be killed before it answers.
    pub async fn request_ignoring_outcome(&self, method: &str, path: &str, body: Option<Value>) {
        let mut request = build_request(&self.directory, &self.token(), method, path);
        if let Some(body) = body {
            request = request.json(&body);
        }
        if let Ok(answer) = request.send().await {
            // The output of a failed test shows it.
            eprintln!("{path}: {} {}", answer.status(), answer.text().await.unwrap_or_default());
        }
    }
}
