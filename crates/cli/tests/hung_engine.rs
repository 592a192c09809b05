//! An engine that hangs: it takes connections and answers nothing. Every call ends within a time limit, calls that need no engine
//! succeed, and no workspace is lost.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::Duration;

use emergent_test_support::engine::TestEngine;
use emergent_test_support::server::{Answer, TestServer, WORKSPACES};
use emergent_test_support::wait::wait_until;
use serde_json::{Value, json};

const BINARY: &str = env!("CARGO_BIN_EXE_emergent");
/// The time limit for a call that waits for the engine, on a busy machine.
const LIMIT: Duration = Duration::from_secs(90);

fn action_path(id: &str, action: &str) -> String {
    format!("{WORKSPACES}/{id}/{action}")
}

async fn ask(server: &TestServer, method: &str, path: &str, body: Option<Value>) -> Answer {
    let answer = tokio::time::timeout(LIMIT, server.request(method, path, body)).await;
    answer.unwrap_or_else(|_| panic!("{method} {path} does not end:\n{}", server.log()))
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_end_and_workspaces_survive_while_the_engine_hangs() {
    let mut engine = TestEngine::start_with_gvisor("");
    let host = engine.host();
    let mut server = TestServer::start_with(BINARY, &[("DOCKER_HOST", &host)]).await;
    let create = || server.create(json!({ "network": "isolated" }));
    let made = futures_util::future::join_all([create(), create(), create(), create(), create()]).await;
    let [used, destroyed, stopped, resumed, copied] = made.try_into().unwrap();
    for id in [&used, &destroyed, &stopped, &resumed, &copied] {
        server.bash(id, "echo kept > file").await;
    }
    server.act(&resumed, "stop").await;
    // Processes in the sandbox continue.
    let background = server.start_in_background(&used, "sleep 1000").await;

    tokio::task::block_in_place(|| engine.freeze());
    let (stop, resume, copy) =
        (action_path(&stopped, "stop"), action_path(&resumed, "resume"), action_path(&copied, "snapshot"));
    let (destroy, bash) = (format!("{WORKSPACES}/{destroyed}"), action_path(&used, "bash"));
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
        let text = answer.message().to_owned();
        assert!(answer.status >= 500 && text.contains("within"), "{name}: {answer:?}");
    }
    assert_eq!(destroy.error(504), "deadline_exceeded");
    // The channel goes through the engine.
    assert_eq!(bash.error(502), "sandbox_lost");
    // A server that starts meanwhile reports the engine, and waits for it.
    server.kill();
    server.start_again_without_waiting(&[]);
    server.wait_until_it_listens().await;
    let listed = ask(&server, "GET", &format!("{WORKSPACES}/providers"), None).await.ok();
    assert!(listed.to_string().contains("did not answer within"), "{listed}");

    tokio::task::block_in_place(|| engine.unfreeze());
    server.wait_until_ready().await;
    // Recovery finishes or undoes the interrupted changes. Other workspaces are unchanged.
    wait_until("two workspaces are ready and two stopped", Duration::from_secs(150), async || {
        let listed = server.request("GET", WORKSPACES, None).await.ok();
        let all = listed["workspaces"].as_array().unwrap();
        let has = |status: &str| all.iter().filter(|one| one["status"] == status).count();
        all.len() == 4 && has("ready") == 2 && has("stopped") == 2
    })
    .await;
    assert_eq!(server.bash(&used, "cat file").await, "kept\n");
    let operation = server.request("GET", &background, None).await.ok();
    assert_eq!(operation["status"], "running", "the sandbox was restarted: {operation}");
    for id in [&stopped, &resumed] {
        server.act(id, "resume").await;
    }
    for id in [&stopped, &resumed, &copied] {
        assert_eq!(server.bash(id, "cat file").await, "kept\n");
    }
    for id in [&used, &stopped, &resumed, &copied] {
        server.destroy(id).await;
    }
    server.stop();
}
