//! An engine that hangs: it takes connections and answers nothing. Every wait for it ends, what needs no engine works, and nothing is
//! lost.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::Duration;

use emergent_test_support::engine::TestEngine;
use emergent_test_support::server::{Answer, TestServer};
use serde_json::{Value, json};

const BINARY: &str = env!("CARGO_BIN_EXE_emergent");
const WORKSPACES: &str = "/api/v1/agent/workspaces";
/// Everything that waits for the engine has ended by then, also on a busy machine.
const BOUND: Duration = Duration::from_secs(90);

fn change(id: &str, what: &str) -> String {
    format!("{WORKSPACES}/{id}/{what}")
}

async fn ask(server: &TestServer, method: &str, path: &str, body: Option<Value>) -> Answer {
    let answer = tokio::time::timeout(BOUND, server.request(method, path, body)).await;
    answer.unwrap_or_else(|_| panic!("{method} {path} waits for ever:\n{}", server.log()))
}

#[tokio::test(flavor = "multi_thread")]
async fn every_wait_for_a_hung_engine_ends_and_nothing_is_lost() {
    let mut engine = TestEngine::start_with_gvisor("");
    let host = engine.host();
    let mut server = TestServer::start_with(BINARY, &[("DOCKER_HOST", &host)]).await;
    let create = || server.create(json!({ "network": "isolated" }));
    let made = futures_util::future::join_all([create(), create(), create(), create(), create()]).await;
    let [used, destroyed, stopped, resumed, copied] = made.try_into().unwrap();
    for id in [&used, &destroyed, &stopped, &resumed, &copied] {
        server.bash(id, "echo kept > file").await;
    }
    server.request("POST", &change(&resumed, "stop"), None).await.ok();
    // Also what runs in the sandbox is kept.
    let background = server.begin(&used, "sleep 1000").await;

    tokio::task::block_in_place(|| engine.hang());
    let (stop, resume, copy) =
        (change(&stopped, "stop"), change(&resumed, "resume"), change(&copied, "snapshot"));
    let (destroy, bash) = (format!("{WORKSPACES}/{destroyed}"), change(&used, "bash"));
    let (create, command) = (json!({ "network": "isolated" }), json!({ "command": "cat file" }));
    let answers = tokio::join!(
        ask(&server, "GET", "/health/live", None),
        ask(&server, "GET", "/health/ready", None),
        ask(&server, "GET", WORKSPACES, None),
        ask(&server, "POST", WORKSPACES, Some(create)),
        ask(&server, "POST", &stop, None),
        ask(&server, "POST", &resume, None),
        ask(&server, "POST", &copy, None),
        ask(&server, "DELETE", &destroy, None),
        ask(&server, "POST", &bash, Some(command)),
    );
    let (live, ready, list, create, stop, resume, copy, destroy, bash) = answers;
    for answer in [live, ready, list] {
        answer.ok();
    }
    for (name, answer) in [("create", create), ("stop", stop), ("resume", resume), ("copy", copy)] {
        let text = answer.body["error"]["message"].as_str().unwrap_or_default().to_owned();
        assert!(answer.status >= 500 && text.contains("within"), "{name}: {answer:?}");
    }
    assert_eq!(destroy.error(504), "deadline_exceeded");
    // Its channel goes through the engine.
    assert_eq!(bash.error(502), "sandbox_lost");
    // A server that is started meanwhile says so, and waits for it.
    server.kill();
    server.start_again_unattended(&[]);
    server.wait_until_it_listens().await;
    let listed = ask(&server, "GET", &format!("{WORKSPACES}/providers"), None).await.ok();
    assert!(listed.to_string().contains("did not answer within"), "{listed}");

    tokio::task::block_in_place(|| engine.wake());
    server.wait_until_ready().await;
    // Recovery finishes or undoes the interrupted changes; the rest is as it was.
    let settled = async {
        loop {
            let listed = server.request("GET", WORKSPACES, None).await.ok();
            let all = listed["workspaces"].as_array().unwrap().clone();
            let has = |status: &str| all.iter().filter(|one| one["status"] == status).count();
            if all.len() == 4 && has("ready") == 2 && has("stopped") == 2 {
                break;
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    };
    let in_time = tokio::time::timeout(Duration::from_secs(150), settled).await;
    assert!(in_time.is_ok(), "{:?}\n{}", server.request("GET", WORKSPACES, None).await, server.log());
    assert_eq!(server.bash(&used, "cat file").await, "kept\n");
    let operation = server.request("GET", &background, None).await.ok();
    assert_eq!(operation["status"], "running", "the sandbox was not started again: {operation}");
    for id in [&stopped, &resumed] {
        server.request("POST", &change(id, "resume"), None).await.ok();
    }
    for id in [&stopped, &resumed, &copied] {
        assert_eq!(server.bash(id, "cat file").await, "kept\n");
    }
    for id in [&used, &stopped, &resumed, &copied] {
        server.destroy(id).await;
    }
    server.stop();
}
