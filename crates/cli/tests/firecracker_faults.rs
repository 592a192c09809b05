//! What goes wrong with microVMs: each time a clear error within a bounded time, another provider where one may be taken,
//! and nothing left.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use emergent_test_support::microvm::{Microvms, TestManager, ask_manager, ask_manager_as};
use emergent_test_support::server::{Answer, TestServer, leftovers_of_manager, run};
use emergent_wire::{SnapshotId, WorkspaceId};
use futures_util::future::join_all;
use serde_json::{Value, json};

const BINARY: &str = env!("CARGO_BIN_EXE_emergent");
const WORKSPACES: &str = "/api/v1/agent/workspaces";

fn manager_dir(server: &TestServer) -> PathBuf {
    server.data_dir().join("firecracker")
}

/// How the interfaces and chains of a manager begin.
fn manager_name(directory: &Path) -> String {
    let identity: Value =
        serde_json::from_slice(&std::fs::read(directory.join("manager.json")).unwrap()).unwrap();
    format!("fc{:06x}", identity["manager"].as_u64().unwrap())
}

fn message(answer: &Answer) -> String {
    answer.body["error"]["message"].as_str().unwrap_or_else(|| panic!("{answer:?}")).to_owned()
}

/// What a manager has made, but for what it keeps for the next microVM.
fn left(directory: &Path) -> Vec<String> {
    let all = leftovers_of_manager(directory).into_iter();
    all.filter(|each| !["interface ", "rule ", "control group "].iter().any(|kept| each.starts_with(kept)))
        .collect()
}

/// A creation that must fail on Firecracker with these words, leave nothing, and succeed elsewhere.
async fn fails_and_falls_back(microvms: &Microvms, server: &TestServer, words: &[&str]) {
    let refused = server.request("POST", WORKSPACES, Some(microvms.small())).await;
    assert!(refused.status >= 500, "{refused:?}");
    let said = message(&refused);
    for word in words {
        assert!(said.contains(word), "{word}: {said}");
    }
    assert_eq!(left(&manager_dir(server)), Vec::<String>::new());
    let mut asked = microvms.small();
    asked["provider"] = json!("auto");
    let created = server.request("POST", WORKSPACES, Some(asked)).await.ok();
    assert_eq!(created["provider"], "gvisor", "{created}");
    assert!(created["placement"]["rejected"].to_string().contains("firecracker"), "{created}");
    assert_eq!(left(&manager_dir(server)), Vec::<String>::new());
    server.destroy(created["id"].as_str().unwrap()).await;
}

#[tokio::test]
async fn a_file_that_is_no_kernel_is_said_so() {
    let microvms = Microvms::find(BINARY);
    let server = microvms.start(BINARY, &[("FIRECRACKER_KERNEL", "/etc/passwd")]).await;
    fails_and_falls_back(&microvms, &server, &["kernel", "Firecracker refused"]).await;
    server.stop();
}

#[tokio::test]
async fn an_agent_that_never_comes_up_is_waited_for_as_long_as_was_said() {
    let microvms = Microvms::find(BINARY);
    let server = microvms.start(BINARY, &[("FIRECRACKER_BOOT_TIMEOUT_SECONDS", "1")]).await;
    fails_and_falls_back(&microvms, &server, &["the start of the guest agent did not end within 1 s"]).await;
    server.stop();
}

#[tokio::test]
async fn a_root_disk_that_is_damaged_is_said_so() {
    let microvms = Microvms::find(BINARY);
    let server = microvms.start(BINARY, &[]).await;
    let id = server.create(microvms.small()).await;
    server.destroy(&id).await;
    // A copy of the image in its place, of which other tests have the original.
    let images: Vec<PathBuf> = std::fs::read_dir(manager_dir(&server).join("images"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "ext4"))
        .collect();
    let damage = |keep: usize| {
        for image in &images {
            let mut bytes = std::fs::read(image).unwrap();
            bytes[keep..].fill(0);
            std::fs::remove_file(image).unwrap();
            std::fs::write(image, bytes).unwrap();
        }
    };
    damage(4096);
    fails_and_falls_back(
        &microvms,
        &server,
        &["ended before its agent was ready", "the root disk can't be mounted"],
    )
    .await;
    // One that can be seen to be no file system at all is made again.
    damage(0);
    let id = server.create(microvms.small()).await;
    server.destroy(&id).await;
    server.stop();
}

#[tokio::test]
async fn a_microvm_that_dies_is_started_again_with_its_disk() {
    let microvms = Microvms::find(BINARY);
    let server = microvms.start(BINARY, &[]).await;
    let id = server.create(microvms.small()).await;
    server.bash(&id, "echo kept > file; sync").await;
    let path = format!("/v1/machines/{id}");
    // Its kernel panics, then its process is killed from outside.
    for (how, expected) in [("panic", "Kernel panic"), ("kill", "its process has ended")] {
        let before = ask_manager(&manager_dir(&server), "GET", &path, None).await.ok();
        if how == "panic" {
            // A way that every kernel has: no memory, at once, since it keeps all of it for itself.
            let command = "cd /proc/sys/vm; echo 2 > panic_on_oom; \
                           awk '/MemTotal/ { print $2 }' /proc/meminfo > min_free_kbytes; tail /dev/zero";
            // It may not live to answer.
            server.tool(&id, "bash", json!({ "command": command, "background": true })).await;
        } else {
            run("kill", &["-KILL", &before["pid"].to_string()]);
        }
        let begun = Instant::now();
        loop {
            let now = ask_manager(&manager_dir(&server), "GET", &path, None).await.ok();
            if now["phase"] == "stopped" {
                assert!(now["ended"].as_str().unwrap().contains(expected), "{now}");
                break;
            }
            assert!(begun.elapsed() < microvms.patience(Duration::from_secs(3)), "{how}: {now}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        assert_eq!(server.bash(&id, "cat file").await, "kept\n", "{how}");
        let after = ask_manager(&manager_dir(&server), "GET", &path, None).await.ok();
        assert_ne!(after["pid"], before["pid"], "{how}");
    }
    server.destroy(&id).await;
    microvms.keep_images(&manager_dir(&server));
    server.stop();
}

#[tokio::test]
async fn a_guest_that_floods_its_console_and_its_vsock_floods_nobody_else() {
    let microvms = Microvms::find(BINARY);
    let server = microvms.start(BINARY, &[]).await;
    let id = server.create(microvms.small()).await;
    server.begin(&id, "cat /dev/zero | tr '\\0' x > /dev/console").await;
    // Connections to all that might listen on the host, and to its own agent's port there.
    let connect = "perl -e 'for $port (22, 52, 1024, 1025, 1026) { socket(my $s, 40, 1, 0) or die; \
                   connect($s, pack(\"SSLLx4\", 40, 0, $port, 2)) and print \"$port \" } print \"done\"'";
    assert_eq!(server.bash(&id, connect).await, "done");
    assert_eq!(server.bash(&id, "echo still here").await, "still here\n");
    let directory = manager_dir(&server);
    // Beside its disk there is what is written down of it, and nothing of what it printed.
    let files = std::fs::read_dir(directory.join("machines").join(&id)).unwrap().flatten();
    let files = files.filter(|entry| entry.file_name() != "disk.ext4");
    let taken: u64 = files.map(|entry| entry.metadata().unwrap().len()).sum();
    assert!(taken < 64 << 10, "what it printed is kept: {taken} bytes");
    let health = ask_manager(&directory, "GET", "/v1/health", None).await.ok();
    assert_eq!(health["healthy"], true, "{health}");
    server.destroy(&id).await;
    microvms.keep_images(&directory);
    server.stop();
}

#[tokio::test]
async fn a_manager_that_is_away_frozen_or_back_is_survived() {
    let microvms = Microvms::find(BINARY);
    let mut manager = TestManager::start(&microvms, BINARY, &[]).await;
    let url = manager.url();
    let settings = [("FIRECRACKER_MANAGER_URL", url.as_str()), ("EMERGENT_FIRECRACKER", "true")];
    let server = TestServer::start_with(BINARY, &settings).await;
    let id = server.create(microvms.small()).await;
    server.bash(&id, "echo kept > file").await;
    let pid = manager.request("GET", &format!("/v1/machines/{id}"), None).await.ok()["pid"].clone();
    manager.kill();
    // Away: a clear error, and another provider for what is new.
    let refused = server.tool(&id, "bash", json!({ "command": "true" })).await;
    assert!((500..600).contains(&refused.status), "{refused:?}");
    assert!(message(&refused).contains("does not answer"), "{refused:?}");
    let mut asked = microvms.small();
    asked["provider"] = json!("auto");
    let elsewhere = server.request("POST", WORKSPACES, Some(asked)).await;
    let elsewhere = match elsewhere.status {
        201 => elsewhere.ok(),
        // Its last check was before that.
        _ => panic!("{elsewhere:?}"),
    };
    assert_eq!(elsewhere["provider"], "gvisor");
    server.destroy(elsewhere["id"].as_str().unwrap()).await;
    // Back: the microVM has noticed nothing.
    manager.start_again(&[]).await;
    assert_eq!(server.bash(&id, "cat file").await, "kept\n");
    assert_eq!(manager.request("GET", &format!("/v1/machines/{id}"), None).await.ok()["pid"], pid);
    // Frozen: bounded.
    run("kill", &["-STOP", &manager.pid().to_string()]);
    let begun = Instant::now();
    let refused = server.request("POST", WORKSPACES, Some(microvms.small())).await;
    assert!(refused.status >= 500, "{refused:?}");
    run("kill", &["-CONT", &manager.pid().to_string()]);
    assert!(begun.elapsed() < Duration::from_secs(180), "it took {:?}", begun.elapsed());
    assert_eq!(server.bash(&id, "cat file").await, "kept\n");
    server.destroy(&id).await;
    // What the frozen creation might have made is removed by the server when it looks again.
    let begun = Instant::now();
    while !left(manager.directory()).is_empty() {
        assert!(begun.elapsed() < Duration::from_secs(90), "{:?}", left(manager.directory()));
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    server.stop();
    microvms.keep_images(manager.directory());
    manager.stop();
}

#[tokio::test]
async fn a_wrong_token_opens_nothing() {
    let microvms = Microvms::find(BINARY);
    let manager = TestManager::start(&microvms, BINARY, &[]).await;
    for path in ["/v1/health", "/v1/machines", "/v1/nowhere"] {
        for token in ["", "wrong"] {
            let refused = ask_manager_as(manager.directory(), token, "GET", path, None).await;
            assert_eq!(refused.error(401), "unauthorized");
        }
    }
    // A variable that is empty is no token that is empty.
    let other = TestManager::start(&microvms, BINARY, &[("FIRECRACKER_MANAGER_TOKEN", "")]).await;
    let refused = ask_manager_as(other.directory(), "", "GET", "/v1/machines", None).await;
    assert_eq!(refused.error(401), "unauthorized");
    other.request("GET", "/v1/machines", None).await.ok();
    other.stop();
    let url = manager.url();
    let settings = [
        ("FIRECRACKER_MANAGER_URL", url.as_str()),
        ("FIRECRACKER_MANAGER_TOKEN", "wrong"),
        ("EMERGENT_FIRECRACKER", "true"),
    ];
    let server = TestServer::start_with(BINARY, &settings).await;
    let refused = server.request("POST", WORKSPACES, Some(microvms.small())).await;
    assert!(message(&refused).contains("refuses the token (FIRECRACKER_MANAGER_TOKEN)"), "{refused:?}");
    assert!(!server.log().contains("wrong\""), "{}", server.log());
    server.stop();
    manager.stop();
}

#[tokio::test]
async fn a_host_without_room_is_asked_before() {
    let microvms = Microvms::find(BINARY);
    let server = microvms.start(BINARY, &[]).await;
    let mut asked = microvms.small();
    asked["resource_limits"]["memory"] = json!("900G");
    let refused = server.request("POST", WORKSPACES, Some(asked)).await;
    let said = message(&refused);
    assert!(said.contains("of memory left") || said.contains("resource_limits"), "{said}");
    let mut asked = microvms.small();
    asked["resource_limits"]["disk"] = json!("64M");
    let refused = server.request("POST", WORKSPACES, Some(asked)).await;
    assert!(message(&refused).contains("disk"), "{refused:?}");
    assert_eq!(left(&manager_dir(&server)), Vec::<String>::new());
    server.stop();
}

#[tokio::test]
async fn a_full_disk_is_said_and_leaves_nothing() {
    let microvms = Microvms::find(BINARY);
    // The manager's directory is a small disk of its own, which the janitor unmounts.
    let mut manager = TestManager::start(&microvms, BINARY, &[]).await;
    manager.terminate();
    let directory = manager.directory().to_owned();
    run("mount", &["-t", "tmpfs", "-o", "size=900M", "small", directory.to_str().unwrap()]);
    manager.start_again(&[]).await;
    let asked = manager.asked(&microvms).await;
    let path = format!("/v1/machines/{}", WorkspaceId::generate());
    let refused = manager.request("PUT", &path, Some(asked)).await;
    let said = message(&refused);
    assert!(said.contains("the host's disk has no room"), "{said}");
    assert_eq!(left(&directory), Vec::<String>::new());
    manager.request("GET", &path, None).await.error(404);
    // An image that does not fit leaves no half of it.
    run(
        "dd",
        &[
            "if=/dev/zero",
            &format!("of={}", directory.join("filler").display()),
            "bs=1M",
            "count=600",
            "status=none",
        ],
    );
    let refused = manager.put_image("/v1/images/another", "emergent/workspace:latest").await;
    assert!(message(&refused).contains("No space left"), "{refused:?}");
    assert_eq!(left(&directory), Vec::<String>::new());
    manager.stop();
}

#[tokio::test]
async fn a_full_disk_keeps_nobody_from_ending_what_fills_it() {
    let microvms = Microvms::find(BINARY);
    let mut manager = TestManager::start(&microvms, BINARY, &[]).await;
    manager.terminate();
    // A disk on which nothing is kept back for root; the janitor unmounts it.
    let (directory, images) = (manager.directory().to_owned(), tempfile::tempdir().unwrap());
    let image = images.path().join("disk");
    std::fs::File::create(&image).unwrap().set_len(6 << 30).unwrap();
    run("mkfs.ext4", &["-q", "-m", "0", image.to_str().unwrap()]);
    run("mount", &["-o", "loop", image.to_str().unwrap(), directory.to_str().unwrap()]);
    manager.start_again(&[]).await;
    let asked = manager.asked(&microvms).await;
    let path = |id: WorkspaceId| format!("/v1/machines/{id}");
    let (first, second) = (WorkspaceId::generate(), WorkspaceId::generate());
    for id in [first, second] {
        manager.request("PUT", &path(id), Some(asked.clone())).await.ok();
    }
    let filler = directory.join("filler");
    // But for what the test reads.
    let fill = "fallocate -n -l 1M test.log; fallocate -l $(($(stat -f -c %a .) * $(stat -f -c %S .))) filler; \
                for name in $(seq 5000); do echo > filler-$name || exit 0; done";
    run("sh", &["-c", &format!("cd {} && {fill}", directory.display())]);
    let full = std::fs::write(directory.join("more"), vec![1; 1 << 20]).unwrap_err();
    assert_eq!(full.kind(), std::io::ErrorKind::StorageFull);
    let stopped = manager.request("POST", &format!("{}/stop", path(first)), None).await.ok();
    assert_eq!(stopped["phase"], "stopped");
    let copy = format!("/v1/snapshots/{}", SnapshotId::generate());
    let refused = manager.request("PUT", &copy, Some(json!({ "machine": second }))).await;
    assert!(message(&refused).contains("the host's disk has no room"), "{refused:?}");
    // What was to be copied goes on.
    let machine = manager.request("GET", &path(second), None).await.ok();
    assert_eq!(machine["phase"], "running");
    // Another manager can begin, or nobody could remove anything.
    manager.kill();
    manager.start_again(&[]).await;
    let machine = manager.request("GET", &path(second), None).await.ok();
    assert_eq!(machine["phase"], "running");
    // Removed: the one that runs, and the other.
    manager.request("DELETE", &path(second), None).await.ok();
    manager.request("DELETE", &path(first), None).await.ok();
    assert_eq!(left(&directory), Vec::<String>::new());
    std::fs::remove_file(filler).unwrap();
    manager.request("PUT", &path(first), Some(asked)).await.ok();
    manager.request("DELETE", &path(first), None).await.ok();
    manager.stop();
}

#[tokio::test]
async fn a_process_of_another_run_of_the_host_is_nobodys() {
    let microvms = Microvms::find(BINARY);
    let mut manager = TestManager::start(&microvms, BINARY, &[]).await;
    let id = WorkspaceId::generate();
    let asked = manager.asked(&microvms).await;
    let path = format!("/v1/machines/{id}");
    manager.request("PUT", &path, Some(asked)).await.ok();
    manager.request("POST", &format!("{path}/stop"), None).await.ok();
    manager.terminate();
    // As after a start of the host in which the numbers come out the same.
    let mut other = std::process::Command::new("sleep").arg("600").spawn().unwrap();
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", other.id())).unwrap();
    let start_time: u64 = stat.split(' ').nth(21).unwrap().parse().unwrap();
    let file = manager.directory().join(format!("machines/{id}/machine.json"));
    let mut record: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    record["phase"] = json!("running");
    record["process"] = json!({ "pid": other.id(), "start_time": start_time });
    record["boot"] = json!("another");
    std::fs::write(&file, record.to_string()).unwrap();
    manager.start_again(&[]).await;
    let machine = manager.request("GET", &path, None).await.ok();
    assert_eq!((&machine["phase"], &machine["pid"]), (&json!("stopped"), &Value::Null), "{machine}");
    manager.request("DELETE", &path, None).await.ok();
    assert!(other.try_wait().unwrap().is_none());
    other.kill().unwrap();
    other.wait().unwrap();
    microvms.keep_images(manager.directory());
    manager.stop();
}

#[tokio::test]
async fn an_interface_of_somebody_else_is_left_alone() {
    let microvms = Microvms::find(BINARY);
    let server = microvms.start(BINARY, &[]).await;
    let name = format!("{}-0", manager_name(&manager_dir(&server)));
    // The manager's own was made when it began.
    run("ip", &["link", "delete", &name]);
    run("ip", &["link", "add", &name, "type", "veth", "peer", "name", &format!("{name}p")]);
    fails_and_falls_back(&microvms, &server, &[&name, "somebody else"]).await;
    let kind = run("ip", &["-d", "link", "show", &name]);
    assert!(kind.contains("veth"), "{kind}");
    run("ip", &["link", "delete", &name]);
    let id = server.create(microvms.small()).await;
    server.destroy(&id).await;
    microvms.keep_images(&manager_dir(&server));
    server.stop();
}

#[tokio::test]
async fn rules_that_others_take_away_come_back() {
    let microvms = Microvms::find(BINARY);
    let mut manager = TestManager::start(&microvms, BINARY, &[]).await;
    let asked = manager.asked(&microvms).await;
    let path = format!("/v1/machines/{}", WorkspaceId::generate());
    let made = manager.request("PUT", &path, Some(asked)).await.ok();
    let interface = made["interface"].as_str().unwrap();
    let prefix = interface.rsplit_once('-').unwrap().0;
    let count = || run("iptables-save", &[]).lines().filter(|line| line.contains(prefix)).count();
    let before = count();
    assert!(before > 20, "{before}");
    let (parent, chain) = (["-t", "filter", "-D", "FORWARD", "-i"], format!("{prefix}-fwd"));
    run("iptables", &[&["-w", "5"], &parent[..], &[&format!("{prefix}-+"), "-j", &chain]].concat());
    run("iptables", &["-w", "5", "-t", "filter", "-F", &chain]);
    assert!(count() < before);
    // A manager that starts looks at them, as one that runs does each minute.
    manager.terminate();
    manager.start_again(&[]).await;
    assert_eq!(count(), before);
    manager.request("DELETE", &path, None).await.ok();
    microvms.keep_images(manager.directory());
    manager.stop();
}

/// A manager whose firewall rules can be locked: only the older of the two kinds of iptables has a lock, so for this manager
/// it is in the place of the other.
struct LockableRules {
    manager: TestManager,
    lock: std::fs::File,
    _directory: tempfile::TempDir,
}

impl LockableRules {
    async fn start(microvms: &Microvms) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let program = directory.path().join("manager");
        let script = format!(
            "#!/bin/sh\nexec unshare --mount sh -c 'mount --make-rprivate / && \
             mount --bind /usr/sbin/xtables-legacy-multi /usr/sbin/xtables-nft-multi && exec \"$@\"' sh {BINARY} \"$@\"\n"
        );
        std::fs::write(&program, script).unwrap();
        run("chmod", &["755", program.to_str().unwrap()]);
        let file = directory.path().join("xtables.lock");
        let lock = std::fs::File::create(&file).unwrap();
        let variables = [("XTABLES_LOCKFILE", file.to_str().unwrap())];
        let manager = TestManager::start(microvms, program.to_str().unwrap(), &variables).await;
        Self { manager, lock, _directory: directory }
    }

    fn lock(&self) {
        self.lock.lock().unwrap();
    }

    fn unlock(&self) {
        self.lock.unlock().unwrap();
    }

    async fn somebody_waits(&self) {
        let waits = || run("sh", &["-c", &format!("pgrep -P {} -c iptables || true", self.manager.pid())]);
        let begun = Instant::now();
        while waits().trim() == "0" {
            assert!(begun.elapsed() < Duration::from_secs(60), "nobody waits for the lock");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Waits until a microVM is in a phase, or gone.
    async fn wait_for(&self, path: &str, phase: &str) -> Value {
        let begun = Instant::now();
        loop {
            let machine = self.manager.request("GET", path, None).await.body;
            if machine["phase"].as_str().unwrap_or("gone") == phase {
                return machine;
            }
            assert!(begun.elapsed() < Duration::from_secs(100), "it is not {phase}: {machine}");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    fn stop(self, microvms: &Microvms) {
        microvms.keep_images(self.manager.directory());
        let own = manager_name(self.manager.directory());
        self.manager.stop();
        let rules = run("iptables-legacy-save", &[]) + &run("ip6tables-legacy-save", &[]);
        assert!(!rules.contains(&own), "{rules}");
    }
}

#[tokio::test]
async fn rules_that_another_program_has_locked_are_waited_for() {
    let microvms = Microvms::find(BINARY);
    let rules = LockableRules::start(&microvms).await;
    let manager = &rules.manager;
    let url = manager.url();
    let known = [("FIRECRACKER_MANAGER_URL", url.as_str()), ("EMERGENT_FIRECRACKER", "true")];
    let server = TestServer::start_with(BINARY, &known).await;

    // For a while: the microVM is made all the same.
    rules.lock();
    let released = async {
        rules.somebody_waits().await;
        rules.unlock();
    };
    let (id, ()) = tokio::join!(server.create(microvms.small()), released);
    assert_eq!(server.bash(&id, "echo made").await, "made\n");
    server.destroy(&id).await;

    // One that is asked for while it is being removed is made anew.
    let path = format!("/v1/machines/{}", WorkspaceId::generate());
    let asked = manager.asked(&microvms).await;
    let first = manager.request("PUT", &path, Some(asked.clone())).await.ok();
    rules.lock();
    let asked_again = async {
        rules.somebody_waits().await;
        let released = async {
            // The other request is on its way by then.
            assert_eq!(manager.request("GET", &path, None).await.ok()["phase"], "removing");
            rules.unlock();
        };
        tokio::join!(manager.request("PUT", &path, Some(asked)), released).0
    };
    let (removed, again) = tokio::join!(manager.request("DELETE", &path, None), asked_again);
    assert_eq!(removed.status, 204, "{removed:?}");
    let again = again.ok();
    assert_eq!(again["phase"], "running");
    assert_ne!(again["pid"], first["pid"]);
    manager.request("DELETE", &path, None).await.ok();

    // For long: it is said to a server, which takes another provider.
    rules.lock();
    let refused = server.request("POST", WORKSPACES, Some(microvms.small())).await;
    assert!(message(&refused).contains("xtables lock"), "{refused:?}");
    let mut asked = microvms.small();
    asked["provider"] = json!("auto");
    let created = server.request("POST", WORKSPACES, Some(asked)).await.ok();
    assert_eq!(created["provider"], "gvisor", "{created}");
    server.destroy(created["id"].as_str().unwrap()).await;
    rules.unlock();
    // What could not be removed meanwhile goes when it can.
    let begun = Instant::now();
    while !left(manager.directory()).is_empty() {
        assert!(begun.elapsed() < Duration::from_secs(100), "{:?}", left(manager.directory()));
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    server.stop();
    rules.stop(&microvms);
}

#[tokio::test]
async fn what_locked_rules_kept_from_its_end_is_ended_later() {
    let microvms = Microvms::find(BINARY);
    let mut rules = LockableRules::start(&microvms).await;
    let path = format!("/v1/machines/{}", WorkspaceId::generate());
    let asked = rules.manager.asked(&microvms).await;
    let made = rules.manager.request("PUT", &path, Some(asked)).await.ok();

    // One that ends by itself.
    rules.lock();
    run("kill", &["-KILL", &made["pid"].to_string()]);
    rules.wait_for(&path, "ending").await;
    let refused = rules.manager.request("POST", &format!("{path}/start"), None).await;
    assert!(message(&refused).contains("xtables lock"), "{refused:?}");
    rules.unlock();
    let stopped = rules.wait_for(&path, "stopped").await;
    assert!(stopped["ended"].as_str().unwrap().contains("its process has ended"), "{stopped}");
    rules.manager.request("POST", &format!("{path}/start"), None).await.ok();

    // One that is to be removed stays that, also for the next manager, which does not wait for it before it answers …
    rules.lock();
    let refused = rules.manager.request("DELETE", &path, None).await;
    assert!(message(&refused).contains("xtables lock"), "{refused:?}");
    rules.manager.terminate();
    let begins = async |manager: &mut TestManager| {
        manager.begin_again(&[]).await;
        assert_eq!(manager.request("GET", &path, None).await.ok()["phase"], "removing");
        assert_ne!(left(manager.directory()), Vec::<String>::new());
    };
    begins(&mut rules.manager).await;
    // … nor before it ends.
    rules.somebody_waits().await;
    let given_up = |manager: &TestManager| manager.log().matches("could not be put back").count();
    let before = given_up(&rules.manager);
    rules.manager.terminate();
    assert_eq!(given_up(&rules.manager), before);
    // But for the one in use, no interface is left, and none is made later.
    let interfaces = rules.manager.leftovers().into_iter().filter(|left| left.starts_with("interface "));
    assert_eq!(interfaces.count(), 1);
    begins(&mut rules.manager).await;
    rules.unlock();
    rules.manager.wait_until_recovered().await;
    assert_eq!(left(rules.manager.directory()), Vec::<String>::new());
    rules.stop(&microvms);
}

#[tokio::test]
async fn what_ends_a_managers_group_does_not_end_its_microvms() {
    let microvms = Microvms::find(BINARY);
    let directory = tempfile::tempdir().unwrap();
    // As in a container or a service: a group in every tree.
    let mounts = std::fs::read_to_string("/proc/mounts").unwrap();
    let trees =
        mounts.lines().filter(|line| line.contains(" cgroup")).filter_map(|line| line.split(' ').nth(1));
    let name = format!("emergent-test-{}", std::process::id());
    let mut groups: Vec<PathBuf> = trees.map(|tree| Path::new(tree).join(&name)).collect();
    groups.retain(|group| std::fs::create_dir(group).is_ok());
    let program = directory.path().join("manager");
    let enter: String =
        groups.iter().map(|group| format!("echo $$ > {}/cgroup.procs\n", group.display())).collect();
    std::fs::write(&program, format!("#!/bin/sh\n{enter}exec {BINARY} \"$@\"\n")).unwrap();
    run("chmod", &["755", program.to_str().unwrap()]);
    let manager = TestManager::start(&microvms, program.to_str().unwrap(), &[]).await;
    let own = std::fs::read_to_string(format!("/proc/{}/cgroup", manager.pid())).unwrap();
    assert!(groups.is_empty() || own.contains(&name), "{own}");
    let id = WorkspaceId::generate();
    let asked = manager.asked(&microvms).await;
    let made = manager.request("PUT", &format!("/v1/machines/{id}"), Some(asked)).await.ok();
    let its = std::fs::read_to_string(format!("/proc/{}/cgroup", made["pid"])).unwrap();
    assert!(!its.contains(&name), "{its}");
    // A host without memory ends it before anything of its own.
    let offered = std::fs::read_to_string(format!("/proc/{}/oom_score_adj", made["pid"])).unwrap();
    assert_eq!(offered, "500\n");
    manager.request("DELETE", &format!("/v1/machines/{id}"), None).await.ok();
    microvms.keep_images(manager.directory());
    manager.stop();
    for group in groups {
        std::fs::remove_dir(group).unwrap();
    }
}

#[tokio::test]
async fn a_manager_without_root_says_so() {
    let microvms = Microvms::find(BINARY);
    let directory = tempfile::tempdir().unwrap();
    let data = directory.path().join("manager");
    std::fs::create_dir(&data).unwrap();
    run("chown", &["65534", data.to_str().unwrap()]);
    run("chmod", &["755", directory.path().to_str().unwrap()]);
    // Its binary may lie where nobody else may look.
    let program = directory.path().join("emergent");
    std::fs::copy(BINARY, &program).unwrap();
    let mut process = Command::new("setpriv")
        .args(["--reuid", "65534", "--regid", "65534", "--clear-groups"])
        .arg(&program)
        .args(["firecracker-manager", "--data-dir"])
        .arg(&data)
        .envs(microvms.environment(&[]))
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::null())
        .current_dir(&data)
        .spawn()
        .unwrap();
    let begun = Instant::now();
    while !data.join("manager.sock").exists() {
        assert!(begun.elapsed() < Duration::from_secs(30) && process.try_wait().unwrap().is_none());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let health = ask_manager(&data, "GET", "/v1/health", None).await.ok();
    process.kill().unwrap();
    process.wait().unwrap();
    assert_eq!(health["healthy"], false);
    assert!(health["errors"].to_string().contains("need root; run the manager as root"), "{health}");
    if Path::new("/dev/kvm").exists() {
        assert_eq!(health["kvm_available"], false, "{health}");
    }
}

#[tokio::test]
async fn twenty_at_once_get_twenty_slots() {
    let microvms = Microvms::find(BINARY);
    let manager = TestManager::start(&microvms, BINARY, &[("FIRECRACKER_BOOT_TIMEOUT_SECONDS", "280")]).await;
    let mut asked = manager.asked(&microvms).await;
    asked["limits"]["memory"] = json!("160M");
    let paths: Vec<String> = (0..20).map(|_| format!("/v1/machines/{}", WorkspaceId::generate())).collect();
    // Some are asked for twice, and made once.
    let twice = paths.iter().chain(&paths[..5]);
    let made = join_all(twice.map(|path| manager.request("PUT", path, Some(asked.clone())))).await;
    let mut made: Vec<Value> = made.into_iter().map(Answer::ok).collect();
    let again = made.split_off(paths.len());
    assert_eq!(again, made[..5]);
    let mut seen: [HashSet<String>; 3] = Default::default();
    for machine in made {
        assert_eq!(machine["phase"], "running");
        for (set, field) in seen.iter_mut().zip(["interface", "address", "pid"]) {
            assert!(set.insert(machine[field].to_string()), "{field} twice: {machine}");
        }
    }
    let health = manager.request("GET", "/v1/health", None).await.ok();
    assert_eq!(health["active_vms"], 20);
    join_all(paths.iter().map(|path| manager.request("DELETE", path, None))).await.into_iter().for_each(
        |gone| {
            assert_eq!(gone.status, 204, "{gone:?}");
        },
    );
    microvms.keep_images(manager.directory());
    manager.stop();
}

/// A database that was restored from an older backup knows nothing of a microVM: its disk is kept.
#[tokio::test]
async fn a_microvm_without_a_row_goes_to_quarantine_and_can_be_restored() {
    let microvms = Microvms::find(BINARY);
    let mut server = microvms.start(BINARY, &[]).await;
    server.terminate();
    let (database, backup) = (server.data_dir().join("emergent.db"), server.data_dir().join("backup"));
    std::fs::copy(&database, &backup).unwrap();
    server.start_again().await;
    let id = server.create(microvms.small()).await;
    server.tool(&id, "write", json!({ "file_path": "precious", "content": "kept\n" })).await.ok();
    server.terminate();
    std::fs::copy(&backup, &database).unwrap();
    server.start_again_with(&[("WORKSPACE_ORPHAN_GRACE_SECONDS", "0")]).await;
    let quarantine = format!("{WORKSPACES}/quarantine");
    let begun = Instant::now();
    loop {
        let listed = server.request("GET", &quarantine, None).await.ok();
        if listed["snapshots"][0]["size_bytes"].is_u64() {
            assert_eq!(listed["snapshots"][0]["resource_limits"]["disk"], "1G", "{listed}");
            break;
        }
        assert!(begun.elapsed() < microvms.patience(Duration::from_secs(20)), "{listed}\n{}", server.log());
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    server.request("POST", &format!("{quarantine}/{id}/restore"), None).await.ok();
    let asked = json!({ "snapshot_id": id, "resource_limits": microvms.small()["resource_limits"] });
    let made = server.request("POST", &format!("{WORKSPACES}/from-snapshot"), Some(asked)).await.ok();
    let restored = made["id"].as_str().unwrap();
    assert_eq!(server.bash(restored, "cat precious").await, "kept\n");
    server.request("DELETE", &format!("{WORKSPACES}/snapshots/{id}"), None).await.ok();
    server.destroy(restored).await;
    server.stop();
}
