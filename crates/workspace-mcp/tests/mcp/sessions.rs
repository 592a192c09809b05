//! Sessions of legacy clients: how many, how long, and who may use them.

use std::sync::Arc;
use std::time::Duration;

use crate::support::Fake;
use crate::support::client::{Client, LEGACY, Messages, initialize, only};
use emergent_workspace_mcp::{Config, WorkspaceMcp};
use http::StatusCode;
use http_body_util::BodyExt as _;
use serde_json::json;

/// Whether a session can be used.
async fn lives(client: &Client) -> bool {
    let messages = client.send(9, "ping", json!({})).await;
    assert!(matches!(messages.status, StatusCode::OK | StatusCode::NOT_FOUND), "{}", messages.status);
    messages.status == StatusCode::OK
}

async fn clients(mcp: &Arc<WorkspaceMcp>, count: usize) -> Vec<Client> {
    let mut clients = Vec::new();
    for _ in 0..count {
        clients.push(Client::connect(mcp, LEGACY).await);
    }
    clients
}

#[tokio::test]
async fn a_session_ends_when_the_client_says_so() {
    let (fake, mcp) = Fake::default().serve(Config::default());
    let client = Client::connect(&mcp, LEGACY).await;
    assert!(lives(&client).await);
    let mut stream = client.listen().await;
    let mut call =
        client.send(5, "tools/call", json!({"name": "bash", "arguments": {"command": "listen"}})).await;
    fake.until_running(1).await;
    assert_eq!(client.delete().await, StatusCode::NO_CONTENT);
    fake.until_dropped(1).await;
    assert_eq!(call.next().await, None);
    while stream.frame().await.is_some() {}
    assert!(!lives(&client).await);
    assert_eq!(client.delete().await, StatusCode::NOT_FOUND);
    assert_eq!(client.listen().await.status(), StatusCode::NOT_FOUND);
    assert!(mcp.is_idle());
}

#[tokio::test]
async fn a_session_is_of_one_workspace() {
    let (_, mcp) = Fake::default().serve(Config::default());
    let (_, other) = Fake::default().serve(Config::default());
    let mut client = Client::connect(&mcp, LEGACY).await;
    client.mcp = other;
    assert!(!lives(&client).await);
    client.session = None;
    assert_eq!(client.send(9, "ping", json!({})).await.status, StatusCode::BAD_REQUEST);
}

#[tokio::test]
async fn a_new_session_takes_the_place_of_the_one_not_used_for_longest() {
    let (fake, mcp) = Fake::default().serve(Config { sessions: 3, ..Config::default() });
    let old = clients(&mcp, 3).await;
    // The first runs a command, the second has just been used.
    let _call =
        old[0].send(5, "tools/call", json!({"name": "bash", "arguments": {"command": "listen"}})).await;
    fake.until_running(1).await;
    assert!(lives(&old[1]).await);
    let new = Client::connect(&mcp, LEGACY).await;
    for (client, expected) in [(&old[0], true), (&old[1], true), (&old[2], false), (&new, true)] {
        assert_eq!(lives(client).await, expected);
    }
    assert_eq!(*fake.dropped.borrow(), 0);
}

#[tokio::test]
async fn sessions_with_running_calls_are_not_ended_for_others() {
    let (fake, mcp) = Fake::default().serve(Config { sessions: 2, ..Config::default() });
    let old = clients(&mcp, 2).await;
    let mut calls = Vec::new();
    for client in &old {
        let params = json!({"name": "bash", "arguments": {"command": "listen"}});
        calls.push(client.send(5, "tools/call", params).await);
    }
    fake.until_running(2).await;
    let (response, session) = initialize(&mcp, LEGACY).await;
    assert_eq!((response.status(), session), (StatusCode::TOO_MANY_REQUESTS, None));
    assert_eq!(only(response).await["error"]["code"], -32000);
    assert!(lives(&old[0]).await && lives(&old[1]).await);
    assert_eq!(old[1].delete().await, StatusCode::NO_CONTENT);
    Client::connect(&mcp, LEGACY).await;
}

#[tokio::test(start_paused = true)]
async fn an_idle_session_ends() {
    let idle = Duration::from_secs(60);
    let (fake, mcp) = Fake::default().serve(Config { session_idle: idle, ..Config::default() });
    let [quiet, calling, listening] = clients(&mcp, 3).await.try_into().ok().unwrap();
    let params = json!({"name": "bash", "arguments": {"command": "listen"}});
    let mut call = calling.send(5, "tools/call", params).await;
    let stream = listening.listen().await;
    tokio::time::sleep(idle / 2).await;
    assert!(lives(&quiet).await);
    tokio::time::sleep(idle * 3 / 4).await;
    assert!(lives(&quiet).await);
    tokio::time::sleep(idle * 5).await;
    assert!(!lives(&quiet).await);
    // A command that says nothing for long is no idleness, nor is a client that listens.
    assert!(lives(&calling).await && lives(&listening).await);
    fake.end();
    assert_eq!(call.next().await.unwrap()["id"], 5);
    drop(stream);
    tokio::time::sleep(idle * 2).await;
    assert!(!lives(&calling).await && !lives(&listening).await);
    assert!(mcp.is_idle());
    assert_eq!(*fake.dropped.borrow(), 0);
}

#[tokio::test]
async fn a_client_that_lost_its_connection_gets_the_answer_when_it_comes_back() {
    let (fake, mcp) = Fake::default().serve(Config::default());
    let client = Client::connect(&mcp, LEGACY).await;
    let params = json!({"name": "bash", "arguments": {"command": "listen"}});
    let lost = client.send(5, "tools/call", params).await;
    fake.until_running(1).await;
    drop(lost);
    let request = crate::support::client::message("GET")
        .header("mcp-session-id", client.session.as_deref().unwrap())
        .header("last-event-id", "0/0");
    let response = mcp.handle(request.body(http_body_util::Full::<bytes::Bytes>::default()).unwrap()).await;
    let mut resumed = Messages::of(response);
    fake.say("late\n");
    fake.end();
    let answer = resumed.next().await.unwrap();
    assert_eq!(answer["id"], 5);
    assert_eq!(answer["result"]["structuredContent"]["stdout"], "late\n");
}

#[tokio::test]
async fn only_clients_that_know_them_get_events_without_a_message() {
    let (_, mcp) = Fake::default().serve(Config::default());
    for (version, expected) in [("2025-03-26", 0), ("2025-06-18", 0), (LEGACY, 1)] {
        let client = Client::connect(&mcp, version).await;
        let mut messages = client.send(5, "tools/list", json!({})).await;
        while messages.next().await.is_some() {}
        assert_eq!(messages.priming, expected, "{version}");
    }
}
