//! Interfaces and firewall rules that other programs change or lock.

use std::time::Duration;

use emergent_test_support::command::{pgrep, run};
use emergent_test_support::microvm::{Microvms, TestManager};
use emergent_test_support::server::{TestServer, WORKSPACES};
use emergent_test_support::wait::wait_until;
use emergent_wire::WorkspaceId;
use serde_json::{Value, json};

use super::{BINARY, assert_fails_and_falls_back, left, manager_dir, manager_name};

#[tokio::test]
async fn foreign_interface_with_the_name_of_ours_is_left_alone() {
    let microvms = Microvms::find(BINARY);
    let server = microvms.start(BINARY, &[]).await;
    let name = format!("{}-0", manager_name(&manager_dir(&server)));
    // The manager made this interface when it started.
    run("ip", &["link", "delete", &name]);
    run("ip", &["link", "add", &name, "type", "veth", "peer", "name", &format!("{name}p")]);
    assert_fails_and_falls_back(&microvms, &server, &[&name, "another program"]).await;
    let kind = run("ip", &["-d", "link", "show", &name]);
    assert!(kind.contains("veth"), "{kind}");
    run("ip", &["link", "delete", &name]);
    let id = server.create(microvms.small()).await;
    server.destroy(&id).await;
    microvms.keep_images(&manager_dir(&server));
    server.stop();
}

#[tokio::test]
async fn removed_firewall_rules_are_restored_at_start() {
    let microvms = Microvms::find(BINARY);
    let mut manager = TestManager::start(&microvms, BINARY, &[]).await;
    let request = manager.machine_request(&microvms).await;
    let path = format!("/v1/machines/{}", WorkspaceId::generate());
    let made = manager.request("PUT", &path, Some(request)).await.ok();
    let interface = made["interface"].as_str().unwrap();
    let prefix = interface.rsplit_once('-').unwrap().0;
    let count = || run("iptables-save", &[]).lines().filter(|line| line.contains(prefix)).count();
    let before = count();
    assert!(before > 20, "{before}");
    let (parent, chain) = (["-t", "filter", "-D", "FORWARD", "-i"], format!("{prefix}-fwd"));
    run("iptables", &[&["-w", "5"], &parent[..], &[&format!("{prefix}-+"), "-j", &chain]].concat());
    run("iptables", &["-w", "5", "-t", "filter", "-F", &chain]);
    assert!(count() < before);
    // A manager restores its rules at start, and each minute.
    manager.terminate();
    manager.start_again(&[]).await;
    assert_eq!(count(), before);
    manager.request("DELETE", &path, None).await.ok();
    microvms.keep_images(manager.directory());
    manager.stop();
}

/// A manager whose firewall rules can be locked. Only the legacy iptables has a lock, so this manager gets it in place of the newer
/// one.
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

    /// Waits until a program of the manager waits for the lock.
    async fn wait_for_waiter(&self) {
        let manager = self.manager.pid().to_string();
        let waits = async || !pgrep(&["-P", &manager, "iptables"]).is_empty();
        wait_until("a program waits for the lock", Duration::from_secs(60), waits).await;
    }

    /// Waits until a microVM is in a phase, and returns it.
    async fn wait_for_phase(&self, path: &str, phase: &str) -> Value {
        let mut machine = Value::Null;
        wait_until(&format!("the microVM is {phase}"), Duration::from_secs(100), async || {
            machine = self.manager.request("GET", path, None).await.body;
            machine["phase"] == phase
        })
        .await;
        machine
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
async fn manager_waits_for_locked_firewall_rules() {
    let microvms = Microvms::find(BINARY);
    let rules = LockableRules::start(&microvms).await;
    let manager = &rules.manager;
    let url = manager.url();
    let known = [("FIRECRACKER_MANAGER_URL", url.as_str()), ("EMERGENT_FIRECRACKER", "true")];
    let server = TestServer::start_with(BINARY, &known).await;

    // Locked for a while: the create waits and succeeds.
    rules.lock();
    let released = async {
        rules.wait_for_waiter().await;
        rules.unlock();
    };
    let (id, ()) = tokio::join!(server.create(microvms.small()), released);
    assert_eq!(server.bash(&id, "echo made").await, "made\n");
    server.destroy(&id).await;

    // A microVM that is requested while it is being removed is made again.
    let path = format!("/v1/machines/{}", WorkspaceId::generate());
    let request = manager.machine_request(&microvms).await;
    let first = manager.request("PUT", &path, Some(request.clone())).await.ok();
    rules.lock();
    let asked_again = async {
        rules.wait_for_waiter().await;
        let released = async {
            // The other request was sent before this one.
            assert_eq!(manager.request("GET", &path, None).await.ok()["phase"], "removing");
            rules.unlock();
        };
        tokio::join!(manager.request("PUT", &path, Some(request)), released).0
    };
    let (removed, again) = tokio::join!(manager.request("DELETE", &path, None), asked_again);
    assert_eq!(removed.status, 204, "{removed:?}");
    let again = again.ok();
    assert_eq!(again["phase"], "running");
    assert_ne!(again["pid"], first["pid"]);
    manager.request("DELETE", &path, None).await.ok();

    // Locked for long: the create fails, and a create with `auto` uses gVisor.
    rules.lock();
    let refused = server.request("POST", WORKSPACES, Some(microvms.small())).await;
    assert!(refused.message().contains("xtables lock"), "{refused:?}");
    let mut request = microvms.small();
    request["provider"] = json!("auto");
    let created = server.request("POST", WORKSPACES, Some(request)).await.ok();
    assert_eq!(created["provider"], "gvisor", "{created}");
    server.destroy(created["id"].as_str().unwrap()).await;
    rules.unlock();
    // The manager removes the failed microVM once the rules are unlocked.
    wait_until("the manager has nothing left", Duration::from_secs(100), async || {
        left(manager.directory()).is_empty()
    })
    .await;
    server.stop();
    rules.stop(&microvms);
}

#[tokio::test]
async fn microvms_end_after_locked_firewall_rules_are_released() {
    let microvms = Microvms::find(BINARY);
    let mut rules = LockableRules::start(&microvms).await;
    let path = format!("/v1/machines/{}", WorkspaceId::generate());
    let request = rules.manager.machine_request(&microvms).await;
    let made = rules.manager.request("PUT", &path, Some(request)).await.ok();

    // A microVM whose process was killed.
    rules.lock();
    run("kill", &["-KILL", &made["pid"].to_string()]);
    rules.wait_for_phase(&path, "ending").await;
    let refused = rules.manager.request("POST", &format!("{path}/start"), None).await;
    assert!(refused.message().contains("xtables lock"), "{refused:?}");
    rules.unlock();
    let stopped = rules.wait_for_phase(&path, "stopped").await;
    assert!(stopped["ended"].as_str().unwrap().contains("its process has ended"), "{stopped}");
    rules.manager.request("POST", &format!("{path}/start"), None).await.ok();

    // A microVM that is being removed. The next manager continues the removal, and does not wait for it before it answers …
    rules.lock();
    let refused = rules.manager.request("DELETE", &path, None).await;
    assert!(refused.message().contains("xtables lock"), "{refused:?}");
    rules.manager.terminate();
    let start_again = async |manager: &mut TestManager| {
        manager.start_again_without_recovery(&[]).await;
        assert_eq!(manager.request("GET", &path, None).await.ok()["phase"], "removing");
        assert_ne!(left(manager.directory()), Vec::<String>::new());
    };
    start_again(&mut rules.manager).await;
    // … nor before it ends.
    rules.wait_for_waiter().await;
    let failures = |manager: &TestManager| manager.log().matches("could not be put back").count();
    let before = failures(&rules.manager);
    rules.manager.terminate();
    assert_eq!(failures(&rules.manager), before);
    // Only the interface in use is left, and no other is made later.
    let interfaces = rules.manager.leftovers().into_iter().filter(|left| left.starts_with("interface "));
    assert_eq!(interfaces.count(), 1);
    start_again(&mut rules.manager).await;
    rules.unlock();
    rules.manager.wait_until_recovered().await;
    assert_eq!(left(rules.manager.directory()), Vec::<String>::new());
    rules.stop(&microvms);
}
