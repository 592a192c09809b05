//! Firecracker for tests: a real one where the machine has one that works, else a double that runs QEMU in software.
//!
//! A real one is used when `FIRECRACKER_BIN`, `JAILER_BIN` and `FIRECRACKER_KERNEL` name it; the double when none of them
//! is set. Either way a real Linux boots, and the product can't tell.

use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use emergent_wire::id::InstallationId;
use serde_json::{Value, json};

use crate::conformance::cache_dir;
use crate::janitor::Janitor;
use crate::mcp::{build, version};
use crate::server::{Answer, TestServer, leftovers_of_manager, run};

const REAL: [&str; 3] = ["FIRECRACKER_BIN", "JAILER_BIN", "FIRECRACKER_KERNEL"];
const DOUBLE: &str = "emergent-vmm-double";
/// Where `emergent firecracker install` puts a real one.
const INSTALLED: [&str; 3] =
    ["/usr/local/bin/firecracker", "/usr/local/bin/jailer", "/usr/local/share/emergent/vmlinux"];

/// What runs the microVMs of a test.
pub struct Microvms {
    environment: Vec<(&'static str, String)>,
    /// Images that an earlier test had made, by the same server.
    images: PathBuf,
    is_real: bool,
}

impl Microvms {
    /// Finds what there is, and says which it is.
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
            eprintln!("microVMs: QEMU in software, behind a double of Firecracker");
            environment.extend(double(directory));
        }
        Self { environment, images: images(server_binary), is_real }
    }

    /// What there is to be measured: one that is named, else one that is installed, else the double if it is set up.
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

    /// Whether it is Firecracker itself.
    pub fn is_real(&self) -> bool {
        self.is_real
    }

    /// A request for a small microVM.
    pub fn small(&self) -> Value {
        let memory = if self.is_real { "192M" } else { "256M" };
        json!({ "provider": "firecracker", "resource_limits": { "cpu": "1", "memory": memory, "disk": "1G" } })
    }

    /// How long something may take that takes this long on ordinary hardware: kernels in software are slow.
    pub fn patience(&self, usual: Duration) -> Duration {
        usual * if self.is_real { 40 } else { 10 }
    }

    /// The variables that a server or a manager needs, and these.
    pub fn environment<'a>(&'a self, more: &[(&'a str, &'a str)]) -> Vec<(&'a str, &'a str)> {
        let own = self.environment.iter().map(|(name, value)| (*name, value.as_str()));
        own.chain(more.iter().copied()).collect()
    }

    /// Starts a server with a manager in it.
    pub async fn start(&self, server_binary: &str, more: &[(&str, &str)]) -> TestServer {
        let directory = tempfile::Builder::new().prefix("emergent-test-").tempdir().expect("a directory");
        let data_dir = directory.keep();
        self.seed(&data_dir.join("firecracker"));
        TestServer::start_in(server_binary, data_dir, &self.environment(more)).await
    }

    /// Gives a manager the images that earlier ones have made: it takes a while, and is the same each time.
    pub fn seed(&self, manager_dir: &Path) {
        let images = manager_dir.join("images");
        fs::create_dir_all(&images).expect("a directory");
        link_all(&self.images, &images);
    }

    /// Keeps the images of a manager for the next.
    pub fn keep_images(&self, manager_dir: &Path) {
        let others = self.images.parent().expect("a directory");
        for other in fs::read_dir(others).into_iter().flatten().flatten() {
            if other.path() != self.images {
                let _ = fs::remove_dir_all(other.path());
            }
        }
        fs::create_dir_all(&self.images).expect("a directory");
        link_all(&manager_dir.join("images"), &self.images);
    }
}

/// Where images are kept from one test to the next.
fn images(server_binary: &str) -> PathBuf {
    let binary = Path::new(server_binary);
    binary.with_file_name("microvm-images").join(version(binary))
}

fn link_all(from: &Path, to: &Path) {
    let mut files: Vec<PathBuf> =
        fs::read_dir(from).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    // An image's description comes last, here as where it was made.
    files.sort_by_key(|path| path.extension().is_some_and(|extension| extension == "json"));
    for file in files.iter().filter(|path| path.extension().is_some_and(|extension| extension != "new")) {
        let _ = fs::hard_link(file, to.join(file.file_name().expect("a name")));
    }
}

fn qemu() -> Option<String> {
    let found = Command::new("sh").args(["-c", "command -v qemu-system-x86_64"]).output().expect("a shell");
    Some(String::from_utf8_lossy(&found.stdout).trim().to_owned()).filter(|path| !path.is_empty())
}

/// The double's kernel.
fn kernel() -> PathBuf {
    cache_dir().join("microvm/vmlinuz")
}

/// The double's programs, under the names that they go by.
fn double(directory: &Path) -> Vec<(&'static str, String)> {
    let lock = File::create(std::env::temp_dir().join("emergent-test-microvm.lock")).expect("a lock");
    lock.lock().expect("the lock can be taken");
    let program = directory.join(DOUBLE);
    if !program.exists() {
        build(directory, DOUBLE);
    }
    let guest = cache_dir().join("microvm");
    let qemu = qemu().filter(|_| kernel().exists());
    let qemu = qemu.expect("QEMU and a kernel for tests are missing: `scripts/setup test` gets them");
    let settings = json!({
        "qemu": qemu,
        "vhost_device_vsock": guest.join("bin/vhost-device-vsock"),
        "modules": guest.join("modules.cpio"),
    });
    let double = directory.join("vmm-double");
    fs::create_dir_all(&double).expect("a directory");
    fs::write(double.join("double.json"), settings.to_string()).expect("a file");
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

/// A request to a manager on its socket.
pub async fn ask_manager(directory: &Path, method: &str, path: &str, body: Option<Value>) -> Answer {
    let token = fs::read_to_string(directory.join("manager-token")).expect("a token");
    ask_manager_as(directory, token.trim(), method, path, body).await
}

/// The same with another token.
pub async fn ask_manager_as(
    directory: &Path,
    token: &str,
    method: &str,
    path: &str,
    body: Option<Value>,
) -> Answer {
    let client =
        reqwest::Client::builder().unix_socket(directory.join("manager.sock")).build().expect("a client");
    let mut request =
        client.request(method.parse().expect("a method"), format!("http://manager{path}")).bearer_auth(token);
    if let Some(body) = body {
        request = request.json(&body);
    }
    let response = request.send().await.unwrap_or_else(|error| panic!("{method} {path}: {error:?}"));
    let status = response.status().as_u16();
    let bytes = response.bytes().await.expect("a body");
    Answer { status, body: serde_json::from_slice(&bytes).unwrap_or(Value::Null) }
}

/// Waits until a manager on its socket has looked after all that an earlier one left.
pub async fn wait_until_recovered(directory: &Path) {
    let begun = Instant::now();
    while ask_manager(directory, "GET", "/v1/health", None).await.ok()["recovering"] == true {
        assert!(begun.elapsed() < Duration::from_secs(150), "the manager is not done with what was left");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// A manager that is a process of its own.
pub struct TestManager {
    binary: PathBuf,
    environment: Vec<(String, String)>,
    directory: PathBuf,
    process: Child,
    janitor: Janitor,
}

impl TestManager {
    /// Starts a manager on a directory of its own.
    pub async fn start(microvms: &Microvms, binary: &str, more: &[(&str, &str)]) -> Self {
        let directory =
            tempfile::Builder::new().prefix("emergent-manager-").tempdir().expect("a directory").keep();
        let janitor = Janitor::of(&directory);
        microvms.seed(&directory);
        let environment = microvms.environment(more).into_iter();
        let environment: Vec<_> =
            environment.map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
        let process = spawn(Path::new(binary), &directory, &environment);
        let mut manager = Self { binary: binary.into(), environment, directory, process, janitor };
        manager.wait_until_it_answers(1).await;
        manager.wait_until_recovered().await;
        manager
    }

    /// How often managers of this directory have said that they listen.
    fn starts(&self) -> usize {
        self.log().matches("listening on").count()
    }

    /// Waits for the manager that is the so-manieth. A child of one that was killed may still hold its socket for a moment.
    async fn wait_until_it_answers(&mut self, starts: usize) {
        let begun = Instant::now();
        loop {
            if let Some(status) = self.process.try_wait().expect("the process can be waited for") {
                panic!("the manager ended with {status}:\n{}", self.log());
            }
            assert!(begun.elapsed() < Duration::from_secs(60), "the manager does not begin:\n{}", self.log());
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

    /// What it wrote to standard output and error.
    pub fn log(&self) -> String {
        fs::read_to_string(self.directory.join("test.log")).unwrap_or_default()
    }

    /// Its directory.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Its address, for a server.
    pub fn url(&self) -> String {
        let log = self.log();
        let url = log.lines().filter_map(|line| line.strip_prefix("listening on ")).next_back();
        url.expect("it has said where it listens").to_owned()
    }

    /// Its token.
    pub fn token(&self) -> String {
        fs::read_to_string(self.directory.join("manager-token")).expect("a token").trim().to_owned()
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    /// A request with its token.
    pub async fn request(&self, method: &str, path: &str, body: Option<Value>) -> Answer {
        ask_manager(&self.directory, method, path, body).await
    }

    /// Kills it with SIGKILL.
    pub fn kill(&mut self) {
        self.process.kill().expect("the manager can be killed");
        self.process.wait().expect("it ends");
    }

    /// Waits until it has been killed, by whomever.
    pub fn wait_until_killed(&mut self) {
        let begun = Instant::now();
        while self.process.try_wait().expect("the process can be waited for").is_none() {
            assert!(begun.elapsed() < Duration::from_secs(150), "the manager lives:\n{}", self.log());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Starts it again with more variables, which are not kept for the next time, and lets it look after what is left.
    pub async fn start_again(&mut self, more: &[(&str, &str)]) {
        self.begin_again(more).await;
        self.wait_until_recovered().await;
    }

    /// Waits until it has looked after all that an earlier one left, if it listens on its own socket.
    pub async fn wait_until_recovered(&self) {
        if self.url().starts_with("unix:") && self.directory.join("manager-token").exists() {
            wait_until_recovered(&self.directory).await;
        }
    }

    /// The same as [`Self::start_again`], without waiting for what it does in the background.
    pub async fn begin_again(&mut self, more: &[(&str, &str)]) {
        let mut environment = self.environment.clone();
        environment.extend(more.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())));
        let starts = self.starts() + 1;
        self.process = spawn(&self.binary, &self.directory, &environment);
        self.wait_until_it_answers(starts).await;
    }

    /// Sends SIGTERM and waits.
    pub fn terminate(&mut self) {
        run("kill", &[&self.pid().to_string()]);
        let begun = Instant::now();
        while self.process.try_wait().expect("the process can be waited for").is_none() {
            assert!(begun.elapsed() < Duration::from_secs(60), "the manager did not stop:\n{}", self.log());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// What it made and has not removed.
    pub fn leftovers(&self) -> Vec<String> {
        leftovers_of_manager(&self.directory)
    }

    /// Stops it and asserts that nothing is left.
    #[track_caller]
    pub fn stop(mut self) {
        self.terminate();
        let left = self.leftovers();
        assert!(left.is_empty(), "left behind: {left:#?}\n{}", self.log());
    }
}

fn spawn(binary: &Path, directory: &Path, environment: &[(String, String)]) -> Child {
    let log =
        fs::OpenOptions::new().create(true).append(true).open(directory.join("test.log")).expect("a log");
    Command::new(binary)
        .args(["firecracker-manager", "--data-dir"])
        .arg(directory)
        .envs(environment.iter().map(|(name, value)| (name, value)))
        .current_dir(directory)
        .stdin(Stdio::null())
        .stdout(log.try_clone().expect("a second handle"))
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
                "--- the manager's log ends with ---\n{}",
                lines[lines.len().saturating_sub(40)..].join("\n")
            );
        }
        self.janitor.call();
        let _ = self.process.kill();
        let _ = self.process.wait();
        self.janitor.wait();
    }
}

impl TestManager {
    /// The id of the workspace image, which the manager is given unless it has it.
    pub async fn image(&self) -> String {
        const IMAGE: &str = "emergent/workspace:latest";
        let digest = run("docker", &["image", "inspect", "--format", "{{.Id}}", IMAGE]).trim().to_owned();
        let path = format!("/v1/images/{digest}");
        if self.request("GET", &path, None).await.status != 200 {
            self.put_image(&path, IMAGE).await.ok();
        }
        digest
    }

    /// A request for a small microVM of this manager.
    pub async fn asked(&self, microvms: &Microvms) -> Value {
        json!({
            "installation": InstallationId::generate(),
            "image": self.image().await,
            "limits": microvms.small()["resource_limits"],
            "network": "nat",
        })
    }

    /// Sends the files of an image, under the path of another if need be.
    pub async fn put_image(&self, path: &str, image: &str) -> Answer {
        let archive = tempfile::NamedTempFile::new().expect("a file");
        // The janitor removes it if the test does not.
        let label = format!("emergent.test={}", self.directory.display());
        let container = run("docker", &["create", "--label", &label, image, "none"]).trim().to_owned();
        run("docker", &["export", "--output", &archive.path().to_string_lossy(), &container]);
        run("docker", &["rm", &container]);
        let token = self.token();
        let client = reqwest::Client::builder().unix_socket(self.directory.join("manager.sock")).build();
        let request = client.expect("a client").put(format!("http://manager{path}")).bearer_auth(token);
        let sent = request.body(fs::read(archive.path()).expect("an archive")).send().await;
        match sent {
            Ok(response) => Answer {
                status: response.status().as_u16(),
                body: response.json().await.unwrap_or(Value::Null),
            },
            // It may have died of it.
            Err(_) => Answer { status: 0, body: Value::Null },
        }
    }

    /// A request that the manager may not live to answer.
    pub async fn request_in_vain(&self, method: &str, path: &str, body: Option<Value>) {
        let token = self.token();
        let client = reqwest::Client::builder().unix_socket(self.directory.join("manager.sock")).build();
        let method = method.parse().expect("a method");
        let mut request = client.expect("a client").request(method, format!("http://manager{path}"));
        if let Some(body) = body {
            request = request.json(&body);
        }
        if let Ok(answer) = request.bearer_auth(token).send().await {
            // Seen when the test fails.
            eprintln!("{path}: {} {}", answer.status(), answer.text().await.unwrap_or_default());
        }
    }
}
