//! Runs a test in its own namespaces, so that its agent has its own ports, processes and files.
#![allow(dead_code, reason = "each test binary uses a part")]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};

use emergent_guest_client::GuestClient;

/// Set inside the namespaces.
const INSIDE: &str = "EMERGENT_TEST_INSIDE";
/// The size of `/workspace`, unless a test needs another.
pub(crate) const WORKSPACE_BYTES: u64 = 256 << 20;

/// Runs `test`, which is the whole test called `name`, in namespaces of its own.
pub(crate) fn inside(name: &str, workspace_bytes: u64, test: impl AsyncFnOnce()) {
    if std::env::var_os(INSIDE).is_some() {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
        runtime.block_on(test());
        return;
    }
    let root = tempfile::tempdir().unwrap();
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/sandbox/enter.sh");
    let mut command = Command::new("unshare");
    // Without root, user ids are mapped.
    if std::fs::metadata("/proc/self").is_ok_and(|own| std::os::unix::fs::MetadataExt::uid(&own) != 0) {
        command.arg("--map-root-user");
    }
    let status = command
        .args(["--net", "--mount", "--pid", "--ipc", "--fork", "--kill-child", "sh", script])
        .arg(root.path())
        .arg(workspace_bytes.to_string())
        .arg(std::env::current_exe().unwrap())
        .args([name, "--exact", "--nocapture"])
        .env(INSIDE, "1")
        .status()
        .unwrap();
    assert!(status.success(), "{status}");
}

/// An agent and its first channel.
pub(crate) struct Agent {
    pub(crate) child: Child,
    pub(crate) client: GuestClient,
}

impl Agent {
    /// Starts the real agent on a socket.
    pub(crate) async fn start() -> Self {
        Self::start_by(&mut Command::new(env!("CARGO_BIN_EXE_emergent-guest"))).await
    }

    /// Starts the real agent as the first process of further namespaces. `child` is its parent.
    pub(crate) async fn start_as_first_process() -> Self {
        let mut unshare = Command::new("unshare");
        unshare.args(["--pid", "--mount-proc", "--fork", "--kill-child"]);
        Self::start_by(unshare.arg(env!("CARGO_BIN_EXE_emergent-guest"))).await
    }

    async fn start_by(command: &mut Command) -> Self {
        let (host, guest) = UnixStream::pair().unwrap();
        let child = command
            .arg("init")
            .stdin(Stdio::from(OwnedFd::from(guest.try_clone().unwrap())))
            .stdout(Stdio::from(OwnedFd::from(guest)))
            .spawn()
            .unwrap();
        host.set_nonblocking(true).unwrap();
        let (reader, writer) = tokio::io::split(tokio::net::UnixStream::from_std(host).unwrap());
        Self { child, client: GuestClient::connect(reader, writer).await.unwrap() }
    }

    /// The number of the agent's open descriptors.
    pub(crate) fn descriptors(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.child.id())).unwrap().count()
    }

    /// The number of the agent's threads.
    pub(crate) fn threads(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/task", self.child.id())).unwrap().count()
    }

    /// The names of the agent's threads.
    pub(crate) fn thread_names(&self) -> Vec<String> {
        let threads = std::fs::read_dir(format!("/proc/{}/task", self.child.id())).unwrap();
        let names = threads.map(|thread| std::fs::read_to_string(thread.unwrap().path().join("comm")));
        // A thread may end meanwhile.
        names.filter_map(|name| Some(name.ok()?.trim_end().to_owned())).collect()
    }

    /// The agent's resident memory.
    pub(crate) fn resident_kib(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        line.trim().trim_end_matches(" kB").parse().unwrap()
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
