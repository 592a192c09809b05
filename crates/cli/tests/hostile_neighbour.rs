//! A guest that exhausts resources, looks for secrets of others, and ignores signals to end, on every provider.
//!
//! All checks are made from outside: a neighbour works all the time, the server takes no more memory and files than before, and
//! nothing of the guest is left after destroy.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use emergent_test_support::command::run;
use emergent_test_support::microvm::Microvms;
use emergent_test_support::server::{TestServer, WORKSPACES};
use serde_json::{Value, json};

const BINARY: &str = env!("CARGO_BIN_EXE_emergent");

/// Attempts to exhaust a resource. Each ends by itself, or at its time-out.
const EXHAUST: [(&str, &str); 9] = [
    ("memory", "python3 -c 'all = []\nwhile True: all.append(bytearray(1 << 20))'"),
    (
        "memory of many",
        "for n in $(seq 20); do python3 -c 'all = []\nwhile True: all.append(b\"x\" * (8 << 20))' & done; wait",
    ),
    ("memory as files", "head -c 8G /dev/zero > /dev/shm/file; head -c 8G /dev/zero > /tmp/file"),
    ("inodes", "mkdir many; cd many; python3 -c 'for n in range(10**7): open(str(n), \"w\")' 2>&1 | tail -1"),
    ("disk", "head -c 100G /dev/zero > big"),
    (
        "descriptors",
        "ulimit -n $(ulimit -Hn); for n in 1 2 3 4; do python3 -c 'import os, time\nwhile True: os.dup(1)' & done; wait",
    ),
    (
        "pipes and sockets",
        "python3 -c 'import socket\nall = []\nwhile True:\n    one = socket.socketpair(); one[0].setblocking(0)\n    all.append(one)\n    try: one[0].send(b\"x\" * (1 << 20))\n    except OSError: pass'",
    ),
    (
        "threads",
        "python3 -c 'import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(1000,)).start()'",
    ),
    (
        "log",
        "for to in /proc/1/fd/1 /proc/1/fd/2 /dev/console /dev/kmsg /dev/hvc0 /dev/ttyS0; do timeout 3 yes garbage > $to & done 2>/dev/null; wait",
    ),
];

async fn shared_resources_cannot_be_exhausted(server: &TestServer, request: Value) {
    let neighbour = server.create_marked(request.clone()).await;
    let attacker = server.create_marked(request.clone()).await;
    let (memory, files, log) = (server.memory_bytes(), server.open_files(), server.log().len());
    for (what, command) in EXHAUST {
        let body = json!({ "command": command, "timeout_ms": 8000 });
        let attempt = server.tool(&attacker, "bash", body);
        let meanwhile = async {
            for _ in 0..3 {
                server.assert_works(&neighbour).await;
            }
        };
        let (answer, ()) = tokio::join!(attempt, meanwhile);
        // The command is ended, or its sandbox is. Both are reported.
        assert!(answer.status == 200 || answer.body["error"]["code"] == "sandbox_lost", "{what}: {answer:?}");
        // Files in memory count as memory, and would disturb the next attempt.
        let clean = "cd /workspace; rm -rf /dev/shm/* /tmp/* many big";
        server.tool(&attacker, "bash", json!({ "command": clean })).await;
        server.wait_until_it_works(&attacker).await;
        server.assert_works(&neighbour).await;
    }
    // The channel: output that is faster than its reader, and longer than the kept output.
    let flood = json!({ "command": "yes | head -c 2G", "timeout_ms": 20_000 });
    let (first, second) =
        tokio::join!(server.tool(&attacker, "bash", flood.clone()), server.tool(&attacker, "bash", flood));
    for answer in [first, second] {
        let is_lost = answer.body["error"]["code"] == "sandbox_lost";
        let is_cut = answer.body["truncated"] == true || answer.body["oom_killed"] == true;
        assert!(is_lost || is_cut, "{answer:?}");
    }
    server.wait_until_it_works(&attacker).await;
    let url = format!("{}{WORKSPACES}/{attacker}/bash", server.url);
    let body = json!({ "command": "yes", "timeout_ms": 600_000 });
    let stream = server.client().post(url).bearer_auth(&server.token).header("accept", "text/event-stream");
    let stream = stream.json(&body).send().await.unwrap();
    server.assert_works(&neighbour).await;
    // A stream that nobody reads blocks no other call. On gVisor the memory of the floods is freed late, so the guard may end a
    // call of the attacker until then.
    server.wait_until_it_works(&attacker).await;
    drop(stream);
    // The agent's socket, on providers where a guest sees it.
    let connect = "python3 - <<'END'\nimport socket, time\nall = []\nfor line in open('/proc/net/unix').read().splitlines()[1:]:\n    \
                   path = line.split()[-1]\n    for n in range(2000):\n        one = socket.socket(socket.AF_UNIX)\n        \
                   one.settimeout(1)\n        try:\n            one.connect(path.replace('@', chr(0), 1))\n            \
                   one.send(b'\\xff' * 65536)\n            all.append(one)\n        except OSError:\n            break\ntime.sleep(3)\nEND";
    let answer = server.tool(&attacker, "bash", json!({ "command": connect, "timeout_ms": 30_000 })).await;
    assert!(answer.status == 200 || answer.body["error"]["code"] == "sandbox_lost", "{answer:?}");
    server.wait_until_it_works(&attacker).await;
    server.assert_works(&neighbour).await;
    // The measured growth is at most 3 MiB, 4 files and 8 KiB of log.
    let (more_memory, more_files) = (server.memory_bytes().saturating_sub(memory), server.open_files());
    assert!(more_memory < 32 << 20, "the server took {} MiB more", more_memory >> 20);
    let more_log = server.log().len() - log;
    assert!(more_log < 64 << 10, "the server's log got {more_log} bytes");
    assert!(more_files < files + 20, "the server had {files} files open, and has {more_files}");
    server.destroy_in_time(&attacker).await;
    server.assert_works(&neighbour).await;
    server.destroy(&neighbour).await;
}

/// Looks for a secret of a neighbour. The pattern does not match its own text.
const SNOOP: &str = r#"
pattern='open-sesame-471[1]'
found() { grep -a -q "$pattern" && echo "FOUND in $1"; }
for file in /proc/*/environ /proc/*/cmdline /proc/*/mem /proc/kcore /proc/kallsyms /proc/config.gz /dev/mem /dev/kmem /dev/port; do
    timeout 5 head -c 50M "$file" 2>/dev/null | found "$file"
done
timeout 60 grep -a -r -l --exclude-dir=proc --exclude-dir=sys "$pattern" / 2>/dev/null
timeout 20 grep -a -r -l "$pattern" /proc/1/root /proc/self/root/.. /sys 2>/dev/null
for n in $(seq 0 63); do mknod /tmp/loop$n b 7 $n; timeout 5 head -c 200M /tmp/loop$n | found loop$n; done 2>/dev/null
for major in 8 252 253 254 259; do
    for minor in 0 1 2 16; do
        mknod /tmp/disk-$major-$minor b $major $minor; timeout 5 head -c 200M /tmp/disk-$major-$minor | found disk-$major-$minor
    done
done 2>/dev/null
mkdir -p /tmp/mnt
for device in /tmp/loop* /tmp/disk-*; do mount "$device" /tmp/mnt && grep -a -r -l "$pattern" /tmp/mnt; umount /tmp/mnt; done 2>/dev/null
unshare -Urm bash -c 'mount -t ext4 /tmp/loop0 /tmp/mnt; mount -t cgroup2 none /tmp/mnt; mount -t proc none /tmp/mnt; cat /tmp/mnt/*/environ' 2>/dev/null | found unshared
nsenter -t 1 -a cat /proc/1/environ 2>/dev/null | found nsenter
for socket in /var/run/docker.sock /run/docker.sock /run/containerd/containerd.sock; do test -e $socket && echo "FOUND $socket"; done
ls -d /sys/fs/cgroup/../../../../var/lib/docker 2>/dev/null && echo "FOUND the engine's directory"
true
"#;

/// Writes to every block device. A microVM may do this, because it has only devices of its own.
const WRITE_DEVICES: &str = r"
for device in /dev/loop* /dev/sd* /dev/vd* /dev/dm-* /tmp/loop* /tmp/disk-*; do
    test -b $device || continue
    echo garbage | dd of=$device bs=1 seek=100000 conv=notrunc,fsync 2>&1 | grep copied
done
true
";

async fn secrets_of_others_cannot_be_read(server: &TestServer, request: Value) {
    let secret = "open-sesame-4711";
    let mut with_secret = request.clone();
    with_secret["environment"] = json!({ "SECRET": secret });
    let neighbour = server.create_marked(with_secret).await;
    let attacker = server.create_marked(request.clone()).await;
    server.tool(&neighbour, "write", json!({ "file_path": "secret", "content": secret })).await.ok();
    server.bash(&neighbour, "cp secret /var/tmp/secret; sync secret").await;
    let holds_it =
        format!("exec -a {secret} python3 -c 'import time; all = [\"{secret}\" * 100000]; time.sleep(1000)'");
    server.start_in_background(&neighbour, &holds_it).await;
    let body = json!({ "command": SNOOP, "timeout_ms": 300_000 });
    let answer = server.tool(&attacker, "bash", body.clone()).await.ok();
    assert_eq!(answer["stdout"], "", "{answer}");
    if request["provider"] != "firecracker" {
        assert_eq!(server.bash(&attacker, WRITE_DEVICES).await, "", "a device was written");
    }
    server.assert_works(&neighbour).await;
    // The search works: it finds a secret in its own workspace.
    if request["provider"] == "docker" {
        server.bash(&attacker, &format!("echo {secret} > /var/own")).await;
        let answer = server.tool(&attacker, "bash", body).await.ok();
        assert!(answer["stdout"].as_str().unwrap().contains("/var/own"), "{answer}");
    }
    for id in [neighbour, attacker] {
        server.destroy(&id).await;
    }
}

/// Processes that ignore signals to end.
const CLING: &str = r#"
for n in 1 2 3; do
    setsid env -i bash -c "trap '' TERM HUP INT QUIT; while true; do sleep 1; done" < /dev/null > /dev/null 2>&1 &
done
setsid python3 -c "
import os, signal, time
for number in range(1, 32):
    try: signal.signal(number, signal.SIG_IGN)
    except OSError: pass
files = [open('/workspace/held-%d' % n, 'w') for n in range(50)]
while True:
    if os.fork() == 0:
        os.setsid()
    else:
        time.sleep(0.5)
        os._exit(0)
    files[0].write('x'); files[0].flush()
" < /dev/null > /dev/null 2>&1 &
setsid bash -c 'kill -STOP $$' &
sleep 1
"#;

/// The host's processes in the control group of a workspace's sandbox. The group's name has the id of the container or microVM.
fn processes_of(group: &str) -> Vec<String> {
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    let of_group = processes.filter_map(|process| {
        let groups = std::fs::read_to_string(process.path().join("cgroup")).ok()?;
        let name = std::fs::read_to_string(process.path().join("comm")).unwrap_or_default();
        groups.contains(group).then(|| format!("{} {}", process.file_name().display(), name.trim()))
    });
    of_group.collect()
}

/// Lists the processes of [`CLING`] in a workspace. The pattern does not match its own text.
const FIND_CLINGING: &str = "grep -a -l -E 'tra[p]|SIG_IG[N]' /proc/[0-9]*/cmdline || true";

async fn nothing_outlives_its_workspace(server: &TestServer, request: Value) {
    let id = server.create_marked(request.clone()).await;
    let container = format!("agent-workspace-{id}");
    let group = match request["provider"].as_str() {
        Some("firecracker") => id.clone(),
        _ => run("docker", &["inspect", "--format", "{{.Id}}", &container]).trim().to_owned(),
    };
    let cling = async || {
        server.tool(&id, "bash", json!({ "command": CLING, "timeout_ms": 20_000 })).await.ok();
        assert!(!server.bash(&id, FIND_CLINGING).await.is_empty(), "the processes don't run");
        assert!(!processes_of(&group).is_empty(), "the sandbox has no processes on the host");
    };
    cling().await;
    server.act(&id, "stop").await;
    assert_eq!(processes_of(&group), Vec::<String>::new(), "after stop");
    server.act(&id, "resume").await;
    assert_eq!(server.bash(&id, FIND_CLINGING).await, "", "after resume");
    cling().await;
    server.destroy_in_time(&id).await;
    assert_eq!(processes_of(&group), Vec::<String>::new(), "after destroy");
    assert_eq!(run("docker", &["ps", "--all", "--quiet", "--filter", &format!("name={id}")]), "");
}

/// Runs all attacks on one provider.
async fn run_attacks(server: &TestServer, request: Value) {
    shared_resources_cannot_be_exhausted(server, request.clone()).await;
    secrets_of_others_cannot_be_read(server, request.clone()).await;
    nothing_outlives_its_workspace(server, request).await;
}

fn small(provider: &str) -> Value {
    let limits = json!({ "cpu": "1", "memory": "256M", "disk": "128M" });
    json!({ "provider": provider, "network": "isolated", "resource_limits": limits })
}

#[tokio::test]
async fn hostile_gvisor_guest_harms_no_neighbour() {
    let server = TestServer::start(BINARY).await;
    run_attacks(&server, small("gvisor")).await;
    server.stop();
}

#[tokio::test]
async fn hostile_container_guest_harms_no_neighbour() {
    let server = TestServer::start(BINARY).await;
    run_attacks(&server, small("docker")).await;
    server.stop();
}

#[tokio::test]
async fn hostile_microvm_guest_harms_no_neighbour() {
    let microvms = Microvms::find(BINARY);
    let server = microvms.start(BINARY, &[]).await;
    let mut request = microvms.small();
    request["network"] = json!("isolated");
    run_attacks(&server, request).await;
    server.stop();
}
