//! Faults of the manager and of its environment: a killed or frozen manager, wrong tokens, processes of another boot, control groups,
//! a manager without root, many requests at once, a restored database.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use emergent_test_support::command::run;
use emergent_test_support::microvm::{Microvms, TestManager, ask_manager, ask_manager_as};
use emergent_test_support::server::{Answer, TestServer, WORKSPACES};
use emergent_test_support::wait::wait_until;
use emergent_wire::WorkspaceId;
use futures_util::future::join_all;
use serde_json::{Value, json};

use super::{BINARY, left};

#[tokio::test]
async fn server_survives_a_killed_and_a_frozen_manager() {
    let microvms = Microvms::find(BINARY);
    let mut manager = TestManager::start(&microvms, BINARY, &[]).await;
    let url = manager.url();
    let settings = [("FIRECRACKER_MANAGER_URL", url.as_str()), ("EMERGENT_FIRECRACKER", "true")];
    let server = TestServer::start_with(BINARY, &settings).await;
    let id = server.create(microvms.small()).await;
    server.bash(&id, "echo kept > file").await;
    let pid = manager.request("GET", &format!("/v1/machines/{id}"), None).await.ok()["pid"].clone();
    manager.kill();
    // Killed: calls fail, and a create with `auto` uses gVisor.
    let refused = server.tool(&id, "bash", json!({ "command": "true" })).await;
    assert!((500..600).contains(&refused.status), "{refused:?}");
    assert!(refused.message().contains("does not answer"), "{refused:?}");
    let mut request = microvms.small();
    request["provider"] = json!("auto");
    let created = server.request("POST", WORKSPACES, Some(request)).await.ok();
    assert_eq!(created["provider"], "gvisor");
    server.destroy(created["id"].as_str().unwrap()).await;
    // Started again: the microVM has kept running.
    manager.start_again(&[]).await;
    assert_eq!(server.bash(&id, "cat file").await, "kept\n");
    assert_eq!(manager.request("GET", &format!("/v1/machines/{id}"), None).await.ok()["pid"], pid);
    // Frozen: calls fail within a time limit.
    run("kill", &["-STOP", &manager.pid().to_string()]);
    let begun = Instant::now();
    let refused = server.request("POST", WORKSPACES, Some(microvms.small())).await;
    assert!(refused.status >= 500, "{refused:?}");
    run("kill", &["-CONT", &manager.pid().to_string()]);
    assert!(begun.elapsed() < Duration::from_secs(180), "it took {:?}", begun.elapsed());
    assert_eq!(server.bash(&id, "cat file").await, "kept\n");
    server.destroy(&id).await;
    // The server's next recovery removes the microVM of the failed create.
    wait_until("the manager has nothing left", Duration::from_secs(90), async || {
        left(manager.directory()).is_empty()
    })
    .await;
    server.stop();
    microvms.keep_images(manager.directory());
    manager.stop();
}

#[tokio::test]
async fn manager_refuses_wrong_and_empty_tokens() {
    let microvms = Microvms::find(BINARY);
    let manager = TestManager::start(&microvms, BINARY, &[]).await;
    for path in ["/v1/health", "/v1/machines", "/v1/nowhere"] {
        for token in ["", "wrong"] {
            let refused = ask_manager_as(manager.directory(), token, "GET", path, None).await;
            assert_eq!(refused.error(401), "unauthorized");
        }
    }
    // An empty variable does not set an empty token.
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
    assert!(refused.message().contains("refuses the token (FIRECRACKER_MANAGER_TOKEN)"), "{refused:?}");
    assert!(!server.log().contains("wrong\""), "{}", server.log());
    server.stop();
    manager.stop();
}

#[tokio::test]
async fn recovery_ignores_processes_of_another_boot() {
    let microvms = Microvms::find(BINARY);
    let mut manager = TestManager::start(&microvms, BINARY, &[]).await;
    let id = WorkspaceId::generate();
    let request = manager.machine_request(&microvms).await;
    let path = format!("/v1/machines/{id}");
    manager.request("PUT", &path, Some(request)).await.ok();
    manager.request("POST", &format!("{path}/stop"), None).await.ok();
    manager.terminate();
    // After a reboot another process may have the same id and start time.
    let mut other = Command::new("sleep").arg("600").spawn().unwrap();
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
async fn microvms_run_outside_the_control_group_of_their_manager() {
    let microvms = Microvms::find(BINARY);
    let directory = tempfile::tempdir().unwrap();
    // The manager runs in a control group of its own, like a service or a container.
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
    let request = manager.machine_request(&microvms).await;
    let made = manager.request("PUT", &format!("/v1/machines/{id}"), Some(request)).await.ok();
    let its = std::fs::read_to_string(format!("/proc/{}/cgroup", made["pid"])).unwrap();
    assert!(!its.contains(&name), "{its}");
    // A host without memory kills microVMs before its own processes.
    let oom_score = std::fs::read_to_string(format!("/proc/{}/oom_score_adj", made["pid"])).unwrap();
    assert_eq!(oom_score, "500\n");
    manager.request("DELETE", &format!("/v1/machines/{id}"), None).await.ok();
    microvms.keep_images(manager.directory());
    manager.stop();
    for group in groups {
        std::fs::remove_dir(group).unwrap();
    }
}

#[tokio::test]
async fn manager_without_root_reports_it_in_its_health() {
    let microvms = Microvms::find(BINARY);
    let directory = tempfile::tempdir().unwrap();
    let data = directory.path().join("manager");
    std::fs::create_dir(&data).unwrap();
    run("chown", &["65534", data.to_str().unwrap()]);
    run("chmod", &["755", directory.path().to_str().unwrap()]);
    // Another user may not be able to read the directory of the binary.
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
    wait_until("the manager listens", Duration::from_secs(30), async || {
        assert!(process.try_wait().unwrap().is_none(), "the manager has ended");
        data.join("manager.sock").exists()
    })
    .await;
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
async fn twenty_concurrent_microvms_get_twenty_slots() {
    let microvms = Microvms::find(BINARY);
    let manager = TestManager::start(&microvms, BINARY, &[("FIRECRACKER_BOOT_TIMEOUT_SECONDS", "280")]).await;
    let mut request = manager.machine_request(&microvms).await;
    request["limits"]["memory"] = json!("160M");
    let paths: Vec<String> = (0..20).map(|_| format!("/v1/machines/{}", WorkspaceId::generate())).collect();
    // Some are requested twice, and made once.
    let twice = paths.iter().chain(&paths[..5]);
    let made = join_all(twice.map(|path| manager.request("PUT", path, Some(request.clone())))).await;
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

#[tokio::test]
async fn microvm_missing_in_a_restored_database_is_quarantined_and_restorable() {
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
        assert!(
            begun.elapsed() < microvms.scaled_limit(Duration::from_secs(20)),
            "{listed}\n{}",
            server.log()
        );
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    server.request("POST", &format!("{quarantine}/{id}/restore"), None).await.ok();
    let request = json!({ "snapshot_id": id, "resource_limits": microvms.small()["resource_limits"] });
    let made = server.request("POST", &format!("{WORKSPACES}/from-snapshot"), Some(request)).await.ok();
    let restored = made["id"].as_str().unwrap();
    assert_eq!(server.bash(restored, "cat precious").await, "kept\n");
    server.request("DELETE", &format!("{WORKSPACES}/snapshots/{id}"), None).await.ok();
    server.destroy(restored).await;
    server.stop();
}
