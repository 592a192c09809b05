//! A guest that attacks the host, the server and its neighbours, on every provider.
//!
//! Each attack runs as root in a workspace. The tests check its effects from outside: the hashes of files of the host, the files of
//! a neighbour, and the start of new workspaces.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeMap;
use std::path::Path;

use emergent_test_support::command::run;
use emergent_test_support::microvm::Microvms;
use emergent_test_support::server::{TestServer, WORKSPACES};
use serde_json::json;

const BINARY: &str = env!("CARGO_BIN_EXE_emergent");

/// A script that tries to change the binaries of the guest agent, which all sandboxes share.
const REWRITE_AGENT: &str = r#"
attack() {
    for file in guest search; do
        : > /.emergent/$file
        truncate -s 0 /.emergent/$file
        printf '#!/bin/sh\necho trojan\n' > /.emergent/new && mv /.emergent/new /.emergent/$file
        dd if=/dev/zero of=/.emergent/$file bs=1 count=64 conv=notrunc
        chmod 6777 /.emergent/$file
        chown 1:1 /.emergent/$file
        rm -f /.emergent/$file
        python3 -c "
import mmap, os, sys
fd = os.open('/.emergent/$file', os.O_RDWR)
mmap.mmap(fd, 4096)[:6] = b'trojan'"
    done
    for n in $(seq 1 9); do ln -s /etc/passwd /.emergent/.guest-$n; done
    cp /bin/bash /.emergent/shell && chmod 4755 /.emergent/shell
}
attack
export -f attack
unshare -Urm bash -c 'mount -o remount,rw,bind /.emergent; mount -o remount,rw /.emergent; attack'
unshare -Urm bash -c 'mount --bind /.emergent /mnt; mount -o remount,rw,bind /mnt; : > /mnt/guest'
unshare -Ur chroot /proc/1/root bash -c 'attack'
for device in /dev/loop* /dev/sd* /dev/vd* /dev/dm-*; do dd if=/dev/zero of=$device bs=4096 count=1; done
true
"#;

/// The hash, mode and owner of each file below a directory.
fn fingerprints(directory: &Path) -> BTreeMap<String, String> {
    let text = run("find", &[&directory.to_string_lossy(), "-type", "f", "-o", "-type", "l"]);
    let each = text.lines().map(|path| {
        let hash = run("sha256sum", &[path]);
        let stat = run("stat", &["--format", "%a %u %g %i %F", path]);
        (path.to_owned(), format!("{} {}", hash.split(' ').next().unwrap(), stat.trim()))
    });
    each.collect()
}

/// Fingerprints of host files that no guest may change.
struct HostFiles {
    files: BTreeMap<String, String>,
}

impl HostFiles {
    fn read(server: &TestServer) -> Self {
        let mut files = BTreeMap::new();
        for directory in [server.data_dir().join("guest"), "/etc/docker".into()] {
            files.extend(fingerprints(&directory));
        }
        for file in ["firecracker/initrd", "firecracker/kernel", "encryption-key", "admin-token"] {
            let path = server.data_dir().join(file);
            if path.exists() {
                files.extend(fingerprints(&path));
            }
        }
        files.extend(fingerprints(Path::new("/etc/passwd")));
        // The server makes and removes the link to the image's device with the containers that use it.
        files.retain(|path, _| !path.ends_with(".dev"));
        Self { files }
    }

    #[track_caller]
    fn assert_unchanged(&self, server: &TestServer, attempt: &str) {
        assert_eq!(Self::read(server).files, self.files, "after {attempt}");
    }
}

/// Attacks the binaries of the guest agent on one provider.
async fn guest_cannot_rewrite_the_agent(server: &mut TestServer, request: serde_json::Value) {
    let neighbour = server.create_marked(request.clone()).await;
    let attacker = server.create_marked(request.clone()).await;
    let host_files = HostFiles::read(server);
    let body = json!({ "command": REWRITE_AGENT, "timeout_ms": 120_000 });
    server.tool(&attacker, "bash", body).await.ok();
    host_files.assert_unchanged(server, "rewriting the agent");
    server.assert_works(&neighbour).await;
    let later = server.create_marked(request.clone()).await;
    server.assert_works(&later).await;
    server.kill();
    server.start_again().await;
    host_files.assert_unchanged(server, "a restart of the server");
    server.assert_works(&neighbour).await;
    let after_restart = server.create_marked(request).await;
    server.assert_works(&after_restart).await;
    for id in [neighbour, attacker, later, after_restart] {
        server.destroy(&id).await;
    }
}

#[tokio::test]
async fn gvisor_guest_cannot_rewrite_the_agent() {
    let mut server = TestServer::start(BINARY).await;
    let request = json!({ "provider": "gvisor", "network": "isolated" });
    guest_cannot_rewrite_the_agent(&mut server, request).await;
    server.stop();
}

#[tokio::test]
async fn docker_guest_cannot_rewrite_the_agent() {
    let mut server = TestServer::start(BINARY).await;
    let request = json!({ "provider": "docker", "network": "isolated" });
    guest_cannot_rewrite_the_agent(&mut server, request).await;
    server.stop();
}

#[tokio::test]
async fn microvm_guest_cannot_rewrite_the_agent_of_others() {
    let microvms = Microvms::find(BINARY);
    let mut server = microvms.start(BINARY, &[]).await;
    let mut request = microvms.small();
    request["network"] = json!("isolated");
    guest_cannot_rewrite_the_agent(&mut server, request).await;
    server.stop();
}

/// An older version shared the binaries as a directory, in which a guest could replace the agent.
#[tokio::test]
async fn start_replaces_altered_agent_binaries_of_an_older_version() {
    let mut server = TestServer::start(BINARY).await;
    server.terminate();
    let victim = server.data_dir().join("victim");
    std::fs::write(&victim, "untouched").unwrap();
    let shared = server.data_dir().join("guest/0123456789abcdef");
    std::fs::create_dir_all(&shared).unwrap();
    std::fs::write(shared.join("guest"), "trojan").unwrap();
    std::fs::write(shared.join("search"), "trojan").unwrap();
    for n in 1..2000 {
        std::os::unix::fs::symlink(&victim, shared.join(format!(".guest-{n}"))).unwrap();
    }
    // A container of the older version uses the directory.
    let label = format!("emergent.installation={}", server.installation());
    let bind = format!("{}:/.emergent:ro", shared.display());
    let image = "emergent/workspace:latest";
    let container = run("docker", &["create", "--label", &label, "-v", &bind, image, "true"]);
    server.start_again().await;
    let log = server.log();
    assert!(log.contains("was altered from inside a sandbox"), "{log}");
    let providers = server.request("GET", "/api/v1/agent/workspaces/providers", None).await.ok();
    assert!(providers.to_string().contains("had been altered from inside a sandbox"), "{providers}");
    assert_eq!(std::fs::read_to_string(&victim).unwrap(), "untouched");
    assert_ne!(std::fs::read(shared.join("guest")).unwrap(), b"trojan");
    assert!(!shared.join(".guest-1").exists());
    assert!(std::fs::write(shared.join("guest"), "trojan again").is_err(), "the binary is not immutable");
    server.terminate();
    run("docker", &["rm", container.trim()]);
    server.start_again().await;
    assert!(!shared.exists(), "the unused directory is not removed");
    server.stop();
}

#[tokio::test]
async fn files_of_the_data_directory_are_private() {
    let server = TestServer::start(BINARY).await;
    let id = server.create_marked(json!({ "provider": "gvisor", "network": "isolated" })).await;
    let snapshot = format!("{WORKSPACES}/{id}/snapshot");
    let made = server.request("POST", &snapshot, Some(json!({}))).await.ok();
    let directory = server.data_dir().to_string_lossy().into_owned();
    let open = run(
        "find",
        &[&directory, "-mindepth", "1", "-perm", "/077", "!", "-type", "l", "!", "-name", "test.log"],
    );
    assert_eq!(open, "", "other users may access these files");
    let copy = format!("{WORKSPACES}/snapshots/{}", made["id"].as_str().unwrap());
    server.request("DELETE", &copy, None).await.ok();
    server.destroy(&id).await;
    server.stop();
}

/// Asserts that the workspace of a fork bomb and its neighbour answer, and that the workspace can be destroyed while the bomb runs.
async fn fork_bombs_are_contained(server: &TestServer, request: serde_json::Value) {
    let neighbour = server.create_marked(request.clone()).await;
    let mut small = request.clone();
    small["resource_limits"]["cpu"] = json!("0.5");
    let bombed = server.create_marked(small.clone()).await;
    let bomb = json!({ "command": ":(){ :|:& };:; sleep 100", "timeout_ms": 100_000 });
    let answer = server.tool(&bombed, "bash", bomb.clone()).await;
    if answer.status == 200 {
        let notes = answer.body["notes"].to_string();
        assert!(notes.contains("half of which may be processes, was reached"), "{}", answer.body);
    } else {
        assert_eq!(request["provider"], "gvisor", "{}", answer.body);
        assert_eq!(answer.error(502), "sandbox_lost");
    }
    server.wait_until_it_works(&bombed).await;
    // A bomb that leaves the session of its command.
    let hidden = ":(){ :|:& };: & setsid env -i bash -c ':(){ :|:& };:' &";
    server.tool(&bombed, "bash", json!({ "command": hidden, "background": true })).await.ok();
    server.assert_works(&neighbour).await;
    server.wait_until_it_works(&bombed).await;
    server.destroy_in_time(&bombed).await;
    // A destroy while the bomb runs.
    let bombed_again = server.create_marked(small).await;
    let body = json!({ "command": bomb["command"], "background": true });
    server.tool(&bombed_again, "bash", body).await.ok();
    server.destroy_in_time(&bombed_again).await;
    server.assert_works(&neighbour).await;
    server.destroy(&neighbour).await;
}

#[tokio::test]
async fn fork_bombs_in_gvisor_are_contained() {
    let server = TestServer::start(BINARY).await;
    fork_bombs_are_contained(&server, json!({ "provider": "gvisor", "network": "isolated" })).await;
    server.stop();
}

#[tokio::test]
async fn fork_bombs_in_plain_containers_are_contained() {
    let server = TestServer::start(BINARY).await;
    fork_bombs_are_contained(&server, json!({ "provider": "docker", "network": "isolated" })).await;
    server.stop();
}

#[tokio::test]
async fn processes_that_left_their_session_end_at_the_commands_time_out() {
    let server = TestServer::start(BINARY).await;
    for provider in ["gvisor", "docker"] {
        let id = server.create(json!({ "provider": provider, "network": "isolated" })).await;
        let command = "setsid env -i sleep 4711 & (setsid env -i sleep 4712 &); \
                       setsid env -i bash -c 'setsid sleep 4713 & sleep 4714' & sleep 60";
        let answer = server.tool(&id, "bash", json!({ "command": command, "timeout_ms": 1500 })).await.ok();
        assert_eq!(answer["timed_out"], true, "{answer}");
        let left = server.bash(&id, "grep -a -l '^sleep' /proc/[0-9]*/cmdline || true").await;
        assert_eq!(left, "", "{provider}");
        server.destroy(&id).await;
    }
    server.stop();
}

/// gVisor lets a guest stop process 1 of its sandbox, which is the agent.
#[tokio::test]
async fn sandbox_with_a_stopped_agent_is_restarted() {
    let server = TestServer::start(BINARY).await;
    for provider in ["gvisor", "docker"] {
        let id = server.create_marked(json!({ "provider": provider, "network": "isolated" })).await;
        let stopped = json!({ "command": "kill -STOP 1; sleep 1", "timeout_ms": 5000 });
        let _ = server.tool(&id, "bash", stopped).await;
        let answer = server.tool(&id, "bash", json!({ "command": "cat mark" })).await.ok();
        assert_eq!(answer["stdout"], "mine\n", "{provider}");
        let workspace = server.workspace(&id).await;
        let restart = &workspace["metadata"]["last_restart"]["reason"];
        if provider == "gvisor" {
            assert!(restart.as_str().unwrap().contains("its agent does not answer"), "{workspace}");
        }
        server.destroy(&id).await;
    }
    server.stop();
}

/// Files outside `/workspace` are in the engine's directory, which has no quota. The server limits them, also files without a name.
#[tokio::test]
async fn files_outside_the_workspace_are_limited() {
    let server = TestServer::start(BINARY).await;
    for provider in ["gvisor", "docker"] {
        let request = json!({
            "provider": provider, "network": "isolated", "resource_limits": { "disk": "64M" }
        });
        let neighbour = server.create_marked(request.clone()).await;
        let filler = server.create_marked(request).await;
        // Many small files are tested on plain containers only, because gVisor keeps the names in its memory.
        let many = "mkdir /var/many; cd /var/many; python3 -c 'for n in range(10**7): open(str(n), \"w\")'";
        for command in [
            if provider == "docker" { many } else { "head -c 30000000000 /dev/zero > /var/big" },
            "exec 3> /var/big; rm /var/big; head -c 30000000000 /dev/zero >&3",
            "setsid env -i bash -c 'head -c 30000000000 /dev/zero > /var/big' & sleep 100",
        ] {
            let body = json!({ "command": command, "timeout_ms": 100_000 });
            let call = server.tool(&filler, "bash", body).await;
            assert!(
                call.body.to_string().contains("files outside /workspace took more than 256 MiB"),
                "{}",
                call.body
            );
            assert_eq!(call.error(502), "sandbox_lost");
            server.assert_works(&filler).await;
            assert!(server.bash(&filler, "ls /var/big 2>&1 || true").await.contains("No such"));
            server.assert_works(&neighbour).await;
        }
        server.destroy_in_time(&filler).await;
        server.destroy(&neighbour).await;
    }
    server.stop();
}
