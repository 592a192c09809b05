//! Output as server-sent events: complete and in order, with back-pressure, resumed after a broken stream, and ended when the client
//! disconnects.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use emergent_test_support::server::{TestServer, WORKSPACES};
use emergent_test_support::sse::ServerEvent;
use serde_json::json;

const BINARY: &str = env!("CARGO_BIN_EXE_emergent");

fn text(events: &[ServerEvent], stream: &str) -> String {
    events
        .iter()
        .filter(|event| event.name == stream)
        .map(|event| event.data["text"].as_str().unwrap())
        .collect()
}

#[tokio::test]
async fn streamed_command_sends_output_as_it_is_written_and_then_its_result() {
    let server = TestServer::start(BINARY).await;
    let id = server.create(json!({})).await;
    let bash = format!("{WORKSPACES}/{id}/bash");
    // The command writes its second line only after the test has read the first.
    let command = "echo first; while [ ! -e seen ]; do sleep 0.05; done; echo wrong >&2; echo grün; exit 3";
    let mut events = server.events("POST", &bash, Some(json!({ "command": command })), None).await;
    let first = events.next().await.unwrap();
    assert_eq!((first.name.as_str(), &first.data["text"]), ("stdout", &json!("first\n")));
    server.bash(&id, "touch seen").await;
    let rest = events.collect().await;
    assert_eq!((text(&rest, "stdout").as_str(), text(&rest, "stderr").as_str()), ("grün\n", "wrong\n"));
    let result = rest.last().unwrap();
    assert_eq!((result.name.as_str(), &result.data["exit_code"]), ("result", &json!(3)));
    // A command blocks while its client does not read, and no output is lost. The command would end within the five seconds without
    // back-pressure.
    let many = json!({ "command": "seq 4000000; touch done" });
    let mut events = server.events("POST", &bash, Some(many), None).await;
    let begin = events.next().await.unwrap();
    server.bash(&id, "sleep 5; [ ! -e done ]").await;
    let rest = events.collect().await;
    let all = begin.data["text"].as_str().unwrap().to_owned() + &text(&rest, "stdout");
    assert!(all.lines().map(|line| line.parse::<u32>().unwrap()).eq(1..=4_000_000));
    server.bash(&id, "[ -e done ]").await;
    server.destroy(&id).await;
    server.stop();
}

#[tokio::test]
async fn streamed_command_ends_when_its_client_disconnects() {
    let server = TestServer::start(BINARY).await;
    let id = server.create(json!({})).await;
    let bash = format!("{WORKSPACES}/{id}/bash");
    let mut events =
        server.events("POST", &bash, Some(json!({ "command": "echo $$; sleep 1000" })), None).await;
    let pid = events.next().await.unwrap().data["text"].as_str().unwrap().trim().to_owned();
    drop(events);
    server
        .bash(
            &id,
            &format!("for i in $(seq 200); do kill -0 {pid} || break; sleep 0.05; done; ! kill -0 {pid}"),
        )
        .await;
    // A command in the background must not end when its client disconnects. The half second is the time in which it could.
    let operation = server.start_in_background(&id, "echo $$; sleep 1000").await;
    let mut events = server.events("GET", &operation, None, None).await;
    let pid = events.next().await.unwrap().data["text"].as_str().unwrap().trim().to_owned();
    drop(events);
    server.bash(&id, &format!("sleep 0.5; kill -0 {pid}")).await;
    let ended = server.request("DELETE", &operation, None).await.ok();
    assert_eq!((&ended["status"], &ended["signal"]), (&json!("exited"), &json!("SIGTERM")), "{ended}");
    server.bash(&id, &format!("! kill -0 {pid}")).await;
    server.destroy(&id).await;
    server.stop();
}

#[tokio::test]
async fn followed_command_is_resumed_after_its_stream_broke() {
    let mut server = TestServer::start(BINARY).await;
    let id = server.create(json!({})).await;
    let command =
        "echo eins; echo zwei >&2; while [ ! -e go ]; do sleep 0.05; done; echo fünf; echo six >&2; exit 4";
    let operation = server.start_in_background(&id, command).await;
    let mut events = server.events("GET", &operation, None, None).await;
    let first = events.next().await.unwrap();
    assert_eq!((first.name.as_str(), &first.data["text"]), ("stdout", &json!("eins\n")));
    drop(events);
    // The server is killed, and the command continues.
    server.kill();
    server.start_again().await;
    let mut events = server.events("GET", &operation, None, first.id.as_deref()).await;
    let second = events.next().await.unwrap();
    assert_eq!((second.name.as_str(), &second.data["text"]), ("stderr", &json!("zwei\n")));
    server.bash(&id, "touch go").await;
    let rest = events.collect().await;
    assert_eq!((text(&rest, "stdout").as_str(), text(&rest, "stderr").as_str()), ("fünf\n", "six\n"));
    assert_eq!(rest.last().unwrap().data["exit_code"], 4);
    // After its end, the whole output can be read from the start.
    let again = server.events("GET", &operation, None, None).await.collect().await;
    assert_eq!(
        (text(&again, "stdout").as_str(), text(&again, "stderr").as_str()),
        ("eins\nfünf\n", "zwei\nsix\n")
    );
    server.destroy(&id).await;
    server.stop();
}
